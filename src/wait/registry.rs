//! `WaitRegistry`: the waiting threads of a manager, by lock identifier. A grant goes to the one
//! thread that waits for it, and wakes no other.
//!
//! A grant for an identifier that is not registered is ignored. If a waiter leaves while the server
//! may still grant it the lock, it also releases its claim on the server. A waiter whose poll finds
//! that it holds the lock needs no grant message.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    sync::Arc,
};

use crate::{
    backend::WakeFn,
    core::claim::GrantNotice,
    sys::{
        clock::{self, Moment},
        sync::{
            Condvar, Mutex,
            atomic::{AtomicU64, Ordering},
        },
    },
};

/// Position of a waiter whose queue position is not known yet.
const UNKNOWN_POSITION: u64 = u64::MAX;

/// Waiters ordered by last known queue position, then by arrival.
type ByPosition = BTreeMap<(u64, u64), Arc<WaitSlot>>;

#[derive(Debug, Default)]
pub(crate) struct WaitRegistry {
    /// All registered waiters.
    waiters: Mutex<Waiters>,
}

#[derive(Debug, Default)]
struct Waiters {
    /// Ordered by identifier, so that every run of a simulation visits waiters in the same order.
    slots: BTreeMap<Box<str>, Arc<WaitSlot>>,
    /// Waiters of this process for each lock.
    by_lock: HashMap<Box<str>, ByPosition>,
    last_number: u64,
    closed: bool,
}

/// Registration of one waiting thread, and the signals for it.
#[derive(Debug)]
pub(crate) struct WaitSlot {
    lock: Box<str>,
    id: Box<str>,
    number: u64,
    /// Last known queue position. Written only while the mutex of the registry is held.
    position: AtomicU64,
    /// The wait can be cancelled.
    is_cancellable: bool,
    /// Signals that the thread has not taken yet.
    signals: Mutex<Signals>,
    wakeup: Condvar,
}

#[derive(Default)]
struct Signals {
    grant: Option<GrantNotice>,
    recheck: bool,
    closed: bool,
    cancelled: bool,
    /// Ends the thread's read of the subscription.
    wake_read: Option<WakeFn>,
    /// The thread must become the leader, because no thread reads the subscription.
    promoted: bool,
    /// The thread sleeps on `wakeup`, or is about to.
    parked: bool,
}

/// Reason why a waiter woke up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wake {
    Granted(GrantNotice),
    /// The waiter must poll, for example because its queue entry may be lost.
    Recheck,
    /// The wait has timed out.
    Timeout,
    /// The caller's token was cancelled.
    Cancelled,
    /// The manager is shutting down.
    Closed,
}

impl WaitRegistry {
    /// Registers a waiting thread.
    pub(crate) fn register(&self, lock: &str, id: &str, is_cancellable: bool) -> Arc<WaitSlot> {
        let mut waiters = self.waiters.lock();
        waiters.last_number += 1;
        let number = waiters.last_number;
        let signals = Mutex::new(Signals { closed: waiters.closed, ..Signals::default() });
        let (position, wakeup) = (AtomicU64::new(UNKNOWN_POSITION), Condvar::new());
        let slot = Arc::new(WaitSlot {
            lock: lock.into(),
            id: id.into(),
            number,
            position,
            is_cancellable,
            signals,
            wakeup,
        });
        waiters.slots.insert(id.into(), slot.clone());
        waiters.by_lock.entry(lock.into()).or_default().insert(slot.sort_key(), slot.clone());
        slot
    }

    /// Removes a waiter. A grant that arrives later is ignored.
    pub(crate) fn unregister(&self, slot: &WaitSlot) {
        let mut waiters = self.waiters.lock();
        waiters.slots.remove(&slot.id);
        if let Some(queue) = waiters.by_lock.get_mut(&slot.lock) {
            queue.remove(&slot.sort_key());
            if queue.is_empty() {
                waiters.by_lock.remove(&slot.lock);
            }
        }
    }

    /// Makes the next waiter for the lock of `gone` poll. Call after `gone` has unregistered.
    pub(crate) fn wake_next(&self, gone: &WaitSlot) {
        let next = {
            let waiters = self.waiters.lock();
            let queue = waiters.by_lock.get(&gone.lock);
            queue.and_then(|queue| queue.values().next().cloned())
        };
        if let Some(slot) = next {
            slot.signal(|signals| signals.recheck = true);
        }
    }

    /// Records the queue position that the server reported for a waiter.
    pub(crate) fn set_position(&self, slot: &WaitSlot, position: u64) {
        let mut waiters = self.waiters.lock();
        let Some(queue) = waiters.by_lock.get_mut(&slot.lock) else { return };
        let Some(registered) = queue.remove(&slot.sort_key()) else { return };
        slot.position.store(position, Ordering::Relaxed);
        queue.insert(slot.sort_key(), registered);
    }

    /// Whether this waiter comes before all other threads of this manager that wait for the same
    /// lock, by queue position or, where positions are unknown, by arrival. The first one polls for
    /// all.
    pub(crate) fn is_first_in_process(&self, slot: &WaitSlot) -> bool {
        let waiters = self.waiters.lock();
        let first = waiters.by_lock.get(&slot.lock).and_then(|queue| queue.values().next());
        first.is_some_and(|first| first.number == slot.number)
    }

    /// Delivers a grant to its waiter. Returns false if the waiter is not registered.
    pub(crate) fn deliver(&self, id: &str, notice: GrantNotice) -> bool {
        let slot = self.waiters.lock().slots.get(id).cloned();
        let Some(slot) = slot else { return false };
        slot.signal(|signals| signals.grant = Some(notice));
        true
    }

