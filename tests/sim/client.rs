//! The clients: threads of simulated processes that acquire locks in every way that the library
//! offers, and check what they get.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    rc::Rc,
    sync::Arc,
    time::Duration,
};

use crossbeam_channel::TryRecvError;
use distlock::{
    Config, FailedEvent, HandleEvent, LockError, LockGuard, LockId, LockLost, LockOptions,
    LostEvent, RedisMgr, ReleasedEvent, RenewalFailedEvent, Result, TimedOutEvent, WriteGuard,
};
use parking_lot::Mutex;

use super::{
    fault_free::FaultSummary,
    invariants::GuardRecord,
    kinds::{Guard, Kind},
    run::Run,
    scenario::Scenario,
    world::{MS, SEC, Sim, Time, current_sim},
};

/// Maximum time for which a client holds a lock.
pub(crate) const HOLD_MAX: Time = SEC;

/// Identifies a hold. Threads of a process that hand a lock over have one id.
fn hold_of(id: &LockId, token: u64) -> String {
    format!("{id} {token}")
}

/// The events that a process has received about its locks.
#[derive(Debug, Default)]
pub(crate) struct EventLog {
    process: usize,
    /// The longest lease.
    ttl: Time,
    /// Losses and failed renewals, each with the faults until then.
    incidents: Mutex<BTreeMap<String, Vec<(FaultSummary, Incident)>>>,
    lost: Mutex<BTreeMap<String, u32>>,
    released: Mutex<BTreeMap<String, u32>>,
    /// When a request for a lock failed.
    failed: Mutex<BTreeMap<String, Time>>,
}

#[derive(Clone, Debug)]
pub(crate) enum Incident {
    RenewalFailed(String),
    Lost(LockLost),
}

impl Incident {
    pub(crate) fn text(&self) -> String {
        match self {
            Incident::RenewalFailed(why) => format!("a renewal failed: {why}"),
            Incident::Lost(why) => format!("lost: {why}"),
        }
    }
}

impl HandleEvent for EventLog {
    fn renewal_failed(&self, event: &RenewalFailedEvent<'_>) {
        self.add_incident(event.id(), Incident::RenewalFailed(event.why().to_owned()));
    }

    fn lost(&self, event: &LostEvent<'_>) {
        self.add_incident(event.id(), Incident::Lost(event.why().clone()));
        *self.lost.lock().entry(hold_of(event.id(), event.token().into())).or_default() += 1;
    }

    fn released(&self, event: &ReleasedEvent<'_>) {
        *self.released.lock().entry(hold_of(event.id(), event.token().into())).or_default() += 1;
    }

    fn timed_out(&self, event: &TimedOutEvent<'_>) {
        self.failed.lock().insert(event.id().to_string(), current_sim().now.get());
    }

    fn failed(&self, event: &FailedEvent<'_>) {
        self.failed.lock().insert(event.id().to_string(), current_sim().now.get());
    }
}

impl EventLog {
    pub(crate) fn new(process: usize, ttl: Time) -> EventLog {
        EventLog { process, ttl, ..EventLog::default() }
    }

    fn add_incident(&self, id: &LockId, incident: Incident) {
        let faults = current_sim().fault_summary(self.process, self.ttl);
        self.incidents.lock().entry(id.to_string()).or_default().push((faults, incident));
    }

    fn take_incidents(&self, id: &LockId) -> Vec<(FaultSummary, Incident)> {
        self.incidents.lock().remove(id.as_str()).unwrap_or_default()
    }

    /// When the request with this lock identifier failed.
    pub(crate) fn failed_at(&self, id: &str) -> Option<Time> {
        self.failed.lock().get(id).copied()
    }

    fn losses_and_releases(&self, hold: &str) -> (u32, u32) {
        let count =
            |table: &Mutex<BTreeMap<String, u32>>| table.lock().get(hold).copied().unwrap_or(0);
        (count(&self.lost), count(&self.released))
    }
}

/// How a lock is held.
#[derive(Clone, Copy)]
struct HoldTerms {
    kind: Kind,
    requested_at: Time,
    lease: Time,
    renewed: bool,
    /// The lock has a token of its own, and not that of the writer that has become a reader.
    has_new_token: bool,
}

