//! Somebody else holds the lock.

use super::{Scene, scene::LONG};
use crate::{
    kit::queue_key,
    support::{CEILING, eventually},
};

#[test]
fn who_does_not_want_to_wait_does_not() {
    let scene = Scene::new();
    let guard = scene.manager().lock("x").unwrap();
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
        let mut job = scene.run(options, "echo >$DIR/ran");
        assert_eq!(job.code(), code, "{options:?}: {}", job.err());
        let err = job.err();
        assert_eq!(err.starts_with("distlock: skipped: "), code == 0, "{err}");
        assert!(err.contains("\"x\"") && err.contains(&format!("pid {}", std::process::id())), "{err}");
        assert_eq!(err.lines().count(), 1, "{err}");
        assert_eq!(scene.read("ran"), "");
        assert_eq!(scene.processes(), []);
        assert_eq!(scene.server.query::<i64>(&["LLEN", &queue_key("x")]), 0);
    }
    assert!(guard.is_held());
}

#[test]
fn who_waits_gets_it_in_turn() {
    let scene = Scene::new();
    let guard = scene.manager().lock("x").unwrap();
    let options = [&[][..], &["--on-held", "wait"], &["--wait", "10m"], &["--wait", "10m", "--on-held", "skip"]];
    let mut jobs = Vec::new();
    for (number, options) in options.iter().enumerate() {
        // No two at once: the marker of one must be gone before the next begins.
        let script = format!("mkdir $DIR/alone || exit 99; echo {number} >>$DIR/order; rmdir $DIR/alone");
        jobs.push(scene.run(&[options, &["--ttl", LONG][..]].concat(), &script));
        scene.await_line(number + 1);
    }
    drop(guard);
    for job in &mut jobs {
        assert_eq!(job.code(), 0, "{}", job.err());
    }
    assert_eq!(scene.read("order"), "0\n1\n2\n3\n");
    scene.expect_nothing_left();
}

#[test]
fn it_says_for_whom_it_waits_when_it_is_asked_to() {
    let scene = Scene::new();
    let guard = scene.manager().lock("x").unwrap();
    let mut job = scene.run(&["--verbose"], "true");
    scene.await_line(1);
    let words = format!("distlock: waits for lock \"x\", held by {} (pid {}, ", guard.id().host(), std::process::id());
    eventually("it says for whom it waits", CEILING, || job.err().starts_with(&words));
    drop(guard);
    assert_eq!(job.code(), 0);
    scene.expect_nothing_left();
}

#[test]
fn what_cannot_work_is_refused_with_a_code_of_its_own() {
    let scene = Scene::new();
    for (options, words) in [
        (&["--no-wait", "--on-held", "wait"][..], "contradict"),
        (&["--no-wait", "--wait", "1s"], "--wait"),
        (&["--ttl", "1ms"], "10 ms"),
        (&["--ttl", "25h"], "1day"),
        (&["--ttl", "soon"], "30s"),
        (&["--max-hold", "0"], "--max-hold"),
        (&["--on-held", "cry"], "skip"),
        (&["--url", "redis://:secret@127.0.0.1"], "password"),
        (&["--password-file", "/no/such/file"], "/no/such/file"),
    ] {
        let mut job = scene.run(options, "echo >$DIR/ran");
        assert_eq!(job.code(), 64, "{options:?}: {}", job.err());
        assert!(job.err().contains(words) && !job.err().contains("secret"), "{}", job.err());
        assert_eq!(scene.read("ran"), "");
    }
    let bare = |words: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_distlock"));
        command.args(words).envs(scene.environment());
        scene.start(command).code()
    };
    assert_eq!(bare(&["run", "", "--", "true"]), 64);
    assert_eq!(bare(&["run", "--", "true"]), 64);
    assert_eq!(bare(&["run", "x"]), 64);
    assert_eq!(bare(&["run", "x", "--"]), 64);
    scene.expect_nothing_left();
}

#[test]
fn servers_that_are_away_have_a_code_of_their_own() {
    let mut scene = Scene::new();
    let addr = scene.server.addr();
    scene.server.kill();
    scene.url = format!("redis://{addr}");
    for options in [&["--no-wait"][..], &["--wait", "200ms"], &["--ttl", "1s"]] {
        let mut job = scene.run(options, "echo >$DIR/ran");
        assert_eq!(job.code(), 69, "{options:?}: {}", job.err());
        assert!(job.err().contains(&addr.to_string()) && job.err().contains("refused"), "{}", job.err());
        assert_eq!((scene.read("ran"), scene.processes()), (String::new(), vec![]));
    }
}
