//! How `distlock top` ends, and that the terminal is as before each time.

use std::{io::Read, sync::mpsc, thread};

use portable_pty::{Child, CommandBuilder, PtySize, native_pty_system};
use rustix::process::{Pid, Signal, kill_process};

use super::top;
use crate::{
    kit::foreign_take,
    support::{CEILING, RedisServer, Watchdog, eventually, process_state},
    {
        command::{distlock, run},
        pty::{Pty, heed},
    },
};

/// Ends a running one so, and looks at what it leaves behind.
#[track_caller]
fn ends(server: &RedisServer, code: u32, end: impl FnOnce(&mut Pty)) {
    let mut top = top(server);
    top.until_shown("no lock is held");
    assert!(top.is_taken() && !top.is_restored());
    end(&mut top);
    assert_eq!(top.end(), code);
    assert!(top.is_restored(), "{}", top.transcript().escape_debug());
    assert_eq!(top.screen().trim(), "", "something is left on the screen");
}

#[test]
fn keys_end_it_and_restore_the_terminal() {
    let server = RedisServer::start();
    ends(&server, 0, |top| top.press("q"));
    ends(&server, 0, |top| top.press("\x1b"));
    ends(&server, 130, |top| top.press("\x03"));
    // Also in the middle of something.
    ends(&server, 130, |top| top.press("/q\x03"));
    ends(&server, 130, |top| top.press("?\x03"));
}

#[test]
fn signals_end_it_and_restore_the_terminal() {
    let server = RedisServer::start();
    for (signal, code) in [(Signal::TERM, 143), (Signal::HUP, 129), (Signal::INT, 130), (Signal::QUIT, 131)] {
        ends(&server, code, |top| top.signal(signal));
    }
}

/// It is killed when dropped.
struct Killed(Box<dyn Child + Send + Sync>);

