//! Responses of the nodes to one broadcast.

use smallvec::SmallVec;

use super::Redlock;
use crate::{
    backend::redis::{Exchange, NodeError, NodeErrorKind},
    core::{
        ack::PendingAcks,
        node_reply::{NodeReply, Vote},
        quorum::{NodeSet, Verdict, verdict},
    },
};

/// Response of one node.
#[derive(Debug)]
pub(crate) enum Response<T> {
    NotAsked,
    /// Asked, but it has not replied yet. The node may still execute the request.
    Pending,
    Replied(Exchange<T>),
    Failed(NodeError),
}

impl<T> Response<T> {
    /// Whether the reply was lost, perhaps because the connection was stale.
    pub(crate) fn is_lost(&self) -> bool {
        matches!(self, Response::Failed(failure) if failure.is_reply_lost())
    }
}

/// Responses of all nodes, in their order.
#[derive(Debug)]
pub(crate) struct Responses<T> {
    pub(crate) by_node: Vec<Response<T>>,
    pub(crate) votes: SmallVec<[Option<Vote>; 8]>,
    /// Acks of the abandoned replies.
    pub(crate) pending_acks: PendingAcks,
}

impl<T> Responses<T> {
    pub(crate) fn verdict(&self) -> Verdict {
        verdict(self.votes.iter().copied())
    }

    /// Replaces the responses of these nodes by those to a second request.
    pub(crate) fn replace(&mut self, nodes: NodeSet, second: Responses<T>) {
        for (node, (response, vote)) in second.by_node.into_iter().zip(second.votes).enumerate() {
            if nodes.contains(node) {
                (self.by_node[node], self.votes[node]) = (response, vote);
            }
        }
        self.pending_acks.extend(second.pending_acks);
    }

    /// Nodes with this vote.
    pub(crate) fn nodes_voting(&self, vote: Vote) -> NodeSet {
        self.votes
            .iter()
            .enumerate()
            .filter(|(_, cast)| **cast == Some(vote))
            .map(|(node, _)| node)
            .collect()
    }

    /// Puts all responses into words. `describe` does so for a reply.
    pub(crate) fn node_replies(
        &self,
        redlock: &Redlock,
        describe: impl Fn(&T) -> String,
    ) -> Vec<NodeReply> {
        let replies = self.by_node.iter().zip(&self.votes).zip(redlock.nodes()).map(
            |((response, vote), node)| {
                let vote = vote.unwrap_or(Vote::Unknown);
                let message = match response {
                    Response::Replied(exchange) => match node.quarantine_left(exchange.sent) {
                        Some(left) if vote == Vote::Unknown => {
                            NodeErrorKind::Quarantined { left, votes: true }.to_string()
                        }
                        _ => describe(&exchange.reply),
                    },
                    Response::Pending => "has not replied yet".into(),
                    Response::Failed(failure) => failure.kind.to_string(),
                    Response::NotAsked => "was not asked".into(),
                };
                NodeReply::new(node.label(), vote, message)
            },
        );
        replies.collect()
    }

    /// Nodes that had not replied when the outcome was decided. Their connections stay open, and
    /// keep requests in order.
    pub(crate) fn unanswered(&self) -> NodeSet {
        self.nodes_where(|response| matches!(response, Response::Pending))
    }

    /// Nodes that may execute the request although we will not receive the reply.
    pub(crate) fn outcome_unknown(&self) -> NodeSet {
        self.nodes_where(
            |response| matches!(response, Response::Failed(failure) if failure.outcome_unknown),
        )
    }

    /// Nodes that were asked, but did not reply in time.
    pub(crate) fn timed_out(&self) -> NodeSet {
        let timed_out = |failure: &NodeError| matches!(failure.kind, NodeErrorKind::TimedOut);
        self.nodes_where(
            |response| matches!(response, Response::Failed(failure) if timed_out(failure)),
        )
        .union(self.unanswered())
    }

    /// Nodes of which nothing is known but that there is no reply.
    pub(crate) fn silent(&self) -> NodeSet {
        use NodeErrorKind::{BackingOff, TimedOut};
        self.nodes_where(|response| match response {
            Response::NotAsked | Response::Pending => true,
            Response::Failed(failure) => matches!(failure.kind, TimedOut | BackingOff),
            Response::Replied(_) => false,
        })
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
