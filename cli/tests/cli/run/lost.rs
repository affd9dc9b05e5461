//! Loss of the lock while the command runs.

use std::io::Read as _;

use distlock::RedisMgr;
use rustix::process::Signal;

use super::{
    Fixture, RunProcess,
    fixture::{
        IGNORE_SIGNALS, KEY, LONG_TTL, RUN_UNTIL_KILLED, await_state, is_alive, signal,
        with_ignored_signal,
    },
    killed::behind_a_proxy,
    slow_stderr::full,
};
use crate::{
    helpers::{config_long_timeouts, is_renewal},
    support::{Fault, RedisServer, TEST_TIMEOUT, eventually},
};

#[track_caller]
fn expect_lost(fixture: &Fixture, job: RunProcess, why: &str) {
    expect_ended(fixture, job, &format!("was lost: {why}"));
}

#[track_caller]
fn expect_ended(fixture: &Fixture, mut job: RunProcess, what: &str) {
    assert_eq!(job.code(), 76, "{}", job.err());
    let err = job.err();
    assert!(err.contains(&format!("distlock: lock \"x\" {what}")), "{err}");
    // The shell may report the end of its own command too. An outage is reported before the end.
    let is_end = |line: &&str| {
        line.starts_with("distlock: ") && !line.starts_with("distlock: cannot renew lock \"x\" (")
    };
    assert_eq!(err.lines().filter(is_end).count(), 1, "{err}");
    assert_eq!(fixture.processes(), []);
}

#[test]
fn deleted_lock_ends_command() {
    let ways: [fn(&RedisServer); 3] = [
        |server| drop(server.cli(&["DEL", KEY])),
        |server| drop(server.cli(&["FLUSHALL"])),
        RedisServer::restart_empty,
    ];
    for way in ways {
        let fixture = Fixture::new();
        let (job, _) = fixture.run_until_started(&["--ttl", "9s"], RUN_UNTIL_KILLED);
        way(&fixture.server);
        expect_lost(&fixture, job, "it no longer exists on the server");
        fixture.expect_lock_free();
    }
}

#[test]
fn force_released_lock_ends_command() {
    let fixture = Fixture::new();
    let (job, _) = fixture.run_until_started(&["--ttl", "9s"], RUN_UNTIL_KILLED);
    let mgr = fixture.manager();
    assert!(mgr.force_release("x").unwrap());
    expect_lost(&fixture, job, "it no longer exists on the server");
    fixture.expect_nothing_left();
}

#[test]
fn force_released_lock_goes_to_next_waiter() {
    let fixture = Fixture::new();
    let (job, _) = fixture.run_until_started(&["--ttl", "9s"], RUN_UNTIL_KILLED);
    let mut next = fixture.run(&["--ttl", LONG_TTL], "echo >$DIR/next; read -r line; exit 3");
    fixture.await_queue_length(1);
    assert!(fixture.manager().force_release("x").unwrap());
    fixture.read_line("next");
    let holder = fixture.holder();
    let mut job = job;
    assert_eq!(job.code(), 76, "{}", job.err());
    assert!(
        job.err().contains("is now held by") && job.err().contains(&format!("pid {}", next.pid()))
    );
    assert_eq!(fixture.holder(), holder);
    next.end_input();
    assert_eq!(next.code(), 3, "{}", next.err());
    fixture.expect_nothing_left();
}

#[test]
fn server_outage_beyond_lease_ends_command() {
    let fixture = Fixture::new();
    let (job, pid) =
        fixture.run_until_started(&["--ttl", "3s", "--timeout", "500ms"], RUN_UNTIL_KILLED);
    fixture.server.stop();
    expect_ended(&fixture, job, "could not be renewed in time");
    assert!(!is_alive(pid));
    fixture.server.cont();
    eventually("the lock expires", TEST_TIMEOUT, || fixture.holder().is_none());
    fixture.expect_nothing_left();
}

