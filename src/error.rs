//! `LockError` and `LockLost`. Each message says what was tried, on which lock and server, what
//! happened, and what to do.

mod action;
mod advice;
mod message;

use std::{error::Error, io, sync::Arc, time::Duration};

pub use self::action::Action;
use crate::core::{
    holder::Holder, key::InvalidName, lease::Lease, lock_lost::LockLost, node_reply::NodeReply,
};

/// The result of all fallible functions of this crate.
pub type Result<T, E = LockError> = std::result::Result<T, E>;

/// Why a call failed.
///
/// Callers usually distinguish two cases: another client holds the lock
/// ([`is_contended`](Self::is_contended)), or the holder could not be determined
/// ([`is_unavailable`](Self::is_unavailable)). After an error of a lock function, the caller does
/// not hold the lock. If the attempt left anything on the server, it is cleaned up in the
/// background, or expires.
///
/// [`Debug`](std::fmt::Debug) prints the variant and the message, because that is what a `main`
/// that returns the error prints.
#[non_exhaustive]
pub enum LockError {
    /// Another client holds the lock, and the caller did not wait.
    #[non_exhaustive]
    Held {
        /// The lock.
        name: String,
        /// The holder.
        holder: Box<Holder>,
        /// The server that reported it.
        server: Arc<str>,
    },
    /// The lock did not become free while the caller waited; or the caller did not wait, and no
    /// holder is known.
    #[non_exhaustive]
    Timeout {
        /// The lock.
        name: String,
        /// The holder at the end of the wait. `None` if the servers reported none: the lock was
        /// changing hands, or was about to go to a thread of this process, or the table of the
        /// database was locked.
        holder: Option<Box<Holder>>,
        /// How long the caller waited.
        waited: Duration,
        /// The server.
        server: Arc<str>,
        /// Whether the caller did not wait, and the lock goes to other threads of this process,
        /// which do.
        behind_own_threads: bool,
    },
    /// The server could not be reached, did not reply in time, or is in a temporary state (loading
    /// its data, busy with a script). The operation may have taken effect. It is safe to try again.
    #[non_exhaustive]
    Unavailable {
        /// What was tried.
        action: Action,
        /// The lock, if the call was about one.
        name: Option<String>,
        /// The server.
        server: Arc<str>,
        /// What went wrong.
        cause: Box<dyn Error + Send + Sync>,
        /// What to do, or what the manager does; empty if there is nothing to say.
        advice: &'static str,
    },
    /// A secure connection is not possible: the certificate of the server or of this client is not
    /// accepted, or one side does not speak TLS. Trying again does not help.
    #[non_exhaustive]
    Tls {
        /// What was tried.
        action: Action,
        /// The lock, if the call was about one.
        name: Option<String>,
        /// The server.
        server: Arc<str>,
        /// What is wrong, and what to do.
        reason: String,
        /// What the manager does after a failed release; otherwise empty.
        advice: &'static str,
    },
    /// All pooled connections were in use, for half an operation timeout, or with several nodes for
    /// a whole one. Return connections sooner, or raise
    /// [`Config::pool_size`](crate::Config::pool_size).
    #[non_exhaustive]
    PoolExhausted {
        /// What was tried.
        action: Action,
        /// The lock, if the call was about one.
        name: Option<String>,
        /// The server.
        server: Arc<str>,
        /// The size of the pool.
        pool_size: u32,
        /// What the manager does after a failed release; otherwise empty.
        advice: &'static str,
    },
    /// The server replied with an error: authentication, permissions, read-only, out of memory.
    #[non_exhaustive]
    Refused {
        /// What was tried.
        action: Action,
        /// The lock, if the call was about one.
        name: Option<String>,
        /// The server.
        server: Arc<str>,
        /// The first word of the server's error, such as `NOAUTH`, `NOPERM`, `READONLY` or `OOM`.
        code: String,
        /// The rest of the server's error, shortened and escaped.
        message: String,
        /// What the manager does after a failed release; otherwise empty.
        advice: &'static str,
    },
    /// Too few of several nodes gave a reply that counts, so the holder could not be determined.
    #[non_exhaustive]
    NoQuorum {
        /// What was tried.
        action: Action,
        /// The lock, if the call was about one.
        name: Option<String>,
        /// The number of nodes that must agree.
        needed: usize,
        /// The reply of each node.
        replies: Vec<NodeReply>,
        /// Whether a node does not vote yet, because it may have lost its data. See
        /// [`Config::quarantine`](crate::Config::quarantine).
        quarantined: bool,
        /// What the manager does after a failed release; otherwise empty.
        advice: &'static str,
    },
    /// The lock key holds something that is not a lock; it was not changed. Use another name or
    /// prefix.
    #[non_exhaustive]
    WrongType {
        /// The lock.
        name: String,
        /// The key in Redis.
        key: String,
        /// The server.
        server: Arc<str>,
    },
    /// The name is not a valid lock name.
    #[non_exhaustive]
    InvalidName {
        /// What is wrong with the name.
        reason: String,
    },
    /// A duration or another option is out of range, or two options contradict each other.
    #[non_exhaustive]
    InvalidOptions {
        /// What is wrong, with the numbers.
        reason: String,
    },
    /// The configuration is invalid, for example because of a URL that this build does not support.
    #[non_exhaustive]
    InvalidConfig {
        /// What is wrong. Never contains a password.
        reason: String,
    },
    /// The lock was held, and is lost. Returned by
    /// [`LockGuard::ensure_held`](crate::LockGuard::ensure_held) and the other calls that need the
    /// lock, by [`RedisMgr::with_lock`](crate::RedisMgr::with_lock), by
    /// [`RedisMgr::adopt`](crate::RedisMgr::adopt), and by an acquisition that took longer than the
    /// lease.
    #[non_exhaustive]
    Lost {
        /// The lock.
        name: String,
        /// Why.
        why: LockLost,
    },
    /// [`RedisMgr::init`](crate::RedisMgr::init) was called after the process-wide manager had been
    /// created.
    AlreadyInitialized,
    /// [`RedisMgr::instance`](crate::RedisMgr::instance) or [`init`](crate::RedisMgr::init) was
    /// called by the thread that is creating the process-wide manager, for example by a logger.
    InitInProgress,
    /// The calling thread holds the lock by
    /// [`lock_reentrant`](crate::RedisMgr::lock_reentrant), and would wait for itself. Release that
    /// guard first, or call `lock_reentrant` again.
    #[non_exhaustive]
    WouldDeadlock {
        /// The lock.
        name: String,
    },
    /// The wait was ended by [`CancelToken::cancel`](crate::CancelToken::cancel).
    #[non_exhaustive]
    Cancelled {
        /// The lock.
        name: String,
        /// How long the caller waited.
        waited: Duration,
    },
    /// The manager was shut down.
    Shutdown,
    /// This process was forked from a process that had created a manager. A forked child has only
    /// one of its parent's threads, so locks cannot be renewed in it.
    Forked,
    /// The operating system could not start a thread.
    #[non_exhaustive]
    NoThread {
        /// The purpose of the thread.
        purpose: &'static str,
        /// The error of the operating system.
        cause: io::Error,
    },
}

