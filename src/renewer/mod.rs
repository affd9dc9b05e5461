//! While a lock is ours: `LockRenewer`, which takes leases into its care. Its one thread renews them before they run out,
//! tells holders of lost ones, and takes back what may have been left on the server.

#[cfg(all(test, loom))]
mod checks;
mod desk;
mod doubts;
mod finish;
mod hearing;
mod listen;
mod mend;
mod schedule;
mod sweep;
mod tally;
mod undo;
mod worker;

use std::{io, iter, sync::Arc, thread::ThreadId, time::Duration};

use crossbeam_channel::{Receiver, Sender, bounded};

pub(crate) use self::schedule::Upkeep;
use self::{
    doubts::{Doubt, Doubts},
    schedule::{Generation, Schedule},
    sweep::AT_ONCE,
    undo::{Undo, UndoList},
    worker::{Step, Worker},
};
use crate::{
    clock::{self, Moment},
    grant::Claim,
    lease::{End, Lease},
    observer::Observer,
    redlock::{Ending, LATE_SLACK, NodeSet, Redlock, Unheard},
    sync::{Condvar, Mutex, MutexGuard},
    threads::{self, Thread},
};

/// How long a waiter that is in the queue may stay there without looking again; see acquire.lua.
const QUEUE_LIFE: Duration = Duration::from_secs(60);

/// Keeps leases alive. One thread: lock, decide, unlock, act, sleep until the earliest moment.
#[derive(Debug)]
pub(crate) struct LockRenewer {
    shared: Arc<Shared>,
    thread: Mutex<Option<Thread>>,
    /// Of that thread, on which a logger may call whatever it likes, and which must not wait for itself.
    own: Option<ThreadId>,
    /// Closed when the thread has done its work.
    ended: Receiver<()>,
}

#[derive(Debug)]
struct Shared {
    /// Guards everything that the thread decides upon.
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    schedule: Schedule,
    undos: UndoList,
    doubts: Doubts,
    errands: Vec<Errand>,
    /// Set when it is time to end: until when the server may still be talked to.
    stop: Option<Moment>,
    /// Until when the thread sleeps; it is woken only for something earlier. `None` while it works.
    asleep_until: Option<Moment>,
}

/// A release that somebody waits for, because the pool has no connection for it.
#[derive(Debug)]
struct Errand {
    claim: Claim,
    /// Its place in line, or empty.
    waiter: String,
    was_held: bool,
    /// Nodes where an earlier try may have been carried out.
    may_be_done: NodeSet,
    deadline: Moment,
    answer: Sender<Ending>,
}

/// A lease in the renewer's care; dropping this ends its renewal.
#[derive(Debug)]
pub(crate) struct Registration {
    shared: Arc<Shared>,
    generation: Generation,
}

impl Drop for Registration {
    fn drop(&mut self) {
        // Freed outside the lock.
        let lease = self.shared.state.lock().schedule.forget(self.generation);
        drop(lease);
    }
}

impl LockRenewer {
    pub(crate) fn start(redlock: Arc<Redlock>) -> io::Result<LockRenewer> {
        let shared = Arc::new(Shared { state: Mutex::new(State::default()), changed: Condvar::new() });
        let worker = Worker::new(redlock, shared.clone());
        let (works, ended) = bounded(0);
        let thread = threads::spawn("distlock-renewer", move || {
            let _works: Sender<()> = works;
            worker.run();
        })?;
        Ok(LockRenewer { shared, own: thread.id(), thread: Mutex::new(Some(thread)), ended })
    }

    /// Takes a lease into care, before its guard is seen by anybody. `None` once the renewer has been stopped.
    pub(crate) fn keep(&self, lease: &Arc<Lease>, upkeep: Upkeep) -> Option<Registration> {
        let now = clock::now();
        let mut state = self.shared.state.lock();
        if state.stop.is_some() {
            return None;
        }
        let generation = state.schedule.keep(lease.clone(), upkeep, now);
        let due = state.schedule.earliest();
        self.shared.wake_before(state, due);
        Some(Registration { shared: self.shared.clone(), generation })
    }

    /// Takes back in the background whatever the server may have kept of a claim. A request that may still be carried
    /// out until `late_until` could overtake that, so then it is taken back once more. False once the renewer has
    /// been stopped.
    pub(crate) fn undo(&self, claim: &Claim, waiter: &str, nodes: NodeSet, late_until: Moment) -> bool {
        let now = clock::now();
        let mut state = self.shared.state.lock();
        if state.stop.is_some() {
            return false;
        }
        state.take_back(claim, waiter, nodes, late_until, now);
        self.shared.wake_before(state, now);
        true
    }

    /// Takes a claim back, at `until`, on those of these nodes that have not said by then that it is given up.
    pub(crate) fn doubt(&self, claim: &Claim, waiter: &str, unheard: Unheard, until: Moment) {
        let doubt = Doubt { claim: claim.clone(), waiter: waiter.to_owned(), unheard, until };
        let mut state = self.shared.state.lock();
        // What has been sent is left to itself at a shutdown.
        if state.stop.is_some() {
            return;
        }
        if !state.doubts.add(doubt) {
            state.undos.overflow();
        }
        let due = state.doubts.earliest();
        self.shared.wake_before(state, due);
    }

