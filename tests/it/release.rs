//! Releasing a lock: the outcome that is reported, what is left on the server, and servers that do
//! not reply.

mod background;
mod by_id;
mod forced;
mod several;

use std::{panic, thread};

use distlock::{LockError, LockGuard, RedisMgr, Released, testing::servers::Script};

use crate::{
    helpers::{
        CALL_LIMIT, FENCE, SECOND, UnwrapReleased, await_gone, completes_within,
        config_long_timeouts, config_short_timeout, get, is_renewal, manager, queue_key,
        server_behind_proxy, spawn_queued_waiter, token_key, with_ttl,
    },
    support::{Fault, RedisServer, TEST_TIMEOUT, contains, eventually},
};

const LOCK: &str = "lock:x";

#[test]
fn release_reports_its_outcome() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    assert_eq!(mgr.lock("x").unwrap().release().unwrap(), Released::Released);
    assert_eq!(server.keys(), [FENCE]);

    let guard = mgr.lock("x").unwrap();
    server.cli(&["DEL", LOCK]);
    assert_eq!(guard.release().unwrap(), Released::Gone);

    let guard = mgr.lock("x").unwrap();
    server.cli(&["SET", LOCK, "another client", "PX", "60000"]);
    let Released::OwnedByOther(holder) = guard.release().unwrap() else {
        panic!("another client holds the lock")
    };
    assert_eq!(holder.id(), "another client");
    assert_eq!(get(&server, LOCK).as_deref(), Some("another client"));
}

#[test]
fn drop_releases_the_lock() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    drop(mgr.lock("x").unwrap());
    assert_eq!(get(&server, LOCK), None);
    drop(mgr.try_lock("x").unwrap());
    assert_eq!(get(&server, LOCK), None);
}

/// Fault: F21
#[test]
fn release_with_a_lost_reply_counts_as_released() {
    for fault in [
        Fault::DropReply,
        Fault::ResetAfterRequest,
        Fault::CloseAfterRequest,
        Fault::ResetBeforeRequest,
    ] {
        let (server, proxy, mgr) =
            server_behind_proxy(|url| config_long_timeouts(url).operation_timeout(8 * SECOND));
        let guard = mgr.lock("x").unwrap();
        let lost = proxy.on_request(contains(LOCK), fault.clone());
        assert_eq!(guard.release().unwrap(), Released::Released, "{fault:?}");
        assert_eq!(lost.fired(), 1);
        assert_eq!(get(&server, LOCK), None, "{fault:?}");
    }
}

/// The first request hands the lock over to the waiter. The retry must not take it away again.
///
/// Fault: F21
#[test]
fn hand_over_with_a_lost_reply_happens_once() {
    let (server, proxy, mgr) =
        server_behind_proxy(|url| config_long_timeouts(url).operation_timeout(8 * SECOND));
    let guard = mgr.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &manager(&server), "x");
    let lost = proxy.on_request(contains(LOCK), Fault::DropReply);
    let outcome = guard.release().unwrap();
    lost.wait_fired();
    let next = waiting.join().unwrap().unwrap();
    assert_eq!(outcome, Released::Released);
    assert!(next.is_held());
    assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()));
    next.release().unwrap().unwrap_released();
}

/// Fault: F22
/// Promise: P6
#[test]
fn release_at_a_stopped_server_fails_in_time_and_is_retried() {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_short_timeout(server.url()).ttl(600 * SECOND)).unwrap();
    let guard = mgr.lock("x").unwrap();
    let dropped = [mgr.lock("y").unwrap(), mgr.lock("z").unwrap()];
    server.stop();
    let error = completes_within(CALL_LIMIT, "release", || guard.release().unwrap_err());
    assert!(error.is_unavailable(), "{error}");
    let text = error.to_string();
    assert!(text.starts_with("could not release lock \"x\" at 127.0.0.1:"), "{text}");
    assert!(text.ends_with("; its manager retries the release until the lock expires"), "{text}");
    let elsewhere = mgr.release_lock("other", "id").unwrap_err().to_string();
    assert!(elsewhere.ends_with("; try again later"), "{elsewhere}");
    server.cont();
    let only = RedisMgr::new(config_short_timeout(server.url())).unwrap().lock("w").unwrap();
    server.stop();
    let text = only.release().unwrap_err().to_string();
    assert!(text.ends_with("; the lock is left to expire"), "{text}");
    completes_within(2 * CALL_LIMIT, "drop", || drop(dropped));
    server.cont();
    for key in [LOCK, "lock:y", "lock:z"] {
        await_gone(&server, key);
    }
}

/// Promise: P1
#[test]
fn late_release_does_not_affect_the_next_holder() {
    // A lock that expires does not raise the fence.
    for is_expired in [false, true] {
        let (server, proxy, mgr) = server_behind_proxy(config_short_timeout);
        let guard = mgr.lock("x").unwrap();
        let late = proxy.on_request(contains(LOCK), Fault::HoldRequest).forever();
        assert!(guard.release().unwrap_err().is_unavailable());
        if is_expired {
            server.cli(&["DEL", LOCK]);
        } else {
            assert!(manager(&server).force_release("x").unwrap());
        }
        let next = manager(&server).lock("x").unwrap();
        let commands = server.monitor();
        late.disarm();
        late.release();
        commands.wait_for("\"EVALSHA\"");
        drop(mgr.lock("y").unwrap());
        assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()));
        assert!(next.is_held());
    }
}

