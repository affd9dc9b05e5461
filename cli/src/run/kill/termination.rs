//! `Termination`: how a command under a lock ends, and with which exit code. Pure: events and times
//! come in, signals for the command's process group go out.

use std::time::Duration;

use rustix::process::Signal;

use crate::exit::Exit;

/// The state from the start of the command until nothing of its process group is left. All times
/// are of one clock.
#[derive(Debug)]
pub(in crate::run) struct Termination {
    /// Time between SIGTERM and SIGKILL where no deadline shortens it.
    grace: Duration,
    /// When the command will have run for longer than `--max-hold`.
    max_hold_at: Option<Duration>,
    /// How the command itself ended, if it has.
    exit_status: Option<Exit>,
    reason: ExitReason,
    kill_state: KillState,
    /// The lock is lost or expiring, and the group has been terminated for that reason.
    is_lock_ending: bool,
}

/// What determines the exit code. A later variant outweighs an earlier one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ExitReason {
    OwnExit,
    MaxHold,
    Lost,
}

/// Which signals the group has received from this program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KillState {
    Running,
    Terminating { kill_at: Duration },
    Killed,
}

/// Sent to end a group. A stopped process receives SIGTERM only after SIGCONT.
const TERMINATE: &[Signal] = &[Signal::TERM, Signal::CONT];
const KILL: &[Signal] = &[Signal::KILL];

impl Termination {
    pub(in crate::run) fn new(grace: Duration, max_hold_at: Option<Duration>) -> Termination {
        Termination {
            grace,
            max_hold_at,
            exit_status: None,
            reason: ExitReason::OwnExit,
            kill_state: KillState::Running,
            is_lock_ending: false,
        }
    }

