//! `Course`: how a command under a lock comes to its end, and with which exit code. Pure: events and times come in, signals
//! for the command's process group go out.

use std::time::Duration;

use rustix::process::Signal;

use crate::exit::Exit;

/// From the start of the command until nothing of its process group is left. Times are those of one clock.
#[derive(Debug)]
pub(super) struct Course {
    /// For what need not be over at a certain time.
    grace: Duration,
    /// When the command will have run for too long.
    limit_at: Option<Duration>,
    /// How the command itself has ended, if it has.
    ended: Option<Exit>,
    verdict: Verdict,
    ending: Ending,
    /// Its lock is lost or will be, and all has been done about that.
    is_doomed: bool,
}

/// What the exit code will be about; later ones outweigh earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Verdict {
    Own,
    TooLong,
    Lost,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    NotYet,
    Asked { kill_at: Duration },
    Killed,
}

/// Asks a group to end. One that is stopped could not hear it.
const ASK: &[Signal] = &[Signal::TERM, Signal::CONT];
const KILL: &[Signal] = &[Signal::KILL];

impl Course {
    pub(super) fn new(grace: Duration, limit_at: Option<Duration>) -> Course {
        Course { grace, limit_at, ended: None, verdict: Verdict::Own, ending: Ending::NotYet, is_doomed: false }
    }

    /// The lock is lost. What is still there has to go, and to be gone then.
    pub(super) fn lost(&mut self, kill_at: Duration) -> &'static [Signal] {
        self.verdict = Verdict::Lost;
        self.is_doomed = true;
        self.ask(kill_at)
    }

    /// The lock is about to run out. A command that has ended before has not lost it.
    pub(super) fn runs_out(&mut self, kill_at: Duration) -> &'static [Signal] {
        if self.ended.is_none() {
            return self.lost(kill_at);
        }
        self.is_doomed = true;
        self.ask(kill_at)
    }

    /// The command has ended.
    pub(super) fn ended(&mut self, how: Exit) {
        self.ended = Some(how);
    }

    /// It has left something behind in its group, which has to go too.
    pub(super) fn leftovers(&mut self, now: Duration) -> &'static [Signal] {
        self.ask(now.saturating_add(self.grace))
    }

    /// Time has passed.
    pub(super) fn tick(&mut self, now: Duration) -> &'static [Signal] {
        if self.ended.is_none() && self.limit_at.is_some_and(|at| now >= at) {
            self.limit_at = None;
            self.verdict = self.verdict.max(Verdict::TooLong);
            return self.ask(now.saturating_add(self.grace));
        }
        match self.ending {
            Ending::Asked { kill_at } if now >= kill_at => {
                self.ending = Ending::Killed;
                KILL
            }
            _ => &[],
        }
    }

    /// When [`tick`](Self::tick) has something to do.
    pub(super) fn next(&self) -> Option<Duration> {
        let kill_at = match self.ending {
            Ending::Asked { kill_at } => Some(kill_at),
            Ending::NotYet | Ending::Killed => None,
        };
        let limit_at = self.limit_at.filter(|_| self.ended.is_none());
        limit_at.into_iter().chain(kill_at).min()
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended.is_some()
    }

    pub(super) fn is_too_long(&self) -> bool {
        self.verdict == Verdict::TooLong
    }

    pub(super) fn is_lost(&self) -> bool {
        self.verdict == Verdict::Lost
    }

    pub(super) fn is_doomed(&self) -> bool {
        self.is_doomed
    }

    /// The exit code, once all is over.
    pub(super) fn exit(&self) -> Exit {
        match self.verdict {
            Verdict::Lost => Exit::Lost,
            Verdict::TooLong => Exit::TooLong,
            Verdict::Own => self.ended.unwrap_or(Exit::CannotRun),
        }
    }

    /// Once. Of several times to kill it the first counts.
    fn ask(&mut self, kill_at: Duration) -> &'static [Signal] {
        match &mut self.ending {
            Ending::NotYet => {
                self.ending = Ending::Asked { kill_at };
                ASK
            }
            Ending::Asked { kill_at: before } => {
                *before = kill_at.min(*before);
                &[]
            }
            Ending::Killed => &[],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn course(limit_at: Option<u64>) -> Course {
        Course::new(at(5), limit_at.map(at))
    }

    #[test]
    fn a_command_that_ends_gives_its_own_code() {
        let mut course = course(Some(50));
        assert_eq!((course.tick(at(1)), course.next()), (&[][..], Some(at(50))));
        course.ended(Exit::Code(7));
        assert_eq!(course.leftovers(at(10)), ASK);
        assert_eq!(course.leftovers(at(11)), &[], "once");
        assert_eq!(course.next(), Some(at(15)), "what it left behind has the grace period");
        assert_eq!(course.tick(at(14)), &[]);
        assert_eq!(course.tick(at(15)), KILL);
        assert_eq!((course.tick(at(60)), course.next()), (&[][..], None));
        assert_eq!(course.exit(), Exit::Code(7));
    }

    #[test]
    fn a_lost_lock_outweighs_everything() {
        let mut course = course(Some(3));
        assert_eq!(course.tick(at(3)), ASK);
        assert!(course.is_too_long());
        assert_eq!(course.lost(at(9)), &[], "it was asked already");
        course.ended(Exit::Code(0));
        assert_eq!(course.leftovers(at(5)), &[]);
        assert_eq!(course.tick(at(8)), KILL, "the grace period began when it was asked first");
        assert_eq!(course.exit(), Exit::Lost);
    }

    #[test]
    fn a_lock_that_runs_out_shortens_the_grace_period() {
        let mut course = course(Some(3));
        assert_eq!(course.tick(at(3)), ASK);
        assert_eq!(course.runs_out(at(6)), &[], "it was asked already");
        assert_eq!((course.next(), course.tick(at(6))), (Some(at(6)), KILL));
        assert!(course.is_doomed());
        course.ended(Exit::Signal(9));
        assert_eq!(course.exit(), Exit::Lost);
    }

    #[test]
    fn a_command_that_ends_before_its_lock_runs_out_has_not_lost_it() {
        let mut course = course(None);
        course.ended(Exit::Code(0));
        assert_eq!(course.leftovers(at(1)), ASK);
        assert_eq!(course.runs_out(at(2)), &[]);
        assert_eq!(course.tick(at(2)), KILL);
        assert_eq!((course.exit(), course.is_doomed()), (Exit::Code(0), true));
    }

    #[test]
    fn a_limit_that_passes_after_the_end_is_none() {
        let mut course = course(Some(11));
        course.ended(Exit::Code(0));
        assert_eq!(course.tick(at(12)), &[]);
        assert_eq!(course.exit(), Exit::Code(0));
    }

    #[test]
    fn a_command_that_ran_too_long_is_told_so_whatever_it_says() {
        let mut course = course(Some(3));
        course.tick(at(3));
        course.ended(Exit::Signal(15));
        assert_eq!(course.exit(), Exit::TooLong);
    }

    #[test]
    fn what_has_no_time_is_killed_at_once() {
        let mut course = course(None);
        assert_eq!(course.lost(at(1)), ASK, "whatever it would have had");
        assert_eq!(course.tick(at(1)), KILL);
    }
}