/// One thread of a client process.
pub(crate) struct Client {
    pub(crate) run: Rc<Run>,
    pub(crate) mgr: RedisMgr,
    pub(crate) event_log: Arc<EventLog>,
    pub(crate) process: usize,
}

pub(crate) fn duration(time: Time) -> Duration {
    Duration::from_nanos(time)
}

pub(crate) fn config(scenario: &Scenario, event_log: &Arc<EventLog>) -> Config {
    let nodes = Config::nodes((0..scenario.nodes).map(|node| format!("redis://10.0.0.{node}")));
    let config = if scenario.durable { nodes.quarantine(Duration::ZERO) } else { nodes };
    config
        .ttl(duration(scenario.ttl))
        .operation_timeout(duration(scenario.operation_timeout))
        .claim_window(duration(scenario.claim_window))
        .pool_size(scenario.pool_size)
        .spin(Duration::ZERO)
        .event_handler(event_log.clone())
}

impl Client {
    fn sim(&self) -> &Sim {
        &self.run.sim
    }

    fn suspended_total(&self) -> Time {
        self.sim().suspended_total(self.process)
    }

    /// Makes a call, and checks that it returns within `bound`.
    fn timed<T>(&self, what: &str, bound: Option<Time>, call: impl FnOnce() -> T) -> T {
        let (began, suspended) = (self.sim().now.get(), self.suspended_total());
        let outcome = call();
        if let (Some(bound), false) = (bound, self.sim().is_shutting_down()) {
            let took = self.sim().now.get() - began;
            let suspended = self.suspended_total() - suspended;
            self.run.invariants.check_duration(self.sim(), what, took, bound, suspended);
        }
        outcome
    }

    pub(crate) fn work(self) {
        while !self.run.fault_free.get() && !self.sim().is_shutting_down() {
            self.do_one_round();
            let pause = self.sim().between(0, 60 * MS);
            self.sim().sleep(pause);
        }
        // Packets that were lost or held up before are still on their way, and can keep all
        // connections busy.
        let Scenario { link, stalls, .. } = &self.run.scenario;
        self.sim().sleep(link.retransmit_after + stalls.long_max);
        for number in 0..self.run.scenario.names {
            self.do_last_round(&name(number));
        }
    }

    /// After all faults, every client gets every lock.
    fn do_last_round(&self, name: &str) {
        let scenario = &self.run.scenario;
        let clients = (scenario.processes * scenario.threads * 2) as Time;
        // The leases of crashed processes must expire, and their queue entries cost a claim window
        // each.
        let bound = 4 * scenario.ttl + clients * (scenario.claim_window + HOLD_MAX) + 5 * SEC;
        let requested_at = self.sim().now.get();
        let kind = scenario.family.next_kind(&mut self.sim().rng.borrow_mut());
        let (lease, renewed, has_new_token) = (scenario.ttl, true, true);
        let terms = HoldTerms { kind, requested_at, lease, renewed, has_new_token };
        let acquire = || kind.acquire(&self.mgr, name, &LockOptions::new());
        match self.timed("lock, after all faults", Some(bound), acquire) {
            Ok(guard) => {
                self.run.invariants.count("granted after all faults");
                self.hold(name, guard, terms, 5 * MS);
            }
            Err(error) if !self.sim().is_shutting_down() => {
                self.sim().violation(format!("there is no fault, but: {error}"))
            }
            Err(_) => {}
        }
    }

