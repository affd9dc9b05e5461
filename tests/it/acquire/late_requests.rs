//! Requests that the server executes after their callers have given up or ended the lock: nothing
//! stays behind.

use std::time::Duration;

use distlock::{LockGuard, LockLost, RedisMgr, testing::servers::Script};

use crate::{
    helpers::{
        CALL_LIMIT, FENCE, SECOND, UnwrapReleased, await_gone, completes_within,
        config_long_timeouts, config_short_timeout, expect_loss, get, manager, pttl, queue_key,
        queue_length, server_behind_proxy, set_foreign_lock, spawn_call, token_key, tries,
        with_ttl,
    },
    support::{Fault, RedisServer, TEST_TIMEOUT, contains, eventually},
};

const LOCK: &str = "lock:x";

/// Fault: F19
/// Promise: P5
#[test]
fn abandoned_acquire_is_cleaned_up() {
    let (server, proxy, mgr) = server_behind_proxy(config_short_timeout);
    let lost = proxy.on_request(contains(LOCK), Fault::DropReply);
    let error = completes_within(CALL_LIMIT, "try_lock", || mgr.try_lock("x").unwrap_err());
    lost.wait_fired();
    assert!(error.is_unavailable() && !error.is_contended(), "{error}");
    // The lease of 30 s must not be what deletes the key.
    let left = pttl(&server, LOCK);
    assert!(left == -2 || left > 10_000, "{left}");
    eventually("it is cleaned up", 15 * SECOND, || get(&server, LOCK).is_none());
}

/// Goal: a request that reaches the server after its caller has given up does not take the lock.
/// Method: the proxy holds the request back. The clean-up after the failed call has already run
/// when the request arrives.
///
/// Fault: F20
/// Promise: P5
#[test]
fn abandoned_acquire_that_arrives_late_takes_nothing() {
    let (server, proxy, mgr) = server_behind_proxy(config_short_timeout);
    let late = proxy.on_request(contains(LOCK), Fault::HoldRequest);
    assert!(mgr.try_lock("x").unwrap_err().is_unavailable());
    let commands = server.monitor();
    late.release();
    eventually("the request has arrived", TEST_TIMEOUT, || tries(&commands) == 1);
    server.cli(&["ECHO", "all was recorded"]);
    commands.wait_for("all was recorded");
    let taken = commands
        .lines()
        .into_iter()
        .find(|line| line.to_uppercase().contains("\"SET\" \"LOCK:X\""));
    assert_eq!(taken, None);
    assert_eq!(get(&server, LOCK), None);
}

/// Goal: requests that the server received while it was paused do nothing once their callers have
/// given up.
///
/// Fault: F20
#[test]
fn requests_kept_by_a_paused_server_take_nothing() {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_short_timeout(server.url())).unwrap();
    drop(mgr.lock("warm").unwrap());
    server.cli(&["CLIENT", "PAUSE", "6000", "ALL"]);
    let error = completes_within(CALL_LIMIT, "try_lock", || mgr.try_lock("x").unwrap_err());
    assert!(error.is_unavailable(), "{error:?}");
    // The server replies once the pause has ended.
    server.cli(&["ECHO", "resumed"]);
    await_gone(&server, LOCK);
    assert!(set_foreign_lock(&server, LOCK, "lock_1", 30_000));
    assert!(mgr.lock_with("x", &with_ttl(SECOND).wait(Duration::ZERO)).unwrap_err().is_contended());
}

/// A waiter's request for one claim window may arrive over an abandoned connection, after the
/// request for the full lease, which came over another one.
///
/// Fault: F27
/// Promise: P2
#[test]
fn late_request_does_not_shorten_the_lease() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock_with("x", &with_ttl(600 * SECOND).renew(false)).unwrap();
    let (queue, token, far) = (queue_key("x"), token_key("x"), "9999999999999999");
    let keys = [LOCK, &queue, &token, FENCE];
    let args = ["7", guard.id().as_str(), "1000", far, "1", "look", "1000 nowhere x"];
    let last = ["0000000000000000", "3601000", "1"];
    let held: String =
        server.query(&[&["EVAL", Script::Acquire.text(), "4"][..], &keys, &args, &last].concat());
    assert!(held.starts_with("7 held "), "{held}");
    assert!(pttl(&server, LOCK) > 60_000, "{} ms are left", pttl(&server, LOCK));
}

/// Goal: a request that arrives after its lock was released leaves no lock. Method: the proxy holds
/// back the first request and cuts its connection. The second request succeeds and the lock is
/// released; only then does the first one arrive, still early enough for the server to execute it.
///
/// Fault: F20
#[test]
fn late_request_after_the_release_leaves_no_lock() {
    let timeout = 6 * SECOND;
    let (server, proxy, mgr) = server_behind_proxy(|url| {
        config_long_timeouts(url).ttl(60 * SECOND).operation_timeout(timeout)
    });
    let late = proxy.on_request(contains(LOCK), Fault::HoldRequest);
    let locking = spawn_call(&mgr, "x", |mgr, name| mgr.lock(name).unwrap());
    late.wait_fired();
    proxy.reset_all();
    locking.join().unwrap().release().unwrap().unwrap_released();
    let commands = server.monitor();
    late.release();
    commands.wait_for("lua] \"SET\" \"lock:x\"");
    eventually("the key is gone again, long before it expires", CALL_LIMIT, || {
        get(&server, LOCK).is_none()
    });
    // The clean-up must not have deleted the lock of a later holder, nor may it do so now.
    let next = manager(&server).lock("x").unwrap();
    drop(mgr);
    assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()));
}

/// The same for a request that, when it arrives, finds another holder and joins the queue: whether
/// the lock was released or has ended on its own, the queue entry is removed.
///
/// Fault: F20, N34
#[test]
fn late_request_after_the_lock_ended_leaves_no_queue_entry() {
    let max_hold = SECOND / 2;
    let ends: [(_, fn(LockGuard), _); 2] = [
        (with_ttl(60 * SECOND), |guard| guard.release().unwrap().unwrap_released(), CALL_LIMIT),
        (
            with_ttl(60 * SECOND).max_hold(max_hold),
            |guard| assert_eq!(expect_loss(&guard), LockLost::MaxHold),
            30 * SECOND,
        ),
    ];
    for (options, end, limit) in ends {
        let (server, proxy, mgr) =
            server_behind_proxy(|url| config_long_timeouts(url).operation_timeout(6 * SECOND));
        let other = manager(&server);
        // After one wait the manager has a subscription, and its next first request already joins
        // the queue.
        let guard = other.lock("warm").unwrap();
        assert!(mgr.try_lock_for("warm", SECOND).unwrap_err().is_timeout());
        guard.release().unwrap().unwrap_released();
        let late = proxy.on_request(contains(LOCK), Fault::HoldRequest);
        let locking =
            spawn_call(&mgr, "x", move |mgr, name| mgr.lock_with(name, &options).unwrap());
        late.wait_fired();
        proxy.reset_all();
        end(locking.join().unwrap());

        let guard = other.lock("x").unwrap();
        let commands = server.monitor();
        late.release();
        commands.wait_for("lua] \"RPUSH\"");
        eventually("the queue entry is removed", limit, || queue_length(&server, "x") == 0);
        assert!(guard.is_held());
        assert_eq!(get(&server, LOCK).as_deref(), Some(guard.id().as_str()));
        guard.release().unwrap().unwrap_released();
        assert_eq!(get(&server, LOCK), None);
    }
}
