//! The wrapper is killed or frozen, or its guardian is.

use distlock::RedisMgr;
use rustix::process::Signal;

use super::{
    Job, Scene,
    scene::{LONG, STAY, STUBBORN, await_state, is_alive, signal},
};
use crate::{
    kit::{pttl, taught},
    support::{CEILING, Fault, FaultProxy, contains, eventually},
};

#[test]
fn the_command_of_a_killed_wrapper_is_ended_and_its_lock_given_up() {
    let scene = Scene::new();
    let _told = scene.told_of();
    // What a shell has just split off heeds the shell's trap, and would let the signal pass.
    let listens =
        "trap 'exit 0' TERM; sleep 600 & until grep -q sleep /proc/$!/comm; do :; done; echo $$ >$DIR/pid; wait $!";
    for script in [STAY, listens] {
        let (mut job, pid) = scene.running(&["--ttl", LONG, "--grace", "10m"], script);
        job.signal(Signal::KILL);
        assert_eq!(job.status().code(), None);
        // Long before it would expire.
        eventually("the lock is given up", CEILING, || scene.holder().is_none());
        assert!(!is_alive(pid), "the lock was given up before the command had ended");
        eventually("nothing of it is left", CEILING, || scene.processes().is_empty());
        scene.expect_nothing_left();
        std::fs::remove_file(scene.path("pid")).unwrap();
    }
}

/// It comes with a claim window only, of which the guardian hears first.
#[test]
fn the_command_of_a_wrapper_that_is_killed_soon_after_a_hand_over_has_its_grace() {
    let scene = Scene::new();
    let guard = scene.manager().lock("x").unwrap();
    let tidies_up =
        "trap 'sleep 0.3; echo done >$DIR/tidy; exit' TERM; echo $$ >$DIR/pid; while :; do sleep 0.05; done";
    let mut job = scene.run(&["--ttl", "10m", "--grace", "10m"], tidies_up);
    scene.await_line(1);
    drop(guard);
    let pid = scene.number("pid");
    let held = || 600_000 - pttl(&scene.server, "lock:x");
    eventually("it has been confirmed for longer than a claim window", CEILING, || (1_500..100_000).contains(&held()));
    job.signal(Signal::KILL);
    job.status();
    eventually("nothing of it is left", CEILING, || scene.processes().is_empty());
    assert!(!is_alive(pid));
    assert_eq!(scene.read("tidy"), "done\n", "it was killed at once");
    scene.expect_nothing_left();
}

#[test]
fn all_of_a_killed_wrappers_group_are_killed_if_they_do_not_listen() {
    let scene = Scene::new();
    let (mut job, pid) = scene.running(&["--ttl", LONG, "--grace", "500ms"], STUBBORN);
    let other = scene.number("other");
    job.signal(Signal::KILL);
    job.status();
    eventually("the lock is given up", CEILING, || scene.holder().is_none());
    assert!(!is_alive(pid) && !is_alive(other));
    eventually("nothing of it is left", CEILING, || scene.processes().is_empty());
    scene.expect_nothing_left();
}

/// However long the grace period is: it is the lease that counts.
#[test]
fn the_command_of_a_killed_wrapper_is_dead_before_its_lease_is_over() {
    let scene = Scene::new();
    let (mut job, pid) = scene.running(&["--ttl", "20s", "--grace", "10m"], STUBBORN);
    let other = scene.number("other");
    job.signal(Signal::KILL);
    job.status();
    let left = || pttl(&scene.server, "lock:x");
    let mut last = left();
    eventually("the lock is given up", CEILING, || {
        let now = left();
        last = if now > 0 { now } else { last };
        now < 0
    });
    assert!(last > 1_000, "it was not given up, it expired: {last} ms were left");
    assert!(!is_alive(pid) && !is_alive(other));
    eventually("nothing of it is left", CEILING, || scene.processes().is_empty());
}

#[test]
fn a_lock_that_another_has_by_then_is_left_to_it() {
    let scene = Scene::new();
    let (mut job, pid) = scene.running(&["--ttl", LONG], STAY);
    // Until the next renewal the wrapper cannot know.
    scene.server.cli(&["SET", "lock:x", "a stranger"]);
    job.signal(Signal::KILL);
    job.status();
    eventually("nothing of it is left", CEILING, || scene.processes().is_empty());
    assert!(!is_alive(pid));
    assert_eq!(scene.holder().as_deref(), Some("a stranger"));
}

#[test]
fn a_wrapper_that_is_killed_while_it_waits_leaves_nobody_in_the_way() {
    let scene = Scene::new();
    let guard = scene.manager().lock("x").unwrap();
    let mut job = scene.run(&[], "echo >$DIR/ran");
    scene.await_line(1);
    job.signal(Signal::KILL);
    job.status();
    eventually("its guardian has gone", CEILING, || scene.processes().is_empty());
    eventually("the server has missed it", CEILING, || {
        scene.server.clients().iter().all(|client| client["sub"] == "0")
    });
    drop(guard);
    scene.expect_nothing_left();
    assert_eq!(scene.read("ran"), "");
}