    fn do_one_round(&self) {
        let (sim, scenario) = (self.sim(), &self.run.scenario);
        let name = name(sim.rng.borrow_mut().usize(..scenario.names));
        let kind = scenario.family.next_kind(&mut sim.rng.borrow_mut());
        let way = sim.between(0, 9);
        let wait = sim.between(0, 2 * scenario.ttl);
        let timeout = scenario.operation_timeout;
        sim.log(|| {
            let (process, wait) = (self.process, wait / MS);
            format!("process {process} requests {name} ({kind:?}, way {way}, {wait} ms)")
        });
        let requested_at = sim.now.get();
        let waiting = LockOptions::new().wait(duration(wait));
        let (what, bound, options) = match way {
            0 | 1 => ("try", Some(timeout), LockOptions::new().wait(Duration::ZERO)),
            2 | 3 => ("try for", Some(wait + timeout), waiting),
            4 => ("without renewal", Some(wait + timeout), waiting.renew(false)),
            5 => {
                let options = waiting.max_hold(duration(scenario.ttl / 2));
                ("max hold", Some(wait + timeout), options)
            }
            6 => ("short ttl", Some(wait + timeout), waiting.ttl(duration(scenario.ttl / 2))),
            7 => {
                let holder =
                    self.timed("holder", Some(timeout), || self.mgr.holder(&name).map(drop));
                return self.check_error(holder.err().as_ref());
            }
            _ => ("lock", None, LockOptions::new()),
        };
        let outcome = self.timed(what, bound, || kind.acquire(&self.mgr, &name, &options));
        self.check_error(outcome.as_ref().err());
        if let Ok(guard) = outcome {
            let longest = if sim.chance(200_000) { HOLD_MAX } else { scenario.ttl / 2 };
            let hold = sim.between(0, longest);
            let lease = if way == 6 { scenario.ttl / 2 } else { scenario.ttl };
            let (renewed, has_new_token) = (way != 4, true);
            let terms = HoldTerms { kind, requested_at, lease, renewed, has_new_token };
            self.hold(&name, guard, terms, hold);
        }
    }

    /// Checks that an error is of an expected kind.
    fn check_error(&self, error: Option<&LockError>) {
        let Some(error) = error else { return };
        self.sim().log(|| format!("process {}: {error}", self.process));
        self.run.invariants.count(match error {
            LockError::Held { .. } => "held",
            LockError::Timeout { .. } => "timeout",
            LockError::Unavailable { .. } => "unavailable",
            LockError::NoQuorum { .. } => "no quorum",
            LockError::PoolExhausted { .. } => "pool exhausted",
            LockError::Refused { .. } => "refused",
            // Only of calls that change a held lock.
            LockError::Lost { .. } => "lost while it was passed on",
            other if !self.sim().is_shutting_down() => {
                self.sim().violation(format!("unexpected error: {other}"));
                "other"
            }
            _ => "shutting down",
        });
    }

    /// Holds a lock for a while, checks it meanwhile, and releases or drops it.
    fn hold(&self, name: &str, guard: Guard, terms: HoldTerms, hold: Time) {
        let (sim, invariants) = (self.sim(), &self.run.invariants);
        if sim.is_shutting_down() {
            return;
        }
        let losses = guard.lost().clone();
        let record = Rc::new(GuardRecord {
            process: self.process,
            name: name.to_owned(),
            id: guard.id().clone(),
            token: guard.fencing_token().into(),
            kind: terms.kind,
            has_new_token: terms.has_new_token,
            requested_at: terms.requested_at,
            asked_servers_at: invariants.first_request(guard.id(), terms.requested_at),
            lease: terms.lease,
            presence: RefCell::default(),
            guard: RefCell::new(Some(guard)),
            reported_lost: Cell::new(false),
        });
        invariants.granted(sim, &record);
        let granted_at = sim.now.get();
        let until = sim.now.get() + hold;
        while sim.now.get() < until && invariants.is_held(sim, &record) {
            let pause = sim.between(1, 1 + hold / 3);
            // Saturating, because `is_held` advances the clock while the simulator shuts down.
            sim.sleep(pause.min(until.saturating_sub(sim.now.get())));
        }
        if sim.is_shutting_down() {
            return drop(record.guard.take());
        }
        let held = invariants.is_held(sim, &record);
        invariants.count(if held { "held until released" } else { "lost" });
        let loss = losses.try_recv();
        if held == loss.is_ok() {
            sim.violation(format!(
                "{name} is held: {held}, but its channel of losses returned {loss:?}"
            ));
        }
        let Some(guard) = record.guard.take() else { return };
        invariants.ended(sim, &record);
        let until = sim.now.get();
        let check_incidents = || {
            for entry in self.event_log.take_incidents(&record.id) {
                let expected = match &entry {
                    (_, Incident::Lost(LockLost::MaxHold)) => true,
                    // A lock without renewal expires after its lease, but not long before.
                    (faults, Incident::Lost(LockLost::Expired)) => {
                        !terms.renewed && faults.at >= granted_at + terms.lease / 2
                    }
                    _ => false,
                };
                if !expected {
                    invariants.check_incident(sim, &self.run.scenario, &record, until, &entry);
                }
            }
        };
        check_incidents();
        let (mut is_passed_on, mut may_be_lost) = (false, true);
        match guard {
            Guard::Writer(writer) if held && sim.chance(400_000) => {
                if let Some(reader) = self.downgrade(writer) {
                    let terms = HoldTerms { kind: Kind::Read, has_new_token: false, ..terms };
                    return self.hold(name, Guard::Other(reader), terms, hold / 2);
                }
            }
            Guard::Other(guard) if held && self.can_adopt() && sim.chance(150_000) => {
                is_passed_on = self.pass_on(name, guard, terms, hold / 2);
            }
            guard => {
                may_be_lost = false;
                self.release(name, guard.into(), &record, held);
            }
        }
        if sim.is_shutting_down() {
            return;
        }
        match losses.try_recv() {
            Err(TryRecvError::Disconnected) => {}
            // A renewal before the lock is passed on, or the wait for it, has found the loss.
            Ok(_) if may_be_lost => {}
            other => sim
                .violation(format!("after {name} ended, its channel of losses returned {other:?}")),
        }
        check_incidents();
        let (lost, released) =
            self.event_log.losses_and_releases(&hold_of(&record.id, record.token));
        if lost + released + u32::from(is_passed_on) != 1 || (!held && lost != 1) {
            sim.violation(format!(
                "{name} was lost {lost} times and released {released} times; held: {held}, passed \
                 on: {is_passed_on}"
            ));
        }
    }

