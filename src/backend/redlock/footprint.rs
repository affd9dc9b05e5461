//! `Footprint`: what the nodes may know of a claim. Pure.

use crate::{
    core::{
        claim::{InFlight, Residue},
        quorum::NodeSet,
    },
    sys::clock::Moment,
};

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Footprint {
    /// Nodes that may know our id, as the holder or in the queue.
    pub(crate) may_hold: NodeSet,
    /// Nodes whose reply was lost in a round: they may execute its request even after a release.
    broken: NodeSet,
    /// Nodes on which we may have a queue entry. Includes a former queue node that has not
    /// confirmed the removal of our entry.
    pub(super) queued_on: NodeSet,
    /// Requests that may still be applied.
    pub(crate) in_flight: InFlight,
}

impl Footprint {
    pub(crate) fn new(now: Moment) -> Footprint {
        let empty = NodeSet::EMPTY;
        let in_flight = InFlight { broken_until: now, unanswered: empty, unanswered_until: now };
        Footprint { may_hold: empty, broken: empty, queued_on: empty, in_flight }
    }

    /// Records that a node knows nothing of the claim, unless a lost request can arrive there.
    pub(crate) fn forget(&mut self, node: usize) {
        let known = NodeSet::single(node).difference(self.broken);
        self.may_hold = self.may_hold.difference(known);
        self.queued_on = self.queued_on.difference(known);
    }

    /// Records that our entry may be in the queue of a node.
    pub(crate) fn enqueue(&mut self, node: usize) {
        self.may_hold = self.may_hold.union(NodeSet::single(node));
        self.queued_on = self.queued_on.union(NodeSet::single(node));
    }

    /// Records a round whose requests take effect until `deadline` at the latest: nodes that had
    /// not replied when it was decided, and nodes whose reply was lost. `known_before` are the
    /// nodes that might know our id before the round.
    pub(crate) fn on_round(
        &mut self,
        unanswered: NodeSet,
        outcome_unknown: NodeSet,
        known_before: NodeSet,
        deadline: Moment,
    ) {
        // A release that a node confirms shows that the node has executed a request of ours. If it
        // might have executed an earlier one, this one may still arrive.
        let lost = outcome_unknown.union(unanswered.intersection(known_before));
        // Nodes that had not replied before may have been asked over another connection now, or not
        // at all, so their earlier requests may still take effect.
        self.broken = self.broken.union(lost).union(self.in_flight.unanswered);
        let earlier = self.in_flight.until();
        let broken_until = if lost.is_empty() { earlier } else { earlier.max(deadline) };
        self.in_flight = InFlight { broken_until, unanswered, unanswered_until: deadline };
    }

    /// Records a release that a node may still execute until `deadline`.
    pub(crate) fn on_pending_release(&mut self, deadline: Moment) {
        let broken_until = &mut self.in_flight.broken_until;
        *broken_until = (*broken_until).max(deadline);
    }

    /// What is left if the claim is abandoned at `now`. `to_release` are nodes that are known to
    /// need a release.
    pub(crate) fn residue(
        &self,
        now: Moment,
        all: NodeSet,
        to_release: NodeSet,
        queue_entry: impl FnOnce() -> String,
    ) -> Option<Residue> {
        let in_flight_until = self.in_flight.until();
        let may_be_in_flight = now < in_flight_until;
        let nodes = if may_be_in_flight { all } else { self.may_hold.union(to_release) };
        let may_be_queued = may_be_in_flight || !self.queued_on.is_empty();
        let queue_entry = if may_be_queued { queue_entry() } else { String::new() };
        (!nodes.is_empty()).then(|| Residue::new(nodes, &queue_entry, in_flight_until))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EMPTY: NodeSet = NodeSet::EMPTY;

    fn at(nanos: u64) -> Moment {
        Moment::from_nanos(nanos)
    }

    /// Nodes to clean up if the claim is abandoned after all its requests have expired.
    fn left(footprint: &Footprint) -> NodeSet {
        let left = footprint.residue(at(1_000), NodeSet::first_n(3), EMPTY, String::new);
        left.map_or(EMPTY, |residue| residue.nodes)
    }

    /// The next request goes to the node over another connection. Its reply, and the confirmation
    /// of a release, say nothing about the earlier request.
    ///
    /// Fault: N215
    /// Promise: P5
    #[test]
    fn node_that_has_not_replied_is_not_forgotten() {
        let (node, mut footprint) = (NodeSet::single(2), Footprint::new(at(0)));
        footprint.may_hold = node;
        footprint.on_round(node, EMPTY, EMPTY, at(10));
        footprint.on_round(EMPTY, EMPTY, node, at(20));
        footprint.forget(2);
        assert_eq!((left(&footprint), footprint.in_flight.broken_until), (node, at(10)));
    }

    #[test]
    fn node_that_has_replied_is_forgotten() {
        let mut footprint = Footprint::new(at(0));
        footprint.may_hold = NodeSet::single(2);
        footprint.on_round(EMPTY, EMPTY, EMPTY, at(10));
        footprint.forget(2);
        assert_eq!(left(&footprint), EMPTY);
    }

    /// A node has granted the lock in an earlier round, and has not replied to the last one. That
    /// it releases the lock does not show that the last request has arrived.
    ///
    /// Fault: N216
    /// Promise: P5
    #[test]
    fn repeated_request_without_reply_counts_as_lost() {
        let node = NodeSet::single(2);
        for (known_before, broken_until) in [(EMPTY, at(0)), (node, at(10))] {
            let mut footprint = Footprint::new(at(0));
            footprint.on_round(node, EMPTY, known_before, at(10));
            assert_eq!(footprint.in_flight.broken_until, broken_until);
            assert_eq!(footprint.in_flight.unanswered, node);
        }
    }
}
