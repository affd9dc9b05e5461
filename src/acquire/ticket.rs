//! `Ticket`: a thread's place to wait in.

use std::sync::Arc;

use super::{
    listener::Listener,
    mailbox::{Slot, Woken},
};
use crate::{
    clock::{self, Moment},
    threads,
};

/// A thread's place to wait in.
#[derive(Debug)]
pub(crate) struct Ticket {
    slot: Arc<Slot>,
    listener: Arc<Listener>,
}

impl Ticket {
    /// Of a waiter for a lock.
    pub(super) fn new(listener: Arc<Listener>, lock: &str, id: &str) -> Ticket {
        Ticket { slot: listener.mailbox.open(lock, id, threads::current()), listener }
    }

    /// A number that differs between waiters.
    pub(crate) fn number(&self) -> u64 {
        self.slot.number()
    }

    /// Makes sure that a grant would be heard; blocks until `until` at the latest.
    pub(crate) fn open_line(&self, until: Moment) -> bool {
        self.listener.open(until, &self.slot)
    }

    /// The node on which a waiter stands says that nobody listened there when it was asked. True if the line has to be opened
    /// anew.
    pub(crate) fn distrust_line(&self, order: usize, asked: Moment) -> bool {
        self.listener.distrust(order, asked)
    }

    /// The server has told its place in the line.
    pub(crate) fn stands_at(&self, place: u64) {
        self.listener.mailbox.stands_at(&self.slot, place);
    }

    /// Whether no other thread of this manager stands before it in the line for this lock.
    pub(crate) fn is_front(&self) -> bool {
        self.listener.mailbox.is_front(&self.slot)
    }

    /// Has everybody else here who waits for this lock look again.
    pub(crate) fn neighbours_look_again(&self) {
        self.listener.mailbox.neighbours_look_again(&self.slot);
    }

    /// If nobody listens, has a sleeper do it.
    pub(crate) fn call_listener(&self) {
        self.listener.call_listener();
    }

    /// Blocks until there is news or the moment has come.
    pub(crate) fn wait(&self, until: Moment) -> Woken {
        // Whether somebody counts on this thread to listen.
        let mut called = false;
        let woken = loop {
            if let Some(woken) = self.slot.take() {
                break woken;
            }
            if clock::now() >= until {
                break Woken::Time;
            }
            if let Some(wire) = self.listener.take_line() {
                called = true;
                break self.listener.listen(wire, &self.slot, until);
            }
            self.slot.lie_down();
            if !self.listener.is_free() {
                self.slot.sleep(until);
            }
            called |= self.slot.get_up();
        };
        // Who has been granted the lock leaves for good, and calls the next one when its ticket goes.
        if called && !matches!(woken, Woken::Granted(_)) {
            self.listener.call_listener();
        }
        woken
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.listener.mailbox.shut(&self.slot);
        if self.listener.is_live() {
            self.listener.call_listener();
        } else {
            // Nothing will tell the others that it is the turn of one of them to look for all.
            self.listener.mailbox.successor_looks(&self.slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{node::Endpoint, observer::Observer, redlock::Redlock};

    #[test]
    fn where_no_grant_is_heard_the_next_one_looks() {
        let nowhere = Arc::new(Endpoint::parse("unix:///nowhere").unwrap());
        let observer = Observer::start(Default::default(), nowhere.label.clone()).unwrap();
        let timeout = Duration::from_secs(1);
        let redlock = Redlock::new(&[nowhere], 1, timeout, Duration::ZERO, timeout, observer).unwrap();
        let listener = Arc::new(Listener::new(Arc::new(redlock), "channel".into()));
        let [first, second, third] = ["a", "b", "c"].map(|id| listener.ticket("x", id));
        assert!(!listener.is_live());
        drop(first);
        assert_eq!((second.slot.take(), third.slot.take()), (Some(Woken::Look), None));
    }
}
