//! Shutting a manager down: its locks are released and its waiters leave the queues, also if
//! requests fail at the same time.

mod timing;

use std::{
    hint,
    sync::{Arc, Barrier, OnceLock},
    thread::{self, JoinHandle},
    time::Duration,
};

use distlock::{
    AttemptedEvent, HandleEvent, LockError, LockGuard, LockLost, LockOptions, RedisMgr,
};

use crate::{
    helpers::{
        CALL_LIMIT, FENCE, SECOND, UnwrapReleased, await_queue_length, config_long_timeouts,
        config_medium_timeout, distlock_threads, expect_loss, in_own_process, is_renewal, manager,
        open_files, queue_length, server_behind_proxy, spawn_call, spawn_queued_waiter,
    },
    support::{Fault, Nodes, RedisServer, SlowLink, TEST_TIMEOUT, contains, eventually},
};

const LOCKS: usize = 20;

fn lock_many(mgr: &RedisMgr) -> Vec<LockGuard> {
    (0..LOCKS).map(|n| mgr.lock(&format!("n{n}")).unwrap()).collect()
}

fn locks_left_on(server: &RedisServer) -> Vec<String> {
    server.query(&["KEYS", "lock:n*"])
}

#[test]
fn shutdown_releases_all_locks_and_notifies_holders() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guards = lock_many(&mgr);
    let id = mgr.acquire_lock("by id", 30 * SECOND, SECOND).unwrap().unwrap();
    mgr.shutdown();
    for guard in &guards {
        assert_eq!(expect_loss(guard), LockLost::Shutdown);
    }
    let locks: Vec<String> = server.query(&["KEYS", "lock:*"]);
    assert_eq!(locks, Vec::<String>::new());
    assert!(matches!(mgr.release_lock("by id", &id), Err(LockError::Shutdown)));
    assert!(matches!(mgr.ping(), Err(LockError::Shutdown)));
    let late = spawn_call(&mgr, "x", |mgr, name| mgr.try_lock(name).map(drop)).join().unwrap();
    assert!(matches!(late, Err(LockError::Shutdown)));
    drop(guards);
    mgr.shutdown();
}

/// A program that ends once it learns of the shutdown would otherwise leave its locks to expire.
///
/// Fault: N276
/// Promise: P5
#[test]
fn calls_that_a_shutdown_ends_wait_for_its_releases() {
    type Waiting = JoinHandle<Result<LockGuard, LockError>>;

    let server = RedisServer::start();
    let link = SlowLink::to(server.addr(), Duration::from_millis(20));
    let url = format!("redis://{}", link.addr());
    let calls: [fn(&RedisMgr, LockGuard, Waiting); 4] = [
        |_, guard, _| drop(guard),
        |_, guard, _| assert!(matches!(guard.release(), Err(LockError::Shutdown))),
        |_, _guard, waiting| {
            assert!(matches!(waiting.join().unwrap(), Err(LockError::Shutdown)));
        },
        |mgr, _guard, _| assert!(matches!(mgr.try_lock("y"), Err(LockError::Shutdown))),
    ];
    for call in calls {
        let mgr = RedisMgr::new(config_long_timeouts(url.clone())).unwrap();
        let guard = mgr.lock("n0").unwrap();
        let waiting = spawn_queued_waiter(&server, &mgr, "n0");
        let ending = mgr.clone();
        let shutdown = thread::spawn(move || ending.shutdown());
        assert_eq!(expect_loss(&guard), LockLost::Shutdown);
        call(&mgr, guard, waiting);
        assert_eq!(locks_left_on(&server), Vec::<String>::new());
        shutdown.join().unwrap();
    }
}

/// Fault: N35
#[test]
fn failed_request_at_shutdown_leaves_no_lock() {
    let refused = Fault::ReplaceReply(b"-ERR not now\r\n".to_vec());
    for fault in [Fault::ResetAfterRequest, Fault::ResetBeforeRequest, Fault::DropReply, refused] {
        let (server, proxy, mgr) =
            server_behind_proxy(|url| config_long_timeouts(url).operation_timeout(8 * SECOND));
        let guards = lock_many(&mgr);
        let failed = proxy.on_request(contains("lock:n"), fault.clone());
        mgr.shutdown();
        assert_eq!(failed.fired(), 1, "{fault:?}");
        assert_eq!(locks_left_on(&server), [""; 0], "{fault:?}");
        drop(guards);
    }
}

