//! `Footprint`: what the nodes may know of a claim. Pure.

use crate::{
    core::{
        claim::{InFlight, Residue},
        quorum::NodeSet,
    },
    sys::clock::Moment,
};

#[derive(Debug)]
pub(super) struct Footprint {
    /// Nodes that may know our id, as the holder or in the queue.
    pub(super) may_hold: NodeSet,
    /// Nodes whose reply was lost in a round: they may execute its request even after a release.
    broken: NodeSet,
    /// Nodes on which we may have a queue entry. Includes a former queue node that has not
    /// confirmed the removal of our entry.
    pub(super) queued_on: NodeSet,
    /// Latest time at which a request whose reply was lost can still take effect.
    pub(super) broken_until: Moment,
    /// Nodes that had not replied when the last round was decided, and the time until which they
    /// may still execute its request.
    pub(super) unanswered: NodeSet,
    pub(super) unanswered_until: Moment,
}

impl Footprint {
    pub(super) fn new(now: Moment) -> Footprint {
        Footprint {
            may_hold: NodeSet::EMPTY,
            broken: NodeSet::EMPTY,
            queued_on: NodeSet::EMPTY,
            broken_until: now,
            unanswered: NodeSet::EMPTY,
            unanswered_until: now,
        }
    }

    /// Records that a node knows nothing of the claim, unless a lost request can arrive there.
    pub(super) fn forget(&mut self, node: usize) {
        let known = NodeSet::single(node).difference(self.broken);
        self.may_hold = self.may_hold.difference(known);
        self.queued_on = self.queued_on.difference(known);
    }

    /// Records that our entry may be in the queue of a node.
    pub(super) fn enqueue(&mut self, node: usize) {
        self.may_hold = self.may_hold.union(NodeSet::single(node));
        self.queued_on = self.queued_on.union(NodeSet::single(node));
    }

    /// Records a round whose requests take effect until `deadline` at the latest: nodes that had
    /// not replied when it was decided, and nodes whose reply was lost.
    pub(super) fn on_round(
        &mut self,
        unanswered: NodeSet,
        outcome_unknown: NodeSet,
        deadline: Moment,
    ) {
        self.broken = self.broken.union(outcome_unknown);
        if !outcome_unknown.is_empty() {
            self.broken_until = self.broken_until.max(deadline);
        }
        // Nodes that had not replied before may have been asked over another connection now, or not
        // at all, so their earlier requests may still take effect.
        self.broken_until = self.in_flight().until();
        (self.unanswered, self.unanswered_until) = (unanswered, deadline);
    }

    pub(super) fn in_flight(&self) -> InFlight {
        InFlight {
            broken_until: self.broken_until,
            unanswered: self.unanswered,
            unanswered_until: self.unanswered_until,
        }
    }

    /// What is left if the claim is abandoned at `now`. `to_release` are nodes that are known to
    /// need a release.
    pub(super) fn residue(
        &self,
        now: Moment,
        all: NodeSet,
        to_release: NodeSet,
        queue_entry: impl FnOnce() -> String,
    ) -> Option<Residue> {
        let in_flight_until = self.in_flight().until();
        let may_be_in_flight = now < in_flight_until;
        let nodes = if may_be_in_flight { all } else { self.may_hold.union(to_release) };
        let may_be_queued = may_be_in_flight || !self.queued_on.is_empty();
        let queue_entry = if may_be_queued { queue_entry() } else { String::new() };
        (!nodes.is_empty()).then(|| Residue::new(nodes, &queue_entry, in_flight_until))
    }
}
