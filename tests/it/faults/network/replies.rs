//! Replies that come late, twice, in part or not at all.

use std::time::Duration;

use distlock::RedisMgr;

use crate::faults::{LOCK, expect_renewals};
use crate::{
    faults::network::unresponsive::expect_calls_in_time,
    helpers::{
        CALL_LIMIT, SECOND, SHORT_TIMEOUT, UnwrapReleased, await_gone, completes_within,
        config_long_timeouts, config_medium_timeout, config_short_timeout,
        expect_deadline_before_key_expiry, get, is_renewal, manager, queue_length,
        server_behind_proxy, server_with_scripts, spawn_call, token_key, with_ttl,
    },
    support::{Fault, FaultProxy, RedisServer, TEST_TIMEOUT, command, contains, eventually},
};

/// The reply comes when the lease that it grants has expired.
///
/// Fault: F26
#[test]
fn reply_after_the_lease_is_no_grant() {
    let (server, proxy, mgr) =
        server_behind_proxy(|url| config_long_timeouts(url).operation_timeout(5 * SECOND));
    let late = proxy.on_request(contains(LOCK), Fault::HoldReply).forever();
    let error = completes_within(CALL_LIMIT, "try_lock", || {
        mgr.lock_with("x", &with_ttl(SECOND).wait(Duration::from_millis(500))).unwrap_err()
    });
    assert!(error.is_unavailable(), "{error:?}");
    assert!(late.fired() > 0);
    late.disarm();
    late.release();
    await_gone(&server, LOCK);
    // A reply within the lease is a grant, valid no longer than the key lives. This uses another
    // name, because the first one may be cleaned up once more.
    let late = proxy.on_request(contains("lock:y"), Fault::DelayReply(SECOND * 6 / 10));
    let guard = mgr.lock_with("y", &with_ttl(3 * SECOND)).unwrap();
    assert_eq!(late.fired(), 1);
    expect_deadline_before_key_expiry(&server, &guard);
    guard.release().unwrap().unwrap_released();
    let late = proxy.on_request(contains(LOCK), Fault::HoldReply);
    let guard = mgr.lock_with("x", &with_ttl(3 * SECOND)).unwrap();
    late.release();
    expect_deadline_before_key_expiry(&server, &guard);
    assert_eq!(get(&server, LOCK).as_deref(), Some(guard.id().as_str()));
}

/// The server replies to every request, but too late for a lease this short.
///
/// Fault: N63
#[test]
fn ttl_too_short_for_the_network_is_named_in_the_error() {
    let (server, proxy, mgr) =
        server_behind_proxy(|url| config_long_timeouts(url).operation_timeout(SECOND));
    let slow =
        proxy.on_request(contains(LOCK), Fault::DelayReply(Duration::from_millis(150))).forever();
    for wait in [Duration::ZERO, Duration::from_millis(300)] {
        let options = with_ttl(Duration::from_millis(120)).wait(wait);
        let error =
            completes_within(CALL_LIMIT, "lock", || mgr.lock_with("x", &options).unwrap_err());
        let text = error.to_string();
        assert!(
            error.is_unavailable() && text.contains("a lease of 120ms") && text.contains("longer"),
            "{text}"
        );
    }
    drop(mgr.lock("x").unwrap());
    slow.disarm();
    await_gone(&server, LOCK);
}

/// Fault: F27
#[test]
fn request_that_is_delivered_twice_counts_once() {
    // A waiter with two queue entries would be granted the lock twice. The second grant would
    // expire after a claim window.
    let (server, proxy, mgr) =
        server_behind_proxy(|url| config_long_timeouts(url).claim_window(3 * SECOND));
    let doubled = proxy.on_request(contains(LOCK), Fault::DuplicateRequest).forever();
    for _ in 0..4 {
        let guard = mgr.lock("x").unwrap();
        assert_eq!(get(&server, LOCK).as_deref(), Some(guard.id().as_str()));
        assert_eq!(get(&server, &token_key("x")), Some(guard.fencing_token().to_string()));
        let waiting = spawn_call(&mgr, "x", |mgr, name| mgr.lock(name));
        eventually("it waits", TEST_TIMEOUT, || queue_length(&server, "x") >= 1);
        guard.release().unwrap().unwrap_released();
        let next = waiting.join().unwrap().unwrap();
        assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()));
        next.release().unwrap().unwrap_released();
        completes_within(CALL_LIMIT, "the release", || await_gone(&server, LOCK));
    }
    assert!(doubled.fired() >= 16, "{}", doubled.fired());
}

