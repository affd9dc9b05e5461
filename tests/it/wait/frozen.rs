//! Processes that stand still for a while and do not know it.

use std::io::{Write as _, stderr};

use crate::{
    contention::{
        expect_locked, history::boottime, lock, lock_in_background, owner, pause, release,
        spawn_worker, waiting,
    },
    helpers::server_with_scripts,
    support::{
        CEILING, Fault, FaultProxy, Freezer, RedisServer, Worker, command, contains, eventually,
    },
};

#[track_caller]
fn ask(worker: &mut Worker, question: &str) -> String {
    worker.send(question);
    worker.expect(question)
}

#[test]
fn a_holder_stopped_past_its_lease_knows_at_its_first_look_and_harms_nobody() {
    let server = RedisServer::start();
    let mut sleeper = spawn_worker(&server, &[("ttl_ms", "1000")]);
    let mut next = spawn_worker(&server, &[]);
    let first = lock(&mut sleeper, "x");
    sleeper.stop();
    let second = lock(&mut next, "x");
    assert!(second.token > first.token);
    assert_eq!(ask(&mut next, "write x"), "true");

    // It is what the process finds in its input when it wakes up: it looks before anything else.
    sleeper.send("held x");
    sleeper.cont();
    assert_eq!(sleeper.expect("held x"), "false");
    let why = ask(&mut sleeper, "lost x");
    assert!(why == "Ok(Expired)" || why.starts_with("Ok(Taken"), "{why}");
    assert_eq!(ask(&mut sleeper, "write x"), "false", "the resource took a write of the past");
    sleeper.send("drop x");
    sleeper.expect("dropped x");
    // Its end waits for everything that was left to the background.
    sleeper.end_input();
    assert!(sleeper.wait().success(), "{}", sleeper.transcript());
    assert_eq!(owner(&server, "x").as_ref(), Some(&second.id));
    assert_eq!(ask(&mut next, "held x"), "true");
    assert_eq!(ask(&mut next, "write x"), "true");
    assert_eq!(release(&mut next, "x"), "Ok(Released)");
}