/// The manager was denied access to one lock, so it cannot clean up that request either. The other
/// locks must be released all the same.
///
/// Fault: N35
#[test]
fn failed_clean_up_at_shutdown_leaves_no_lock() {
    let server = RedisServer::start();
    server.cli(&["ACL", "SETUSER", "app", "on", ">pw", "~lock:*", "~distlock:*", "&*", "+@all"]);
    let mgr =
        RedisMgr::new(config_long_timeouts(format!("redis://app:pw@{}", server.addr()))).unwrap();
    // Wait once, so that the manager is subscribed: then a later request that fails may have left a
    // queue entry.
    let guard = manager(&server).lock("warm").unwrap();
    assert!(mgr.try_lock_for("warm", SECOND).unwrap_err().is_timeout());
    guard.release().unwrap().unwrap_released();
    let guards = lock_many(&mgr);
    server.cli(&["ACL", "SETUSER", "app", "resetkeys", "~lock:n*", "~distlock:*"]);
    assert!(mgr.try_lock_for("forbidden", SECOND).is_err());
    mgr.shutdown();
    assert_eq!(locks_left_on(&server), [""; 0]);
    drop(guards);
}

/// Fault: N35
#[test]
fn hung_node_at_shutdown_leaves_no_lock_on_other_nodes() {
    let nodes = Nodes::start(3);
    for hung in 0..3 {
        let config = config_long_timeouts(nodes.urls())
            .quarantine(Duration::ZERO)
            .operation_timeout(8 * SECOND);
        let mgr = RedisMgr::new(config).unwrap();
        let guards = lock_many(&mgr);
        nodes.stop(hung);
        mgr.shutdown();
        for node in (0..3).filter(|node| *node != hung) {
            let left = locks_left_on(nodes.server(node));
            assert_eq!(left, [""; 0], "on node {node} while node {hung} hangs");
        }
        nodes.cont(hung);
        drop(guards);
        nodes.server(hung).cli(&["FLUSHALL"]);
    }
}

/// Goal: a shutdown can release thousands of locks in time, even over a slow network. Method: the
/// reply to one release is held back. All other locks must be released meanwhile.
///
/// Fault: N93
/// Promise: P6
#[test]
fn releases_at_shutdown_do_not_wait_for_each_other() {
    for (count, dead) in [(1, None), (3, None), (3, Some(1))] {
        let nodes = Nodes::start(count).behind_proxies(&[0]);
        let config = config_long_timeouts(nodes.urls())
            .quarantine(Duration::ZERO)
            .operation_timeout(60 * SECOND);
        let mgr = RedisMgr::new(config.ttl(600 * SECOND)).unwrap();
        let guards = lock_many(&mgr);
        dead.into_iter().for_each(|node| nodes.kill(node));
        let held = nodes.proxy(0).on_request(contains("lock:n3"), Fault::HoldReply).forever();
        let shutdown = spawn_call(&mgr, "", |mgr, _| mgr.shutdown());
        let alive = || (0..count).filter(|node| dead != Some(*node));
        eventually("all locks are released", TEST_TIMEOUT, || {
            alive().all(|node| locks_left_on(nodes.server(node)).is_empty())
        });
        held.wait_fired();
        assert_eq!(held.fired(), 1, "the release was sent again");
        held.release();
        shutdown.join().unwrap();
        drop(guards);
    }
}

/// Two threads may shut a manager down at once, one of them perhaps because of a signal. Neither
/// call may return before the locks are released, because the process may exit then.
///
/// Fault: N36
#[test]
fn concurrent_shutdown_waits_until_locks_are_released() {
    let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    let guards = lock_many(&mgr);
    let releases = proxy
        .on_request(contains("lock:n"), Fault::DelayReply(Duration::from_millis(50)))
        .forever();
    let first = spawn_call(&mgr, "", |mgr, _| mgr.shutdown());
    releases.wait_fired();
    mgr.shutdown();
    assert_eq!(locks_left_on(&server), [""; 0]);
    first.join().unwrap();
    drop(guards);
}

