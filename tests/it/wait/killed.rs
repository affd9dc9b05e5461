//! Processes that end in every way but the proper one.

use std::time::Duration;

use crate::{
    contention::{
        expect_locked, expect_only_keys_that_expire, history::boottime, lock, lock_in_background,
        owner, release, spawn_worker,
    },
    helpers::{CALL_LIMIT, queued},
    support::{CEILING, RedisServer, Worker, eventually},
};

#[test]
fn a_killed_holder_keeps_the_lock_until_its_lease_is_over_and_no_longer() {
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
    eventually("the lease is over", CEILING, || owner(&server, "x").as_ref() != Some(&first.id));
    let seen = boottime();
    let second = expect_locked(&next, "x");
    let late = Duration::from_nanos(second.at.saturating_sub(seen));
    assert!(late < CALL_LIMIT, "the next one had it {late:?} after it could be seen to be free");
    // On a machine that stood still meanwhile, the lease may have been over before it could be
    // asked for.
    if id.as_ref() == Some(&first.id) {
        assert!(left <= 4000, "its lease is {left} ms");
        let over = asked + u64::try_from(left - 1).unwrap_or(0) * 1_000_000;
        assert!(
            second.at >= over,
            "the next one had it {} us too early",
            (over - second.at) / 1000
        );
    }
    assert!(second.token > first.token);
    assert_eq!(owner(&server, "x"), Some(second.id));
    expect_only_keys_that_expire(&server);
}

/// Starts a holder and three in line behind it. A claim lasts longer than the test has patience, so
/// that a lock handed to a dead process is noticed.
fn line_of_three(server: &RedisServer) -> (Worker, [Worker; 3]) {
    let mut holder = spawn_worker(server, &[]);
    let mut line =
        [spawn_worker(server, &[]), spawn_worker(server, &[]), spawn_worker(server, &[])];
    lock(&mut holder, "x");
    for (before, worker) in (0..).zip(&mut line) {
        lock_in_background(server, worker, "x", before);
    }
    (holder, line)
}

/// Kills a waiter and waits until its server has noticed; until then nobody can know.
fn kill_waiter(server: &RedisServer, worker: &mut Worker) {
    let listeners = || server.clients().iter().filter(|client| client["sub"] == "1").count();
    let before = listeners();
    worker.kill();
    eventually("the server misses a listener", CEILING, || listeners() == before - 1);
}

/// Who cannot be told stays in line, and the line ends with the time all the same.
#[test]
fn a_killed_waiter_that_a_missing_right_keeps_in_line_is_not_there_for_ever() {
    let server = RedisServer::start();
    let (mut holder, mut waiter) = (spawn_worker(&server, &[]), spawn_worker(&server, &[]));
    lock(&mut holder, "x");
    lock_in_background(&server, &mut waiter, "x", 0);
    kill_waiter(&server, &mut waiter);
    server.cli(&["ACL", "SETUSER", "default", "-publish"]);
    assert_eq!(release(&mut holder, "x"), "Ok(Released)");
    assert_eq!(queued(&server, "x"), 1);
    expect_only_keys_that_expire(&server);
}

#[test]
fn a_killed_head_of_the_line_is_passed_over_at_once() {
    let server = RedisServer::start();
    let (mut holder, [mut head, mut middle, mut last]) = line_of_three(&server);
    kill_waiter(&server, &mut head);
    assert_eq!(release(&mut holder, "x"), "Ok(Released)");
    let second = expect_locked(&middle, "x");
    release(&mut middle, "x");
    assert!(expect_locked(&last, "x").token > second.token);
    release(&mut last, "x");
    assert_eq!(owner(&server, "x"), None);
}

/// Whoever watches all channels hears what the dead are told.
#[test]
fn a_killed_head_of_the_line_is_passed_over_although_somebody_watches_all_channels() {
    let server = RedisServer::start();
    let mut watcher = redis::Client::open(server.url()).unwrap().get_connection().unwrap();
    let mut watching = watcher.as_pubsub();
    watching.psubscribe("*").unwrap();
    let (mut holder, [mut head, middle, _last]) = line_of_three(&server);
    kill_waiter(&server, &mut head);
    assert_eq!(release(&mut holder, "x"), "Ok(Released)");
    expect_locked(&middle, "x");
}

#[test]
fn a_killed_waiter_in_the_middle_of_the_line_is_passed_over_at_once() {
    let server = RedisServer::start();
    let (mut holder, [mut head, mut middle, last]) = line_of_three(&server);
    kill_waiter(&server, &mut middle);
    release(&mut holder, "x");
    let second = expect_locked(&head, "x");
    release(&mut head, "x");
    assert!(expect_locked(&last, "x").token > second.token);
}

#[test]
fn a_line_of_dead_waiters_does_not_keep_the_lock_from_being_free() {
    let server = RedisServer::start();
    let (mut holder, mut line) = line_of_three(&server);
    line.iter_mut().for_each(|worker| kill_waiter(&server, worker));
    assert_eq!(release(&mut holder, "x"), "Ok(Released)");
    assert_eq!(owner(&server, "x"), None);
    assert_eq!(server.query::<i64>(&["EXISTS", "distlock:queue:{lock:x}"]), 0);
}

#[test]
fn a_process_that_exits_with_guards_leaves_keys_that_expire() {
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
    eventually("the other lock is free", CEILING, || owner(&server, "y").is_none());
}

#[test]
fn a_thread_that_panics_while_it_holds_releases() {
    let server = RedisServer::start();
    let (mut holder, mut next) = (spawn_worker(&server, &[]), spawn_worker(&server, &[]));
    let first = lock(&mut holder, "x");
    lock_in_background(&server, &mut next, "x", 0);
    holder.send("panic x");
    holder.expect("panicked x");
    assert!(expect_locked(&next, "x").token > first.token);
    // And the process goes on as ever.
    lock(&mut holder, "y");
    assert_eq!(release(&mut holder, "y"), "Ok(Released)");
}

#[test]
fn a_process_that_comes_to_its_end_releases_everything() {
    let server = RedisServer::start();
    let mut holder = spawn_worker(&server, &[]);
    ["x", "y", "z"].iter().for_each(|name| drop(lock(&mut holder, name)));
    holder.end_input();
    assert!(holder.wait().success(), "{}", holder.transcript());
    assert!(["x", "y", "z"].iter().all(|name| owner(&server, name).is_none()));
    server.await_clients(0..=0);
}
