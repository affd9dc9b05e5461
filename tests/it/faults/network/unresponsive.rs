//! Servers that refuse, stall, hang up or talk nonsense: every call returns in time, and none
//! panics.

use std::{thread, time::Duration};

use distlock::{LockError, LockOptions, RedisMgr};

use crate::{
    helpers::{
        CALL_LIMIT, SECOND, await_queue_length, completes_within, config_long_timeouts,
        config_short_timeout, get, manager, queue_length, server_behind_proxy, spawn_call, timed,
        with_ttl,
    },
    support::{
        DeafServer, Fault, FaultProxy, RedisServer, TEST_TIMEOUT, any_request, command, eventually,
        garbage_server, silent_server,
    },
    worker::work,
};

/// The name of a call, the number of operation timeouts that it may take, and the call.
type Call = (&'static str, u32, fn(&RedisMgr) -> Result<(), LockError>);

const CALLS: [Call; 12] = [
    ("ping", 1, |mgr| mgr.ping().map(drop)),
    ("try_lock", 1, |mgr| mgr.try_lock("x").map(drop)),
    ("lock_with", 1, |mgr| {
        mgr.lock_with("x", &LockOptions::new().wait(Duration::from_millis(200))).map(drop)
    }),
    // Fails once the server has been unreachable for the lease or an operation timeout.
    ("lock", 2, |mgr| mgr.lock_with("x", &with_ttl(SECOND)).map(drop)),
    ("acquire_lock", 1, |mgr| mgr.acquire_lock("x", SECOND, Duration::ZERO).map(drop)),
    ("holder", 1, |mgr| mgr.holder("x").map(drop)),
    ("lock_info", 1, |mgr| mgr.lock_info("x").map(drop)),
    ("locks", 1, |mgr| mgr.locks("*").map(drop)),
    ("release_lock", 1, |mgr| mgr.release_lock("x", "id").map(drop)),
    ("force_release", 1, |mgr| mgr.force_release("x").map(drop)),
    ("force_release_if", 1, |mgr| mgr.force_release_if("x", "id").map(drop)),
    ("lock_reentrant", 1, |mgr| {
        mgr.lock_reentrant_with("x", &LockOptions::new().wait(Duration::ZERO)).map(drop)
    }),
];

/// Makes a call to a server that does not serve. The call must fail in time and must not panic.
fn expect_failure((name, _, call): Call, mgr: &RedisMgr, condition: &str, limit: Duration) {
    let what = format!("{name} ({condition})");
    let error = completes_within(limit, &what, || call(mgr)).expect_err(&what);
    assert!(error.is_unavailable() || error.is_refused(), "{what}: {error:?}");
    assert!(error.to_string().contains(mgr.server()), "{what}: {error}");
}

/// The operation timeout where it is what the test measures, longer than `SLACK` so that a second
/// timeout would be noticed.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Extra time for a slow machine.
const SLACK: Duration = Duration::from_secs(4);

/// Goal: against a server that sends no reply, no call takes more operation timeouts than it may.
/// Method: all calls at once, each on its own manager.
pub(crate) fn expect_calls_in_time(condition: &str, url: &str) {
    let manager = || RedisMgr::new(config_long_timeouts(url).operation_timeout(TIMEOUT)).unwrap();
    thread::scope(|threads| {
        for call in CALLS {
            threads.spawn(move || {
                expect_failure(call, &manager(), condition, call.1 * TIMEOUT + SLACK)
            });
        }
        threads.spawn(|| {
            let mut borrowed =
                completes_within(TIMEOUT + SLACK, "connection", || manager().connection()).unwrap();
            let reply = completes_within(TIMEOUT + SLACK, "a user's command", || {
                redis::cmd("PING").exec(&mut borrowed)
            });
            assert!(reply.is_err(), "{condition}");
        });
        threads.spawn(|| {
            // Its first request gets half of that.
            let timeout = 2 * TIMEOUT;
            let config = config_long_timeouts(url).operation_timeout(timeout);
            let mgr = RedisMgr::new(config).unwrap();
            let waiting = spawn_call(&mgr, "x", |mgr, name| mgr.lock(name).map(drop));
            eventually("it waits", TEST_TIMEOUT, || mgr.metrics().attempted() == 1);
            let error = completes_within(timeout + SLACK, "a waiter", || {
                completes_within(timeout + SLACK, &format!("shutdown ({condition})"), || {
                    mgr.shutdown()
                });
                waiting.join().unwrap()
            });
            let error = error.unwrap_err();
            assert!(matches!(error, LockError::Shutdown) || error.is_unavailable(), "{error:?}");
            completes_within(TIMEOUT + SLACK, &format!("drop ({condition})"), || drop(mgr));
        });
    });
}

/// Makes all calls to a server that does not serve, one after the other. None may succeed, hang or
/// panic.
pub(crate) fn expect_calls_to_return(condition: &str, url: &str) {
    let mgr = completes_within(CALL_LIMIT, condition, || RedisMgr::new(config_short_timeout(url)))
        .unwrap();
    for call in CALLS {
        expect_failure(call, &mgr, condition, CALL_LIMIT);
    }
    let waiting: Vec<_> =
        (0..4).map(|_| spawn_call(&mgr, "x", |mgr, name| mgr.lock(name).map(drop))).collect();
    completes_within(CALL_LIMIT, &format!("shutdown ({condition})"), || mgr.shutdown());
    for waiter in waiting {
        let error =
            completes_within(CALL_LIMIT, "a waiter", || waiter.join().unwrap()).unwrap_err();
        assert!(
            matches!(error, LockError::Shutdown) || error.is_unavailable() || error.is_refused(),
            "{error:?}"
        );
    }
    completes_within(CALL_LIMIT, &format!("drop ({condition})"), || drop(mgr));
}

/// Fault: F53
#[test]
fn calls_return_if_the_port_refuses() {
    let server = RedisServer::start();
    server.kill();
    expect_calls_to_return("refused", &server.url());
}

/// Fault: F55
/// Promise: P6
#[test]
fn calls_return_in_time_if_the_server_is_stopped() {
    let server = RedisServer::start();
    server.stop();
    expect_calls_in_time("stopped", &server.url());
    server.cont();
    drop(manager(&server).lock("x").unwrap());
}

/// Promise: P6
#[test]
fn calls_return_in_time_if_connecting_hangs() {
    expect_calls_in_time("deaf", &DeafServer::start().url());
}

/// Promise: P6
#[test]
fn calls_return_in_time_if_the_server_is_silent() {
    expect_calls_in_time("silent", &silent_server().url());
}

/// Fault: F72
#[test]
fn calls_return_if_the_server_is_not_redis() {
    let replies: [&[u8]; 9] = [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"+OK\r\n",
        b"$-1\r\n",
        b":0\r\n",
        b"*2\r\n$1\r\n1\r\n$1\r\n1\r\n",
        b"*2\r\n$20\r\n99999999999999999999\r\n$1\r\n1\r\n",
        b"$9223372036854775807\r\n",
        b"*1000000000\r\n*1000000000\r\n",
        b"-ERR \x1b[31mred\xff\r\n",
    ];
    for reply in replies {
        expect_calls_to_return("garbage", &garbage_server(reply).url());
    }
    let nested = b"*1\r\n".repeat(100_000);
    expect_calls_to_return("nested", &garbage_server(nested).url());
}

/// Fault: F53
#[test]
fn calls_return_if_the_server_hangs_up() {
    let server = RedisServer::start();
    let proxy = FaultProxy::in_front_of(server.addr());
    proxy.on_request(|_| true, Fault::CloseAfterRequest).forever();
    expect_calls_to_return("closing", &proxy.url());
    let mgr = RedisMgr::new(config_short_timeout(proxy.url())).unwrap();
    let error = mgr.try_lock("x").unwrap_err();
    assert!(error.to_string().contains("it closed the connection"), "{error}");
}

/// Fault: F54
/// Promise: P6
#[test]
fn calls_return_in_time_in_a_black_hole() {
    let server = RedisServer::start();
    let proxy = FaultProxy::in_front_of(server.addr());
    proxy.blackhole();
    expect_calls_in_time("blackhole", &proxy.url());
}

/// Fault: F59
#[test]
fn calls_return_in_time_if_only_requests_pass() {
    let server = RedisServer::start();
    let proxy = FaultProxy::in_front_of(server.addr());
    proxy.one_way();
    expect_calls_in_time("one way", &proxy.url());
}

/// The network fails while locks are held and waited for. Once it works again, nothing is left of
/// the failure.
///
/// Fault: F54
#[test]
fn holder_and_waiter_return_if_the_network_fails() {
    for failure in ["blackhole", "one way", "refused"] {
        let (server, proxy, mgr) = server_behind_proxy(config_short_timeout);
        let (released, dropped) = (mgr.lock("released").unwrap(), mgr.lock("dropped").unwrap());
        let held = manager(&server).lock("held").unwrap();
        let waiting =
            spawn_call(&mgr, "held", |mgr, name| mgr.try_lock_for(name, 5 * SECOND).map(drop));
        await_queue_length(&server, "held", 1);
        match failure {
            "blackhole" => proxy.blackhole(),
            "one way" => proxy.one_way(),
            _ => proxy.refuse(),
        }
        let what = |call: &str| format!("{call} ({failure})");
        let error =
            completes_within(CALL_LIMIT, &what("release"), || released.release().unwrap_err());
        assert!(error.is_unavailable(), "{error:?}");
        completes_within(CALL_LIMIT, &what("drop"), || drop(dropped));
        let error = completes_within(2 * CALL_LIMIT, &what("the wait"), || waiting.join().unwrap())
            .unwrap_err();
        assert!(error.is_timeout() || error.is_unavailable(), "{error:?}");
        proxy.heal();
        completes_within(CALL_LIMIT, &what("recovery"), || {
            eventually("the server is reachable", TEST_TIMEOUT, || mgr.ping().is_ok());
            for name in ["released", "dropped"] {
                // Their leases of 30 s must not be what frees them.
                drop(mgr.try_lock_for(name, TEST_TIMEOUT).unwrap());
            }
        });
        eventually("the queue is empty", 20 * SECOND, || queue_length(&server, "held") == 0);
        assert!(held.is_held());
        assert_eq!(get(&server, "lock:held").as_deref(), Some(held.id().as_str()));
    }
}

/// Fault: F53
#[test]
fn unresponsive_server_is_not_asked_in_a_busy_loop() {
    // A server that fails at once could be asked far more often than one that lets calls time out.
    for server in [silent_server(), garbage_server("what?\r\n")] {
        let mgr = RedisMgr::new(
            config_short_timeout(server.url()).operation_timeout(Duration::from_millis(100)),
        )
        .unwrap();
        let error = completes_within(6 * CALL_LIMIT, "lock", || {
            mgr.lock_with("x", &with_ttl(3 * SECOND)).unwrap_err()
        });
        assert!(error.is_unavailable(), "{error:?}");
        assert!(server.accepted() < 60, "{} connections in three seconds", server.accepted());
    }
}

/// The clean-up after a failed call is left to the background, which ends with the shutdown.
#[test]
fn call_during_a_shutdown_takes_one_timeout() {
    let (_server, proxy, mgr) =
        server_behind_proxy(|url| config_long_timeouts(url).operation_timeout(TIMEOUT));
    let held = proxy.on_request(any_request, Fault::HoldReply).forever();
    let locking = spawn_call(&mgr, "x", |mgr, name| timed(|| mgr.try_lock(name).map(drop)));
    held.wait_fired();
    let shutdown = spawn_call(&mgr, "x", |mgr, _| mgr.shutdown());
    let (outcome, took) = locking.join().unwrap();
    assert!(outcome.is_err());
    assert!(took < TIMEOUT + SLACK, "{took:?}");
    held.release();
    shutdown.join().unwrap();
}

/// Goal: the time that a call waits for a connection is part of its limit. Method: the only
/// connection is returned just before the call gives up, and no reply to its requests arrives.
///
/// Fault: N31
#[test]
fn call_that_waited_for_a_connection_takes_one_timeout() {
    let calls =
        CALLS.iter().filter(|(name, ..)| name.starts_with("release") || name.starts_with("force"));
    thread::scope(|threads| {
        for call in calls {
            threads.spawn(|| {
                let (_server, proxy, mgr) = server_behind_proxy(|url| {
                    config_long_timeouts(url).operation_timeout(TIMEOUT).pool_size(1)
                });
                proxy.on_request(any_request, Fault::DropReply).forever();
                let borrowed = mgr.connection().unwrap();
                threads.spawn(move || {
                    work(TIMEOUT.mul_f64(0.95));
                    drop(borrowed);
                });
                let (outcome, took) = timed(|| call.2(&mgr));
                assert!(outcome.is_err() && took < TIMEOUT + SLACK, "{} took {took:?}", call.0);
            });
        }
    });
}

/// The server always announces one more step of the scan, and replies to each at once.
///
/// Fault: N31
#[test]
fn endless_list_takes_sixty_timeouts_at_most() {
    let server = RedisServer::start();
    let proxy = FaultProxy::in_front_of(server.addr());
    let step = b"*2\r\n$1\r\n7\r\n*0\r\n".to_vec();
    proxy.on_request(command("SCAN"), Fault::ReplaceReply(step)).forever();
    let mgr = RedisMgr::new(
        config_short_timeout(proxy.url()).operation_timeout(Duration::from_millis(50)),
    )
    .unwrap();
    let error = completes_within(2 * CALL_LIMIT, "an endless list", || mgr.locks("*").unwrap_err());
    assert!(
        error.is_unavailable() && !error.to_string().contains("keeps reporting more keys"),
        "{error}"
    );
}
