//! `Keyed`: whom ^C or ^\ of a terminal has ended, and how this program then ends itself.
//!
//! The script that we are a line of got it too, or has to. Some shells go on with the next line all the same, unless what
//! they waited for has died of it: an exit code of 130 tells them that somebody has taken care of it.

use rustix::process::{Resource, Rlimit, Signal, getpid, getrlimit, kill_current_process_group, setrlimit};

use super::terminal::Terminal;
use crate::{exit::Exit, voice};

/// To whom the terminal has sent the signal that ended the command or the wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keyed {
    /// It was not a terminal, as far as can be known.
    Nobody,
    /// To the command alone, which had the terminal to itself.
    Command,
    /// To our whole job, of which we are a part.
    Job,
}

impl Keyed {
    /// For a signal that we have heard just now.
    pub(super) fn heard_at(terminal: Option<&Terminal>) -> Keyed {
        if terminal.is_some_and(Terminal::is_ours) { Keyed::Job } else { Keyed::Nobody }
    }
}

pub(super) fn leave(exit: Exit, keyed: Keyed) -> Exit {
    let Exit::Signal(signal) = exit else { return exit };
    let of_key = [Signal::INT, Signal::QUIT].into_iter().find(|one| one.as_raw() == i32::from(signal));
    let Some(signal) = of_key.filter(|_| keyed != Keyed::Nobody) else { return exit };
    if keyed == Keyed::Command {
        let _ = kill_current_process_group(signal);
    }
    // The first process of a container dies of no signal that it sends itself, and no script waits for it there.
    if getpid().is_init() {
        return exit;
    }
    // The command may have left a core to look at; ours would only be in the way.
    let _ = setrlimit(Resource::Core, Rlimit { current: Some(0), ..getrlimit(Resource::Core) });
    voice::await_written(voice::LAST_WORDS);
    // Shells go by how we end, not only by the number.
    let _ = signal_hook::low_level::emulate_default_handler(signal.as_raw());
    exit
}
