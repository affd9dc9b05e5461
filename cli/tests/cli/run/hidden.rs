//! A system that hides the processes of other users: `hidepid`, or `ProtectProc` of a unit.

use std::process::{Command, Stdio};

use rustix::process::Signal;

use super::{
    Scene,
    scene::{Job, LONG, is_alive, signal, through},
};
use crate::support::{CEILING, can_be_had, eventually, process_state};

/// There, the program may neither see nor signal what others run, as if it were not root.
const HIDING: [&str; 8] = [
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
const OTHER: &str = "setpriv --reuid 65534 --clear-groups sleep 600";

/// So many that there was a look between two of them.
const SLEEPS: u64 = 100;

fn can_hide(test: &str) -> bool {
    let becomes = ["setpriv", "--reuid", "65534", "--clear-groups", "true"];
    let tried = Command::new(HIDING[0]).args(&HIDING[1..]).args(becomes).output();
    can_be_had(test, "no processes that are hidden", tried)
}

/// Returns when the process that the script names is somebody else's.
fn running(scene: &Scene, script: &str) -> (Job, u32) {
    let run = scene.command(&["--ttl", LONG, "--grace", "10m"], &["sh", "-c", script]);
    let mut command = through(&HIDING, &run);
    command.stdin(Stdio::piped());
    let job = scene.start(command);
    let pid = scene.number("pid");
    let words = || std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    eventually("somebody else runs", CEILING, || words().starts_with(b"sleep\0"));
    (job, pid)
}

/// Waits until a process has looked at its group again and again, or has ended.
fn await_looks(pid: u32) {
    let sleeps = || -> Option<u64> {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?.trim().parse().ok()
    };
    let before = sleeps().unwrap_or_default();
    eventually("it has looked", CEILING, || {
        matches!(process_state(pid), None | Some('Z')) || sleeps().is_some_and(|now| now >= before + SLEEPS)
    });
}

#[test]
fn a_killed_wrappers_lock_is_kept_while_somebody_else_runs_in_its_group() {
    if !can_hide("run::hidden::a_killed_wrappers_lock_is_kept_while_somebody_else_runs_in_its_group") {
        return;
    }
    // The second leaves a dead process of our own there, which can be seen.
    for before in ["", "true & "] {
        let scene = Scene::new();
        let (mut job, pid) = running(&scene, &format!("{before}echo $$ >$DIR/pid; exec {OTHER}"));
        let guardian = scene.guardian();
        job.signal(Signal::KILL);
        job.status();
        await_looks(guardian);
        assert!(is_alive(pid) && scene.holder().is_some(), "the lock was given up before the command had ended");
        signal(pid, Signal::KILL);
        eventually("the lock is given up", CEILING, || scene.holder().is_none());
    }
}

#[test]
fn a_lock_is_kept_while_somebody_else_is_left_in_the_group() {
    if !can_hide("run::hidden::a_lock_is_kept_while_somebody_else_is_left_in_the_group") {
        return;
    }
    let scene = Scene::new();
    let (mut job, pid) = running(&scene, &format!("{OTHER} & echo $! >$DIR/pid; read -r line; exit 3"));
    job.end_input();
    await_looks(job.pid());
    assert!(is_alive(pid) && scene.holder().is_some(), "the lock was released before the command had ended");
    signal(pid, Signal::KILL);
    assert_eq!(job.code(), 3, "{}", job.err());
    scene.expect_nothing_left();
}
