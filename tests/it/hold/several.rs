//! Locks of several names at once.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::Duration,
};

use distlock::{LockError, LockLost, LockOptions, Released};

use crate::{
    family::Subject,
    helpers::{
        CALL_LIMIT, SECOND, UnwrapReleased, completes_within, manager, spawn_queued_waiter,
        with_ttl,
    },
    support::{RedisServer, TEST_TIMEOUT, eventually},
};

/// Four threads of two managers use overlapping sets of names, given in any order.
///
/// Promise: P1
#[test]
fn calls_with_names_in_any_order_never_wait_for_each_other() {
    const ROUNDS: u64 = 50;
    const SETS: [[&str; 3]; 4] =
        [["a", "b", "c"], ["c", "b", "a"], ["b", "c", "d"], ["d", "a", "b"]];
    for subject in Subject::all() {
        let managers = [subject.manager(), subject.manager()];
        // Each set contains b.
        let (inside, done) = (AtomicU64::new(0), AtomicU64::new(0));
        completes_within(TEST_TIMEOUT, "all rounds", || {
            thread::scope(|threads| {
                for (names, mgr) in SETS.iter().zip(managers.iter().cycle()) {
                    let (inside, done) = (&inside, &done);
                    threads.spawn(move || {
                        for _ in 0..ROUNDS {
                            let all = mgr.lock_all(names).unwrap();
                            assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0);
                            thread::yield_now();
                            inside.fetch_sub(1, Ordering::SeqCst);
                            assert_eq!(all.release().unwrap(), Released::Released);
                            done.fetch_add(1, Ordering::SeqCst);
                        }
                    });
                }
            });
        });
        assert_eq!(done.into_inner(), 4 * ROUNDS);
    }
}

/// Promise: P1
#[test]
fn loss_of_one_lock_is_the_loss_of_all() {
    for subject in Subject::all() {
        let (mgr, other) = (subject.manager(), subject.manager());
        let options = with_ttl(3 * SECOND);
        let all = mgr.lock_all_with(["b", "a", "c"], &options).unwrap();
        assert!(all.is_held() && all.remaining() > Duration::ZERO);
        assert_eq!(all.names().collect::<Vec<_>>(), ["a", "b", "c"]);
        assert!(all.token("a").is_some() && all.token("x").is_none());
        assert!(other.force_release("b").unwrap());
        assert_eq!(all.lost().recv_timeout(TEST_TIMEOUT), Ok(LockLost::Gone));
        assert!(!all.is_held());
        match all.ensure_held().unwrap_err() {
            LockError::Lost { name, .. } => assert_eq!(name, "b"),
            other => panic!("{other}"),
        }
        assert_eq!(all.release().unwrap(), Released::Gone);
        assert!(["a", "b", "c"].iter().all(|name| !other.is_locked(name).unwrap()));
    }
}

/// The locks that are acquired already are renewed while the call waits for another one.
///
/// Promise: P3
#[test]
fn first_locks_are_kept_while_the_last_is_waited_for() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    let held = other.lock("z").unwrap();
    let waiting = {
        let mgr = mgr.clone();
        thread::spawn(move || mgr.lock_all_with(["z", "a"], &with_ttl(2 * SECOND)))
    };
    eventually("it waits for z", TEST_TIMEOUT, || {
        other.lock_info("z").unwrap().is_some_and(|lock| lock.waiting() == 1)
    });
    let renewals = mgr.metrics().renewals();
    eventually("a is renewed", TEST_TIMEOUT, || mgr.metrics().renewals() > renewals + 3);
    assert!(other.is_locked("a").unwrap());
    held.release().unwrap().unwrap_released();
    let all = completes_within(CALL_LIMIT, "the call", || waiting.join().unwrap().unwrap());
    assert!(all.is_held());
    // Whoever waits for one of them gets it as soon as all are released.
    let next = spawn_queued_waiter(&server, &other, "a");
    drop(all);
    completes_within(CALL_LIMIT, "the hand-over", || next.join().unwrap().unwrap());
}

/// The wait counts for all names together, and nothing is left of the locks that were acquired.
#[test]
fn wait_for_several_names_ends_in_time() {
    for subject in Subject::all() {
        let (mgr, other) = (subject.manager(), subject.manager());
        let _held = other.lock("b").unwrap();
        match mgr.try_lock_all(["c", "b", "a"]).unwrap_err() {
            LockError::Held { name, .. } => assert_eq!(name, "b"),
            other => panic!("{other}"),
        }
        match mgr.try_lock_all_for(["c", "b", "a"], Duration::from_millis(200)).unwrap_err() {
            LockError::Timeout { name, waited, .. } => {
                assert!(name == "b" && waited >= Duration::from_millis(200), "{name} {waited:?}");
            }
            other => panic!("{other}"),
        }
        eventually("the others are released", TEST_TIMEOUT, || {
            ["a", "c"].iter().all(|name| !other.is_locked(name).unwrap())
        });
    }
}

#[test]
fn impossible_sets_of_names_are_refused() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let many: Vec<String> = (0..1_001).map(|number| number.to_string()).collect();
    let once = LockOptions::new().hold_at_least(SECOND);
    for (result, words) in [
        (mgr.lock_all(["a", "b", "a"]), "the name \"a\" is given twice"),
        (mgr.lock_all(Vec::<String>::new()), "there are no names"),
        (mgr.lock_all(&many), "more than 1000 names"),
        (mgr.lock_all_with(["a"], &once), "cannot be held at least"),
        (mgr.lock_all(["a", ""]), "empty"),
    ] {
        let error = result.unwrap_err();
        assert!(error.is_invalid() && error.to_string().contains(words), "{error}");
    }
    assert!(server.keys().is_empty(), "{:?}", server.keys());
}