impl Drop for Killed {
    fn drop(&mut self) {
        if let Ok(None) = self.0.try_wait() {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

/// Reads from a terminal until it has shown this, and then lets go of it.
fn read_until(mut terminal: impl Read + Send + 'static, text: &'static str) -> mpsc::Receiver<()> {
    let (tell, told) = mpsc::channel();
    thread::spawn(move || {
        let (mut shown, mut piece) = (String::new(), [0; 4096]);
        while !shown.contains(text) {
            match terminal.read(&mut piece) {
                Ok(read @ 1..) => shown.push_str(&String::from_utf8_lossy(&piece[..read])),
                _ => return,
            }
        }
        drop(terminal);
        let _ = tell.send(());
    });
    told
}

/// As when a window is closed, or a connection to another machine breaks.
#[test]
fn it_ends_with_its_terminal() {
    let server = RedisServer::start();
    let pair = native_pty_system().openpty(PtySize::default()).unwrap();
    let mut command = CommandBuilder::new(env!("CARGO_BIN_EXE_distlock"));
    command.args(["top", "--url", &server.url()]);
    command.env("TERM", "xterm-256color");
    let watchdog = Watchdog::start();
    let mut top = Killed(pair.slave.spawn_command(command).unwrap());
    watchdog.guard(top.0.process_id().unwrap());
    drop(pair.slave);
    let shown = read_until(pair.master.try_clone_reader().unwrap(), "no lock is held");
    shown.recv_timeout(CEILING).expect("it shows no locks");
    drop(pair.master);
    let mut code = None;
    eventually("it ends", CEILING, || {
        code = top.0.try_wait().unwrap().map(|status| status.exit_code());
        code.is_some()
    });
    // By the signal, or because nothing can be read or shown any more, whichever is noticed first. Not by a panic.
    assert!(matches!(code, Some(129 | 126)), "{code:?}");
}

#[test]
fn it_ends_while_the_server_hangs_too() {
    let server = RedisServer::start();
    let mut top = Pty::start(100, 24, &["top", "--url", &server.url(), "--interval", "100ms", "--timeout", "60s"]);
    top.until_shown("no lock is held");
    server.stop();
    top.until_gone("looked 0s ago");
    top.signal(Signal::TERM);
    assert_eq!(top.end(), 143);
    assert!(top.is_restored());
    server.cont();
}

/// A shell that lets it go on after each line that it reads.
#[test]
fn it_is_suspended_with_the_terminal_restored_and_comes_back() {
    let server = RedisServer::start();
    let mut shell = CommandBuilder::new("sh");
    let url = server.url();
    let program = env!("CARGO_BIN_EXE_distlock");
    shell.args([
        "-c",
        "set -m; sh -c 'echo \"pid=$$.\"; exec \"$@\"' sh \"$@\"; read -r x; fg; read -r x; fg; read -r x; fg",
    ]);
    shell.args(["sh", program, "top", "--url", &url, "--interval", "100ms"]);
    heed(Signal::TSTP);
    let mut top = Pty::run(100, 24, shell, &[]);
    top.until_shown("no lock is held");
    let told = top.transcript();
    let pid: i32 = told.split(['=', '.']).nth(1).and_then(|pid| pid.parse().ok()).unwrap_or_else(|| panic!("{told:?}"));
    for round in 0..3 {
        if round == 1 {
            kill_process(Pid::from_raw(pid).unwrap(), Signal::TSTP).unwrap();
        } else {
            top.press("\x1a")
        }
        eventually("it is stopped", CEILING, || process_state(pid.unsigned_abs()) == Some('T'));
        eventually("the terminal is restored", CEILING, || top.is_restored());
        top.press("\n");
        top.until_shown("no lock is held");
        eventually("the terminal is taken", CEILING, || top.is_taken());
    }
    top.press("q");
    assert_eq!(top.end(), 0);
    assert!(top.is_restored());
}

/// As the first process of a container: there it would hang for ever.
#[test]
fn where_no_shell_could_let_it_go_on_it_is_not_suspended() {
    let server = RedisServer::start();
    heed(Signal::TSTP);
    let mut top = top(&server);
    top.until_shown("no lock is held");
    top.press("\x1a");
    top.signal(Signal::TSTP);
    assert!(foreign_take(&server, "lock:later", "somebody", 600_000));
    top.until_shown("later");
    top.press("q");
    assert_eq!(top.end(), 0);
    assert_eq!(top.transcript().matches("\x1b[?1049h").count(), 1, "it has left the screen");
}

#[test]
fn arguments_that_cannot_work_are_told_on_a_restored_terminal() {
    let server = RedisServer::start();
    let long = "x".repeat(5_000);
    for (args, part) in [
        (&["top", "--interval", "1ms"][..], "--interval"),
        (&["top", "--interval", "30days"], "--interval"),
        (&["top", "--prefix", &long], "prefix"),
        (&["top", &long], "pattern"),
        (&["top", "--url", "nonsense://"], "distlock: "),
    ] {
        let mut top = Pty::start_with(100, 24, args, &[("DISTLOCK_URL", &server.url())]);
        assert_eq!(top.end(), 64, "{}", top.screen());
        assert!(top.is_restored() && top.screen().contains(part), "{}", top.screen());
    }
}

#[test]
fn without_a_terminal_it_points_to_the_list() {
    let server = RedisServer::start();
    let ended = run(distlock(&["top", "--url", &server.url()])).with(64);
    assert!(ended.out.is_empty() && ended.err.starts_with("distlock: "), "{ended:?}");
    assert!(ended.err.contains("terminal") && ended.err.contains("distlock ls"), "{ended:?}");
}

#[test]
fn nothing_is_logged_into_the_picture() {
    let server = RedisServer::start();
    let args = ["top", "--url", &server.url(), "--interval", "100ms"];
    let top = Pty::start_with(100, 24, &args, &[("DISTLOCK_LOG", "trace")]);
    top.until_shown("no lock is held");
    server.kill();
    top.until_shown("NO ANSWER for");
    top.until_gone(" 0s");
    let transcript = top.transcript();
    assert!(!["TRACE", "DEBUG", "WARN", "INFO"].iter().any(|level| transcript.contains(level)), "{}", top.screen());
}