impl LockError {
    /// The error of a call that needs a lease which is not held.
    pub(crate) fn not_held(lease: &Lease) -> LockError {
        let (name, why) = (lease.claim.key.name().to_owned(), lease.why_not_held());
        LockError::Lost { name, why }
    }

    /// Replaces what the message says at its end about what to do, or what the manager does.
    pub(crate) fn advising(mut self, what: &'static str) -> LockError {
        if let LockError::Unavailable { advice, .. }
        | LockError::Tls { advice, .. }
        | LockError::PoolExhausted { advice, .. }
        | LockError::Refused { advice, .. }
        | LockError::NoQuorum { advice, .. } = &mut self
        {
            *advice = what;
        }
        self
    }

    /// Returns the end of the message: what to do, or what the manager does after a failed release.
    /// Empty if there is nothing to say, or if what to do is the reason itself, as for an option
    /// out of range.
    pub fn advice(&self) -> &'static str {
        match self {
            LockError::Unavailable { advice, .. }
            | LockError::Tls { advice, .. }
            | LockError::PoolExhausted { advice, .. }
            | LockError::NoQuorum { advice, .. } => advice,
            LockError::Refused { code, message, advice: "", .. } => {
                advice::advice(code, message).unwrap_or_default()
            }
            LockError::Refused { advice, .. } => advice,
            LockError::Timeout { behind_own_threads: true, .. } => "wait too, or try again later",
            LockError::Held { holder, .. } | LockError::Timeout { holder: Some(holder), .. }
                if holder.is_own() =>
            {
                "this thread has acquired it itself, so release that guard first"
            }
            LockError::WrongType { .. } => "choose another name or prefix",
            LockError::Lost { .. } => "acquire it again before you go on",
            LockError::AlreadyInitialized => {
                "call RedisMgr::init before the first RedisMgr::instance, or create a separate \
                 manager with RedisMgr::new"
            }
            LockError::InitInProgress => "do not call RedisMgr::instance from a logger",
            LockError::WouldDeadlock { .. } => {
                "release that guard first, or call lock_reentrant again"
            }
            LockError::Shutdown => "create another one to lock again",
            LockError::Forked => {
                "fork before creating the first manager, or call exec in the child"
            }
            _ => "",
        }
    }

    /// Returns true if another client holds the lock: [`Held`](Self::Held) or
    /// [`Timeout`](Self::Timeout). Trying again later may succeed.
    pub fn is_contended(&self) -> bool {
        matches!(self, LockError::Held { .. } | LockError::Timeout { .. })
    }

    /// Returns true for [`Timeout`](Self::Timeout): the caller waited, and the lock did not become
    /// free in that time; or it did not wait, and no holder is known.
    pub fn is_timeout(&self) -> bool {
        matches!(self, LockError::Timeout { .. })
    }

    /// Returns true if the holder could not be determined: no server, no reply, no quorum, no free
    /// connection, or no TLS with the server. Trying again may succeed, except for
    /// [`Tls`](Self::Tls).
    pub fn is_unavailable(&self) -> bool {
        matches!(
            self,
            LockError::Unavailable { .. }
                | LockError::Tls { .. }
                | LockError::PoolExhausted { .. }
                | LockError::NoQuorum { .. }
        )
    }

    /// Returns true if the server replied with an error. The call keeps failing until the server's
    /// state or this client's permissions change.
    pub fn is_refused(&self) -> bool {
        matches!(self, LockError::Refused { .. })
    }

    /// Returns true if the lock was held, and is lost.
    pub fn is_lost(&self) -> bool {
        matches!(self, LockError::Lost { .. })
    }

    /// Returns true if the wait was ended by [`CancelToken::cancel`](crate::CancelToken::cancel).
    pub fn is_cancelled(&self) -> bool {
        matches!(self, LockError::Cancelled { .. })
    }

    /// Returns true if the name, the options or the configuration is invalid. The same call always
    /// fails.
    pub fn is_invalid(&self) -> bool {
        matches!(
            self,
            LockError::InvalidName { .. }
                | LockError::InvalidOptions { .. }
                | LockError::InvalidConfig { .. }
        )
    }

    /// Returns the holder of the lock, if the error contains it.
    pub fn holder(&self) -> Option<&Holder> {
        match self {
            LockError::Held { holder, .. } => Some(holder),
            LockError::Timeout { holder, .. } => holder.as_deref(),
            LockError::Lost { why: LockLost::Taken { by }, .. } => Some(by),
            _ => None,
        }
    }

    /// Returns the replies of several nodes, if the error contains them; otherwise an empty slice.
    pub fn nodes(&self) -> &[NodeReply] {
        match self {
            LockError::NoQuorum { replies, .. } => replies,
            _ => self.holder().map_or(&[], Holder::nodes),
        }
    }

    /// Returns the first word of the server's error if this is [`Refused`](Self::Refused).
    pub fn code(&self) -> Option<&str> {
        match self {
            LockError::Refused { code, .. } => Some(code),
            _ => None,
        }
    }
}

/// The advice where a server was unavailable and nothing remains of the call.
pub(crate) const TRY_AGAIN: &str = "try again later";

impl Error for LockError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            LockError::Unavailable { cause, .. } => Some(&**cause),
            LockError::NoThread { cause, .. } => Some(cause),
            LockError::Lost { why, .. } => Some(why),
            _ => None,
        }
    }
}

impl From<InvalidName> for LockError {
    fn from(InvalidName(reason): InvalidName) -> LockError {
        LockError::InvalidName { reason }
    }
}