    /// Releases over the renewer's own connections, for a caller who finds the pool exhausted. `None` when it has been
    /// stopped, does not get to it in time, or is the caller.
    pub(crate) fn release(
        &self,
        claim: &Claim,
        waiter: &str,
        was_held: bool,
        may_be_done: NodeSet,
        deadline: Moment,
    ) -> Option<Ending> {
        if threads::is_current(self.own) {
            return None;
        }
        let (answer, answered) = bounded(1);
        let mut state = self.shared.state.lock();
        if state.stop.is_some() {
            return None;
        }
        let (claim, waiter) = (claim.clone(), waiter.to_owned());
        state.errands.push(Errand { claim, waiter, was_held, may_be_done, deadline, answer });
        self.shared.wake_before(state, Moment::from_nanos(0));
        clock::await_answer(&answered, deadline)
    }

    /// Ends all leases, releases their locks as far as the server answers until `deadline`, and ends the thread. False on that
    /// thread itself, which does so when it has come back from whatever it was told to call.
    pub(crate) fn stop(&self, deadline: Moment) -> bool {
        let mut state = self.shared.state.lock();
        state.stop.get_or_insert(deadline);
        self.shared.wake_before(state, Moment::from_nanos(0));
        if threads::is_current(self.own) {
            return false;
        }
        let thread = self.thread.lock().take();
        match thread {
            Some(thread) => thread.join(),
            // Somebody else stops it. Whoever may end the process now must not do so before the locks are released.
            None => drop(clock::await_answer(&self.ended, deadline)),
        }
        true
    }
}

/// Tells how a lease was lost, unless it was not, or somebody has: the first who notices does.
pub(crate) fn tell_loss(observer: &Observer, lease: &Lease) {
    if let Some(End::Lost(why)) = lease.ended()
        && lease.is_untold()
    {
        let (claim, held) = (&lease.claim, lease.hold.held(clock::now()));
        observer.lost(claim.key.name(), &claim.id, lease.token, &why, held);
    }
}

impl Shared {
    /// Sleeps until there is something to do; `None` when it is time to end.
    fn next(&self) -> Option<Step> {
        let mut state = self.state.lock();
        loop {
            if state.stop.is_some() {
                return None;
            }
            let now = clock::now();
            let over = state.schedule.take_over(now);
            let dangers = state.schedule.take_dangers(now);
            let renew = state.schedule.take_due(now);
            state.take_back_doubtful(now);
            let undos: Vec<_> = iter::from_fn(|| state.undos.take_due(now)).take(AT_ONCE).collect();
            let errands = std::mem::take(&mut state.errands);
            let overflowed = state.undos.take_overflowed();
            let idle =
                over.is_empty() && dangers.is_empty() && renew.is_empty() && undos.is_empty() && errands.is_empty();
            if !idle || overflowed {
                return Some(Step { over, dangers, renew, undos, errands, overflowed });
            }
            let undos = state.undos.earliest().min(state.doubts.earliest());
            let until = state.schedule.earliest().min(state.schedule.earliest_danger()).min(undos);
            state.asleep_until = Some(until);
            clock::park_watchful(&self.changed, &mut state, until);
            state.asleep_until = None;
        }
    }

    /// Wakes the thread if it sleeps past `due`.
    fn wake_before(&self, mut state: MutexGuard<'_, State>, due: Moment) {
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

impl State {
    /// What there may be of a claim is taken back, and once more when nothing of it can be under way any longer.
    fn take_back(&mut self, claim: &Claim, waiter: &str, nodes: NodeSet, late_until: Moment, now: Moment) {
        let life = if waiter.is_empty() { claim.ttl } else { claim.ttl.max(QUEUE_LIFE) };
        let undo = |from: Moment| Undo {
            claim: claim.clone(),
            waiter: waiter.to_owned(),
            nodes,
            unless_held: None,
            asked: Unheard::new(),
            until: from.saturating_add(life),
        };
        self.undos.add(undo(now), now);
        if late_until > now {
            let again = late_until.saturating_add(LATE_SLACK);
            self.undos.add(undo(again), again);
        }
    }

    /// What was given up, and a node has not said so in all this time.
    fn take_back_doubtful(&mut self, now: Moment) {
        while let Some((doubt, nodes)) = self.doubts.take_due(now) {
            self.take_back(&doubt.claim, &doubt.waiter, nodes, now, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{id::generate_lock_id, key::LockKey};

    /// Its thread tells, which holds nothing then; a logger may ask for locks.
    #[test]
    fn that_too_much_is_to_be_taken_back_is_told_once_and_by_the_thread() {
        let shared = Shared { state: Mutex::new(State::default()), changed: Condvar::new() };
        let claim =
            Claim { key: LockKey::new("", "x").unwrap(), id: generate_lock_id(), ttl: Duration::from_secs(600) };
        for _ in 0..=undo::LENGTH_MAX {
            let now = clock::now();
            shared.state.lock().take_back(&claim, "", NodeSet::only(0), now, now);
        }
        // So that there is something to do in any case.
        let errand = || Errand {
            claim: claim.clone(),
            waiter: String::new(),
            was_held: false,
            may_be_done: NodeSet::NONE,
            deadline: clock::now(),
            answer: bounded(1).0,
        };
        let told = [(); 2].map(|()| {
            shared.state.lock().errands.push(errand());
            shared.next().unwrap().overflowed
        });
        assert_eq!(told, [true, false]);
    }
}