    /// Makes every waiter poll, except `caller`, which is awake.
    pub(crate) fn wake_others(&self, caller: &WaitSlot) {
        for slot in self.slots_where(|slot| slot.number != caller.number) {
            slot.signal(|signals| signals.recheck = true);
        }
    }

    /// Makes every waiter poll whose lock has such a key.
    pub(crate) fn wake_where(&self, concerns: &dyn Fn(&str) -> bool) {
        for slot in self.slots_where(|slot| concerns(&slot.lock)) {
            slot.signal(|signals| signals.recheck = true);
        }
    }

    /// Like [`wake_others`](Self::wake_others), but only for waiters for the same lock.
    pub(crate) fn wake_same_lock(&self, caller: &WaitSlot) {
        for slot in self.same_lock(caller) {
            slot.signal(|signals| signals.recheck = true);
        }
    }

    /// Makes the other waiters for the same lock poll if their queue entries are gone: `caller` has
    /// just been added to the end of the queue, at `position`, and fewer than half of those that
    /// were in the queue are before it. If only the caller's own entry was gone, because it missed
    /// its grant, waking the others would delay the next grants, and so would make more waiters
    /// miss theirs.
    pub(crate) fn wake_same_lock_if_lost(&self, caller: &WaitSlot, position: u64) {
        let others = self.same_lock(caller);
        let was_queued = |slot: &&Arc<WaitSlot>| slot.known_position().is_some();
        if position < others.iter().filter(was_queued).count().div_ceil(2) as u64 {
            others.iter().for_each(|slot| slot.signal(|signals| signals.recheck = true));
        }
    }

    fn same_lock(&self, caller: &WaitSlot) -> Vec<Arc<WaitSlot>> {
        let waiters = self.waiters.lock();
        let queue = waiters.by_lock.get(&caller.lock).into_iter().flat_map(BTreeMap::values);
        queue.filter(|slot| slot.number != caller.number).cloned().collect()
    }

    /// Promotes one sleeping waiter to leader, if any waiter sleeps.
    pub(crate) fn promote_follower(&self) {
        let promoted = {
            let waiters = self.waiters.lock();
            waiters.slots.values().find(|slot| slot.try_promote()).cloned()
        };
        if let Some(slot) = promoted {
            clock::wake_one(&slot.wakeup);
        }
    }

    /// Wakes all waiters with [`Wake::Closed`], including those that register later.
    pub(crate) fn close(&self) {
        self.waiters.lock().closed = true;
        for slot in self.slots_where(|_| true) {
            slot.signal(|signals| signals.closed = true);
        }
    }

    fn slots_where(&self, which: impl Fn(&WaitSlot) -> bool) -> Vec<Arc<WaitSlot>> {
        self.waiters.lock().slots.values().filter(|slot| which(slot)).cloned().collect()
    }
}

impl WaitSlot {
    /// Unique number of this waiter, in order of arrival.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Last queue position that the server reported.
    pub(crate) fn known_position(&self) -> Option<u64> {
        Some(self.position.load(Ordering::Relaxed)).filter(|position| *position != UNKNOWN_POSITION)
    }

    fn sort_key(&self) -> (u64, u64) {
        (self.position.load(Ordering::Relaxed), self.number)
    }

    /// Takes the most important signal without waiting.
    pub(crate) fn take_wake(&self) -> Option<Wake> {
        self.signals.lock().take_wake()
    }

    /// Announces that the thread is about to sleep, so that it can be promoted to leader.
    pub(crate) fn prepare_to_park(&self) {
        self.signals.lock().parked = true;
    }

    /// Withdraws the announcement. Returns true if the thread was promoted meanwhile.
    pub(crate) fn finish_park(&self) -> bool {
        let mut signals = self.signals.lock();
        signals.parked = false;
        std::mem::take(&mut signals.promoted)
    }

    /// Sleeps until there is a signal, until the thread is promoted, or until `until`.
    pub(crate) fn park(&self, until: Moment) {
        let mut signals = self.signals.lock();
        while !signals.has_any() && clock::now() < until {
            clock::park(&self.wakeup, &mut signals, until);
        }
    }

    pub(crate) fn is_cancellable(&self) -> bool {
        self.is_cancellable
    }

    /// Announces how to end a read of the subscription, or that the thread reads no more.
    pub(crate) fn set_wake_read(&self, wake: Option<WakeFn>) {
        let former = std::mem::replace(&mut self.signals.lock().wake_read, wake);
        drop(former);
    }

    /// Ends the wait.
    pub(crate) fn cancel(&self) {
        let mut wake_read = None;
        self.signal(|signals| {
            signals.cancelled = true;
            wake_read = signals.wake_read.clone();
        });
        if let Some(wake) = wake_read {
            wake();
        }
    }

    /// Promotes the thread if it sleeps. Check and promotion happen under one mutex, so the thread
    /// cannot stop parking in between.
    fn try_promote(&self) -> bool {
        let mut signals = self.signals.lock();
        let was_parked = std::mem::take(&mut signals.parked);
        signals.promoted |= was_parked;
        was_parked
    }

    fn signal(&self, change: impl FnOnce(&mut Signals)) {
        change(&mut self.signals.lock());
        clock::wake_one(&self.wakeup);
    }
}

impl fmt::Debug for Signals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Signals").field("grant", &self.grant).finish_non_exhaustive()
    }
}

impl Signals {
    fn has_any(&self) -> bool {
        self.grant.is_some() || self.recheck || self.closed || self.cancelled || self.promoted
    }

    fn take_wake(&mut self) -> Option<Wake> {
        if let Some(grant) = self.grant.take() {
            Some(Wake::Granted(grant))
        } else if self.closed {
            Some(Wake::Closed)
        } else if self.cancelled {
            Some(Wake::Cancelled)
        } else if std::mem::take(&mut self.recheck) {
            Some(Wake::Recheck)
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests;
