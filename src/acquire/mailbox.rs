//! `Mailbox`: the waiting threads of a manager by the id they wait under. A grant goes to the one thread that waits for
//! it and wakes nobody else.
//!
//! A grant for an id that nobody waits under is ignored: whoever leaves while the server may still name it takes its
//! claim back at the server, and whoever looked and found the lock its own already has it.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use parking_lot::{Condvar, Mutex};

use crate::clock::{self, Moment};

#[derive(Debug, Default)]
pub(crate) struct Mailbox {
    /// Guards who waits.
    waiters: Mutex<Waiters>,
}

#[derive(Debug, Default)]
struct Waiters {
    slots: HashMap<Box<str>, Arc<Slot>>,
    /// Who waits for a lock in this process, by order of coming.
    lines: HashMap<Box<str>, BTreeSet<u64>>,
    last: u64,
    closed: bool,
}

#[derive(Debug)]
struct Slot {
    lock: Box<str>,
    number: u64,
    /// Guards the news for one thread.
    news: Mutex<News>,
    arrived: Condvar,
}

#[derive(Debug, Default)]
struct News {
    grant: Option<Handover>,
    look: bool,
    closed: bool,
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
    /// Opens a slot for the calling thread; dropping it closes it.
    pub(crate) fn open(self: &Arc<Mailbox>, lock: &str, id: &str) -> Ticket {
        let mut waiters = self.waiters.lock();
        waiters.last += 1;
        let number = waiters.last;
        let news = Mutex::new(News { closed: waiters.closed, ..News::default() });
        let slot = Arc::new(Slot { lock: lock.into(), number, news, arrived: Condvar::new() });
        waiters.slots.insert(id.into(), slot.clone());
        waiters.lines.entry(lock.into()).or_default().insert(number);
        drop(waiters);
        Ticket { mailbox: self.clone(), slot, id: id.into() }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiters.lock().slots.is_empty()
    }

    /// Brings a grant to its waiter, if there is one.
    pub(crate) fn deliver(&self, id: &str, grant: Handover) -> bool {
        let slot = self.waiters.lock().slots.get(id).cloned();
        let Some(slot) = slot else { return false };
        slot.tell(|news| news.grant = Some(grant));
        true
    }

    /// Lets every waiter look again.
    pub(crate) fn look_again(&self) {
        for slot in self.slots(|_| true) {
            slot.tell(|news| news.look = true);
        }
    }

    /// Lets every waiter for one lock look again, except the one that found out.
    pub(crate) fn others_look_again(&self, ticket: &Ticket) {
        for slot in self.slots(|slot| slot.lock == ticket.slot.lock && slot.number != ticket.slot.number) {
            slot.tell(|news| news.look = true);
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
    fn tell(&self, change: impl FnOnce(&mut News)) {
        change(&mut self.news.lock());
        self.arrived.notify_one();
    }
}

/// A thread's place in the mailbox.
#[derive(Debug)]
pub(crate) struct Ticket {
    mailbox: Arc<Mailbox>,
    slot: Arc<Slot>,
    id: Box<str>,
}

impl Ticket {
    /// A number that differs between waiters.
    pub(crate) fn number(&self) -> u64 {
        self.slot.number
    }

    /// Whether no other thread of this manager has waited longer for this lock. One of them looks for all.
    pub(crate) fn is_front(&self) -> bool {
        let waiters = self.mailbox.waiters.lock();
        waiters.lines.get(&self.slot.lock).and_then(BTreeSet::first) == Some(&self.slot.number)
    }

    /// Blocks until there is news or the moment has come.
    pub(crate) fn wait(&self, until: Moment) -> Woken {
        let mut news = self.slot.news.lock();
        loop {
            if let Some(grant) = news.grant.take() {
                return Woken::Granted(grant);
            }
            if news.closed {
                return Woken::Closed;
            }
            if std::mem::take(&mut news.look) {
                return Woken::Look;
            }
            if clock::now() >= until {
                return Woken::Time;
            }
            clock::park(&self.slot.arrived, &mut news, until);
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut waiters = self.mailbox.waiters.lock();
        waiters.slots.remove(&self.id);
        if let Some(line) = waiters.lines.get_mut(&self.slot.lock) {
            line.remove(&self.slot.number);
            if line.is_empty() {
                waiters.lines.remove(&self.slot.lock);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{thread, time::Duration};

    const GRANT: Handover = Handover { token: 5, granted_at_us: 6, px_ms: 7 };

    fn soon() -> Moment {
        clock::now().saturating_add(Duration::from_secs(60))
    }

    #[test]
    fn a_grant_reaches_its_waiter_and_nobody_else() {
        let mailbox = Arc::new(Mailbox::default());
        let (a, b) = (mailbox.open("x", "a"), mailbox.open("x", "b"));
        let waiting = thread::spawn(move || (a.wait(soon()), a));
        assert!(mailbox.deliver("a", GRANT));
        assert_eq!(waiting.join().unwrap().0, Woken::Granted(GRANT));
        assert_eq!(b.wait(clock::now()), Woken::Time);
    }

    #[test]
    fn a_grant_for_nobody_is_ignored() {
        let mailbox = Arc::new(Mailbox::default());
        drop(mailbox.open("x", "a"));
        assert!(!mailbox.deliver("a", GRANT));
        assert!(mailbox.is_empty());
        assert!(mailbox.waiters.lock().lines.is_empty());
    }

    #[test]
    fn a_grant_comes_before_everything_else() {
        let mailbox = Arc::new(Mailbox::default());
        let ticket = mailbox.open("x", "a");
        mailbox.look_again();
        mailbox.close();
        mailbox.deliver("a", GRANT);
        assert_eq!(ticket.wait(soon()), Woken::Granted(GRANT));
        assert_eq!(ticket.wait(soon()), Woken::Closed);
    }

    #[test]
    fn the_longest_waiting_thread_is_in_front() {
        let mailbox = Arc::new(Mailbox::default());
        let (a, b, other) = (mailbox.open("x", "a"), mailbox.open("x", "b"), mailbox.open("y", "c"));
        assert_eq!((a.is_front(), b.is_front(), other.is_front()), (true, false, true));
        drop(a);
        assert!(b.is_front());
    }

    #[test]
    fn only_waiters_for_the_same_lock_look_again() {
        let mailbox = Arc::new(Mailbox::default());
        let (a, b, other) = (mailbox.open("x", "a"), mailbox.open("x", "b"), mailbox.open("y", "c"));
        mailbox.others_look_again(&a);
        assert_eq!(a.wait(clock::now()), Woken::Time);
        assert_eq!(b.wait(clock::now()), Woken::Look);
        assert_eq!(b.wait(clock::now()), Woken::Time, "told once");
        assert_eq!(other.wait(clock::now()), Woken::Time);
    }

    #[test]
    fn who_comes_after_closing_is_turned_away() {
        let mailbox = Arc::new(Mailbox::default());
        mailbox.close();
        assert_eq!(mailbox.open("x", "a").wait(soon()), Woken::Closed);
    }
}
