//! The wrapper is killed or frozen, or its guardian is.

use std::io::Read as _;

use distlock::RedisMgr;
use rustix::process::Signal;

use super::{
    Fixture, RunProcess,
    fixture::{IGNORE_SIGNALS, LONG_TTL, RUN_UNTIL_KILLED, await_state, is_alive, signal},
    slow_stderr::full,
};
use crate::{
    helpers::{pttl, server_with_scripts},
    support::{Fault, FaultProxy, TEST_TIMEOUT, contains, eventually},
};

#[test]
fn killed_wrapper_command_ends_and_lock_is_released() {
    let fixture = Fixture::new();
    let _report = fixture.report_on_panic();
    // A process that a shell has just forked still runs the shell's trap, which would not end it.
    // So the script waits until it has become `sleep`.
    let with_trap = "trap 'exit 0' TERM; sleep 600 & until grep -q sleep /proc/$!/comm; do :; \
                     done; echo $$ >$DIR/pid; wait $!";
    for script in [RUN_UNTIL_KILLED, with_trap] {
        let (mut job, pid) =
            fixture.run_until_started(&["--ttl", LONG_TTL, "--grace", "10m"], script);
        job.signal(Signal::KILL);
        assert_eq!(job.status().code(), None);
        // Long before the lock would expire.
        eventually("the lock is released", TEST_TIMEOUT, || fixture.holder().is_none());
        assert!(!is_alive(pid), "the lock was released before the command had ended");
        eventually("no process is left", TEST_TIMEOUT, || fixture.processes().is_empty());
        fixture.expect_nothing_left();
        std::fs::remove_file(fixture.path("pid")).unwrap();
        let says = format!(
            "distlock-guard: distlock (pid {}) was killed; ending the command and releasing lock \
             \"x\"\n",
            job.pid()
        );
        assert_eq!(job.err().lines().filter(|line| line.starts_with("distlock")).count(), 1);
        assert!(job.err().contains(&says), "{}", job.err());
    }
}

/// The message must not delay the work. The reader of standard error sees its end all the same.
#[test]
fn full_stderr_does_not_delay_guardian() {
    let fixture = Fixture::new();
    let (mut unread, err) = full();
    let script = &["sh", "-c", RUN_UNTIL_KILLED];
    let run = fixture.command(&["--ttl", LONG_TTL, "--grace", "10m"], script);
    let mut job = fixture.start_with_stderr(run, err);
    let pid = fixture.read_number("pid");
    job.signal(Signal::KILL);
    job.status();
    eventually("the lock is released", TEST_TIMEOUT, || fixture.holder().is_none());
    assert!(!is_alive(pid), "the lock was released before the command had ended");
    eventually("no process is left", TEST_TIMEOUT, || fixture.processes().is_empty());
    let mut rest = Vec::new();
    unread.read_to_end(&mut rest).unwrap();
    assert!(!rest.is_empty());
}

/// A granted lock first has a claim window only, which is what the guardian learns first.
///
/// Fault: N104
#[test]
fn wrapper_killed_after_grant_leaves_command_its_grace() {
    let fixture = Fixture::new();
    let guard = fixture.manager().lock("x").unwrap();
    let cleans_up = "trap 'sleep 0.3; echo done >$DIR/tidy; exit' TERM; echo $$ >$DIR/pid; while \
                     :; do sleep 0.05; done";
    let mut job = fixture.run(&["--ttl", "10m", "--grace", "10m"], cleans_up);
    fixture.await_queue_length(1);
    drop(guard);
    let pid = fixture.read_number("pid");
    let held = || 600_000 - pttl(&fixture.server, "lock:x");
    eventually("the grant has long been confirmed", TEST_TIMEOUT, || {
        (1_500..100_000).contains(&held())
    });
    job.signal(Signal::KILL);
    job.status();
    eventually("no process is left", TEST_TIMEOUT, || fixture.processes().is_empty());
    assert!(!is_alive(pid));
    assert_eq!(fixture.read("tidy"), "done\n", "it was killed at once");
    fixture.expect_nothing_left();
}

#[test]
fn killed_wrapper_group_ignoring_signals_is_killed() {
    let fixture = Fixture::new();
    let (mut job, pid) =
        fixture.run_until_started(&["--ttl", LONG_TTL, "--grace", "500ms"], IGNORE_SIGNALS);
    let other = fixture.read_number("other");
    job.signal(Signal::KILL);
    job.status();
    eventually("the lock is released", TEST_TIMEOUT, || fixture.holder().is_none());
    assert!(!is_alive(pid) && !is_alive(other));
    eventually("no process is left", TEST_TIMEOUT, || fixture.processes().is_empty());
    fixture.expect_nothing_left();
}

