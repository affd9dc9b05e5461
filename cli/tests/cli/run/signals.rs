//! Signals to the wrapper.

use distlock::LockOptions;
use nix::sys::signal::{SigSet, Signal as Masked};
use rustix::process::Signal;

use super::{
    Fixture, RunProcess,
    fixture::{LONG_TTL, RUN_UNTIL_KILLED, not_ignored, with_ignored_signal},
};
use crate::support::{TEST_TIMEOUT, eventually};

const ALL: [Signal; 6] =
    [Signal::INT, Signal::TERM, Signal::HUP, Signal::QUIT, Signal::USR1, Signal::USR2];

/// The messages except the report of a long wait, which there is only on a slow machine.
fn messages(job: &RunProcess) -> Vec<String> {
    let lines = job.err();
    let others = lines.lines().filter(|line| !line.starts_with("distlock: waiting for lock"));
    others.map(str::to_owned).collect()
}

#[test]
fn verbose_wait_reports_the_signal_that_ends_it() {
    let fixture = Fixture::new();
    let _guard = fixture.manager().lock("x").unwrap();
    for command in [&["run", "-v", "x", "--", "true"][..], &["lock", "-v", "x"]] {
        let mut job = fixture.start(fixture.distlock(command));
        fixture.await_queue_length(1);
        job.signal(Signal::TERM);
        assert_eq!(
            (job.code(), messages(&job)),
            (143, vec!["distlock: SIGTERM ended the wait".into()])
        );
        fixture.await_queue_length(0);
    }
}

#[test]
fn signal_ends_wait() {
    let fixture = Fixture::new();
    let mgr = fixture.manager();
    let guard = mgr.lock("x").unwrap();
    for signal in not_ignored(&ALL) {
        for options in [&[][..], &["--wait", "10m"], &["--on-held", "wait"]] {
            let mut job = fixture.run(options, "echo >$DIR/ran");
            fixture.await_queue_length(1);
            job.signal(signal);
            assert_eq!(job.code(), 128 + signal.as_raw(), "{}", job.err());
            fixture.await_queue_length(0);
            assert_eq!((fixture.read("ran"), messages(&job)), (String::new(), vec![]));
            assert_eq!(fixture.processes(), []);
        }
    }
    assert!(guard.is_held());
    drop(guard);
    fixture.expect_nothing_left();
}

#[test]
fn signal_is_forwarded_to_command_with_handler() {
    let fixture = Fixture::new();
    for signal in not_ignored(&ALL) {
        let number = signal.as_raw();
        let script = format!(
            "trap 'echo {number} >>$DIR/heard; exit 40' {number}; rm -f $DIR/heard; echo $$ \
             >$DIR/pid; \
             while :; do sleep 600 & wait $!; done"
        );
        let (mut job, _) = fixture.run_until_started(&["--ttl", LONG_TTL], &script);
        job.signal(signal);
        assert_eq!(job.code(), 40, "{signal:?}: {}", job.err());
        assert_eq!(fixture.read("heard"), format!("{number}\n"));
        fixture.expect_nothing_left();
        std::fs::remove_file(fixture.path("pid")).unwrap();
    }
}

#[test]
fn signal_ends_command_without_handler() {
    let fixture = Fixture::new();
    for signal in not_ignored(&ALL) {
        let (mut job, _) =
            fixture.run_until_started(&[], &format!("ulimit -c 0; {RUN_UNTIL_KILLED}"));
        job.signal(signal);
        assert_eq!(job.code(), 128 + signal.as_raw(), "{}", job.err());
        fixture.expect_nothing_left();
        std::fs::remove_file(fixture.path("pid")).unwrap();
    }
}