/// A shutdown must stop waiting for a renewal in flight early enough to release all locks.
///
/// Fault: N45
#[test]
fn renewal_in_flight_at_shutdown_leaves_time_to_release() {
    let (server, proxy, mgr) = server_behind_proxy(|url| {
        config_long_timeouts(url).ttl(18 * SECOND).operation_timeout(4 * SECOND)
    });
    // Enough locks that releasing them takes longer than the short time by which the shutdown's
    // timeout ends after that of the renewal.
    let guards: Vec<_> = (0..1_000).map(|n| mgr.lock(&format!("n{n}")).unwrap()).collect();
    proxy.on_request(is_renewal("lock:n0"), Fault::HoldRequest).wait_fired();
    mgr.shutdown();
    assert_eq!(locks_left_on(&server), [""; 0]);
    drop(guards);
}

/// The shutdown comes after the call has started and before it gets a connection from the pool.
#[test]
fn call_interrupted_by_shutdown_reports_shutdown() {
    #[derive(Debug)]
    struct ShutDown(Arc<OnceLock<RedisMgr>>);

    impl HandleEvent for ShutDown {
        fn attempted(&self, _: &AttemptedEvent<'_>) {
            self.0.get().unwrap().shutdown();
        }
    }

    let server = RedisServer::start();
    for wait in [Some(Duration::ZERO), Some(SECOND), None] {
        let own = Arc::new(OnceLock::new());
        let mgr = RedisMgr::new(
            config_long_timeouts(server.url()).event_handler(Arc::new(ShutDown(own.clone()))),
        )
        .unwrap();
        own.set(mgr.clone()).unwrap();
        let options = wait.map_or(LockOptions::new(), |wait| LockOptions::new().wait(wait));
        let error = mgr.lock_with("x", &options).unwrap_err();
        assert!(matches!(error, LockError::Shutdown), "{wait:?}: {error:?}");
    }
}

/// Goal: waiters that return after the shutdown clean up over one connection.
/// Method: the replies to their first requests are held back until the manager has been shut down.
/// Their clean-up requests then get no reply, so each occupies its connection while others come.
///
/// Fault: N76
#[test]
fn late_waiters_at_shutdown_share_one_connection() {
    const WAITERS: u32 = 40;
    let (server, proxy, mgr) =
        server_behind_proxy(|url| config_medium_timeout(url).pool_size(WAITERS));
    let guard = manager(&server).lock("x").unwrap();
    // If one thread waits, the others enter the queue with their first request.
    let first = spawn_queued_waiter(&server, &mgr, "x");
    let entered = proxy.on_request(contains("lock:x"), Fault::HoldReply).times(WAITERS as usize);
    let mut waiting: Vec<_> =
        (0..WAITERS).map(|_| spawn_call(&mgr, "x", |mgr, name| mgr.lock(name))).collect();
    waiting.push(first);
    entered.wait_fired_times(WAITERS as usize);
    mgr.shutdown();
    let left = proxy.on_request(contains("lock:x"), Fault::HoldReply).forever();
    entered.release();
    for waiting in waiting {
        assert!(matches!(waiting.join().unwrap(), Err(LockError::Shutdown)));
    }
    // One at a time, each at most twice. On a slow machine a few more may still have time left.
    assert!(left.fired() < 10, "{}", left.fired());
    left.release();
    drop(guard);
}

/// If the server replies, the queue entries of all waiters are removed before their calls return.
///
/// Fault: N76
#[test]
fn waiters_at_shutdown_leave_the_queue() {
    const WAITERS: usize = 120;
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_long_timeouts(server.url()).pool_size(2)).unwrap();
    let guard = manager(&server).lock("x").unwrap();
    let waiting: Vec<_> =
        (0..WAITERS).map(|_| spawn_call(&mgr, "x", |mgr, name| mgr.lock(name))).collect();
    await_queue_length(&server, "x", WAITERS);
    mgr.shutdown();
    for waiting in waiting {
        assert!(matches!(waiting.join().unwrap(), Err(LockError::Shutdown)));
    }
    assert_eq!(queue_length(&server, "x"), 0);
    server.await_clients(0..=2);
    drop(guard);
}

