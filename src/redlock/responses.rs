//! What the nodes said when they were asked.

use smallvec::SmallVec;

use super::{
    Redlock,
    quorum::{NodeSet, Verdict, Vote, verdict},
};
use crate::{
    node::{Ack, Exchange, NodeError, NodeErrorKind},
    node_answer::NodeAnswer,
};

/// What one node said.
#[derive(Debug)]
pub(crate) enum Response<T> {
    NotAsked,
    /// Asked, and it has not answered yet: what it was asked may still be carried out.
    Pending,
    Replied(Exchange<T>),
    Failed(NodeError),
}

/// What the nodes said, in their order.
#[derive(Debug)]
pub(crate) struct Responses<T> {
    pub(crate) by_node: SmallVec<[Response<T>; 1]>,
    pub(crate) votes: SmallVec<[Option<Vote>; 8]>,
    /// For the answers that were left behind.
    pub(crate) pending_acks: PendingAcks,
}

/// Nodes whose answers nobody waits for.
pub(crate) type PendingAcks = SmallVec<[(usize, Ack); 1]>;

impl<T> Responses<T> {
    pub(crate) fn verdict(&self) -> Verdict {
        verdict(self.votes.iter().copied())
    }

    /// The nodes with this vote.
    pub(crate) fn nodes_voting(&self, vote: Vote) -> NodeSet {
        self.votes
            .iter()
            .enumerate()
            .filter(|(_, cast)| **cast == Some(vote))
            .map(|(node, _)| node)
            .collect()
    }

    /// In words; `says` puts an answer into words.
    pub(crate) fn node_answers(
        &self,
        redlock: &Redlock,
        describe: impl Fn(&T) -> String,
    ) -> Vec<NodeAnswer> {
        let answers = self.by_node.iter().zip(&self.votes).zip(redlock.nodes()).map(
            |((response, vote), node)| {
                let vote = vote.unwrap_or(Vote::Unknown);
                let message = match response {
                    Response::Replied(answer) => match node.quarantine_left(answer.sent) {
                        Some(left) if vote == Vote::Unknown => {
                            NodeErrorKind::Quarantined(left).to_string()
                        }
                        _ => describe(&answer.reply),
                    },
                    Response::Pending => "has not answered yet".into(),
                    Response::Failed(failure) => failure.kind.to_string(),
                    Response::NotAsked => "was not asked".into(),
                };
                NodeAnswer::new(node.label(), vote, message)
            },
        );
        answers.collect()
    }

    /// The nodes that had not answered when the others had decided. The connection keeps its order.
    pub(crate) fn unanswered(&self) -> NodeSet {
        self.nodes_where(|response| matches!(response, Response::Pending))
    }

    /// The nodes that may carry the request out without our hearing of it.
    pub(crate) fn outcome_unknown(&self) -> NodeSet {
        self.nodes_where(
            |response| matches!(response, Response::Failed(failure) if failure.outcome_unknown),
        )
    }

    /// The nodes that were asked and let the time pass.
    pub(crate) fn timed_out(&self) -> NodeSet {
        let timed_out = |failure: &NodeError| matches!(failure.kind, NodeErrorKind::TimedOut);
        self.nodes_where(
            |response| matches!(response, Response::Failed(failure) if timed_out(failure)),
        )
        .union(self.unanswered())
    }

    pub(crate) fn nodes_where(&self, predicate: impl Fn(&Response<T>) -> bool) -> NodeSet {
        self.by_node
            .iter()
            .enumerate()
            .filter(|(_, response)| predicate(response))
            .map(|(node, _)| node)
            .collect()
    }
}