/// Processes that the command has started receive it too.
#[test]
fn signal_reaches_whole_group() {
    let fixture = Fixture::new();
    let inner = "trap 'echo >$DIR/inner; exit' TERM; echo >$DIR/ready; while :; do sleep 600 & \
                 wait $!; done";
    let script = format!(
        "trap 'wait; exit 41' TERM; ({inner}) & while ! test -e $DIR/ready; do sleep 0.01; done; \
         echo $$ >$DIR/pid; while :; do wait; done"
    );
    let (mut job, _) = fixture.run_until_started(&["--grace", "10m"], &script);
    job.signal(Signal::TERM);
    assert_eq!(job.code(), 41, "{}", job.err());
    assert_eq!(fixture.read("inner"), "\n");
    fixture.expect_nothing_left();
}

#[test]
fn command_may_handle_signal_and_continue() {
    let fixture = Fixture::new();
    let script = "trap 'echo t >>$DIR/heard' TERM; echo $$ >$DIR/pid; \
                  while ! test -e $DIR/enough; do sleep 0.01; done; exit 9";
    let (mut job, _) = fixture.run_until_started(&["--grace", "1ms", "--ttl", LONG_TTL], script);
    for times in 1..=3 {
        job.signal(Signal::TERM);
        eventually("the signal arrives once more", TEST_TIMEOUT, || {
            fixture.read("heard") == "t\n".repeat(times)
        });
    }
    assert!(fixture.holder().is_some());
    std::fs::write(fixture.path("enough"), "").unwrap();
    assert_eq!(job.code(), 9, "{}", job.err());
    fixture.expect_nothing_left();
}

/// As `nohup` arranges it.
///
/// Fault: N97
#[test]
fn signal_ignored_at_start_stays_ignored() {
    let fixture = Fixture::new();
    let run = fixture.command(
        &[],
        &[
            "sh",
            "-c",
            "grep SigIgn /proc/self/status >$DIR/ignored; echo $$ >$DIR/pid; read -r l; exit 3",
        ],
    );
    let mut command = with_ignored_signal("HUP PIPE", &run);
    command.stdin(std::process::Stdio::piped());
    let mut job = fixture.start(command);
    fixture.read_line("pid");
    let set = fixture.read_line("ignored");
    let set = u64::from_str_radix(set.trim_start_matches("SigIgn:").trim(), 16).unwrap();
    let ignores = |signal: Signal| set >> (signal.as_raw() - 1) & 1 == 1;
    assert!(ignores(Signal::HUP), "the command ignores it too");
    assert!(
        !ignores(Signal::PIPE),
        "SIGPIPE is reset; if that has changed, docs/command.md must be changed too"
    );
    job.signal(Signal::HUP);
    // Signals arrive in no particular order, but SIGHUP would have ended the command by the end of
    // its input.
    job.end_input();
    assert_eq!(job.code(), 3, "{}", job.err());
    fixture.expect_nothing_left();
}

/// Some programs leave SIGCHLD and SIGCONT blocked for what they start.
///
/// Fault: N69
#[test]
fn end_of_command_is_noticed_with_sigchld_blocked() {
    let fixture = Fixture::new();
    for (options, script, code) in [
        (&["--ttl", LONG_TTL][..], "exit 3", 3),
        (&["--ttl", LONG_TTL, "--max-hold", "1ms"], "exec sleep 600", 124),
    ] {
        // A process inherits the mask of the thread that starts it.
        let start = || {
            SigSet::from_iter([Masked::SIGCHLD, Masked::SIGCONT]).thread_block().unwrap();
            fixture.run(options, script)
        };
        let mut job = std::thread::scope(|scope| scope.spawn(start).join().unwrap());
        assert_eq!(job.code(), code, "{}", job.err());
        fixture.expect_nothing_left();
    }
}

/// There is no gap between acquiring the lock and starting the command: at whatever moment a signal
/// arrives, the wrapper ends with its number.
#[test]
fn signal_during_acquire_is_never_lost() {
    let fixture = Fixture::new();
    let mgr = fixture.manager();
    for round in 0..40 {
        let guard = mgr.lock_with("x", &LockOptions::new()).unwrap();
        let mut job = fixture.run(&["--ttl", LONG_TTL], "exec sleep 600");
        fixture.await_queue_length(1);
        // The signal arrives during the hand-over, each time a little later.
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
        fixture.expect_nothing_left();
    }
}
