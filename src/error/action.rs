//! `Action`: what a call was doing when it failed.

use std::fmt;

/// What a call was doing when it failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Action {
    /// Acquiring a lock.
    Acquire,
    /// Renewing a lock.
    Renew,
    /// Releasing a lock.
    Release,
    /// Reading the holder of a lock.
    Inspect,
    /// Checking that the server replies.
    Ping,
    /// Borrowing a connection from the pool.
    Connect,
    /// Creating the table of the locks. Only in MySQL and MariaDB.
    CreateTable,
    /// Deleting the rows of unused locks. Only in MySQL and MariaDB.
    Prune,
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Action::Acquire => "acquire",
            Action::Renew => "renew",
            Action::Release => "release",
            Action::Inspect => "inspect",
            Action::Ping => "ping",
            Action::Connect => "connect to",
            Action::CreateTable => "create the table at",
            Action::Prune => "delete unused rows at",
        })
    }
}
