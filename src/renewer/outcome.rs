//! `Tally`: what the nodes that answered say about one lock, and what that leaves of it.

use std::sync::Arc;

use super::{schedule::Generation, worker::Worker};
use crate::{
    clock::{self, Moment},
    error::LockLost,
    grant::deadline_from_sent,
    holder::Holder,
    lease::Lease,
    node::requests::RenewReply,
    redlock::{NodeSet, Response, Responses},
};

pub(super) struct RenewalOutcome {
    /// Until when they keep it, or that they do not.
    pub(super) replies: Vec<(usize, Option<Moment>)>,
    /// Those that do not keep it, and nobody else there.
    pub(super) missing: NodeSet,
    /// How many keep it whose word counts, and when the first of them was asked.
    pub(super) confirmations: usize,
    pub(super) first_sent: Moment,
    /// How it is lost, if it is.
    loss: LockLost,
}

impl Worker {
    /// What was said about the lock at `index` of a batch.
    pub(super) fn collect_replies(
        &self,
        lease: &Lease,
        responses: &Responses<(u64, Vec<RenewReply>)>,
        index: usize,
        excluded: NodeSet,
    ) -> RenewalOutcome {
        let mut missing = NodeSet::EMPTY;
        let mut replies = Vec::with_capacity(responses.by_node.len());
        let (mut confirmations, mut first_sent, mut loss) = (0, Moment::NEVER, LockLost::Gone);
        for (node, response) in responses.by_node.iter().enumerate() {
            let Response::Replied(exchange) = response else { continue };
            match exchange.reply.1.get(index) {
                // A node that votes again keeps what it was given meanwhile; until then that does
                // not count.
                Some(RenewReply::Renewed)
                    if self.desk.redlock.node(node).quarantine_left(exchange.sent).is_some() => {}
                Some(RenewReply::Renewed) => {
                    if !excluded.contains(node) {
                        confirmations += 1;
                        first_sent = first_sent.min(exchange.sent);
                    }
                    replies.push((node, Some(deadline_from_sent(exchange.sent, lease.claim.ttl))));
                }
                Some(RenewReply::Gone) => {
                    replies.push((node, None));
                    missing = missing.union(NodeSet::single(node));
                }
                Some(RenewReply::HeldByOther(id)) => {
                    replies.push((node, None));
                    loss = LockLost::Taken { by: Box::new(Holder::from_id(id.clone())) };
                }
                None => {}
            }
        }
        RenewalOutcome { replies, missing, confirmations, first_sent, loss }
    }

    /// Until when a quorum keeps it by all that has been said. Otherwise its lease ends, and
    /// `None`: so too if it has been let go of.
    pub(super) fn apply_replies(
        &self,
        generation: Generation,
        lease: &Arc<Lease>,
        outcome: &RenewalOutcome,
    ) -> Option<Moment> {
        // A lease that was released while its renewal was under way is not there any more, and that
        // is no loss.
        let validity =
            self.desk.shared.state.lock().schedule.record_replies(generation, &outcome.replies)?;
        if validity.is_none() {
            let kept = self.desk.shared.state.lock().schedule.remove(generation);
            if kept.is_some() {
                self.desk.end_as_lost(lease, outcome.loss.clone());
                // Some of several nodes may keep it still, and any may be given it by what is under
                // way.
                if self.desk.redlock.len() > 1 || clock::now() < lease.in_flight.until() {
                    self.desk.clean_up(lease);
                }
            }
        }
        validity
    }
}
