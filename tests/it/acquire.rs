//! Acquiring a lock: every way to call, what is stored, fencing tokens, and clients that share only
//! the key format.

mod errors;
mod late_requests;
mod reentrant;
mod replies;

use std::{sync::Arc, thread, time::Duration};

use distlock::{LockError, LockOptions, RedisMgr, Released};

use crate::{
    helpers::{
        FENCE, SECOND, UnwrapReleased, await_check_of_fence, completes_within,
        config_long_timeouts, foreign_release, get, label, manager, pttl, set_foreign_lock,
        spawn_call, spawn_queued_waiter, token_key, with_ttl,
    },
    support::{RedisServer, TEST_TIMEOUT, eventually},
};

const LOCK: &str = "lock:x";

#[test]
fn free_lock_is_acquired_by_every_call() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let calls: [fn(&RedisMgr) -> distlock::Result<distlock::LockGuard>; 4] = [
        |mgr| mgr.lock("x"),
        |mgr| mgr.try_lock("x"),
        |mgr| mgr.try_lock_for("x", SECOND),
        |mgr| mgr.lock_with("x", &LockOptions::new().ttl(3 * SECOND).wait(SECOND)),
    ];
    for call in calls {
        let guard = call(&mgr).unwrap();
        assert!(guard.is_held());
        assert_eq!((guard.name(), get(&server, LOCK)), ("x", Some(guard.id().to_string())));
        guard.release().unwrap().unwrap_released();
        assert_eq!(server.keys(), [FENCE]);
    }
}

/// Promise: P1
#[test]
fn held_lock_is_refused_with_its_holder() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    let (guard, tid) = spawn_call(&mgr, "x", |mgr, name| {
        (
            mgr.lock(name).unwrap(),
            u64::from(rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs()),
        )
    })
    .join()
    .unwrap();
    let LockError::Held { name, holder, server: reported_by, .. } =
        other.try_lock("x").unwrap_err()
    else {
        panic!("not refused as held");
    };
    assert_eq!((name.as_str(), &reported_by), ("x", &label(&server)));
    assert_eq!(holder.id(), guard.id().as_str());
    assert_eq!(holder.lock_id().as_ref(), Some(guard.id()));
    assert_eq!(holder.host(), gethostname::gethostname().to_str());
    assert_eq!((holder.pid(), holder.tid()), (Some(std::process::id()), Some(tid)));
    let left = holder.ttl_left().unwrap();
    assert!(left <= 30 * SECOND && left > SECOND, "{left:?}");
    assert!(holder.held_for().unwrap() < 30 * SECOND);
    assert_eq!(holder.waiters(), Some(0));
    assert_eq!(other.holder("x").unwrap().unwrap().id(), guard.id().as_str());
    assert!(other.is_locked("x").unwrap() && !other.is_locked("y").unwrap());
}

/// Promise: P1
#[test]
fn lock_key_contains_the_id_and_expires() {
    let server = RedisServer::start();
    let guard = manager(&server).lock_with("x", &with_ttl(20 * SECOND)).unwrap();
    assert_eq!(server.query::<String>(&["TYPE", LOCK]), "string");
    assert_eq!(get(&server, LOCK).as_deref(), Some(guard.id().as_str()));
    let left = pttl(&server, LOCK);
    assert!(left > 10_000 && left <= 20_000, "{left}");
    // The lease ends before the key expires.
    assert!(guard.remaining() < Duration::from_millis(u64::try_from(left).unwrap()));
    assert_eq!(server.keys(), [FENCE, &token_key("x"), LOCK]);
    // The token is kept for an hour longer.
    let token = pttl(&server, &token_key("x"));
    let hour = 60 * 60 * 1000;
    assert!(token > left && token > hour && token <= hour + 20_000, "{token}");
}

#[test]
fn empty_prefix_makes_the_name_the_key() {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_long_timeouts(server.url()).prefix("")).unwrap();
    let guard = mgr.lock("x").unwrap();
    assert_eq!(get(&server, "x").as_deref(), Some(guard.id().as_str()));
    assert_eq!(guard.name(), "x");
}