/// The same without a signal, so that no system call is interrupted. The freezer is dropped first:
/// who is frozen cannot be killed.
#[test]
fn a_holder_that_is_frozen_past_its_lease_knows_at_its_first_look() {
    let server = RedisServer::start();
    let mut sleeper = spawn_worker(&server, &[("ttl_ms", "1000")]);
    let mut next = spawn_worker(&server, &[]);
    let freezer = match Freezer::new() {
        Ok(freezer) => freezer,
        Err(why) => {
            // Not by `eprintln!`, which is kept to itself where the test passes.
            let _ = writeln!(
                stderr(),
                "NOT SHOWN: a holder that is frozen: no control group of its own: {why}"
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

#[test]
fn a_release_that_comes_too_late_names_the_new_holder_and_leaves_it_alone() {
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

#[test]
fn a_holder_stopped_for_less_than_its_lease_still_holds() {
    let server = RedisServer::start();
    let mut holder = spawn_worker(&server, &[("ttl_ms", "15000")]);
    let locked = lock(&mut holder, "x");
    let left = || server.query::<i64>(&["PTTL", "lock:x"]);
    holder.stop();
    eventually("a renewal is overdue", CEILING, || left() < 9_700);
    holder.send("held x");
    holder.cont();
    assert_eq!(holder.expect("held x"), "true");
    eventually("it is renewed", CEILING, || left() > 9_900);
    assert_eq!(ask(&mut holder, "quiet x"), "true");
    assert_eq!(ask(&mut holder, "held x"), "true");
    assert_eq!(owner(&server, "x"), Some(locked.id));
}

#[test]
fn a_waiter_that_slept_through_its_grant_does_not_believe_in_it() {
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
    // After one claim window, it is the next one's turn.
    let second = expect_locked(&next, "x");
    assert!(second.token > first.token);

    sleeper.cont();
    eventually("it is in line again, or believes", CEILING, || {
        waiting(&server, "x") == 1 || owner(&server, "x").as_ref() != Some(&second.id)
    });
    assert_eq!(ask(&mut next, "held x"), "true");
    assert_eq!(release(&mut next, "x"), "Ok(Released)");
    let third = expect_locked(&sleeper, "x");
    assert!(third.token > second.token, "it believed in a grant of the past");
    assert_eq!(owner(&server, "x"), Some(third.id));
}

/// The grant comes when its waiter has just asked the server again: measured against that fresh
/// reading it lies in the past, and must not be taken for one of right now.
#[test]
fn a_grant_that_arrives_after_its_waiter_has_lined_up_again_is_not_believed() {
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
    // What the listener gets to hear is held up behind the answer to its question whether the
    // server is there.
    let held_up = proxy.on_request(command("PING"), Fault::HoldReply);
    lock_in_background(&server, &mut sleeper, "x", 0);
    lock_in_background(&server, &mut next, "x", 1);
    held_up.wait_fired();
    sleeper.stop();
    release(&mut holder, "x");
    let second = expect_locked(&next, "x");
    sleeper.cont();
    eventually("it is in line again", CEILING, || waiting(&server, "x") == 1);
    let monitor = server.monitor();
    held_up.let_go();
    // Whatever it makes of the grant, it then turns to the server.
    monitor.wait_for("EVALSHA");
    assert_eq!(ask(&mut next, "held x"), "true");
    assert_eq!(release(&mut next, "x"), "Ok(Released)");
    let third = expect_locked(&sleeper, "x");
    assert!(third.token > second.token, "it believed in a grant of the past");
}

/// The answers are late, so belief that was counted from them would outlast the key.
#[test]
fn belief_ends_before_the_key_however_late_the_answers_come() {
    let server = server_with_scripts();
    let proxy = FaultProxy::in_front_of(server.addr());
    let far =
        [("url", proxy.url()), ("ttl_ms", "9000".to_owned()), ("timeout_ms", "60000".to_owned())];
    let mut holder =
        spawn_worker(&server, &far.each_ref().map(|(key, value)| (*key, value.as_str())));
    lock(&mut holder, "warm");
    release(&mut holder, "warm");
    let left = || u64::try_from(server.query::<i64>(&["PTTL", "lock:x"])).unwrap_or(0);
    // Read in this order, the end can only seem later than it is.
    let key_ends = || {
        let left = left();
        boottime() + (left + 1) * 1_000_000
    };
    let late = proxy.on_request(contains("lock:x"), Fault::HoldReply);
    let carried_out = || eventually("it is carried out", CEILING, || left() > 8000);
    holder.send("lock x");
    late.wait_fired();
    carried_out();
    eventually("the answer is late", CEILING, || left() < 8000);
    late.let_go();
    expect_locked(&holder, "x");
    let mut believes_until = || ask(&mut holder, "until x").parse::<u64>().expect("a number");
    let first = believes_until();
    assert!(first <= key_ends(), "belief outlasts the acquisition");

    let late = proxy.on_request(contains("lock:x"), Fault::HoldReply);
    late.wait_fired();
    carried_out();
    eventually("the answer is late", CEILING, || left() < 8000);
    late.let_go();
    let mut renewed = first;
    eventually("it is renewed", CEILING, || {
        renewed = believes_until();
        renewed > first + 1_000_000_000
    });
    assert!(renewed <= key_ends(), "belief outlasts the renewal");
}

/// Stops and continues a process many times, which interrupts whatever system calls its threads are
/// in.
fn rattle(worker: &mut Worker, times: usize) {
    for _ in 0..times {
        worker.stop();
        worker.cont();
    }
}

/// How many connections the server has ever had.
fn connected(server: &RedisServer) -> u64 {
    let stats: String = server.query(&["INFO", "stats"]);
    let count = stats.lines().find_map(|line| line.strip_prefix("total_connections_received:"));
    count.and_then(|count| count.trim().parse().ok()).expect("the number of connections")
}

#[test]
fn an_acquire_that_is_interrupted_again_and_again_neither_fails_nor_is_lost() {
    let server = RedisServer::start();
    let mut worker = spawn_worker(&server, &[("timeout_ms", "60000")]);
    lock(&mut worker, "warm");
    // The test's own connections are counted too.
    let (first, before) = (connected(&server), connected(&server));
    server.stop();
    worker.send("lock x");
    rattle(&mut worker, 60);
    server.cont();
    let got = expect_locked(&worker, "x");
    assert_eq!(connected(&server) - before, before - first, "it has connected anew");
    assert_eq!(owner(&server, "x"), Some(got.id));
    assert_eq!(ask(&mut worker, "held warm"), "true");
    assert_eq!(ask(&mut worker, "quiet warm"), "true");
}

#[test]
fn a_renewal_that_is_interrupted_again_and_again_is_not_lost() {
    let server = RedisServer::start();
    let mut holder = spawn_worker(&server, &[]);
    // A lease that was handed over is confirmed at once, which is when the server falls silent.
    let mut worker = spawn_worker(&server, &[("timeout_ms", "60000"), ("window_ms", "300000")]);
    lock(&mut holder, "x");
    lock_in_background(&server, &mut worker, "x", 0);
    release(&mut holder, "x");
    server.stop();
    rattle(&mut worker, 60);
    server.cont();
    let got = expect_locked(&worker, "x");
    let left = || server.query::<i64>(&["PTTL", "lock:x"]);
    eventually("it is renewed for a whole lease", CEILING, || left() > 310_000);
    assert_eq!(ask(&mut worker, "held x"), "true");
    assert_eq!(ask(&mut worker, "quiet x"), "true");
    assert_eq!(owner(&server, "x"), Some(got.id));
}

#[test]
fn locks_taken_between_interruptions_all_succeed() {
    let (server, desk) = (RedisServer::start(), crate::contention::Desk::new());
    let (file, history) = (desk.path("count"), desk.history());
    let args = [
        ("lock", "rattled"),
        ("rounds", "1000"),
        ("ttl_ms", crate::contention::FOREVER_MS),
        ("window_ms", crate::contention::FOREVER_MS),
        ("timeout_ms", "60000"),
        ("file", crate::contention::text(&file)),
        ("history", crate::contention::text(&history)),
    ];
    let mut workers = crate::contention::spawn_workers(&server, &[(2, "counter", &args)]);
    for _ in 0..40 {
        for worker in &mut workers {
            if worker.stop_if_running() {
                worker.cont();
            }
        }
        pause(1);
    }
    crate::contention::expect_done(&mut workers);
    assert_eq!(crate::contention::count(&file), 2000);
}
