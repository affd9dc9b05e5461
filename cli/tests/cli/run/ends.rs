//! The command ends, in whatever way, or never begins.

use std::{
    io::{Read, Write as _},
    os::unix::fs::PermissionsExt as _,
    process::{Command, Stdio},
    sync::mpsc,
    thread,
};

use rustix::process::Signal;

use super::{
    Job, Scene,
    scene::{LONG, STUBBORN, heard, is_alive, through},
};
use crate::{
    kit::fence_key,
    support::{CEILING, can_be_had},
};

#[test]
fn its_code_is_passed_on() {
    let scene = Scene::new();
    for (script, code) in [("true", 0), ("exit 1", 1), ("exit 7", 7), ("exit 64", 64), ("exit 255", 255)] {
        let mut job = scene.run(&[], script);
        assert_eq!(job.code(), code, "{script}: {}", job.err());
        assert_eq!((job.out(), job.err()), (String::new(), String::new()), "{script}");
        scene.expect_nothing_left();
    }
}

#[test]
fn a_signal_that_killed_it_is_told_as_its_number() {
    let scene = Scene::new();
    for signal in [Signal::KILL, Signal::TERM, Signal::SEGV, Signal::USR1, Signal::ALARM] {
        let script = format!("ulimit -c 0; kill -{} $$", signal.as_raw());
        assert_eq!(scene.run(&[], &script).code(), 128 + signal.as_raw(), "{signal:?}");
        scene.expect_nothing_left();
    }
}

#[test]
fn a_command_that_is_not_there_or_not_to_be_run_has_a_code_of_its_own() {
    let scene = Scene::new();
    let plain = scene.path("plain");
    std::fs::write(&plain, "#!/bin/sh\n").unwrap();
    std::fs::set_permissions(&plain, std::fs::Permissions::from_mode(0o644)).unwrap();
    let orphan = scene.path("orphan");
    std::fs::write(&orphan, "#!/no/such/interpreter\n").unwrap();
    std::fs::set_permissions(&orphan, std::fs::Permissions::from_mode(0o755)).unwrap();
    for (program, code, words) in [
        (orphan.to_str().unwrap(), 126, "its interpreter is missing"),
        ("orphan", 126, "its interpreter is missing"),
        ("no-such-command", 127, "there is no such command"),
        ("/no/such/command", 127, "there is no such command"),
        (plain.to_str().unwrap(), 126, "may not be executed"),
        ("/", 126, "may not be executed"),
    ] {
        let mut command = scene.command(&[], &[program]);
        command.env("PATH", orphan.parent().unwrap());
        let mut job = scene.start(command);
        assert_eq!(job.code(), code, "{program}");
        assert!(job.err().starts_with("distlock: cannot run ") && job.err().contains(words), "{}", job.err());
        scene.expect_nothing_left();
    }
}

/// As in a sandbox with few devices.
const NO_DEV_FD: [&str; 8] = [
    "unshare",
    "--user",
    "--map-root-user",
    "--mount",
    "sh",
    "-c",
    "mkdir $DIR/dev && mount -t tmpfs dev $DIR/dev && touch $DIR/dev/null && mount --bind /dev/null $DIR/dev/null && \
     mount --rbind $DIR/dev /dev && exec \"$@\"",
    "sh",
];

#[test]
fn a_command_begins_where_dev_has_no_descriptors() {
    let scene = Scene::new();
    let tried = through(&NO_DEV_FD, &Command::new("true")).envs(scene.environment()).output();
    if !can_be_had("a command without /dev/fd", "no devices of its own", tried) {
        return;
    }
    std::fs::remove_dir(scene.path("dev")).unwrap();
    let mut job = scene.start(through(&NO_DEV_FD, &scene.command(&[], &["sh", "-c", "test ! -e /dev/fd && exit 3"])));
    assert_eq!(job.code(), 3, "{}", job.err());
    scene.expect_nothing_left();
}

/// All that comes out of a stream, once it has ended.
fn all_of(mut stream: impl Read + Send + 'static) -> mpsc::Receiver<String> {
    let (tell, told) = mpsc::channel();
    thread::spawn(move || {
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("no text");
        let _ = tell.send(text);
    });
    told
}

