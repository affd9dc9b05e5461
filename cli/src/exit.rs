//! `Exit`: how the program ends. `Failure`: the same, with a message.
//!
//! The exit codes come from `sysexits.h` where it defines one. For the end of the command under a
//! lock, they are those of `timeout`, `env` and shells.

use std::process::ExitCode;

use distlock::LockError;

/// How the program ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// The program did what the user asked for.
    Success,
    /// The result is negative: the lock is not held, nothing was released, or the doctor found
    /// problems.
    No,
    /// Invalid arguments, environment variable or input file (EX_USAGE).
    Usage,
    /// The servers are unreachable, do not agree, or refuse the request (EX_UNAVAILABLE).
    Unavailable,
    /// Another process holds the lock (EX_TEMPFAIL: try again later).
    NotAcquired,
    /// The lock was lost, or could not be renewed in time, while the command ran (EX_PROTOCOL).
    Lost,
    /// The command under the lock ran for longer than `--max-hold`; the code that `timeout` uses.
    MaxHoldExceeded,
    /// The command could not be started, or output could not be written; the code that shells use.
    CannotRun,
    /// The command was not found; the code that shells use.
    NotFound,
    /// The exit code of the command under the lock.
    Code(u8),
    /// A signal ended the command, or this program's wait for the lock: 128 plus its number, as in
    /// shells.
    Signal(u8),
}

impl Exit {
    pub(crate) fn code(self) -> u8 {
        match self {
            Exit::Success => 0,
            Exit::No => 1,
            Exit::Usage => 64,
            Exit::Unavailable => 69,
            Exit::NotAcquired => 75,
            Exit::Lost => 76,
            Exit::MaxHoldExceeded => 124,
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

/// Why the program ends early, as a message for standard error.
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
            Exit::Success,
            Exit::No,
            Exit::Usage,
            Exit::Unavailable,
            Exit::NotAcquired,
            Exit::Lost,
            Exit::MaxHoldExceeded,
            Exit::CannotRun,
            Exit::NotFound,
        ];
        assert_eq!(all.map(Exit::code), [0, 1, 64, 69, 75, 76, 124, 126, 127]);
        assert_eq!(
            (Exit::Code(7).code(), Exit::Signal(15).code(), Exit::Signal(255).code()),
            (7, 143, 255)
        );
    }
}
