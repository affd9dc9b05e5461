//! The wrapper is sent signals.

use distlock::LockOptions;
use nix::sys::signal::{SigSet, Signal as Masked};
use rustix::process::Signal;

use super::{
    Scene,
    scene::{LONG, STAY, heard, ignoring},
};
use crate::support::{CEILING, eventually};

const ALL: [Signal; 6] = [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT, Signal::USR1, Signal::USR2];

#[test]
fn a_signal_ends_the_wait() {
    let scene = Scene::new();
    let mgr = scene.manager();
    let guard = mgr.lock("x").unwrap();
    for signal in heard(&ALL) {
        for options in [&[][..], &["--wait", "10m"], &["--on-held", "wait"]] {
            let mut job = scene.run(options, "echo >$DIR/ran");
            scene.await_line(1);
            job.signal(signal);
            assert_eq!(job.code(), 128 + signal.as_raw(), "{}", job.err());
            scene.await_line(0);
            assert_eq!((scene.read("ran"), job.err()), (String::new(), String::new()));
            assert_eq!(scene.processes(), []);
        }
    }
    assert!(guard.is_held());
    drop(guard);
    scene.expect_nothing_left();
}

#[test]
fn a_signal_is_passed_on_to_a_command_that_listens() {
    let scene = Scene::new();
    for signal in heard(&ALL) {
        let number = signal.as_raw();
        let script = format!(
            "trap 'echo {number} >>$DIR/heard; exit 40' {number}; rm -f $DIR/heard; echo $$ >$DIR/pid; \
             while :; do sleep 600 & wait $!; done"
        );
        let (mut job, _) = scene.running(&["--ttl", LONG], &script);
        job.signal(signal);
        assert_eq!(job.code(), 40, "{signal:?}: {}", job.err());
        assert_eq!(scene.read("heard"), format!("{number}\n"));
        scene.expect_nothing_left();
        std::fs::remove_file(scene.path("pid")).unwrap();
    }
}

#[test]
fn a_signal_ends_a_command_that_does_not_listen() {
    let scene = Scene::new();
    for signal in heard(&ALL) {
        let (mut job, _) = scene.running(&[], &format!("ulimit -c 0; {STAY}"));
        job.signal(signal);
        assert_eq!(job.code(), 128 + signal.as_raw(), "{}", job.err());
        scene.expect_nothing_left();
        std::fs::remove_file(scene.path("pid")).unwrap();
    }
}

/// Also those that the command has started.
#[test]
fn the_whole_group_hears_it() {
    let scene = Scene::new();
    let inner = "trap 'echo >$DIR/inner; exit' TERM; echo >$DIR/ready; while :; do sleep 600 & wait $!; done";
    let script = format!(
        "trap 'wait; exit 41' TERM; ({inner}) & while ! test -e $DIR/ready; do sleep 0.01; done; \
         echo $$ >$DIR/pid; while :; do wait; done"
    );
    let (mut job, _) = scene.running(&["--grace", "10m"], &script);
    job.signal(Signal::TERM);
    assert_eq!(job.code(), 41, "{}", job.err());
    assert_eq!(scene.read("inner"), "\n");
    scene.expect_nothing_left();
}

#[test]
fn a_command_decides_itself_what_a_signal_means() {
    let scene = Scene::new();
    let script = "trap 'echo t >>$DIR/heard' TERM; echo $$ >$DIR/pid; \
                  while ! test -e $DIR/enough; do sleep 0.01; done; exit 9";
    let (mut job, _) = scene.running(&["--grace", "1ms", "--ttl", LONG], script);
    for times in 1..=3 {
        job.signal(Signal::TERM);
        eventually("it is heard once more", CEILING, || scene.read("heard") == "t\n".repeat(times));
    }
    assert!(scene.holder().is_some());
    std::fs::write(scene.path("enough"), "").unwrap();
    assert_eq!(job.code(), 9, "{}", job.err());
    scene.expect_nothing_left();
}

/// As `nohup` does it.
#[test]
fn a_signal_that_was_ignored_from_the_start_stays_ignored() {
    let scene = Scene::new();
    let run = scene.command(
        &[],
        &["sh", "-c", "grep SigIgn /proc/self/status >$DIR/ignored; echo $$ >$DIR/pid; read -r l; exit 3"],
    );
    let mut command = ignoring("HUP PIPE", &run);
    command.stdin(std::process::Stdio::piped());
    let mut job = scene.start(command);
    scene.line("pid");
    let set = scene.line("ignored");
    let set = u64::from_str_radix(set.trim_start_matches("SigIgn:").trim(), 16).unwrap();
    let ignores = |signal: Signal| set >> (signal.as_raw() - 1) & 1 == 1;
    assert!(ignores(Signal::HUP), "the command ignores it too");
    assert!(!ignores(Signal::PIPE), "nobody can know of this one; if that has changed, README.md has to be too");
    job.signal(Signal::HUP);
    // Signals are heard in no order, but this one comes after the other would have ended everything.
    job.end_input();
    assert_eq!(job.code(), 3, "{}", job.err());
    scene.expect_nothing_left();
}

/// As some that start programs leave it: they wait for signals themselves, and do not take that back for others.
#[test]
fn the_end_of_a_command_is_heard_also_where_such_signals_are_blocked_from_the_start() {
    let scene = Scene::new();
    for (options, script, code) in
        [(&["--ttl", LONG][..], "exit 3", 3), (&["--ttl", LONG, "--max-hold", "1ms"], "exec sleep 600", 124)]
    {
        // What a thread starts has its mask.
        let start = || {
            SigSet::from_iter([Masked::SIGCHLD, Masked::SIGCONT]).thread_block().unwrap();
            scene.run(options, script)
        };
        let mut job = std::thread::scope(|scope| scope.spawn(start).join().unwrap());
        assert_eq!(job.code(), code, "{}", job.err());
        scene.expect_nothing_left();
    }
}

/// Between having the lock and having started the command there is no gap: whatever moment a signal comes at, it ends
/// everything, with its number.
#[test]
fn no_signal_is_lost_whenever_it_comes() {
    let scene = Scene::new();
    let mgr = scene.manager();
    for round in 0..40 {
        let guard = mgr.lock_with("x", &LockOptions::new()).unwrap();
        let mut job = scene.run(&["--ttl", LONG], "exec sleep 600");
        scene.await_line(1);
        // The lock is handed over, and the signal comes while this is under way, each time a little later.
        let started = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                started.wait();
                drop(guard);
            });
            started.wait();
            for _ in 0..round * 2_000 {
                std::hint::spin_loop();
            }
            job.signal(Signal::TERM);
        });
        assert_eq!(job.code(), 128 + Signal::TERM.as_raw(), "{}", job.err());
        scene.expect_nothing_left();
    }
}
