//! What must be true at every moment, and at the end.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    rc::Rc,
};

use distlock::{LockGuard, LockId};

use super::{
    calm::{Kept, SILENCE, Weather},
    plan::Plan,
    user::Bad,
    world::{Life, Sim, Time},
};

/// A guard that somebody holds, or has let go of.
pub(crate) struct Belief {
    pub(crate) process: usize,
    pub(crate) name: String,
    pub(crate) id: LockId,
    pub(crate) token: u64,
    /// When the lock was asked for: what was forgotten since may have been this.
    pub(crate) asked_at: Time,
    /// For how long it is kept without a renewal.
    pub(crate) lease: Time,
    /// By each node.
    pub(crate) kept: RefCell<Vec<Kept>>,
    pub(crate) guard: RefCell<Option<LockGuard>>,
    /// Somebody was told that it is not held any more.
    pub(crate) over: Cell<bool>,
}

#[derive(Default)]
pub(crate) struct Judge {
    pub(crate) beliefs: RefCell<Vec<Rc<Belief>>>,
    /// The last token of each name.
    tokens: RefCell<BTreeMap<String, u64>>,
    /// Whether a node that forgets may vote at once.
    pub(crate) forgetting_is_excused: Cell<bool>,
    pub(crate) count: RefCell<BTreeMap<&'static str, u64>>,
}

impl Judge {
    pub(crate) fn note(&self, what: &'static str) {
        *self.count.borrow_mut().entry(what).or_default() += 1;
    }

    /// Whether its holder believes in it now.
    pub(crate) fn believes(&self, sim: &Sim, belief: &Belief) -> bool {
        if sim.life(belief.process) == Life::Dead {
            return false;
        }
        let guard = belief.guard.borrow();
        let held = guard.as_ref().is_some_and(|guard| sim.as_process(belief.process, || guard.is_held()));
        if held && belief.over.get() {
            sim.wrong(format!("{} is held again after it was lost", belief.name));
        }
        if !held {
            belief.over.set(true);
        }
        held
    }

    fn excused(&self, sim: &Sim, belief: &Belief) -> bool {
        let forgot = |since| sim.net.borrow().servers.iter().any(|node| node.amnesia.iter().any(|at| *at >= since));
        self.forgetting_is_excused.get() && forgot(belief.asked_at)
    }

    /// Somebody has been given a lock.
    pub(crate) fn granted(&self, sim: &Sim, belief: &Rc<Belief>) {
        let Belief { process, name, id, token, .. } = &**belief;
        sim.say(|| format!("process {process} HOLDS {name} under token {token} as {id}"));
        self.note("granted");
        self.beliefs
            .borrow_mut()
            .retain(|other| other.guard.borrow().is_some() && sim.life(other.process) != Life::Dead);
        if !self.believes(sim, belief) {
            return self.note("granted too late");
        }
        for other in self.beliefs.borrow().iter().filter(|other| other.name == *name) {
            if self.believes(sim, other) {
                // Also what was given before a lone node forgot, and is read after what it gave then.
                if self.excused(sim, other) || self.excused(sim, belief) {
                    self.note("excused overlap");
                    continue;
                }
                sim.wrong(format!(
                    "process {process} holds {name} under token {token}, and process {} still believes in its token {}",
                    other.process, other.token
                ));
            }
        }
        // What was given before a lone node forgot may be read after what it gave then.
        let last = self.tokens.borrow_mut().insert(name.clone(), *token);
        let forgotten = self.excused(sim, belief);
        if last.is_some_and(|last| last >= *token) && !forgotten {
            sim.wrong(format!("{name} was granted under token {token} after {}", last.unwrap_or(0)));
        }
        self.beliefs.borrow_mut().push(belief.clone());
        self.backed(sim, belief);
    }

    /// Whoever believes in a lock has it on enough nodes.
    fn backed(&self, sim: &Sim, belief: &Belief) {
        let (key, now) = (format!("lock:{}", belief.name), sim.now.get());
        let net = sim.net.borrow();
        let needed = net.servers.len() / 2 + 1;
        let mut kept = belief.kept.borrow_mut();
        kept.resize(net.servers.len(), Kept::default());
        let keeps = net.servers.iter().zip(kept.iter_mut()).filter_map(|(node, kept)| {
            let keeps = node.fake.keys.peek(key.as_bytes(), node.now_us(now)) == Some(belief.id.as_str().as_bytes());
            kept.seen(keeps, now);
            (keeps || node.amnesia.iter().any(|at| *at >= belief.asked_at)).then_some(())
        });
        let keeps = keeps.count();
        drop((net, kept));
        if keeps < needed && self.believes(sim, belief) && !self.excused(sim, belief) {
            sim.wrong(format!(
                "process {} believes in {} (token {}), and {keeps} nodes keep it, where {needed} are needed",
                belief.process, belief.name, belief.token
            ));
        }
    }

    /// Looks at what the last step has changed.
    pub(crate) fn look(&self, sim: &Sim) {
        let touched = std::mem::take(&mut sim.net.borrow_mut().touched);
        for (_, key) in touched {
            let Some(name) = key.strip_prefix(b"lock:") else { continue };
            for belief in self.beliefs.borrow().iter().filter(|belief| belief.name.as_bytes() == name) {
                self.backed(sim, belief);
            }
        }
    }

    /// The same for all, whatever has changed.
    pub(crate) fn look_at_all(&self, sim: &Sim) {
        for belief in self.beliefs.borrow().iter() {
            if belief.guard.borrow().is_some() {
                self.backed(sim, belief);
            }
        }
    }

    /// A holder was told of trouble with its lock, and there is to be a reason. It let go of it at `until`, or later.
    pub(crate) fn told(&self, sim: &Sim, plan: &Plan, belief: &Belief, until: Time, told: &(Weather, Bad)) {
        let (weather, news) = told;
        // What was handed over is kept for a claim window at first.
        let patience = plan.operation_timeout.min(plan.claim_window);
        // What broke long ago may be found out by a try that fails, and costs no lock; nor does a try that had no time.
        let excused = matches!(news, Bad::Renewal(_)) && (belief.lease < SILENCE || !weather.was_always_fine());
        if !excused && weather.was_fine(belief.lease, until.min(weather.at), patience, &belief.kept.borrow()) {
            let Belief { process, name, token, .. } = belief;
            sim.wrong(format!(
                "process {process} is told for nothing of {name} (token {token}): {}; {weather:?}",
                news.words()
            ));
        }
    }

    /// A call took this long, and may take that long.
    pub(crate) fn took(&self, sim: &Sim, what: &str, took: Time, bound: Time, frozen: Time) {
        // Clocks differ by a hundredth, and a thread is woken when it is woken.
        let bound = bound + bound / 100 + frozen + 5 * super::world::MS;
        if took > bound {
            sim.wrong(format!("{what} took {} ms, of which {} ms are explained", took / 1_000_000, bound / 1_000_000));
        }
    }
}
