//! Answers that come too late, twice, in part, or never after the first.

use std::time::Duration;

use distlock::RedisMgr;

use crate::faults::{LOCK, is_renewed};
use crate::{
    bounds::everything_is_in_time,
    helpers::{
        CALL_LIMIT, SECOND, SHORT_TIMEOUT, UnwrapReleased, await_gone, completes_within,
        config_long_timeouts, config_medium_timeout, config_short_timeout,
        expect_deadline_before_key_expiry, fence_key, get, in_thread, is_renewal, manager, queued,
        server_behind_proxy, server_with_scripts, with_ttl,
    },
    support::{CEILING, Fault, FaultProxy, RedisServer, command, contains, eventually},
};

/// The answer comes when the lease that it tells of is over.
#[test]
fn an_acquire_that_is_answered_after_its_lease_is_no_lock() {
    let (server, proxy, mgr) =
        server_behind_proxy(|url| config_long_timeouts(url).operation_timeout(5 * SECOND));
    let late = proxy.on_request(contains(LOCK), Fault::HoldReply).forever();
    let error = completes_within(CALL_LIMIT, "try_lock", || {
        mgr.lock_with("x", &with_ttl(SECOND).wait(Duration::from_millis(500))).unwrap_err()
    });
    assert!(error.is_unavailable(), "{error:?}");
    assert!(late.fired() > 0);
    late.disarm();
    late.let_go();
    await_gone(&server, LOCK);
    // Asked again in time, or answered late within it, it is a lock, and believed in for no longer
    // than the key lives. (Another name: what is left of the first one may still be taken back
    // once more.)
    let late = proxy.on_request(contains("lock:y"), Fault::DelayReply(SECOND * 6 / 10));
    let guard = mgr.lock_with("y", &with_ttl(3 * SECOND)).unwrap();
    assert_eq!(late.fired(), 1);
    expect_deadline_before_key_expiry(&server, &guard);
    guard.release().unwrap().unwrap_released();
    let late = proxy.on_request(contains(LOCK), Fault::HoldReply);
    let guard = mgr.lock_with("x", &with_ttl(3 * SECOND)).unwrap();
    late.let_go();
    expect_deadline_before_key_expiry(&server, &guard);
    assert_eq!(get(&server, LOCK).as_deref(), Some(guard.id().as_str()));
}

/// The server answers each time, but a lease leaves no longer for an answer than a part of it.
#[test]
fn where_the_lease_is_too_short_for_the_way_the_error_says_so() {
    let (server, proxy, mgr) =
        server_behind_proxy(|url| config_long_timeouts(url).operation_timeout(SECOND));
    let slow =
        proxy.on_request(contains(LOCK), Fault::DelayReply(Duration::from_millis(150))).forever();
    for wait in [Duration::ZERO, Duration::from_millis(300)] {
        let options = with_ttl(Duration::from_millis(120)).wait(wait);
        let error =
            completes_within(CALL_LIMIT, "locking", || mgr.lock_with("x", &options).unwrap_err());
        let says = error.to_string();
        assert!(
            error.is_unavailable() && says.contains("a lease of 120 ms") && says.contains("longer"),
            "{says}"
        );
    }
    drop(mgr.lock("x").unwrap());
    slow.disarm();
    await_gone(&server, LOCK);
}

#[test]
fn a_request_that_is_delivered_twice_is_one_request() {
    // Whoever joins the line twice is granted the lock twice, and the second grant is void after a
    // claim window.
    let (server, proxy, mgr) =
        server_behind_proxy(|url| config_long_timeouts(url).claim_window(3 * SECOND));
    let doubled = proxy.on_request(contains(LOCK), Fault::DuplicateRequest).forever();
    for _ in 0..4 {
        let guard = mgr.lock("x").unwrap();
        assert_eq!(get(&server, LOCK).as_deref(), Some(guard.id().as_str()));
        assert_eq!(get(&server, &fence_key("x")), Some(guard.fencing_token().to_string()));
        let waiting = in_thread(&mgr, "x", |mgr, name| mgr.lock(name));
        eventually("it waits", CEILING, || queued(&server, "x") >= 1);
        guard.release().unwrap().unwrap_released();
        let next = waiting.join().unwrap().unwrap();
        assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()));
        next.release().unwrap().unwrap_released();
        completes_within(CALL_LIMIT, "the end", || await_gone(&server, LOCK));
    }
    assert!(doubled.fired() >= 16, "{}", doubled.fired());
}

