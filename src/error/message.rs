//! What each `LockError` says: what was tried, on which lock and server, what happened, and what to
//! do.

use std::fmt;

use super::{LockError, advice::advice};
use crate::{
    core::node_reply::ReplyList,
    sys::display::{HumanDuration, Quoted},
};

/// The variant and the message, because a `main` that returns the error prints this, and `unwrap`.
impl fmt::Debug for LockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {self}", self.variant())
    }
}

impl fmt::Display for LockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write_what_happened(f)?;
        if self.advice().is_empty() { Ok(()) } else { write!(f, "; {}", self.advice()) }
    }
}

impl LockError {
    fn variant(&self) -> &'static str {
        match self {
            LockError::Held { .. } => "Held",
            LockError::Timeout { .. } => "Timeout",
            LockError::Unavailable { .. } => "Unavailable",
            LockError::Tls { .. } => "Tls",
            LockError::PoolExhausted { .. } => "PoolExhausted",
            LockError::Refused { .. } => "Refused",
            LockError::NoQuorum { .. } => "NoQuorum",
            LockError::WrongType { .. } => "WrongType",
            LockError::InvalidName { .. } => "InvalidName",
            LockError::InvalidOptions { .. } => "InvalidOptions",
            LockError::InvalidConfig { .. } => "InvalidConfig",
            LockError::Lost { .. } => "Lost",
            LockError::AlreadyInitialized => "AlreadyInitialized",
            LockError::InitInProgress => "InitInProgress",
            LockError::WouldDeadlock { .. } => "WouldDeadlock",
            LockError::Cancelled { .. } => "Cancelled",
            LockError::Shutdown => "Shutdown",
            LockError::Forked => "Forked",
            LockError::NoThread { .. } => "NoThread",
        }
    }

    fn write_what_happened(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LockError::Held { name, holder, server } => {
                let held = holder.hold_clause();
                write!(f, "lock {} {held} (according to {server})", Quoted(name))
            }
            LockError::Timeout { name, behind_own_threads: true, .. } => write!(
                f,
                "could not acquire lock {}: other threads of this process wait for it, and come \
                 first",
                Quoted(name)
            ),
            LockError::Timeout { name, holder, waited, server, .. } => {
                write!(
                    f,
                    "lock {} did not become free within {}: ",
                    Quoted(name),
                    HumanDuration(*waited)
                )?;
                match holder {
                    Some(holder) => {
                        write!(f, "it {} (according to {server})", holder.hold_clause())
                    }
                    None => write!(
                        f,
                        "{server} did not report a holder, as while the lock changes hands, or \
                         while its table is locked"
                    ),
                }
            }
            LockError::Unavailable { action, name, server, cause, .. } => {
                write!(f, "could not {action} {} at {server}: {cause}", Subject(name))
            }
            LockError::Tls { action, name, server, reason, .. } => {
                write!(f, "could not {action} {} at {server}: {reason}", Subject(name))
            }
            LockError::PoolExhausted { action, name, server, pool_size, .. } => write!(
                f,
                "could not {action} {} at {server}: {} in use; use fewer at a time, or raise \
                 Config::pool_size (in MySQL, MySqlConfig::max_connections)",
                Subject(name),
                AllConnections(*pool_size)
            ),
            LockError::Refused { action, name, server, code, message, advice: manager_advice } => {
                write!(
                    f,
                    "could not {action} {}: {server} refused with {code} {message}",
                    Subject(name)
                )?;
                // Without anything else to say, this is the advice at the end.
                match advice(code, message).filter(|_| !manager_advice.is_empty()) {
                    Some(advice) => write!(f, " ({advice})"),
                    None => Ok(()),
                }
            }
            LockError::NoQuorum { action, name, needed, replies, quarantined, .. } => {
                let nodes = replies.len();
                write!(
                    f,
                    "could not {action} {}: needs {needed} of {nodes} nodes (",
                    Subject(name)
                )?;
                write!(f, "{})", ReplyList(replies))?;
                f.write_str(if *quarantined { QUARANTINE_ADVICE } else { "" })
            }
            LockError::WrongType { name, key, server } => write!(
                f,
                "could not use lock {}: key {} at {server} holds something that is not a lock, \
                 and was not changed",
                Quoted(name),
                Quoted(key)
            ),
            LockError::InvalidName { reason } => write!(f, "invalid lock name: {reason}"),
            LockError::InvalidOptions { reason } => write!(f, "invalid lock options: {reason}"),
            LockError::InvalidConfig { reason } => write!(f, "invalid configuration: {reason}"),
            LockError::Lost { name, why } => {
                write!(f, "lock {} is lost: {why}", Quoted(name))
            }
            LockError::AlreadyInitialized => {
                f.write_str("the process-wide manager already exists and was not changed")
            }
            LockError::InitInProgress => f.write_str(
                "this thread is creating the process-wide manager, and cannot use it yet",
            ),
            LockError::WouldDeadlock { name } => write!(
                f,
                "could not acquire lock {}: this thread holds it by lock_reentrant, and would wait \
                 for itself",
                Quoted(name)
            ),
            LockError::Cancelled { name, waited } => write!(
                f,
                "could not acquire lock {}: the wait was cancelled after {}",
                Quoted(name),
                HumanDuration(*waited)
            ),
            LockError::Shutdown => f.write_str("the lock manager has been shut down"),
            LockError::Forked => f.write_str(
                "this process was forked from one that had created a lock manager, so it cannot \
                 lock",
            ),
            LockError::NoThread { purpose, cause } => {
                write!(f, "could not start a thread for the {purpose}: {cause}")
            }
        }
    }
}

const QUARANTINE_ADVICE: &str = "; if no node has ever been used, run distlock init or call \
     Config::declare_nodes_new; for tests, set Config::quarantine(Duration::ZERO)";

struct AllConnections(u32);

impl fmt::Display for AllConnections {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            1 => f.write_str("the only pooled connection is"),
            size => write!(f, "all {size} pooled connections are"),
        }
    }
}

struct Subject<'a>(&'a Option<String>);

impl fmt::Display for Subject<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(name) => write!(f, "lock {}", Quoted(name)),
            None => f.write_str("the server"),
        }
    }
}
