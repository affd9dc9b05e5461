//! Holding a lock: it is renewed despite faults that leave enough time, and ends after `max_hold`.

mod asked;
mod at_least;
mod at_once;
mod passed;
mod renewer_faults;
mod several;

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::Duration,
};

use distlock::{LockError, LockGuard, LockLost, LockOptions, RedisMgr};

use crate::{
    helpers::{
        CALL_LIMIT, SECOND, UnwrapReleased, await_gone, await_queue_length, capture_log,
        completes_within, config_long_timeouts, expect_loss, get, in_own_process, is_renewal,
        manager, pttl, server_behind_proxy, spawn_call, spawn_queued_waiter, with_ttl,
    },
    support::{Fault, Monitor, RedisServer, TEST_TIMEOUT, eventually},
    worker::work,
};

const LOCK: &str = "lock:x";
/// Ttl with a renewal due every second, so that a stall of a second or two loses no lock.
const TTL: Duration = Duration::from_secs(3);

fn renewals(commands: &Monitor) -> usize {
    commands.lines().iter().filter(|line| line.contains("lua] \"PEXPIRE\" \"lock:x\"")).count()
}

/// Waits until the server has executed this many further renewals. The lock must stay held.
#[track_caller]
fn expect_renewals(server: &RedisServer, guard: &LockGuard, count: usize) {
    let commands = server.monitor();
    eventually("the lock is renewed", TEST_TIMEOUT, || {
        assert!(guard.is_held(), "{:?}", guard.lost().try_recv());
        renewals(&commands) >= count
    });
    assert_eq!(get(server, LOCK).as_deref(), Some(guard.id().as_str()));
}

/// Fault: F75
#[test]
fn renewed_lock_is_held_for_several_ttls() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock_with("x", &with_ttl(TTL)).unwrap();
    let token = guard.fencing_token();
    expect_renewals(&server, &guard, 12);
    assert!(pttl(&server, LOCK) <= 3000);
    assert_eq!(guard.fencing_token(), token);
    guard.ensure_held().unwrap();
    assert!(guard.lost().is_empty());
    guard.release().unwrap().unwrap_released();
}

/// Fault: F66
#[test]
fn many_locks_are_renewed_in_few_commands() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guards: Vec<_> =
        (0..300).map(|n| mgr.lock_with(&format!("n{n}"), &with_ttl(6 * SECOND)).unwrap()).collect();
    let commands = server.monitor();
    let count = |part: &str| commands.lines().iter().filter(|line| line.contains(part)).count();
    eventually("each lock is renewed twice", TEST_TIMEOUT, || count("lua] \"PEXPIRE\"") >= 600);
    let (renewed, requests) = (count("lua] \"PEXPIRE\""), count("\"EVALSHA\""));
    assert!(requests <= renewed / 2, "{requests} requests for {renewed} renewals");
    assert!(guards.iter().all(LockGuard::is_held));
}

#[test]
fn lock_without_renewal_expires() {
    let server = RedisServer::start();
    let guard = manager(&server).lock_with("x", &with_ttl(SECOND).renew(false)).unwrap();
    let commands = server.monitor();
    assert_eq!(expect_loss(&guard), LockLost::Expired);
    let text = guard.ensure_held().unwrap_err().to_string();
    assert!(text.contains("its lease expired without a confirmed renewal"), "{text}");
    await_gone(&server, LOCK);
    assert_eq!(renewals(&commands), 0);
}

/// Fault: F8
#[test]
fn max_hold_ends_and_releases_the_lock() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock_with("x", &with_ttl(30 * SECOND).max_hold(5 * SECOND)).unwrap();
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    assert_eq!(expect_loss(&guard), LockLost::MaxHold);
    // The ttl is 30 s, so the waiter can only get the lock this soon if it was released.
    let next = completes_within(CALL_LIMIT, "the wait", || waiting.join().unwrap().unwrap());
    drop(guard);
    assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()));
}

/// A handed-over lock is provisional first; `max_hold` must also apply once it is confirmed.
///
/// Fault: F8
#[test]
fn max_hold_ends_a_handed_over_lock() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    let guard = mgr.lock("x").unwrap();
    let limited = LockOptions::new().max_hold(2 * SECOND);
    let waiting = spawn_call(&other, "x", move |mgr, name| mgr.lock_with(name, &limited));
    await_queue_length(&server, "x", 1);
    guard.release().unwrap().unwrap_released();
    let next = waiting.join().unwrap().unwrap();
    assert_eq!(expect_loss(&next), LockLost::MaxHold);
    await_gone(&server, LOCK);
}

