//! The end of a manager at a server that does not answer is bounded by one operation timeout.

use std::{thread, time::Duration};

use distlock::{Config, LockGuard, LockLost, RedisMgr};

use crate::{
    helpers::{
        CALL_LIMIT, SECOND, completes_within, config_long_timeouts, config_short_timeout,
        server_behind_proxy, timed,
    },
    support::{Fault, RedisServer},
};

/// The operation timeout, longer than `SLACK` so that a second timeout would be noticed.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Extra time for a slow machine.
const SLACK: Duration = Duration::from_secs(3);

/// A manager whose operation timeout is `TIMEOUT`.
fn manager(server: &RedisServer) -> RedisMgr {
    RedisMgr::new(Config::new(server.url()).ttl(30 * SECOND).operation_timeout(TIMEOUT)).unwrap()
}

/// Fault: F55
#[test]
fn drop_of_the_last_guard_takes_one_timeout() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock("x").unwrap();
    drop(mgr);
    server.stop();
    completes_within(TIMEOUT + SLACK, "the drop", || drop(guard));
}

/// Neither drop knows beforehand that it is the last one.
#[test]
fn simultaneous_drops_of_the_last_guards_take_one_timeout() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guards = [mgr.lock("x").unwrap(), mgr.lock("y").unwrap()];
    drop(mgr);
    server.stop();
    let drops = guards.map(|guard| thread::spawn(move || timed(|| drop(guard)).1));
    for took in drops.map(|dropped| dropped.join().unwrap()) {
        assert!(took < TIMEOUT + SLACK, "{took:?}");
    }
}

#[test]
fn shutdown_takes_one_timeout_after_a_failed_drop() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let (dropped, held) = (mgr.lock("x").unwrap(), mgr.lock("y").unwrap());
    server.stop();
    completes_within(TIMEOUT + SLACK, "the drop", || drop(dropped));
    // The failed drop has left a clean-up to the background, which has its own timeout.
    completes_within(TIMEOUT + SLACK, "the shutdown", || mgr.shutdown());
    completes_within(TIMEOUT + SLACK, "the drop after it", || drop(held));
    completes_within(SLACK, "the manager's drop", || drop(mgr));
}

#[test]
fn shutdown_with_many_locks_on_a_slow_server_is_bounded() {
    let (server, proxy, mgr) =
        server_behind_proxy(|url| config_long_timeouts(url).operation_timeout(SECOND));
    let guards: Vec<_> = (0..100).map(|n| mgr.lock(&format!("n{n}")).unwrap()).collect();
    proxy.on_request(|_| true, Fault::DelayReply(Duration::from_millis(50))).forever();
    completes_within(CALL_LIMIT, "the shutdown", || mgr.shutdown());
    assert!(guards.iter().all(|guard| !guard.is_held()));
    assert!(guards.iter().all(|guard| guard.lost().recv() == Ok(LockLost::Shutdown)));
    drop(server);
}

#[test]
fn drop_of_the_last_manager_at_a_dead_server_is_bounded() {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_short_timeout(server.url())).unwrap();
    let guards: Vec<LockGuard> = (0..10).map(|n| mgr.lock(&format!("n{n}")).unwrap()).collect();
    let ids: Vec<_> = (0..10)
        .map(|n| mgr.acquire_lock(&format!("id{n}"), SECOND, SECOND).unwrap().unwrap())
        .collect();
    server.stop();
    completes_within(2 * CALL_LIMIT, "shutdown", || mgr.shutdown());
    completes_within(CALL_LIMIT, "drop", || drop((guards, mgr)));
    assert_eq!(ids.len(), 10);
}
