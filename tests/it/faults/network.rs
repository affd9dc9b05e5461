//! Networks that are slow, drop connections silently, or lead to another server.

mod replies;
mod resolver;
mod streams;
pub(crate) mod unresponsive;

use std::thread;

use distlock::{Config, RedisMgr};

use super::{LOCK, expect_renewals};
use crate::{
    helpers::{
        CALL_LIMIT, SECOND, SHORT_TIMEOUT, UnwrapReleased, await_gone, completes_within,
        config_long_timeouts, config_short_timeout, get, manager, server_behind_proxy,
        server_with_scripts, spawn_call, spawn_queued_waiter, with_ttl,
    },
    support::{Fault, FaultProxy, RedisServer, TEST_TIMEOUT, any_request, contains, eventually},
};

/// Each reply takes most of an operation timeout: too long for a new connection and a request, or
/// for a release that must be able to repeat its request. A held lock is renewed over its
/// connection, and every result is correct.
///
/// Fault: F56
#[test]
fn very_slow_network_keeps_locks_and_correct_results() {
    let (server, proxy, mgr) = server_behind_proxy(config_short_timeout);
    // The renewer has its own connection.
    let held = mgr.lock_with("held", &with_ttl(6 * SECOND)).unwrap();
    expect_renewals(&server, &held, 1);
    let delayed = proxy.on_request(any_request, Fault::DelayReply(SHORT_TIMEOUT * 4 / 5)).forever();
    let commands = server.monitor();
    let renewed = || super::renewals(&commands, "lock:held") >= 2;
    // On a slow machine a reply is late, and then there is no time for a new connection.
    eventually("it is renewed or lost", TEST_TIMEOUT, || renewed() || !held.is_held());
    for _ in 0..3 {
        match completes_within(CALL_LIMIT, "try_lock", || mgr.try_lock("x")) {
            Ok(guard) => {
                assert_eq!(get(&server, LOCK).as_deref(), Some(guard.id().as_str()));
                let released = completes_within(CALL_LIMIT, "release", || guard.release());
                assert!(
                    released.as_ref().err().is_none_or(|error| error.is_unavailable()),
                    "{released:?}"
                );
            }
            Err(error) => assert!(error.is_unavailable(), "{error:?}"),
        }
        // The key itself expires after 30 s.
        completes_within(CALL_LIMIT, "the clean-up", || await_gone(&server, LOCK));
    }
    assert!(delayed.fired() >= 3);
    let is_valid = held.is_held();
    let kept = get(&server, "lock:held").as_deref() == Some(held.id().as_str());
    assert!(kept || !is_valid || !held.is_held());
}

/// With an eighth of an operation timeout for each reply, connecting takes less than half of it: a
/// new connection reads three.
///
/// Fault: F56
#[test]
fn slow_network_is_fast_enough_for_every_call() {
    let timeout = 5 * SECOND;
    let server = server_with_scripts();
    let proxy = FaultProxy::in_front_of(server.addr());
    // The delays of the three replies to a handshake add up. The first try of a release has half of
    // the time.
    proxy.on_request(any_request, Fault::DelayReply(timeout / 12)).forever();
    let mgr = RedisMgr::new(config_long_timeouts(proxy.url()).operation_timeout(timeout)).unwrap();
    let guard = completes_within(CALL_LIMIT, "lock", || mgr.lock("x").unwrap());
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    completes_within(CALL_LIMIT, "release", || guard.release().unwrap()).unwrap_released();
    let next = completes_within(CALL_LIMIT, "the hand-over", || waiting.join().unwrap().unwrap());
    assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()));
}

/// Fault: F56
#[test]
fn too_slow_network_leaves_nothing_behind() {
    let (server, proxy, mgr) = server_behind_proxy(config_short_timeout);
    let delayed = proxy.on_request(any_request, Fault::DelayReply(SHORT_TIMEOUT * 6 / 5)).forever();
    for _ in 0..3 {
        let error = completes_within(CALL_LIMIT, "try_lock", || mgr.try_lock("x").unwrap_err());
        assert!(error.is_unavailable(), "{error:?}");
    }
    delayed.disarm();
    delayed.release();
    await_gone(&server, LOCK);
    let guard = completes_within(CALL_LIMIT, "lock", || mgr.lock("x").unwrap());
    assert_eq!(get(&server, LOCK).as_deref(), Some(guard.id().as_str()));
}

