//! The end of the command, and commands that cannot be started.

use std::{
    io::{Read, Write as _},
    os::unix::fs::PermissionsExt as _,
    process::{Command, Stdio},
    sync::mpsc,
    thread,
};

use rustix::process::Signal;

use super::{
    Fixture, RunProcess,
    fixture::{IGNORE_SIGNALS, LONG_TTL, is_alive, not_ignored, started_by},
};
use crate::{
    helpers::{FENCE, token_key},
    support::{TEST_TIMEOUT, trial_succeeded},
};

#[test]
fn exit_code_is_that_of_command() {
    let fixture = Fixture::new();
    for (script, code) in
        [("true", 0), ("exit 1", 1), ("exit 7", 7), ("exit 64", 64), ("exit 255", 255)]
    {
        let mut job = fixture.run(&[], script);
        assert_eq!(job.code(), code, "{script}: {}", job.err());
        assert_eq!((job.out(), job.err()), (String::new(), String::new()), "{script}");
        fixture.expect_nothing_left();
    }
}

#[test]
fn killed_command_exits_with_128_plus_signal() {
    let fixture = Fixture::new();
    for signal in [Signal::KILL, Signal::TERM, Signal::SEGV, Signal::USR1, Signal::ALARM] {
        let script = format!("ulimit -c 0; kill -{} $$", signal.as_raw());
        assert_eq!(fixture.run(&[], &script).code(), 128 + signal.as_raw(), "{signal:?}");
        fixture.expect_nothing_left();
    }
}

#[test]
fn missing_or_unrunnable_command_exits_with_127_or_126() {
    let fixture = Fixture::new();
    let plain = fixture.path("plain");
    std::fs::write(&plain, "#!/bin/sh\n").unwrap();
    std::fs::set_permissions(&plain, std::fs::Permissions::from_mode(0o644)).unwrap();
    let orphan = fixture.path("orphan");
    std::fs::write(&orphan, "#!/no/such/interpreter\n").unwrap();
    std::fs::set_permissions(&orphan, std::fs::Permissions::from_mode(0o755)).unwrap();
    for (program, code, part) in [
        (orphan.to_str().unwrap(), 126, "its interpreter is missing"),
        ("orphan", 126, "its interpreter is missing"),
        ("no-such-command", 127, "command not found"),
        ("/no/such/command", 127, "command not found"),
        ("", 127, "its name is empty"),
        (plain.to_str().unwrap(), 126, "permission denied"),
        ("/", 126, "permission denied"),
    ] {
        let mut command = fixture.command(&[], &[program]);
        command.env("PATH", orphan.parent().unwrap());
        let mut job = fixture.start(command);
        assert_eq!(job.code(), code, "{program}");
        assert!(
            job.err().starts_with("distlock: cannot run ") && job.err().contains(part),
            "{}",
            job.err()
        );
        fixture.expect_nothing_left();
    }
}

/// Runs a command with a minimal `/dev`, as a sandbox does.
const NO_DEV_FD: [&str; 8] = [
    "unshare",
    "--user",
    "--map-root-user",
    "--mount",
    "sh",
    "-c",
    "mkdir $DIR/dev && mount -t tmpfs dev $DIR/dev && touch $DIR/dev/null && mount --bind \
     /dev/null $DIR/dev/null && \
     mount --rbind $DIR/dev /dev && exec \"$@\"",
    "sh",
];

/// Fault: N106
#[test]
fn command_starts_without_dev_fd() {
    let fixture = Fixture::new();
    let tried = started_by(&NO_DEV_FD, &Command::new("true")).envs(fixture.environment()).output();
    if !trial_succeeded("a command without /dev/fd", "no private /dev", tried) {
        return;
    }
    std::fs::remove_dir(fixture.path("dev")).unwrap();
    let mut job = fixture.start(started_by(
        &NO_DEV_FD,
        &fixture.command(&[], &["sh", "-c", "test ! -e /dev/fd && exit 3"]),
    ));
    assert_eq!(job.code(), 3, "{}", job.err());
    fixture.expect_nothing_left();
}

/// Receives all of a stream's text when the stream has ended.
fn read_to_end(mut stream: impl Read + Send + 'static) -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("no text");
        let _ = sender.send(text);
    });
    receiver
}