/// The lease limits the grace period.
#[test]
fn killed_wrapper_command_is_dead_before_lease_expires() {
    let fixture = Fixture::new();
    let (mut job, pid) =
        fixture.run_until_started(&["--ttl", "20s", "--grace", "10m"], IGNORE_SIGNALS);
    let other = fixture.read_number("other");
    job.signal(Signal::KILL);
    job.status();
    let left = || pttl(&fixture.server, "lock:x");
    let mut last = left();
    eventually("the lock is released", TEST_TIMEOUT, || {
        let now = left();
        last = if now > 0 { now } else { last };
        now < 0
    });
    assert!(last > 1_000, "the lock was not released, it expired: {last} ms were left");
    assert!(!is_alive(pid) && !is_alive(other));
    eventually("no process is left", TEST_TIMEOUT, || fixture.processes().is_empty());
}

#[test]
fn guardian_leaves_lock_of_other_holder_alone() {
    let fixture = Fixture::new();
    let (mut job, pid) = fixture.run_until_started(&["--ttl", LONG_TTL], RUN_UNTIL_KILLED);
    // The wrapper cannot notice before its next renewal.
    fixture.server.cli(&["SET", "lock:x", "a stranger"]);
    job.signal(Signal::KILL);
    job.status();
    eventually("no process is left", TEST_TIMEOUT, || fixture.processes().is_empty());
    assert!(!is_alive(pid));
    assert_eq!(fixture.holder().as_deref(), Some("a stranger"));
}

#[test]
fn wrapper_killed_while_waiting_leaves_no_queue_entry() {
    let fixture = Fixture::new();
    let guard = fixture.manager().lock("x").unwrap();
    let mut job = fixture.run(&[], "echo >$DIR/ran");
    fixture.await_queue_length(1);
    job.signal(Signal::KILL);
    job.status();
    eventually("the guardian has ended", TEST_TIMEOUT, || fixture.processes().is_empty());
    eventually("the server has closed the subscription", TEST_TIMEOUT, || {
        fixture.server.clients().iter().all(|client| client["sub"] == "0")
    });
    drop(guard);
    fixture.expect_nothing_left();
    assert_eq!(fixture.read("ran"), "");
}

/// The server has granted the lock, but the wrapper has not received the reply.
///
/// Fault: N50
#[test]
fn wrapper_killed_before_acquire_reply_leaves_no_lock() {
    let (fixture, proxy) = behind_a_proxy();
    let granted = proxy.on_request(contains("lock:x"), Fault::HoldReply);
    let mut job = fixture.run(&["--ttl", LONG_TTL], "echo >$DIR/ran");
    granted.wait_fired();
    assert!(fixture.holder().is_some());
    job.signal(Signal::KILL);
    job.status();
    eventually("the lock is released", TEST_TIMEOUT, || fixture.holder().is_none());
    eventually("the guardian has ended", TEST_TIMEOUT, || fixture.processes().is_empty());
    fixture.expect_nothing_left();
    assert_eq!(fixture.read("ran"), "");
}

/// Fault: N50
#[test]
fn late_acquire_of_killed_wrapper_is_released() {
    let (fixture, proxy) = behind_a_proxy();
    let acquire = proxy.on_request(contains("lock:x"), Fault::HoldRequest);
    let release = proxy.on_request(contains("lock:x"), Fault::HoldReply);
    let mut job = fixture.run(&["--ttl", LONG_TTL], "echo >$DIR/ran");
    acquire.wait_fired();
    job.signal(Signal::KILL);
    job.status();
    release.wait_fired();
    assert_eq!(fixture.holder(), None, "the guardian has found no lock");
    acquire.release();
    eventually("the late request acquires the lock", TEST_TIMEOUT, || fixture.holder().is_some());
    release.release();
    eventually("the lock is released", TEST_TIMEOUT, || fixture.holder().is_none());
    eventually("the guardian has ended", TEST_TIMEOUT, || fixture.processes().is_empty());
    fixture.expect_nothing_left();
}

/// A server that knows the scripts, behind a proxy.
pub(super) fn behind_a_proxy() -> (Fixture, FaultProxy) {
    let server = server_with_scripts();
    let proxy = FaultProxy::in_front_of(server.addr());
    let url = proxy.url();
    (Fixture::at(server, url), proxy)
}

