//! What the threads of the renewer share, and where they sleep: each on a condition variable, until
//! the earliest time in the schedule at which it has something to do.
//!
//! Invariant: if work becomes due before the time until which a thread sleeps, the thread is woken.

use std::{sync::Arc, time::Duration};

use super::{
    on_demand::AskedRenewals,
    schedule::{DueDeadlines, Generation, Schedule},
};
use crate::{
    core::lease::Lease,
    sys::{
        clock::{self, Moment},
        sleeper::Sleeper,
        sync::{Condvar, Mutex, MutexGuard},
    },
};

/// Interval at which an exchange of the worker checks whether it must end early.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);

#[derive(Debug, Default)]
pub(super) struct Shared {
    /// All state on which the decisions of the threads depend.
    pub(super) state: Mutex<RenewerState>,
    wakes_timer: Condvar,
    wakes_worker: Condvar,
}

#[derive(Debug, Default)]
pub(super) struct RenewerState {
    pub(super) schedule: Schedule,
    pub(super) asked: AskedRenewals,
    /// Set on shutdown: the deadline for the last exchanges with the servers.
    pub(super) shutdown_deadline: Option<Moment>,
    timer: Sleeper,
    worker: Sleeper,
}

impl Shared {
    /// The timer's wait: sleeps until leases end, or renewals are overdue. Returns `None` on
    /// shutdown.
    pub(super) fn wait_for_deadline(&self) -> Option<DueDeadlines> {
        let mut state = self.state.lock();
        while state.shutdown_deadline.is_none() {
            let now = clock::now();
            let due = state.schedule.take_deadlines(now);
            if !due.expired.is_empty() || !due.overdue.is_empty() {
                return Some(due);
            }
            let until = state.schedule.earliest_deadline();
            state.timer.sleeps_until(until);
            clock::park_suspend_aware(&self.wakes_timer, &mut state, until);
            state.timer.works();
        }
        None
    }

    /// The worker's wait: sleeps until renewals are due, and returns them; none at `probe_at`.
    /// Returns `None` on shutdown.
    pub(super) fn wait_for_renewals(
        &self,
        probe_at: Moment,
    ) -> Option<Vec<(Generation, Arc<Lease>)>> {
        // The last renewals may have moved the end of a lease back.
        self.wake_sleepers(self.state.lock());
        let mut state = self.state.lock();
        while state.shutdown_deadline.is_none() {
            let now = clock::now();
            let due = state.schedule.take_due(now);
            if !due.is_empty() || now >= probe_at {
                return Some(due);
            }
            let until = state.schedule.earliest_renewal().min(probe_at);
            state.worker.sleeps_until(until);
            clock::park_suspend_aware(&self.wakes_worker, &mut state, until);
            state.worker.works();
        }
        None
    }

    /// Unlocks the state, and wakes the threads that sleep past what is due.
    pub(super) fn wake_sleepers(&self, mut state: MutexGuard<'_, RenewerState>) {
        let stop = state.shutdown_deadline.map_or(Moment::NEVER, |_| Moment::from_nanos(0));
        let (deadline, renewal) =
            (state.schedule.earliest_deadline(), state.schedule.earliest_renewal());
        let timer = state.timer.must_wake(deadline.min(stop));
        let worker = state.worker.must_wake(renewal.min(stop));
        drop(state);
        if timer {
            clock::wake_one(&self.wakes_timer);
        }
        if worker {
            clock::wake_one(&self.wakes_worker);
        }
    }

    /// Called while the worker awaits replies. Returns when to call it next, or `None` if an
    /// exchange that began at `since` must end: other renewals are pressing, or the manager shuts
    /// down and `grace` has passed.
    pub(super) fn check_exchange(
        &self,
        since: Moment,
        grace: Moment,
        now: Moment,
    ) -> Option<Moment> {
        let next = now.saturating_add(CHECK_INTERVAL);
        let state = self.state.lock();
        let stops = state.shutdown_deadline.is_some_and(|deadline| now >= grace.min(deadline));
        if stops || state.schedule.is_pressing(since, now) {
            return None;
        }
        // A renewal in flight may be overdue before the timer wakes. Most are confirmed earlier.
        if state.schedule.earliest_deadline() <= next {
            self.wake_sleepers(state);
        }
        Some(next)
    }

    /// Whether the worker has more urgent things to do than what can be postponed.
    pub(super) fn has_due_renewals(&self, now: Moment) -> bool {
        let state = self.state.lock();
        state.shutdown_deadline.is_some() || state.schedule.earliest_renewal() <= now
    }

    /// Renews the leases of these claims at once.
    pub(super) fn renew_soon(&self, ids: &[Box<str>]) {
        let mut state = self.state.lock();
        state.schedule.renew_soon(ids, clock::now());
        self.wake_sleepers(state);
    }

    /// Makes both threads end. The first deadline counts.
    pub(super) fn shut_down(&self, deadline: Moment) {
        let mut state = self.state.lock();
        state.shutdown_deadline.get_or_insert(deadline);
        self.wake_sleepers(state);
    }

    /// Time by which the exchanges with the servers must end.
    pub(super) fn shutdown_deadline(&self) -> Moment {
        self.state.lock().shutdown_deadline.unwrap_or(Moment::NEVER)
    }

    /// Empties the schedule at a shutdown. Also returns the deadline for the last exchanges.
    pub(super) fn end_all(&self) -> (Vec<Arc<Lease>>, Moment) {
        let mut state = self.state.lock();
        let deadline = state.shutdown_deadline.unwrap_or(Moment::NEVER);
        (state.schedule.take_all(), deadline)
    }
}
