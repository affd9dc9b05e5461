//! `WaitRegistry`: the waiting threads of a manager, by lock identifier. A grant goes to the one
//! thread that waits for it, and wakes no other.
//!
//! A grant for an identifier that is not registered is ignored. If a waiter leaves while the server
//! may still grant it the lock, it also releases its claim on the server. A waiter whose poll finds
//! that it holds the lock needs no grant message.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    thread::ThreadId,
};

use crate::{
    core::claim::GrantNotice,
    sys::{
        clock::{self, Moment},
        sync::{
            Condvar, Mutex,
            atomic::{AtomicU64, Ordering},
        },
        threads,
    },
};

/// Position of a waiter whose queue position is not known yet.
const UNKNOWN_POSITION: u64 = u64::MAX;

/// Waiters ordered by last known queue position, then by arrival; with their thread.
type ByPosition = BTreeMap<(u64, u64), Option<ThreadId>>;

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
    /// Signals that the thread has not taken yet.
    signals: Mutex<Signals>,
    wakeup: Condvar,
}

#[derive(Debug, Default)]
struct Signals {
    grant: Option<GrantNotice>,
    recheck: bool,
    closed: bool,
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
    /// The manager is shutting down.
    Closed,
}

impl WaitRegistry {
    /// Registers a waiting thread.
    pub(crate) fn register(&self, lock: &str, id: &str, thread: Option<ThreadId>) -> Arc<WaitSlot> {
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
            signals,
            wakeup,
        });
        waiters.slots.insert(id.into(), slot.clone());
        waiters.by_lock.entry(lock.into()).or_default().insert(slot.sort_key(), thread);
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
        let successor = {
            let waiters = self.waiters.lock();
            let first = waiters.by_lock.get(&gone.lock).and_then(|queue| queue.first_key_value());
            first.and_then(|((_, number), _)| {
                waiters.slots.values().find(|slot| slot.number == *number).cloned()
            })
        };
        if let Some(slot) = successor {
            slot.signal(|signals| signals.recheck = true);
        }
    }

    /// Records the queue position that the server reported for a waiter.
    pub(crate) fn set_position(&self, slot: &WaitSlot, position: u64) {
        let mut waiters = self.waiters.lock();
        let Some(queue) = waiters.by_lock.get_mut(&slot.lock) else { return };
        let thread = queue.remove(&slot.sort_key()).flatten();
        slot.position.store(position, Ordering::Relaxed);
        queue.insert(slot.sort_key(), thread);
    }

    /// Whether this waiter comes before all other threads of this manager that wait for the same
    /// lock, by queue position or, where positions are unknown, by arrival. The first one polls for
    /// all. An outer wait on the same thread does not count as earlier: it has called a user's
    /// logger, which now waits for the same lock in `slot`.
    pub(crate) fn is_first_in_process(&self, slot: &WaitSlot) -> bool {
        let waiters = self.waiters.lock();
        let Some(queue) = waiters.by_lock.get(&slot.lock) else { return false };
        let first = queue
            .iter()
            .find(|(key, thread)| **key == slot.sort_key() || !threads::is_current(**thread));
        first.is_some_and(|(key, _)| *key == slot.sort_key())
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

    /// Like [`wake_others`](Self::wake_others), but only for waiters for the same lock.
    pub(crate) fn wake_same_lock(&self, caller: &WaitSlot) {
        for slot in
            self.slots_where(|slot| slot.lock == caller.lock && slot.number != caller.number)
        {
            slot.signal(|signals| signals.recheck = true);
        }
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

impl Signals {
    fn has_any(&self) -> bool {
        self.grant.is_some() || self.recheck || self.closed || self.promoted
    }

    fn take_wake(&mut self) -> Option<Wake> {
        if let Some(grant) = self.grant.take() {
            Some(Wake::Granted(grant))
        } else if self.closed {
            Some(Wake::Closed)
        } else if std::mem::take(&mut self.recheck) {
            Some(Wake::Recheck)
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{sync::Arc, thread, time::Duration};

    const GRANT: GrantNotice = GrantNotice { token: 5, granted_at_us: 6, px_ms: 7 };

    fn soon() -> Moment {
        clock::now().saturating_add(Duration::from_secs(60))
    }

    #[test]
    fn grant_delivered_wakes_only_its_waiter() {
        let registry = Arc::new(WaitRegistry::default());
        let (a, b) = (registry.register("x", "a", None), registry.register("x", "b", None));
        let waiting = thread::spawn(move || {
            a.park(soon());
            a.take_wake()
        });
        assert!(registry.deliver("a", GRANT));
        assert_eq!(waiting.join().unwrap(), Some(Wake::Granted(GRANT)));
        assert_eq!(b.take_wake(), None);
    }

    #[test]
    fn grant_for_unregistered_id_is_ignored() {
        let registry = WaitRegistry::default();
        let a = registry.register("x", "a", None);
        registry.unregister(&a);
        assert!(!registry.deliver("a", GRANT));
        assert!(registry.waiters.lock().slots.is_empty());
        assert!(registry.waiters.lock().by_lock.is_empty());
    }

    #[test]
    fn grant_with_other_signals_is_taken_first() {
        let registry = WaitRegistry::default();
        let (a, b) = (registry.register("x", "a", None), registry.register("x", "b", None));
        registry.wake_others(&b);
        registry.close();
        registry.deliver("a", GRANT);
        assert_eq!(a.take_wake(), Some(Wake::Granted(GRANT)));
        assert_eq!(a.take_wake(), Some(Wake::Closed));
    }

    #[test]
    fn without_positions_longest_waiter_is_first_in_process() {
        let registry = WaitRegistry::default();
        let (a, b, other) = (
            registry.register("x", "a", None),
            registry.register("x", "b", None),
            registry.register("y", "c", None),
        );
        assert_eq!(
            [&a, &b, &other].map(|slot| registry.is_first_in_process(slot)),
            [true, false, true]
        );
        registry.unregister(&a);
        assert!(registry.is_first_in_process(&b));
    }

    /// Fault: N65
    #[test]
    fn known_position_ranks_before_arrival_order() {
        let registry = WaitRegistry::default();
        let (a, b, c) = (
            registry.register("x", "a", None),
            registry.register("x", "b", None),
            registry.register("x", "c", None),
        );
        let first = || [&a, &b, &c].map(|slot| registry.is_first_in_process(slot));
        registry.set_position(&c, 7);
        assert_eq!(first(), [false, false, true]);
        registry.set_position(&b, 3);
        registry.set_position(&a, 9);
        assert_eq!(first(), [false, true, false]);
        // Its entry was lost, so it queued again at the end.
        registry.set_position(&b, 12);
        assert_eq!(first(), [false, false, true]);
        registry.unregister(&c);
        assert_eq!(first(), [true, false, false]);
        registry.unregister(&a);
        registry.unregister(&b);
        assert!(registry.waiters.lock().by_lock.is_empty());
    }

    /// The nested waiter runs in a logger that the outer one has called.
    ///
    /// Fault: N99
    #[test]
    fn nested_waiter_on_same_thread_is_also_first() {
        let registry = WaitRegistry::default();
        let (me, other) = (threads::current(), thread::spawn(threads::current).join().unwrap());
        let (outer, nested) = (registry.register("x", "a", me), registry.register("x", "b", me));
        assert!([&outer, &nested].iter().all(|slot| registry.is_first_in_process(slot)));
        let other_thread = registry.register("x", "c", other);
        registry.set_position(&other_thread, 0);
        assert!([&outer, &nested].iter().all(|slot| !registry.is_first_in_process(slot)));
        registry.set_position(&outer, 1);
        registry.unregister(&other_thread);
        assert!(registry.is_first_in_process(&nested), "must also hold if positions are known");
    }

    #[test]
    fn wake_same_lock_wakes_no_waiter_of_another_lock() {
        let registry = WaitRegistry::default();
        let (a, b, other) = (
            registry.register("x", "a", None),
            registry.register("x", "b", None),
            registry.register("y", "c", None),
        );
        registry.wake_same_lock(&a);
        assert_eq!(
            [&a, &b, &other].map(|slot| slot.take_wake()),
            [None, Some(Wake::Recheck), None]
        );
        assert_eq!(b.take_wake(), None, "signal was not consumed");
    }

    /// Fault: N121
    #[test]
    fn wake_next_after_unregister_wakes_first_waiter() {
        let registry = WaitRegistry::default();
        let [a, b, c] = ["a", "b", "c"].map(|id| registry.register("x", id, None));
        let other = registry.register("y", "d", None);
        registry.set_position(&c, 4);
        registry.unregister(&a);
        registry.wake_next(&a);
        assert_eq!(
            [&b, &c, &other].map(|slot| slot.take_wake()),
            [None, Some(Wake::Recheck), None]
        );
        registry.unregister(&other);
        registry.wake_next(&other);
        assert_eq!([&b, &c].map(|slot| slot.take_wake()), [None, None]);
    }

    #[test]
    fn promote_follower_chooses_only_a_parked_thread() {
        let registry = WaitRegistry::default();
        let (a, b) = (registry.register("x", "a", None), registry.register("x", "b", None));
        registry.promote_follower();
        b.prepare_to_park();
        registry.promote_follower();
        assert_eq!([&a, &b].map(|slot| slot.signals.lock().promoted), [false, true]);
        // A thread that is promoted between the announcement and the sleep does not sleep.
        b.park(Moment::NEVER);
        assert!(b.finish_park());
        registry.promote_follower();
        assert!(!b.finish_park(), "thread was promoted while awake");
    }

    /// No thread reads a subscription here, so only `close` itself can end the sleep early.
    /// Promise: P6
    #[test]
    fn close_wakes_all_parked_waiters() {
        let registry = WaitRegistry::default();
        let sleepers = ["a", "b"].map(|id| {
            let slot = registry.register("x", id, None);
            thread::spawn(move || {
                let until = soon();
                slot.park(until);
                (slot.take_wake(), clock::now() < until)
            })
        });
        registry.close();
        for sleeper in sleepers {
            assert_eq!(sleeper.join().unwrap(), (Some(Wake::Closed), true));
        }
    }

    #[test]
    fn register_after_close_reports_closed() {
        let registry = WaitRegistry::default();
        registry.close();
        assert_eq!(registry.register("x", "a", None).take_wake(), Some(Wake::Closed));
    }
}
