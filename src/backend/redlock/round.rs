//! `Round`: what the nodes replied to one request for a lock. Pure.

use super::{
    Redlock,
    reported_holder::most_reported_holder,
    responses::{Response, Responses},
};
use crate::{
    backend::{
        error::BackendError,
        redis::{Exchange, requests::AcquireReply},
    },
    core::{
        holder::Holder,
        node_reply::{NodeReply, Vote},
        quorum::{Verdict, is_out_of_reach, prevents_quorum},
    },
    sys::clock::Moment,
};

/// Responses of the nodes to one round.
#[derive(Debug)]
pub(super) struct Round {
    pub(super) verdict: Verdict,
    pub(super) responses: Responses<AcquireReply>,
    /// All nodes were asked, and not only the queue node.
    pub(super) asked_all: bool,
    /// The queue node was asked for the claim window only.
    pub(super) claim_window_only: bool,
}

impl Round {
    /// Reply of a node, if it has replied.
    pub(super) fn reply_of(&self, node: usize) -> Option<&AcquireReply> {
        match self.responses.by_node.get(node) {
            Some(Response::Replied(Exchange { reply, .. })) => Some(reply),
            _ => None,
        }
    }

    /// Time at which the request was sent to a node, if the node has replied.
    pub(super) fn sent_at(&self, node: usize) -> Option<Moment> {
        match self.responses.by_node.get(node) {
            Some(Response::Replied(exchange)) => Some(exchange.sent),
            _ => None,
        }
    }

    /// Whether this node keeps the lock for us, whether or not its vote counts.
    pub(super) fn is_held_on(&self, node: usize) -> bool {
        matches!(self.reply_of(node), Some(AcquireReply::Held { .. }))
    }

    fn replies(&self) -> impl Iterator<Item = &AcquireReply> {
        (0..self.responses.by_node.len()).filter_map(|node| self.reply_of(node))
    }

    /// Whether the key has another type on enough nodes to prevent a quorum.
    pub(super) fn is_wrong_type(&self) -> bool {
        let nodes = self.responses.by_node.len();
        let wrong = self.replies().filter(|reply| matches!(reply, AcquireReply::WrongType)).count();
        prevents_quorum(wrong, nodes)
    }

    fn most_reported_holder(&self) -> Option<(usize, &Holder)> {
        most_reported_holder(
            self.replies().filter_map(AcquireReply::holder).map(|holder| (holder, holder)),
        )
    }

    /// Current holder, as most of the nodes report it. If the vote is split, the contender that has
    /// the vote of the queue node, because it goes on; the others have lost and are no holders.
    pub(super) fn holder(&self, queue_node: usize) -> Option<Holder> {
        if self.is_split() {
            return self.reply_of(queue_node).and_then(AcquireReply::holder).cloned();
        }
        self.most_reported_holder().map(|(_, holder)| holder.clone())
    }

    /// Whether the vote is split: by these replies, no contender can have a quorum.
    pub(super) fn is_split(&self) -> bool {
        let nodes = self.responses.by_node.len();
        let without_reply = nodes - self.replies().count();
        self.asked_all
            && self
                .most_reported_holder()
                .is_none_or(|(count, _)| is_out_of_reach(count, without_reply, nodes))
    }

    pub(super) fn node_replies(&self, redlock: &Redlock) -> Vec<NodeReply> {
        self.responses.node_replies(redlock, describe)
    }

    pub(super) fn into_error(self, redlock: &Redlock) -> BackendError {
        BackendError::from_responses(redlock, self.responses, describe)
    }
}

/// The vote that a reply is. The grants of a node in quarantine do not count.
pub(super) fn vote(reply: &AcquireReply, is_quarantined: bool) -> Vote {
    match reply {
        AcquireReply::Held { .. } if is_quarantined => Vote::Unknown,
        AcquireReply::Held { .. } => Vote::Yes,
        AcquireReply::Busy { .. } | AcquireReply::Queued { .. } => Vote::No,
        // No contender has the vote of this node, so it must not count as a rejection.
        AcquireReply::WrongType | AcquireReply::Late => Vote::Unknown,
    }
}

pub(super) fn describe(reply: &AcquireReply) -> String {
    match reply {
        AcquireReply::Held { .. } => "granted".into(),
        AcquireReply::Busy { holder, .. } | AcquireReply::Queued { holder, .. } => {
            format!("held by {holder}")
        }
        AcquireReply::WrongType => "its key holds something that is not a lock".into(),
        AcquireReply::Late => "the request came too late".into(),
    }
}
