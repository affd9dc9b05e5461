//! Holding a lock: it is renewed through all weather that leaves it a chance, and ends when it was
//! told to.

mod renewer_faults;

use std::time::Duration;

use distlock::{LockError, LockGuard, LockLost, LockOptions, RedisMgr};

use crate::{
    helpers::{
        CALL_LIMIT, SECOND, UnwrapReleased, await_gone, await_queued, completes_within,
        config_long_timeouts, expect_loss, get, in_thread, is_renewal, manager, pttl,
        server_behind_proxy, spawn_queued_waiter, with_ttl,
    },
    support::{CEILING, Fault, Monitor, RedisServer, eventually},
};

const LOCK: &str = "lock:x";
/// Renewed every second, so that a machine that stands still for a second or two loses nothing.
const LEASE: Duration = Duration::from_secs(3);

fn renewals(commands: &Monitor) -> usize {
    commands.lines().iter().filter(|line| line.contains("lua] \"PEXPIRE\" \"lock:x\"")).count()
}

/// Waits for renewals that the server carries out from now on.
#[track_caller]
fn is_renewed(server: &RedisServer, guard: &LockGuard, times: usize) {
    let commands = server.monitor();
    eventually("it is renewed", CEILING, || {
        assert!(guard.is_held(), "{:?}", guard.lost().try_recv());
        renewals(&commands) >= times
    });
    assert_eq!(get(server, LOCK).as_deref(), Some(guard.id().as_str()));
}

#[test]
fn a_lock_outlives_ten_leases() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock_with("x", &with_ttl(LEASE)).unwrap();
    let token = guard.fencing_token();
    is_renewed(&server, &guard, 30);
    assert!(pttl(&server, LOCK) <= 3000);
    assert_eq!(guard.fencing_token(), token);
    guard.ensure_held().unwrap();
    assert!(guard.lost().is_empty());
    guard.release().unwrap().unwrap_released();
}

#[test]
fn many_locks_are_renewed_in_few_commands() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guards: Vec<_> =
        (0..300).map(|n| mgr.lock_with(&format!("n{n}"), &with_ttl(6 * SECOND)).unwrap()).collect();
    let commands = server.monitor();
    let count = |part: &str| commands.lines().iter().filter(|line| line.contains(part)).count();
    eventually("each is renewed twice", CEILING, || count("lua] \"PEXPIRE\"") >= 600);
    let (renewed, asked) = (count("lua] \"PEXPIRE\""), count("\"EVALSHA\""));
    assert!(asked <= renewed / 2, "{asked} commands for {renewed} renewals");
    assert!(guards.iter().all(LockGuard::is_held));
}

#[test]
fn without_renewal_a_lock_ends_by_itself() {
    let server = RedisServer::start();
    let guard = manager(&server).lock_with("x", &with_ttl(SECOND).renew(false)).unwrap();
    let commands = server.monitor();
    assert_eq!(expect_loss(&guard), LockLost::Expired);
    await_gone(&server, LOCK);
    assert_eq!(renewals(&commands), 0);
}

#[test]
fn the_longest_hold_ends_a_lock_and_frees_it() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock_with("x", &with_ttl(30 * SECOND).max_hold(5 * SECOND)).unwrap();
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    assert_eq!(expect_loss(&guard), LockLost::MaxHold);
    // The lease is 30 s: it was released.
    let next = completes_within(CALL_LIMIT, "the next", || waiting.join().unwrap().unwrap());
    drop(guard);
    assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()));
}

/// Also while it has the lock for the claim window only, until that is confirmed.
#[test]
fn the_longest_hold_ends_a_lock_that_was_handed_over() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    let guard = mgr.lock("x").unwrap();
    let limited = LockOptions::new().max_hold(2 * SECOND);
    let waiting = in_thread(&other, "x", move |mgr, name| mgr.lock_with(name, &limited));
    await_queued(&server, "x", 1);
    guard.release().unwrap().unwrap_released();
    let next = waiting.join().unwrap().unwrap();
    assert_eq!(expect_loss(&next), LockLost::MaxHold);
    await_gone(&server, LOCK);
}

