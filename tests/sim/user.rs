//! Who uses the locks: threads of simulated processes, that take them in all the ways there are and look at what they got.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    rc::Rc,
    sync::Arc,
    time::Duration,
};

use crossbeam_channel::TryRecvError;
use distlock::{
    Config, FailedEvent, HandleEvent, LockError, LockGuard, LockId, LockLost, LockOptions, LostEvent, RedisMgr,
    ReleasedEvent, RenewalFailedEvent, Result, TimedOutEvent,
};
use parking_lot::Mutex;

use super::{
    calm::Weather,
    judge::{Belief, Judge},
    plan::Plan,
    world::{MS, SEC, Sim, Time, here},
};

/// Longer than anybody holds a lock.
pub(crate) const HOLD_MAX: Time = SEC;

/// What a process was told of its locks.
#[derive(Debug, Default)]
pub(crate) struct Ear {
    process: usize,
    /// The longest lease.
    ttl: Time,
    /// Losses and renewals that failed, each with what the world was like.
    bad_news: Mutex<BTreeMap<String, Vec<(Weather, Bad)>>>,
    lost: Mutex<BTreeMap<String, u32>>,
    released: Mutex<BTreeMap<String, u32>>,
    /// When asking came to nothing.
    failed: Mutex<BTreeMap<String, Time>>,
}

#[derive(Clone, Debug)]
pub(crate) enum Bad {
    Renewal(String),
    Loss(LockLost),
}

impl Bad {
    pub(crate) fn words(&self) -> String {
        match self {
            Bad::Renewal(why) => format!("a renewal failed: {why}"),
            Bad::Loss(why) => format!("lost: {why}"),
        }
    }
}

impl HandleEvent for Ear {
    fn renewal_failed(&self, event: &RenewalFailedEvent<'_>) {
        self.note(event.id(), Bad::Renewal(event.why().to_owned()));
    }

    fn lost(&self, event: &LostEvent<'_>) {
        self.note(event.id(), Bad::Loss(event.why().clone()));
        *self.lost.lock().entry(event.id().to_string()).or_default() += 1;
    }

    fn released(&self, event: &ReleasedEvent<'_>) {
        *self.released.lock().entry(event.id().to_string()).or_default() += 1;
    }

    fn timed_out(&self, event: &TimedOutEvent<'_>) {
        self.failed.lock().insert(event.id().to_string(), here().now.get());
    }

    fn failed(&self, event: &FailedEvent<'_>) {
        self.failed.lock().insert(event.id().to_string(), here().now.get());
    }
}

impl Ear {
    pub(crate) fn new(process: usize, ttl: Time) -> Ear {
        Ear { process, ttl, ..Ear::default() }
    }

    fn note(&self, id: &LockId, news: Bad) {
        let weather = here().weather(self.process, self.ttl);
        self.bad_news.lock().entry(id.to_string()).or_default().push((weather, news));
    }

    fn bad_news(&self, id: &LockId) -> Vec<(Weather, Bad)> {
        self.bad_news.lock().remove(id.as_str()).unwrap_or_default()
    }

    /// When asking under this identifier came to nothing.
    pub(crate) fn gave_up(&self, id: &str) -> Option<Time> {
        self.failed.lock().get(id).copied()
    }

    fn heard(&self, id: &LockId) -> (u32, u32) {
        let times = |table: &Mutex<BTreeMap<String, u32>>| table.lock().get(id.as_str()).copied().unwrap_or(0);
        (times(&self.lost), times(&self.released))
    }
}

/// The run that everybody is part of.
pub(crate) struct Stage {
    pub(crate) sim: Rc<Sim>,
    pub(crate) judge: Judge,
    pub(crate) plan: Plan,
    /// Nothing goes wrong any more, and everybody takes each lock once more.
    pub(crate) calm: Cell<bool>,
    /// The threads that have to come to their ends, with their processes.
    pub(crate) users: RefCell<Vec<(usize, usize)>>,
    /// Processes that are to come up again.
    pub(crate) coming: Cell<u32>,
    pub(crate) ears: RefCell<Vec<Arc<Ear>>>,
}

/// On what terms a lock is held.
struct Terms {
    asked_at: Time,
    lease: Time,
    renewed: bool,
}

/// A thread of a user.
pub(crate) struct User {
    pub(crate) stage: Rc<Stage>,
    pub(crate) mgr: RedisMgr,
    pub(crate) ear: Arc<Ear>,
    pub(crate) process: usize,
}

