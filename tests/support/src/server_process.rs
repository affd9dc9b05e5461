//! The process of a server that a test has started.

use std::process::{Child, Command, ExitStatus};

use rustix::process::{Pid, Signal, kill_process};

use super::watchdog::Watchdog;
use super::{TEST_TIMEOUT, eventually, process_state};

/// A server's process. It is killed when this is dropped, and also when the test process dies.
pub(crate) struct ServerProcess {
    child: Child,
    _watchdog: Watchdog,
}

impl ServerProcess {
    /// Runs a command that `watchdog` has made.
    pub(crate) fn spawn(command: &mut Command, watchdog: Watchdog) -> Self {
        Self { child: command.spawn().expect("cannot run sh"), _watchdog: watchdog }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// How the process ended, or `None` if it still runs.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("cannot wait for a child")
    }

    /// Freezes the process: its connections stay open, and it answers nothing.
    pub(crate) fn stop(&self) {
        self.signal(Signal::STOP);
        eventually("the server is stopped", TEST_TIMEOUT, || process_state(self.id()) == Some('T'));
    }

    pub(crate) fn cont(&self) {
        self.signal(Signal::CONT);
        eventually("the server runs again", TEST_TIMEOUT, || {
            process_state(self.id()).is_some_and(|state| state != 'T')
        });
    }

    /// Lets the process shut down in order, and waits until it has ended.
    pub(crate) fn terminate(mut self) {
        self.signal(Signal::TERM);
        eventually("the server has shut down", TEST_TIMEOUT, || self.ended().is_some());
    }

    fn signal(&self, signal: Signal) {
        // Only `ended` and `drop` reap the child, so the pid still belongs to it.
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).expect("cannot send a signal to the server");
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
