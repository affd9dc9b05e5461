//! `Mailbox`: the waiting threads of a manager by the id they wait under. A grant goes to the one thread that waits for
//! it and wakes nobody else.
//!
//! A grant for an id that nobody waits under is ignored: whoever leaves while the server may still name it takes its
//! claim back at the server, and whoever looked and found the lock its own already has it.

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
const NOWHERE: u64 = u64::MAX;

/// Waiters by the places in the server's line that were told last, then by order of coming; and on which thread each is.
type Ranks = BTreeMap<(u64, u64), Option<ThreadId>>;

#[derive(Debug, Default)]
pub(crate) struct Mailbox {
    /// Guards who waits.
    waiters: Mutex<Waiters>,
}

#[derive(Debug, Default)]
struct Waiters {
    /// By the order of their identifiers, which is the same in each run of a simulated world.
    slots: BTreeMap<Box<str>, Arc<Slot>>,
    /// Who waits for a lock in this process.
    lines: HashMap<Box<str>, Ranks>,
    last: u64,
    closed: bool,
}

/// Where news for one waiting thread is put.
#[derive(Debug)]
pub(crate) struct Slot {
    lock: Box<str>,
    id: Box<str>,
    number: u64,
    /// Its place in the server's line when it was last told; only written while the mailbox is locked.
    place: AtomicU64,
    /// Guards the news for one thread.
    news: Mutex<News>,
    arrived: Condvar,
}

#[derive(Debug, Default)]
struct News {
    grant: Option<Handover>,
    look: bool,
    closed: bool,
    /// Nobody listens to the server, and this thread should.
    listen: bool,
    /// The thread sleeps on `arrived`.
    parked: bool,
}

/// The server has given the lock to a waiter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Handover {
    pub(crate) token: u64,
    pub(crate) granted_at_us: u64,
    pub(crate) px_ms: u64,
}

/// Why a waiter woke up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Woken {
    Granted(Handover),
    /// Its place in the line may be lost.
    Look,
    /// The moment has come.
    Time,
    /// The manager is shutting down.
    Closed,
}

impl Mailbox {
    /// Opens a slot for a thread.
    pub(crate) fn open(&self, lock: &str, id: &str, thread: Option<ThreadId>) -> Arc<Slot> {
        let mut waiters = self.waiters.lock();
        waiters.last += 1;
        let number = waiters.last;
        let news = Mutex::new(News { closed: waiters.closed, ..News::default() });
        let (place, arrived) = (AtomicU64::new(NOWHERE), Condvar::new());
        let slot = Arc::new(Slot { lock: lock.into(), id: id.into(), number, place, news, arrived });
        waiters.slots.insert(id.into(), slot.clone());
        waiters.lines.entry(lock.into()).or_default().insert(slot.rank(), thread);
        slot
    }

    /// Closes a slot; a grant that comes later is for nobody.
    pub(crate) fn shut(&self, slot: &Slot) {
        let mut waiters = self.waiters.lock();
        waiters.slots.remove(&slot.id);
        if let Some(line) = waiters.lines.get_mut(&slot.lock) {
            line.remove(&slot.rank());
            if line.is_empty() {
                waiters.lines.remove(&slot.lock);
            }
        }
    }

    /// Lets the first of those who wait for the lock of this one, which was shut, look again.
    pub(crate) fn successor_looks(&self, left: &Slot) {
        let successor = {
            let waiters = self.waiters.lock();
            let first = waiters.lines.get(&left.lock).and_then(|line| line.first_key_value());
            first.and_then(|((_, number), _)| waiters.slots.values().find(|slot| slot.number == *number).cloned())
        };
        if let Some(slot) = successor {
            slot.tell(|news| news.look = true);
        }
    }

    /// The server has told a waiter its place in the line.
    pub(crate) fn stands_at(&self, slot: &Slot, place: u64) {
        let mut waiters = self.waiters.lock();
        let Some(line) = waiters.lines.get_mut(&slot.lock) else { return };
        let thread = line.remove(&slot.rank()).flatten();
        slot.place.store(place, Ordering::Relaxed);
        line.insert(slot.rank(), thread);
    }

    /// Whether no other thread of this manager is known to stand before this one in the line for this lock, or has waited
    /// longer where no places are known. One of them looks for all, as soon as its place asks for. Who is on the
    /// same thread does not: it has called a logger, in which this one waits.
    pub(crate) fn is_front(&self, slot: &Slot) -> bool {
        let waiters = self.waiters.lock();
        let Some(line) = waiters.lines.get(&slot.lock) else { return false };
        let first = line.iter().find(|(rank, thread)| **rank == slot.rank() || !threads::is_current(**thread));
        first.is_some_and(|(rank, _)| *rank == slot.rank())
    }

