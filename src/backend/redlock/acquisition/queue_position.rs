//! `QueuePosition`: what a claim knows of its place in the queue. Pure.

use crate::core::quorum::NodeSet;

#[derive(Debug)]
pub(super) struct QueuePosition {
    /// The queue node.
    node: usize,
    /// We have tried to join the queue since `node` last changed.
    requested: bool,
    /// `requested` before the last round.
    requested_before: bool,
    /// The queue node reported our queue entry in the last round.
    confirmed: bool,
    /// We hold the lock on the queue node, and now need the votes of the other nodes.
    is_head: bool,
}

impl QueuePosition {
    pub(super) fn new(node: usize) -> QueuePosition {
        let (requested, requested_before, confirmed, is_head) = (false, false, false, false);
        QueuePosition { node, requested, requested_before, confirmed, is_head }
    }

    pub(super) fn node(&self) -> usize {
        self.node
    }

    pub(super) fn is_requested(&self) -> bool {
        self.requested
    }

    /// Whether we had tried to join this queue before the last round.
    pub(super) fn was_requested(&self) -> bool {
        self.requested_before
    }

    pub(super) fn is_confirmed(&self) -> bool {
        self.confirmed
    }

    pub(super) fn is_head(&self) -> bool {
        self.is_head
    }

    /// The node on which the head of the queue keeps its vote, if that is us.
    pub(super) fn vote_of_head(&self) -> NodeSet {
        if self.is_head { NodeSet::single(self.node) } else { NodeSet::EMPTY }
    }

    /// Whether we may have an entry or a vote on the queue node.
    pub(super) fn is_in_use(&self) -> bool {
        self.requested || self.is_head
    }

    /// Records that the queue is on `node`. Returns the former queue node if we may have an entry
    /// or a vote there.
    pub(super) fn follow_to(&mut self, node: usize) -> NodeSet {
        if node == self.node {
            return NodeSet::EMPTY;
        }
        let former = if self.is_in_use() { NodeSet::single(self.node) } else { NodeSet::EMPTY };
        *self = QueuePosition::new(node);
        former
    }

    pub(super) fn begin_round(&mut self) {
        (self.confirmed, self.requested_before) = (false, self.requested);
    }

    pub(super) fn on_requested(&mut self) {
        self.requested = true;
    }

    pub(super) fn on_confirmed(&mut self) {
        self.confirmed = true;
    }

    pub(super) fn set_head(&mut self, is_head: bool) {
        self.is_head = is_head;
    }
}
