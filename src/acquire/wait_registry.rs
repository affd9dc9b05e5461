//! `Mailbox`: the waiting threads of a manager by the id they wait under. A grant goes to the one
//! thread that waits for it and wakes nobody else.
//!
//! A grant for an id that nobody waits under is ignored: whoever leaves while the server may still
//! name it takes its claim back at the server, and whoever looked and found the lock its own
//! already has it.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
    thread::ThreadId,
};

use crate::{
    clock::{self, Moment},
    sync::{
        Condvar, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    threads,
};

/// Of who has not been told its place in the server's line.
const UNKNOWN_POSITION: u64 = u64::MAX;

/// Waiters by the places in the server's line that were told last, then by order of coming; and on
/// which thread each is.
type ByPosition = BTreeMap<(u64, u64), Option<ThreadId>>;

#[derive(Debug, Default)]
pub(crate) struct WaitRegistry {
    /// Guards who waits.
    waiters: Mutex<Waiters>,
}

#[derive(Debug, Default)]
struct Waiters {
    /// By the order of their identifiers, which is the same in each run of a simulated world.
    slots: BTreeMap<Box<str>, Arc<WaitSlot>>,
    /// Who waits for a lock in this process.
    by_lock: HashMap<Box<str>, ByPosition>,
    last_number: u64,
    closed: bool,
}

/// Where news for one waiting thread is put.
#[derive(Debug)]
pub(crate) struct WaitSlot {
    lock: Box<str>,
    id: Box<str>,
    number: u64,
    /// Its place in the server's line when it was last told; only written while the mailbox is
    /// locked.
    position: AtomicU64,
    /// Guards the news for one thread.
    signals: Mutex<Signals>,
    wakeup: Condvar,
}

#[derive(Debug, Default)]
struct Signals {
    grant: Option<GrantNotice>,
    recheck: bool,
    closed: bool,
    /// Nobody listens to the server, and this thread should.
    promoted: bool,
    /// The thread sleeps on `arrived`.
    parked: bool,
}

/// The server has given the lock to a waiter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GrantNotice {
    pub(crate) token: u64,
    pub(crate) granted_at_us: u64,
    pub(crate) px_ms: u64,
}

/// Why a waiter woke up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wake {
    Granted(GrantNotice),
    /// Its place in the line may be lost.
    Recheck,
    /// The moment has come.
    Timeout,
    /// The manager is shutting down.
    Closed,
}

impl WaitRegistry {
    /// Opens a slot for a thread.
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

    /// Closes a slot; a grant that comes later is for nobody.
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

    /// Lets the first of those who wait for the lock of this one, which was shut, look again.
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

    /// The server has told a waiter its place in the line.
    pub(crate) fn set_position(&self, slot: &WaitSlot, position: u64) {
        let mut waiters = self.waiters.lock();
        let Some(queue) = waiters.by_lock.get_mut(&slot.lock) else { return };
        let thread = queue.remove(&slot.sort_key()).flatten();
        slot.position.store(position, Ordering::Relaxed);
        queue.insert(slot.sort_key(), thread);
    }

    /// Whether no other thread of this manager is known to stand before this one in the line for
    /// this lock, or has waited longer where no places are known. One of them looks for all, as
    /// soon as its place asks for. Who is on the same thread does not: it has called a logger,
    /// in which this one waits.
    pub(crate) fn is_first_in_process(&self, slot: &WaitSlot) -> bool {
        let waiters = self.waiters.lock();
        let Some(queue) = waiters.by_lock.get(&slot.lock) else { return false };
        let first = queue
            .iter()
            .find(|(key, thread)| **key == slot.sort_key() || !threads::is_current(**thread));
        first.is_some_and(|(key, _)| *key == slot.sort_key())
    }

    /// Brings a grant to its waiter, if there is one.
    pub(crate) fn deliver(&self, id: &str, notice: GrantNotice) -> bool {
        let slot = self.waiters.lock().slots.get(id).cloned();
        let Some(slot) = slot else { return false };
        slot.signal(|signals| signals.grant = Some(notice));
        true
    }

