//! `Ticket`: a thread's place to wait in.

use std::sync::Arc;

use super::{
    grant_listener::GrantListener,
    wait_registry::{WaitSlot, Wake},
};
use crate::{
    clock::{self, Moment},
    threads,
};

/// A thread's place to wait in.
#[derive(Debug)]
pub(crate) struct WaitHandle {
    slot: Arc<WaitSlot>,
    listener: Arc<GrantListener>,
}

impl WaitHandle {
    /// Of a waiter for a lock.
    pub(super) fn new(listener: Arc<GrantListener>, lock: &str, id: &str) -> WaitHandle {
        WaitHandle { slot: listener.registry.register(lock, id, threads::current()), listener }
    }

    /// A number that differs between waiters.
    pub(crate) fn number(&self) -> u64 {
        self.slot.number()
    }

    /// Makes sure that a grant would be heard; blocks until `until` at the latest.
    pub(crate) fn ensure_subscribed(&self, until: Moment) -> bool {
        self.listener.ensure_subscribed(until, &self.slot)
    }

    /// The node on which a waiter stands says that nobody listened there when it was asked. True if
    /// the line has to be opened anew.
    pub(crate) fn invalidate_subscription(&self, node: usize, asked_at: Moment) -> bool {
        self.listener.invalidate(node, asked_at)
    }

    /// The server has told its place in the line.
    pub(crate) fn set_position(&self, position: u64) {
        self.listener.registry.set_position(&self.slot, position);
    }

    /// Whether no other thread of this manager stands before it in the line for this lock.
    pub(crate) fn is_first_in_process(&self) -> bool {
        self.listener.registry.is_first_in_process(&self.slot)
    }

    /// Has everybody else here who waits for this lock look again.
    pub(crate) fn wake_same_lock(&self) {
        self.listener.registry.wake_same_lock(&self.slot);
    }

    /// If nobody listens, has a sleeper do it.
    pub(crate) fn promote_follower(&self) {
        self.listener.promote_follower();
    }

    /// Blocks until there is news or the moment has come.
    pub(crate) fn wait(&self, until: Moment) -> Wake {
        // Whether somebody counts on this thread to listen.
        let mut promoted = false;
        let wake = loop {
            if let Some(wake) = self.slot.take_wake() {
                break wake;
            }
            if clock::now() >= until {
                break Wake::Timeout;
            }
            if let Some(subscription) = self.listener.take_subscription() {
                promoted = true;
                break self.listener.lead(subscription, &self.slot, until);
            }
            self.slot.prepare_to_park();
            if !self.listener.has_idle_subscription() {
                self.slot.park(until);
            }
            promoted |= self.slot.finish_park();
        };
        // Who has been granted the lock leaves for good, and calls the next one when its ticket
        // goes.
        if promoted && !matches!(wake, Wake::Granted(_)) {
            self.listener.promote_follower();
        }
        wake
    }
}

impl Drop for WaitHandle {
    fn drop(&mut self) {
        self.listener.registry.unregister(&self.slot);
        if self.listener.is_subscribed() {
            self.listener.promote_follower();
        } else {
            // Nothing will tell the others that it is the turn of one of them to look for all.
            self.listener.registry.wake_next(&self.slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{node::Endpoint, observer::Observer, redlock::Redlock};

    #[test]
    fn handle_dropped_without_subscription_wakes_next_waiter() {
        let nowhere = Arc::new(Endpoint::parse("unix:///nowhere").unwrap());
        let observer = Observer::start(Default::default(), nowhere.label.clone()).unwrap();
        let timeout = Duration::from_secs(1);
        let redlock =
            Redlock::new(&[nowhere], 1, timeout, Duration::ZERO, timeout, observer).unwrap();
        let listener = Arc::new(GrantListener::new(Arc::new(redlock), "channel".into()));
        let [first, second, third] = ["a", "b", "c"].map(|id| listener.register("x", id));
        assert!(!listener.is_subscribed());
        drop(first);
        assert_eq!((second.slot.take_wake(), third.slot.take_wake()), (Some(Wake::Recheck), None));
    }
}
