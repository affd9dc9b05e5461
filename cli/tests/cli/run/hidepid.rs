//! A system that hides the processes of other users: `hidepid`, or `ProtectProc` of a unit.

use std::process::{Command, Stdio};

use rustix::process::Signal;

use super::{
    Fixture,
    fixture::{LONG_TTL, RunProcess, is_alive, signal, started_by},
};
use crate::support::{TEST_TIMEOUT, eventually, process_state, trial_succeeded};

/// There, the program may neither see nor signal what others run, as if it were not root.
const HIDEPID_NAMESPACE: [&str; 8] = [
    "unshare",
    "--mount",
    "sh",
    "-c",
    "mount -t proc -o hidepid=2,gid=65534 proc /proc && exec \"$@\"",
    "sh",
    "setpriv",
    "--bounding-set=-sys_ptrace,-kill",
];

/// Becomes another user, as `sudo` does it.
const OTHER_USERS_SLEEP: &str = "setpriv --reuid 65534 --clear-groups sleep 600";

/// After this many context switches, the process has polled its group.
const POLLS: u64 = 100;

fn can_hide_processes(test: &str) -> bool {
    let becomes = ["setpriv", "--reuid", "65534", "--clear-groups", "true"];
    let tried =
        Command::new(HIDEPID_NAMESPACE[0]).args(&HIDEPID_NAMESPACE[1..]).args(becomes).output();
    trial_succeeded(test, "no hidden processes", tried)
}

/// Runs a script under the lock. Returns once the process it names belongs to another user.
fn run_hidden(fixture: &Fixture, script: &str) -> (RunProcess, u32) {
    let run = fixture.command(&["--ttl", LONG_TTL, "--grace", "10m"], &["sh", "-c", script]);
    let mut command = started_by(&HIDEPID_NAMESPACE, &run);
    command.stdin(Stdio::piped());
    let job = fixture.start(command);
    let pid = fixture.read_number("pid");
    let words = || std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    eventually("a process of another user runs", TEST_TIMEOUT, || words().starts_with(b"sleep\0"));
    (job, pid)
}

/// Waits until a process has polled its group many times, or has ended.
fn await_polls(pid: u32) {
    let sleeps = || -> Option<u64> {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        status
            .lines()
            .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?
            .trim()
            .parse()
            .ok()
    };
    let before = sleeps().unwrap_or_default();
    eventually("the group has been polled", TEST_TIMEOUT, || {
        matches!(process_state(pid), None | Some('Z'))
            || sleeps().is_some_and(|now| now >= before + POLLS)
    });
}

/// Fault: N94
#[test]
fn guardian_keeps_lock_while_hidden_member_runs() {
    if !can_hide_processes("run::hidepid::guardian_keeps_lock_while_hidden_member_runs") {
        return;
    }
    // The second script also leaves a dead process of our own user in the group, which can be seen.
    for before in ["", "true & "] {
        let fixture = Fixture::new();
        let (mut job, pid) =
            run_hidden(&fixture, &format!("{before}echo $$ >$DIR/pid; exec {OTHER_USERS_SLEEP}"));
        let guardian = fixture.guardian();
        job.signal(Signal::KILL);
        job.status();
        await_polls(guardian);
        assert!(
            is_alive(pid) && fixture.holder().is_some(),
            "the lock was released before the command had ended"
        );
        signal(pid, Signal::KILL);
        eventually("the lock is released", TEST_TIMEOUT, || fixture.holder().is_none());
    }
}

/// Fault: N94
#[test]
fn wrapper_keeps_lock_while_hidden_member_runs() {
    if !can_hide_processes("run::hidepid::wrapper_keeps_lock_while_hidden_member_runs") {
        return;
    }
    let fixture = Fixture::new();
    let (mut job, pid) = run_hidden(
        &fixture,
        &format!("{OTHER_USERS_SLEEP} & echo $! >$DIR/pid; read -r line; exit 3"),
    );
    job.end_input();
    await_polls(job.pid());
    assert!(
        is_alive(pid) && fixture.holder().is_some(),
        "the lock was released before the command had ended"
    );
    signal(pid, Signal::KILL);
    assert_eq!(job.code(), 3, "{}", job.err());
    fixture.expect_nothing_left();
}

/// Fault: N271
#[test]
fn wrapper_reports_that_it_cannot_end_another_users_command() {
    let test = "run::hidepid::wrapper_reports_that_it_cannot_end_another_users_command";
    if !can_hide_processes(test) {
        return;
    }
    // In the second script, only a part of the command runs as another user.
    for (exec, end) in [("exec ", ""), ("", "; exit")] {
        let fixture = Fixture::new();
        let (mut job, pid) = run_hidden(
            &fixture,
            &format!("{exec}sh -c 'echo $$ >$DIR/pid; exec {OTHER_USERS_SLEEP}'{end}"),
        );
        job.signal(Signal::TERM);
        eventually("it is reported", TEST_TIMEOUT, || job.err().contains("cannot end the command"));
        signal(pid, Signal::KILL);
        job.status();
        assert_eq!(job.err().matches("cannot end the command").count(), 1, "{}", job.err());
        fixture.expect_nothing_left();
    }
}

/// Fault: N271
#[test]
fn guardian_reports_that_it_cannot_end_another_users_command() {
    let test = "run::hidepid::guardian_reports_that_it_cannot_end_another_users_command";
    if !can_hide_processes(test) {
        return;
    }
    let fixture = Fixture::new();
    let (job, pid) = run_hidden(&fixture, &format!("echo $$ >$DIR/pid; exec {OTHER_USERS_SLEEP}"));
    job.signal(Signal::KILL);
    let says = "waiting for the command, which runs as another user and so cannot be ended, ";
    eventually("it is reported", TEST_TIMEOUT, || job.err().contains(says));
    signal(pid, Signal::KILL);
    eventually("the lock is released", TEST_TIMEOUT, || fixture.holder().is_none());
}
