//! Every order in which threads can meet over the registry; see `make loom`. WaitRegistry and slots
//! are the real ones.

use loom::{model, sync::Arc, thread};

use super::wait_registry::{GrantNotice, WaitRegistry, Wake};
use crate::{clock::Moment, sync::Mutex};

const GRANT: GrantNotice = GrantNotice { token: 5, granted_at_us: 6, px_ms: 7 };

/// A grant that comes while its waiter leaves is taken by it, or was for nobody.
#[test]
fn a_grant_is_taken_or_was_for_nobody() {
    model(|| {
        let registry = Arc::new(WaitRegistry::default());
        let slot = registry.register("x", "a", None);
        let delivers = {
            let registry = registry.clone();
            thread::spawn(move || registry.deliver("a", GRANT))
        };
        registry.unregister(&slot);
        let delivered = delivers.join().unwrap();
        assert_eq!(slot.take_wake().is_some(), delivered);
    });
}

/// A grant, a call to look and the end of the manager come at once to a waiter that lies down to
/// sleep.
#[test]
fn a_sleeper_hears_everything() {
    model(|| {
        let registry = Arc::new(WaitRegistry::default());
        let slot = registry.register("x", "a", None);
        let delivers = {
            let registry = registry.clone();
            thread::spawn(move || assert!(registry.deliver("a", GRANT)))
        };
        let closes = {
            let registry = registry.clone();
            thread::spawn(move || registry.close())
        };
        slot.park(Moment::NEVER);
        let mut heard = vec![slot.take_wake().unwrap()];
        delivers.join().unwrap();
        closes.join().unwrap();
        heard.extend(slot.take_wake());
        heard.extend(slot.take_wake());
        heard.sort_by_key(|news| *news == Wake::Closed);
        heard.dedup();
        assert_eq!(heard, [Wake::Granted(GRANT), Wake::Closed]);
    });
}

/// The invariant of listener.rs: one stops listening while another lies down. The line is only a
/// flag here.
#[test]
fn the_baton_is_never_lost() {
    model(|| {
        let registry = Arc::new(WaitRegistry::default());
        let free = Arc::new(Mutex::new(false));
        let slot = registry.register("x", "a", None);
        let leaves = {
            let (registry, free) = (registry.clone(), free.clone());
            thread::spawn(move || {
                // As `give_back` and `call_listener` do it.
                *free.lock() = true;
                let is_free = *free.lock();
                if is_free {
                    registry.promote_follower();
                }
            })
        };
        // As `Ticket::wait` does it.
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

/// Of two sleepers one is called, and the other is called when that one passes it on.
#[test]
fn a_call_reaches_a_sleeper_although_one_gets_up() {
    model(|| {
        let registry = Arc::new(WaitRegistry::default());
        let slot = registry.register("x", "a", None);
        slot.prepare_to_park();
        let calls = {
            let registry = registry.clone();
            thread::spawn(move || registry.promote_follower())
        };
        // It gets up by itself meanwhile: either it was called, or it is told by looking that
        // nobody listens.
        let called = slot.finish_park();
        calls.join().unwrap();
        assert!(!slot.finish_park() || !called, "called twice");
    });
}
