//! Waiting for a lock: order, wake-ups, polling, and locks that become free without a release.

mod cancel;
mod frozen;
mod giving_up;
pub(crate) mod handover;
mod in_process;
mod killed;
mod subscription;
mod yielding;

use std::{sync::mpsc, thread::JoinHandle, time::Duration};

use distlock::{Config, LockError, LockGuard, LockLost, RedisMgr};

use crate::{
    helpers::{
        CALL_LIMIT, SECOND, UnwrapReleased, await_queue_length, completes_within,
        config_long_timeouts, config_short_timeout, expect_loss, get, manager, pttl, queue_key,
        queue_length, server_behind_proxy, spawn_call, spawn_queued_waiter, timed, tries, with_ttl,
    },
    support::{Fault, FaultProxy, Monitor, RedisServer, TEST_TIMEOUT, eventually},
};

const LOCK: &str = "lock:x";

/// Releases a lock, and returns whether the next waiter got it without polling. A waiter polls
/// every half second, so on a slow machine a poll may come before the grant message.
fn is_woken_without_polling(
    server: &RedisServer,
    commands: &Monitor,
    guard: LockGuard,
    next: JoinHandle<Result<LockGuard, LockError>>,
) -> bool {
    let polls = |mark: String| {
        server.cli(&["ECHO", &mark]);
        commands.wait_for(&mark);
        commands.count("\"look\"")
    };
    let before = polls(format!("before {}", guard.fencing_token()));
    guard.release().unwrap().unwrap_released();
    let next = next.join().unwrap().unwrap();
    let after = polls(format!("after {}", next.fencing_token()));
    next.release().unwrap().unwrap_released();
    before == after
}

#[test]
fn release_wakes_the_next_waiter_before_it_polls() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    let commands = server.monitor();
    let woken = (0..21).filter(|_| {
        let guard = mgr.lock("x").unwrap();
        let waiting = spawn_queued_waiter(&server, &other, "x");
        is_woken_without_polling(&server, &commands, guard, waiting)
    });
    let woken = woken.count();
    assert!(woken > 10, "only {woken} of 21 were woken");
}

#[test]
fn release_wakes_only_the_next_waiter() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock("x").unwrap();
    let waiting: Vec<_> = (0..10).map(|_| spawn_queued_waiter(&server, &mgr, "x")).collect();
    let commands = server.monitor();
    let ((), span) = timed(|| {
        guard.release().unwrap().unwrap_released();
        for waiter in waiting {
            waiter.join().unwrap().unwrap().release().unwrap().unwrap_released();
        }
    });
    assert_eq!(server.calls("publish") + server.calls("spublish"), 10);
    server.cli(&["ECHO", "done"]);
    commands.wait_for("\"done\"");
    // A waiter that is woken without a grant polls: if all ten were woken each time, they would
    // poll 45 times.
    let polls = commands.count("\"look\"");
    assert!(polls as f64 <= 5.0 + 10.0 * span.as_secs_f64(), "{polls} polls in {span:?}");
}

/// The lock is free for a moment, and the waiter in the queue has not noticed yet.
///
/// Promise: P4
#[test]
fn newcomer_does_not_overtake_the_queue() {
    let server = RedisServer::start();
    let (mgr, other, newcomer) = (manager(&server), manager(&server), manager(&server));
    let guard = mgr.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &other, "x");
    server.cli(&["DEL", LOCK]);
    let error = newcomer.try_lock("x").unwrap_err();
    let next = waiting.join().unwrap().unwrap();
    assert_eq!(error.holder().map(|holder| holder.id()), Some(next.id().as_str()), "{error:?}");
    drop(guard);
}

/// Without a prefix, `a` and `{a}` are different names. If they shared a queue, a release of one
/// would hand over the other.
///
/// Promise: P1
#[test]
fn name_in_braces_has_its_own_queue() {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_long_timeouts(server.url()).prefix("")).unwrap();
    let (bare, braced) = (mgr.lock("a").unwrap(), mgr.lock("{a}").unwrap());
    let waiting = spawn_call(&mgr, "{a}", |mgr, name| mgr.lock(name).unwrap());
    let waiters = || mgr.holder("{a}").unwrap().and_then(|holder| holder.waiters());
    eventually("the waiter is queued", TEST_TIMEOUT, || waiters() == Some(1));
    assert_eq!(mgr.holder("a").unwrap().unwrap().waiters(), Some(0));
    bare.release().unwrap().unwrap_released();
    drop(mgr.try_lock("a").unwrap());
    assert_eq!(mgr.holder("{a}").unwrap().unwrap().id(), braced.id().as_str());
    braced.release().unwrap().unwrap_released();
    assert!(waiting.join().unwrap().is_held());
}

