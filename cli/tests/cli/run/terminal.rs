//! At a terminal: ^C, ^Z, and the process group in the foreground.

use std::{
    io::{Read as _, Write},
    process::Command,
    sync::Arc,
    thread,
};

use parking_lot::Mutex;
use portable_pty::{Child, CommandBuilder, MasterPty, PtySize, native_pty_system};

use super::{
    Fixture,
    alone::Alone,
    fixture::{KEY, LONG_TTL, await_state, is_alive, signal},
    killed::behind_a_proxy,
};
use crate::{
    helpers::pttl,
    pty::reset_ignored,
    support::{
        Fault, TEST_TIMEOUT, Watchdog, contains, eventually, process_state, run_elsewhere,
        trial_succeeded,
    },
};
use rustix::process::Signal;

/// An interactive shell at a terminal of its own.
struct Shell {
    _master: Box<dyn MasterPty + Send>,
    keys: Box<dyn Write + Send>,
    child: Box<dyn Child + Send + Sync>,
    shown: Arc<Mutex<String>>,
    _watchdog: Watchdog,
}

impl Shell {
    fn start(fixture: &Fixture) -> Shell {
        let pair = native_pty_system().openpty(PtySize::default()).expect("no pseudo-terminal");
        let mut command = CommandBuilder::new("sh");
        command.args(["-i"]);
        for (name, value) in fixture.environment() {
            command.env(name, value);
        }
        for name in [
            "REDIS_URL",
            "DISTLOCK_PASSWORD_FILE",
            "DISTLOCK_PREFIX",
            "DISTLOCK_QUARANTINE",
            "DISTLOCK_LOG",
            "ENV",
        ] {
            command.env_remove(name);
        }
        command.env("PS1", "<ready>");
        let watchdog = Watchdog::start();
        let child = pair.slave.spawn_command(command).expect("cannot run sh");
        watchdog.guard(child.process_id().expect("it has a pid"));
        let shown = Arc::new(Mutex::new(String::new()));
        let mut output = pair.master.try_clone_reader().expect("the terminal cannot be read");
        let screen = shown.clone();
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(read @ 1..) = output.read(&mut bytes) {
                screen.lock().push_str(&String::from_utf8_lossy(&bytes[..read]));
            }
        });
        let keys = pair.master.take_writer().expect("the terminal cannot be written to");
        let shell = Shell { _master: pair.master, keys, child, shown, _watchdog: watchdog };
        shell.until("<ready>");
        shell
    }

    #[track_caller]
    fn press(&mut self, keys: &str) {
        let sent = self.keys.write_all(keys.as_bytes()).and_then(|()| self.keys.flush());
        sent.expect("the terminal takes no keys");
    }

    /// `distlock run` with these options, as a line of the shell.
    fn run(&mut self, options: &str, command: &str) {
        let program = env!("CARGO_BIN_EXE_distlock");
        self.press(&format!("{program} --timeout 20s run {options} x -- {command}\n"));
    }

    /// Waits until this is shown, and forgets all that was shown before its end.
    #[track_caller]
    fn until(&self, text: &str) {
        eventually(&format!("shown: {text:?} in {:?}", self.shown.lock()), TEST_TIMEOUT, || {
            let mut shown = self.shown.lock();
            let found = shown.find(text).map(|at| at + text.len());
            found.map(|end| shown.drain(..end)).is_some()
        });
    }

    /// Waits for the shell to be back, and asks it for the code of the last command.
    #[track_caller]
    fn expect_code(&mut self, code: i32) {
        self.press("echo \"code=$?.\"\n");
        // The terminal echoes the typed text too, but without the number.
        self.until(&format!("code={code}."));
        self.until("<ready>");
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("the terminal shows {:?}", self.shown.lock());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Records each SIGINT, and ends on SIGTERM.
const RECORD_INTERRUPTS: &str = "sh -c 'trap \"echo i >>$DIR/heard\" INT; trap \"exit 9\" TERM; \
                                 echo $PPID >$DIR/wrapper; \
                     echo $$ >$DIR/pid; while :; do sleep 600 & wait $!; done'";

#[test]
fn interrupt_reaches_command_once() {
    let fixture = Fixture::new();
    let mut shell = Shell::start(&fixture);
    shell.run(&format!("--ttl {LONG_TTL}"), RECORD_INTERRUPTS);
    fixture.read_number("pid");
    for times in 1..=2 {
        shell.press("\u{3}");
        eventually("the interrupt arrives", TEST_TIMEOUT, || {
            fixture.read("heard") == "i\n".repeat(times)
        });
    }
    signal(fixture.read_number("wrapper"), Signal::TERM);
    shell.expect_code(9);
    assert_eq!(fixture.read("heard"), "i\ni\n");
    fixture.expect_lock_free();
}

/// As without distlock. Some programs behave differently in the background.
#[test]
fn command_starts_in_foreground() {
    let fixture = Fixture::new();
    let mut shell = Shell::start(&fixture);
    for (lines, foreground) in [("", true), (" </dev/null", false), (" | cat", false)] {
        shell.run("", &format!("sh -c 'cat /proc/$$/stat >$DIR/stat'{lines}"));
        shell.expect_code(0);
        let stat = fixture.read_line("stat");
        let fields: Vec<_> = stat.split_whitespace().collect();
        let (group, of_terminal) = (fields[4], fields[7]);
        assert_eq!(group == of_terminal, foreground, "{stat}");
        assert_eq!(group, fields[0], "it leads its group");
    }
    fixture.expect_lock_free();
}

#[test]
fn interrupt_ends_wait() {
    let fixture = Fixture::new();
    let guard = fixture.manager().lock("x").unwrap();
    let mut shell = Shell::start(&fixture);
    shell.run("", "true");
    fixture.await_queue_length(1);
    shell.press("\u{3}");
    shell.expect_code(130);
    drop(guard);
    fixture.expect_lock_free();
}

/// Fault: N70, N109
#[test]
fn interrupt_ends_script_around_command() {
    let fixture = Fixture::new();
    let mut shell = Shell::start(&fixture);
    let script = format!(
        "{} --timeout 20s run x -- sh -c 'echo $$ >$DIR/pid; exec sleep 600'\necho >$DIR/next\n",
        env!("CARGO_BIN_EXE_distlock")
    );
    std::fs::write(fixture.path("script"), script).unwrap();
    shell.press("sh $DIR/script\n");
    fixture.read_number("pid");
    shell.press("\u{3}");
    shell.expect_code(130);
    assert_eq!(fixture.read("next"), "");
    fixture.expect_lock_free();
}

/// As by `timeout --foreground -s INT`: the signal is meant for distlock, not for the job it is
/// part of.
///
/// Fault: N109
#[test]
fn sigint_to_wrapper_alone_does_not_end_script() {
    let fixture = Fixture::new();
    let mut shell = Shell::start(&fixture);
    let script = format!(
        "{} --timeout 20s run x -- sh -c 'echo $PPID >$DIR/wrapper; echo $$ >$DIR/pid; exec sleep \
         600'\n\
         echo $? >$DIR/next\n",
        env!("CARGO_BIN_EXE_distlock")
    );
    std::fs::write(fixture.path("script"), script).unwrap();
    shell.press("sh $DIR/script\n");
    fixture.read_number("pid");
    signal(fixture.read_number("wrapper"), Signal::INT);
    shell.expect_code(0);
    assert_eq!(fixture.read("next"), "130\n");
    fixture.expect_lock_free();
}

/// The terminal also sends the signal to the script. Some shells continue with the next line unless
/// the process they waited for died of it.
///
/// Fault: N70
#[test]
fn wrapper_dies_of_interrupt_of_whole_job() {
    reset_ignored(Signal::INT);
    let run = format!("exec {} --timeout 20s run x --", env!("CARGO_BIN_EXE_distlock"));
    let stays = "sh -c 'echo >$DIR/runs; exec sleep 600'";
    for (script, waits) in [
        (format!("{run} {stays} >$DIR/log"), false),
        (format!("{run} {stays} </dev/null"), false),
        (format!("{run} true"), true),
    ] {
        let fixture = Fixture::new();
        let guard = waits.then(|| fixture.manager().lock("x").unwrap());
        let mut command = CommandBuilder::new("sh");
        command.args(["-c", &script]);
        let mut alone = Alone::start(&fixture, command);
        if waits {
            fixture.await_queue_length(1)
        } else {
            drop(fixture.read_line("runs"))
        }
        alone.press("\u{3}");
        let status = alone.end();
        assert_eq!(status.signal(), Some("Interrupt"), "{script}: {status:?}");
        drop(guard);
        fixture.expect_nothing_left();
    }
}

/// The first requests for the release disappear, also the one of the clean-up.
#[test]
fn wrapper_that_dies_of_interrupt_retries_its_release() {
    reset_ignored(Signal::INT);
    let (fixture, proxy) = behind_a_proxy();
    let mut command = CommandBuilder::new(env!("CARGO_BIN_EXE_distlock"));
    command.args(["--timeout", "4s", "run", "--ttl", LONG_TTL, "x", "--"]);
    command.args(["sh", "-c", "echo >$DIR/runs; exec sleep 600"]);
    let mut alone = Alone::start(&fixture, command);
    fixture.read_line("runs");
    let lost = [(); 2].map(|()| proxy.on_request(contains(KEY), Fault::SwallowRequest));
    alone.press("\u{3}");
    let status = alone.end();
    assert_eq!(status.signal(), Some("Interrupt"), "{status:?}");
    assert_eq!(lost.map(|request| request.fired()), [1, 1]);
    fixture.expect_nothing_left();
}

#[test]
fn command_can_be_stopped_and_continued() {
    let fixture = Fixture::new();
    let mut shell = Shell::start(&fixture);
    shell.run(
        &format!("--ttl {LONG_TTL}"),
        "sh -c 'echo $PPID >$DIR/wrapper; echo $$ >$DIR/pid; exec cat'",
    );
    let (pid, wrapper) = (fixture.read_number("pid"), fixture.read_number("wrapper"));
    shell.press("one\n");
    shell.until("one\r\none\r\n");
    for text in ["two", "three"] {
        shell.press("\u{1a}");
        await_state(pid, 'T');
        await_state(wrapper, 'T');
        shell.press("echo \"shell is $((40+2))\"\n");
        shell.until("shell is 42");
        assert!(fixture.holder().is_some());
        shell.press("fg\n");
        eventually("both go on", TEST_TIMEOUT, || {
            [pid, wrapper].iter().all(|pid| process_state(*pid).is_some_and(|state| state != 'T'))
        });
        shell.press(&format!("{text}\n"));
        shell.until(&format!("{text}\r\n{text}\r\n"));
    }
    shell.press("\u{4}");
    shell.expect_code(0);
    fixture.expect_lock_free();
}

/// While no lock is renewed, nothing of the command may run. The test stops only its first process.
///
/// Fault: N124
#[test]
fn stop_of_one_process_stops_whole_command() {
    let fixture = Fixture::new();
    let mut shell = Shell::start(&fixture);
    let script = "sh -c 'sleep 600 & echo $! >$DIR/child; echo $PPID >$DIR/wrapper; echo $$ \
                  >$DIR/pid; wait; exit 5'";
    shell.run(&format!("--ttl {LONG_TTL}"), script);
    let (pid, child, wrapper) =
        (fixture.read_number("pid"), fixture.read_number("child"), fixture.read_number("wrapper"));
    signal(pid, Signal::STOP);
    [wrapper, child].into_iter().for_each(|pid| await_state(pid, 'T'));
    shell.press("fg\n");
    eventually("all go on", TEST_TIMEOUT, || {
        [pid, child, wrapper]
            .iter()
            .all(|pid| process_state(*pid).is_some_and(|state| state != 'T'))
    });
    signal(child, Signal::TERM);
    shell.expect_code(5);
    fixture.expect_lock_free();
}

/// So little of the lease is left, but not less than a slow machine needs, that an unrenewed
/// command would get SIGTERM.
#[test]
fn late_continue_renews_before_it_ends_the_command() {
    let fixture = Fixture::new();
    let mut shell = Shell::start(&fixture);
    let script = "sh -c 'echo $PPID >$DIR/wrapper; echo $$ >$DIR/pid; exec cat'";
    shell.run("--ttl 30s --grace 5s", script);
    let (pid, wrapper) = (fixture.read_number("pid"), fixture.read_number("wrapper"));
    shell.press("\u{1a}");
    await_state(pid, 'T');
    await_state(wrapper, 'T');
    let left = || pttl(&fixture.server, KEY);
    eventually("it almost expires", TEST_TIMEOUT, || left() < 5_500);
    shell.press("fg\n");
    eventually("it is renewed", TEST_TIMEOUT, || left() > 15_000);
    shell.press("one\n");
    shell.until("one\r\none\r\n");
    shell.press("\u{4}");
    shell.expect_code(0);
}

#[test]
fn lock_lost_while_stopped_ends_command_on_continue() {
    let fixture = Fixture::new();
    let mut shell = Shell::start(&fixture);
    let script = "sh -c 'echo $PPID >$DIR/wrapper; echo $$ >$DIR/pid; exec sleep 600'";
    shell.run("--ttl 3s", script);
    let (pid, wrapper) = (fixture.read_number("pid"), fixture.read_number("wrapper"));
    shell.press("\u{1a}");
    await_state(pid, 'T');
    await_state(wrapper, 'T');
    let guard = fixture.manager().lock("x").unwrap();
    assert_eq!(process_state(pid), Some('T'), "it may go on once the lock is free again");
    shell.press("fg\n");
    shell.until("was lost");
    shell.expect_code(76);
    assert!(!is_alive(pid));
    assert!(guard.is_held());
}

/// A pager reads from the terminal too. The command before it gets the foreground when it reads.
#[test]
fn command_in_pipeline_gets_terminal_on_read() {
    let fixture = Fixture::new();
    let mut shell = Shell::start(&fixture);
    shell.run("", "sh -c 'echo >$DIR/pid; read -r line </dev/tty; echo \"got $line\"' | cat");
    fixture.read_line("pid");
    shell.press("some words\n");
    shell.until("got some words");
    shell.expect_code(0);
    fixture.expect_lock_free();
}

/// If distlock was started with SIGTTIN ignored, the command in its background group would get an
/// error instead.
#[test]
fn command_in_pipeline_gets_terminal_with_ttin_ignored() {
    let fixture = Fixture::new();
    let mut shell = Shell::start(&fixture);
    let run = format!("{} --timeout 20s run x -- sh -c", env!("CARGO_BIN_EXE_distlock"));
    let command = "'echo >$DIR/pid; read -r line </dev/tty; echo \"got $line\"'";
    shell.press(&format!("(trap '' TTIN TTOU; exec {run} {command}) | cat\n"));
    fixture.read_line("pid");
    shell.press("some words\n");
    shell.until("got some words");
    shell.expect_code(0);
    fixture.expect_lock_free();
}

/// While the command does not have the foreground, keys go to the whole pipeline.
#[test]
fn pipeline_is_stopped_and_interrupted_as_a_whole() {
    let fixture = Fixture::new();
    let mut shell = Shell::start(&fixture);
    shell.run(&format!("--ttl {LONG_TTL}"), &format!("{RECORD_INTERRUPTS} | cat"));
    let (pid, wrapper) = (fixture.read_number("pid"), fixture.read_number("wrapper"));
    shell.press("\u{1a}");
    await_state(pid, 'T');
    await_state(wrapper, 'T');
    shell.press("fg\n");
    eventually("both go on", TEST_TIMEOUT, || {
        [pid, wrapper].iter().all(|pid| process_state(*pid).is_some_and(|state| state != 'T'))
    });
    signal(wrapper, Signal::INT);
    eventually("the interrupt arrives", TEST_TIMEOUT, || fixture.read("heard") == "i\n");
    signal(wrapper, Signal::TERM);
    // The exit code of the pipeline is that of `cat`.
    shell.expect_code(0);
    fixture.expect_lock_free();
}

#[test]
fn killed_command_returns_terminal() {
    let fixture = Fixture::new();
    let mut shell = Shell::start(&fixture);
    shell.run("--max-hold 500ms --grace 0", "sh -c 'trap \"\" TERM; while :; do sleep 600; done'");
    shell.until("longer than --max-hold");
    shell.expect_code(124);
    fixture.expect_lock_free();
}

/// Without a shell that could continue it, nothing is stopped, whether the command has the
/// foreground or shares the terminal with a pager.
#[test]
fn command_without_job_control_parent_is_not_stopped() {
    reset_ignored(Signal::TSTP);
    let program = env!("CARGO_BIN_EXE_distlock");
    let run = format!("{program} --timeout 20s run --ttl {LONG_TTL} x -- sh -c \"$COMMAND\"");
    for (script, code) in [(format!("exec {run}"), 3), (format!("{run} | cat"), 0)] {
        let fixture = Fixture::new();
        let mut command = CommandBuilder::new("sh");
        command.args(["-c", &script]);
        let waits = "trap 'echo yes >$DIR/woken' CONT; echo $$ >$DIR/pid; until [ -s $DIR/woken ]; \
                     do sleep 0.01; done";
        command.env(
            "COMMAND",
            format!("{waits}; trap - CONT; read -r line; echo \"$line\" >$DIR/line; exit 3"),
        );
        let mut alone = Alone::start(&fixture, command);
        let _report = fixture.report_on_panic();
        fixture.read_number("pid");
        alone.press("\u{1a}");
        assert_eq!(fixture.read_line("woken"), "yes", "{script}");
        alone.press("go on\n");
        assert_eq!(fixture.read_line("line"), "go on", "{script}");
        let status = alone.end();
        assert_eq!(status.exit_code(), code, "{script}");
        fixture.expect_lock_free();
    }
}

/// A PID namespace without privileges. Its processes see none of those outside.
const CONTAINER: [&str; 5] = ["--user", "--map-root-user", "--pid", "--fork", "--kill-child"];

/// In a container, the session of a parent outside has the number 0.
#[test]
fn command_in_container_is_not_stopped() {
    let test = "run::terminal::command_without_job_control_parent_is_not_stopped";
    run_elsewhere(test, "no PID namespace", |program| {
        Command::new("unshare").args(CONTAINER).arg("--mount-proc").args(program).output()
    });
}

/// The first process of a container, which has its own terminal. It cannot end itself by a signal.
///
/// Fault: N70
#[test]
fn interrupt_of_container_init_exits_with_130() {
    let tried =
        Command::new("unshare").args(CONTAINER).args(["--mount-proc", "setsid", "true"]).output();
    if !trial_succeeded("a command in a container", "no PID namespace", tried) {
        return;
    }
    reset_ignored(Signal::INT);
    for lines in ["", " </dev/null"] {
        let fixture = Fixture::new();
        let mut command = CommandBuilder::new("unshare");
        let run = format!("exec {} --timeout 20s run x --", env!("CARGO_BIN_EXE_distlock"));
        let script = format!("{run} sh -c 'echo >$DIR/runs; exec sleep 600'{lines}");
        command.args(CONTAINER);
        command.args(["--mount-proc", "setsid", "--ctty", "sh", "-c", &script]);
        command.set_controlling_tty(false);
        let mut alone = Alone::start(&fixture, command);
        fixture.read_line("runs");
        alone.press("\u{3}");
        let status = alone.end();
        assert_eq!((status.exit_code(), status.signal()), (130, None), "{lines}");
        fixture.expect_nothing_left();
    }
}

/// A container inside a job of a shell that sees the `/proc` of the host. Its own process group and
/// the one in the foreground have the number 0 then, and the numbers in `/proc` are those of the
/// host.
#[test]
fn container_inside_job_reports_missing_terminal() {
    let tried = Command::new("unshare").args(CONTAINER).arg("true").output();
    if !trial_succeeded("a command in a container", "no PID namespace", tried) {
        return;
    }
    let fixture = Fixture::new();
    let mut shell = Shell::start(&fixture);
    let run = format!(
        "unshare {} {} --timeout 20s run x --",
        CONTAINER.join(" "),
        env!("CARGO_BIN_EXE_distlock")
    );
    // Stragglers are ended before the lock is released, also here.
    let straggler = "(trap \"echo >\\$DIR/asked; exit\" TERM; echo >$DIR/there; while :; do sleep \
                     0.01; done) &";
    shell.press(&format!(
        "{run} sh -c '{straggler} until test -e $DIR/there; do sleep 0.01; done; exit 5'\n"
    ));
    shell.expect_code(5);
    assert_eq!(fixture.read("asked"), "\n");
    fixture.expect_lock_free();
    shell.press(&format!("{run} sh -c 'read -r line; exit 6'\n"));
    shell.until("it wants to use the terminal");
    shell.press("\u{3}");
    shell.expect_code(130);
    fixture.expect_lock_free();
}
