//! `Trouble`: why there is no answer to go by. Pure.

use super::{
    Redlock,
    responses::{Response, Responses},
};
use crate::{
    clock,
    node::{NodeError, NodeErrorKind},
    node_answer::{AnswerList, NodeAnswer},
};

#[derive(Debug)]
pub(crate) enum AskError {
    /// Of the one node, or before any node was asked.
    Node(NodeError),
    /// No quorum of several nodes.
    NoQuorum {
        answers: Vec<NodeAnswer>,
        /// Some node may have carried the request out.
        outcome_unknown: bool,
        /// Trying again soon may help.
        transient: bool,
        /// A node does not vote yet, and will.
        quarantined: bool,
    },
}

impl AskError {
    /// Of a ballot that came to nothing; `says` puts an answer into words.
    pub(crate) fn from_responses<T>(
        redlock: &Redlock,
        mut responses: Responses<T>,
        describe: impl Fn(&T) -> String,
    ) -> AskError {
        let nodes = redlock.nodes();
        // What is open goes back in order, and need not be asked again.
        let outcome_unknown = !responses.outcome_unknown().is_empty();
        if let [response] = responses.by_node.as_mut_slice() {
            return match std::mem::replace(response, Response::NotAsked) {
                Response::Failed(failure) => AskError::Node(failure),
                // An answer that came, and does not count.
                _ => AskError::Node(NodeError {
                    outcome_unknown: false,
                    kind: NodeErrorKind::TimedOut,
                }),
            };
        }
        let is_permanent = |slip: &&Response<T>| matches!(slip, Response::Failed(failure) if !failure.is_transient());
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

    /// Whether trying again soon may help without anybody doing anything.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            AskError::Node(failure) => failure.is_transient(),
            AskError::NoQuorum { transient: passing, .. } => *passing,
        }
    }

    /// The server is no master. Where the connection had been there for a while, its name may lead
    /// elsewhere by now.
    pub(crate) fn is_not_master(&self) -> bool {
        matches!(self, AskError::Node(failure) if failure.is_not_master())
    }

    /// Whether the request may have been carried out somewhere.
    pub(crate) fn is_outcome_unknown(&self) -> bool {
        match self {
            AskError::Node(failure) => failure.outcome_unknown,
            AskError::NoQuorum { outcome_unknown: sent, .. } => *sent,
        }
    }

    /// Nothing is known but that the time was over.
    pub(crate) fn is_timeout(&self) -> bool {
        matches!(self, AskError::Node(NodeError { kind: NodeErrorKind::TimedOut, .. }))
    }

    /// No connection was free to ask.
    pub(crate) fn is_pool_exhausted(&self) -> bool {
        matches!(self, AskError::Node(NodeError { kind: NodeErrorKind::PoolExhausted, .. }))
    }

    /// Nodes do not vote yet, and it is known that they will.
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
