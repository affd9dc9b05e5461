//! Renewal: `LockRenewer` keeps the leases of a manager alive. One thread renews them before they
//! expire, reports losses, and cleans up residue on the servers.

#[cfg(all(test, loom))]
mod checks;
mod cleanup_queue;
mod cleanup_worker;
mod desk;
mod doubts;
mod hearing;
mod listen;
mod outcome;
mod reacquire;
mod schedule;
mod shutdown;
mod worker;

use std::{io, iter, sync::Arc, thread::ThreadId, time::Duration};

use crossbeam_channel::{Receiver, Sender, bounded};

pub(crate) use self::schedule::RenewalPlan;
use self::{
    cleanup_queue::{Cleanup, CleanupQueue},
    cleanup_worker::PIPELINE_MAX,
    doubts::{Doubt, Doubts},
    schedule::{Generation, Schedule},
    worker::{DueWork, Worker},
};
use crate::{
    backend::redlock::{EXPIRY_SLACK, PendingAcks, Redlock, ReleaseOutcome},
    core::{
        claim::Claim,
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

/// Time for which a server keeps a queue that no waiter polls; `QUEUE_MS` in `shared.lua`.
const QUEUE_ENTRY_TTL: Duration = Duration::from_secs(60);

/// Keeps leases alive. Its thread works in a loop: lock the state, decide, unlock, act, sleep until
/// the earliest deadline.
#[derive(Debug)]
pub(crate) struct LockRenewer {
    shared: Arc<Shared>,
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
    cleanups: CleanupQueue,
    doubts: Doubts,
    errands: Vec<Errand>,
    /// Set on shutdown: the deadline for the last exchanges with the servers.
    shutdown_deadline: Option<Moment>,
    /// Time until which the thread sleeps; only earlier work wakes it. `None` while it works.
    asleep_until: Option<Moment>,
}

/// A release for a caller that found the pool exhausted and waits for the outcome.
#[derive(Debug)]
struct Errand {
    claim: Claim,
    /// Queue entry, or empty.
    waiter: String,
    was_held: bool,
    /// Nodes on which an earlier request may have been applied.
    may_be_done: NodeSet,
    deadline: Moment,
    answer: Sender<ReleaseOutcome>,
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
    pub(crate) fn start(redlock: Arc<Redlock>) -> io::Result<LockRenewer> {
        let shared = Arc::new(Shared {
            state: Mutex::new(RenewerState::default()),
            changed: Condvar::new(),
        });
        let worker = Worker::new(redlock, shared.clone());
        let (running, finished) = bounded(0);
        let thread = threads::spawn("distlock-renewer", move || {
            let _running: Sender<()> = running;
            worker.run();
        })?;
        Ok(LockRenewer {
            shared,
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

    /// Schedules the clean-up of the residue of an abandoned claim on these nodes. If a request is
    /// in flight until `in_flight_until`, it could arrive after the clean-up, which is therefore
    /// repeated. Returns false if the renewer has been stopped.
    pub(crate) fn clean_up(
        &self,
        claim: &Claim,
        queue_entry: &str,
        nodes: NodeSet,
        in_flight_until: Moment,
    ) -> bool {
        let now = clock::now();
        let mut state = self.shared.state.lock();
        if state.shutdown_deadline.is_some() {
            return false;
        }
        state.schedule_cleanup(claim, queue_entry, nodes, in_flight_until, now);
        self.shared.wake_if_earlier(state, now);
        true
    }

    /// Schedules the clean-up of a claim for `until`, on the nodes that have not acknowledged its
    /// release by then.
    pub(crate) fn doubt(&self, claim: &Claim, waiter: &str, unheard: PendingAcks, until: Moment) {
        let doubt = Doubt { claim: claim.clone(), waiter: waiter.to_owned(), unheard, until };
        let mut state = self.shared.state.lock();
        // A shutdown does not follow up unacknowledged releases.
        if state.shutdown_deadline.is_some() {
            return;
        }
        if !state.doubts.add(doubt) {
            state.cleanups.note_overflow();
        }
        let due = state.doubts.earliest();
        self.shared.wake_if_earlier(state, due);
    }

    /// Releases a lock over the renewer's own connections, because the pool is exhausted. Returns
    /// `None` if the renewer has been stopped, if it does not finish by `deadline`, or if its
    /// thread is the caller.
    pub(crate) fn release(
        &self,
        claim: &Claim,
        waiter: &str,
        was_held: bool,
        may_be_done: NodeSet,
        deadline: Moment,
    ) -> Option<ReleaseOutcome> {
        if threads::is_current(self.thread_id) {
            return None;
        }
        let (answer, answered) = bounded(1);
        let mut state = self.shared.state.lock();
        if state.shutdown_deadline.is_some() {
            return None;
        }
        let (claim, waiter) = (claim.clone(), waiter.to_owned());
        state.errands.push(Errand { claim, waiter, was_held, may_be_done, deadline, answer });
        self.shared.wake_if_earlier(state, Moment::from_nanos(0));
        clock::recv_until(&answered, deadline)
    }

    /// Ends all leases, releases their locks as far as the servers reply by `deadline`, and joins
    /// the thread. Returns false if called on that thread, which then shuts down on its own.
    pub(crate) fn stop(&self, deadline: Moment) -> bool {
        let mut state = self.shared.state.lock();
        state.shutdown_deadline.get_or_insert(deadline);
        self.shared.wake_if_earlier(state, Moment::from_nanos(0));
        if threads::is_current(self.thread_id) {
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
            state.schedule_doubtful_cleanups(now);
            let cleanups: Vec<_> =
                iter::from_fn(|| state.cleanups.take_due(now)).take(PIPELINE_MAX).collect();
            let errands = std::mem::take(&mut state.errands);
            let overflowed = state.cleanups.take_overflowed();
            let idle = expired.is_empty()
                && overdue.is_empty()
                && renew.is_empty()
                && cleanups.is_empty()
                && errands.is_empty();
            if !idle || overflowed {
                return Some(DueWork { expired, overdue, renew, cleanups, errands, overflowed });
            }
            let cleanups = state.cleanups.earliest().min(state.doubts.earliest());
            let until =
                state.schedule.earliest().min(state.schedule.earliest_overdue()).min(cleanups);
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

impl RenewerState {
    /// Schedules the clean-up of a claim for now, and for the moment when none of its requests can
    /// be in flight any more.
    fn schedule_cleanup(
        &mut self,
        claim: &Claim,
        queue_entry: &str,
        nodes: NodeSet,
        in_flight_until: Moment,
        now: Moment,
    ) {
        let lifetime =
            if queue_entry.is_empty() { claim.ttl } else { claim.ttl.max(QUEUE_ENTRY_TTL) };
        let cleanup = |from: Moment| Cleanup {
            claim: claim.clone(),
            queue_entry: queue_entry.to_owned(),
            nodes,
            unless_held: None,
            pending_acks: PendingAcks::new(),
            expires_at: from.saturating_add(lifetime),
        };
        self.cleanups.add(cleanup(now), now);
        if in_flight_until > now {
            let second_try = in_flight_until.saturating_add(EXPIRY_SLACK);
            self.cleanups.add(cleanup(second_try), second_try);
        }
    }

    /// Schedules the clean-up of releases that a node has not acknowledged by their deadline.
    fn schedule_doubtful_cleanups(&mut self, now: Moment) {
        while let Some((doubt, nodes)) = self.doubts.take_due(now) {
            self.schedule_cleanup(&doubt.claim, &doubt.waiter, nodes, now, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::{id::generate_lock_id, key::LockKey};

    /// The thread logs the overflow after it has unlocked the state, because a logger may ask for
    /// locks.
    ///
    /// Fault: N85
    #[test]
    fn cleanup_overflow_reported_once_by_the_thread() {
        let shared = Shared { state: Mutex::new(RenewerState::default()), changed: Condvar::new() };
        let claim = Claim {
            key: LockKey::new("", "x").unwrap(),
            id: generate_lock_id(),
            ttl: Duration::from_secs(600),
        };
        for _ in 0..=cleanup_queue::CLEANUPS_MAX {
            let now = clock::now();
            shared.state.lock().schedule_cleanup(&claim, "", NodeSet::single(0), now, now);
        }
        // Makes `wait_for_work` return.
        let errand = || Errand {
            claim: claim.clone(),
            waiter: String::new(),
            was_held: false,
            may_be_done: NodeSet::EMPTY,
            deadline: clock::now(),
            answer: bounded(1).0,
        };
        let reported = [(); 2].map(|()| {
            shared.state.lock().errands.push(errand());
            shared.wait_for_work().unwrap().overflowed
        });
        assert_eq!(reported, [true, false]);
    }
}