/// The reason is known long before the command is ended.
#[test]
fn outage_is_reported_at_its_begin_unless_quiet() {
    for (options, is_quiet) in [(&[][..], false), (&["-q"], true)] {
        let fixture = Fixture::new();
        let options = [&["--ttl", "9s", "--timeout", "500ms"], options].concat();
        let (mut job, pid) = fixture.run_until_started(&options, RUN_UNTIL_KILLED);
        fixture.server.kill();
        if !is_quiet {
            let says = "distlock: cannot renew lock \"x\" (";
            eventually("it is reported", TEST_TIMEOUT, || job.err().starts_with(says));
            assert!(is_alive(pid) && job.err().contains("refused"), "{}", job.err());
        }
        assert_eq!(job.code(), 76);
        assert_eq!(job.err().contains("cannot renew"), !is_quiet, "{}", job.err());
        assert!(job.err().contains("could not be renewed in time"), "{}", job.err());
    }
}

#[test]
fn killed_server_ends_command() {
    let fixture = Fixture::new();
    let (job, _) =
        fixture.run_until_started(&["--ttl", "3s", "--timeout", "500ms"], RUN_UNTIL_KILLED);
    fixture.server.kill();
    expect_ended(&fixture, job, "could not be renewed in time");
}

#[test]
fn short_server_restart_does_not_disturb_command() {
    let fixture = Fixture::durable();
    let (mut job, _) =
        fixture.run_until_started(&["--ttl", LONG_TTL], "echo $$ >$DIR/pid; read -r line; exit 3");
    fixture.server.restart();
    job.end_input();
    assert_eq!(job.code(), 3, "{}", job.err());
    fixture.expect_nothing_left();
}

/// The server is unreachable for the wrapper only. So the lock can neither be renewed nor released,
/// and expires.
///
/// Fault: N71
#[test]
fn unrenewed_command_is_dead_before_lock_is_free() {
    let (fixture, proxy) = behind_a_proxy();
    let (job, pid) = fixture.run_until_started(
        &["--ttl", "10s", "--grace", "10m", "--timeout", "500ms"],
        IGNORE_SIGNALS,
    );
    let other = fixture.read_number("other");
    proxy.blackhole();
    let guard = fixture.manager().lock("x").unwrap();
    assert!(!is_alive(pid) && !is_alive(other), "two at once");
    expect_ended(&fixture, job, "could not be renewed in time: ");
    assert!(guard.is_held());
}

/// Fault: N71
#[test]
fn late_renewal_does_not_end_command() {
    let (fixture, proxy) = behind_a_proxy();
    let lost = proxy.on_request(is_renewal(KEY), Fault::HoldRequest);
    let script = "echo $$ >$DIR/pid; read -r line; exit 3";
    let (mut job, _) = fixture.run_until_started(&["--ttl", "18s", "--timeout", "1s"], script);
    lost.wait_fired();
    let again = "distlock: renewed lock \"x\" again\n";
    eventually("the late renewal is reported", TEST_TIMEOUT, || job.err().ends_with(again));
    job.end_input();
    assert_eq!(job.code(), 3);
    let err = job.err();
    let outage = err.strip_suffix(again).unwrap();
    assert!(outage.starts_with("distlock: cannot renew lock \"x\" ("), "{err}");
    assert!(outage.contains("); the command is ended in "), "{err}");
    assert!(outage.ends_with("s unless a renewal succeeds\n"), "{err}");
    assert_eq!(outage.lines().count(), 1, "{err}");
    fixture.expect_nothing_left();
}

/// The exit code is about the lock, whatever the command does on SIGTERM.
#[test]
fn lost_lock_outweighs_successful_command() {
    let fixture = Fixture::new();
    let script = "trap 'echo >$DIR/asked; exit 0' TERM; echo $$ >$DIR/pid; while :; do sleep 600 & \
                  wait $!; done";
    let (job, _) = fixture.run_until_started(&["--ttl", "9s", "--grace", "10m"], script);
    fixture.server.cli(&["DEL", KEY]);
    expect_lost(&fixture, job, "it no longer exists on the server");
    assert_eq!(fixture.read("asked"), "\n");
}