#[test]
fn command_inherits_standard_streams() {
    let fixture = Fixture::new();
    let mut command = fixture.command(&[], &["sh", "-c", "cat; echo wrong >&2; exit 3"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut job = RunProcess::start(command);
    let (out, err) = (
        read_to_end(job.child.stdout.take().unwrap()),
        read_to_end(job.child.stderr.take().unwrap()),
    );
    // More than any buffer holds, so that the command and the test must run at the same time.
    let text = "a line of text\n".repeat(100_000);
    let mut input = job.child.stdin.take().unwrap();
    let sent = text.clone();
    let writer = thread::spawn(move || input.write_all(sent.as_bytes()).unwrap());
    assert_eq!(job.code(), 3);
    writer.join().unwrap();
    let [out, err] =
        [out, err].map(|stream| stream.recv_timeout(TEST_TIMEOUT).expect("it does not end"));
    assert!(out == text, "{} bytes of {}", out.len(), text.len());
    assert_eq!(err, "wrong\n");
    fixture.expect_nothing_left();
}

/// A reader sees the end of a pipe only when every process has closed the writing end.
#[test]
fn output_pipe_closes_with_command() {
    let fixture = Fixture::new();
    let mut command =
        fixture.command(&[], &["sh", "-c", "exec >&- 2>&-; echo $$ >$DIR/pid; read -r line"]);
    let (reader, writer) = std::io::pipe().unwrap();
    command.stdin(Stdio::piped()).stdout(writer).stderr(Stdio::null());
    let mut job = RunProcess::start(command);
    let text = read_to_end(reader);
    fixture.read_line("pid");
    job.end_input();
    assert_eq!(text.recv_timeout(TEST_TIMEOUT).expect("it does not end"), "");
    assert_eq!(job.code(), 1);
    fixture.expect_nothing_left();
}

#[test]
fn command_finds_lock_in_environment() {
    let fixture = Fixture::new();
    let script = r#"echo "$DISTLOCK_NAME $DISTLOCK_ID $DISTLOCK_TOKEN $OTHER" >$DIR/env
        read -r line; exit 3"#;
    let mut command = fixture.command(&[], &["sh", "-c", script]);
    command.env("OTHER", "passed on").stdin(Stdio::piped());
    let mut job = fixture.start(command);
    let line = fixture.read_line("env");
    let mut words = line.split(' ');
    assert_eq!(words.next(), Some("x"));
    assert_eq!(words.next().map(str::to_owned), fixture.holder());
    let token: u64 = fixture.server.query(&["GET", &token_key("x")]);
    assert_eq!(words.next(), Some(token.to_string().as_str()));
    assert_eq!(words.collect::<Vec<_>>(), ["passed", "on"]);
    job.end_input();
    assert_eq!(job.code(), 3);
    fixture.expect_nothing_left();
}

/// The command inherits nothing of what the wrapper needs for itself: no signal mask, no handlers,
/// no descriptors.
#[test]
fn command_starts_with_unchanged_process_state() {
    let fixture = Fixture::new();
    let script = "grep -E 'Sig(Blk|Ign|Cgt)' /proc/self/status; ls /proc/self/fd; umask; pwd";
    let mut job = fixture.run(&[], script);
    assert_eq!(job.code(), 0, "{}", job.err());
    let mut bare = std::process::Command::new("sh");
    let bare = bare.args(["-c", script]).stdin(Stdio::piped()).output().unwrap();
    assert_eq!(job.out(), String::from_utf8_lossy(&bare.stdout));
    fixture.expect_nothing_left();
}

#[test]
fn stragglers_end_before_release() {
    let fixture = Fixture::new();
    // On SIGTERM the straggler copies a file, which shows when it ended; and only then ends.
    let straggler = "trap 'cp $DIR/held $DIR/at_end; exit' TERM; echo >$DIR/ready; while :; do \
                     sleep 600 & wait $!; done";
    let script = format!(
        "({straggler}) & while ! test -e $DIR/ready; do sleep 0.01; done; echo held >$DIR/held; \
         exit 5"
    );
    let mut job = fixture.run(&["--ttl", LONG_TTL], &script);
    assert_eq!(job.code(), 5, "{}", job.err());
    assert_eq!(fixture.read("at_end"), "held\n");
    let says = "distlock: the command has ended but left 2 processes (pid ";
    // The shell of the straggler may write something too.
    let err = job.err();
    let is_report = |line: &str| line.starts_with(says) && line.ends_with("); ending them");
    assert!(err.lines().any(is_report), "{err}");
    fixture.expect_nothing_left();
}

#[test]
fn process_left_behind_is_named_unless_quiet() {
    let fixture = Fixture::new();
    let script = "sleep 600 & echo $! >$DIR/pid; exit 5";
    for (options, is_quiet) in [(&[][..], false), (&["-q"], true)] {
        let (mut job, pid) = fixture.run_until_started(options, script);
        assert_eq!(job.code(), 5, "{}", job.err());
        let says =
            format!("distlock: the command has ended but left 1 process (pid {pid}); ending it\n");
        assert_eq!(job.err(), if is_quiet { String::new() } else { says });
        fixture.expect_nothing_left();
        std::fs::remove_file(fixture.path("pid")).unwrap();
    }
}

/// The signal has reached the others too: they just end a little later.
#[test]
fn processes_that_end_by_the_same_signal_are_not_reported() {
    let fixture = Fixture::new();
    // The other one ends a moment after the command has been reaped.
    let other = "trap 'trap \"\" TERM; while kill -0 $command 2>/dev/null; do :; done; sleep 0.1; \
                 exit' TERM; echo >$DIR/ready; while :; do sleep 0.01; done";
    let script = format!(
        "command=$$; ({other}) & until test -e $DIR/ready; do sleep 0.01; done; echo $$ >$DIR/pid; \
         exec sleep 600"
    );
    let (mut job, _) = fixture.run_until_started(&[], &script);
    job.signal(Signal::TERM);
    assert_eq!(job.code(), 143);
    assert!(!job.err().contains("the command has ended but left"), "{}", job.err());
    fixture.expect_nothing_left();
}

#[test]
fn stragglers_that_ignore_signals_are_killed() {
    let fixture = Fixture::new();
    let script =
        format!("({IGNORE_SIGNALS}) & while ! test -s $DIR/pid; do sleep 0.01; done; exit 6");
    let mut job = fixture.run(&["--grace", "300ms"], &script);
    assert_eq!(job.code(), 6, "{}", job.err());
    assert!(!is_alive(fixture.read_number("other")));
    fixture.expect_nothing_left();
}

#[test]
fn orphans_are_reaped() {
    let fixture = Fixture::new();
    // Ten orphans that end soon, and are then reaped.
    let script = "for n in 1 2 3 4 5 6 7 8 9 10; do (sleep 0.01 &); done; echo $$ >$DIR/pid; read \
                  -r line; exit 3";
    let (mut job, pid) = fixture.run_until_started(&["--ttl", LONG_TTL], script);
    let children = || {
        let task = format!("/proc/{0}/task/{0}/children", job.pid());
        std::fs::read_to_string(task)
            .unwrap_or_default()
            .split_whitespace()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    crate::support::eventually("only the command and the guardian are left", TEST_TIMEOUT, || {
        let children = children();
        children.len() <= 2 && children.contains(&pid.to_string())
    });
    job.end_input();
    assert_eq!(job.code(), 3);
    fixture.expect_nothing_left();
}

#[test]
fn command_over_max_hold_is_terminated() {
    let fixture = Fixture::new();
    let (mut job, pid) = fixture.run_until_started(
        &["--max-hold", "5s", "--grace", "10m"],
        "echo $$ >$DIR/pid; exec sleep 600",
    );
    assert_eq!(job.code(), 124);
    assert!(job.err().contains("longer than --max-hold"), "{}", job.err());
    assert!(!is_alive(pid));
    fixture.expect_nothing_left();
    // Neither the command's exit code on SIGTERM nor the need for SIGKILL changes that.
    let mut job = fixture
        .run(&["--max-hold", "500ms"], "trap 'exit 3' TERM; while :; do sleep 600 & wait $!; done");
    assert_eq!(job.code(), 124);
    fixture.expect_nothing_left();
    let mut job = fixture.run(&["--max-hold", "500ms", "--grace", "200ms"], IGNORE_SIGNALS);
    assert_eq!(job.code(), 124);
    fixture.expect_nothing_left();
    let mut job = fixture.run(&["--max-hold", "10m"], "exit 3");
    assert_eq!(job.code(), 3);
}

#[test]
fn verbose_reports_acquire_and_release() {
    let fixture = Fixture::new();
    let mut job = fixture.run(&["--verbose"], "true");
    assert_eq!(job.code(), 0);
    let (err, token) = (job.err(), fixture.server.query::<u64>(&["GET", FENCE]));
    let lines: Vec<_> = err.lines().collect();
    assert!(
        lines[0].starts_with(&format!("distlock: acquired lock \"x\" with token {token} after ")),
        "{err}"
    );
    assert_eq!(lines[1..], ["distlock: released lock \"x\""]);
}

#[test]
fn closed_stderr_does_not_end_command() {
    let fixture = Fixture::new();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut job =
        fixture.start_with_stderr(fixture.command(&["--verbose"], &["sh", "-c", "exit 3"]), writer);
    assert_eq!(job.code(), 3);
    fixture.expect_nothing_left();
}

/// Fault: N208
#[test]
fn failed_release_keeps_exit_code() {
    for (options, least, most) in [(&[][..], 600, 600), (&["--at-least", "15m"], 800, 900)] {
        let fixture = Fixture::new();
        let mut command = fixture.command(
            &[&["--timeout", "1s", "--ttl", LONG_TTL], options].concat(),
            &["sh", "-c", "echo >$DIR/pid; read -r l; exit 3"],
        );
        command.stdin(Stdio::piped());
        let mut job = fixture.start(command);
        fixture.read_line("pid");
        fixture.server.stop();
        job.end_input();
        assert_eq!(job.code(), 3, "{}", job.err());
        let err = job.err();
        let addr = fixture.server.addr();
        assert!(err.starts_with(&format!("distlock: could not release lock \"x\" at {addr}: ")));
        assert!(!err.contains("its manager retries"), "{err}");
        let span = err.split_once("; it may stay held until it expires, after ");
        let span = span.and_then(|(_, rest)| rest.strip_suffix(" at the latest\n"));
        let span = humantime::parse_duration(span.unwrap_or_else(|| panic!("{err}"))).unwrap();
        assert!((least..=most).contains(&span.as_secs()), "{err}");
        assert_eq!(fixture.processes(), []);
        fixture.server.cont();
    }
}

#[test]
fn test_process_does_not_ignore_sigterm() {
    // Otherwise the tests of signals would test less than they seem to.
    assert!(!not_ignored(&[Signal::TERM]).is_empty());
}
