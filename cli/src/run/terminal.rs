//! The terminal: who in it has the foreground, and what a command that stops there means.
//!
//! A terminal sends ^C and ^Z to the process group in its foreground, and stops those in the background that read from
//! it. The command has a group of its own, so it is given the foreground, like a job of a shell.

use std::{
    fs::File,
    io::{self, IsTerminal as _},
};

use nix::{
    sys::signal::{SigSet, SigmaskHow, Signal as Masked},
    unistd::{Pid as AnyPid, getpgrp, tcgetpgrp, tcsetpgrp},
};
use rustix::process::{Pid, Signal};

use super::process::Group;
use crate::job::{pid, somebody_could_wake_us};

/// The terminal that this process was started at.
#[derive(Debug)]
pub(super) struct Terminal {
    file: File,
    /// Who has the foreground by our doing.
    given_to: Option<Group>,
    /// The command wants the foreground as soon as we have it.
    wanted: bool,
}

/// What to do about a command that has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stopped {
    /// It wants the terminal, and can have it.
    GiveTerminal,
    /// Stop as well, until somebody lets us go on.
    StopToo,
    /// Nobody could let us go on; a terminal does not stop such processes.
    GoOn,
    /// Somebody's doing that has nothing to do with the terminal.
    LeaveIt,
}

impl Terminal {
    pub(super) fn open() -> Option<Terminal> {
        let file = File::open("/dev/tty").ok()?;
        Some(Terminal { file, given_to: None, wanted: false })
    }

    /// Whether the command gets the foreground right away. With a pipe or file on either side it may be one of several
    /// that share the terminal, such as before a pager; then it gets it when it wants it.
    pub(super) fn is_the_commands(&self) -> bool {
        io::stdin().is_terminal() && io::stdout().is_terminal() && self.is_ours()
    }

    /// Our process group has the foreground. In a container that was started without a group of its own this cannot be
    /// known.
    pub(super) fn is_ours(&self) -> bool {
        own_group().is_some_and(|group| self.foreground() == Some(group))
    }

    fn foreground(&self) -> Option<Pid> {
        pid(tcgetpgrp(&self.file).ok()?)
    }

    pub(super) fn give_to(&mut self, group: Group) {
        if self.put(group.0) {
            self.given_to = Some(group);
        }
        self.wanted = false;
    }

    /// Gives the foreground to the command if it wants it and we have it.
    pub(super) fn give_if_wanted(&mut self, group: Group) {
        if self.wanted && self.is_ours() {
            self.give_to(group);
        }
    }

    /// Takes the foreground back from the command, unless somebody else has it by now. A command that was a shell may have
    /// left it with a job of its own.
    pub(super) fn take_back(&mut self) -> bool {
        let (Some(group), Some(foreground)) = (self.given_to.take(), self.foreground()) else { return false };
        (foreground == group.0 || !Group(foreground).is_alive()) && own_group().is_some_and(|group| self.put(group))
    }

    fn put(&self, group: Pid) -> bool {
        match tcsetpgrp(&self.file, AnyPid::from_raw(group.as_raw_nonzero().get())) {
            Ok(()) => true,
            Err(error) => {
                log::debug!("the terminal's foreground stays where it is: {error}");
                false
            }
        }
    }

    /// The command has been stopped by `signal`.
    pub(super) fn stopped_by(&mut self, signal: i32) -> Stopped {
        let what = judge(signal, self.given_to.is_some(), self.is_ours(), somebody_could_wake_us());
        if what == Stopped::StopToo {
            self.wanted = self.take_back() || wants_terminal(signal);
        }
        what
    }
}

/// What a terminal stops those with in the background that want to read or write.
pub(super) fn wants_terminal(signal: i32) -> bool {
    [Signal::TTIN, Signal::TTOU].into_iter().any(|one| signal == one.as_raw())
}

fn judge(signal: i32, given: bool, ours: bool, wakeable: bool) -> Stopped {
    let is = |one: Signal| signal == one.as_raw();
    if wants_terminal(signal) && ours {
        return Stopped::GiveTerminal;
    }
    let of_terminal = given || wants_terminal(signal) || (is(Signal::TSTP) && ours);
    match (of_terminal, wakeable) {
        (true, true) => Stopped::StopToo,
        (true, false) if is(Signal::TSTP) => Stopped::GoOn,
        _ => Stopped::LeaveIt,
    }
}

fn own_group() -> Option<Pid> {
    pid(getpgrp())
}

/// Who writes to a terminal, or gives away its foreground, without having it, may be stopped by it. That must not happen to
/// one who watches over a command.
#[derive(Debug)]
pub(super) struct Unstoppable {
    before: SigSet,
}

impl Unstoppable {
    /// For the calling thread, and the threads and processes that it starts from now on.
    pub(super) fn begin() -> nix::Result<Unstoppable> {
        let mut output = SigSet::empty();
        output.add(Masked::SIGTTOU);
        Ok(Unstoppable { before: output.thread_swap_mask(SigmaskHow::SIG_BLOCK)? })
    }

    /// Starts a process that is to be as we were before.
    pub(super) fn except_for<T>(&self, start: impl FnOnce() -> T) -> nix::Result<T> {
        let mask = self.before.thread_swap_mask(SigmaskHow::SIG_SETMASK)?;
        let started = start();
        mask.thread_set_mask()?;
        Ok(started)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stops_at_a_terminal_stops_its_job() {
        let [tstp, ttin, stop] = [Signal::TSTP, Signal::TTIN, Signal::STOP].map(Signal::as_raw);
        for (signal, given, ours, wakeable, what) in [
            (tstp, true, false, true, Stopped::StopToo),
            (stop, true, false, true, Stopped::StopToo),
            (tstp, false, true, true, Stopped::StopToo),
            (ttin, false, true, true, Stopped::GiveTerminal),
            (ttin, false, true, false, Stopped::GiveTerminal),
            (ttin, false, false, true, Stopped::StopToo),
            (ttin, false, false, false, Stopped::LeaveIt),
            (tstp, true, false, false, Stopped::GoOn),
            (tstp, false, true, false, Stopped::GoOn),
            (stop, true, false, false, Stopped::LeaveIt),
            (stop, false, true, true, Stopped::LeaveIt),
            (tstp, false, false, true, Stopped::LeaveIt),
        ] {
            assert_eq!(judge(signal, given, ours, wakeable), what, "{signal} {given} {ours} {wakeable}");
        }
    }
}
