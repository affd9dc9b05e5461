//! `WaitHandle`: the registration of a waiting thread.

use std::sync::Arc;

use super::{
    listener::GrantListener,
    registry::{WaitSlot, Wake},
};
use crate::{
    backend::QueuePlace,
    core::cancel::{CancelRegistration, CancelToken},
    sys::clock::{self, Moment},
};

/// Registration of a waiting thread, which ends when this is dropped.
#[derive(Debug)]
pub(crate) struct WaitHandle {
    slot: Arc<WaitSlot>,
    listener: Arc<GrantListener>,
    _cancellation: Option<CancelRegistration>,
}

impl WaitHandle {
    /// Registers the calling thread as a waiter for a lock. The thread must do so before it asks
    /// the server for a queue entry; otherwise its grant could arrive before it is registered.
    pub(crate) fn register(
        listener: &Arc<GrantListener>,
        lock: &str,
        id: &str,
        cancel: Option<&CancelToken>,
    ) -> WaitHandle {
        let slot = listener.registry.register(lock, id, cancel.is_some());
        let cancellation = cancel.map(|token| {
            let slot = slot.clone();
            token.on_cancel(Arc::new(move || slot.cancel()))
        });
        WaitHandle { slot, listener: listener.clone(), _cancellation: cancellation }
    }

    /// Unique number of this waiter.
    pub(crate) fn number(&self) -> u64 {
        self.slot.number()
    }

    /// Makes sure that a grant can be received. Returns false if that is not possible now. Blocks
    /// until `until` at the latest.
    pub(crate) fn ensure_subscribed(&self, until: Moment) -> bool {
        self.listener.ensure_subscribed(until, &self.slot)
    }

    /// Closes the subscription because the server at `place` replied, to a request sent at
    /// `asked_at`, that it has no subscriber. Returns true if the caller must subscribe again.
    pub(crate) fn invalidate_subscription(&self, place: QueuePlace, asked_at: Moment) -> bool {
        self.listener.invalidate(place, asked_at)
    }

    /// Records the queue position that the server reported.
    pub(crate) fn set_position(&self, position: u64) {
        self.listener.registry.set_position(&self.slot, position);
    }

    /// Last queue position that the server reported.
    pub(crate) fn position(&self) -> Option<u64> {
        self.slot.known_position()
    }

    /// Whether no other thread of this manager comes before this one in the queue for its lock.
    pub(crate) fn is_first_in_process(&self) -> bool {
        self.listener.registry.is_first_in_process(&self.slot)
    }

    /// Makes all other waiters of this manager for the same lock ask again.
    pub(crate) fn wake_same_lock(&self) {
        self.listener.registry.wake_same_lock(&self.slot);
    }

    /// Makes the other waiters of this manager for the same lock ask again if they have lost their
    /// queue entries, as this one had, which is at `position` now.
    pub(crate) fn wake_same_lock_if_lost(&self, position: u64) {
        self.listener.registry.wake_same_lock_if_lost(&self.slot, position);
    }

    /// If no thread reads the subscription, makes a sleeping one read it.
    pub(crate) fn promote_follower(&self) {
        self.listener.promote_follower();
    }

    /// Blocks until there is a signal, or until `until`.
    pub(crate) fn wait(&self, until: Moment) -> Wake {
        // Whether other waiters rely on this thread to read the subscription.
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
                let wake = self.listener.lead(subscription, &self.slot, until);
                self.slot.set_wake_read(None);
                break wake;
            }
            self.slot.prepare_to_park();
            if !self.listener.has_idle_subscription() {
                self.slot.park(until);
            }
            promoted |= self.slot.finish_park();
        };
        // A thread that was granted the lock will drop this handle, which promotes another one.
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
            // Without a subscription, nothing else makes the next waiter poll for the others.
            self.listener.registry.wake_next(&self.slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        backend::redis::{Endpoint, RedisBackend, RedisSettings},
        observe::Observer,
    };

    /// Fault: N121
    #[test]
    fn handle_dropped_without_subscription_wakes_next_waiter() {
        let nowhere = Arc::new(Endpoint::parse("unix:///nowhere").unwrap());
        let observer = Observer::start(Vec::new(), nowhere.label.clone(), 1, false).unwrap();
        let settings = RedisSettings { pool_size: 1, ..RedisSettings::default() };
        let backend = RedisBackend::new(nowhere, settings, observer).unwrap();
        let listener = Arc::new(GrantListener::new(Arc::new(backend), "channel".into()));
        let [first, second, third] =
            ["a", "b", "c"].map(|id| WaitHandle::register(&listener, "x", id, None));
        assert!(!listener.is_subscribed());
        drop(first);
        assert_eq!((second.slot.take_wake(), third.slot.take_wake()), (Some(Wake::Recheck), None));
    }
}
