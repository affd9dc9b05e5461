//! What a fake returns: errors and the values in them, as the library itself creates them.

use std::{error::Error, io, time::Duration};

use super::LABEL;
use crate::{
    core::{
        holder::Holder,
        kind::HeldBy,
        lock_lost::LockLost,
        node_reply::{NodeReply, Vote},
        token::FencingToken,
    },
    error::{Action, LockError, TRY_AGAIN},
};

/// With the feature `testing`: each error, for tests. They name the server `memory`, and say that a
/// lock could not be acquired if they say what was tried. Errors without a value, such as
/// [`LockError::Shutdown`], need no function.
///
/// ```
/// use std::time::Duration;
///
/// use distlock::{Holder, LockError, LockLost};
///
/// let other = Holder::new("otherhost|pid7|tid7|ts1").with_ttl_left(Duration::from_secs(8));
/// let refused = LockError::held("orders:42", other.clone());
/// assert!(refused.is_contended() && refused.to_string().contains("otherhost"));
///
/// let late = LockError::timeout("orders:42", Some(other.clone()), Duration::from_secs(5));
/// assert!(late.is_timeout() && late.holder() == Some(&other));
///
/// assert!(LockError::unavailable("orders:42", "connection refused").is_unavailable());
/// assert!(LockError::lost("orders:42", LockLost::taken(other)).is_lost());
/// ```
impl LockError {
    /// Returns [`Held`](Self::Held).
    pub fn held(name: impl Into<String>, holder: Holder) -> LockError {
        LockError::Held { name: name.into(), holder: Box::new(holder), server: LABEL.into() }
    }

    /// Returns [`Timeout`](Self::Timeout).
    pub fn timeout(name: impl Into<String>, holder: Option<Holder>, waited: Duration) -> LockError {
        let (name, holder) = (name.into(), holder.map(Box::new));
        let (server, behind_own_threads) = (LABEL.into(), false);
        LockError::Timeout { name, holder, waited, server, behind_own_threads }
    }

    /// Returns [`Unavailable`](Self::Unavailable).
    pub fn unavailable(
        name: impl Into<String>,
        cause: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> LockError {
        let (action, name, cause) = (Action::Acquire, Some(name.into()), cause.into());
        let (server, advice) = (LABEL.into(), TRY_AGAIN);
        LockError::Unavailable { action, name, server, cause, advice }
    }

    /// Returns [`Tls`](Self::Tls).
    pub fn tls(name: impl Into<String>, reason: impl Into<String>) -> LockError {
        let (action, name, reason) = (Action::Acquire, Some(name.into()), reason.into());
        LockError::Tls { action, name, server: LABEL.into(), reason, advice: "" }
    }

    /// Returns [`PoolExhausted`](Self::PoolExhausted).
    pub fn pool_exhausted(name: impl Into<String>, pool_size: u32) -> LockError {
        let (action, name) = (Action::Acquire, Some(name.into()));
        LockError::PoolExhausted { action, name, server: LABEL.into(), pool_size, advice: "" }
    }

    /// Returns [`Refused`](Self::Refused), with the code of the server's error, such as `OOM`, and
    /// the rest of it.
    pub fn refused(
        name: impl Into<String>,
        code: impl Into<String>,
        message: impl Into<String>,
    ) -> LockError {
        let (action, name, server) = (Action::Acquire, Some(name.into()), LABEL.into());
        LockError::Refused {
            action,
            name,
            server,
            code: code.into(),
            message: message.into(),
            advice: "",
        }
    }

    /// Returns [`NoQuorum`](Self::NoQuorum). Of each node, `replies` has its address, its vote, and
    /// what it said.
    pub fn no_quorum(
        name: impl Into<String>,
        needed: usize,
        replies: &[(&str, Vote, &str)],
    ) -> LockError {
        let (action, name, quarantined) = (Action::Acquire, Some(name.into()), false);
        let replies = replies.iter().map(|(node, vote, message)| NodeReply {
            node: (*node).into(),
            vote: *vote,
            message: (*message).to_owned(),
        });
        LockError::NoQuorum {
            action,
            name,
            needed,
            replies: replies.collect(),
            quarantined,
            advice: "",
        }
    }

    /// Returns [`WrongType`](Self::WrongType).
    pub fn wrong_type(name: impl Into<String>, key: impl Into<String>) -> LockError {
        LockError::WrongType { name: name.into(), key: key.into(), server: LABEL.into() }
    }

    /// Returns [`InvalidName`](Self::InvalidName).
    pub fn invalid_name(reason: impl Into<String>) -> LockError {
        LockError::InvalidName { reason: reason.into() }
    }

    /// Returns [`InvalidOptions`](Self::InvalidOptions).
    pub fn invalid_options(reason: impl Into<String>) -> LockError {
        LockError::InvalidOptions { reason: reason.into() }
    }

    /// Returns [`InvalidConfig`](Self::InvalidConfig).
    pub fn invalid_config(reason: impl Into<String>) -> LockError {
        LockError::InvalidConfig { reason: reason.into() }
    }

    /// Returns [`Lost`](Self::Lost).
    pub fn lost(name: impl Into<String>, why: LockLost) -> LockError {
        LockError::Lost { name: name.into(), why }
    }

    /// Returns [`WouldDeadlock`](Self::WouldDeadlock).
    pub fn would_deadlock(name: impl Into<String>) -> LockError {
        LockError::WouldDeadlock { name: name.into() }
    }

    /// Returns [`Cancelled`](Self::Cancelled).
    pub fn cancelled(name: impl Into<String>, waited: Duration) -> LockError {
        LockError::Cancelled { name: name.into(), waited }
    }

    /// Returns [`NoThread`](Self::NoThread).
    pub fn no_thread(purpose: &'static str, cause: io::Error) -> LockError {
        LockError::NoThread { purpose, cause }
    }
}

/// With the feature `testing`.
impl LockLost {
    /// Returns [`Taken`](Self::Taken).
    pub fn taken(by: Holder) -> LockLost {
        LockLost::Taken { by: Box::new(by) }
    }
}

/// With the feature `testing`.
impl HeldBy {
    /// Returns [`Readers`](Self::Readers).
    pub fn readers(count: u64) -> HeldBy {
        HeldBy::Readers { count: Some(count) }
    }

    /// Returns [`Permits`](Self::Permits).
    pub fn permits(count: u64) -> HeldBy {
        HeldBy::Permits { count: Some(count) }
    }
}

/// With the feature `testing`.
impl FencingToken {
    /// Creates a token, which no lock has been granted with.
    pub const fn new(token: u64) -> FencingToken {
        FencingToken(token)
    }
}