/// Fault: N9
/// Promise: P4
#[test]
fn dead_or_invalid_queue_entries_are_skipped() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock("x").unwrap();
    for entry in [
        "20000 distlock:client:nobody dead|pid1|tid1|ts1|67e55044-10b1-426f-9247-bb680e5fe0c8",
        "not a queue entry",
        "",
    ] {
        server.cli(&["RPUSH", &queue_key("x"), entry]);
    }
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    guard.release().unwrap().unwrap_released();
    let next = completes_within(CALL_LIMIT, "the handover", || waiting.join().unwrap().unwrap());
    assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()));
}

/// The waiter's connection is still open on the server, but nothing that is sent over it arrives.
/// The grant expires after the claim window.
///
/// Fault: F44, N29
#[test]
fn unreachable_waiter_delays_the_queue_by_one_claim_window() {
    let server = RedisServer::start();
    let proxy = FaultProxy::in_front_of(server.addr());
    let unreachable =
        RedisMgr::new(config_short_timeout(proxy.url()).claim_window(3 * SECOND)).unwrap();
    let (mgr, next) = (manager(&server), manager(&server));
    let guard = mgr.lock("x").unwrap();
    let first = spawn_queued_waiter(&server, &unreachable, "x");
    let second = spawn_queued_waiter(&server, &next, "x");
    proxy.blackhole();
    guard.release().unwrap().unwrap_released();
    let granted = get(&server, LOCK).expect("the lock was not handed over");
    let served = completes_within(CALL_LIMIT, "waiter 2", || second.join().unwrap().unwrap());
    assert_ne!(served.id().as_str(), granted);
    proxy.heal();
    let token = served.fencing_token();
    served.release().unwrap().unwrap_released();
    let first = first.join().unwrap().unwrap();
    assert!(first.fencing_token() > token);
    assert_eq!(get(&server, LOCK).as_deref(), Some(first.id().as_str()));
}

/// Fault: F30
#[test]
fn server_restarted_without_data_lets_a_waiter_in() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    let guard = mgr.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &other, "x");
    server.restart_empty();
    let next = waiting.join().unwrap().unwrap();
    assert!(next.fencing_token() > guard.fencing_token());
    assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()));
}

/// One of the waiters in a process polls for all. It finds that the server has lost the queue, and
/// all of them join it again.
#[test]
fn lost_queue_is_joined_again_by_all_waiters() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    let guard = mgr.lock("x").unwrap();
    let waiting: Vec<_> = (0..3).map(|_| spawn_queued_waiter(&server, &other, "x")).collect();
    server.cli(&["DEL", &queue_key("x")]);
    await_queue_length(&server, "x", 3);
    other.shutdown();
    waiting.into_iter().for_each(|waiter| drop(waiter.join().unwrap()));
    guard.release().unwrap().unwrap_released();
}

/// Promise: P4
#[test]
fn deleted_key_lets_a_waiter_in() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    server.cli(&["DEL", LOCK]);
    // The wait must end long before the lease of 30 s would.
    let next = completes_within(CALL_LIMIT, "the wait", || waiting.join().unwrap().unwrap());
    assert!(next.fencing_token() > guard.fencing_token());
}

/// Promise: P5
#[test]
fn expired_lease_lets_a_waiter_in() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock_with("x", &with_ttl(SECOND).renew(false)).unwrap();
    let next = completes_within(CALL_LIMIT, "the wait", || mgr.lock("x").unwrap());
    assert!(!guard.is_held());
    assert!(next.is_held());
}