#[test]
fn command_ignoring_sigterm_is_killed_after_grace() {
    let fixture = Fixture::new();
    let (job, pid) =
        fixture.run_until_started(&["--ttl", "9s", "--grace", "500ms"], IGNORE_SIGNALS);
    let other = fixture.read_number("other");
    fixture.server.cli(&["DEL", KEY]);
    expect_lost(&fixture, job, "it no longer exists on the server");
    assert!(!is_alive(pid) && !is_alive(other));
    fixture.expect_nothing_left();
}

#[test]
fn stopped_command_is_ended_on_loss() {
    let fixture = Fixture::new();
    let (job, pid) =
        fixture.run_until_started(&["--ttl", "9s", "--grace", "10m"], RUN_UNTIL_KILLED);
    signal(pid, Signal::STOP);
    await_state(pid, 'T');
    fixture.server.cli(&["DEL", KEY]);
    expect_lost(&fixture, job, "it no longer exists on the server");
}

/// The wrapper may be stopped between acquiring the lock and starting the command. Here that
/// happens because standard error is not read. A command that did start would soon be killed, so
/// the test also checks that it left no trace.
///
/// Fault: N67
#[test]
fn command_never_starts_if_lock_is_lost_before() {
    let (fixture, proxy) = behind_a_proxy();
    let unrenewed = proxy.on_request(is_renewal(KEY), Fault::HoldRequest).forever();
    let run = fixture.command(&["--verbose", "--ttl", "50ms"], &["sh", "-c", "echo >$DIR/ran"]);
    let mut messages = String::new();
    // If this test itself does not run in time, the last message is dropped.
    eventually("the messages can be read", TEST_TIMEOUT, || {
        let (mut unread, err) = full();
        let renewals = unrenewed.fired();
        let mut job = fixture.start_with_stderr(with_ignored_signal("TERM", &run), err);
        let pid = job.pid();
        let has_expired =
            || !is_alive(pid) || unrenewed.fired() > renewals && fixture.holder().is_none();
        eventually("the lock expires", TEST_TIMEOUT, has_expired);
        messages.clear();
        unread.read_to_string(&mut messages).unwrap();
        assert_eq!((job.code(), fixture.path("ran").exists()), (76, false));
        messages.contains("acquired lock")
    });
    assert!(
        messages.contains("lock \"x\" was lost before the command could start"),
        "{}",
        messages.trim_start_matches('-')
    );
    fixture.expect_nothing_left();
}

/// The command is too short for a renewal.
#[test]
fn loss_found_at_release_is_reported() {
    let fixture = Fixture::new();
    let mut job = fixture.run(&["--ttl", LONG_TTL], "echo >$DIR/pid; read -r line; exit 3");
    fixture.read_line("pid");
    fixture.server.cli(&["SET", KEY, "a stranger\u{1b}[31m"]);
    job.end_input();
    assert_eq!(job.code(), 76);
    let err = job.err();
    assert!(err.contains("was lost while the command ran") && err.contains("stranger"), "{err}");
    assert!(!err.contains('\u{1b}'), "{err:?}");
    assert_eq!(fixture.holder().as_deref(), Some("a stranger\u{1b}[31m"));
}

#[test]
fn stopped_command_keeps_lock() {
    let fixture = Fixture::new();
    let (mut job, pid) =
        fixture.run_until_started(&["--ttl", "9s"], "echo $$ >$DIR/pid; exec sleep 600");
    signal(pid, Signal::STOP);
    await_state(pid, 'T');
    fixture.await_renewals(4);
    assert!(
        RedisMgr::new(config_long_timeouts(fixture.server.url())).unwrap().is_locked("x").unwrap()
    );
    // A stopped process receives SIGTERM only after SIGCONT, so the wrapper sends that too.
    job.signal(Signal::TERM);
    assert_eq!(job.code(), 128 + Signal::TERM.as_raw());
    fixture.expect_nothing_left();
}
