//! `distlock lock`, and `distlock adopt` for what it leaves.

use std::{fs::File, io};

use rustix::process::Signal;
use serde_json::{Value, json};

use super::fixture::{Fixture, KEY, LONG_TTL, RunProcess};
use crate::{
    helpers::{get, pttl},
    json::Schema,
    support::{TEST_TIMEOUT, eventually},
};

fn lock(fixture: &Fixture, options: &[&str]) -> RunProcess {
    fixture.start(fixture.distlock(&[&["lock"], options].concat()))
}

/// The same. Returns once it has printed a line for each of these locks.
fn lock_held(fixture: &Fixture, options: &[&str], locks: usize) -> RunProcess {
    let holder = lock(fixture, options);
    eventually("it holds the locks", TEST_TIMEOUT, || holder.out().lines().count() == locks);
    holder
}

#[test]
fn lock_holds_several_names_until_a_signal() {
    let fixture = Fixture::new();
    let mut holder = lock_held(&fixture, &["b", "x"], 2);
    let out = holder.out();
    assert!(out.lines().zip(["b", "x"]).all(|(line, name)| line.ends_with(&format!(" {name}"))));
    assert_eq!(lock(&fixture, &["-n", "a", "x"]).code(), 75);
    assert_eq!(lock(&fixture, &["-n", "-E", "9", "b"]).code(), 9);
    assert_eq!(lock(&fixture, &["--on-held", "skip", "-q", "b"]).code(), 0);
    let mut late = lock(&fixture, &["-v", "-w", "0.1", "b"]);
    assert_eq!(late.code(), 75);
    assert!(late.err().contains("waiting for lock \"b\", held by"), "{}", late.err());
    let mut waiting = lock(&fixture, &["x"]);
    fixture.await_queue_length(1);
    waiting.signal(Signal::TERM);
    assert_eq!(waiting.code(), 143);
    holder.signal(Signal::TERM);
    assert_eq!(holder.code(), 0);
    assert!(get(&fixture.server, KEY).is_none() && get(&fixture.server, "lock:b").is_none());

    let mut loser = lock_held(&fixture, &["--ttl", "3s", "x"], 1);
    fixture.server.cli(&["DEL", KEY]);
    assert_eq!(loser.code(), 76);
    assert!(loser.err().contains("lock \"x\" was lost: "), "{}", loser.err());
}

/// The server is not asked, so the lock named like the command is not waited for.
#[test]
fn lock_with_a_command_exits_with_64() {
    let fixture = Fixture::new();
    let mut refused = lock(&fixture, &["x", "--", "./deploy.sh"]);
    assert_eq!(refused.code(), 64);
    let expected = "distlock: lock runs no command; use: distlock --timeout 20s run x -- \
                    ./deploy.sh\n";
    assert_eq!((refused.err().as_str(), refused.out().as_str()), (expected, ""));
    assert_eq!(fixture.server.keys(), [""; 0]);
    let mut json = lock(&fixture, &["--json", "x", "--", "true"]);
    assert_eq!(json.code(), 64);
    assert!(json.out().contains("\"usage\""), "{}", json.out());
}

#[test]
fn verbose_lock_reports_acquiring_and_releasing() {
    let fixture = Fixture::new();
    let mut holder = lock_held(&fixture, &["-v", "x", "b"], 2);
    holder.signal(Signal::TERM);
    assert_eq!(holder.code(), 0);
    let err = holder.err();
    for name in ["b", "x"] {
        let acquired = format!("distlock: acquired lock \"{name}\" with token ");
        assert!(err.lines().any(|line| line.starts_with(&acquired)), "{err}");
    }
    assert!(err.ends_with("distlock: released locks \"b\", \"x\"\n"), "{err}");
    let mut detached = lock(&fixture, &["-v", "--detach", "x"]);
    assert_eq!(detached.code(), 0);
    let err = detached.err();
    assert!(err.starts_with("distlock: acquired ") && err.lines().count() == 1, "{err}");
}

