//! Renewal: `LockRenewer` keeps the leases of a manager alive. Its worker renews them before they
//! expire, over connections of its own. Its timer ends those that were not renewed.
//!
//! Both threads work in a loop: lock the state, decide, unlock, act, sleep until the earliest
//! deadline.
//!
//! Invariants: if work becomes due before the time until which a thread sleeps, the thread is
//! woken. No mutex is held while a thread acts. After a holder has removed a lease from the
//! schedule, no new renewal of it is sent, and the renewer does not end it.

mod batch_size;
mod context;
#[cfg(all(test, loom))]
mod loom_tests;
mod on_demand;
mod schedule;
mod timer;
mod worker;

use std::{io, sync::Arc, time::Duration};

pub(crate) use self::schedule::RenewalPlan;
use self::{
    context::Context,
    on_demand::{AskedRenewals, Outcome},
    schedule::{DueDeadlines, Generation, Schedule},
    timer::Timer,
    worker::Worker,
};
use crate::{
    backend::{Backend, error::BackendError},
    cleanup::Cleaner,
    core::lease::{Lease, LeaseEnd},
    observe::Observer,
    sys::{
        clock::{self, Moment},
        sleeper::Sleeper,
        slot::Slot,
        sync::{Condvar, Mutex, MutexGuard},
        threads::{self, Thread},
    },
};

/// Interval at which an exchange of the worker checks whether it must end early.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// Keeps leases alive.
#[derive(Debug)]
pub(crate) struct LockRenewer {
    shared: Arc<Shared>,
    timer: Mutex<Option<Thread>>,
    /// Filled when the timer has finished.
    finished: Arc<Slot<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    /// All state on which the decisions of the threads depend.
    state: Mutex<RenewerState>,
    wakes_timer: Condvar,
    wakes_worker: Condvar,
}

#[derive(Debug, Default)]
struct RenewerState {
    schedule: Schedule,
    asked: AskedRenewals,
    /// Set on shutdown: the deadline for the last exchanges with the servers.
    shutdown_deadline: Option<Moment>,
    timer: Sleeper,
    worker: Sleeper,
}

/// Keeps a lease in the renewer's schedule. Dropping this ends the renewal.
#[derive(Debug)]
pub(crate) struct Registration {
    shared: Arc<Shared>,
    generation: Generation,
}

impl Drop for Registration {
    fn drop(&mut self) {
        // Drop the lease only after the mutex is unlocked.
        let lease = self.shared.state.lock().schedule.remove(self.generation);
        drop(lease);
    }
}

impl Registration {
    /// Keeps the lease of the next holder in this process alive, in place of the former one, which
    /// the caller must end. Returns false if the former one has ended, or was renewed.
    pub(crate) fn replace(&self, next: Arc<Lease>, hold_until: Moment) -> bool {
        let mut state = self.shared.state.lock();
        let former = state.schedule.replace(self.generation, next, hold_until);
        self.shared.wake_sleepers(state);
        // The former lease is dropped only now that the mutex is unlocked.
        former.is_some()
    }

    /// Limits how long the lease is held.
    pub(crate) fn limit_hold(&self, hold_until: Moment) {
        let mut state = self.shared.state.lock();
        state.schedule.limit_hold(self.generation, hold_until);
        self.shared.wake_sleepers(state);
    }

    /// Asks for a renewal of its lease now. Returns `None` if the lease has ended.
    pub(crate) fn ask_renewal(&self, lease: &Arc<Lease>) -> Option<PendingRenewal<'_>> {
        let outcome = Arc::<Slot<Outcome>>::default();
        let (generation, since) = (self.generation, clock::now());
        let mut state = self.shared.state.lock();
        // A lease that the schedule does not contain any more is about to end.
        if lease.ended().is_some() {
            return None;
        }
        let number = state.asked.add(generation, lease.clone(), since, outcome.clone());
        state.schedule.schedule_renewal(generation, since);
        self.shared.wake_sleepers(state);
        Some(PendingRenewal { registration: self, number, outcome })
    }
}

/// A renewal that a holder has asked for, and whose outcome it can wait for.
pub(crate) struct PendingRenewal<'a> {
    registration: &'a Registration,
    number: u64,
    outcome: Arc<Slot<Outcome>>,
}

impl PendingRenewal<'_> {
    /// Waits until `until` for the outcome. Returns `None` if there is none by then, or if the
    /// lease has ended.
    pub(crate) fn wait_until(self, until: Moment) -> Option<Result<(), BackendError>> {
        let outcome = self.outcome.wait_until(until).flatten();
        self.registration.shared.state.lock().asked.remove(self.number);
        outcome
    }
}