pub(crate) fn span(time: Time) -> Duration {
    Duration::from_nanos(time)
}

pub(crate) fn config(plan: &Plan, ear: &Arc<Ear>) -> Config {
    Config::nodes((0..plan.nodes).map(|node| format!("redis://10.0.0.{node}")))
        .ttl(span(plan.ttl))
        .operation_timeout(span(plan.operation_timeout))
        .claim_window(span(plan.claim_window))
        .pool_size(plan.pool_size)
        .spin(Duration::ZERO)
        .event_handler(ear.clone())
}

impl User {
    fn sim(&self) -> &Sim {
        &self.stage.sim
    }

    fn frozen(&self) -> Time {
        self.sim().frozen(self.process)
    }

    /// Runs something that has to be back in time.
    fn timed<T>(&self, what: &str, bound: Option<Time>, call: impl FnOnce() -> T) -> T {
        let (began, frozen) = (self.sim().now.get(), self.frozen());
        let outcome = call();
        if let (Some(bound), false) = (bound, self.sim().is_over()) {
            let took = self.sim().now.get() - began;
            self.stage.judge.took(self.sim(), what, took, bound, self.frozen() - frozen);
        }
        outcome
    }

    pub(crate) fn run(self) {
        while !self.stage.calm.get() && !self.sim().is_over() {
            self.once();
            let pause = self.sim().between(0, 60 * MS);
            self.sim().sleep(pause);
        }
        // What was lost or held up before is under way still, and may keep every connection.
        self.sim().sleep(self.stage.plan.link.again + self.stage.plan.stalls.long);
        for number in 0..self.stage.plan.names {
            self.last(&name(number));
        }
    }

    /// Everything is well again: nobody is kept out of a lock for good.
    fn last(&self, name: &str) {
        let plan = &self.stage.plan;
        let everybody = (plan.processes * plan.threads * 2) as Time;
        // What a dead process left is over after its lease, and its places in line after a claim window each.
        let bound = 4 * plan.ttl + everybody * (plan.claim_window + HOLD_MAX) + 5 * SEC;
        let asked_at = self.sim().now.get();
        match self.timed("a lock that everybody lets go of", Some(bound), || self.mgr.lock(name)) {
            Ok(guard) => {
                self.stage.judge.note("granted in the end");
                self.keep(name, guard, Terms { asked_at, lease: plan.ttl, renewed: true }, 5 * MS);
            }
            Err(error) if !self.sim().is_over() => self.sim().wrong(format!("all is well, and yet: {error}")),
            Err(_) => {}
        }
    }

    fn once(&self) {
        let (sim, plan) = (self.sim(), &self.stage.plan);
        let name = name(sim.rng.borrow_mut().usize(..plan.names));
        let kind = sim.between(0, 9);
        let wait = sim.between(0, 2 * plan.ttl);
        let o = plan.operation_timeout;
        sim.say(|| format!("process {} asks for {name} ({kind}, {} ms)", self.process, wait / MS));
        let asked_at = sim.now.get();
        let wide = |options: LockOptions| options.wait(span(wait));
        let outcome = match kind {
            0 | 1 => self.timed("try_lock", Some(o), || self.mgr.try_lock(&name)),
            2 | 3 => self.timed("try_lock_for", Some(wait + o), || self.mgr.try_lock_for(&name, span(wait))),
            4 => {
                let options = wide(LockOptions::new().renew(false));
                self.timed("lock_with", Some(wait + o), || self.mgr.lock_with(&name, &options))
            }
            5 => {
                let options = wide(LockOptions::new().max_hold(span(plan.ttl / 2)));
                self.timed("lock_with", Some(wait + o), || self.mgr.lock_with(&name, &options))
            }
            6 => {
                let options = wide(LockOptions::new().ttl(span(plan.ttl / 2)));
                self.timed("lock_with", Some(wait + o), || self.mgr.lock_with(&name, &options))
            }
            7 => {
                let seen = self.timed("holder", Some(o), || self.mgr.holder(&name).map(drop));
                return self.judge_error(seen.err().as_ref());
            }
            _ => self.timed("lock", None, || self.mgr.lock(&name)),
        };
        self.judge_error(outcome.as_ref().err());
        if let Ok(guard) = outcome {
            let longest = if sim.chance(200_000) { HOLD_MAX } else { plan.ttl / 2 };
            let hold = sim.between(0, longest);
            let lease = if kind == 6 { plan.ttl / 2 } else { plan.ttl };
            self.keep(&name, guard, Terms { asked_at, lease, renewed: kind != 4 }, hold);
        }
    }