/// Fault: F30
/// Promise: P3
#[test]
fn tokens_rise_although_the_server_forgets_them() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let mut last = 0;
    for round in 0..12 {
        let guard = mgr.lock("x").unwrap();
        let token = guard.fencing_token().as_u64();
        assert!(token > last && token < 1 << 53, "{token} after {last} in round {round}");
        assert_eq!(get(&server, &token_key("x")), Some(token.to_string()));
        last = token;
        guard.release().unwrap().unwrap_released();
        match round % 4 {
            0 => server.restart_empty(),
            1 => drop(server.cli(&["FLUSHALL"])),
            2 => drop(server.cli(&["DEL", FENCE])),
            _ => drop(server.cli(&["SET", FENCE, "not a number"])),
        }
    }
}

/// Goal: a server never fills up with names that were locked once.
///
/// Fault: N128
#[test]
fn released_names_leave_one_key() {
    const NAMES: usize = 5_000;
    let server = RedisServer::start();
    let mgr = manager(&server);
    let (held, mut last) = (mgr.lock("held").unwrap(), 0);
    for n in 0..NAMES {
        let guard = mgr.lock(&format!("n{n}")).unwrap();
        last = last.max(guard.fencing_token().as_u64());
        guard.release().unwrap().unwrap_released();
    }
    assert_eq!(server.keys(), [FENCE, &token_key("held"), "lock:held"]);
    assert_eq!(get(&server, FENCE), Some(last.to_string()));
    // This token is older, and does not lower the fence.
    held.release().unwrap().unwrap_released();
    assert_eq!(server.keys(), [FENCE]);
    assert_eq!(get(&server, FENCE), Some(last.to_string()));
}

/// A release deletes the token key, but the fence keeps the token. The test uses a token far ahead
/// of the clock, as after the clock was set back.
///
/// Fault: F50
/// Promise: P3
#[test]
fn release_remembers_token_in_the_fence() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let ahead = mgr.lock("x").unwrap().fencing_token().as_u64() + 3_600_000_000;
    server.cli(&["SET", &token_key("x"), &ahead.to_string()]);
    let guard = mgr.lock("x").unwrap();
    // The client of the lock that was not released may have used the tokens that are reserved.
    let token = guard.fencing_token().as_u64();
    assert_eq!(token, ahead + 10_000);
    guard.release().unwrap().unwrap_released();
    assert_eq!(mgr.lock("x").unwrap().fencing_token().as_u64(), token + 1);
    assert_eq!(mgr.lock("another").unwrap().fencing_token().as_u64(), token + 2);
}

/// A later version of the library may change the format of the fence, and then begins it with its
/// number. The present version then acquires no more locks, but keeps and releases those that it
/// holds. A hand-over notices it within ten seconds.
///
/// Fault: N129
#[test]
fn newer_protocol_is_respected() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let (guard, other) = (mgr.lock("x").unwrap(), mgr.lock("y").unwrap());
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    // Not below the former fence, which has risen to the tokens of both locks.
    let newer = format!("v2 {} and more", get(&server, FENCE).unwrap());
    server.cli(&["SET", FENCE, &newer]);
    let refused = mgr.try_lock("z").unwrap_err();
    assert!(refused.to_string().contains("version 2 of the distlock protocol"), "{refused}");
    other.ensure_held().unwrap();
    other.release().unwrap().unwrap_released();
    await_check_of_fence(&server, &guard);
    guard.release().unwrap().unwrap_released();
    assert_eq!((get(&server, FENCE).as_deref(), get(&server, LOCK)), (Some(&*newer), None));
    // Somebody waited for `x`. So the release looked at the fence, and kept the token.
    let tokens = [token_key("x"), token_key("y")].map(|key| get(&server, &key).is_some());
    assert_eq!(tokens, [true, false]);
    server.cli(&["DEL", FENCE]);
    drop(completes_within(TEST_TIMEOUT, "the wait", || waiting.join().unwrap()));
}

