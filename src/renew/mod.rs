//! Renewal: `LockRenewer` keeps the leases of a manager alive. One thread renews them before they
//! expire, and reports losses.

#[cfg(all(test, loom))]
mod checks;
mod desk;
mod hearing;
mod listen;
mod outcome;
mod reacquire;
mod schedule;
mod shutdown;
mod worker;

use std::{fmt, io, sync::Arc, thread::ThreadId};

use crossbeam_channel::{Receiver, Sender, bounded};

pub(crate) use self::schedule::RenewalPlan;
use self::{
    schedule::{Generation, Schedule},
    worker::{DueWork, Worker},
};
use crate::{
    backend::redlock::Redlock,
    core::{
        lease::{Lease, LeaseEnd},
        quorum::NodeSet,
    },
    observe::Observer,
    sys::{
        clock::{self, Moment},
        sync::{Condvar, Mutex, MutexGuard},
        threads::{self, Thread},
    },
};

/// Where the renewer leaves what may remain on the servers of leases that have ended.
pub(crate) trait ResidueSink: fmt::Debug + Send + Sync {
    /// Cleans up an ended lease on these nodes: now, and once its requests in flight have expired.
    fn clean_up(&self, lease: &Lease, nodes: NodeSet);

    /// Cleans up these nodes at `at` unless the lease is valid then.
    fn clean_up_unless_held(&self, lease: &Arc<Lease>, nodes: NodeSet, at: Moment);

    /// Releases the locks of leases that a shutdown has ended, and ends all clean-up by `deadline`.
    fn drain(&self, leases: &[Arc<Lease>], deadline: Moment);

    /// Whether the caller is a thread for which [`drain`](Self::drain) waits.
    fn is_current_thread(&self) -> bool;
}

/// Keeps leases alive. Its thread works in a loop: lock the state, decide, unlock, act, sleep until
/// the earliest deadline.
#[derive(Debug)]
pub(crate) struct LockRenewer {
    shared: Arc<Shared>,
    residues: Arc<dyn ResidueSink>,
    thread: Mutex<Option<Thread>>,
    /// Id of the renewer's thread. A logger may call the library on it, and the thread must not
    /// wait for itself.
    thread_id: Option<ThreadId>,
    /// Disconnected when the thread has finished.
    finished: Receiver<()>,
}

#[derive(Debug)]
struct Shared {
    /// All state on which the decisions of the thread depend.
    state: Mutex<RenewerState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct RenewerState {
    schedule: Schedule,
    /// Set on shutdown: the deadline for the last exchanges with the servers.
    shutdown_deadline: Option<Moment>,
    /// Time until which the thread sleeps; only earlier work wakes it. `None` while it works.
    asleep_until: Option<Moment>,
}

/// Keeps a lease in the renewer's schedule. Dropping this ends the renewal.
#[derive(Debug)]
pub(crate) struct Registration {
    shared: Arc<Shared>,
    generation: Generation,
}

impl Drop for Registration {
    fn drop(&mut self) {
        // The lease is dropped after the state lock is released.
        let lease = self.shared.state.lock().schedule.remove(self.generation);
        drop(lease);
    }
}

impl LockRenewer {
    pub(crate) fn start(
        redlock: Arc<Redlock>,
        residues: Arc<dyn ResidueSink>,
    ) -> io::Result<LockRenewer> {
        let shared = Arc::new(Shared {
            state: Mutex::new(RenewerState::default()),
            changed: Condvar::new(),
        });
        let worker = Worker::new(redlock, shared.clone(), residues.clone());
        let (running, finished) = bounded(0);
        let thread = threads::spawn("distlock-renewer", move || {
            let _running: Sender<()> = running;
            worker.run();
        })?;
        Ok(LockRenewer {
            shared,
            residues,
            thread_id: thread.id(),
            thread: Mutex::new(Some(thread)),
            finished,
        })
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
        let due = state.schedule.earliest();
        self.shared.wake_if_earlier(state, due);
        Some(Registration { shared: self.shared.clone(), generation })
    }

    /// Ends all leases, releases their locks as far as the servers reply by `deadline`, and joins
    /// the thread. Returns false if called on a thread for which it would wait; the renewer then
    /// shuts down on its own.
    pub(crate) fn stop(&self, deadline: Moment) -> bool {
        let mut state = self.shared.state.lock();
        state.shutdown_deadline.get_or_insert(deadline);
        self.shared.wake_if_earlier(state, Moment::from_nanos(0));
        if threads::is_current(self.thread_id) || self.residues.is_current_thread() {
            return false;
        }
        let thread = self.thread.lock().take();
        match thread {
            Some(thread) => thread.join(),
            // Another caller joins the thread. Wait here as well: the process may exit next, and
            // the locks must be released first.
            None => drop(clock::recv_until(&self.finished, deadline)),
        }
        true
    }
}

/// Reports the loss of a lease. Does nothing if the lease is not lost, or if its loss has already
/// been reported.
pub(crate) fn report_loss(observer: &Observer, lease: &Lease) {
    if let Some(LeaseEnd::Lost(why)) = lease.ended()
        && lease.take_reporting_duty()
    {
        let (claim, held) = (&lease.claim, lease.held_for(clock::now()));
        observer.lost(claim.key.name(), &claim.id, lease.token, &why, held);
    }
}

impl Shared {
    /// Sleeps until work is due. Returns `None` on shutdown.
    fn wait_for_work(&self) -> Option<DueWork> {
        let mut state = self.state.lock();
        loop {
            if state.shutdown_deadline.is_some() {
                return None;
            }
            let now = clock::now();
            let expired = state.schedule.take_expired(now);
            let overdue = state.schedule.take_overdue(now);
            let renew = state.schedule.take_due(now);
            let idle = expired.is_empty() && overdue.is_empty() && renew.is_empty();
            if !idle {
                return Some(DueWork { expired, overdue, renew });
            }
            let until = state.schedule.earliest().min(state.schedule.earliest_overdue());
            state.asleep_until = Some(until);
            clock::park_suspend_aware(&self.changed, &mut state, until);
            state.asleep_until = None;
        }
    }

    /// Unlocks the state and wakes the thread if it sleeps past `due`.
    fn wake_if_earlier(&self, mut state: MutexGuard<'_, RenewerState>, due: Moment) {
        let wake = state.asleep_until.is_some_and(|until| due < until);
        if wake {
            // The next caller need not wake it again.
            state.asleep_until = None;
        }
        drop(state);
        if wake {
            clock::wake_one(&self.changed);
        }
    }
}
