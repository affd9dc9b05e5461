//! Processes that are stopped or frozen for a while and do not know it.

use std::io::{Write as _, stderr};

use crate::{
    contention::{
        FOREVER_MS, TestFolder, expect_done, expect_locked, history::boottime, lock,
        lock_in_background, owner, path_str, pause, read_counter, release, spawn_worker,
        spawn_workers,
    },
    helpers::{
        SECOND, UnwrapReleased, manager, queue_length, server_with_scripts, spawn_queued_waiter,
        timed,
    },
    support::{
        CgroupFreezer, Fault, FaultProxy, RedisServer, TEST_TIMEOUT, Worker, command, contains,
        eventually,
    },
};

#[track_caller]
fn ask(worker: &mut Worker, question: &str) -> String {
    worker.send(question);
    worker.expect(question)
}

/// Fault: F1
/// Promise: P1
#[test]
fn holder_stopped_past_its_lease_knows_at_once() {
    let server = RedisServer::start();
    let mut sleeper = spawn_worker(&server, &[("ttl_ms", "1000")]);
    let mut next = spawn_worker(&server, &[]);
    let first = lock(&mut sleeper, "x");
    sleeper.stop();
    let second = lock(&mut next, "x");
    assert!(second.token > first.token);
    assert_eq!(ask(&mut next, "write x"), "true");

    // The process finds this line when it continues, and checks before it does anything else.
    sleeper.send("held x");
    sleeper.cont();
    assert_eq!(sleeper.expect("held x"), "false");
    let why = ask(&mut sleeper, "lost x");
    assert!(why == "Ok(Expired)" || why.starts_with("Ok(Taken"), "{why}");
    assert_eq!(ask(&mut sleeper, "write x"), "false", "the resource accepted a stale write");
    sleeper.send("drop x");
    sleeper.expect("dropped x");
    // The process ends only when all background work is done.
    sleeper.end_input();
    assert!(sleeper.wait().success(), "{}", sleeper.transcript());
    assert_eq!(owner(&server, "x").as_ref(), Some(&second.id));
    assert_eq!(ask(&mut next, "held x"), "true");
    assert_eq!(ask(&mut next, "write x"), "true");
    assert_eq!(release(&mut next, "x"), "Ok(Released)");
}

/// The same without a signal, so that no system call is interrupted. The freezer is dropped before
/// the worker, because a frozen process cannot be killed.
///
/// Fault: F4
#[test]
fn holder_frozen_past_its_lease_knows_at_once() {
    let server = RedisServer::start();
    let mut sleeper = spawn_worker(&server, &[("ttl_ms", "1000")]);
    let mut next = spawn_worker(&server, &[]);
    let freezer = match CgroupFreezer::new() {
        Ok(freezer) => freezer,
        Err(why) => {
            // `eprintln!` would be captured and not shown if the test passes.
            let _ = writeln!(
                stderr(),
                "NOT SHOWN: a holder that is frozen: no control group available: {why}"
            );
            return;
        }
    };
    freezer.take(sleeper.pid());
    let first = lock(&mut sleeper, "x");
    freezer.freeze();
    let second = lock(&mut next, "x");
    assert!(second.token > first.token);
    sleeper.send("held x");
    freezer.thaw();
    assert_eq!(sleeper.expect("held x"), "false");
    let why = ask(&mut sleeper, "lost x");
    assert!(why == "Ok(Expired)" || why.starts_with("Ok(Taken"), "{why}");
    assert_eq!(owner(&server, "x"), Some(second.id));
    assert_eq!(ask(&mut next, "held x"), "true");
}

/// Fault: F1
#[test]
fn late_release_names_the_new_holder_and_spares_it() {
    let server = RedisServer::start();
    let mut sleeper = spawn_worker(&server, &[("ttl_ms", "1000")]);
    let mut next = spawn_worker(&server, &[]);
    lock(&mut sleeper, "x");
    sleeper.stop();
    let second = lock(&mut next, "x");
    sleeper.send("release x");
    sleeper.cont();
    assert_eq!(sleeper.expect("released x"), "OwnedByOther");
    assert_eq!(owner(&server, "x"), Some(second.id));
}

/// Fault: F2
#[test]
fn holder_stopped_for_less_than_its_lease_still_holds() {
    let server = RedisServer::start();
    let mut holder = spawn_worker(&server, &[("ttl_ms", "15000")]);
    let locked = lock(&mut holder, "x");
    let left = || server.query::<i64>(&["PTTL", "lock:x"]);
    holder.stop();
    eventually("a renewal is overdue", TEST_TIMEOUT, || left() < 9_700);
    holder.send("held x");
    holder.cont();
    assert_eq!(holder.expect("held x"), "true");
    eventually("it is renewed", TEST_TIMEOUT, || left() > 9_900);
    assert_eq!(ask(&mut holder, "quiet x"), "true");
    assert_eq!(ask(&mut holder, "held x"), "true");
    assert_eq!(owner(&server, "x"), Some(locked.id));
}