/// Fault: F50
/// Promise: P3
#[test]
fn tokens_rise_above_one_ahead_of_the_clock() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let ahead = mgr.lock("x").unwrap().fencing_token().as_u64() + 3_600_000_000;
    // The token of a lock that expired, and the fence.
    for key in [&token_key("x"), FENCE] {
        let ahead = ahead + 1_000 * u64::from(key == FENCE);
        server.cli(&["SET", key, &ahead.to_string()]);
        // Nobody has said how many of the tokens that are reserved for that lock were used.
        let reserved = if key == FENCE { 0 } else { 9_999 };
        for step in 1..4 {
            let token = mgr.lock("x").unwrap().fencing_token().as_u64();
            assert_eq!(token, ahead + reserved + step, "{key}");
        }
    }
}

#[test]
fn foreign_holder_is_reported_with_its_id() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    assert!(set_foreign_lock(&server, LOCK, "lock_1804289383", 30_000));
    let error = mgr.try_lock("x").unwrap_err();
    let holder = error.holder().unwrap();
    assert_eq!((holder.id(), holder.host(), holder.held_for()), ("lock_1804289383", None, None));
    assert!(
        error.to_string().contains("a client that calls itself \"lock_1804289383\""),
        "{error}"
    );
    assert_eq!(get(&server, LOCK).as_deref(), Some("lock_1804289383"));
}

#[test]
fn foreign_release_lets_a_waiter_in() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    assert!(set_foreign_lock(&server, LOCK, "lock_1", 1_000_000));
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    assert!(foreign_release(&server, LOCK, "lock_1"));
    let guard = completes_within(60 * SECOND, "the wait", || waiting.join().unwrap().unwrap());
    assert_eq!(get(&server, LOCK).as_deref(), Some(guard.id().as_str()));
}

#[test]
fn foreign_client_is_refused_until_the_release() {
    let server = RedisServer::start();
    let guard = manager(&server).lock("x").unwrap();
    assert!(!set_foreign_lock(&server, LOCK, "lock_1", 30_000));
    assert!(!foreign_release(&server, LOCK, "lock_1"));
    assert_eq!(guard.release().unwrap(), Released::Released);
    assert!(set_foreign_lock(&server, LOCK, "lock_1", 30_000));
}

#[test]
fn foreign_key_without_an_expiry_gets_one() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    server.cli(&["SET", LOCK, "lock_1"]);
    assert!(mgr.try_lock("x").unwrap_err().is_contended());
    let left = pttl(&server, LOCK);
    assert!(left > 0 && left <= 60_000, "{left}");
    assert_eq!(get(&server, LOCK).as_deref(), Some("lock_1"));
    server.cli(&["PERSIST", LOCK]);
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    eventually("the waiter sets an expiry", TEST_TIMEOUT, || pttl(&server, LOCK) > 0);
    server.cli(&["PEXPIRE", LOCK, "1"]);
    let guard = waiting.join().unwrap().unwrap();
    assert!(guard.is_held());
}

#[test]
fn data_without_a_prefix_never_gets_an_expiry() {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_long_timeouts(server.url()).prefix("")).unwrap();
    server.cli(&["SET", "x", "somebody's data"]);
    assert!(mgr.try_lock("x").unwrap_err().is_contended());
    assert!(mgr.try_lock_for("x", Duration::from_millis(200)).unwrap_err().is_timeout());
    assert_eq!((pttl(&server, "x"), get(&server, "x").as_deref()), (-1, Some("somebody's data")));
}

/// Fault: F35
/// Promise: P8
#[test]
fn forgotten_scripts_are_sent_again() {
    let server = RedisServer::start();
    let mgr = Arc::new(manager(&server));
    thread::scope(|threads| {
        let worker = threads.spawn(|| {
            for _ in 0..100 {
                mgr.lock("x").unwrap().release().unwrap().unwrap_released();
            }
        });
        while !worker.is_finished() {
            server.cli(&["SCRIPT", "FLUSH"]);
        }
    });
}

#[test]
fn server_is_reached_over_a_unix_socket() {
    let server = RedisServer::builder().unix_socket().start();
    let mgr = RedisMgr::new(config_long_timeouts(server.unix_url())).unwrap();
    let guard = mgr.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    guard.release().unwrap().unwrap_released();
    drop(waiting.join().unwrap().unwrap());
}
