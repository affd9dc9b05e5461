//! A command in a terminal of its own, without a shell.

use std::io::Write;

use portable_pty::{Child, CommandBuilder, ExitStatus, PtyPair, PtySize, native_pty_system};

use super::Fixture;
use crate::support::{TEST_TIMEOUT, Watchdog, eventually_some};

pub(super) struct Alone {
    _terminal: PtyPair,
    keys: Box<dyn Write + Send>,
    child: Box<dyn Child + Send + Sync>,
    _watchdog: Watchdog,
}

impl Alone {
    pub(super) fn start(fixture: &Fixture, mut command: CommandBuilder) -> Alone {
        let terminal = native_pty_system().openpty(PtySize::default()).expect("no pseudo-terminal");
        for (name, value) in fixture.environment() {
            command.env(name, value);
        }
        let watchdog = Watchdog::start();
        let child = terminal.slave.spawn_command(command).expect("cannot run the command");
        watchdog.guard(child.process_id().expect("it has a pid"));
        let keys = terminal.master.take_writer().expect("the terminal cannot be written to");
        Alone { _terminal: terminal, keys, child, _watchdog: watchdog }
    }

    #[track_caller]
    pub(super) fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).expect("the terminal takes no keys");
    }

    #[track_caller]
    pub(super) fn end(&mut self) -> ExitStatus {
        eventually_some("the command ends", TEST_TIMEOUT, || {
            self.child.try_wait().expect("cannot wait")
        })
    }
}