/// Fault: F65
#[test]
fn dropped_managers_leave_no_threads_files_or_keys() {
    if !in_own_process("shutdown::dropped_managers_leave_no_threads_files_or_keys", &[]) {
        return;
    }
    let server = RedisServer::start();
    let mut files_before = None;
    for round in 0..5 {
        let mgr = RedisMgr::new(config_long_timeouts(server.url()).pool_size(4)).unwrap();
        let guard = mgr.lock("x").unwrap();
        assert!(!distlock_threads().is_empty());
        let waiting = spawn_queued_waiter(&server, &mgr.clone(), "x");
        let timed_out = mgr.try_lock_for("x", Duration::from_millis(50)).unwrap_err();
        assert!(timed_out.is_timeout());
        guard.release().unwrap().unwrap_released();
        let next = waiting.join().unwrap().unwrap();
        thread::scope(|threads| {
            for n in 0..8 {
                let mgr = &mgr;
                threads.spawn(move || drop(mgr.lock(&format!("n{n}")).unwrap()));
            }
        });
        if round % 2 == 0 {
            mgr.shutdown();
        }
        drop(mgr);
        drop(next);
        eventually("its threads have ended", TEST_TIMEOUT, || distlock_threads().is_empty());
        eventually("its connections are closed", TEST_TIMEOUT, || server.clients().is_empty());
        let now = open_files();
        assert_eq!(*files_before.get_or_insert(now), now, "open files in round {round}");
    }
    assert_eq!(server.keys(), [FENCE]);
}

/// Ignores all events.
#[derive(Debug)]
struct IgnoreEvents;

impl HandleEvent for IgnoreEvents {}

#[test]
fn shutdown_ends_connections_and_threads_of_all_clones() {
    if !in_own_process("shutdown::shutdown_ends_connections_and_threads_of_all_clones", &[]) {
        return;
    }
    let server = RedisServer::start();
    let mgr = RedisMgr::new(
        config_long_timeouts(server.url()).pool_size(4).event_handler(Arc::new(IgnoreEvents)),
    )
    .unwrap();
    let clone = mgr.clone();
    // A thread sets its name once it runs.
    eventually("the outbox runs", TEST_TIMEOUT, || {
        distlock_threads().iter().any(|name| name.contains("outbox"))
    });
    let guard = mgr.lock("x").unwrap();
    // A waiter opens the subscription.
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    guard.release().unwrap().unwrap_released();
    let guard = waiting.join().unwrap().unwrap();
    drop([mgr.connection().unwrap(), mgr.connection().unwrap()].map(|mut borrowed| {
        redis::cmd("PING").query::<()>(&mut borrowed).unwrap();
        borrowed
    }));
    let mut borrowed = mgr.connection().unwrap();
    redis::cmd("PING").query::<()>(&mut borrowed).unwrap();
    // The borrowed connection, and the subscription.
    assert!(server.clients().len() >= 2 && !distlock_threads().is_empty());
    mgr.shutdown();
    drop(borrowed);
    eventually("its connections are closed", CALL_LIMIT, || server.clients().is_empty());
    eventually("its threads have ended", CALL_LIMIT, || distlock_threads().is_empty());
    assert!(matches!(clone.try_lock("x"), Err(LockError::Shutdown)));
    assert!(matches!(clone.connection(), Err(LockError::Shutdown)));
    assert_eq!(guard.lost().recv(), Ok(LockLost::Shutdown));
    drop(guard);
    server.await_clients(0..=0);
    assert!(distlock_threads().is_empty());
}

/// Goal: a lock whose acquisition races with a shutdown is not left behind. Its lease would last 30
/// s.
#[test]
fn lock_acquired_during_a_shutdown_is_released() {
    const THREADS: usize = 3;
    let server = RedisServer::start();
    let mut taken = 0;
    for round in 0..60 {
        let mgr = manager(&server);
        let start = Arc::new(Barrier::new(THREADS + 1));
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let start = start.clone();
                spawn_call(&mgr, &format!("r{round}t{thread}"), move |mgr, name| {
                    start.wait();
                    let mut taken = 0;
                    loop {
                        match mgr.acquire_lock(&format!("{name}n{taken}"), 30 * SECOND, SECOND) {
                            Ok(id) => assert!(id.is_some(), "there is no other contender"),
                            Err(LockError::Shutdown) => return taken,
                            Err(error) => panic!("{error:?}"),
                        }
                        taken += 1;
                    }
                })
            })
            .collect();
        start.wait();
        // The shutdown begins at a random moment of their work.
        for _ in 0..fastrand::u32(..200_000) {
            hint::spin_loop();
        }
        mgr.shutdown();
        taken += threads.into_iter().map(|thread| thread.join().unwrap()).sum::<u32>();
        eventually("all locks are released", CALL_LIMIT, || {
            !server.keys().iter().any(|key| key.starts_with("lock:"))
        });
    }
    println!("{taken} locks were acquired");
}