/// Fault: N1
#[test]
fn incomplete_reply_counts_as_no_reply() {
    let lock_and_release = |length| {
        let (server, proxy, mgr) =
            server_behind_proxy(|url| config_long_timeouts(url).operation_timeout(4 * SECOND));
        let cut = proxy.on_request(contains(LOCK), Fault::CutReply(length));
        let guard = completes_within(CALL_LIMIT, "lock", || mgr.lock("x").unwrap());
        assert_eq!(
            (cut.fired(), get(&server, LOCK).as_deref()),
            (1, Some(guard.id().as_str())),
            "{length} bytes"
        );
        let cut = proxy.on_request(contains(LOCK), Fault::CutReply(length));
        completes_within(CALL_LIMIT, "release", || guard.release().unwrap()).unwrap_released();
        assert_eq!((cut.fired(), get(&server, LOCK)), (1, None), "{length} bytes");
    };
    std::thread::scope(|threads| {
        for length in [0, 1, 3, 4, 12, 25, 40] {
            threads.spawn(move || lock_and_release(length));
        }
    });
    let (server, proxy, mgr) =
        server_behind_proxy(|url| config_long_timeouts(url).operation_timeout(SECOND));
    let guard = mgr.lock_with("x", &with_ttl(6 * SECOND)).unwrap();
    proxy.on_request(is_renewal(LOCK), Fault::CutReply(9)).wait_fired();
    expect_renewals(&server, &guard, 1);
}

/// The handshake consists of several requests, and the server replies only to some.
///
/// Fault: N2
#[test]
fn incomplete_handshake_is_repeated() {
    for unanswered in ["SELECT", "TIME"] {
        let server = server_with_scripts();
        let proxy = FaultProxy::in_front_of(server.addr());
        let mgr = RedisMgr::new(config_medium_timeout(format!("{}/2", proxy.url()))).unwrap();
        let silent = proxy.on_request(command(unanswered), Fault::DropReply).forever();
        let error = completes_within(CALL_LIMIT, "try_lock", || mgr.try_lock("x").unwrap_err());
        assert!(error.is_unavailable(), "{unanswered}: {error:?}");
        assert!(silent.fired() > 0);
        silent.disarm();
        mgr.lock("x").unwrap().release().unwrap().unwrap_released();
        assert_eq!(
            server.query::<i64>(&["DBSIZE"]),
            0,
            "{unanswered}: the lock is in the wrong database"
        );
    }
}

/// Fault: N3, N31
/// Promise: P6
#[test]
fn calls_return_in_time_without_replies_after_the_handshake() {
    let server = RedisServer::start();
    let proxy = FaultProxy::in_front_of(server.addr());
    let is_later = |words: &[Vec<u8>]| !command("TIME")(words) && !command("INFO")(words);
    proxy.on_request(is_later, Fault::DropReply).forever();
    expect_calls_in_time("only a handshake", &proxy.url());
}

/// Each connection is cut after its first requests, before the reply to the last one.
///
/// Fault: N3
#[test]
fn connections_that_break_after_each_call_cost_no_lock() {
    let server = server_with_scripts();
    let proxy = FaultProxy::in_front_of(server.addr());
    let mgr =
        RedisMgr::new(config_long_timeouts(proxy.url()).operation_timeout(8 * SECOND)).unwrap();
    for round in 0..20 {
        let guard = completes_within(CALL_LIMIT, "lock", || mgr.lock("x").unwrap());
        assert_eq!(get(&server, LOCK).as_deref(), Some(guard.id().as_str()), "round {round}");
        let cut = proxy.on_request(contains(LOCK), Fault::CloseAfterRequest);
        completes_within(CALL_LIMIT, "release", || guard.release().unwrap()).unwrap_released();
        cut.disarm();
        proxy.reset_all();
    }
    drop(manager(&server).try_lock("x").unwrap());
}

/// A lease that is shorter than a round trip is never valid, and nothing of it is left.
///
/// Fault: N12
#[test]
fn lease_shorter_than_a_round_trip_is_never_held() {
    let (server, proxy, mgr) = server_behind_proxy(config_short_timeout);
    let slow =
        proxy.on_request(contains(LOCK), Fault::DelayReply(Duration::from_millis(30))).forever();
    let outcome = completes_within(CALL_LIMIT, "lock", || {
        mgr.lock_with("x", &with_ttl(Duration::from_millis(10)).wait(SHORT_TIMEOUT))
    });
    match outcome {
        Ok(guard) => panic!("held with {:?} left of ten milliseconds", guard.remaining()),
        Err(error) => assert!(error.is_unavailable() || error.is_timeout(), "{error:?}"),
    }
    slow.disarm();
    eventually("nothing is left", TEST_TIMEOUT, || get(&server, LOCK).is_none());
    mgr.lock("x").unwrap().release().unwrap().unwrap_released();
}