    /// Errors tell what can be.
    fn judge_error(&self, error: Option<&LockError>) {
        let Some(error) = error else { return };
        self.sim().say(|| format!("process {}: {error}", self.process));
        self.stage.judge.note(match error {
            LockError::Held { .. } => "held",
            LockError::Timeout { .. } => "timeout",
            LockError::Unavailable { .. } => "unavailable",
            LockError::NoQuorum { .. } => "no quorum",
            LockError::PoolExhausted { .. } => "pool exhausted",
            LockError::Refused { .. } => "refused",
            other if !self.sim().is_over() => {
                self.sim().wrong(format!("an error that cannot be: {other}"));
                "other"
            }
            _ => "over",
        });
    }

    /// Holds a lock for a while, looking at it, and lets go of it in one way or another.
    fn keep(&self, name: &str, guard: LockGuard, terms: Terms, hold: Time) {
        let (sim, judge) = (self.sim(), &self.stage.judge);
        if sim.is_over() {
            return;
        }
        let news = guard.lost().clone();
        let belief = Rc::new(Belief {
            process: self.process,
            name: name.to_owned(),
            id: guard.id().clone(),
            token: guard.fencing_token().into(),
            asked_at: terms.asked_at,
            lease: terms.lease,
            kept: RefCell::default(),
            guard: RefCell::new(Some(guard)),
            over: Cell::new(false),
        });
        judge.granted(sim, &belief);
        let granted_at = sim.now.get();
        let until = sim.now.get() + hold;
        while sim.now.get() < until && judge.believes(sim, &belief) {
            let beat = sim.between(1, 1 + hold / 3);
            // To look takes its time, too.
            sim.sleep(beat.min(until.saturating_sub(sim.now.get())));
        }
        if sim.is_over() {
            return drop(belief.guard.take());
        }
        let believed = judge.believes(sim, &belief);
        judge.note(if believed { "held to the end" } else { "lost" });
        let told = news.try_recv();
        if believed == told.is_ok() {
            sim.wrong(format!("{name} is held: {believed}, and its holder was told {told:?}"));
        }
        let Some(guard) = belief.guard.take() else { return };
        sim.say(|| format!("process {} lets go of {name} (token {}, held: {believed})", self.process, belief.token));
        let (o, until) = (self.stage.plan.operation_timeout, sim.now.get());
        if sim.chance(500_000) {
            drop(self.timed("release", Some(o), || guard.release()));
        } else {
            self.timed("drop", Some(o), || drop(guard));
        }
        if sim.is_over() {
            return;
        }
        match news.try_recv() {
            Err(TryRecvError::Disconnected) => {}
            other => sim.wrong(format!("after the end of {name} its holder was told {other:?}")),
        }
        for told in self.ear.bad_news(&belief.id) {
            let justified = match &told {
                (_, Bad::Loss(LockLost::MaxHold)) => true,
                // Unless it was not even kept for what it was taken for.
                (weather, Bad::Loss(LockLost::Expired)) => !terms.renewed && weather.at >= granted_at + terms.lease / 2,
                _ => false,
            };
            if !justified {
                judge.told(sim, &self.stage.plan, &belief, until, &told);
            }
        }
        let (lost, released) = self.ear.heard(&belief.id);
        if lost + released != 1 || (!believed && lost != 1) {
            sim.wrong(format!("{name} was lost {lost} times and released {released} times; held: {believed}"));
        }
    }
}

pub(crate) fn name(number: usize) -> String {
    ["a", "b"][number].to_owned()
}

/// A process comes up.
pub(crate) fn begin(stage: &Rc<Stage>, process: usize, ear: &Arc<Ear>) -> Result<RedisMgr> {
    let bound = stage.plan.operation_timeout;
    let (began, frozen) = (stage.sim.now.get(), stage.sim.frozen(process));
    let mgr = RedisMgr::new(config(&stage.plan, ear));
    if !stage.sim.is_over() {
        let took = stage.sim.now.get() - began;
        stage.judge.took(&stage.sim, "RedisMgr::new", took, bound, stage.sim.frozen(process) - frozen);
    }
    mgr
}
