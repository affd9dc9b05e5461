//! Another process holds the lock.

use std::collections::BTreeSet;

use distlock::LockId;
use rustix::process::Signal;

use super::{Fixture, fixture::LONG_TTL};
use crate::{
    helpers::queue_key,
    support::{TEST_TIMEOUT, eventually},
};

#[test]
fn contended_lock_fails_or_skips_as_asked() {
    let fixture = Fixture::new();
    let guard = fixture.manager().lock("x").unwrap();
    for (options, code) in [
        (&["--no-wait"][..], 75),
        (&["--wait", "0"], 75),
        (&["--wait", "50ms"], 75),
        (&["--on-held", "fail"], 75),
        (&["--on-held", "skip"], 0),
        (&["--on-held", "skip", "--wait", "50ms"], 0),
        (&["--on-held", "fail", "--wait", "50ms"], 75),
        (&["--on-held", "wait", "--wait", "50ms"], 75),
        (&["--on-held", "skip", "--no-wait"], 0),
    ] {
        let mut job = fixture.run(options, "echo >$DIR/ran");
        assert_eq!(job.code(), code, "{options:?}: {}", job.err());
        let err = job.err();
        assert_eq!(err.starts_with("distlock: skipped: "), code == 0, "{err}");
        assert!(
            err.contains("\"x\"") && err.contains(&format!("pid {}", std::process::id())),
            "{err}"
        );
        assert_eq!(err.lines().count(), 1, "{err}");
        assert_eq!(fixture.read("ran"), "");
        assert_eq!(fixture.processes(), []);
        assert_eq!(fixture.server.query::<i64>(&["LLEN", &queue_key("x")]), 0);
    }
    assert!(guard.is_held());
}

/// Cron sends a mail for every line.
#[test]
fn quiet_prints_nothing_about_held_lock() {
    let fixture = Fixture::new();
    let guard = fixture.manager().lock("x").unwrap();
    for (options, code) in [
        (&["--quiet", "--on-held", "skip"][..], 0),
        (&["-q", "--no-wait"], 75),
        (&["-q", "-w", "0.05"], 75),
        (&["-q", "-n", "-E", "9"], 9),
    ] {
        let mut job = fixture.run(options, "echo >$DIR/ran");
        assert_eq!((job.code(), job.err()), (code, String::new()), "{options:?}");
        assert_eq!(fixture.read("ran"), "");
    }
    drop(guard);
    let mut job = fixture.run(&["-q"], "echo >$DIR/ran");
    assert_eq!((job.code(), job.err(), fixture.read("ran")), (0, "".into(), "\n".into()));
    // Failures are still reported.
    fixture.server.kill();
    let mut job = fixture.run(&["-q", "--on-held", "skip", "--timeout", "1"], "true");
    assert_eq!(job.code(), 69);
    assert!(job.err().contains("refused"), "{}", job.err());
}

/// The short options have the meanings that they have in `flock`.
#[test]
fn options_of_flock_are_understood() {
    let fixture = Fixture::new();
    let run = |words: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_distlock"));
        command.args(["run", "--timeout", "20"]).args(words).envs(fixture.environment());
        let mut job = fixture.start(command);
        (job.code(), job.out())
    };
    assert_eq!(run(&["x", "-c", "echo $DISTLOCK_NAME; exit 7"]), (7, "x\n".into()));
    assert_eq!(run(&["-w", "3", "-c", "echo a b", "x"]), (0, "a b\n".into()));
    assert_eq!(run(&["x", "-c", "true", "--", "true"]).0, 64);
    let guard = fixture.manager().lock("x").unwrap();
    for (options, code) in [(&["-n"][..], 75), (&["-n", "-E", "1"], 1), (&["-w", "0.1", "-E1"], 1)]
    {
        let words = [options, &["x", "-c", "echo ran"]].concat();
        assert_eq!(run(&words), (code, String::new()), "{options:?}");
    }
    assert_eq!(run(&["-n", "-E", "256", "x", "-c", "true"]).0, 64);
    drop(guard);
    fixture.expect_nothing_left();
}