#[test]
fn max_hold_of_the_manager_is_the_default() {
    let server = RedisServer::start();
    let config = config_long_timeouts(server.url()).max_hold(Duration::from_millis(300));
    let mgr = RedisMgr::new(config).unwrap();
    assert_eq!(expect_loss(&mgr.lock("x").unwrap()), LockLost::MaxHold);
    let guard = mgr.lock_with("y", &LockOptions::new().max_hold(Duration::MAX)).unwrap();
    assert_eq!(expect_loss(&mgr.lock("x").unwrap()), LockLost::MaxHold);
    assert!(guard.is_held());
}

/// Fault: F63
/// Promise: P8
#[test]
fn exhausted_pool_does_not_stop_renewal_or_release() {
    let server = RedisServer::start();
    let config = config_long_timeouts(server.url()).pool_size(3).operation_timeout(2 * SECOND);
    let mgr = RedisMgr::new(config).unwrap();
    let guard = mgr.lock_with("x", &with_ttl(TTL)).unwrap();
    let borrowed: Vec<_> = (0..3).map(|_| mgr.connection().unwrap()).collect();
    let error = completes_within(30 * SECOND, "try_lock", || mgr.try_lock("y").unwrap_err());
    assert!(matches!(error, LockError::PoolExhausted { pool_size: 3, .. }), "{error:?}");
    assert!(error.is_unavailable());
    expect_renewals(&server, &guard, 3);
    completes_within(30 * SECOND, "release", || guard.release().unwrap().unwrap_released());
    assert_eq!(get(&server, LOCK), None);
    drop(borrowed);
    mgr.try_lock("y").unwrap().release().unwrap().unwrap_released();
}

/// Releases that find the pool exhausted share one connection.
#[test]
fn releases_with_exhausted_pool_take_turns() {
    const LOCKS: usize = 40;
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_long_timeouts(server.url()).pool_size(1)).unwrap();
    let guards: Vec<_> = (0..LOCKS)
        .map(|n| mgr.lock_with(&format!("n{n}"), &with_ttl(300 * SECOND)).unwrap())
        .collect();
    let borrowed = mgr.connection().unwrap();
    thread::scope(|threads| {
        for guard in guards {
            threads.spawn(|| guard.release().unwrap().unwrap_released());
        }
    });
    // That connection, and the pool's.
    server.await_clients(2..=2);
    drop(borrowed);
}

#[test]
fn borrowed_connection_returns_to_the_pool() {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_long_timeouts(server.url()).pool_size(1)).unwrap();
    for visit in 1..4 {
        let mut connection = mgr.connection().unwrap();
        let visits: u64 = redis::cmd("INCR").arg("visits").query(&mut connection).unwrap();
        assert_eq!(visits, visit);
        let wrong =
            redis::cmd("HGET").arg("visits").arg("x").query::<String>(&mut connection).unwrap_err();
        assert_eq!(wrong.code(), Some("WRONGTYPE"));
    }
    assert!(mgr.try_lock("x").unwrap().is_held());
    server.await_clients(1..=1);
}

/// Fault: F35, F43
/// Promise: P8
#[test]
fn lock_survives_script_flush_and_killed_connections() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock_with("x", &with_ttl(TTL)).unwrap();
    expect_renewals(&server, &guard, 1);
    server.cli(&["SCRIPT", "FLUSH"]);
    expect_renewals(&server, &guard, 2);
    assert!(server.kill_clients(&["TYPE", "normal"]) > 0);
    expect_renewals(&server, &guard, 2);
    guard.release().unwrap().unwrap_released();
}

/// Fault: F43
#[test]
fn lock_survives_idle_timeout_of_the_server() {
    let server = RedisServer::start();
    server.config_set("timeout", "1");
    let mgr = manager(&server);
    let guard = mgr.lock_with("x", &with_ttl(2 * TTL)).unwrap();
    expect_renewals(&server, &guard, 3);
    guard.release().unwrap().unwrap_released();
}

