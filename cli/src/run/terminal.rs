//! The terminal: which process group has its foreground, and what to do if the command stops.
//!
//! A terminal sends ^C and ^Z to the process group in its foreground, and stops other groups that
//! read from it. The command has a group of its own, so it is given the foreground like a job of a
//! shell.

use std::{
    fs::File,
    io::{self, IsTerminal as _},
};

use nix::{
    sys::signal::{SigSet, SigmaskHow, Signal as Masked},
    unistd::{Pid as AnyPid, getpgrp, tcgetpgrp, tcsetpgrp},
};
use rustix::process::{Pid, Signal};

use super::kill::ProcessGroup;
use crate::job_control::{has_job_control_parent, nonzero_pid};

/// The controlling terminal of this process.
#[derive(Debug)]
pub(super) struct Terminal {
    file: File,
    /// The group that this process has given the foreground to.
    given_to: Option<ProcessGroup>,
    /// Whether to give the command the foreground once this process has it again.
    give_on_resume: bool,
}

/// What to do if the command has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StopReaction {
    /// Give it the terminal, which it wants to use.
    GiveTerminal,
    /// Stop this process too, until the shell continues the job.
    StopToo,
    /// Continue the command, because no shell could. A terminal does not stop such processes
    /// either.
    Continue,
    /// Do nothing. The stop has nothing to do with the terminal, or cannot be helped.
    Ignore,
}

impl Terminal {
    pub(super) fn open() -> Option<Terminal> {
        let file = File::open("/dev/tty").ok()?;
        Some(Terminal { file, given_to: None, give_on_resume: false })
    }

    /// Whether to give the command the foreground from the start. If its input or output is a pipe
    /// or file, it may be one of several processes that share the terminal, such as before a pager.
    /// Then it is given the foreground when it stops for it.
    pub(super) fn should_give_at_start(&self) -> bool {
        io::stdin().is_terminal() && io::stdout().is_terminal() && self.is_foreground()
    }

    /// Whether our process group has the foreground. False if our group's leader is outside of our
    /// container, because the group is then unknown.
    pub(super) fn is_foreground(&self) -> bool {
        own_group().is_some_and(|group| self.foreground() == Some(group))
    }

    fn foreground(&self) -> Option<Pid> {
        nonzero_pid(tcgetpgrp(&self.file).ok()?)
    }

    pub(super) fn give_to(&mut self, group: ProcessGroup) {
        if self.set_foreground(group.0) {
            self.given_to = Some(group);
        }
        self.give_on_resume = false;
    }

    /// Gives the command the foreground, if it has waited for that and this process has it.
    pub(super) fn give_if_wanted(&mut self, group: ProcessGroup) {
        if self.give_on_resume && self.is_foreground() {
            self.give_to(group);
        }
    }

    /// Takes the foreground from the command, unless another group has it by now. If the command
    /// was a shell, it may have left the foreground with a job that has ended.
    pub(super) fn reclaim(&mut self) -> bool {
        let (Some(group), Some(foreground)) = (self.given_to.take(), self.foreground()) else {
            return false;
        };
        (foreground == group.0 || !ProcessGroup(foreground).is_alive())
            && own_group().is_some_and(|group| self.set_foreground(group))
    }

    fn set_foreground(&self, group: Pid) -> bool {
        match tcsetpgrp(&self.file, AnyPid::from_raw(group.as_raw_nonzero().get())) {
            Ok(()) => true,
            Err(error) => {
                log::debug!("cannot set the terminal's foreground group: {error}");
                false
            }
        }
    }

    /// Decides what to do about the command, which `signal` has stopped.
    pub(super) fn on_stopped(&mut self, signal: i32) -> StopReaction {
        let reaction = stop_reaction(
            signal,
            self.given_to.is_some(),
            self.is_foreground(),
            has_job_control_parent(),
        );
        if reaction == StopReaction::StopToo {
            self.give_on_resume = self.reclaim() || wants_terminal(signal);
        }
        reaction
    }
}

/// Whether this is the signal for processes that use the terminal without having its foreground.
pub(super) fn wants_terminal(signal: i32) -> bool {
    [Signal::TTIN, Signal::TTOU].into_iter().any(|one| signal == one.as_raw())
}

fn stop_reaction(signal: i32, given: bool, is_foreground: bool, has_parent: bool) -> StopReaction {
    let is = |one: Signal| signal == one.as_raw();
    if wants_terminal(signal) && is_foreground {
        return StopReaction::GiveTerminal;
    }
    let by_terminal = given || wants_terminal(signal) || (is(Signal::TSTP) && is_foreground);
    match (by_terminal, has_parent) {
        (true, true) => StopReaction::StopToo,
        (true, false) if is(Signal::TSTP) => StopReaction::Continue,
        _ => StopReaction::Ignore,
    }
}

fn own_group() -> Option<Pid> {
    nonzero_pid(getpgrp())
}

/// Blocks SIGTTOU, by which a terminal stops processes that write to it or set its foreground
/// without having it. That must not happen to a process that supervises a command.
#[derive(Debug)]
pub(super) struct SigttouBlocked {
    before: SigSet,
}

impl SigttouBlocked {
    /// Blocks the signal for the calling thread, and for the threads and processes it starts from
    /// now on.
    pub(super) fn block() -> nix::Result<SigttouBlocked> {
        let mut output = SigSet::empty();
        output.add(Masked::SIGTTOU);
        Ok(SigttouBlocked { before: output.thread_swap_mask(SigmaskHow::SIG_BLOCK)? })
    }

    /// Calls `start`, which starts a process, with the original mask.
    pub(super) fn unblocked_during<T>(&self, start: impl FnOnce() -> T) -> nix::Result<T> {
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
    fn reaction_to_stop_depends_on_terminal_and_parent() {
        let [tstp, ttin, stop] = [Signal::TSTP, Signal::TTIN, Signal::STOP].map(Signal::as_raw);
        for (signal, given, is_foreground, has_parent, reaction) in [
            (tstp, true, false, true, StopReaction::StopToo),
            (stop, true, false, true, StopReaction::StopToo),
            (tstp, false, true, true, StopReaction::StopToo),
            (ttin, false, true, true, StopReaction::GiveTerminal),
            (ttin, false, true, false, StopReaction::GiveTerminal),
            (ttin, false, false, true, StopReaction::StopToo),
            (ttin, false, false, false, StopReaction::Ignore),
            (tstp, true, false, false, StopReaction::Continue),
            (tstp, false, true, false, StopReaction::Continue),
            (stop, true, false, false, StopReaction::Ignore),
            (stop, false, true, true, StopReaction::Ignore),
            (tstp, false, false, true, StopReaction::Ignore),
        ] {
            assert_eq!(
                stop_reaction(signal, given, is_foreground, has_parent),
                reaction,
                "{signal} {given} {is_foreground} {has_parent}"
            );
        }
    }
}