    /// Brings a grant to its waiter, if there is one.
    pub(crate) fn deliver(&self, id: &str, grant: Handover) -> bool {
        let slot = self.waiters.lock().slots.get(id).cloned();
        let Some(slot) = slot else { return false };
        slot.tell(|news| news.grant = Some(grant));
        true
    }

    /// Lets every waiter but one look again: the one that found out is awake.
    pub(crate) fn others_look_again(&self, finder: &Slot) {
        for slot in self.slots(|slot| slot.number != finder.number) {
            slot.tell(|news| news.look = true);
        }
    }

    /// The same for the waiters for one lock.
    pub(crate) fn neighbours_look_again(&self, finder: &Slot) {
        for slot in self.slots(|slot| slot.lock == finder.lock && slot.number != finder.number) {
            slot.tell(|news| news.look = true);
        }
    }

    /// Has one sleeping waiter listen to the server, if any sleeps.
    pub(crate) fn call_listener(&self) {
        let called = {
            let waiters = self.waiters.lock();
            waiters.slots.values().find(|slot| slot.call()).cloned()
        };
        if let Some(slot) = called {
            clock::wake_one(&slot.arrived);
        }
    }

    /// Wakes all waiters for good, and all that come later.
    pub(crate) fn close(&self) {
        self.waiters.lock().closed = true;
        for slot in self.slots(|_| true) {
            slot.tell(|news| news.closed = true);
        }
    }

    fn slots(&self, which: impl Fn(&Slot) -> bool) -> Vec<Arc<Slot>> {
        self.waiters.lock().slots.values().filter(|slot| which(slot)).cloned().collect()
    }
}

impl Slot {
    /// A number that differs between waiters.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    fn rank(&self) -> (u64, u64) {
        (self.place.load(Ordering::Relaxed), self.number)
    }

    /// What has come, without waiting.
    pub(crate) fn take(&self) -> Option<Woken> {
        self.news.lock().take()
    }

    /// Says that the thread is about to sleep, and has to be called if somebody has to listen.
    pub(crate) fn lie_down(&self) {
        self.news.lock().parked = true;
    }

    /// Takes that back; true if it was called meanwhile.
    pub(crate) fn get_up(&self) -> bool {
        let mut news = self.news.lock();
        news.parked = false;
        std::mem::take(&mut news.listen)
    }

    /// Sleeps until something has come, it is called, or the moment has come.
    pub(crate) fn sleep(&self, until: Moment) {
        let mut news = self.news.lock();
        while !news.has_any() && clock::now() < until {
            clock::park(&self.arrived, &mut news, until);
        }
    }

    /// Calls the thread if it sleeps: seen and told at once, so that it cannot have got up in between.
    fn call(&self) -> bool {
        let mut news = self.news.lock();
        let sleeps = std::mem::take(&mut news.parked);
        news.listen |= sleeps;
        sleeps
    }

    fn tell(&self, change: impl FnOnce(&mut News)) {
        change(&mut self.news.lock());
        clock::wake_one(&self.arrived);
    }
}

impl News {
    fn has_any(&self) -> bool {
        self.grant.is_some() || self.look || self.closed || self.listen
    }