#[test]
fn its_streams_are_those_of_the_wrapper() {
    let scene = Scene::new();
    let mut command = scene.command(&[], &["sh", "-c", "cat; echo wrong >&2; exit 3"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut job = Job::start(command);
    let (out, err) = (all_of(job.child.stdout.take().unwrap()), all_of(job.child.stderr.take().unwrap()));
    // More than any buffer holds, so that all must be there at once.
    let text = "a line of text\n".repeat(100_000);
    let mut input = job.child.stdin.take().unwrap();
    let sent = text.clone();
    let writer = thread::spawn(move || input.write_all(sent.as_bytes()).unwrap());
    assert_eq!(job.code(), 3);
    writer.join().unwrap();
    let [out, err] = [out, err].map(|stream| stream.recv_timeout(CEILING).expect("it does not end"));
    assert!(out == text, "{} bytes of {}", out.len(), text.len());
    assert_eq!(err, "wrong\n");
    scene.expect_nothing_left();
}

/// Who reads from a pipe sees its end only when nobody holds the other side any more.
#[test]
fn a_pipe_ends_with_the_command() {
    let scene = Scene::new();
    let mut command = scene.command(&[], &["sh", "-c", "exec >&- 2>&-; echo $$ >$DIR/pid; read -r line"]);
    let (reader, writer) = std::io::pipe().unwrap();
    command.stdin(Stdio::piped()).stdout(writer).stderr(Stdio::null());
    let mut job = Job::start(command);
    let text = all_of(reader);
    scene.line("pid");
    job.end_input();
    assert_eq!(text.recv_timeout(CEILING).expect("it does not end"), "");
    assert_eq!(job.code(), 1);
    scene.expect_nothing_left();
}

#[test]
fn it_finds_its_lock_in_its_environment() {
    let scene = Scene::new();
    let script = r#"echo "$DISTLOCK_NAME $DISTLOCK_ID $DISTLOCK_TOKEN $OTHER" >$DIR/env; read -r line; exit 3"#;
    let mut command = scene.command(&[], &["sh", "-c", script]);
    command.env("OTHER", "passed on").stdin(Stdio::piped());
    let mut job = scene.start(command);
    let line = scene.line("env");
    let mut words = line.split(' ');
    assert_eq!(words.next(), Some("x"));
    assert_eq!(words.next().map(str::to_owned), scene.holder());
    let token: u64 = scene.server.query(&["GET", &fence_key("x")]);
    assert_eq!(words.next(), Some(token.to_string().as_str()));
    assert_eq!(words.collect::<Vec<_>>(), ["passed", "on"]);
    job.end_input();
    assert_eq!(job.code(), 3);
    scene.expect_nothing_left();
}

/// Nothing that the wrapper needs for itself is left on: signals, descriptors.
#[test]
fn it_begins_as_it_would_without_a_wrapper() {
    let scene = Scene::new();
    let script = "grep -E 'Sig(Blk|Ign|Cgt)' /proc/self/status; ls /proc/self/fd; umask; pwd";
    let mut job = scene.run(&[], script);
    assert_eq!(job.code(), 0, "{}", job.err());
    let mut bare = std::process::Command::new("sh");
    let bare = bare.args(["-c", script]).stdin(Stdio::piped()).output().unwrap();
    assert_eq!(job.out(), String::from_utf8_lossy(&bare.stdout));
    scene.expect_nothing_left();
}

#[test]
fn what_it_leaves_behind_is_ended_before_the_lock_is_free() {
    let scene = Scene::new();
    // It says, when it is asked to end, whether there is a lock; and only then ends.
    let left = "trap 'cp $DIR/held $DIR/at_end; exit' TERM; echo >$DIR/ready; while :; do sleep 600 & wait $!; done";
    let script = format!("({left}) & while ! test -e $DIR/ready; do sleep 0.01; done; echo held >$DIR/held; exit 5");
    let mut job = scene.run(&["--ttl", LONG], &script);
    assert_eq!(job.code(), 5, "{}", job.err());
    assert_eq!(scene.read("at_end"), "held\n");
    scene.expect_nothing_left();
}

#[test]
fn what_it_leaves_behind_and_does_not_listen_is_killed() {
    let scene = Scene::new();
    let script = format!("({STUBBORN}) & while ! test -s $DIR/pid; do sleep 0.01; done; exit 6");
    let mut job = scene.run(&["--grace", "300ms"], &script);
    assert_eq!(job.code(), 6, "{}", job.err());
    assert!(!is_alive(scene.number("other")));
    scene.expect_nothing_left();
}

#[test]
fn dead_orphans_do_not_pile_up() {
    let scene = Scene::new();
    // Twenty orphans that end, and then nothing of them may be left.
    let script = "for n in 1 2 3 4 5 6 7 8 9 10; do (sleep 0.01 &); done; echo $$ >$DIR/pid; read -r line; exit 3";
    let (mut job, pid) = scene.running(&["--ttl", LONG], script);
    let children = || {
        let task = format!("/proc/{0}/task/{0}/children", job.pid());
        std::fs::read_to_string(task).unwrap_or_default().split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    crate::support::eventually("only the command and the guardian are left", CEILING, || {
        let children = children();
        children.len() <= 2 && children.contains(&pid.to_string())
    });
    job.end_input();
    assert_eq!(job.code(), 3);
    scene.expect_nothing_left();
}

#[test]
fn it_may_run_for_so_long_and_no_longer() {
    let scene = Scene::new();
    let (mut job, pid) = scene.running(&["--max-hold", "5s", "--grace", "10m"], "echo $$ >$DIR/pid; exec sleep 600");
    assert_eq!(job.code(), 124);
    assert!(job.err().contains("longer than --max-hold"), "{}", job.err());
    assert!(!is_alive(pid));
    scene.expect_nothing_left();
    // What it says when it is asked to end does not count, and neither does that it does not listen.
    let mut job = scene.run(&["--max-hold", "500ms"], "trap 'exit 3' TERM; while :; do sleep 600 & wait $!; done");
    assert_eq!(job.code(), 124);
    scene.expect_nothing_left();
    let mut job = scene.run(&["--max-hold", "500ms", "--grace", "200ms"], STUBBORN);
    assert_eq!(job.code(), 124);
    scene.expect_nothing_left();
    let mut job = scene.run(&["--max-hold", "10m"], "exit 3");
    assert_eq!(job.code(), 3);
}

#[test]
fn it_says_what_happens_when_it_is_asked_to() {
    let scene = Scene::new();
    let mut job = scene.run(&["--verbose"], "true");
    assert_eq!(job.code(), 0);
    let (err, token) = (job.err(), scene.server.query::<u64>(&["GET", &fence_key("x")]));
    let lines: Vec<_> = err.lines().collect();
    assert!(lines[0].starts_with(&format!("distlock: has lock \"x\" with token {token} after ")), "{err}");
    assert_eq!(lines[1..], ["distlock: has released lock \"x\""]);
}

#[test]
fn nobody_who_reads_errors_is_no_reason_to_stop() {
    let scene = Scene::new();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut job = scene.start_saying(scene.command(&["--verbose"], &["sh", "-c", "exit 3"]), writer);
    assert_eq!(job.code(), 3);
    scene.expect_nothing_left();
}

#[test]
fn a_server_that_is_away_when_it_ends_changes_nothing() {
    let scene = Scene::new();
    let mut command =
        scene.command(&["--timeout", "1s", "--ttl", LONG], &["sh", "-c", "echo >$DIR/pid; read -r l; exit 3"]);
    command.stdin(Stdio::piped());
    let mut job = scene.start(command);
    scene.line("pid");
    scene.server.stop();
    job.end_input();
    assert_eq!(job.code(), 3, "{}", job.err());
    assert!(job.err().contains("could not be released"), "{}", job.err());
    assert_eq!(scene.processes(), []);
    scene.server.cont();
}

#[test]
fn signals_that_nobody_ignores_are_heard_here() {
    // Otherwise the tests of signals would say less than they seem to.
    assert!(!heard(&[Signal::TERM]).is_empty());
}