impl LockRenewer {
    /// Asks the servers at this interval whether they are reachable.
    pub(crate) fn start(
        backend: Arc<dyn Backend>,
        observer: Arc<Observer>,
        cleaner: Arc<Cleaner>,
        probe_interval: Duration,
    ) -> io::Result<LockRenewer> {
        let shared = Arc::new(Shared::default());
        let context = Context { backend, observer, shared: shared.clone(), cleaner };
        let worker = Worker::new(context.clone());
        let worker = threads::spawn("distlock-renew-io", move || worker.run(probe_interval))?;
        let finished = Arc::<Slot<()>>::default();
        let timer = Timer { context, worker };
        let reported = finished.clone();
        let timer = threads::spawn("distlock-renewer", move || {
            timer.run();
            reported.fill(());
        });
        let timer = timer.inspect_err(|_| shared.shut_down(Moment::from_nanos(0)))?;
        Ok(LockRenewer { shared, timer: Mutex::new(Some(timer)), finished })
    }

    /// Adds a lease to the schedule, before the caller gets the guard. Returns `None` if the
    /// renewer has been stopped.
    pub(crate) fn register(&self, lease: &Arc<Lease>, plan: RenewalPlan) -> Option<Registration> {
        let now = clock::now();
        let mut state = self.shared.state.lock();
        if state.shutdown_deadline.is_some() {
            return None;
        }
        let generation = state.schedule.insert(lease.clone(), plan, now);
        self.shared.wake_sleepers(state);
        Some(Registration { shared: self.shared.clone(), generation })
    }

    /// Whether the lock with this id is held by the guard to which the servers granted it. Looks at
    /// all leases.
    pub(crate) fn is_first_hold(&self, id: &str) -> bool {
        self.shared.state.lock().schedule.is_first_hold(id)
    }

    /// Ends all leases, releases their locks as far as the servers reply by `deadline`, and joins
    /// the threads.
    pub(crate) fn stop(&self, deadline: Moment) {
        self.shared.shut_down(deadline);
        let timer = self.timer.lock().take();
        match timer {
            Some(timer) => timer.join(),
            // Another caller joins the thread. Wait here as well: the process may exit next, and
            // the locks must be released first.
            None => drop(self.finished.wait_until(deadline)),
        }
    }
}

/// Reports the loss of a lease. Does nothing if the lease is not lost, or if its loss has already
/// been reported.
pub(crate) fn report_loss(observer: &Observer, lease: &Lease) {
    let now = clock::now();
    if let Some(LeaseEnd::Lost(why)) = lease.ended()
        && lease.take_reporting_duty(now)
    {
        let (claim, held) = (&lease.claim, lease.held_for(now));
        observer.lost(claim.key.name(), &claim.id, lease.token(), &why, held);
    }
}

impl Shared {
    /// The timer's wait: sleeps until leases end, or renewals are overdue. Returns `None` on
    /// shutdown.
    fn wait_for_deadline(&self) -> Option<DueDeadlines> {
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
    fn wait_for_renewals(&self, probe_at: Moment) -> Option<Vec<(Generation, Arc<Lease>)>> {
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
    fn wake_sleepers(&self, mut state: MutexGuard<'_, RenewerState>) {
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
    fn check_exchange(&self, since: Moment, grace: Moment, now: Moment) -> Option<Moment> {
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
    fn has_due_renewals(&self, now: Moment) -> bool {
        let state = self.state.lock();
        state.shutdown_deadline.is_some() || state.schedule.earliest_renewal() <= now
    }

    /// Renews the leases of these claims at once.
    fn renew_soon(&self, ids: &[Box<str>]) {
        let mut state = self.state.lock();
        state.schedule.renew_soon(ids, clock::now());
        self.wake_sleepers(state);
    }

    /// Makes both threads end. The first deadline counts.
    fn shut_down(&self, deadline: Moment) {
        let mut state = self.state.lock();
        state.shutdown_deadline.get_or_insert(deadline);
        self.wake_sleepers(state);
    }

    /// Time by which the exchanges with the servers must end.
    fn shutdown_deadline(&self) -> Moment {
        self.state.lock().shutdown_deadline.unwrap_or(Moment::NEVER)
    }

    /// Empties the schedule at a shutdown. Also returns the deadline for the last exchanges.
    fn end_all(&self) -> (Vec<Arc<Lease>>, Moment) {
        let mut state = self.state.lock();
        let deadline = state.shutdown_deadline.unwrap_or(Moment::NEVER);
        (state.schedule.take_all(), deadline)
    }
}
