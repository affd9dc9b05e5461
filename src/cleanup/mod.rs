//! Clean-up of what abandoned requests have left behind on the servers, in the background.
//!
//! `Cleaner` keeps the clean-up queue. A thread with connections of its own processes it. The
//! thread starts when there is something to do, and ends when it has been idle for a second. So
//! clean-up delays neither callers nor renewals.
//!
//! Invariant: while the queue has entries, its thread runs, or could not be started by the last
//! addition. An ending thread checks the queue under the mutex under which it reports its end.

mod background_releases;
#[cfg(all(test, loom))]
mod loom_tests;
mod queue;
mod worker;

use std::{iter, sync::Arc, time::Duration};

use self::{
    background_releases::BackgroundReleases,
    queue::{Cleanup, CleanupQueue},
    worker::Worker,
};
use crate::{
    backend::{Backend, LeaseResidue},
    core::{
        claim::{Claim, Residue},
        lease::{Lease, LeaseEnd},
    },
    sys::{
        clock::{self, Moment},
        sleeper::Sleeper,
        sync::{Condvar, Mutex, MutexGuard},
        threads,
    },
};

/// Cleans up abandoned claims until a shutdown.
#[derive(Debug)]
pub(crate) struct Cleaner {
    backend: Arc<dyn Backend>,
    shared: Arc<Shared>,
    in_background: BackgroundReleases,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// Signals work for the thread.
    changed: Condvar,
    /// Signals the end of the thread.
    ended: Condvar,
}

#[derive(Debug, Default)]
struct State {
    queue: CleanupQueue,
    /// The thread runs, or is being started.
    is_running: bool,
    sleeper: Sleeper,
    /// Set on shutdown: the deadline for the last exchanges with the servers.
    shutdown_deadline: Option<Moment>,
}

impl Cleaner {
    pub(crate) fn new(backend: Arc<dyn Backend>) -> Cleaner {
        Cleaner { backend, shared: Arc::default(), in_background: BackgroundReleases::default() }
    }

    /// Schedules the clean-up of what a claim may have left. Returns the residue if the manager has
    /// been shut down.
    pub(crate) fn clean_up(&self, claim: &Claim, residue: Residue) -> Result<(), Residue> {
        let now = clock::now();
        let due = if residue.pending_acks.is_empty() { now } else { residue.in_flight_until };
        self.add(due, residue, |queue, residue| queue.add_residue(claim, residue, now))
    }

    /// Schedules the clean-up of what a lease that has ended may have left.
    pub(crate) fn clean_up_lease(&self, lease: &Lease) -> Result<(), Residue> {
        self.clean_up(&lease.longest_claim(), self.backend.lease_residue(lease))
    }

    /// Releases the lock of a lease that has ended. Returns the residue if the manager has been
    /// shut down.
    pub(crate) fn release_later(&self, lease: &Arc<Lease>) -> Result<(), Residue> {
        let now = clock::now();
        // Before it can be confirmed.
        self.in_background.add(lease);
        let residue = self.backend.lease_residue(lease);
        self.add(now, residue, |queue, residue| queue.add_release(lease, residue, now))
    }

    /// The leases of this lock whose release in the background is not confirmed.
    pub(crate) fn pending_releases(&self, lock: &str) -> Vec<Arc<Lease>> {
        self.in_background.of_lock(lock)
    }

    /// This release has been completed. Over several nodes, a minority may still miss it.
    pub(crate) fn on_completed(&self, lease: &Arc<Lease>) {
        self.in_background.remove(lease);
    }

    /// Schedules the clean-up of what a request for this lease may have left, unless the lease is
    /// valid then.
    pub(crate) fn clean_up_unless_held(&self, left: LeaseResidue) {
        let LeaseResidue { lease, residue } = left;
        let at = residue.in_flight_until;
        // After a shutdown, it is left to expire.
        let _ = self.add(at, residue, |queue, residue| queue.add_unless_held(&lease, residue, at));
    }

    fn add(
        &self,
        due: Moment,
        residue: Residue,
        add: impl FnOnce(&mut CleanupQueue, Residue),
    ) -> Result<(), Residue> {
        let mut state = self.shared.state.lock();
        if state.shutdown_deadline.is_some() {
            return Err(residue);
        }
        add(&mut state.queue, residue);
        if self.shared.needs_thread(state, due) {
            // If no thread can be started, the next addition tries again.
            self.start_thread();
        }
        Ok(())
    }