/// The loss is noticed by the release, because no renewal is due before.
#[test]
fn lock_lost_before_its_release_is_reported_in_words() {
    let fixture = Fixture::new();
    for (command, why) in [
        (&["DEL", KEY][..], "it no longer exists on the server"),
        (&["SET", KEY, "other"], "it is now held by a client that calls itself \"other\""),
    ] {
        fixture.server.cli(&["DEL", KEY]);
        let mut holder = lock_held(&fixture, &["--ttl", LONG_TTL, "x"], 1);
        fixture.server.cli(command);
        holder.signal(Signal::TERM);
        assert_eq!(holder.code(), 76);
        let err = holder.err();
        assert!(err.starts_with(&format!("distlock: lock \"x\" was lost: {why}")), "{err}");
    }
}

/// Fault: N208
#[test]
fn failed_release_of_lock_does_not_promise_retries() {
    let fixture = Fixture::new();
    let options = ["--timeout", "1s", "--ttl", LONG_TTL];
    for (names, says) in [
        (&["x"][..], "; it may stay held until it expires, after 10m at the latest\n"),
        (&["b", "x"], "; the locks may stay held until they expire, after 10m at the latest\n"),
    ] {
        fixture.server.cli(&["FLUSHALL"]);
        let mut holder = lock_held(&fixture, &[&options, names].concat(), names.len());
        fixture.server.stop();
        holder.signal(Signal::TERM);
        assert_eq!(holder.code(), 69);
        fixture.server.cont();
        let err = holder.err();
        assert!(err.starts_with("distlock: could not release lock \""), "{err}");
        assert!(err.ends_with(says) && err.lines().count() == 1, "{err}");
    }
}

/// Whatever happens to the locks after that.
///
/// Fault: N209
#[test]
fn lock_with_json_prints_one_document() {
    let (fixture, schema) = (Fixture::new(), Schema::read());
    let json = |holder: &RunProcess| serde_json::from_str::<Value>(&holder.out()).ok();
    let held = |options: &[&str]| {
        let holder = lock(&fixture, &[&["--json", "x"], options].concat());
        eventually("it holds the lock", TEST_TIMEOUT, || json(&holder).is_some());
        holder
    };
    let expect = |definition: &str, holder: &RunProcess| {
        let document = json(holder).unwrap_or_else(|| panic!("{}", holder.out()));
        schema.check(definition, &document);
        document["error"].clone()
    };

    let holder = held(&["--ttl", LONG_TTL]);
    for (options, code) in [(&["--on-held", "skip"][..], 0), (&["-n", "-E", "0"], 0), (&["-n"], 75)]
    {
        let mut other = lock(&fixture, &[&["--json", "x"], options].concat());
        assert_eq!(other.code(), code);
        let error = expect("error", &other);
        assert_eq!((&error["kind"], &error["exit_code"]), (&json!("held"), &json!(code)));
    }
    let mut waiting = lock(&fixture, &["--json", "x"]);
    fixture.await_queue_length(1);
    waiting.signal(Signal::TERM);
    assert_eq!(waiting.code(), 143);
    let error = expect("error", &waiting);
    let expected = json!({
        "kind": "failed", "exit_code": 143, "message": "SIGTERM ended the wait"
    });
    assert_eq!(error, expected);
    assert!(waiting.err().ends_with("distlock: SIGTERM ended the wait\n"), "{}", waiting.err());

    for (ends, code) in [("released", 0), ("lost", 76), ("not released", 69)] {
        fixture.server.cli(&["DEL", KEY]);
        let mut holder = held(&["--ttl", LONG_TTL, "--timeout", "1s"]);
        match ends {
            "lost" => drop(fixture.server.cli(&["DEL", KEY])),
            "not released" => fixture.server.stop(),
            _ => {}
        }
        holder.signal(Signal::TERM);
        assert_eq!(holder.code(), code, "{ends}: {}", holder.err());
        fixture.server.cont();
        expect("acquired", &holder);
        assert_eq!(holder.err().is_empty(), code == 0, "{ends}");
    }
    drop(holder);
}

#[test]
fn lock_has_the_kinds_of_run() {
    let fixture = Fixture::new();
    for (kind, other) in [("--shared", "--shared"), ("--permits=2/3", "--permits=3")] {
        let mut holder = lock_held(&fixture, &[kind, "x"], 1);
        assert_eq!(fixture.run(&[other, "-n"], "true").code(), 0, "{kind}");
        assert_eq!(lock(&fixture, &["-n", "x"]).code(), 75, "{kind}");
        holder.signal(Signal::TERM);
        assert_eq!(holder.code(), 0);
    }
    let mut holder = lock_held(&fixture, &["--at-least", "5m", "x"], 1);
    holder.signal(Signal::TERM);
    assert_eq!(holder.code(), 0);
    assert!(pttl(&fixture.server, KEY) > 200_000);
}

