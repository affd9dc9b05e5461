//! Releases that the holder does not wait for.

use distlock::{LockOptions, RedisMgr};

use crate::{
    family::{Subject, spawn_waiter},
    helpers::{
        CALL_LIMIT, SECOND, await_gone, capture_log, completes_within, config_long_timeouts,
        config_short_timeout, in_own_process, manager, server_behind_proxy, spawn_queued_waiter,
    },
    support::{FaultProxy, RedisServer, TEST_TIMEOUT, eventually},
};

const LOCK: &str = "lock:x";

/// Promise: P5
#[test]
fn own_lock_is_free_right_after_a_release_in_the_background() {
    for subject in Subject::all() {
        let mgr = subject.manager();
        let options = LockOptions::new().release_in_background(true);
        for _ in 0..50 {
            mgr.try_lock("x").unwrap().release_later();
            drop(mgr.lock_with("x", &options.clone().wait(SECOND / 100)).unwrap());
        }
        let (rw, permits) = (mgr.rw_lock("x").unwrap(), mgr.semaphore("x", 2).unwrap());
        for _ in 0..20 {
            let (one, two) = (rw.try_read().unwrap(), rw.try_read().unwrap());
            one.release_later();
            two.release_later();
            rw.try_write().unwrap().release_later();
            permits.try_acquire().unwrap().release_later();
        }
        assert!(mgr.try_lock("x").is_ok());
    }
}

#[test]
fn release_in_the_background_serves_the_next_waiter() {
    for subject in Subject::all() {
        let (mgr, other) = (subject.manager(), subject.manager());
        let guard = mgr.lock("x").unwrap();
        let here = other.clone();
        let waiting = spawn_waiter(&mgr, "x", 1, move || here.lock("x"));
        guard.release_later();
        let next = completes_within(CALL_LIMIT, "the lock", || waiting.join().unwrap());
        assert!(next.unwrap().is_held());
    }
}

/// Fault: N172
#[test]
fn release_in_the_background_waits_for_no_silent_server() {
    let (server, proxy, mgr) = server_behind_proxy(config_short_timeout);
    let options = LockOptions::new().release_in_background(true).ttl(600 * SECOND);
    let (first, second) = (mgr.lock_with("x", &options), mgr.lock_with("y", &options));
    let (first, second) = (first.unwrap(), second.unwrap());
    let other = spawn_queued_waiter(&server, &manager(&server), "x");
    proxy.blackhole();
    completes_within(CALL_LIMIT, "both", move || {
        drop(first);
        second.release_later();
    });
    assert!(mgr.try_lock("x").unwrap_err().is_unavailable());
    proxy.heal();
    let next = completes_within(CALL_LIMIT, "the lock", || other.join().unwrap());
    drop(next.unwrap());
    await_gone(&server, "lock:y");
}

/// Fault: N172
#[test]
fn failed_release_in_the_background_is_logged_and_retried() {
    let test = "release::background::failed_release_in_the_background_is_logged_and_retried";
    if !in_own_process(test, &[]) {
        return;
    }
    let logged = capture_log(log::LevelFilter::Warn);
    let server = RedisServer::start();
    let proxy = FaultProxy::in_front_of(server.addr());
    let mgr = RedisMgr::new(config_long_timeouts(proxy.url())).unwrap();
    let guard = mgr.lock("x").unwrap();
    proxy.refuse();
    guard.release_later();
    eventually("it is logged", TEST_TIMEOUT, || {
        logged.lock().join("\n").contains("could not release lock \"x\" yet, still trying: ")
    });
    proxy.heal();
    await_gone(&server, LOCK);
}

#[test]
fn shutdown_completes_releases_in_the_background() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guards: Vec<_> = (0..50).map(|n| mgr.lock(&format!("n{n}")).unwrap()).collect();
    guards.into_iter().for_each(|guard| guard.release_later());
    mgr.shutdown();
    assert!(server.keys().iter().all(|key| !key.starts_with("lock:")), "{:?}", server.keys());
}