    /// Releases the locks of leases that the shutdown has ended, and then cleans up what is queued,
    /// as far as the nodes reply before the deadline. Later additions are refused.
    pub(crate) fn drain(&self, leases: &[Arc<Lease>], deadline: Moment) {
        let now = clock::now();
        // Skip locks whose holders are releasing them at this moment.
        let held = leases.iter().filter(|lease| lease.ended() != Some(LeaseEnd::Released));
        let held =
            held.map(|l| Cleanup::new(l.longest_claim(), self.backend.lease_residue(l), now));
        let held: Vec<_> = held.collect();
        let mut state = self.shared.state.lock();
        state.shutdown_deadline = Some(deadline);
        held.into_iter().for_each(|cleanup| state.queue.add_first(cleanup));
        if state.queue.is_empty() && !state.is_running {
            return;
        }
        if self.shared.needs_thread(state, Moment::from_nanos(0)) && !self.start_thread() {
            // This thread does it.
            self.shared.state.lock().is_running = true;
            Worker::new(self.backend.clone(), self.shared.clone()).run();
        }
        self.shared.await_end(deadline);
    }

    fn start_thread(&self) -> bool {
        let worker = Worker::new(self.backend.clone(), self.shared.clone());
        let started = threads::spawn("distlock-cleanup", move || worker.run());
        if let Err(error) = &started {
            self.shared.state.lock().is_running = false;
            clock::wake_all(&self.shared.ended);
            log_safely!(debug, "cannot start a thread that cleans up: {error}");
        }
        started.is_ok()
    }
}

/// Next step of the thread.
enum Step {
    /// Clean these up; each with how often it has failed.
    CleanUp(Vec<(Cleanup, u32)>),
    /// The queue was full, and entries were dropped.
    ReportOverflow,
    /// Clean these up before the deadline, because the manager shuts down.
    Drain(Vec<Cleanup>, Moment),
}

impl Shared {
    /// Unlocks the state. Returns whether the caller must start the thread. If it runs already,
    /// wakes it if it sleeps past `due`.
    fn needs_thread(&self, mut state: MutexGuard<'_, State>, due: Moment) -> bool {
        if !state.is_running {
            state.is_running = true;
            return true;
        }
        let wake = state.sleeper.must_wake(due);
        drop(state);
        if wake {
            clock::wake_one(&self.changed);
        }
        false
    }

    /// Sleeps until work is due. Takes at most `max` entries. Returns `None` if there has been no
    /// work for `idle_max`: the thread must then end.
    fn next_step(&self, max: usize, idle_max: Duration) -> Option<Step> {
        let mut state = self.state.lock();
        let idle_until = clock::now().saturating_add(idle_max);
        loop {
            let now = clock::now();
            if state.queue.take_overflowed() {
                return Some(Step::ReportOverflow);
            }
            if let Some(deadline) = state.shutdown_deadline {
                let all = state.queue.take_all();
                if !all.is_empty() {
                    return Some(Step::Drain(all, deadline));
                }
            }
            let due: Vec<_> = iter::from_fn(|| state.queue.take_due(now)).take(max).collect();
            if !due.is_empty() {
                return Some(Step::CleanUp(due));
            }
            let is_last = now >= idle_until || state.shutdown_deadline.is_some();
            let until = match state.queue.earliest() {
                Moment::NEVER if is_last => break,
                Moment::NEVER => idle_until,
                next => next,
            };
            state.sleeper.sleeps_until(until);
            clock::park(&self.changed, &mut state, until);
            state.sleeper.works();
        }
        state.is_running = false;
        drop(state);
        clock::wake_all(&self.ended);
        None
    }

    fn await_end(&self, deadline: Moment) {
        let mut state = self.state.lock();
        while state.is_running && clock::now() < deadline {
            clock::park(&self.ended, &mut state, deadline);
        }
    }

    fn is_shutting_down(&self) -> bool {
        self.state.lock().shutdown_deadline.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::{
        ack::PendingAcks, id::generate_lock_id, key::LockKey, kind::LockKind, quorum::NodeSet,
    };

    /// The thread logs the overflow, after it has unlocked the state.
    ///
    /// Fault: N85
    #[test]
    fn overflow_reported_once_by_the_thread() {
        let shared = Shared::default();
        let (key, ttl) = (LockKey::new("", "x").unwrap(), Duration::from_secs(600));
        let claim = Claim { key, id: generate_lock_id(), ttl, kind: LockKind::Mutex, token: 0 };
        let far = clock::now().saturating_add(ttl);
        for _ in 0..=queue::CLEANUPS_MAX {
            let residue = Residue {
                nodes: NodeSet::single(0),
                queue_entry: String::new(),
                in_flight_until: far,
                keep_until: Moment::default(),
                pending_acks: PendingAcks::new(),
            };
            shared.state.lock().queue.add_residue(&claim, residue, far);
        }
        let reports = || matches!(shared.next_step(1, Duration::ZERO), Some(Step::ReportOverflow));
        assert!(reports());
        drop(shared.state.lock().queue.take_all());
        assert!(!reports(), "reported twice");
    }
}