#[test]
fn the_managers_longest_hold_counts_where_a_lock_says_nothing() {
    let server = RedisServer::start();
    let mgr =
        RedisMgr::new(config_long_timeouts(server.url()).max_hold(Duration::from_millis(300)))
            .unwrap();
    assert_eq!(expect_loss(&mgr.lock("x").unwrap()), LockLost::MaxHold);
    let guard = mgr.lock_with("y", &LockOptions::new().max_hold(Duration::MAX)).unwrap();
    assert_eq!(expect_loss(&mgr.lock("x").unwrap()), LockLost::MaxHold);
    assert!(guard.is_held());
}

#[test]
fn a_pool_that_users_exhaust_costs_nobody_a_lock() {
    let server = RedisServer::start();
    let settings = config_long_timeouts(server.url()).pool_size(3).operation_timeout(2 * SECOND);
    let mgr = RedisMgr::new(settings).unwrap();
    let guard = mgr.lock_with("x", &with_ttl(LEASE)).unwrap();
    let taken: Vec<_> = (0..3).map(|_| mgr.connection().unwrap()).collect();
    let error = completes_within(30 * SECOND, "try_lock", || mgr.try_lock("y").unwrap_err());
    assert!(matches!(error, LockError::PoolExhausted { pool_size: 3, .. }), "{error:?}");
    assert!(error.is_unavailable());
    is_renewed(&server, &guard, 3);
    completes_within(30 * SECOND, "release", || guard.release().unwrap().unwrap_released());
    assert_eq!(get(&server, LOCK), None);
    drop(taken);
    mgr.try_lock("y").unwrap().release().unwrap().unwrap_released();
}

/// Nothing is due for a minute and more, and the renewer, whose way the release has to go, sleeps.
#[test]
fn a_release_without_the_pool_does_not_wait_until_something_is_due() {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_long_timeouts(server.url()).pool_size(1)).unwrap();
    let guard = mgr.lock_with("x", &with_ttl(300 * SECOND)).unwrap();
    let borrowed = mgr.connection().unwrap();
    guard.release().unwrap().unwrap_released();
    assert_eq!(get(&server, LOCK), None);
    drop(borrowed);
}

#[test]
fn a_users_connection_serves_commands_and_goes_back() {
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

#[test]
fn a_lock_survives_forgotten_scripts_and_cut_connections() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock_with("x", &with_ttl(LEASE)).unwrap();
    is_renewed(&server, &guard, 1);
    server.cli(&["SCRIPT", "FLUSH"]);
    is_renewed(&server, &guard, 2);
    assert!(server.kill_clients(&["TYPE", "normal"]) > 0);
    is_renewed(&server, &guard, 2);
    guard.release().unwrap().unwrap_released();
}

#[test]
fn a_lock_survives_an_idle_limit_of_the_server() {
    let server = RedisServer::start();
    server.config_set("timeout", "1");
    let mgr = manager(&server);
    let guard = mgr.lock_with("x", &with_ttl(2 * LEASE)).unwrap();
    is_renewed(&server, &guard, 3);
    guard.release().unwrap().unwrap_released();
}

#[test]
fn a_lock_survives_a_server_that_comes_back_with_its_data() {
    let server = RedisServer::builder().append_only(true).start();
    let (mgr, other) = (manager(&server), manager(&server));
    let guard = mgr.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &other, "x");
    server.restart();
    assert_eq!(get(&server, LOCK).as_deref(), Some(guard.id().as_str()));
    is_renewed(&server, &guard, 1);
    guard.release().unwrap().unwrap_released();
    completes_within(CALL_LIMIT, "the next", || waiting.join().unwrap().unwrap())
        .release()
        .unwrap()
        .unwrap_released();
}

#[test]
fn a_server_without_memory_renews_and_releases_but_gives_no_new_locks() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    let guard = mgr.lock_with("x", &with_ttl(LEASE)).unwrap();
    let waiting = spawn_queued_waiter(&server, &other, "x");
    server.config_set("maxmemory", "1");
    let error = mgr.try_lock("y").unwrap_err();
    assert_eq!(error.code(), Some("OOM"), "{error}");
    assert!(error.is_refused() && error.to_string().contains("raise maxmemory"), "{error}");
    is_renewed(&server, &guard, 2);
    guard.release().unwrap().unwrap_released();
    let next = waiting.join().unwrap().unwrap();
    is_renewed(&server, &next, 1);
    next.release().unwrap().unwrap_released();
    assert_eq!(get(&server, LOCK), None);
    server.config_set("maxmemory", "0");
    drop(mgr.try_lock("y").unwrap());
}

