//! `LockLost`: why a lease ended before its holder released it.

use std::{error::Error, fmt};

use super::holder::Holder;
/// Why a held lock was lost. Final: a lost lock stays lost.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LockLost {
    /// No renewal was confirmed in time, so the lease expired on the local clock: the server was
    /// unreachable, the process was paused, or renewal was off. Another client may hold the lock
    /// now.
    Expired,
    /// The server reports that another client holds the lock.
    #[non_exhaustive]
    Taken {
        /// The new holder.
        by: Box<Holder>,
    },
    /// The lock no longer exists on the server: it was released by force, deleted, flushed,
    /// evicted, renamed, or lost in a restart.
    Gone,
    /// The connection that held the lock was closed, and the server released the lock with it. The
    /// server has closed it, or the manager has, for example because the server had become
    /// read-only; the log says why. Only in MySQL and MariaDB.
    ConnectionLost,
    /// The lock was held for [`max_hold`](crate::LockOptions::max_hold). The manager reports that
    /// before it releases the lock, which can fail.
    MaxHold,
    /// The manager was shut down, which released the lock.
    Shutdown,
}

impl fmt::Display for LockLost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LockLost::Expired => f.write_str("its lease expired without a confirmed renewal"),
            LockLost::Taken { by } => write!(f, "it is now held by {by}"),
            LockLost::Gone => f.write_str(
                "it no longer exists on the server (released by force, deleted, evicted, or lost \
                 in a restart)",
            ),
            LockLost::ConnectionLost => f.write_str("the connection that held it was closed"),
            LockLost::MaxHold => f.write_str("it was held for the maximum time (max_hold)"),
            LockLost::Shutdown => f.write_str("its manager was shut down"),
        }
    }
}

impl Error for LockLost {}
