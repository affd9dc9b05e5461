//! Commands under the locks of several names.

use rustix::process::Signal;

use super::fixture::{Fixture, KEY, LONG_TTL, RUN_UNTIL_KILLED, is_alive};
use crate::{
    helpers::get,
    support::{TEST_TIMEOUT, eventually},
};

const OTHER_KEY: &str = "lock:b";

/// The locks of both names are free, and no process is left.
#[track_caller]
fn expect_nothing_left(fixture: &Fixture) {
    fixture.expect_nothing_left();
    assert_eq!(get(&fixture.server, OTHER_KEY), None);
}

#[test]
fn command_runs_under_all_locks_or_not_at_all() {
    let fixture = Fixture::new();
    let script = "printf '%s\n%s\n%s\n' \"$DISTLOCK_NAME\" \"$DISTLOCK_TOKEN\" \"$DISTLOCK_ID\"; \
                  echo $$ >$DIR/pid; cat >/dev/null";
    let mut job = fixture.run(&["-v", "b"], script);
    fixture.read_line("pid");
    let ids = [OTHER_KEY, KEY].map(|key| get(&fixture.server, key).expect("it is held"));
    let out = job.out();
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!((&lines[..2], &lines[4..]), (&["b", "x"][..], &[&*ids[0], &ids[1]][..]), "{out}");
    assert!(lines[2..4].iter().all(|token| token.parse::<u64>().is_ok()), "{out}");

    let mut refused = fixture.start(fixture.distlock(&["run", "-n", "a", "x", "-c", "echo ran"]));
    assert_eq!((refused.code(), refused.out()), (75, String::new()));
    assert!(refused.err().contains("lock \"x\" is held"), "{}", refused.err());
    assert_eq!(get(&fixture.server, "lock:a"), None);

    job.end_input();
    assert_eq!(job.code(), 0);
    assert!(job.err().contains("acquired lock \"b\" with token"), "{}", job.err());
    assert!(job.err().ends_with("distlock: released locks \"b\", \"x\"\n"), "{}", job.err());
    expect_nothing_left(&fixture);
}

/// Fault: N180
#[test]
fn loss_of_one_lock_ends_the_command_and_all_locks() {
    let fixture = Fixture::new();
    let (mut job, pid) = fixture.run_until_started(&["--ttl", "3s", "b"], RUN_UNTIL_KILLED);
    fixture.server.cli(&["DEL", OTHER_KEY]);
    assert_eq!(job.code(), 76);
    let err = job.err();
    assert!(err.starts_with("distlock: lock \"b\" was lost: it no longer exists"), "{err}");
    assert!(!is_alive(pid));
    expect_nothing_left(&fixture);
}

/// Also while it waits for one of them, holding the other.
///
/// Fault: N180
#[test]
fn killed_wrapper_leaves_none_of_its_locks() {
    let fixture = Fixture::new();
    let guard = fixture.manager().lock("x").unwrap();
    for waits in [true, false] {
        if !waits {
            fixture.server.cli(&["DEL", KEY]);
        }
        let mut job = fixture.run(&["--ttl", LONG_TTL, "b"], RUN_UNTIL_KILLED);
        if waits {
            fixture.await_queue_length(1);
        } else {
            fixture.read_line("pid");
        }
        assert!(get(&fixture.server, OTHER_KEY).is_some());
        job.signal(Signal::KILL);
        job.status();
        eventually("the guardian has ended", TEST_TIMEOUT, || fixture.processes().is_empty());
        assert_eq!(get(&fixture.server, OTHER_KEY), None, "while waiting: {waits}");
    }
    drop(guard);
    expect_nothing_left(&fixture);
}

#[test]
fn wrong_names_and_options_are_usage_errors() {
    let fixture = Fixture::new();
    for (args, why) in [
        (&["run", "a", "a", "-c", "true"][..], "distlock: name \"a\" is given twice; leave"),
        (&["lock", "a", "b", "a"], "distlock: name \"a\" is given twice; leave one out"),
        (
            &["run", "--shared", "a", "b", "c", "-c", "true"],
            ": distlock run --shared a -- distlock run b c -- …",
        ),
        (&["lock", "--permits", "2", "a", "b"], "run --permits 2 a -- distlock run b -- …"),
        (&["run", "--permits", "2/4", "a", "b", "-c", "true"], "run --permits 2/4 a -- "),
        (&["lock", "--at-least", "60", "a", "b"], "--at-least works with one NAME; leave out"),
        (&["run", "--at-least", "5m", "a", "b", "-c", "true"], "run --at-least 5m a -- "),
        (&["lock", "--detach", "--shared", "a", "b"], "--detach works with one NAME"),
        (&["lock", "--detach", "a", "b"], "--detach works with one NAME"),
        (&["lock", "--detach", "--at-least", "1m", "a"], "--detach works without --at-least"),
        (&["run", "--ttl", "1ms", "a", "-c", "true"], "--ttl is 1ms, but must be 10ms to 24h"),
        (&["lock", "--permits", "0", "a"], "the limit is 0"),
        (
            &["lock", "--permits", "3/2", "a"],
            "3 permits cannot be acquired if the limit is 2; write at least 1 and at most 2",
        ),
        (&["lock", "--at-least", "25h", "a"], "--at-least is 25h, but must be 10ms to 24h"),
        (&["run", "a", "ls"], "write -- before the command: "),
        (&["run", "a"], "<COMMAND>"),
        (&["adopt", "mutex", "-c", "true"], "not a detached lock; give the whole text"),
        (&["run", "--max-hold", "0", "a", "-c", "true"], "--max-hold is zero"),
    ] {
        let mut ended = fixture.start(fixture.distlock(args));
        assert_eq!(ended.code(), 64, "{args:?}: {}", ended.err());
        assert!(ended.err().contains(why), "{args:?}: {}", ended.err());
    }
}