/// Some replies come at once and some too late, at random.
///
/// Fault: F56
#[test]
fn network_with_random_delays_keeps_locks_correct() {
    let (server, proxy, mgr) =
        server_behind_proxy(|url| config_short_timeout(url).operation_timeout(SHORT_TIMEOUT / 2));
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let rng = parking_lot::Mutex::new(fastrand::Rng::with_seed(seed));
    proxy
        .on_request(move |_| rng.lock().u8(..8) == 0, Fault::DelayReply(SHORT_TIMEOUT * 3 / 5))
        .forever();
    let outcomes: Vec<(u32, u32)> = thread::scope(|threads| {
        let lock_repeatedly = |thread: usize| {
            let (mgr, server) = (&mgr, &server);
            move || {
                let (mut granted, mut failed) = (0, 0);
                let name = format!("n{thread}");
                let key = format!("lock:{name}");
                for _ in 0..25 {
                    match mgr.lock_with(&name, &with_ttl(30 * SECOND).wait(2 * SECOND)) {
                        Ok(guard) => {
                            granted += 1;
                            assert_eq!(get(server, &key).as_deref(), Some(guard.id().as_str()));
                        }
                        Err(error) => {
                            assert!(error.is_unavailable() || error.is_contended(), "{error:?}");
                            failed += 1;
                        }
                    }
                }
                (granted, failed)
            }
        };
        let all: Vec<_> = (0..4).map(|thread| threads.spawn(lock_repeatedly(thread))).collect();
        all.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(outcomes.iter().all(|(granted, failed)| granted > failed), "{outcomes:?}");
    for thread in 0..4 {
        await_gone(&server, &format!("lock:n{thread}"));
    }
}

/// Goal: a waiter keeps a lock that was handed over to it, although replies take a good part of the
/// claim window. Method: each reply takes a quarter of it. A renewal over a new connection would
/// take too long.
///
/// Fault: N28
/// Promise: P8
#[test]
fn lock_handed_over_a_slow_network_is_kept() {
    let server = server_with_scripts();
    let proxy = FaultProxy::in_front_of(server.addr());
    proxy.on_request(any_request, Fault::DelayReply(SECOND / 4)).forever();
    // The claim window and all timeouts have their defaults.
    let mgr = RedisMgr::new(Config::new(proxy.url())).unwrap();
    let first = manager(&server).lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    first.release().unwrap().unwrap_released();
    let next = completes_within(TEST_TIMEOUT, "the hand-over", || waiting.join().unwrap().unwrap());
    eventually("it is extended beyond the claim window", TEST_TIMEOUT, || {
        next.ensure_held().unwrap();
        next.remaining() > 2 * SECOND
    });
    expect_renewals(&server, &next, 1);
}

/// As with a NAT that has dropped its table: old connections seem open to both ends, but nothing
/// passes. New connections work.
///
/// Fault: N4
#[test]
fn dead_connections_cost_one_timeout_and_no_lock() {
    let (server, proxy, mgr) = server_behind_proxy(config_short_timeout);
    let other = manager(&server);
    let held = mgr.lock_with("held", &with_ttl(9 * SECOND)).unwrap();
    expect_renewals(&server, &held, 1);
    let other_guard = other.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    proxy.forget();
    // The first call may fail at a dead connection, within its limit; the next call reconnects.
    let first = completes_within(CALL_LIMIT, "try_lock", || mgr.try_lock("y").map(drop));
    assert!(first.as_ref().err().is_none_or(|error| error.is_unavailable()), "{first:?}");
    drop(completes_within(CALL_LIMIT, "lock", || mgr.lock("z").unwrap()));
    expect_renewals(&server, &held, 2);
    other_guard.release().unwrap().unwrap_released();
    // The grant message is sent into the dead connection; the claim window is 20 s.
    let next = completes_within(TEST_TIMEOUT, "the wait", || waiting.join().unwrap().unwrap());
    assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()));
    assert!(held.is_held());
}

/// The first server is gone, and another one has its address, with other data.
///
/// Fault: F58, N5
#[test]
fn locks_are_lost_if_another_server_has_the_address() {
    let (server, other) = (RedisServer::start(), RedisServer::start());
    let proxy = FaultProxy::in_front_of(server.addr());
    let mgr = RedisMgr::new(config_long_timeouts(proxy.url()).operation_timeout(SECOND)).unwrap();
    let guard = mgr.lock_with("x", &with_ttl(3 * SECOND)).unwrap();
    let waiting = spawn_call(&mgr, "x", |mgr, name| mgr.lock(name));
    eventually("it waits", TEST_TIMEOUT, || mgr.holder("x").unwrap().unwrap().waiters() == Some(1));
    // The other server has no scripts and no locks of this manager.
    other.cli(&["SET", LOCK, "other client", "PX", "4000"]);
    proxy.lead_to(other.addr());
    proxy.reset_all();
    server.kill();
    let why = crate::helpers::expect_loss(&guard);
    assert!(matches!(why, distlock::LockLost::Taken { .. }), "{why:?}");
    let next = completes_within(TEST_TIMEOUT, "the wait", || waiting.join().unwrap().unwrap());
    assert!(next.fencing_token() > guard.fencing_token());
    assert_eq!(get(&other, LOCK).as_deref(), Some(next.id().as_str()));
    drop(guard);
    next.release().unwrap().unwrap_released();
}

/// Goal: the renewer continues after any number of failed renewals, and succeeds as soon as it can.
/// Method: short leases whose renewals all fail.
///
/// Fault: F59
#[test]
fn renewer_survives_a_thousand_failures() {
    let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    for fault in [
        Fault::ResetBeforeRequest,
        Fault::CloseAfterRequest,
        Fault::ReplaceReply(b"-ERR no\r\n".to_vec()),
    ] {
        let failing = proxy
            .on_request(|words| !contains("distlock:")(words) && contains("lock:n")(words), fault);
        let failing = failing.forever();
        let before = mgr.metrics().renewals_failed();
        eventually("hundreds of renewals have failed", TEST_TIMEOUT, || {
            let lock =
                |n: usize| mgr.lock_with(&format!("n{n}"), &with_ttl(SECOND / 3).wait(SECOND));
            let guards: Vec<_> = (0..20).filter_map(|n| lock(n).ok()).collect();
            guards.iter().for_each(|guard| drop(guard.lost().recv_timeout(TEST_TIMEOUT)));
            mgr.metrics().renewals_failed() >= before + 350
        });
        failing.disarm();
        let guard = mgr.lock_with("x", &with_ttl(3 * SECOND)).unwrap();
        expect_renewals(&server, &guard, 2);
    }
}