#[test]
fn waiter_stopped_past_its_grant_does_not_use_it() {
    let server = RedisServer::start();
    let mut holder = spawn_worker(&server, &[]);
    let mut sleeper = spawn_worker(&server, &[("window_ms", "1000")]);
    let mut next = spawn_worker(&server, &[]);
    let first = lock(&mut holder, "x");
    lock_in_background(&server, &mut sleeper, "x", 0);
    lock_in_background(&server, &mut next, "x", 1);
    sleeper.stop();
    assert_eq!(release(&mut holder, "x"), "Ok(Released)");
    assert_ne!(owner(&server, "x").as_ref(), Some(&first.id));
    // After one claim window the grant expires and the next waiter is served.
    let second = expect_locked(&next, "x");
    assert!(second.token > first.token);

    sleeper.cont();
    eventually("it is queued again, or has taken the lock", TEST_TIMEOUT, || {
        queue_length(&server, "x") == 1 || owner(&server, "x").as_ref() != Some(&second.id)
    });
    assert_eq!(ask(&mut next, "held x"), "true");
    assert_eq!(release(&mut next, "x"), "Ok(Released)");
    let third = expect_locked(&sleeper, "x");
    assert!(third.token > second.token, "it used a grant of the past");
    assert_eq!(owner(&server, "x"), Some(third.id));
}

/// Nothing is sent to a waiter whom hand-overs have made the head of the queue.
///
/// Fault: N267
/// Promise: P4
#[test]
fn waiter_far_back_polls_soon_once_it_is_the_head() {
    const BEFORE: usize = 14;
    let server = RedisServer::start();
    let first = manager(&server).lock("x").unwrap();
    let before: Vec<_> =
        (0..BEFORE).map(|_| spawn_queued_waiter(&server, &manager(&server), "x")).collect();
    let mut frozen = spawn_worker(&server, &[("window_ms", "1000")]);
    lock_in_background(&server, &mut frozen, "x", BEFORE);
    let last = spawn_queued_waiter(&server, &manager(&server), "x");
    frozen.stop();
    first.release().unwrap().unwrap_released();
    for waiter in before {
        waiter.join().unwrap().unwrap().release().unwrap().unwrap_released();
    }
    // A claim window, and a second until it polls. According to its first position, it would poll
    // after eight.
    let (last, span) = timed(|| last.join().unwrap().unwrap());
    assert!(last.is_held() && span < 5 * SECOND, "{span:?}");
    frozen.kill();
}

/// A grant arrives after its waiter has joined the queue again. By the server's clock in that newer
/// reply the grant is in the past, and must not be taken for a new one.
///
/// Promise: P1
#[test]
fn grant_older_than_the_latest_poll_is_not_used() {
    let server = server_with_scripts();
    let proxy = FaultProxy::in_front_of(server.addr());
    let mut holder = spawn_worker(&server, &[]);
    let mut next = spawn_worker(&server, &[]);
    let far = [
        ("url", proxy.url()),
        ("window_ms", "1000".to_owned()),
        ("timeout_ms", "60000".to_owned()),
    ];
    let mut sleeper =
        spawn_worker(&server, &far.each_ref().map(|(key, value)| (*key, value.as_str())));
    lock(&mut holder, "x");
    // Messages on the subscription are held up behind the reply to its ping.
    let held_up = proxy.on_request(command("PING"), Fault::HoldReply);
    lock_in_background(&server, &mut sleeper, "x", 0);
    lock_in_background(&server, &mut next, "x", 1);
    held_up.wait_fired();
    sleeper.stop();
    release(&mut holder, "x");
    let second = expect_locked(&next, "x");
    sleeper.cont();
    eventually("it is queued again", TEST_TIMEOUT, || queue_length(&server, "x") == 1);
    let monitor = server.monitor();
    held_up.release();
    // After handling the grant, the waiter sends its next request.
    monitor.wait_for("EVALSHA");
    assert_eq!(ask(&mut next, "held x"), "true");
    assert_eq!(release(&mut next, "x"), "Ok(Released)");
    let third = expect_locked(&sleeper, "x");
    assert!(third.token > second.token, "it used a grant of the past");
}

