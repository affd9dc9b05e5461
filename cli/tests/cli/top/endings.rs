//! The end of `distlock top`, which restores the terminal in every case.

use std::{io::Read, sync::mpsc, thread};

use portable_pty::{Child, CommandBuilder, PtySize, native_pty_system};
use rustix::process::{Pid, Signal, kill_process};

use super::top;
use crate::{
    command::{distlock, run_to_end},
    helpers::set_foreign_lock,
    pty::{Pty, reset_ignored},
    support::{RedisServer, TEST_TIMEOUT, Watchdog, eventually, process_state},
};

/// Ends a running `distlock top`, and checks the exit code and the terminal.
#[track_caller]
fn expect_end(server: &RedisServer, code: u32, end: impl FnOnce(&mut Pty)) {
    let mut top = top(server);
    top.wait_shown("no locks are held");
    assert!(top.is_taken_over() && !top.is_restored());
    end(&mut top);
    assert_eq!(top.exit_code(), code);
    assert!(top.is_restored(), "{}", top.transcript().escape_debug());
    assert_eq!(top.screen().trim(), "", "something is left on the screen");
}

#[test]
fn keys_end_top_and_restore_terminal() {
    let server = RedisServer::start();
    expect_end(&server, 0, |top| top.press("q"));
    expect_end(&server, 0, |top| top.press("\x1b"));
    expect_end(&server, 130, |top| top.press("\x03"));
    // Also while a filter or the help is open.
    expect_end(&server, 130, |top| top.press("/q\x03"));
    expect_end(&server, 130, |top| top.press("?\x03"));
}

#[test]
fn signals_end_top_and_restore_terminal() {
    let server = RedisServer::start();
    for (signal, code) in
        [(Signal::TERM, 143), (Signal::HUP, 129), (Signal::INT, 130), (Signal::QUIT, 131)]
    {
        expect_end(&server, code, |top| top.signal(signal));
    }
}

/// A child that is killed on drop.
struct KillOnDrop(Box<dyn Child + Send + Sync>);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        if let Ok(None) = self.0.try_wait() {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

/// Reads from a terminal until it shows this text, and then closes it.
fn read_until(mut terminal: impl Read + Send + 'static, text: &'static str) -> mpsc::Receiver<()> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let (mut shown, mut piece) = (String::new(), [0; 4096]);
        while !shown.contains(text) {
            match terminal.read(&mut piece) {
                Ok(read @ 1..) => shown.push_str(&String::from_utf8_lossy(&piece[..read])),
                _ => return,
            }
        }
        drop(terminal);
        let _ = sender.send(());
    });
    receiver
}

/// As when the terminal window is closed or an SSH connection breaks.
///
/// Fault: N89
#[test]
fn top_ends_with_its_terminal() {
    let server = RedisServer::start();
    let pair = native_pty_system().openpty(PtySize::default()).unwrap();
    let mut command = CommandBuilder::new(env!("CARGO_BIN_EXE_distlock"));
    command.args(["top", "--url", &server.url()]);
    command.env("TERM", "xterm-256color");
    let watchdog = Watchdog::start();
    let mut top = KillOnDrop(pair.slave.spawn_command(command).unwrap());
    watchdog.guard(top.0.process_id().unwrap());
    drop(pair.slave);
    let shown = read_until(pair.master.try_clone_reader().unwrap(), "no locks are held");
    shown.recv_timeout(TEST_TIMEOUT).expect("the table is not shown");
    drop(pair.master);
    let mut code = None;
    eventually("top ends", TEST_TIMEOUT, || {
        code = top.0.try_wait().unwrap().map(|status| status.exit_code());
        code.is_some()
    });
    // It ends by SIGHUP or because the terminal cannot be used, whichever comes first, but not by a
    // panic.
    assert!(matches!(code, Some(129 | 126)), "{code:?}");
}