    /// Lets every waiter but one look again: the one that found out is awake.
    pub(crate) fn wake_others(&self, caller: &WaitSlot) {
        for slot in self.slots_where(|slot| slot.number != caller.number) {
            slot.signal(|signals| signals.recheck = true);
        }
    }

    /// The same for the waiters for one lock.
    pub(crate) fn wake_same_lock(&self, caller: &WaitSlot) {
        for slot in
            self.slots_where(|slot| slot.lock == caller.lock && slot.number != caller.number)
        {
            slot.signal(|signals| signals.recheck = true);
        }
    }

    /// Has one sleeping waiter listen to the server, if any sleeps.
    pub(crate) fn promote_follower(&self) {
        let promoted = {
            let waiters = self.waiters.lock();
            waiters.slots.values().find(|slot| slot.try_promote()).cloned()
        };
        if let Some(slot) = promoted {
            clock::wake_one(&slot.wakeup);
        }
    }

    /// Wakes all waiters for good, and all that come later.
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
    /// A number that differs between waiters.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    fn sort_key(&self) -> (u64, u64) {
        (self.position.load(Ordering::Relaxed), self.number)
    }

    /// What has come, without waiting.
    pub(crate) fn take_wake(&self) -> Option<Wake> {
        self.signals.lock().take_wake()
    }

    /// Says that the thread is about to sleep, and has to be called if somebody has to listen.
    pub(crate) fn prepare_to_park(&self) {
        self.signals.lock().parked = true;
    }

    /// Takes that back; true if it was called meanwhile.
    pub(crate) fn finish_park(&self) -> bool {
        let mut signals = self.signals.lock();
        signals.parked = false;
        std::mem::take(&mut signals.promoted)
    }

    /// Sleeps until something has come, it is called, or the moment has come.
    pub(crate) fn park(&self, until: Moment) {
        let mut signals = self.signals.lock();
        while !signals.has_any() && clock::now() < until {
            clock::park(&self.wakeup, &mut signals, until);
        }
    }

    /// Calls the thread if it sleeps: seen and told at once, so that it cannot have got up in
    /// between.
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
        let mailbox = Arc::new(WaitRegistry::default());
        let (a, b) = (mailbox.register("x", "a", None), mailbox.register("x", "b", None));
        let waiting = thread::spawn(move || {
            a.park(soon());
            a.take_wake()
        });
        assert!(mailbox.deliver("a", GRANT));
        assert_eq!(waiting.join().unwrap(), Some(Wake::Granted(GRANT)));
        assert_eq!(b.take_wake(), None);
    }

    #[test]
    fn grant_for_unregistered_id_is_ignored() {
        let mailbox = WaitRegistry::default();
        let a = mailbox.register("x", "a", None);
        mailbox.unregister(&a);
        assert!(!mailbox.deliver("a", GRANT));
        assert!(mailbox.waiters.lock().slots.is_empty());
        assert!(mailbox.waiters.lock().by_lock.is_empty());
    }

    #[test]
    fn grant_with_other_signals_is_taken_first() {
        let mailbox = WaitRegistry::default();
        let (a, b) = (mailbox.register("x", "a", None), mailbox.register("x", "b", None));
        mailbox.wake_others(&b);
        mailbox.close();
        mailbox.deliver("a", GRANT);
        assert_eq!(a.take_wake(), Some(Wake::Granted(GRANT)));
        assert_eq!(a.take_wake(), Some(Wake::Closed));
    }

    #[test]
    fn without_positions_longest_waiter_is_first_in_process() {
        let mailbox = WaitRegistry::default();
        let (a, b, other) = (
            mailbox.register("x", "a", None),
            mailbox.register("x", "b", None),
            mailbox.register("y", "c", None),
        );
        assert_eq!(
            [&a, &b, &other].map(|slot| mailbox.is_first_in_process(slot)),
            [true, false, true]
        );
        mailbox.unregister(&a);
        assert!(mailbox.is_first_in_process(&b));
    }

    #[test]
    fn known_position_ranks_before_arrival_order() {
        let mailbox = WaitRegistry::default();
        let (a, b, c) = (
            mailbox.register("x", "a", None),
            mailbox.register("x", "b", None),
            mailbox.register("x", "c", None),
        );
        let front = || [&a, &b, &c].map(|slot| mailbox.is_first_in_process(slot));
        mailbox.set_position(&c, 7);
        assert_eq!(front(), [false, false, true]);
        mailbox.set_position(&b, 3);
        mailbox.set_position(&a, 9);
        assert_eq!(front(), [false, true, false]);
        // Its place was lost, and it had to go to the end.
        mailbox.set_position(&b, 12);
        assert_eq!(front(), [false, false, true]);
        mailbox.unregister(&c);
        assert_eq!(front(), [true, false, false]);
        mailbox.unregister(&a);
        mailbox.unregister(&b);
        assert!(mailbox.waiters.lock().by_lock.is_empty());
    }

    /// As one in whose logger the other is.
    #[test]
    fn nested_waiter_on_same_thread_is_also_first() {
        let mailbox = WaitRegistry::default();
        let (me, other) = (threads::current(), thread::spawn(threads::current).join().unwrap());
        let (outer, nested) = (mailbox.register("x", "a", me), mailbox.register("x", "b", me));
        assert!([&outer, &nested].iter().all(|slot| mailbox.is_first_in_process(slot)));
        let stranger = mailbox.register("x", "c", other);
        mailbox.set_position(&stranger, 0);
        assert!([&outer, &nested].iter().all(|slot| !mailbox.is_first_in_process(slot)));
        mailbox.set_position(&outer, 1);
        mailbox.unregister(&stranger);
        assert!(
            mailbox.is_first_in_process(&nested),
            "also where the server has told their places"
        );
    }

    #[test]
    fn wake_same_lock_wakes_no_waiter_of_another_lock() {
        let mailbox = WaitRegistry::default();
        let (a, b, other) = (
            mailbox.register("x", "a", None),
            mailbox.register("x", "b", None),
            mailbox.register("y", "c", None),
        );
        mailbox.wake_same_lock(&a);
        assert_eq!(
            [&a, &b, &other].map(|slot| slot.take_wake()),
            [None, Some(Wake::Recheck), None]
        );
        assert_eq!(b.take_wake(), None, "told once");
    }

    #[test]
    fn wake_next_after_unregister_wakes_first_waiter() {
        let mailbox = WaitRegistry::default();
        let [a, b, c] = ["a", "b", "c"].map(|id| mailbox.register("x", id, None));
        let other = mailbox.register("y", "d", None);
        mailbox.set_position(&c, 4);
        mailbox.unregister(&a);
        mailbox.wake_next(&a);
        assert_eq!(
            [&b, &c, &other].map(|slot| slot.take_wake()),
            [None, Some(Wake::Recheck), None]
        );
        mailbox.unregister(&other);
        mailbox.wake_next(&other);
        assert_eq!([&b, &c].map(|slot| slot.take_wake()), [None, None]);
    }

    #[test]
    fn promote_follower_chooses_only_a_parked_thread() {
        let mailbox = WaitRegistry::default();
        let (a, b) = (mailbox.register("x", "a", None), mailbox.register("x", "b", None));
        mailbox.promote_follower();
        b.prepare_to_park();
        mailbox.promote_follower();
        assert_eq!([&a, &b].map(|slot| slot.signals.lock().promoted), [false, true]);
        // Called between lying down and falling asleep, it does not sleep.
        b.park(Moment::NEVER);
        assert!(b.finish_park());
        mailbox.promote_follower();
        assert!(!b.finish_park(), "it is up");
    }

    /// As long as it may sleep, with nobody to listen, whose end would have it look.
    #[test]
    fn close_wakes_all_parked_waiters() {
        let mailbox = WaitRegistry::default();
        let sleepers = ["a", "b"].map(|id| {
            let slot = mailbox.register("x", id, None);
            thread::spawn(move || {
                let until = soon();
                slot.park(until);
                (slot.take_wake(), clock::now() < until)
            })
        });
        mailbox.close();
        for sleeper in sleepers {
            assert_eq!(sleeper.join().unwrap(), (Some(Wake::Closed), true));
        }
    }

    #[test]
    fn register_after_close_reports_closed() {
        let mailbox = WaitRegistry::default();
        mailbox.close();
        assert_eq!(mailbox.register("x", "a", None).take_wake(), Some(Wake::Closed));
    }
}
