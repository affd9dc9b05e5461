//! `BackendError`: why asking the backend had no usable result.

mod node_error;

use std::{fmt, io, mem, sync::Arc};

pub(crate) use self::node_error::{NodeError, NodeErrorKind};
use crate::{
    core::{
        node_reply::{NodeReply, ReplyList, Vote},
        quorum::NodeSet,
    },
    error::{Action, LockError, TRY_AGAIN},
};

/// The advice if another program seems to have this address.
const CHECK_ADDRESS: &str = "check the host and the port in the URL";
/// The advice if nobody listens at this address.
const CHECK_SERVER: &str = "check the URL, and whether the server runs";

#[derive(Clone, Debug)]
pub(crate) enum BackendError {
    /// Failure of the only server, or a failure before any node was asked.
    Node(NodeError),
    /// No quorum of several nodes.
    NoQuorum {
        needed: usize,
        replies: Vec<NodeReply>,
        /// A node may have executed the request.
        outcome_unknown: bool,
        /// Asking again soon may help.
        transient: bool,
        /// A node is in quarantine. Its votes will count later.
        quarantined: bool,
        /// Nodes that have not replied.
        silent: NodeSet,
    },
}

impl BackendError {
    /// The error of a backend that is asked for what it cannot do.
    pub(crate) fn unsupported() -> BackendError {
        BackendError::Node(NodeError::not_applied(io::ErrorKind::Unsupported))
    }

    /// Whether asking again soon may help without any intervention.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            BackendError::Node(failure) => failure.is_transient(),
            BackendError::NoQuorum { transient, .. } => *transient,
        }
    }

    /// Whether a failover of the only server may be the cause.
    pub(crate) fn may_be_failover(&self) -> bool {
        matches!(self, BackendError::Node(failure) if failure.may_be_failover())
    }

    /// Whether the only server is not a master. If the connection is old, the server's name may
    /// lead elsewhere by now.
    pub(crate) fn is_not_master(&self) -> bool {
        matches!(self, BackendError::Node(failure) if failure.is_not_master())
    }

    /// Whether a node may have executed the request.
    pub(crate) fn is_outcome_unknown(&self) -> bool {
        match self {
            BackendError::Node(failure) => failure.outcome_unknown,
            BackendError::NoQuorum { outcome_unknown, .. } => *outcome_unknown,
        }
    }

    /// Whether the only known cause is that time ran out.
    pub(crate) fn is_timeout(&self) -> bool {
        matches!(self, BackendError::Node(NodeError { kind: NodeErrorKind::TimedOut, .. }))
    }

    /// Whether no connection was free.
    pub(crate) fn is_pool_exhausted(&self) -> bool {
        matches!(
            self,
            BackendError::Node(NodeError { kind: NodeErrorKind::PoolExhausted { .. }, .. })
        )
    }

    /// Whether the servers cannot grant any lock for now.
    pub(crate) fn is_outage(&self) -> bool {
        (self.is_transient() || self.may_be_failover()) && !self.is_pool_exhausted()
    }

    /// Whether a node is in quarantine, which ends on its own.
    pub(crate) fn has_quarantined_nodes(&self) -> bool {
        match self {
            BackendError::Node(failure) => {
                matches!(failure.kind, NodeErrorKind::Quarantined { .. })
            }
            BackendError::NoQuorum { quarantined, .. } => *quarantined,
        }
    }

    /// Replaces the replies of silent nodes by what they said in an earlier round.
    pub(crate) fn recall(&mut self, earlier: Option<BackendError>) {
        let BackendError::NoQuorum { replies, silent, .. } = self else { return };
        let Some(BackendError::NoQuorum { replies: earlier, silent: before, .. }) = earlier else {
            return;
        };
        for (node, (reply, mut earlier)) in replies.iter_mut().zip(earlier).enumerate() {
            if !silent.contains(node) || before.contains(node) {
                continue;
            }
            // An earlier vote does not count any more.
            if mem::replace(&mut earlier.vote, Vote::Unknown) != Vote::Unknown {
                earlier.message.push_str(" earlier");
            }
            *reply = earlier;
            *silent = silent.difference(NodeSet::single(node));
        }
    }

    /// Converts the error into the one that the user sees.
    pub(crate) fn into_lock_error(
        self,
        server: Arc<str>,
        action: Action,
        name: Option<&str>,
    ) -> LockError {
        let (name, advice) = (name.map(str::to_owned), "");
        let is_transient = self.is_transient();
        let kind = match self {
            BackendError::Node(failure) => failure.kind,
            BackendError::NoQuorum { needed, replies, quarantined, .. } => {
                return LockError::NoQuorum { action, name, needed, replies, quarantined, advice };
            }
        };
        match kind {
            NodeErrorKind::PoolExhausted { pool_size } => {
                LockError::PoolExhausted { action, name, server, pool_size, advice }
            }
            NodeErrorKind::Refused { code, message } if !is_transient => {
                LockError::Refused { action, name, server, code, message, advice }
            }
            NodeErrorKind::Closed => LockError::Shutdown,
            NodeErrorKind::Tls(reason) => LockError::Tls { action, name, server, reason, advice },
            reason => {
                let advice = match reason {
                    NodeErrorKind::NotRedis(_) => CHECK_ADDRESS,
                    NodeErrorKind::Io(ref cause) if is_nobody_there(cause.kind()) => CHECK_SERVER,
                    NodeErrorKind::ShortLease(_) => "try again later, or use a longer ttl",
                    _ if is_transient => TRY_AGAIN,
                    _ => advice,
                };
                LockError::Unavailable { action, name, server, cause: Box::new(reason), advice }
            }
        }
    }
}

/// Whether the address exists, but nobody listens there.
fn is_nobody_there(kind: io::ErrorKind) -> bool {
    // A missing Unix socket is not found.
    matches!(kind, io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound)
}

impl From<NodeError> for BackendError {
    fn from(error: NodeError) -> BackendError {
        BackendError::Node(error)
    }
}

impl fmt::Display for BackendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BackendError::Node(failure) => failure.kind.fmt(f),
            BackendError::NoQuorum { replies, .. } => {
                write!(f, "no quorum ({})", ReplyList(replies))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::node_reply::NodeReply;

    /// Fault: N145
    #[test]
    fn silent_node_keeps_its_last_reason() {
        let error = |says: [(Vote, &str); 3], silent: &[usize]| BackendError::NoQuorum {
            needed: 2,
            replies: says.map(|(vote, says)| NodeReply::new(&"n".into(), vote, says)).into(),
            outcome_unknown: false,
            transient: true,
            quarantined: false,
            silent: silent.iter().copied().collect(),
        };
        let first = [(Vote::Yes, "granted"), (Vote::Unknown, "refused"), (Vote::Unknown, "late")];
        let mut second = error([(Vote::Unknown, "late"); 3], &[0, 1, 2]);
        second.recall(Some(error(first, &[2])));
        let mut third = error([(Vote::Unknown, "late"); 3], &[0, 1, 2]);
        third.recall(Some(second));
        assert_eq!(third.to_string(), "no quorum (n: granted earlier; n: refused; n: late)");
        let BackendError::NoQuorum { replies, .. } = third else { unreachable!() };
        assert!(replies.iter().all(|reply| reply.vote == Vote::Unknown), "{replies:?}");
    }
}