/// No command and no lock is left, at whatever moment the wrapper is killed.
///
/// Fault: N50
#[test]
fn wrapper_killed_at_any_moment_leaves_nothing() {
    let fixture = Fixture::new();
    let mgr = fixture.manager();
    for round in 0..40 {
        let guard = mgr.lock("x").unwrap();
        let mut job = fixture.run(&["--ttl", LONG_TTL], "exec sleep 600");
        fixture.await_queue_length(1);
        std::thread::scope(|scope| {
            scope.spawn(|| drop(guard));
            for _ in 0..round * 20_000 {
                std::hint::spin_loop();
            }
            job.signal(Signal::KILL);
        });
        job.status();
        eventually("no process is left", TEST_TIMEOUT, || fixture.processes().is_empty());
        eventually("the lock is free", TEST_TIMEOUT, || fixture.holder().is_none());
    }
}

/// Checks that both processes of a frozen wrapper's command are dead once another client has the
/// lock.
#[track_caller]
fn expect_dead_when_lock_is_free(
    fixture: &Fixture,
    job: &mut RunProcess,
    command: [u32; 2],
    mgr: &RedisMgr,
) {
    let guard = mgr.lock("x").unwrap();
    assert!(
        !command.into_iter().any(is_alive),
        "the command ran while another client held the lock"
    );
    job.signal(Signal::CONT);
    assert_eq!(job.code(), 76, "{}", job.err());
    assert_eq!(fixture.processes(), []);
    assert!(guard.is_held());
}

/// A frozen wrapper can neither renew nor end its command.
#[test]
fn frozen_wrapper_command_is_dead_before_lock_is_free() {
    let fixture = Fixture::new();
    let (mut job, pid) =
        fixture.run_until_started(&["--ttl", "10s", "--grace", "200ms"], IGNORE_SIGNALS);
    let other = fixture.read_number("other");
    job.signal(Signal::STOP);
    expect_dead_when_lock_is_free(&fixture, &mut job, [pid, other], &fixture.manager());
}

/// A wrapper that is frozen then cannot confirm the grant, so the lock lasts for the claim window
/// only.
///
/// Fault: N104
#[test]
fn wrapper_frozen_at_grant_has_command_dead_before_lock_free() {
    let fixture = Fixture::new();
    let mgr = fixture.manager();
    let guard = mgr.lock("x").unwrap();
    let mut job = fixture.run(&["--ttl", "10s"], &format!("kill -STOP $PPID; {IGNORE_SIGNALS}"));
    fixture.await_queue_length(1);
    drop(guard);
    let (pid, other) = (fixture.read_number("pid"), fixture.read_number("other"));
    expect_dead_when_lock_is_free(&fixture, &mut job, [pid, other], &mgr);
}

/// The lock is still held then, so without a message the command would seem to end for no reason.
///
/// Fault: N67
#[test]
fn resumed_wrapper_reports_that_guardian_ended_command() {
    let fixture = Fixture::new();
    let (mut job, pid) =
        fixture.run_until_started(&["--ttl", "20s", "--grace", "0"], RUN_UNTIL_KILLED);
    job.signal(Signal::STOP);
    eventually("the command has ended", TEST_TIMEOUT, || !is_alive(pid));
    let says = format!(
        "distlock-guard: distlock (pid {}) is stopped or gets no CPU time; ending the command \
         under lock \"x\"\n",
        job.pid()
    );
    eventually("the guardian reports it", TEST_TIMEOUT, || job.err().contains(&says));
    job.signal(Signal::CONT);
    assert_eq!(job.code(), 76, "{}", job.err());
    // On a slow machine, the lock may have expired meanwhile.
    let err = job.err();
    assert!(
        ["distlock got no CPU time until lock \"x\" had almost expired", "was lost: "]
            .iter()
            .any(|why| err.contains(why)),
        "{err}"
    );
    eventually("the lock is free", TEST_TIMEOUT, || fixture.holder().is_none());
    assert_eq!(fixture.processes(), []);
}

/// The wrapper has sent SIGTERM, and cannot send SIGKILL.
///
/// Fault: N74
#[test]
fn wrapper_frozen_while_terminating_has_command_killed() {
    let fixture = Fixture::new();
    let script = "trap 'echo >$DIR/asked' TERM; echo $$ >$DIR/pid; while :; do sleep 1; done";
    let (mut job, pid) = fixture.run_until_started(&["--ttl", "9s", "--grace", "5s"], script);
    fixture.server.cli(&["DEL", "lock:x"]);
    fixture.read_line("asked");
    job.signal(Signal::STOP);
    eventually("the command is killed", TEST_TIMEOUT, || !is_alive(pid));
    job.signal(Signal::CONT);
    assert_eq!(job.code(), 76, "{}", job.err());
    let err = job.err();
    assert_eq!(err.lines().filter(|line| line.starts_with("distlock: ")).count(), 1, "{err}");
    fixture.expect_nothing_left();
}

