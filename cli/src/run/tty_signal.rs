//! Ending this program after ^C or ^\ in a terminal.
//!
//! If distlock is a line of a script, the script should end too. Some shells continue with the next
//! line unless the signal killed the process they waited for: an exit code of 130 means to them
//! that the process has handled the signal.

use rustix::process::{
    Resource, Rlimit, Signal, getpid, getrlimit, kill_current_process_group, setrlimit,
};

use super::terminal::Terminal;
use crate::{exit::Exit, stderr_writer};

/// Where the signal came from that ended the command or the wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SignalOrigin {
    /// Not from a terminal, as far as can be known.
    NotTty,
    /// From the terminal, sent only to the command, which had its foreground.
    TtyToCommand,
    /// From the terminal, sent to the whole job that this process is part of.
    TtyToJob,
}

impl SignalOrigin {
    /// The origin of a signal that this process has just received.
    pub(super) fn of_received(terminal: Option<&Terminal>) -> SignalOrigin {
        if terminal.is_some_and(Terminal::is_foreground) {
            SignalOrigin::TtyToJob
        } else {
            SignalOrigin::NotTty
        }
    }
}

/// Ends this process by the terminal's signal if one ended the command or the wait. Otherwise
/// returns `exit`.
pub(super) fn exit_by_signal(exit: Exit, origin: SignalOrigin) -> Exit {
    let Exit::Signal(signal) = exit else { return exit };
    let from_key =
        [Signal::INT, Signal::QUIT].into_iter().find(|one| one.as_raw() == i32::from(signal));
    let Some(signal) = from_key.filter(|_| origin != SignalOrigin::NotTty) else { return exit };
    if origin == SignalOrigin::TtyToCommand {
        let _ = kill_current_process_group(signal);
    }
    // The first process of a container cannot end itself by a signal, and no script waits for it.
    if getpid().is_init() {
        return exit;
    }
    // The command may have left a core dump, which one of this process would overwrite.
    let _ = setrlimit(Resource::Core, Rlimit { current: Some(0), ..getrlimit(Resource::Core) });
    stderr_writer::flush(stderr_writer::EXIT_FLUSH_TIMEOUT);
    // Shells check whether a signal killed a process, not only its exit code.
    let _ = signal_hook::low_level::emulate_default_handler(signal.as_raw());
    exit
}