/// The lock is its own, and it does not know it yet.
#[test]
fn a_wrapper_that_is_killed_before_it_hears_of_its_lock_leaves_none() {
    let (scene, proxy) = behind_a_proxy();
    let granted = proxy.on_request(contains("lock:x"), Fault::HoldReply);
    let mut job = scene.run(&["--ttl", LONG], "echo >$DIR/ran");
    granted.wait_fired();
    assert!(scene.holder().is_some());
    job.signal(Signal::KILL);
    job.status();
    eventually("the lock is given up", CEILING, || scene.holder().is_none());
    eventually("its guardian has gone", CEILING, || scene.processes().is_empty());
    scene.expect_nothing_left();
    assert_eq!(scene.read("ran"), "");
}

#[test]
fn what_a_killed_wrapper_has_asked_for_is_given_up_also_if_it_comes_later() {
    let (scene, proxy) = behind_a_proxy();
    let asked = proxy.on_request(contains("lock:x"), Fault::HoldRequest);
    let looked = proxy.on_request(contains("lock:x"), Fault::HoldReply);
    let mut job = scene.run(&["--ttl", LONG], "echo >$DIR/ran");
    asked.wait_fired();
    job.signal(Signal::KILL);
    job.status();
    looked.wait_fired();
    assert_eq!(scene.holder(), None, "its guardian has found nothing");
    asked.let_go();
    eventually("the lock is taken for nobody", CEILING, || scene.holder().is_some());
    looked.let_go();
    eventually("the lock is given up", CEILING, || scene.holder().is_none());
    eventually("its guardian has gone", CEILING, || scene.processes().is_empty());
    scene.expect_nothing_left();
}

/// A server that knows the scripts, behind a proxy.
pub(super) fn behind_a_proxy() -> (Scene, FaultProxy) {
    let server = taught();
    let proxy = FaultProxy::in_front_of(server.addr());
    let url = proxy.url();
    (Scene::at(server, url), proxy)
}

/// At whatever moment the wrapper is killed, no command is left that nobody knows of, and no lock.
#[test]
fn a_wrapper_can_be_killed_at_any_moment() {
    let scene = Scene::new();
    let mgr = scene.manager();
    for round in 0..40 {
        let guard = mgr.lock("x").unwrap();
        let mut job = scene.run(&["--ttl", LONG], "exec sleep 600");
        scene.await_line(1);
        std::thread::scope(|scope| {
            scope.spawn(|| drop(guard));
            for _ in 0..round * 20_000 {
                std::hint::spin_loop();
            }
            job.signal(Signal::KILL);
        });
        job.status();
        eventually("nothing of it is left", CEILING, || scene.processes().is_empty());
        eventually("the lock is free", CEILING, || scene.holder().is_none());
    }
}

/// A command of two processes, whose wrapper is stopped.
#[track_caller]
fn is_dead_when_others_have_the_lock(scene: &Scene, job: &mut Job, command: [u32; 2], mgr: &RedisMgr) {
    let guard = mgr.lock("x").unwrap();
    assert!(!command.into_iter().any(is_alive), "two at once");
    job.signal(Signal::CONT);
    assert_eq!(job.code(), 76, "{}", job.err());
    assert_eq!(scene.processes(), []);
    assert!(guard.is_held());
}

/// It cannot renew any more, and cannot end its command either.
#[test]
fn the_command_of_a_frozen_wrapper_is_dead_when_others_can_have_the_lock() {
    let scene = Scene::new();
    let (mut job, pid) = scene.running(&["--ttl", "10s", "--grace", "200ms"], STUBBORN);
    let other = scene.number("other");
    job.signal(Signal::STOP);
    is_dead_when_others_have_the_lock(&scene, &mut job, [pid, other], &scene.manager());
}

/// What it has is the claim window, which nothing makes longer.
#[test]
fn the_command_of_a_wrapper_that_freezes_at_a_hand_over_is_dead_when_others_can_have_the_lock() {
    let scene = Scene::new();
    let mgr = scene.manager();
    let guard = mgr.lock("x").unwrap();
    let mut job = scene.run(&["--ttl", "10s"], &format!("kill -STOP $PPID; {STUBBORN}"));
    scene.await_line(1);
    drop(guard);
    let (pid, other) = (scene.number("pid"), scene.number("other"));
    is_dead_when_others_have_the_lock(&scene, &mut job, [pid, other], &mgr);
}

/// Its lock is still there then, and nobody else has asked the command to end.
#[test]
fn a_frozen_wrapper_whose_command_had_to_be_ended_says_so() {
    let scene = Scene::new();
    let (mut job, pid) = scene.running(&["--ttl", "20s", "--grace", "0"], STAY);
    job.signal(Signal::STOP);
    eventually("the command is ended", CEILING, || !is_alive(pid));
    job.signal(Signal::CONT);
    assert_eq!(job.code(), 76, "{}", job.err());
    // On a machine that takes longer than what was left of it, the lock is lost by now.
    let said = job.err();
    assert!(["was kept from running", "is lost: "].iter().any(|why| said.contains(why)), "{said}");
    eventually("the lock is free", CEILING, || scene.holder().is_none());
    assert_eq!(scene.processes(), []);
}