#[test]
fn half_a_reply_is_none() {
    let live = |length| {
        let (server, proxy, mgr) =
            server_behind_proxy(|url| config_long_timeouts(url).operation_timeout(4 * SECOND));
        let cut = proxy.on_request(contains(LOCK), Fault::CutReply(length));
        let guard = completes_within(CALL_LIMIT, "locking", || mgr.lock("x").unwrap());
        assert_eq!(
            (cut.fired(), get(&server, LOCK).as_deref()),
            (1, Some(guard.id().as_str())),
            "{length} bytes"
        );
        let cut = proxy.on_request(contains(LOCK), Fault::CutReply(length));
        completes_within(CALL_LIMIT, "releasing", || guard.release().unwrap()).unwrap_released();
        assert_eq!((cut.fired(), get(&server, LOCK)), (1, None), "{length} bytes");
    };
    std::thread::scope(|threads| {
        for length in [0, 1, 3, 4, 12, 25, 40] {
            threads.spawn(move || live(length));
        }
    });
    let (server, proxy, mgr) =
        server_behind_proxy(|url| config_long_timeouts(url).operation_timeout(SECOND));
    let guard = mgr.lock_with("x", &with_ttl(6 * SECOND)).unwrap();
    proxy.on_request(is_renewal(LOCK), Fault::CutReply(9)).wait_fired();
    is_renewed(&server, &guard, 1);
}

/// Signing in is several requests in one go, of which only some are answered.
#[test]
fn half_of_the_answers_to_signing_in_are_none() {
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
            "{unanswered}: it is in the wrong database"
        );
    }
}

#[test]
fn nothing_hangs_on_a_server_that_signs_in_and_then_says_nothing() {
    let server = RedisServer::start();
    let proxy = FaultProxy::in_front_of(server.addr());
    proxy.on_request(|words| !command("TIME")(words), Fault::DropReply).forever();
    everything_is_in_time("only signs in", &proxy.url());
}

/// Every call is answered but the last one of each connection, which is cut off after its request.
#[test]
fn a_server_that_answers_once_for_each_connection_is_good_enough() {
    let server = server_with_scripts();
    let proxy = FaultProxy::in_front_of(server.addr());
    let mgr =
        RedisMgr::new(config_long_timeouts(proxy.url()).operation_timeout(8 * SECOND)).unwrap();
    for round in 0..20 {
        let guard = completes_within(CALL_LIMIT, "locking", || mgr.lock("x").unwrap());
        assert_eq!(get(&server, LOCK).as_deref(), Some(guard.id().as_str()), "round {round}");
        let cut = proxy.on_request(contains(LOCK), Fault::CloseAfterRequest);
        completes_within(CALL_LIMIT, "releasing", || guard.release().unwrap()).unwrap_released();
        cut.disarm();
        proxy.reset_all();
    }
    drop(manager(&server).try_lock("x").unwrap());
}

/// A lease that is shorter than the way to the server is never held, and nothing of it stays.
#[test]
fn a_lease_that_is_over_before_it_is_known_is_no_lock() {
    let (server, proxy, mgr) = server_behind_proxy(config_short_timeout);
    let slow =
        proxy.on_request(contains(LOCK), Fault::DelayReply(Duration::from_millis(30))).forever();
    let outcome = completes_within(CALL_LIMIT, "locking", || {
        mgr.lock_with("x", &with_ttl(Duration::from_millis(10)).wait(SHORT_TIMEOUT))
    });
    match outcome {
        Ok(guard) => panic!("held with {:?} left of ten milliseconds", guard.remaining()),
        Err(error) => assert!(error.is_unavailable() || error.is_timeout(), "{error:?}"),
    }
    slow.disarm();
    eventually("nothing is left", CEILING, || get(&server, LOCK).is_none());
    mgr.lock("x").unwrap().release().unwrap().unwrap_released();
}
