//! Locks of several names, all or none.

use std::{thread, time::Duration};

use crossbeam_channel::RecvTimeoutError;
use distlock::{
    Config, LockError, LockLost, LockManager, LockOptions, RedisMgr, Released,
    testing::MemoryServer,
};

use crate::{
    family::{LONG, Subject, spawn_waiter},
    helpers::{
        CALL_LIMIT, SECOND, UnwrapReleased, completes_within, config_short_timeout, manager, pttl,
        server_behind_proxy,
    },
    support::{RedisServer, TEST_TIMEOUT, eventually},
};

fn reason(error: LockError) -> String {
    match error {
        LockError::InvalidOptions { reason, .. } => reason,
        other => panic!("{other:?}"),
    }
}

/// One lock is held by somebody else for longer than the maximum hold.
#[test]
fn max_hold_of_several_counts_from_when_all_are_held() {
    let server = MemoryServer::new();
    server.hold("b", "somebody else", 60 * SECOND);
    let options = LockOptions::new().max_hold(2 * SECOND);
    let all = server.manager().lock_all_with(["a", "b"], &options).unwrap();
    server.advance(SECOND);
    all.ensure_held().unwrap();
    server.advance(SECOND);
    assert_eq!(all.lost().try_recv(), Ok(LockLost::MaxHold));
}

/// The second lock is not free before the first has expired.
#[test]
fn call_for_several_ends_once_one_has_expired() {
    let server = MemoryServer::new();
    server.hold("b", "somebody else", 60 * SECOND);
    let waiter = server.manager();
    let other = server.manager();
    let third = other.lock("c").unwrap();
    let options = LockOptions::new().ttl(10 * SECOND).renew(false);
    let error = waiter.lock_all_with(["a", "b", "c"], &options).unwrap_err();
    assert!(matches!(&error, LockError::Lost { name, .. } if name == "a"), "{error:?}");
    assert!(third.is_held());
}

/// Promise: P1
#[test]
fn several_locks_are_held_together_and_released() {
    for subject in Subject::all() {
        let (mgr, other) = (subject.manager(), subject.manager());
        let all = mgr.lock_all(["c", "a", "b"]).unwrap();
        assert_eq!(all.names().collect::<Vec<_>>(), ["a", "b", "c"]);
        assert!(all.is_held() && all.ensure_held().is_ok() && !all.remaining().is_zero());
        assert!(all.token("b").is_some() && all.token("d").is_none());
        for name in ["a", "b", "c"] {
            assert!(other.try_lock(name).unwrap_err().is_contended());
        }
        let lost = all.lost().clone();
        assert_eq!(all.release().unwrap(), Released::Released);
        assert!(lost.recv().is_err(), "the channel closes without a message");
        drop(other.lock_all(vec![String::from("b"), String::from("a")]).unwrap());
        let again: &dyn LockManager = &mgr;
        again.try_lock_all(&["a", "b", "c"]).unwrap().release_later();
        assert!(mgr.try_lock_all(["a", "b", "c"]).is_ok());
    }
}

/// Promise: P5
/// Fault: N178
#[test]
fn refused_name_gives_the_others_back() {
    for subject in Subject::all() {
        let (mgr, other) = (subject.manager(), subject.manager());
        let guard = other.lock("b").unwrap();
        let free = |name: &str| {
            eventually("it is released", TEST_TIMEOUT, || other.try_lock(name).is_ok());
        };
        match mgr.try_lock_all(["a", "b", "c"]).unwrap_err() {
            LockError::Held { name, holder, .. } => {
                assert_eq!((&*name, holder.id()), ("b", guard.id().as_str()));
            }
            other => panic!("{other:?}"),
        }
        free("a");
        match mgr.try_lock_all_for(["a", "b"], SECOND / 5).unwrap_err() {
            // "a" was acquired before that wait.
            LockError::Timeout { name, waited, .. } => {
                assert!(name == "b" && waited >= SECOND / 10, "{waited:?}");
            }
            other => panic!("{other:?}"),
        }
        free("a");
        drop(guard);
        drop(mgr.try_lock_all_for(["a", "b", "c"], LONG).unwrap());
    }
}