#[test]
fn waiting_commands_queue_in_order_and_run_alone() {
    let fixture = Fixture::new();
    let guard = fixture.manager().lock("x").unwrap();
    let options = [
        &[][..],
        &["--on-held", "wait"],
        &["--wait", "10m"],
        &["--wait", "10m", "--on-held", "skip"],
    ];
    let mut jobs = Vec::new();
    for (number, options) in options.iter().enumerate() {
        // The script fails if the directory of the previous command is still there.
        let script =
            format!("mkdir $DIR/alone || exit 99; echo {number} >>$DIR/order; rmdir $DIR/alone");
        jobs.push(fixture.run(&[options, &["--ttl", LONG_TTL][..]].concat(), &script));
        fixture.await_queue_length(number + 1);
    }
    // Not the order in which they run: a process that is paused for longer than its claim window
    // loses its place.
    let queue: Vec<String> = fixture.server.query(&["LRANGE", &queue_key("x"), "0", "-1"]);
    let id = |entry: &String| entry.rsplit(' ').next().unwrap().parse::<LockId>().unwrap();
    let queued: Vec<u32> = queue.iter().map(|entry| id(entry).pid()).collect();
    assert_eq!(queued, jobs.iter().map(|job| job.pid()).collect::<Vec<_>>());
    drop(guard);
    for job in &mut jobs {
        assert_eq!(job.code(), 0, "{}", job.err());
    }
    let order = fixture.read("order");
    assert_eq!(order.lines().collect::<BTreeSet<_>>(), BTreeSet::from(["0", "1", "2", "3"]));
    fixture.expect_nothing_left();
}

#[test]
fn verbose_reports_holder_while_waiting() {
    let fixture = Fixture::new();
    let guard = fixture.manager().lock("x").unwrap();
    let mut job = fixture.run(&["--verbose"], "true");
    fixture.await_queue_length(1);
    let message = format!(
        "distlock: waiting for lock \"x\", held by {} (pid {}, ",
        guard.id().host(),
        std::process::id()
    );
    eventually("the message names the holder", TEST_TIMEOUT, || job.err().starts_with(&message));
    drop(guard);
    assert_eq!(job.code(), 0);
    fixture.expect_nothing_left();
}

#[test]
fn invalid_options_exit_with_64() {
    let fixture = Fixture::new();
    for (options, part) in [
        (&["--no-wait", "--on-held", "wait"][..], "contradict"),
        (&["--no-wait", "--wait", "1s"], "--wait"),
        (&["--ttl", "1ms"], "--ttl is 1ms, but must be 10ms to 24h"),
        (&["--ttl", "25h"], "--ttl is 25h, but must be 10ms to 24h"),
        (&["--ttl", "86401"], "--ttl is more than 24h, but must be 10ms to 24h"),
        (&["--timeout", "2m"], "--timeout is 2m, but must be 1ms to 60s"),
        (&["--quarantine", "1ms"], "--quarantine is 1ms, but must be 10ms to 24h, or 0"),
        (&["--ttl", "soon"], "30s"),
        (&["--wait", "5M"], "M is not a unit of time, minutes are m"),
        (&["--max-hold", "5M"], "M is not a unit of time, minutes are m"),
        (&["--max-hold", "0"], "--max-hold"),
        (&["--on-held", "cry"], "skip"),
        (&["--url", "redis://:secret@127.0.0.1"], "password"),
        (&["--password-file", "/no/such/file"], "/no/such/file"),
    ] {
        let mut job = fixture.run(options, "echo >$DIR/ran");
        assert_eq!(job.code(), 64, "{options:?}: {}", job.err());
        assert!(job.err().contains(part) && !job.err().contains("secret"), "{}", job.err());
        assert_eq!(fixture.read("ran"), "");
    }
    let bare = |words: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_distlock"));
        command.args(words).envs(fixture.environment());
        fixture.start(command).code()
    };
    assert_eq!(bare(&["run", "", "--", "true"]), 64);
    assert_eq!(bare(&["run", "--", "true"]), 64);
    assert_eq!(bare(&["run", "x"]), 64);
    assert_eq!(bare(&["run", "x", "--"]), 64);
    fixture.expect_nothing_left();
}

