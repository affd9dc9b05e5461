//! Renewal: `LockRenewer` keeps the leases of a manager alive. Its worker renews them before they
//! expire, over connections of its own. Its timer ends those that were not renewed.
//!
//! Both threads work in a loop: lock the state, decide, unlock, act, sleep until the earliest
//! deadline.
//!
//! Invariants: no mutex is held while a thread acts. After a holder has removed a lease from the
//! schedule, no new renewal of it is sent, and the renewer does not end it.

mod batch_size;
mod context;
#[cfg(all(test, loom))]
mod loom_tests;
mod on_demand;
mod schedule;
mod sleep_until_due;
mod timer;
mod worker;

use std::{io, sync::Arc, time::Duration};

pub(crate) use self::schedule::RenewalPlan;
use self::{
    context::Context, on_demand::Outcome, schedule::Generation, sleep_until_due::Shared,
    timer::Timer, worker::Worker,
};
use crate::{
    backend::{Backend, error::BackendError},
    cleanup::Cleaner,
    core::lease::{Lease, LeaseEnd},
    observe::Observer,
    sys::{
        clock::{self, Moment},
        slot::Slot,
        sync::Mutex,
        threads::{self, Thread},
    },
};

/// Keeps leases alive.
#[derive(Debug)]
pub(crate) struct LockRenewer {
    shared: Arc<Shared>,
    timer: Mutex<Option<Thread>>,
    /// Filled when the timer has finished.
    finished: Arc<Slot<()>>,
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
        let worker = threads::spawn("distlock-renewer", move || worker.run(probe_interval))?;
        let finished = Arc::<Slot<()>>::default();
        let timer = Timer { context, worker };
        let reported = finished.clone();
        let timer = threads::spawn("distlock-timer", move || {
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
            // Another caller joins the thread.
            None => self.await_stop(deadline),
        }
    }

    /// Waits until the locks are released that [`stop`](Self::stop) ends on another thread, until
    /// `deadline` at most. The process may exit next.
    pub(crate) fn await_stop(&self, deadline: Moment) {
        self.finished.wait_until(deadline);
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