#[test]
fn killed_guardian_does_not_disturb_command() {
    let fixture = Fixture::new();
    let (mut job, _) =
        fixture.run_until_started(&["--ttl", "9s"], "echo $$ >$DIR/pid; read -r line; exit 3");
    let guardian = fixture.guardian();
    signal(guardian, Signal::KILL);
    eventually("the guardian is reaped", TEST_TIMEOUT, || {
        crate::support::process_state(guardian).is_none()
    });
    fixture.await_renewals(1);
    job.end_input();
    assert_eq!(job.code(), 3, "{}", job.err());
    fixture.expect_nothing_left();
}

/// The messages of the wrapper wait in the pipe meanwhile.
///
/// Fault: N118
#[test]
fn resumed_guardian_spares_command_of_running_wrapper() {
    let fixture = Fixture::new();
    let (mut job, _) =
        fixture.run_until_started(&["--ttl", "9s"], "echo $$ >$DIR/pid; read -r line; exit 3");
    let guardian = fixture.guardian();
    signal(guardian, Signal::STOP);
    await_state(guardian, 'T');
    // More than a whole lease.
    fixture.await_renewals(4);
    signal(guardian, Signal::CONT);
    fixture.await_renewals(2);
    job.end_input();
    assert_eq!((job.code(), job.err().as_str()), (3, ""));
    fixture.expect_nothing_left();
}

/// Kills what `killall -9 distlock` would kill.
#[test]
fn killall_spares_guardian() {
    let fixture = Fixture::new();
    let (mut job, pid) =
        fixture.run_until_started(&["--ttl", LONG_TTL, "--grace", "10m"], RUN_UNTIL_KILLED);
    let mut processes = fixture.processes();
    processes.reverse();
    for (pid, _) in processes {
        if std::fs::read_to_string(format!("/proc/{pid}/comm"))
            .is_ok_and(|name| name.trim() == "distlock")
        {
            signal(pid, Signal::KILL);
        }
    }
    job.status();
    eventually("the lock is released", TEST_TIMEOUT, || fixture.holder().is_none());
    assert!(!is_alive(pid));
    eventually("no process is left", TEST_TIMEOUT, || fixture.processes().is_empty());
}

#[test]
fn guardian_has_its_own_process_name() {
    let fixture = Fixture::new();
    let (_job, _) = fixture.run_until_started(&["--ttl", LONG_TTL], RUN_UNTIL_KILLED);
    let guardian = fixture.guardian();
    let (_, command_line) =
        fixture.processes().into_iter().find(|(pid, _)| *pid == guardian).expect("it runs");
    assert!(command_line.starts_with("distlock-guard "), "{command_line}");
    let name = || std::fs::read_to_string(format!("/proc/{guardian}/comm")).unwrap_or_default();
    eventually("the guardian has set its name", TEST_TIMEOUT, || name() == "distlock-guard\n");
}

#[test]
fn signals_do_not_end_guardian() {
    let fixture = Fixture::new();
    let (mut job, pid) = fixture.run_until_started(&["--ttl", LONG_TTL], RUN_UNTIL_KILLED);
    let guardian = fixture.guardian();
    for one in [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT] {
        signal(guardian, one);
    }
    job.signal(Signal::KILL);
    job.status();
    eventually("the lock is released", TEST_TIMEOUT, || fixture.holder().is_none());
    assert!(!is_alive(pid));
}

/// A password file may be a pipe, which can be read only once. The password must not appear in
/// process lists.
#[test]
fn guardian_receives_password_out_of_sight() {
    let server = crate::support::RedisServer::builder().password("geheim").start();
    let url = format!("redis://{}", server.addr());
    let fixture = Fixture::at(server, url);
    let file = fixture.path("password");
    rustix::fs::mkfifoat(rustix::fs::CWD, &file, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR)
        .unwrap();
    let mut command = fixture.command(&["--ttl", LONG_TTL], &["sh", "-c", RUN_UNTIL_KILLED]);
    command.env("DISTLOCK_PASSWORD_FILE", &file);
    let mut job = fixture.start(command);
    std::fs::write(&file, "geheim\n").unwrap();
    let pid = fixture.read_number("pid");
    for (pid, command_line) in fixture.processes() {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap();
        let environment = String::from_utf8_lossy(&environment);
        assert!(
            !command_line.contains("geheim") && !environment.contains("geheim"),
            "{command_line}"
        );
    }
    job.signal(Signal::KILL);
    job.status();
    eventually("the lock is released", TEST_TIMEOUT, || fixture.holder().is_none());
    assert!(!is_alive(pid));
}