    fn take(&mut self) -> Option<Woken> {
        if let Some(grant) = self.grant.take() {
            Some(Woken::Granted(grant))
        } else if self.closed {
            Some(Woken::Closed)
        } else if std::mem::take(&mut self.look) {
            Some(Woken::Look)
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{sync::Arc, thread, time::Duration};

    const GRANT: Handover = Handover { token: 5, granted_at_us: 6, px_ms: 7 };

    fn soon() -> Moment {
        clock::now().saturating_add(Duration::from_secs(60))
    }

    #[test]
    fn a_grant_reaches_its_waiter_and_nobody_else() {
        let mailbox = Arc::new(Mailbox::default());
        let (a, b) = (mailbox.open("x", "a", None), mailbox.open("x", "b", None));
        let waiting = thread::spawn(move || {
            a.sleep(soon());
            a.take()
        });
        assert!(mailbox.deliver("a", GRANT));
        assert_eq!(waiting.join().unwrap(), Some(Woken::Granted(GRANT)));
        assert_eq!(b.take(), None);
    }

    #[test]
    fn a_grant_for_nobody_is_ignored() {
        let mailbox = Mailbox::default();
        let a = mailbox.open("x", "a", None);
        mailbox.shut(&a);
        assert!(!mailbox.deliver("a", GRANT));
        assert!(mailbox.waiters.lock().slots.is_empty());
        assert!(mailbox.waiters.lock().lines.is_empty());
    }

    #[test]
    fn a_grant_comes_before_everything_else() {
        let mailbox = Mailbox::default();
        let (a, b) = (mailbox.open("x", "a", None), mailbox.open("x", "b", None));
        mailbox.others_look_again(&b);
        mailbox.close();
        mailbox.deliver("a", GRANT);
        assert_eq!(a.take(), Some(Woken::Granted(GRANT)));
        assert_eq!(a.take(), Some(Woken::Closed));
    }

    #[test]
    fn the_longest_waiting_thread_is_in_front() {
        let mailbox = Mailbox::default();
        let (a, b, other) = (mailbox.open("x", "a", None), mailbox.open("x", "b", None), mailbox.open("y", "c", None));
        assert_eq!([&a, &b, &other].map(|slot| mailbox.is_front(slot)), [true, false, true]);
        mailbox.shut(&a);
        assert!(mailbox.is_front(&b));
    }

    #[test]
    fn who_stands_in_front_is_before_who_came_first() {
        let mailbox = Mailbox::default();
        let (a, b, c) = (mailbox.open("x", "a", None), mailbox.open("x", "b", None), mailbox.open("x", "c", None));
        let front = || [&a, &b, &c].map(|slot| mailbox.is_front(slot));
        mailbox.stands_at(&c, 7);
        assert_eq!(front(), [false, false, true]);
        mailbox.stands_at(&b, 3);
        mailbox.stands_at(&a, 9);
        assert_eq!(front(), [false, true, false]);
        // Its place was lost, and it had to go to the end.
        mailbox.stands_at(&b, 12);
        assert_eq!(front(), [false, false, true]);
        mailbox.shut(&c);
        assert_eq!(front(), [true, false, false]);
        mailbox.shut(&a);
        mailbox.shut(&b);
        assert!(mailbox.waiters.lock().lines.is_empty());
    }

    /// As one in whose logger the other is.
    #[test]
    fn of_two_on_one_thread_the_first_is_not_waited_for() {
        let mailbox = Mailbox::default();
        let (me, other) = (threads::current(), thread::spawn(threads::current).join().unwrap());
        let (outer, nested) = (mailbox.open("x", "a", me), mailbox.open("x", "b", me));
        assert!([&outer, &nested].iter().all(|slot| mailbox.is_front(slot)));
        let stranger = mailbox.open("x", "c", other);
        mailbox.stands_at(&stranger, 0);
        assert!([&outer, &nested].iter().all(|slot| !mailbox.is_front(slot)));
        mailbox.stands_at(&outer, 1);
        mailbox.shut(&stranger);
        assert!(mailbox.is_front(&nested), "also where the server has told their places");
    }

    #[test]
    fn neighbours_wait_for_the_same_lock() {
        let mailbox = Mailbox::default();
        let (a, b, other) = (mailbox.open("x", "a", None), mailbox.open("x", "b", None), mailbox.open("y", "c", None));
        mailbox.neighbours_look_again(&a);
        assert_eq!([&a, &b, &other].map(|slot| slot.take()), [None, Some(Woken::Look), None]);
        assert_eq!(b.take(), None, "told once");
    }

    #[test]
    fn of_who_is_left_the_first_looks() {
        let mailbox = Mailbox::default();
        let [a, b, c] = ["a", "b", "c"].map(|id| mailbox.open("x", id, None));
        let other = mailbox.open("y", "d", None);
        mailbox.stands_at(&c, 4);
        mailbox.shut(&a);
        mailbox.successor_looks(&a);
        assert_eq!([&b, &c, &other].map(|slot| slot.take()), [None, Some(Woken::Look), None]);
        mailbox.shut(&other);
        mailbox.successor_looks(&other);
        assert_eq!([&b, &c].map(|slot| slot.take()), [None, None]);
    }

    #[test]
    fn only_a_sleeper_is_called_to_listen() {
        let mailbox = Mailbox::default();
        let (a, b) = (mailbox.open("x", "a", None), mailbox.open("x", "b", None));
        mailbox.call_listener();
        b.lie_down();
        mailbox.call_listener();
        assert_eq!([&a, &b].map(|slot| slot.news.lock().listen), [false, true]);
        // Called between lying down and falling asleep, it does not sleep.
        b.sleep(Moment::NEVER);
        assert!(b.get_up());
        mailbox.call_listener();
        assert!(!b.get_up(), "it is up");
    }

    /// As long as it may sleep, with nobody to listen, whose end would have it look.
    #[test]
    fn closing_wakes_whoever_sleeps() {
        let mailbox = Mailbox::default();
        let sleepers = ["a", "b"].map(|id| {
            let slot = mailbox.open("x", id, None);
            thread::spawn(move || {
                let until = soon();
                slot.sleep(until);
                (slot.take(), clock::now() < until)
            })
        });
        mailbox.close();
        for sleeper in sleepers {
            assert_eq!(sleeper.join().unwrap(), (Some(Woken::Closed), true));
        }
    }

    #[test]
    fn who_comes_after_closing_is_turned_away() {
        let mailbox = Mailbox::default();
        mailbox.close();
        assert_eq!(mailbox.open("x", "a", None).take(), Some(Woken::Closed));
    }
}