/// Fault: F47
/// Promise: P4
#[test]
fn waiters_poll_if_subscribing_is_forbidden() {
    let server = RedisServer::start();
    server.cli(&["ACL", "SETUSER", "app", "on", ">pw", "~*", "resetchannels", "+@all"]);
    let mgr =
        RedisMgr::new(config_long_timeouts(format!("redis://app:pw@{}", server.addr()))).unwrap();
    let guard = mgr.lock("x").unwrap();
    let commands = server.monitor();
    let waiting = spawn_call(&mgr, "x", |mgr, name| mgr.lock(name).unwrap());
    eventually("three polls", TEST_TIMEOUT, || tries(&commands) >= 3);
    assert_eq!(queue_length(&server, "x"), 0);
    guard.release().unwrap().unwrap_released();
    completes_within(CALL_LIMIT, "the wait", || waiting.join().unwrap())
        .release()
        .unwrap()
        .unwrap_released();
    assert!(mgr.try_lock_for("x", SECOND).unwrap().is_held());
}

/// Goal: each waiter reports the failure after one lease, not after the leases of all waiters
/// before it. Method: after the first error, each of the others must follow before another lease
/// can have passed.
///
/// Fault: N121
#[test]
fn polling_waiters_all_report_an_unreachable_server() {
    let server = RedisServer::start();
    server.cli(&["ACL", "SETUSER", "app", "on", ">pw", "~*", "resetchannels", "+@all"]);
    let config = config_short_timeout(format!("redis://app:pw@{}", server.addr()))
        .ttl(CALL_LIMIT + 2 * SECOND);
    let mgr = RedisMgr::new(config).unwrap();
    let guard = mgr.lock("x").unwrap();
    let (sender, results) = mpsc::channel();
    let waiting: Vec<_> = (0..4)
        .map(|_| {
            let sender = sender.clone();
            spawn_call(&mgr, "x", move |mgr, name| sender.send(mgr.lock(name).map(drop)).unwrap())
        })
        .collect();
    let commands = server.monitor();
    eventually("one waiter polls for all", TEST_TIMEOUT, || tries(&commands) >= 12);
    drop(commands);
    server.kill();
    for nth in 0..waiting.len() {
        let result =
            results.recv_timeout(if nth == 0 { 4 * CALL_LIMIT } else { CALL_LIMIT }).unwrap();
        assert!(result.unwrap_err().is_unavailable());
    }
    waiting.into_iter().for_each(|waiter| waiter.join().unwrap());
    drop(guard);
}

/// Goal: waiters send almost no requests while nothing happens. Method: while the holder renews its
/// lock five times, fifty waiters of one manager may send only a few requests.
#[test]
fn fifty_waiters_send_next_to_no_requests() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    let guard = mgr.lock_with("x", &with_ttl(3 * SECOND)).unwrap();
    let waiting: Vec<_> = (0..50).map(|_| spawn_queued_waiter(&server, &other, "x")).collect();
    let commands = server.monitor();
    let ((), span) = timed(|| {
        eventually("five renewals", TEST_TIMEOUT, || {
            commands.count("lua] \"PEXPIRE\" \"lock:x\"") >= 5
        })
    });
    let sent = commands.count("\"EVALSHA\"");
    assert!(sent as f64 <= 5.0 + 10.0 * span.as_secs_f64(), "{sent} requests in {span:?}");
    guard.release().unwrap().unwrap_released();
    waiting.into_iter().for_each(|waiter| drop(waiter.join().unwrap().unwrap()));
}

/// Promise: P5
#[test]
fn queue_expires() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    let left = pttl(&server, &queue_key("x"));
    assert!(left > 0 && left <= 60_000, "{left}");
    drop(guard);
    drop(waiting.join().unwrap().unwrap());
    assert!(!server.query::<bool>(&["EXISTS", &queue_key("x")]));
}

