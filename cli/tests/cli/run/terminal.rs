//! At a terminal: ^C, ^Z, and who has the foreground.

use std::{
    io::{Read as _, Write},
    process::Command,
    sync::Arc,
    thread,
};

use parking_lot::Mutex;
use portable_pty::{Child, CommandBuilder, MasterPty, PtySize, native_pty_system};

use super::{
    Scene,
    alone::Alone,
    scene::{LONG, await_state, is_alive, signal},
};
use crate::{
    pty::heed,
    support::{CEILING, Watchdog, can_be_had, eventually, process_state, run_elsewhere},
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
    fn start(scene: &Scene) -> Shell {
        let pair = native_pty_system().openpty(PtySize::default()).expect("no pseudo-terminal");
        let mut command = CommandBuilder::new("sh");
        command.args(["-i"]);
        for (name, value) in scene.environment() {
            command.env(name, value);
        }
        for name in
            ["REDIS_URL", "DISTLOCK_PASSWORD_FILE", "DISTLOCK_PREFIX", "DISTLOCK_QUARANTINE", "DISTLOCK_LOG", "ENV"]
        {
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
        eventually(&format!("shown: {text:?} in {:?}", self.shown.lock()), CEILING, || {
            let mut shown = self.shown.lock();
            let found = shown.find(text).map(|at| at + text.len());
            found.map(|end| shown.drain(..end)).is_some()
        });
    }

    /// Waits for the shell to be back, and asks it for the code of the last command.
    #[track_caller]
    fn expect_code(&mut self, code: i32) {
        self.press("echo \"code=$?.\"\n");
        // What is typed is shown too, but not with the number in it.
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

/// Notes each ^C, and ends when it is asked to.
const NOTES: &str = "sh -c 'trap \"echo i >>$DIR/heard\" INT; trap \"exit 9\" TERM; echo $PPID >$DIR/wrapper; \
                     echo $$ >$DIR/pid; while :; do sleep 600 & wait $!; done'";

#[test]
fn an_interrupt_reaches_the_command_once() {
    let scene = Scene::new();
    let mut shell = Shell::start(&scene);
    shell.run(&format!("--ttl {LONG}"), NOTES);
    scene.number("pid");
    for times in 1..=2 {
        shell.press("\u{3}");
        eventually("it is heard", CEILING, || scene.read("heard") == "i\n".repeat(times));
    }
    signal(scene.number("wrapper"), Signal::TERM);
    shell.expect_code(9);
    assert_eq!(scene.read("heard"), "i\ni\n");
    scene.expect_no_lock();
}

/// As it would have without us; some programs say less, or ask nothing, when they have not.
#[test]
fn a_command_has_the_foreground_from_its_first_moment() {
    let scene = Scene::new();
    let mut shell = Shell::start(&scene);
    for (lines, foreground) in [("", true), (" </dev/null", false), (" | cat", false)] {
        shell.run("", &format!("sh -c 'cat /proc/$$/stat >$DIR/stat'{lines}"));
        shell.expect_code(0);
        let stat = scene.line("stat");
        let fields: Vec<_> = stat.split_whitespace().collect();
        let (group, of_terminal) = (fields[4], fields[7]);
        assert_eq!(group == of_terminal, foreground, "{stat}");
        assert_eq!(group, fields[0], "it leads its group");
    }
    scene.expect_no_lock();
}

#[test]
fn an_interrupt_ends_the_wait() {
    let scene = Scene::new();
    let guard = scene.manager().lock("x").unwrap();
    let mut shell = Shell::start(&scene);
    shell.run("", "true");
    scene.await_line(1);
    shell.press("\u{3}");
    shell.expect_code(130);
    drop(guard);
    scene.expect_no_lock();
}

#[test]
fn an_interrupt_ends_the_script_that_the_command_is_a_line_of() {
    let scene = Scene::new();
    let mut shell = Shell::start(&scene);
    let script = format!(
        "{} --timeout 20s run x -- sh -c 'echo $$ >$DIR/pid; exec sleep 600'\necho >$DIR/next\n",
        env!("CARGO_BIN_EXE_distlock")
    );
    std::fs::write(scene.path("script"), script).unwrap();
    shell.press("sh $DIR/script\n");
    scene.number("pid");
    shell.press("\u{3}");
    shell.expect_code(130);
    assert_eq!(scene.read("next"), "");
    scene.expect_no_lock();
}

/// As by `timeout --foreground -s INT`: it was meant for this program, not for the job that this is a part of.
#[test]
fn an_interrupt_of_the_wrapper_alone_is_not_one_of_the_script() {
    let scene = Scene::new();
    let mut shell = Shell::start(&scene);
    let script = format!(
        "{} --timeout 20s run x -- sh -c 'echo $PPID >$DIR/wrapper; echo $$ >$DIR/pid; exec sleep 600'\n\
         echo $? >$DIR/next\n",
        env!("CARGO_BIN_EXE_distlock")
    );
    std::fs::write(scene.path("script"), script).unwrap();
    shell.press("sh $DIR/script\n");
    scene.number("pid");
    signal(scene.number("wrapper"), Signal::INT);
    shell.expect_code(0);
    assert_eq!(scene.read("next"), "130\n");
    scene.expect_no_lock();
}

/// The terminal sends it to the script too, and some shells go on with the next line unless what they waited for died of it.
#[test]
fn an_interrupt_of_a_whole_job_is_what_it_dies_of() {
    heed(Signal::INT);
    let run = format!("exec {} --timeout 20s run x --", env!("CARGO_BIN_EXE_distlock"));
    let stays = "sh -c 'echo >$DIR/runs; exec sleep 600'";
    for (script, waits) in [
        (format!("{run} {stays} >$DIR/log"), false),
        (format!("{run} {stays} </dev/null"), false),
        (format!("{run} true"), true),
    ] {
        let scene = Scene::new();
        let guard = waits.then(|| scene.manager().lock("x").unwrap());
        let mut command = CommandBuilder::new("sh");
        command.args(["-c", &script]);
        let mut alone = Alone::start(&scene, command);
        if waits {
            scene.await_line(1)
        } else {
            drop(scene.line("runs"))
        }
        alone.press("\u{3}");
        let status = alone.end();
        assert_eq!(status.signal(), Some("Interrupt"), "{script}: {status:?}");
        drop(guard);
        scene.expect_nothing_left();
    }
}

#[test]
fn a_command_can_be_stopped_and_go_on() {
    let scene = Scene::new();
    let mut shell = Shell::start(&scene);
    shell.run(&format!("--ttl {LONG}"), "sh -c 'echo $PPID >$DIR/wrapper; echo $$ >$DIR/pid; exec cat'");
    let (pid, wrapper) = (scene.number("pid"), scene.number("wrapper"));
    shell.press("one\n");
    shell.until("one\r\none\r\n");
    for text in ["two", "three"] {
        shell.press("\u{1a}");
        await_state(pid, 'T');
        await_state(wrapper, 'T');
        shell.press("echo \"shell is $((40+2))\"\n");
        shell.until("shell is 42");
        assert!(scene.holder().is_some());
        shell.press("fg\n");
        eventually("both go on", CEILING, || {
            [pid, wrapper].iter().all(|pid| process_state(*pid).is_some_and(|state| state != 'T'))
        });
        shell.press(&format!("{text}\n"));
        shell.until(&format!("{text}\r\n{text}\r\n"));
    }
    shell.press("\u{4}");
    shell.expect_code(0);
    scene.expect_no_lock();
}

/// Goal: while nobody renews, nothing of the command runs. Method: its first process is stopped alone.
#[test]
fn a_command_of_which_one_process_stops_stops_as_a_whole() {
    let scene = Scene::new();
    let mut shell = Shell::start(&scene);
    let script = "sh -c 'sleep 600 & echo $! >$DIR/child; echo $PPID >$DIR/wrapper; echo $$ >$DIR/pid; wait; exit 5'";
    shell.run(&format!("--ttl {LONG}"), script);
    let (pid, child, wrapper) = (scene.number("pid"), scene.number("child"), scene.number("wrapper"));
    signal(pid, Signal::STOP);
    [wrapper, child].into_iter().for_each(|pid| await_state(pid, 'T'));
    shell.press("fg\n");
    eventually("all go on", CEILING, || {
        [pid, child, wrapper].iter().all(|pid| process_state(*pid).is_some_and(|state| state != 'T'))
    });
    signal(child, Signal::TERM);
    shell.expect_code(5);
    scene.expect_no_lock();
}

#[test]
fn a_lock_that_is_lost_while_the_command_is_stopped_ends_it_when_it_would_go_on() {
    let scene = Scene::new();
    let mut shell = Shell::start(&scene);
    let script = "sh -c 'echo $PPID >$DIR/wrapper; echo $$ >$DIR/pid; exec sleep 600'";
    shell.run("--ttl 3s", script);
    let (pid, wrapper) = (scene.number("pid"), scene.number("wrapper"));
    shell.press("\u{1a}");
    await_state(pid, 'T');
    await_state(wrapper, 'T');
    let guard = scene.manager().lock("x").unwrap();
    assert_eq!(process_state(pid), Some('T'), "it may go on once the lock is free again");
    shell.press("fg\n");
    shell.until("is lost");
    shell.expect_code(76);
    assert!(!is_alive(pid));
    assert!(guard.is_held());
}

/// A pager reads from the terminal too; the command before it gets the foreground when it asks for it.
#[test]
fn a_command_in_a_pipeline_gets_the_terminal_when_it_wants_it() {
    let scene = Scene::new();
    let mut shell = Shell::start(&scene);
    shell.run("", "sh -c 'echo >$DIR/pid; read -r line </dev/tty; echo \"got $line\"' | cat");
    scene.line("pid");
    shell.press("some words\n");
    shell.until("got some words");
    shell.expect_code(0);
    scene.expect_no_lock();
}

/// Who ignores being stopped, and starts us in the foreground, would get a line itself.
#[test]
fn a_command_in_a_pipeline_gets_the_terminal_also_where_such_stops_are_ignored() {
    let scene = Scene::new();
    let mut shell = Shell::start(&scene);
    let run = format!("{} --timeout 20s run x -- sh -c", env!("CARGO_BIN_EXE_distlock"));
    let command = "'echo >$DIR/pid; read -r line </dev/tty; echo \"got $line\"'";
    shell.press(&format!("(trap '' TTIN TTOU; exec {run} {command}) | cat\n"));
    scene.line("pid");
    shell.press("some words\n");
    shell.until("got some words");
    shell.expect_code(0);
    scene.expect_no_lock();
}

/// Where the keys go while the command has not got the foreground.
#[test]
fn a_command_in_a_pipeline_is_interrupted_and_stopped_with_it() {
    let scene = Scene::new();
    let mut shell = Shell::start(&scene);
    shell.run(&format!("--ttl {LONG}"), &format!("{NOTES} | cat"));
    let (pid, wrapper) = (scene.number("pid"), scene.number("wrapper"));
    shell.press("\u{1a}");
    await_state(pid, 'T');
    await_state(wrapper, 'T');
    shell.press("fg\n");
    eventually("both go on", CEILING, || {
        [pid, wrapper].iter().all(|pid| process_state(*pid).is_some_and(|state| state != 'T'))
    });
    signal(wrapper, Signal::INT);
    eventually("it is heard", CEILING, || scene.read("heard") == "i\n");
    signal(wrapper, Signal::TERM);
    // Of cat, the last of them.
    shell.expect_code(0);
    scene.expect_no_lock();
}

#[test]
fn a_command_that_is_killed_gives_the_terminal_back() {
    let scene = Scene::new();
    let mut shell = Shell::start(&scene);
    shell.run("--max-hold 500ms --grace 0", "sh -c 'trap \"\" TERM; while :; do sleep 600; done'");
    shell.until("longer than --max-hold");
    shell.expect_code(124);
    scene.expect_no_lock();
}

/// Without a shell that could let it go on, nothing is stopped: neither where the command has the foreground, nor where it
/// shares it with a pager.
#[test]
fn a_command_that_nobody_could_wake_is_not_stopped() {
    heed(Signal::TSTP);
    let program = env!("CARGO_BIN_EXE_distlock");
    let run = format!("{program} --timeout 20s run --ttl {LONG} x -- sh -c \"$COMMAND\"");
    for (script, code) in [(format!("exec {run}"), 3), (format!("{run} | cat"), 0)] {
        let scene = Scene::new();
        let mut command = CommandBuilder::new("sh");
        command.args(["-c", &script]);
        let waits = "trap 'echo yes >$DIR/woken' CONT; echo $$ >$DIR/pid; until [ -s $DIR/woken ]; do sleep 0.01; done";
        command.env("COMMAND", format!("{waits}; trap - CONT; read -r line; echo \"$line\" >$DIR/line; exit 3"));
        let mut alone = Alone::start(&scene, command);
        let _told = scene.told_of();
        scene.number("pid");
        alone.press("\u{1a}");
        assert_eq!(scene.line("woken"), "yes", "{script}");
        alone.press("go on\n");
        assert_eq!(scene.line("line"), "go on", "{script}");
        let status = alone.end();
        assert_eq!(status.exit_code(), code, "{script}");
        scene.expect_no_lock();
    }
}

/// Without rights: processes that see none of those outside.
const CONTAINER: [&str; 5] = ["--user", "--map-root-user", "--pid", "--fork", "--kill-child"];

/// In a container the session of a parent outside has no number.
#[test]
fn nor_is_it_in_a_container() {
    let test = "run::terminal::a_command_that_nobody_could_wake_is_not_stopped";
    run_elsewhere(test, "no processes of its own", |program| {
        Command::new("unshare").args(CONTAINER).arg("--mount-proc").args(program).output()
    });
}

/// The first process of a container, which has the terminal of that: nothing ends it but its own end.
#[test]
fn an_interrupt_ends_the_first_process_of_a_container_with_its_number() {
    let tried = Command::new("unshare").args(CONTAINER).args(["--mount-proc", "setsid", "true"]).output();
    if !can_be_had("a command in a container", "no processes of its own", tried) {
        return;
    }
    heed(Signal::INT);
    for lines in ["", " </dev/null"] {
        let scene = Scene::new();
        let mut command = CommandBuilder::new("unshare");
        let run = format!("exec {} --timeout 20s run x --", env!("CARGO_BIN_EXE_distlock"));
        let script = format!("{run} sh -c 'echo >$DIR/runs; exec sleep 600'{lines}");
        command.args(CONTAINER);
        command.args(["--mount-proc", "setsid", "--ctty", "sh", "-c", &script]);
        command.set_controlling_tty(false);
        let mut alone = Alone::start(&scene, command);
        scene.line("runs");
        alone.press("\u{3}");
        let status = alone.end();
        assert_eq!((status.exit_code(), status.signal()), (130, None), "{lines}");
        scene.expect_nothing_left();
    }
}

/// Started as a part of a job outside, and with a view of its processes: neither our own process group nor what has the
/// foreground has a number then, and the numbers in `/proc` are those of others.
#[test]
fn a_command_in_a_container_that_is_a_part_of_a_job_cannot_have_the_terminal_and_says_so() {
    let tried = Command::new("unshare").args(CONTAINER).arg("true").output();
    if !can_be_had("a command in a container", "no processes of its own", tried) {
        return;
    }
    let scene = Scene::new();
    let mut shell = Shell::start(&scene);
    let run = format!("unshare {} {} --timeout 20s run x --", CONTAINER.join(" "), env!("CARGO_BIN_EXE_distlock"));
    // What it leaves behind is ended before the lock is free.
    let leaves = "(trap \"echo >\\$DIR/asked; exit\" TERM; echo >$DIR/there; while :; do sleep 0.01; done) &";
    shell.press(&format!("{run} sh -c '{leaves} until test -e $DIR/there; do sleep 0.01; done; exit 5'\n"));
    shell.expect_code(5);
    assert_eq!(scene.read("asked"), "\n");
    scene.expect_no_lock();
    shell.press(&format!("{run} sh -c 'read -r line; exit 6'\n"));
    shell.until("it wants the terminal");
    shell.press("\u{3}");
    shell.expect_code(130);
    scene.expect_no_lock();
}