/// It has asked its command to end, and cannot kill it.
#[test]
fn a_wrapper_that_freezes_while_it_ends_its_command_has_it_killed() {
    let scene = Scene::new();
    let script = "trap 'echo >$DIR/asked' TERM; echo $$ >$DIR/pid; while :; do sleep 1; done";
    let (mut job, pid) = scene.running(&["--ttl", "9s", "--grace", "5s"], script);
    scene.server.cli(&["DEL", "lock:x"]);
    scene.line("asked");
    job.signal(Signal::STOP);
    eventually("the command is killed", CEILING, || !is_alive(pid));
    job.signal(Signal::CONT);
    assert_eq!(job.code(), 76, "{}", job.err());
    let err = job.err();
    assert_eq!(err.lines().filter(|line| line.starts_with("distlock: ")).count(), 1, "{err}");
    scene.expect_nothing_left();
}

#[test]
fn nobody_misses_a_guardian_that_is_killed() {
    let scene = Scene::new();
    let (mut job, _) = scene.running(&["--ttl", "9s"], "echo $$ >$DIR/pid; read -r line; exit 3");
    let guardian = scene.guardian();
    signal(guardian, Signal::KILL);
    eventually("it is buried", CEILING, || crate::support::process_state(guardian).is_none());
    scene.await_renewals(1);
    job.end_input();
    assert_eq!(job.code(), 3, "{}", job.err());
    scene.expect_nothing_left();
}

/// What it has not heard meanwhile has been said all the same.
#[test]
fn a_guardian_that_was_frozen_spares_the_command_of_a_wrapper_that_is_well() {
    let scene = Scene::new();
    let (mut job, _) = scene.running(&["--ttl", "9s"], "echo $$ >$DIR/pid; read -r line; exit 3");
    let guardian = scene.guardian();
    signal(guardian, Signal::STOP);
    await_state(guardian, 'T');
    // A whole lease, and more.
    scene.await_renewals(4);
    signal(guardian, Signal::CONT);
    scene.await_renewals(2);
    job.end_input();
    assert_eq!((job.code(), job.err().as_str()), (3, ""));
    scene.expect_nothing_left();
}

/// As `killall -9 distlock` does it.
#[test]
fn who_kills_all_of_this_name_spares_the_guardian() {
    let scene = Scene::new();
    let (mut job, pid) = scene.running(&["--ttl", LONG, "--grace", "10m"], STAY);
    let mut processes = scene.processes();
    processes.reverse();
    for (pid, _) in processes {
        if std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == "distlock") {
            signal(pid, Signal::KILL);
        }
    }
    job.status();
    eventually("the lock is given up", CEILING, || scene.holder().is_none());
    assert!(!is_alive(pid));
    eventually("nothing of it is left", CEILING, || scene.processes().is_empty());
}

#[test]
fn the_guardian_is_known_by_its_name() {
    let scene = Scene::new();
    let (_job, _) = scene.running(&["--ttl", LONG], STAY);
    let guardian = scene.guardian();
    let (_, words) = scene.processes().into_iter().find(|(pid, _)| *pid == guardian).expect("it runs");
    assert!(words.starts_with("distlock-guard "), "{words}");
    let name = || std::fs::read_to_string(format!("/proc/{guardian}/comm")).unwrap_or_default();
    eventually("it is named", CEILING, || name() == "distlock-guard\n");
}

#[test]
fn signals_do_not_end_a_guardian() {
    let scene = Scene::new();
    let (mut job, pid) = scene.running(&["--ttl", LONG], STAY);
    let guardian = scene.guardian();
    for one in [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT] {
        signal(guardian, one);
    }
    job.signal(Signal::KILL);
    job.status();
    eventually("the lock is given up", CEILING, || scene.holder().is_none());
    assert!(!is_alive(pid));
}

/// A password file may be a pipe, which can be read once; and what is read stays out of sight.
#[test]
fn the_guardian_knows_the_password_and_nobody_can_see_it() {
    let server = crate::support::RedisServer::builder().password("geheim").start();
    let url = format!("redis://{}", server.addr());
    let scene = Scene::at(server, url);
    let file = scene.path("password");
    rustix::fs::mkfifoat(rustix::fs::CWD, &file, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR).unwrap();
    let mut command = scene.command(&["--ttl", LONG], &["sh", "-c", STAY]);
    command.env("DISTLOCK_PASSWORD_FILE", &file);
    let mut job = scene.start(command);
    std::fs::write(&file, "geheim\n").unwrap();
    let pid = scene.number("pid");
    for (pid, words) in scene.processes() {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap();
        assert!(!words.contains("geheim") && !String::from_utf8_lossy(&environment).contains("geheim"), "{words}");
    }
    job.signal(Signal::KILL);
    job.status();
    eventually("the lock is given up", CEILING, || scene.holder().is_none());
    assert!(!is_alive(pid));
}