/// Fault: F29
#[test]
fn lock_survives_server_restart_with_data() {
    let server = RedisServer::builder().append_only(true).start();
    let (mgr, other) = (manager(&server), manager(&server));
    let guard = mgr.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &other, "x");
    server.restart();
    assert_eq!(get(&server, LOCK).as_deref(), Some(guard.id().as_str()));
    expect_renewals(&server, &guard, 1);
    guard.release().unwrap().unwrap_released();
    completes_within(CALL_LIMIT, "the wait", || waiting.join().unwrap().unwrap())
        .release()
        .unwrap()
        .unwrap_released();
}

/// Fault: F33
/// Promise: P8
#[test]
fn full_server_renews_and_releases_but_grants_no_new_lock() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    let guard = mgr.lock_with("x", &with_ttl(TTL)).unwrap();
    let waiting = spawn_queued_waiter(&server, &other, "x");
    server.config_set("maxmemory", "1");
    let error = mgr.try_lock("y").unwrap_err();
    assert_eq!(error.code(), Some("OOM"), "{error}");
    assert!(error.is_refused() && error.to_string().contains("raise maxmemory"), "{error}");
    expect_renewals(&server, &guard, 2);
    guard.release().unwrap().unwrap_released();
    let next = waiting.join().unwrap().unwrap();
    expect_renewals(&server, &next, 1);
    next.release().unwrap().unwrap_released();
    assert_eq!(get(&server, LOCK), None);
    server.config_set("maxmemory", "0");
    drop(mgr.try_lock("y").unwrap());
}

/// Fault: F77
/// Promise: P8
#[test]
fn lock_survives_password_change() {
    let server = RedisServer::start();
    server.cli(&["ACL", "SETUSER", "app", "on", ">old", "~*", "&*", "+@all"]);
    let url = format!("redis://app:old@{}", server.addr());
    let mgr = RedisMgr::new(config_long_timeouts(&url)).unwrap();
    let guard = mgr.lock_with("x", &with_ttl(TTL)).unwrap();
    expect_renewals(&server, &guard, 1);
    server.cli(&["ACL", "SETUSER", "app", "<old", ">new"]);
    expect_renewals(&server, &guard, 2);
    let refused = RedisMgr::new(config_long_timeouts(&url)).unwrap().try_lock("y").unwrap_err();
    assert_eq!(refused.code(), Some("WRONGPASS"), "{refused}");
    guard.release().unwrap().unwrap_released();
}

/// Fault: F48
#[test]
fn lock_survives_server_pause_shorter_than_the_ttl() {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_long_timeouts(server.url()).operation_timeout(SECOND)).unwrap();
    let ttl = 12 * SECOND;
    let guard = mgr.lock_with("x", &with_ttl(ttl)).unwrap();
    server.stop();
    eventually("a renewal is overdue", TEST_TIMEOUT, || guard.remaining() < ttl / 2);
    server.cont();
    eventually("the lock is renewed", TEST_TIMEOUT, || guard.remaining() > ttl * 7 / 10);
    expect_renewals(&server, &guard, 1);
}

/// Fault: F24
#[test]
fn failed_renewal_is_retried_before_the_deadline() {
    let faults = [
        Fault::DropReply,
        Fault::ResetAfterRequest,
        Fault::ResetBeforeRequest,
        Fault::ReplaceReply(b":7\r\n".into()),
    ];
    thread::scope(|threads| {
        for fault in faults {
            threads.spawn(|| {
                let (server, proxy, mgr) =
                    server_behind_proxy(|url| config_long_timeouts(url).operation_timeout(SECOND));
                let guard = mgr.lock_with("x", &with_ttl(12 * SECOND)).unwrap();
                let failing = proxy.on_request(is_renewal(LOCK), fault).times(2);
                failing.wait_fired_times(2);
                expect_renewals(&server, &guard, 1);
            });
        }
    });
}

/// Fault: F24
#[test]
fn lock_acquired_again_is_renewed_again() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    for _ in 0..3 {
        let guard = mgr.lock_with("x", &with_ttl(TTL)).unwrap();
        expect_renewals(&server, &guard, 1);
        guard.release().unwrap().unwrap_released();
    }
}

/// The server reserves a handed-over lock for the claim window only. The waiter confirms it at
/// once, which extends the lease to the full ttl.
#[test]
fn handed_over_lock_is_confirmed_for_the_full_ttl() {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_long_timeouts(server.url()).claim_window(10 * SECOND)).unwrap();
    let guard = mgr.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    guard.release().unwrap().unwrap_released();
    let next = waiting.join().unwrap().unwrap();
    eventually("the grant is confirmed", 9 * SECOND, || {
        next.remaining() > 20 * SECOND && pttl(&server, LOCK) > 20_000
    });
}