/// Of two threads of a process, the first to wait is the last to join the queue, behind 400 other
/// entries. The thread with the lower queue position must poll.
///
/// Fault: N65
/// Promise: P5
#[test]
fn first_queued_thread_polls_for_its_process() {
    const HOLDER: &str = "gone|pid1|tid1|ts1763712345678|67e55044-10b1-426f-9247-bb680e5fe0c8";
    let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    server.cli(&["SET", "lock:elsewhere", HOLDER, "PX", "600000"]);
    let elsewhere = spawn_queued_waiter(&server, &mgr, "elsewhere");
    // With a subscription, the first request already joins the queue.
    server.cli(&["SET", LOCK, HOLDER, "PX", "600000"]);
    let join = proxy
        .on_request(|words| words.iter().any(|word| word.starts_with(b"join")), Fault::HoldRequest);
    let late = spawn_call(&mgr, "x", |mgr, name| mgr.lock(name));
    join.wait_fired();
    let first = spawn_call(&mgr, "x", |mgr, name| mgr.lock(name));
    await_queue_length(&server, "x", 1);
    for other in 1..=400 {
        server.cli(&[
            "RPUSH",
            &queue_key("x"),
            &format!("1000 distlock:client:nobody other{other}"),
        ]);
    }
    join.release();
    await_queue_length(&server, "x", 402);

    // The holder has died, and its lease ends.
    server.cli(&["PEXPIRE", LOCK, "1"]);
    let guard = completes_within(5 * SECOND, "the lock", || first.join().unwrap().unwrap());
    assert!(guard.is_held() && !late.is_finished());
    mgr.shutdown();
    assert!(late.join().unwrap().is_err() && elsewhere.join().unwrap().is_err());
}

#[test]
fn wait_for_an_unreachable_server_may_exceed_the_lease() {
    let server = RedisServer::start();
    server.kill();
    let mgr = RedisMgr::new(Config::new(server.url()).ttl(SECOND)).unwrap();
    let (outcome, span) = timed(|| mgr.try_lock_for("x", 4 * SECOND));
    let error = outcome.unwrap_err();
    assert!(span >= Duration::from_millis(3_900), "gave up after {span:?}: {error}");
    assert!(span < CALL_LIMIT, "{span:?}");
    assert!(matches!(error, LockError::Unavailable { .. }), "{error:?}");
    assert!(error.to_string().contains("refused"), "{error}");
}

/// A queued waiter needs no pooled connection to receive its grant, to keep the lock, or to release
/// it.
///
/// Fault: F63
#[test]
fn waiter_needs_no_pooled_connection() {
    let server = RedisServer::start();
    let ttl = 3 * SECOND;
    let mgr = RedisMgr::new(config_short_timeout(server.url()).ttl(ttl).pool_size(1)).unwrap();
    let other = manager(&server);
    let guard = other.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    let borrowed = mgr.connection().unwrap();
    // When this longer lease has expired, the waiter has waited for more than its own ttl.
    let longer = other.lock_with("clock", &with_ttl(ttl + 2 * SECOND).renew(false)).unwrap();
    assert_eq!(expect_loss(&longer), LockLost::Expired);
    assert!(!waiting.is_finished(), "{:?}", waiting.join().unwrap());
    guard.release().unwrap().unwrap_released();
    let next = completes_within(CALL_LIMIT, "the handover", || waiting.join().unwrap().unwrap());
    assert!(next.is_held());
    assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()));
    next.release().unwrap().unwrap_released();
    drop(borrowed);
}

/// Fault: F90
/// Promise: P6
#[test]
fn shutdown_wakes_all_waiters() {
    let server = RedisServer::start();
    let (mgr, holder) = (manager(&server), manager(&server));
    let guard = holder.lock("x").unwrap();
    let waiting: Vec<_> = (0..5).map(|_| spawn_queued_waiter(&server, &mgr, "x")).collect();
    completes_within(CALL_LIMIT, "shutdown", || mgr.shutdown());
    for waiter in waiting {
        assert!(matches!(
            completes_within(CALL_LIMIT, "waking", || waiter.join().unwrap()),
            Err(LockError::Shutdown)
        ));
    }
    assert!(matches!(mgr.lock("x"), Err(LockError::Shutdown)));
    assert!(guard.is_held());
}

/// Promise: P6
#[test]
fn shutdown_wakes_a_waiter_for_an_unreachable_server() {
    let server = RedisServer::start();
    let proxy = FaultProxy::in_front_of(server.addr());
    let mgr = RedisMgr::new(config_short_timeout(proxy.url())).unwrap();
    proxy.refuse();
    let waiting = spawn_call(&mgr, "x", |mgr, name| mgr.lock(name));
    eventually("it waits", TEST_TIMEOUT, || mgr.metrics().waiting() == 1);
    completes_within(CALL_LIMIT, "shutdown", || mgr.shutdown());
    assert!(matches!(
        completes_within(CALL_LIMIT, "waking", || waiting.join().unwrap()),
        Err(LockError::Shutdown)
    ));
}