#[test]
fn top_ends_while_server_hangs() {
    let server = RedisServer::start();
    let mut top = Pty::start(
        100,
        24,
        &["top", "--url", &server.url(), "--interval", "100ms", "--timeout", "60s"],
    );
    top.wait_shown("no locks are held");
    server.stop();
    top.wait_gone("polled 0s ago");
    top.signal(Signal::TERM);
    assert_eq!(top.exit_code(), 143);
    assert!(top.is_restored());
    server.cont();
}

/// The shell continues the job after each line it reads.
///
/// Fault: N105
#[test]
fn suspended_top_restores_terminal_and_resumes() {
    let server = RedisServer::start();
    let mut shell = CommandBuilder::new("sh");
    let url = server.url();
    let program = env!("CARGO_BIN_EXE_distlock");
    shell.args([
        "-c",
        "set -m; sh -c 'echo \"pid=$$.\"; exec \"$@\"' sh \"$@\"; read -r x; fg; read -r x; fg; \
         read -r x; fg",
    ]);
    shell.args(["sh", program, "top", "--url", &url, "--interval", "100ms"]);
    reset_ignored(Signal::TSTP);
    let mut top = Pty::run(100, 24, shell, &[]);
    top.wait_shown("no locks are held");
    let transcript = top.transcript();
    let pid: i32 = transcript
        .split(['=', '.'])
        .nth(1)
        .and_then(|pid| pid.parse().ok())
        .unwrap_or_else(|| panic!("{transcript:?}"));
    for round in 0..3 {
        if round == 1 {
            kill_process(Pid::from_raw(pid).unwrap(), Signal::TSTP).unwrap();
        } else {
            top.press("\x1a")
        }
        eventually("top is stopped", TEST_TIMEOUT, || {
            process_state(pid.unsigned_abs()) == Some('T')
        });
        eventually("the terminal is restored", TEST_TIMEOUT, || top.is_restored());
        top.press("\n");
        top.wait_shown("no locks are held");
        eventually("the terminal is taken over", TEST_TIMEOUT, || top.is_taken_over());
    }
    top.press("q");
    assert_eq!(top.exit_code(), 0);
    assert!(top.is_restored());
}

/// As in a container without a shell, where nothing would continue it.
///
/// Fault: N105
#[test]
fn top_without_job_control_is_not_suspended() {
    let server = RedisServer::start();
    reset_ignored(Signal::TSTP);
    let mut top = top(&server);
    top.wait_shown("no locks are held");
    top.press("\x1a");
    top.signal(Signal::TSTP);
    assert!(set_foreign_lock(&server, "lock:later", "a client", 600_000));
    top.wait_shown("later");
    top.press("q");
    assert_eq!(top.exit_code(), 0);
    assert_eq!(top.transcript().matches("\x1b[?1049h").count(), 1, "top left the screen");
}

#[test]
fn invalid_arguments_are_reported_on_restored_terminal() {
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
        assert_eq!(top.exit_code(), 64, "{}", top.screen());
        assert!(top.is_restored() && top.screen().contains(part), "{}", top.screen());
    }
}

#[test]
fn top_without_terminal_suggests_ls() {
    let server = RedisServer::start();
    let ended = run_to_end(distlock(&["top", "--url", &server.url()])).expect_code(64);
    assert!(ended.out.is_empty() && ended.err.starts_with("distlock: "), "{ended:?}");
    assert!(ended.err.contains("terminal") && ended.err.contains("distlock ls"), "{ended:?}");
}

#[test]
fn log_does_not_spoil_screen() {
    let server = RedisServer::start();
    let args = ["top", "--url", &server.url(), "--interval", "100ms"];
    let top = Pty::start_with(100, 24, &args, &[("DISTLOCK_LOG", "trace")]);
    top.wait_shown("no locks are held");
    server.kill();
    top.wait_shown("NO REPLY for");
    top.wait_gone(" 0s");
    let transcript = top.transcript();
    assert!(
        !["TRACE", "DEBUG", "WARN", "INFO"].iter().any(|level| transcript.contains(level)),
        "{}",
        top.screen()
    );
}