/// Goal: a lock that is handed over lasts for the claim window at first; without renewal it is
/// extended once, to its full ttl, and never again. Method: the same renewer renews another lock,
/// which shows when a renewal would have been due.
#[test]
fn handed_over_lock_without_renewal_lasts_for_its_lease() {
    let (window, ttl) = (4 * SECOND, 9 * SECOND);
    let server = RedisServer::start();
    let holder = manager(&server);
    let mgr = RedisMgr::new(config_long_timeouts(server.url()).claim_window(window)).unwrap();
    let renewed = mgr.lock_with("y", &with_ttl(ttl)).unwrap();
    let guard = holder.lock("x").unwrap();
    let waiting = spawn_call(&mgr, "x", move |mgr, name| {
        mgr.lock_with(name, &with_ttl(ttl).renew(false)).unwrap()
    });
    await_queue_length(&server, "x", 1);
    let commands = server.monitor();
    guard.release().unwrap().unwrap_released();
    let next = waiting.join().unwrap();
    commands.wait_for("PUBLISH\" \"distlock:client:");
    eventually("the lease is confirmed", TEST_TIMEOUT, || next.remaining() > window + SECOND);
    assert!(next.is_held());
    let left = pttl(&server, LOCK);
    let count = |parts: &[&str]| {
        let lines = commands.lines();
        let is_counted = |line: &&String| {
            !line.contains("distlock:queue") && parts.iter().all(|part| line.contains(part))
        };
        lines.iter().filter(is_counted).count()
    };
    let before = count(&["lua] \"PEXPIRE\" \"lock:y\""]);
    eventually("the other lock is renewed twice", TEST_TIMEOUT, || {
        count(&["lua] \"PEXPIRE\" \"lock:y\""]) >= before + 2 || !renewed.is_held()
    });
    let now_left = pttl(&server, LOCK);
    assert_eq!(count(&["\"EVALSHA\"", next.id().as_str()]), 1, "{:#?}", commands.lines());
    assert!(now_left < left - 1000, "extended: {left} ms, then {now_left} ms left");
    assert_eq!(expect_loss(&next), LockLost::Expired);
    assert!(renewed.is_held());
}

/// Locks that are released just when their renewal is due do not disturb the renewal of other
/// locks.
#[test]
fn releases_at_the_moment_of_renewal_disturb_no_other_lock() {
    if !in_own_process("hold::releases_at_the_moment_of_renewal_disturb_no_other_lock", &[]) {
        return;
    }
    const THREADS: usize = 40;
    const ROUNDS: usize = 10;
    let logged = capture_log(log::LevelFilter::Warn);
    let server = RedisServer::start();
    // A renewal may take no longer than its lease allows, whatever the operation timeout is.
    let mgr = RedisMgr::new(config_long_timeouts(server.url()).claim_window(SECOND)).unwrap();
    let kept: Vec<_> = (0..300)
        .map(|n| mgr.lock_with(&format!("kept{n}"), &with_ttl(3 * SECOND)).unwrap())
        .collect();
    let ttl = 3 * SECOND;
    let lost = AtomicUsize::new(0);
    thread::scope(|threads| {
        for n in 0..THREADS {
            let (mgr, lost) = (&mgr, &lost);
            threads.spawn(move || {
                for _ in 0..ROUNDS {
                    let guard = mgr.lock_with(&format!("short{n}"), &with_ttl(ttl)).unwrap();
                    work(ttl / 3);
                    lost.fetch_add(usize::from(!guard.is_held()), Ordering::Relaxed);
                }
            });
        }
    });
    let held = kept.iter().filter(|guard| guard.is_held()).count();
    assert_eq!((held, lost.into_inner()), (300, 0));
    // On a slow machine, a few renewals of such short leases may fail.
    let logged = logged.lock();
    let warnings: Vec<_> = logged.iter().filter(|text| text.contains("could not renew")).collect();
    println!("{} warnings in {} releases", warnings.len(), THREADS * ROUNDS);
    assert!(warnings.len() < THREADS * ROUNDS / 40, "{} warnings: {warnings:#?}", warnings.len());
}
