//! `AskError`: why asking the nodes had no usable result.

use super::{
    Redlock,
    responses::{Response, Responses},
};
use crate::{
    backend::redis::{NodeError, NodeErrorKind},
    core::node_answer::{AnswerList, NodeAnswer},
    sys::clock,
};

#[derive(Debug)]
pub(crate) enum AskError {
    /// Failure of the only node, or a failure before any node was asked.
    Node(NodeError),
    /// No quorum of several nodes.
    NoQuorum {
        answers: Vec<NodeAnswer>,
        /// A node may have executed the request.
        outcome_unknown: bool,
        /// Asking again soon may help.
        transient: bool,
        /// A node is in quarantine. Its votes will count later.
        quarantined: bool,
    },
}

impl AskError {
    /// Creates the error for responses without a usable verdict. `describe` puts a reply into
    /// words.
    pub(crate) fn from_responses<T>(
        redlock: &Redlock,
        mut responses: Responses<T>,
        describe: impl Fn(&T) -> String,
    ) -> AskError {
        let nodes = redlock.nodes();
        // An unanswered request does not count, because its connection stays open and keeps
        // requests in order.
        let outcome_unknown = !responses.outcome_unknown().is_empty();
        if let [response] = responses.by_node.as_mut_slice() {
            return match std::mem::replace(response, Response::NotAsked) {
                Response::Failed(failure) => AskError::Node(failure),
                // A reply that does not count, for example because the request had expired.
                _ => AskError::Node(NodeError {
                    outcome_unknown: false,
                    kind: NodeErrorKind::TimedOut,
                }),
            };
        }
        let is_permanent = |response: &&Response<T>| {
            matches!(
                response, Response::Failed(failure) if !failure.is_transient()
            )
        };
        let permanent = responses.by_node.iter().filter(is_permanent).count();
        let now = clock::now();
        let quarantined = nodes.iter().any(|node| node.quarantine_left(now).is_some());
        let answers = responses.node_answers(redlock, describe);
        AskError::NoQuorum {
            answers,
            outcome_unknown,
            transient: permanent <= nodes.len() - redlock.quorum_size(),
            quarantined,
        }
    }

    /// Whether asking again soon may help without any intervention.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            AskError::Node(failure) => failure.is_transient(),
            AskError::NoQuorum { transient, .. } => *transient,
        }
    }

    /// Whether the only server is not a master. If the connection is old, the server's name may
    /// lead elsewhere by now.
    pub(crate) fn is_not_master(&self) -> bool {
        matches!(self, AskError::Node(failure) if failure.is_not_master())
    }

    /// Whether a node may have executed the request.
    pub(crate) fn is_outcome_unknown(&self) -> bool {
        match self {
            AskError::Node(failure) => failure.outcome_unknown,
            AskError::NoQuorum { outcome_unknown, .. } => *outcome_unknown,
        }
    }

    /// Whether the only known cause is that time ran out.
    pub(crate) fn is_timeout(&self) -> bool {
        matches!(self, AskError::Node(NodeError { kind: NodeErrorKind::TimedOut, .. }))
    }

    /// Whether no connection was free.
    pub(crate) fn is_pool_exhausted(&self) -> bool {
        matches!(self, AskError::Node(NodeError { kind: NodeErrorKind::PoolExhausted, .. }))
    }

    /// Whether a node is in quarantine, which ends on its own.
    pub(crate) fn has_quarantined_nodes(&self) -> bool {
        matches!(self, AskError::NoQuorum { quarantined: true, .. })
    }
}

impl std::fmt::Display for AskError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            AskError::Node(failure) => failure.kind.fmt(f),
            AskError::NoQuorum { answers, .. } => write!(f, "no quorum ({})", AnswerList(answers)),
        }
    }
}