/// Promise: P4
#[test]
fn names_in_any_order_do_not_deadlock() {
    for subject in Subject::all() {
        let mgr = subject.manager();
        let threads = (0..6).map(|turn| {
            let mgr = mgr.clone();
            thread::spawn(move || {
                let mut names = ["a", "b", "c"];
                names.rotate_left(turn % 3);
                for _ in 0..10 {
                    let all = mgr.try_lock_all_for(names, LONG).unwrap();
                    assert!(all.is_held());
                }
            })
        });
        let threads: Vec<_> = threads.collect();
        completes_within(CALL_LIMIT, "all", || {
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
    }
}

/// The first lock is renewed while the second is waited for.
///
/// Promise: P8
#[cfg(feature = "testing")]
#[test]
fn first_lock_is_renewed_while_the_second_is_awaited() {
    let server = distlock::testing::MemoryServer::new();
    let (mgr, other) = (server.manager(), server.manager());
    let guard = other.lock("b").unwrap();
    let here = mgr.clone();
    let waiting = spawn_waiter(&mgr, "b", 1, move || here.lock_all(["a", "b"]));
    for _ in 0..20 {
        server.advance(2 * SECOND);
        assert!(mgr.is_locked("a").unwrap() && !waiting.is_finished());
    }
    drop(guard);
    assert!(waiting.join().unwrap().unwrap().is_held());
}

/// Promise: P7
/// Fault: N178
#[test]
fn loss_of_one_lock_is_the_loss_of_all() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let options = LockOptions::new().ttl(3 * SECOND);
    let all = mgr.lock_all_with(["a", "b"], &options).unwrap();
    server.cli(&["DEL", "lock:b"]);
    let why = all.lost().recv_timeout(TEST_TIMEOUT).unwrap();
    assert_eq!(why, LockLost::Gone);
    // Nothing is reported of the other one.
    assert_eq!(all.lost().recv_timeout(TEST_TIMEOUT), Err(RecvTimeoutError::Disconnected));
    assert!(!all.is_held());
    match all.ensure_held().unwrap_err() {
        LockError::Lost { name, .. } => assert_eq!(name, "b"),
        other => panic!("{other:?}"),
    }
    assert_eq!(all.release().unwrap(), Released::Gone);
    assert!(!mgr.is_locked("a").unwrap());
}

/// Promise: P2
#[cfg(feature = "testing")]
#[test]
fn asked_renewal_of_several_locks_gives_each_a_whole_ttl() {
    let server = distlock::testing::MemoryServer::new();
    let options = LockOptions::new().ttl(10 * SECOND).renew(false);
    let all = server.manager().lock_all_with(["a", "b", "c"], &options).unwrap();
    for _ in 0..5 {
        server.advance(6 * SECOND);
        all.renew().unwrap();
        assert!(all.remaining() > 9 * SECOND, "{all:?}");
    }
    all.extend(60 * SECOND).unwrap();
    server.advance(50 * SECOND);
    all.renew().unwrap();
    assert!(all.remaining() > 59 * SECOND, "{all:?}");
    assert!(all.extend(Duration::ZERO).unwrap_err().is_invalid());
    server.advance(61 * SECOND);
    assert!(all.renew().unwrap_err().is_lost());
}

/// Promise: P2
#[test]
fn failed_renewal_of_one_lock_does_not_stop_the_others() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let options = LockOptions::new().ttl(600 * SECOND).renew(false);
    let all = mgr.lock_all_with(["a", "b", "c"], &options).unwrap();
    let expect_renewed = |names: [&str; 2]| {
        for key in names.map(|name| format!("lock:{name}")) {
            assert!(pttl(&server, &key) > 60_000, "{key}");
        }
    };
    for key in ["lock:a", "lock:b", "lock:c"] {
        server.cli(&["PEXPIRE", key, "60000"]);
    }
    all.renew().unwrap();
    expect_renewed(["a", "b"]);
    expect_renewed(["b", "c"]);

    server.cli(&["PEXPIRE", "lock:a", "60000"]);
    server.cli(&["PEXPIRE", "lock:c", "60000"]);
    server.cli(&["DEL", "lock:b"]);
    match all.renew().unwrap_err() {
        LockError::Lost { name, why: LockLost::Gone, .. } => assert_eq!(name, "b"),
        other => panic!("{other:?}"),
    }
    expect_renewed(["a", "c"]);
    assert!(!all.is_held() && all.extend(60 * SECOND).unwrap_err().is_lost());
}

/// One timeout for all, and not one for each.
///
/// Fault: N171
#[test]
fn asked_renewal_of_many_ends_although_the_server_is_silent() {
    let (_server, proxy, mgr) = server_behind_proxy(config_short_timeout);
    let names: Vec<_> = (0..100).map(|n| format!("n{n}")).collect();
    let options = LockOptions::new().ttl(600 * SECOND);
    let all = mgr.lock_all_with(&names, &options).unwrap();
    proxy.blackhole();
    let (all, error) = completes_within(CALL_LIMIT, "the call", move || {
        let error = all.renew().unwrap_err();
        (all, error)
    });
    assert!(error.is_unavailable() && all.is_held(), "{error:?}");
}

/// Promise: P6
#[test]
fn release_of_many_ends_although_the_server_is_silent() {
    let (_server, proxy, mgr) = server_behind_proxy(config_short_timeout);
    let names: Vec<_> = (0..100).map(|n| format!("n{n}")).collect();
    let all = mgr.lock_all(&names).unwrap();
    proxy.blackhole();
    let error = completes_within(CALL_LIMIT, "the release", || all.release().unwrap_err());
    assert!(error.is_unavailable(), "{error:?}");
}

#[test]
fn impossible_names_are_refused_with_a_reason() {
    for subject in Subject::all() {
        let mgr = subject.manager();
        let none: [&str; 0] = [];
        assert!(reason(mgr.lock_all(none).unwrap_err()).contains("there are no names"));
        let twice = reason(mgr.lock_all(["b", "a", "b"]).unwrap_err());
        assert!(twice.contains("\"b\" is given twice"), "{twice}");
        let many = (0..1001).map(|n| n.to_string());
        assert!(reason(mgr.lock_all(many).unwrap_err()).contains("more than 1000 names"));
        let period = LockOptions::new().hold_at_least(Duration::from_secs(1));
        let period = reason(mgr.lock_all_with(["a", "b"], &period).unwrap_err());
        assert!(period.contains("hold_at_least works with one lock only"), "{period}");
        assert!(mgr.locks("*").unwrap().is_empty());
    }
}

/// With several nodes, the locks are acquired one after the other too.
#[test]
fn several_locks_over_several_nodes() {
    let nodes: Vec<_> = (0..3).map(|_| RedisServer::start()).collect();
    let config = Config::nodes(nodes.iter().map(RedisServer::url)).quarantine(Duration::ZERO);
    let mgr = RedisMgr::new(config.operation_timeout(CALL_LIMIT)).unwrap();
    let guard = mgr.lock("b").unwrap();
    assert!(mgr.try_lock_all(["a", "b"]).unwrap_err().is_contended());
    guard.release().unwrap().unwrap_released();
    eventually("it is released", TEST_TIMEOUT, || mgr.try_lock_all(["a", "b"]).is_ok());
}
