use super::*;
use std::{sync::Arc, thread, time::Duration};

const GRANT: GrantNotice = GrantNotice { token: 5, granted_at_us: 6, px_ms: 7, server: 0 };

fn soon() -> Moment {
    clock::now().saturating_add(Duration::from_secs(60))
}

#[test]
fn grant_delivered_wakes_only_its_waiter() {
    let registry = Arc::new(WaitRegistry::default());
    let (a, b) = (registry.register("x", "a", false), registry.register("x", "b", false));
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
    let a = registry.register("x", "a", false);
    registry.unregister(&a);
    assert!(!registry.deliver("a", GRANT));
    assert!(registry.waiters.lock().slots.is_empty());
    assert!(registry.waiters.lock().by_lock.is_empty());
}

#[test]
fn grant_with_other_signals_is_taken_first() {
    let registry = WaitRegistry::default();
    let (a, b) = (registry.register("x", "a", false), registry.register("x", "b", false));
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
        registry.register("x", "a", false),
        registry.register("x", "b", false),
        registry.register("y", "c", false),
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
        registry.register("x", "a", false),
        registry.register("x", "b", false),
        registry.register("x", "c", false),
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

#[test]
fn wake_same_lock_wakes_no_waiter_of_another_lock() {
    let registry = WaitRegistry::default();
    let (a, b, other) = (
        registry.register("x", "a", false),
        registry.register("x", "b", false),
        registry.register("y", "c", false),
    );
    registry.wake_same_lock(&a);
    assert_eq!([&a, &b, &other].map(|slot| slot.take_wake()), [None, Some(Wake::Recheck), None]);
    assert_eq!(b.take_wake(), None, "signal was not consumed");
}

/// A whole process joins the queue again at once if the server has lost the queue. Otherwise each
/// missed grant would wake all threads that wait for the lock, and these would miss theirs.
///
/// Fault: N137
#[test]
fn waiters_ask_again_only_if_the_whole_queue_is_lost() {
    let registry = WaitRegistry::default();
    let [a, b, c] = ["a", "b", "c"].map(|id| registry.register("x", id, false));
    let new = registry.register("x", "d", false);
    for (position, slot) in [&a, &b, &c].into_iter().enumerate() {
        registry.set_position(slot, position as u64);
    }
    let woken = || [&a, &b, &c, &new].map(|slot| slot.take_wake().is_some());
    // It missed its grant, and is now behind the others.
    registry.wake_same_lock_if_lost(&a, 2);
    assert_eq!(woken(), [false; 4]);
    registry.wake_same_lock_if_lost(&a, 0);
    assert_eq!(woken(), [false, true, true, true]);
}

/// Fault: N121
#[test]
fn wake_next_after_unregister_wakes_first_waiter() {
    let registry = WaitRegistry::default();
    let [a, b, c] = ["a", "b", "c"].map(|id| registry.register("x", id, false));
    let other = registry.register("y", "d", false);
    registry.set_position(&c, 4);
    registry.unregister(&a);
    registry.wake_next(&a);
    assert_eq!([&b, &c, &other].map(|slot| slot.take_wake()), [None, Some(Wake::Recheck), None]);
    registry.unregister(&other);
    registry.wake_next(&other);
    assert_eq!([&b, &c].map(|slot| slot.take_wake()), [None, None]);
}

#[test]
fn promote_follower_chooses_only_a_parked_thread() {
    let registry = WaitRegistry::default();
    let (a, b) = (registry.register("x", "a", false), registry.register("x", "b", false));
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
        let slot = registry.register("x", id, false);
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
    assert_eq!(registry.register("x", "a", false).take_wake(), Some(Wake::Closed));
}
