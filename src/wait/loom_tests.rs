//! Checks with loom every order in which threads can meet over the mailbox; run them with `make
//! loom`. The mailbox and its slots are the real ones.

use loom::{model, sync::Arc, thread};

use super::registry::{WaitRegistry, Wake};
use crate::{
    core::claim::GrantNotice,
    sys::{clock::Moment, sync::Mutex},
};

const GRANT: GrantNotice = GrantNotice { token: 5, granted_at_us: 6, px_ms: 7, server: 0 };

/// A grant that arrives while its waiter leaves is taken by the waiter, or reported as undelivered.
#[test]
fn grant_to_leaving_waiter_is_taken_or_undelivered() {
    model(|| {
        let registry = Arc::new(WaitRegistry::default());
        let slot = registry.register("x", "a", false);
        let delivers = {
            let registry = registry.clone();
            thread::spawn(move || registry.deliver("a", GRANT))
        };
        registry.unregister(&slot);
        let delivered = delivers.join().unwrap();
        assert_eq!(slot.take_wake().is_some(), delivered);
    });
}

/// A grant and the end of the manager arrive while a waiter parks. The waiter receives both.
#[test]
fn parking_waiter_receives_grant_and_close() {
    model(|| {
        let registry = Arc::new(WaitRegistry::default());
        let slot = registry.register("x", "a", false);
        let delivers = {
            let registry = registry.clone();
            thread::spawn(move || assert!(registry.deliver("a", GRANT)))
        };
        let closes = {
            let registry = registry.clone();
            thread::spawn(move || registry.close())
        };
        slot.park(Moment::NEVER);
        let mut received = vec![slot.take_wake().unwrap()];
        delivers.join().unwrap();
        closes.join().unwrap();
        received.extend(slot.take_wake());
        received.extend(slot.take_wake());
        received.sort_by_key(|reason| *reason == Wake::Closed);
        received.dedup();
        assert_eq!(received, [Wake::Granted(GRANT), Wake::Closed]);
    });
}

/// The invariant of listener.rs: one thread stops reading the subscription while another parks.
/// Here the subscription is only a flag.
#[test]
fn leaving_leader_never_misses_parking_waiter() {
    model(|| {
        let registry = Arc::new(WaitRegistry::default());
        let free = Arc::new(Mutex::new(false));
        let slot = registry.register("x", "a", false);
        let leaves = {
            let (registry, free) = (registry.clone(), free.clone());
            thread::spawn(move || {
                // As in `return_subscription` and `promote_follower`.
                *free.lock() = true;
                let is_free = *free.lock();
                if is_free {
                    registry.promote_follower();
                }
            })
        };
        // As in `Ticket::wait`.
        while !std::mem::take(&mut *free.lock()) {
            slot.prepare_to_park();
            let is_free = *free.lock();
            if !is_free {
                slot.park(Moment::NEVER);
            }
            slot.finish_park();
        }
        leaves.join().unwrap();
    });
}

/// A waiter that wakes on its own while it is called to lead is called once.
#[test]
fn waking_waiter_is_called_at_most_once() {
    model(|| {
        let registry = Arc::new(WaitRegistry::default());
        let slot = registry.register("x", "a", false);
        slot.prepare_to_park();
        let calls = {
            let registry = registry.clone();
            thread::spawn(move || registry.promote_follower())
        };
        // It wakes on its own meanwhile: either it was called, or it finds out that nobody reads
        // the subscription.
        let called = slot.finish_park();
        calls.join().unwrap();
        assert!(!slot.finish_park() || !called, "called twice");
    });
}
