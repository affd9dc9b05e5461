//! Processes that are killed, exit or panic while they hold a lock or wait for it.

use std::time::Duration;

use crate::{
    contention::{
        expect_locked, expect_only_keys_that_expire, history::boottime, lock, lock_in_background,
        owner, release, spawn_worker,
    },
    helpers::{CALL_LIMIT, queue_key, queue_length},
    security::permissions::permit_publishing,
    support::{RedisServer, TEST_TIMEOUT, Worker, eventually},
};

/// Fault: F5
/// Promise: P5
#[test]
fn killed_holder_keeps_the_lock_exactly_until_its_lease_ends() {
    let server = RedisServer::start();
    let mut holder = spawn_worker(&server, &[("ttl_ms", "4000")]);
    let mut next = spawn_worker(&server, &[]);
    let first = lock(&mut holder, "x");
    lock_in_background(&server, &mut next, "x", 0);
    holder.kill();
    let asked = boottime();
    let (id, left): (Option<String>, i64) = server.query(&[
        "EVAL",
        "return {redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1])}",
        "1",
        "lock:x",
    ]);
    eventually("the lease ends", TEST_TIMEOUT, || owner(&server, "x").as_ref() != Some(&first.id));
    let seen = boottime();
    let second = expect_locked(&next, "x");
    let late = Duration::from_nanos(second.at.saturating_sub(seen));
    assert!(late < CALL_LIMIT, "the next holder got it {late:?} after it was seen to be free");
    // If the machine stalled, the lease may have ended before this test could read its TTL.
    if id.as_ref() == Some(&first.id) {
        assert!(left <= 4000, "its lease has {left} ms left");
        let end = asked + u64::try_from(left - 1).unwrap_or(0) * 1_000_000;
        assert!(
            second.at >= end,
            "the next holder got it {} us too early",
            (end - second.at) / 1000
        );
    }
    assert!(second.token > first.token);
    assert_eq!(owner(&server, "x"), Some(second.id));
    expect_only_keys_that_expire(&server);
}

/// Starts a holder and three waiters behind it. A claim window lasts longer than the test, which
/// therefore fails if the lock is handed to a dead process.
fn queue_of_three(server: &RedisServer) -> (Worker, [Worker; 3]) {
    let mut holder = spawn_worker(server, &[]);
    let mut waiters =
        [spawn_worker(server, &[]), spawn_worker(server, &[]), spawn_worker(server, &[])];
    lock(&mut holder, "x");
    for (before, worker) in (0..).zip(&mut waiters) {
        lock_in_background(server, worker, "x", before);
    }
    (holder, waiters)
}

/// Kills a waiter and waits until the server has noticed. Before that no release can skip it.
fn kill_waiter(server: &RedisServer, worker: &mut Worker) {
    let subscribers = || server.clients().iter().filter(|client| client["sub"] == "1").count();
    let before = subscribers();
    worker.kill();
    eventually("the server notices", TEST_TIMEOUT, || subscribers() == before - 1);
}

/// Kills the first waiter, the middle one, or all. The lock goes at once to the others in their
/// order, and is free after them.
///
/// Fault: F6
#[test]
fn killed_waiters_are_skipped_at_once() {
    for killed in [&[0][..], &[1], &[0, 1, 2]] {
        let server = RedisServer::start();
        let (mut holder, mut waiters) = queue_of_three(&server);
        killed.iter().for_each(|waiter| kill_waiter(&server, &mut waiters[*waiter]));
        assert_eq!(release(&mut holder, "x"), "Ok(Released)");
        let mut last = 0;
        for (number, waiter) in waiters.iter_mut().enumerate() {
            if !killed.contains(&number) {
                let token = expect_locked(waiter, "x").token;
                assert!(token > last, "without {killed:?}");
                last = token;
                release(waiter, "x");
            }
        }
        assert_eq!(owner(&server, "x"), None, "without {killed:?}");
        assert!(!server.query::<bool>(&["EXISTS", &queue_key("x")]), "without {killed:?}");
    }
}

/// A client that subscribes to all channels receives grant messages for dead waiters too.
///
/// Fault: F6
/// Promise: P4
#[test]
fn killed_waiter_is_skipped_despite_a_wildcard_subscriber() {
    let server = RedisServer::start();
    let mut watcher = redis::Client::open(server.url()).unwrap().get_connection().unwrap();
    let mut watching = watcher.as_pubsub();
    watching.psubscribe("*").unwrap();
    let (mut holder, [mut first, second, _third]) = queue_of_three(&server);
    kill_waiter(&server, &mut first);
    assert_eq!(release(&mut holder, "x"), "Ok(Released)");
    expect_locked(&second, "x");
}

/// Without permission to publish, a release puts the first waiter back into the queue. The queue
/// must still expire.
///
/// Fault: N24
#[test]
fn killed_waiter_expires_even_without_publish_permission() {
    let server = RedisServer::start();
    let (mut holder, mut waiter) = (spawn_worker(&server, &[]), spawn_worker(&server, &[]));
    lock(&mut holder, "x");
    lock_in_background(&server, &mut waiter, "x", 0);
    waiter.stop();
    permit_publishing(&server, false);
    assert_eq!(release(&mut holder, "x"), "Ok(Released)");
    assert_eq!(queue_length(&server, "x"), 1);
    kill_waiter(&server, &mut waiter);
    expect_only_keys_that_expire(&server);
}

/// Fault: F9
/// Promise: P5
#[test]
fn process_that_exits_leaves_only_keys_that_expire() {
    let server = RedisServer::start();
    let mut holder = spawn_worker(&server, &[("ttl_ms", "4000")]);
    let mut next = spawn_worker(&server, &[]);
    let first = lock(&mut holder, "x");
    lock(&mut holder, "y");
    lock_in_background(&server, &mut next, "x", 0);
    holder.send("exit now");
    assert!(holder.wait().success(), "{}", holder.transcript());
    expect_only_keys_that_expire(&server);
    assert!(expect_locked(&next, "x").token > first.token);
    eventually("the other lock is free", TEST_TIMEOUT, || owner(&server, "y").is_none());
}

/// Fault: F7
#[test]
fn panicking_thread_releases_its_lock() {
    let server = RedisServer::start();
    let (mut holder, mut next) = (spawn_worker(&server, &[]), spawn_worker(&server, &[]));
    let first = lock(&mut holder, "x");
    lock_in_background(&server, &mut next, "x", 0);
    holder.send("panic x");
    holder.expect("panicked x");
    assert!(expect_locked(&next, "x").token > first.token);
    // The process can go on locking.
    lock(&mut holder, "y");
    assert_eq!(release(&mut holder, "y"), "Ok(Released)");
}

#[test]
fn process_that_ends_cleanly_releases_all_locks() {
    let server = RedisServer::start();
    let mut holder = spawn_worker(&server, &[]);
    ["x", "y", "z"].iter().for_each(|name| drop(lock(&mut holder, name)));
    holder.end_input();
    assert!(holder.wait().success(), "{}", holder.transcript());
    assert!(["x", "y", "z"].iter().all(|name| owner(&server, name).is_none()));
    server.await_clients(0..=0);
}