    fn release(&self, name: &str, guard: LockGuard, record: &GuardRecord, held: bool) {
        let (sim, timeout) = (self.sim(), self.run.scenario.operation_timeout);
        let (process, token) = (self.process, record.token);
        sim.log(|| format!("process {process} releases {name} (token {token}, held: {held})"));
        if sim.chance(500_000) {
            drop(self.timed("release", Some(timeout), || guard.release()));
        } else {
            self.timed("drop", Some(timeout), || drop(guard));
        }
    }

    /// Turns a writer into a reader. Afterwards the lock is not held if that fails.
    fn downgrade(&self, writer: WriteGuard) -> Option<LockGuard> {
        self.sim().log(|| format!("process {} downgrades {}", self.process, writer.name()));
        let bound = 2 * self.run.scenario.operation_timeout;
        let outcome = self.timed("downgrade", Some(bound), || writer.downgrade());
        self.check_error(outcome.as_ref().err());
        self.run.invariants.count("downgraded");
        outcome.ok().map(LockGuard::from)
    }

    /// Whether the servers can pass a lock to a successor.
    fn can_adopt(&self) -> bool {
        self.run.scenario.nodes == 1
    }

    /// Detaches a lock, and holds it as its own successor. Returns whether it was detached.
    fn pass_on(&self, name: &str, guard: LockGuard, terms: HoldTerms, hold: Time) -> bool {
        self.sim().log(|| format!("process {} detaches {name}", self.process));
        let bound = 2 * self.run.scenario.operation_timeout;
        let detached = self.timed("detach", Some(bound), || guard.detach());
        self.check_error(detached.as_ref().err());
        let Ok(detached) = detached else { return false };
        let requested_at = self.sim().now.get();
        let adopted = self.timed("adopt", Some(bound), || self.mgr.adopt(&detached));
        self.check_error(adopted.as_ref().err());
        if let Ok(guard) = adopted {
            self.run.invariants.count("adopted");
            let (renewed, has_new_token) = (true, true);
            let terms = HoldTerms { requested_at, renewed, has_new_token, ..terms };
            self.hold(name, Guard::Other(guard), terms, hold);
        }
        true
    }
}

pub(crate) fn name(number: usize) -> String {
    ["a", "b"][number].to_owned()
}

/// Creates the manager of a process.
pub(crate) fn new_manager(
    run: &Rc<Run>,
    process: usize,
    event_log: &Arc<EventLog>,
) -> Result<RedisMgr> {
    let bound = run.scenario.operation_timeout;
    let (began, suspended) = (run.sim.now.get(), run.sim.suspended_total(process));
    let mgr = RedisMgr::new(config(&run.scenario, event_log));
    if !run.sim.is_shutting_down() {
        let took = run.sim.now.get() - began;
        let suspended = run.sim.suspended_total(process) - suspended;
        run.invariants.check_duration(&run.sim, "RedisMgr::new", took, bound, suspended);
    }
    mgr
}
