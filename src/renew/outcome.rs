//! Outcome of a renewal for one lock: what the nodes replied, and what remains of the lease.

use std::sync::Arc;

use super::{schedule::Generation, worker::Worker};
use crate::{
    backend::{
        redis::requests_and_replies::RenewReply,
        redlock::{Response, Responses},
    },
    core::{
        holder::Holder, lease::Lease, lock_lost::LockLost, quorum::NodeSet,
        validity::deadline_from_sent,
    },
    sys::clock::{self, Moment},
};

pub(super) struct RenewalOutcome {
    /// New deadline on each node that replied; `None` if the node does not keep the lock.
    pub(super) replies: Vec<(usize, Option<Moment>)>,
    /// Nodes on which no client holds the lock.
    pub(super) missing: NodeSet,
    /// Number of confirmations that count, and the time at which the first of them was requested.
    pub(super) confirmations: usize,
    pub(super) first_sent: Moment,
    /// Reason to report if the lock is lost.
    loss: LockLost,
}

impl Worker {
    /// Collects the replies about the lock at `index` of a batch.
    pub(super) fn collect_replies(
        &self,
        lease: &Lease,
        responses: &Responses<(u64, Vec<RenewReply>)>,
        index: usize,
        excluded: NodeSet,
    ) -> RenewalOutcome {
        let (redlock, mut missing) = (&self.context.redlock, NodeSet::EMPTY);
        let mut replies = Vec::with_capacity(responses.by_node.len());
        let (mut confirmations, mut first_sent, mut loss) = (0, Moment::NEVER, LockLost::Gone);
        for (node, response) in responses.by_node.iter().enumerate() {
            let Response::Replied(exchange) = response else { continue };
            match exchange.reply.1.get(index) {
                // A node in quarantine renews too, but its confirmation does not count.
                Some(RenewReply::Renewed)
                    if redlock.node(node).quarantine_left(exchange.sent).is_some() => {}
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

    /// Records the replies and returns the time until which a quorum keeps the lock. Returns `None`
    /// if there is no quorum, which ends the lease, or if the lease was released meanwhile.
    pub(super) fn apply_replies(
        &self,
        generation: Generation,
        lease: &Arc<Lease>,
        outcome: &RenewalOutcome,
    ) -> Option<Moment> {
        // A lease that was released while its renewal was in flight is not lost.
        let validity = self
            .context
            .shared
            .state
            .lock()
            .schedule
            .record_replies(generation, &outcome.replies)?;
        if validity.is_none() {
            let kept = self.context.shared.state.lock().schedule.remove(generation);
            if kept.is_some() {
                self.context.end_as_lost(lease, outcome.loss.clone());
                // A minority of nodes may still keep the lock, or a request in flight may acquire
                // it again.
                if self.context.redlock.len() > 1 || clock::now() < lease.in_flight.until() {
                    self.context.residues.clean_up(lease);
                }
            }
        }
        validity
    }
}