    /// The lock is lost: the whole group must be gone by `kill_at`.
    pub(in crate::run) fn on_lost(&mut self, kill_at: Duration) -> &'static [Signal] {
        self.reason = ExitReason::Lost;
        self.is_lock_ending = true;
        self.terminate(kill_at)
    }

    /// The lock is about to expire. If the command has already ended, it has not lost the lock.
    pub(in crate::run) fn on_expiring(&mut self, kill_at: Duration) -> &'static [Signal] {
        if self.exit_status.is_none() {
            return self.on_lost(kill_at);
        }
        self.is_lock_ending = true;
        self.terminate(kill_at)
    }

    /// The command has ended.
    pub(in crate::run) fn on_exit(&mut self, exit: Exit) {
        self.exit_status = Some(exit);
    }

    /// The command has ended and left processes in its group, which must end too.
    pub(in crate::run) fn terminate_stragglers(&mut self, now: Duration) -> &'static [Signal] {
        self.terminate(now.saturating_add(self.grace))
    }

    /// Called as time passes.
    pub(in crate::run) fn on_tick(&mut self, now: Duration) -> &'static [Signal] {
        if self.exit_status.is_none() && self.max_hold_at.is_some_and(|at| now >= at) {
            self.max_hold_at = None;
            self.reason = self.reason.max(ExitReason::MaxHold);
            return self.terminate(now.saturating_add(self.grace));
        }
        match self.kill_state {
            KillState::Terminating { kill_at } if now >= kill_at => {
                self.kill_state = KillState::Killed;
                KILL
            }
            _ => &[],
        }
    }

    /// When [`on_tick`](Self::on_tick) will next have something to do.
    pub(in crate::run) fn next_deadline(&self) -> Option<Duration> {
        let kill_at = match self.kill_state {
            KillState::Terminating { kill_at } => Some(kill_at),
            KillState::Running | KillState::Killed => None,
        };
        let max_hold_at = self.max_hold_at.filter(|_| self.exit_status.is_none());
        max_hold_at.into_iter().chain(kill_at).min()
    }

    pub(in crate::run) fn has_exited(&self) -> bool {
        self.exit_status.is_some()
    }

    pub(in crate::run) fn is_over_max_hold(&self) -> bool {
        self.reason == ExitReason::MaxHold
    }

    pub(in crate::run) fn is_lost(&self) -> bool {
        self.reason == ExitReason::Lost
    }

    pub(in crate::run) fn is_lock_ending(&self) -> bool {
        self.is_lock_ending
    }

    /// The exit code, once the whole group is gone.
    pub(in crate::run) fn exit(&self) -> Exit {
        match self.reason {
            ExitReason::Lost => Exit::Lost,
            ExitReason::MaxHold => Exit::MaxHoldExceeded,
            ExitReason::OwnExit => self.exit_status.unwrap_or(Exit::CannotRun),
        }
    }

    /// Sends SIGTERM the first time only. Later calls can only bring SIGKILL forward.
    fn terminate(&mut self, kill_at: Duration) -> &'static [Signal] {
        match &mut self.kill_state {
            KillState::Running => {
                self.kill_state = KillState::Terminating { kill_at };
                TERMINATE
            }
            KillState::Terminating { kill_at: before } => {
                *before = kill_at.min(*before);
                &[]
            }
            KillState::Killed => &[],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn termination(max_hold_at: Option<u64>) -> Termination {
        Termination::new(at(5), max_hold_at.map(at))
    }

    #[test]
    fn finished_command_determines_exit_code() {
        let mut termination = termination(Some(50));
        assert_eq!(
            (termination.on_tick(at(1)), termination.next_deadline()),
            (&[][..], Some(at(50)))
        );
        termination.on_exit(Exit::Code(7));
        assert_eq!(termination.terminate_stragglers(at(10)), TERMINATE);
        assert_eq!(termination.terminate_stragglers(at(11)), &[], "once");
        assert_eq!(termination.next_deadline(), Some(at(15)), "stragglers have the grace period");
        assert_eq!(termination.on_tick(at(14)), &[]);
        assert_eq!(termination.on_tick(at(15)), KILL);
        assert_eq!((termination.on_tick(at(60)), termination.next_deadline()), (&[][..], None));
        assert_eq!(termination.exit(), Exit::Code(7));
    }

    #[test]
    fn lost_lock_outweighs_other_reasons() {
        let mut termination = termination(Some(3));
        assert_eq!(termination.on_tick(at(3)), TERMINATE);
        assert!(termination.is_over_max_hold());
        assert_eq!(termination.on_lost(at(9)), &[], "SIGTERM was sent already");
        termination.on_exit(Exit::Code(0));
        assert_eq!(termination.terminate_stragglers(at(5)), &[]);
        assert_eq!(termination.on_tick(at(8)), KILL, "the grace period began with SIGTERM");
        assert_eq!(termination.exit(), Exit::Lost);
    }

    #[test]
    fn expiring_lock_shortens_grace_period() {
        let mut termination = termination(Some(3));
        assert_eq!(termination.on_tick(at(3)), TERMINATE);
        assert_eq!(termination.on_expiring(at(6)), &[], "SIGTERM was sent already");
        assert_eq!((termination.next_deadline(), termination.on_tick(at(6))), (Some(at(6)), KILL));
        assert!(termination.is_lock_ending());
        termination.on_exit(Exit::Signal(9));
        assert_eq!(termination.exit(), Exit::Lost);
    }

    #[test]
    fn command_that_ended_before_expiry_has_not_lost_lock() {
        let mut termination = termination(None);
        termination.on_exit(Exit::Code(0));
        assert_eq!(termination.terminate_stragglers(at(1)), TERMINATE);
        assert_eq!(termination.on_expiring(at(2)), &[]);
        assert_eq!(termination.on_tick(at(2)), KILL);
        assert_eq!((termination.exit(), termination.is_lock_ending()), (Exit::Code(0), true));
    }

    #[test]
    fn max_hold_after_end_is_ignored() {
        let mut termination = termination(Some(11));
        termination.on_exit(Exit::Code(0));
        assert_eq!(termination.on_tick(at(12)), &[]);
        assert_eq!(termination.exit(), Exit::Code(0));
    }

    #[test]
    fn max_hold_outweighs_exit_of_command() {
        let mut termination = termination(Some(3));
        termination.on_tick(at(3));
        termination.on_exit(Exit::Signal(15));
        assert_eq!(termination.exit(), Exit::MaxHoldExceeded);
    }

    #[test]
    fn command_without_grace_is_killed_at_once() {
        let mut termination = termination(None);
        assert_eq!(termination.on_lost(at(1)), TERMINATE, "whatever the grace period");
        assert_eq!(termination.on_tick(at(1)), KILL);
    }
}
