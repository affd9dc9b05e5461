//! The command in a pseudo-terminal, and its screen.

use std::{
    io::{Read as _, Write},
    num::NonZeroU16,
    sync::{Arc, atomic::AtomicBool},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use portable_pty::{Child, CommandBuilder, MasterPty, PtySize, native_pty_system};
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::flag;

use crate::support::{TEST_TIMEOUT, Watchdog, eventually};

/// A command and its terminal. The command is killed on drop, and if the test process dies.
pub(crate) struct Pty {
    master: Box<dyn MasterPty + Send>,
    input: Box<dyn Write + Send>,
    child: Box<dyn Child + Send + Sync>,
    terminal: Arc<Mutex<Terminal>>,
    /// The terminal's settings before the command started, as text.
    settings_before: String,
    reader: Option<JoinHandle<()>>,
    _watchdog: Watchdog,
}

struct Terminal {
    parser: vt100::Parser,
    transcript: Vec<u8>,
}

impl Pty {
    /// Runs `distlock` in a terminal of this size.
    pub(crate) fn start(columns: u16, lines: u16, args: &[&str]) -> Pty {
        Pty::start_with(columns, lines, args, &[])
    }

    pub(crate) fn start_with(columns: u16, lines: u16, args: &[&str], env: &[(&str, &str)]) -> Pty {
        let mut command = CommandBuilder::new(env!("CARGO_BIN_EXE_distlock"));
        command.args(args);
        Pty::run(columns, lines, command, env)
    }

    /// Runs another command, which runs `distlock`.
    pub(crate) fn run(
        columns: u16,
        lines: u16,
        mut command: CommandBuilder,
        env: &[(&str, &str)],
    ) -> Pty {
        let pair = native_pty_system().openpty(size(columns, lines)).expect("no pseudo-terminal");
        for name in [
            "DISTLOCK_URL",
            "REDIS_URL",
            "DISTLOCK_PREFIX",
            "DISTLOCK_QUARANTINE",
            "DISTLOCK_PASSWORD_FILE",
            "NO_COLOR",
        ] {
            command.env_remove(name);
        }
        command.env("TERM", "xterm-256color");
        env.iter().for_each(|(name, value)| command.env(name, value));
        let settings_before = settings(&*pair.master);
        let watchdog = Watchdog::start();
        let child = pair.slave.spawn_command(command).expect("cannot run the command");
        watchdog.guard(child.process_id().expect("it has a pid"));
        let terminal = Terminal {
            parser: vt100::Parser::new(cells(lines), cells(columns), 0),
            transcript: Vec::new(),
        };
        let terminal = Arc::new(Mutex::new(terminal));
        let mut output = pair.master.try_clone_reader().expect("the terminal cannot be read");
        let shown = terminal.clone();
        let reader = thread::spawn(move || {
            let mut bytes = [0; 4096];
            // On Linux, reading fails at the end.
            while let Ok(read @ 1..) = output.read(&mut bytes) {
                let mut shown = shown.lock();
                shown.parser.process(&bytes[..read]);
                shown.transcript.extend_from_slice(&bytes[..read]);
            }
        });
        let input = pair.master.take_writer().expect("the terminal cannot be written to");
        Pty {
            master: pair.master,
            input,
            child,
            terminal,
            settings_before,
            reader: Some(reader),
            _watchdog: watchdog,
        }
    }

    #[track_caller]
    pub(crate) fn press(&mut self, keys: &str) {
        let sent = self.input.write_all(keys.as_bytes()).and_then(|()| self.input.flush());
        sent.expect("the terminal takes no keys");
    }

    pub(crate) fn screen(&self) -> String {
        self.on_screen(vt100::Screen::contents)
    }

    pub(crate) fn on_screen<T>(&self, read: impl FnOnce(&vt100::Screen) -> T) -> T {
        read(self.terminal.lock().parser.screen())
    }

    /// Everything that was written to the terminal.
    pub(crate) fn transcript(&self) -> String {
        String::from_utf8_lossy(&self.terminal.lock().transcript).into_owned()
    }

    /// Waits until the screen meets the condition.
    #[track_caller]
    #[expect(clippy::disallowed_methods, reason = "no test outlives a suspended machine")]
    pub(crate) fn wait_until(&self, what: &str, is_met: impl Fn(&str) -> bool) -> String {
        let started = Instant::now();
        loop {
            let screen = self.screen();
            if is_met(&screen) {
                return screen;
            }
            assert!(started.elapsed() < TEST_TIMEOUT, "never {what}:\n{screen}\n");
            thread::sleep(Duration::from_millis(3));
        }
    }

    #[track_caller]
    pub(crate) fn wait_shown(&self, text: &str) -> String {
        self.wait_until(&format!("shown: {text:?}"), |screen| screen.contains(text))
    }

    #[track_caller]
    pub(crate) fn wait_gone(&self, text: &str) -> String {
        self.wait_until(&format!("gone: {text:?}"), |screen| !screen.contains(text))
    }

    /// The selected row of the table.
    pub(crate) fn selected_row(&self) -> String {
        self.on_screen(|screen| {
            let (_, columns) = screen.size();
            let inverse =
                |row: usize| screen.cell(row as u16, 0).is_some_and(|cell| cell.inverse());
            screen
                .rows(0, columns.get())
                .enumerate()
                .find(|(row, _)| inverse(*row))
                .map_or_else(String::new, |(_, row)| row)
        })
    }

    pub(crate) fn resize(&self, columns: u16, lines: u16) {
        // Locked, so that no output for the new size is parsed before the parser has that size.
        let mut terminal = self.terminal.lock();
        terminal.parser = vt100::Parser::new(cells(lines), cells(columns), 0);
        self.master.resize(size(columns, lines)).expect("the terminal keeps its size");
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).expect("the command cannot be signalled");
    }

    fn pid(&self) -> Pid {
        let pid =
            self.child.process_id().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
        pid.expect("it has a pid")
    }

    /// Waits for the command's end, reads the rest of its output, and returns its exit code.
    #[track_caller]
    pub(crate) fn exit_code(&mut self) -> u32 {
        let mut status = None;
        eventually("the command ends", TEST_TIMEOUT, || {
            status = self.child.try_wait().expect("cannot wait for the command");
            status.is_some()
        });
        if let Some(reader) = self.reader.take() {
            reader.join().expect("the reader has died");
        }
        status.map_or(0, |status| status.exit_code())
    }

    /// Whether the terminal is as it was before the command started.
    pub(crate) fn is_restored(&self) -> bool {
        self.has_settings_restored()
            && self.on_screen(|screen| {
                !screen.alternate_screen() && !screen.hide_cursor() && !screen.bracketed_paste()
            })
    }

    /// Whether the terminal's settings are, such as raw mode.
    pub(crate) fn has_settings_restored(&self) -> bool {
        settings(&*self.master) == self.settings_before
    }

    /// Whether the command has taken over the terminal.
    pub(crate) fn is_taken_over(&self) -> bool {
        settings(&*self.master) != self.settings_before
            && self.on_screen(|screen| {
                screen.alternate_screen() && screen.hide_cursor() && screen.bracketed_paste()
            })
    }
}

impl Drop for Pty {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Makes sure that processes started by this test do not ignore the signal, which the test process
/// may have been started with. A signal that has a handler is reset in a new program, and this
/// handler does what the default would do.
pub(crate) fn reset_ignored(signal: Signal) {
    let always = Arc::new(AtomicBool::new(true));
    flag::register_conditional_default(signal.as_raw(), always).expect("no handler for a signal");
}

fn size(columns: u16, lines: u16) -> PtySize {
    PtySize { rows: lines, cols: columns, pixel_width: 0, pixel_height: 0 }
}

fn cells(number: u16) -> NonZeroU16 {
    NonZeroU16::new(number).expect("a screen has cells")
}

fn settings(master: &dyn MasterPty) -> String {
    format!("{:?}", master.get_termios().expect("a terminal has settings"))
}