/// Fault: F76
#[test]
fn release_without_publish_permission_frees_the_lock() {
    let server = RedisServer::start();
    server.cli(&["ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+@all", "-publish"]);
    if RedisServer::has_sharded_channels() {
        server.cli(&["ACL", "SETUSER", "app", "-spublish"]);
    }
    let mgr =
        RedisMgr::new(config_long_timeouts(format!("redis://app:pw@{}", server.addr()))).unwrap();
    let guard = mgr.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &manager(&server), "x");
    guard.release().unwrap().unwrap_released();
    let next = completes_within(CALL_LIMIT, "the wait", || waiting.join().unwrap().unwrap());
    assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()));
}

/// Dragonfly and Active-Active databases have no `redis.set_repl`. A release that fails there would
/// have taken the waiter out of the queue, and kept the lock.
///
/// Fault: N167
#[test]
fn release_hands_the_lock_over_on_servers_without_set_repl() {
    let server = RedisServer::start();
    let held = manager(&server).lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &manager(&server), "x");
    let script = format!(
        "local redis = {{call = redis.call, pcall = redis.pcall}}\n{}",
        Script::Release.text()
    );
    let [queue, token] = [queue_key("x"), token_key("x")];
    let id = held.id().as_str();
    let request = ["EVAL", &script, "4", LOCK, &queue, &token, FENCE, "7", id, "", "", "1"];
    assert_eq!(server.query::<String>(&request), "7 released");
    let next = completes_within(CALL_LIMIT, "the wait", || waiting.join().unwrap().unwrap());
    assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()));
}

/// Fault: F18
#[test]
fn guard_can_be_released_on_another_thread() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    for finish in [|guard| LockGuard::release(guard).unwrap().unwrap_released(), drop::<LockGuard>]
    {
        let guard = mgr.lock("x").unwrap();
        thread::spawn(move || finish(guard)).join().unwrap();
        assert_eq!(get(&server, LOCK), None);
    }
}

#[test]
fn guard_stays_held_after_its_manager_is_dropped() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock_with("x", &with_ttl(3 * SECOND)).unwrap();
    drop(mgr);
    let commands = server.monitor();
    commands.wait_for("lua] \"PEXPIRE\" \"lock:x\"");
    assert!(guard.is_held());
    guard.release().unwrap().unwrap_released();
    assert_eq!(get(&server, LOCK), None);
}

/// Fault: F7
#[test]
fn panic_releases_the_lock() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let panicked = thread::spawn({
        let mgr = mgr.clone();
        move || {
            let _guard = mgr.lock("x").unwrap();
            // Unwinds like a panic, but prints nothing.
            panic::resume_unwind(Box::new("the work failed"));
        }
    });
    assert!(panicked.join().is_err());
    assert_eq!(get(&server, LOCK), None);
    drop(mgr.try_lock("x").unwrap());
}

/// Fault: F90
#[test]
fn guard_kept_past_shutdown_does_not_affect_next_holder() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let (released, dropped) = (mgr.lock("x").unwrap(), mgr.lock("y").unwrap());
    mgr.shutdown();
    let other = manager(&server).lock("x").unwrap();
    let outcome = completes_within(CALL_LIMIT, "release", || released.release());
    assert!(
        matches!(outcome, Ok(Released::OwnedByOther(_)) | Err(LockError::Shutdown)),
        "{outcome:?}"
    );
    completes_within(CALL_LIMIT, "drop", || drop(dropped));
    assert_eq!(get(&server, LOCK).as_deref(), Some(other.id().as_str()));
}

/// Fault: F60
#[test]
fn renewal_in_flight_at_release_has_no_effect() {
    let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    let guard = mgr.lock_with("x", &with_ttl(3 * SECOND)).unwrap();
    let in_flight = proxy.on_request(is_renewal(LOCK), Fault::HoldRequest);
    in_flight.wait_fired();
    let lost = guard.lost().clone();
    guard.release().unwrap().unwrap_released();
    let next = manager(&server).lock("x").unwrap();
    let commands = server.monitor();
    in_flight.release();
    commands.wait_for("lua] \"GET\" \"lock:x\"");
    assert_eq!(
        lost.recv_timeout(TEST_TIMEOUT),
        Err(crossbeam_channel::RecvTimeoutError::Disconnected)
    );
    assert!(next.is_held());
    assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()));
}

/// While another lock is renewed several times, no renewal of a released lock may reach the server.
///
/// Fault: F60
#[test]
fn released_lock_is_not_renewed() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let watched = mgr.lock_with("y", &with_ttl(3 * SECOND)).unwrap();
    server.monitor().wait_for("lua] \"PEXPIRE\" \"lock:y\"");
    let released: Vec<_> =
        (0..50).map(|n| mgr.lock_with(&format!("x{n}"), &with_ttl(3 * SECOND)).unwrap()).collect();
    for guard in released {
        guard.release().unwrap().unwrap_released();
    }
    let commands = server.monitor();
    let count = |part: &str| commands.lines().iter().filter(|line| line.contains(part)).count();
    eventually("the other lock is renewed", TEST_TIMEOUT, || {
        count("lua] \"PEXPIRE\" \"lock:y\"") >= 3
    });
    assert_eq!(count(LOCK), 0, "{:#?}", commands.lines());
    assert!(watched.is_held());
}