#[test]
fn unreachable_server_exits_with_69() {
    let mut fixture = Fixture::new();
    let addr = fixture.server.addr();
    fixture.server.kill();
    fixture.url = format!("redis://{addr}");
    for options in [&["--no-wait"][..], &["--wait", "200ms"], &["--ttl", "1s"]] {
        let mut job = fixture.run(options, "echo >$DIR/ran");
        assert_eq!(job.code(), 69, "{options:?}: {}", job.err());
        assert!(
            job.err().contains(&addr.to_string()) && job.err().contains("refused"),
            "{}",
            job.err()
        );
        assert_eq!((fixture.read("ran"), fixture.processes()), (String::new(), vec![]));
    }
}

/// Otherwise the command would be silent until it fails.
#[test]
fn outage_during_the_wait_is_reported_with_its_limit() {
    let fixture = Fixture::new();
    fixture.server.kill();
    for (options, limit) in
        [(&["--ttl", "2s"][..], "yet, and will try for another "), (&["-w", "1"], "ms: ")]
    {
        let mut job = fixture.run(options, "true");
        assert_eq!(job.code(), 69, "{}", job.err());
        let err = job.err();
        let lines: Vec<&str> = err.lines().collect();
        assert_eq!(lines.len(), 2, "{err}");
        assert!(
            lines[0].starts_with("distlock: could not acquire lock \"x\" at 127.0.0.1:"),
            "{err}"
        );
        assert!(lines[0].contains(limit) && lines[0].contains("refused"), "{err}");
        assert!(lines[1].contains("refused"), "{err}");
    }
    let mut quiet = fixture.run(&["--ttl", "1s", "-q"], "true");
    assert_eq!((quiet.code(), quiet.err().lines().count()), (69, 1));
}

/// Otherwise it would wait for itself without a word.
const NESTED: &str = "distlock: lock \"x\" is held by the distlock that this command runs under";

#[test]
fn command_that_waits_for_its_own_lock_is_warned() {
    for kind in [&[][..], &["--shared"]] {
        let fixture = Fixture::new();
        let script = format!("{} --timeout 20 run x -- true", env!("CARGO_BIN_EXE_distlock"));
        let mut outer = fixture.run(kind, &script);
        eventually("the inner command reports it", TEST_TIMEOUT, || outer.err().contains(NESTED));
        outer.signal(Signal::TERM);
        assert_eq!(outer.code(), 143);
        fixture.expect_nothing_left();
    }
}

/// The outer command has another lock.
#[test]
fn wait_for_readers_of_others_is_not_called_nested() {
    let fixture = Fixture::new();
    let lock = fixture.manager().rw_lock("x").unwrap();
    let _reader = lock.read().unwrap();
    let distlock = env!("CARGO_BIN_EXE_distlock");
    let script = format!("{distlock} --timeout 20 run --wait 1 x -- true");
    let outer = ["run", "--shared", "y", "--", "sh", "-c", &script];
    let mut outer = fixture.start(fixture.distlock(&outer));
    assert_eq!(outer.code(), 75, "{}", outer.err());
    assert!(!outer.err().contains(NESTED), "{}", outer.err());
}

#[test]
fn long_wait_is_reported_unless_quiet() {
    let fixture = Fixture::new();
    let guard = fixture.manager().lock("x").unwrap();
    let says = "distlock: waiting for lock \"x\", held by ";
    let mut waiting = fixture.run(&["--ttl", LONG_TTL], "true");
    let mut quiet = fixture.run(&["--ttl", LONG_TTL, "-q", "--wait", "3s"], "true");
    let mut short = fixture.run(&["--ttl", LONG_TTL, "--wait", "100ms"], "true");
    eventually("the wait is reported", TEST_TIMEOUT, || waiting.err().starts_with(says));
    assert_eq!((quiet.code(), quiet.err()), (75, String::new()));
    assert_eq!((short.code(), short.err().lines().count()), (75, 1), "{}", short.err());
    drop(guard);
    assert_eq!((waiting.code(), waiting.err().lines().count()), (0, 1), "{}", waiting.err());
    fixture.expect_nothing_left();
}