#[test]
fn a_lock_survives_a_change_of_the_password() {
    let server = RedisServer::start();
    server.cli(&["ACL", "SETUSER", "app", "on", ">old", "~*", "&*", "+@all"]);
    let url = format!("redis://app:old@{}", server.addr());
    let mgr = RedisMgr::new(config_long_timeouts(&url)).unwrap();
    let guard = mgr.lock_with("x", &with_ttl(LEASE)).unwrap();
    is_renewed(&server, &guard, 1);
    server.cli(&["ACL", "SETUSER", "app", "<old", ">new"]);
    is_renewed(&server, &guard, 2);
    let refused = RedisMgr::new(config_long_timeouts(&url)).unwrap().try_lock("y").unwrap_err();
    assert_eq!(refused.code(), Some("WRONGPASS"), "{refused}");
    guard.release().unwrap().unwrap_released();
}

#[test]
fn a_server_that_pauses_for_less_than_the_lease_costs_nothing() {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_long_timeouts(server.url()).operation_timeout(SECOND)).unwrap();
    let ttl = 12 * SECOND;
    let guard = mgr.lock_with("x", &with_ttl(ttl)).unwrap();
    server.stop();
    eventually("a renewal is overdue", CEILING, || guard.remaining() < ttl / 2);
    server.cont();
    eventually("it is renewed", CEILING, || guard.remaining() > ttl * 7 / 10);
    is_renewed(&server, &guard, 1);
}

#[test]
fn a_renewal_that_fails_is_tried_again_before_the_end() {
    for fault in [
        Fault::DropReply,
        Fault::ResetAfterRequest,
        Fault::ResetBeforeRequest,
        Fault::ReplaceReply(b":7\r\n".into()),
    ] {
        let (server, proxy, mgr) =
            server_behind_proxy(|url| config_long_timeouts(url).operation_timeout(SECOND));
        let guard = mgr.lock_with("x", &with_ttl(12 * SECOND)).unwrap();
        let failing = proxy.on_request(is_renewal(LOCK), fault).times(2);
        failing.wait_fired_times(2);
        is_renewed(&server, &guard, 1);
    }
}

#[test]
fn a_lock_taken_again_is_renewed_again() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    for _ in 0..3 {
        let guard = mgr.lock_with("x", &with_ttl(LEASE)).unwrap();
        is_renewed(&server, &guard, 1);
        guard.release().unwrap().unwrap_released();
    }
}

/// A handover is for the claim window only; it is confirmed at once, and then lasts for the lease.
#[test]
fn a_lock_that_was_handed_over_is_confirmed_for_its_whole_lease() {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_long_timeouts(server.url()).claim_window(10 * SECOND)).unwrap();
    let guard = mgr.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    guard.release().unwrap().unwrap_released();
    let next = waiting.join().unwrap().unwrap();
    eventually("it is confirmed", 9 * SECOND, || {
        next.remaining() > 20 * SECOND && pttl(&server, LOCK) > 20_000
    });
}

#[test]
fn shutting_down_releases_all_and_tells_the_holders() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guards: Vec<_> = (0..20).map(|n| mgr.lock(&format!("n{n}")).unwrap()).collect();
    let id = mgr.acquire_lock("by id", 30 * SECOND, SECOND).unwrap().unwrap();
    mgr.shutdown();
    for guard in &guards {
        assert_eq!(expect_loss(guard), LockLost::Shutdown);
    }
    let locks: Vec<String> = server.query(&["KEYS", "lock:*"]);
    assert_eq!(locks, Vec::<String>::new());
    assert!(matches!(mgr.release_lock("by id", &id), Err(LockError::Shutdown)));
    assert!(matches!(mgr.ping(), Err(LockError::Shutdown)));
    let late = in_thread(&mgr, "x", |mgr, name| mgr.try_lock(name).map(drop)).join().unwrap();
    assert!(matches!(late, Err(LockError::Shutdown)));
    drop(guards);
    mgr.shutdown();
}