/// The replies are late, so a lease counted from their arrival would end after the key has expired.
///
/// Promise: P2
#[test]
fn lease_ends_before_the_key_however_late_replies_are() {
    let server = server_with_scripts();
    let proxy = FaultProxy::in_front_of(server.addr());
    let far =
        [("url", proxy.url()), ("ttl_ms", "9000".to_owned()), ("timeout_ms", "60000".to_owned())];
    let mut holder =
        spawn_worker(&server, &far.each_ref().map(|(key, value)| (*key, value.as_str())));
    lock(&mut holder, "warm");
    release(&mut holder, "warm");
    let left = || u64::try_from(server.query::<i64>(&["PTTL", "lock:x"])).unwrap_or(0);
    // In this order of reading, the end can only seem later than it is.
    let key_ends = || {
        let left = left();
        boottime() + (left + 1) * 1_000_000
    };
    let late = proxy.on_request(contains("lock:x"), Fault::HoldReply);
    let await_executed = || eventually("it is executed", TEST_TIMEOUT, || left() > 8000);
    holder.send("lock x");
    late.wait_fired();
    await_executed();
    eventually("the reply is late", TEST_TIMEOUT, || left() < 8000);
    late.release();
    expect_locked(&holder, "x");
    let mut lease_end = || ask(&mut holder, "until x").parse::<u64>().expect("a number");
    let first = lease_end();
    assert!(first <= key_ends(), "the lease outlasts the acquired key");

    let late = proxy.on_request(contains("lock:x"), Fault::HoldReply);
    late.wait_fired();
    await_executed();
    eventually("the reply is late", TEST_TIMEOUT, || left() < 8000);
    late.release();
    let mut renewed = first;
    eventually("it is renewed", TEST_TIMEOUT, || {
        renewed = lease_end();
        renewed > first + 1_000_000_000
    });
    assert!(renewed <= key_ends(), "the lease outlasts the renewed key");
}

/// Stops and continues a process many times, which interrupts the system calls of its threads.
fn interrupt(worker: &mut Worker, times: usize) {
    for _ in 0..times {
        worker.stop();
        worker.cont();
    }
}

/// Total number of connections that the server has accepted.
fn connections_received(server: &RedisServer) -> u64 {
    let stats: String = server.query(&["INFO", "stats"]);
    let count = stats.lines().find_map(|line| line.strip_prefix("total_connections_received:"));
    count.and_then(|count| count.trim().parse().ok()).expect("the number of connections")
}

/// Promise: P10
#[test]
fn interrupted_acquire_neither_fails_nor_reconnects() {
    let server = RedisServer::start();
    let mut worker = spawn_worker(&server, &[("timeout_ms", "60000")]);
    lock(&mut worker, "warm");
    // The test's own connections are counted too.
    let (first, before) = (connections_received(&server), connections_received(&server));
    server.stop();
    worker.send("lock x");
    interrupt(&mut worker, 60);
    server.cont();
    let got = expect_locked(&worker, "x");
    assert_eq!(connections_received(&server) - before, before - first, "it has reconnected");
    assert_eq!(owner(&server, "x"), Some(got.id));
    assert_eq!(ask(&mut worker, "held warm"), "true");
    assert_eq!(ask(&mut worker, "quiet warm"), "true");
}

/// Fault: F2
#[test]
fn interrupted_renewal_is_not_lost() {
    let server = RedisServer::start();
    let mut holder = spawn_worker(&server, &[]);
    // The lease of a handed-over lock is confirmed at once; that is the request that the stopped
    // server does not answer.
    let mut worker = spawn_worker(&server, &[("timeout_ms", "60000"), ("window_ms", "300000")]);
    lock(&mut holder, "x");
    lock_in_background(&server, &mut worker, "x", 0);
    release(&mut holder, "x");
    server.stop();
    interrupt(&mut worker, 60);
    server.cont();
    let got = expect_locked(&worker, "x");
    let left = || server.query::<i64>(&["PTTL", "lock:x"]);
    eventually("it is renewed for the full lease", TEST_TIMEOUT, || left() > 310_000);
    assert_eq!(ask(&mut worker, "held x"), "true");
    assert_eq!(ask(&mut worker, "quiet x"), "true");
    assert_eq!(owner(&server, "x"), Some(got.id));
}

#[test]
fn interrupted_processes_acquire_every_lock() {
    let (server, folder) = (RedisServer::start(), TestFolder::new());
    let (file, history) = (folder.path("count"), folder.history());
    let args = [
        ("lock", "interrupted"),
        ("rounds", "1000"),
        ("ttl_ms", FOREVER_MS),
        ("window_ms", FOREVER_MS),
        ("timeout_ms", "60000"),
        ("file", path_str(&file)),
        ("history", path_str(&history)),
    ];
    let mut workers = spawn_workers(&server, &[(2, "counter", &args)]);
    for _ in 0..40 {
        for worker in &mut workers {
            if worker.stop_if_running() {
                worker.cont();
            }
        }
        pause(1);
    }
    expect_done(&mut workers);
    assert_eq!(read_counter(&file), 2000);
}
