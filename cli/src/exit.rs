//! `Exit`: how the command ends, as a number. `Failure`: the same with a sentence.
//!
//! The numbers are those of `sysexits.h` where it has one, and of `timeout`, `env` and shells for what happens to a child.

use std::process::ExitCode;

use distlock::LockError;

/// How the command ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// It did what was asked.
    Fine,
    /// The answer is no: nobody holds the lock, nothing was released, the doctor found problems.
    No,
    /// The arguments, the environment or a file of the user's cannot work (EX_USAGE).
    Usage,
    /// The servers could not be reached, did not agree, or refused (EX_UNAVAILABLE).
    Unavailable,
    /// Somebody else holds the lock (EX_TEMPFAIL: try again later).
    NotAcquired,
    /// The lock was lost, or could not be renewed in time, while the command ran (EX_PROTOCOL).
    Lost,
    /// The command under the lock ran for longer than `--max-hold`; as `timeout` has it.
    TooLong,
    /// The command could not be started; as shells have it.
    CannotRun,
    /// The command is not there; as shells have it.
    NotFound,
    /// The command's own exit code.
    Code(u8),
    /// The command, or this one while it waited, was ended by a signal: 128 and its number, as shells have it.
    Signal(u8),
}

impl Exit {
    pub(crate) fn code(self) -> u8 {
        match self {
            Exit::Fine => 0,
            Exit::No => 1,
            Exit::Usage => 64,
            Exit::Unavailable => 69,
            Exit::NotAcquired => 75,
            Exit::Lost => 76,
            Exit::TooLong => 124,
            Exit::CannotRun => 126,
            Exit::NotFound => 127,
            Exit::Code(code) => code,
            Exit::Signal(signal) => 128u8.saturating_add(signal),
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> ExitCode {
        exit.code().into()
    }
}

/// Why the command ends early, as a sentence for standard error.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) exit: Exit,
    pub(crate) message: String,
}

pub(crate) type Outcome = Result<Exit, Failure>;

impl Failure {
    pub(crate) fn new(exit: Exit, message: impl Into<String>) -> Failure {
        Failure { exit, message: message.into() }
    }

    pub(crate) fn usage(message: impl Into<String>) -> Failure {
        Failure::new(Exit::Usage, message)
    }
}

impl From<LockError> for Failure {
    fn from(error: LockError) -> Failure {
        let exit = if error.is_contended() {
            Exit::NotAcquired
        } else if error.is_invalid() {
            Exit::Usage
        } else if error.is_lost() {
            Exit::Lost
        } else {
            Exit::Unavailable
        };
        Failure::new(exit, error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_distinct_and_as_documented() {
        let all = [
            Exit::Fine,
            Exit::No,
            Exit::Usage,
            Exit::Unavailable,
            Exit::NotAcquired,
            Exit::Lost,
            Exit::TooLong,
            Exit::CannotRun,
            Exit::NotFound,
        ];
        assert_eq!(all.map(Exit::code), [0, 1, 64, 69, 75, 76, 124, 126, 127]);
        assert_eq!((Exit::Code(7).code(), Exit::Signal(15).code(), Exit::Signal(255).code()), (7, 143, 255));
    }
}