/// The lock passes on without a moment in which another client could get it.
#[test]
fn detached_lock_is_adopted_by_one_command() {
    let fixture = Fixture::new();
    for kind in [&[][..], &["--shared"], &["--permits", "2"]] {
        let mut first = lock(&fixture, &[&["--detach", "x"], kind].concat());
        assert_eq!(first.code(), 0, "{}", first.err());
        let out = first.out();
        let detached = out.strip_suffix('\n').expect("one line");
        let held = fixture.holder();
        assert!(held.is_some() && lock(&fixture, &["-n", "x"]).code() == 75);

        let script = "echo $DISTLOCK_NAME $DISTLOCK_TOKEN; exit 7";
        let adopt = || fixture.start(fixture.distlock(&["adopt", "-v", detached, "-c", script]));
        let mut second = adopt();
        assert_eq!(second.code(), 7, "{}", second.err());
        assert!(second.out().starts_with("x "), "{}", second.out());
        assert!(second.err().contains("acquired lock \"x\" with token "), "{}", second.err());
        fixture.expect_nothing_left();

        let mut late = adopt();
        assert_eq!((late.code(), late.out()), (76, String::new()));
        let err = late.err();
        assert!(err.contains("lock \"x\" is lost: it no longer exists on the server"), "{err}");
        assert!(err.contains("; acquire it again before you go on"), "{err}");
        fixture.expect_nothing_left();
    }
}

/// Fault: N272
#[test]
fn lock_is_adopted_once_the_server_is_back() {
    let fixture = Fixture::durable();
    let mut first = lock(&fixture, &["--detach", "--ttl", LONG_TTL, "x"]);
    assert_eq!(first.code(), 0, "{}", first.err());
    fixture.server.kill();
    let detached = first.out();
    let adopt = fixture.distlock(&["adopt", detached.trim_end(), "-c", "exit 7"]);
    let mut second = fixture.start(adopt);
    eventually("it is reported", TEST_TIMEOUT, || {
        second.err().contains("could not adopt lock \"x\" yet, and will try for another ")
    });
    fixture.server.restart();
    assert_eq!(second.code(), 7, "{}", second.err());
    fixture.expect_nothing_left();
}

/// Nobody has the text that is needed to adopt it.
#[test]
fn lock_is_released_if_its_detached_text_cannot_be_written() {
    let fixture = Fixture::new();
    let kinds = [&[][..], &["--shared"], &["--permits", "2"], &["--json"]];
    for (kind, full) in kinds.into_iter().flat_map(|kind| [(kind, true), (kind, false)]) {
        let mut command =
            fixture.distlock(&[&["lock", "--ttl", LONG_TTL, "--detach", "x"], kind].concat());
        if full {
            command.stdout(File::create("/dev/full").unwrap());
        } else {
            let (reader, writer) = io::pipe().unwrap();
            drop(reader);
            command.stdout(writer);
        }
        let ended = command.output().unwrap();
        let err = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(ended.status.code(), Some(126), "{kind:?}: {err}");
        let why = if full { "No space left" } else { "Broken pipe" };
        assert!(err.starts_with(&format!("distlock: cannot write to standard output: {why}")));
        assert!(err.ends_with("; lock \"x\" was released\n"), "{err}");
        fixture.expect_nothing_left();
        assert_eq!(lock(&fixture, &["-n", "--detach", "x"]).code(), 0, "{kind:?}");
        fixture.server.cli(&["DEL", KEY]);
    }
}

#[test]
fn killed_wrapper_of_an_adopted_lock_leaves_nothing() {
    let fixture = Fixture::new();
    let mut first = lock(&fixture, &["--ttl", "10m", "--detach", "x"]);
    assert_eq!(first.code(), 0);
    let out = first.out();
    let script = "echo $$ >$DIR/pid; exec sleep 600";
    let mut second = fixture.start(fixture.distlock(&["adopt", out.trim_end(), "-c", script]));
    fixture.read_line("pid");
    second.signal(Signal::KILL);
    second.status();
    eventually("the guardian has ended", TEST_TIMEOUT, || fixture.processes().is_empty());
    fixture.expect_nothing_left();
}
