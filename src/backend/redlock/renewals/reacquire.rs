//! Re-acquires a lock on nodes that do not have it: they were unreachable when it was acquired, or
//! have been restarted since. Otherwise a lock held for a long time could lose one node after
//! another, and end although a quorum was reachable all the time.
//!
//! Invariant: a re-acquired lock is released although its holder may have released it meanwhile.
//! The nodes are added to the lease before the request is sent, and the end of the lease is checked
//! after the reply. A holder ends the lease before it sends the release, and reads the nodes after
//! that. So either the release comes after the re-acquisition and covers it, or the check sees the
//! end.

use std::{sync::Arc, time::Duration};

use super::QuorumRenewals;
use crate::{
    backend::{
        LeaseResidue, RenewalLimits,
        redis::requests::{Acquire, AcquireMode, AcquireReply},
        redlock::{BroadcastOptions, Response},
    },
    core::{
        claim::Residue,
        lease::Lease,
        node_reply::Vote,
        quorum::NodeSet,
        validity::{EXPIRY_SLACK, deadline_from_sent},
    },
    sys::clock::{self, Moment},
};

/// Timeout of a re-acquisition. The node ignores the request after this time, because the lock may
/// have been released by then. Long enough for a node that has just replied to a renewal.
const REACQUIRE_TIMEOUT: Duration = Duration::from_millis(250);

impl QuorumRenewals {
    /// Asks nodes for a lock that is held on others. A node grants it only if no other client holds
    /// it there, except clients that may share it. The node stores a token that is at least that of
    /// the lease. The lease keeps its token.
    pub(super) fn reacquire(
        &mut self,
        lease: &Arc<Lease>,
        nodes: NodeSet,
        limits: &mut RenewalLimits<'_>,
    ) -> Vec<LeaseResidue> {
        let now = clock::now();
        // It may have been re-acquired since it was found missing.
        let lacking = lease.node_deadlines.lock().lacking();
        // Where the first request may still arrive, the next renewal decides. Otherwise a confirmed
        // release would not show that this request has arrived.
        let nodes = nodes.intersection(lacking).difference(lease.in_flight.unanswered_at(now));
        if nodes.is_empty() || now >= lease.deadline() {
            return Vec::new();
        }
        let claim = &lease.claim;
        // A release must include these nodes from now on.
        lease.add_nodes(nodes);
        let deadline = now.saturating_add(REACQUIRE_TIMEOUT).min(lease.deadline());
        let request = |_| Acquire {
            kind: claim.kind,
            key: &claim.key,
            id: claim.id.as_str(),
            ttl_ms: claim.ttl_ms(),
            mode: AcquireMode::Try,
            queue_entry: "",
            repair_ttl_ms: 0,
            token_min: Some(lease.token().0),
            is_token_decided: false,
        };
        let round = BroadcastOptions::awaiting_all(nodes, deadline);
        let responses = self.ask(round, limits, request, |_, _| Vote::Yes);
        let unknown = responses.unanswered().union(responses.outcome_unknown());
        let mut acquired = NodeSet::EMPTY;
        for (node, response) in responses.by_node.iter().enumerate() {
            if let Response::Replied(exchange) = response
                && matches!(exchange.reply, AcquireReply::Held { .. })
            {
                acquired = acquired.union(NodeSet::single(node));
                if self.votes_at(node, exchange.sent) {
                    let until = deadline_from_sent(exchange.sent, claim.ttl);
                    lease.node_deadlines.lock().confirm(node, until);
                }
            }
        }
        let now = clock::now();
        let mut left = Vec::new();
        if !unknown.is_empty() {
            // The request may be applied after the holder has released the lock.
            left.push(residue(lease, unknown, deadline.saturating_add(EXPIRY_SLACK)));
            // The node is no quicker for other locks.
            self.forget_missing();
        }
        if lease.ended().is_none() {
            // A repair never shortens a lease. The next renewal does, if it must.
            let valid_until = lease.node_deadlines.lock().valid_until();
            if let Some(until) = valid_until {
                lease.extend_deadline(until, now);
            }
        } else if !acquired.is_empty() {
            left.push(residue(lease, acquired, now));
        }
        left
    }
}

fn residue(lease: &Arc<Lease>, nodes: NodeSet, in_flight_until: Moment) -> LeaseResidue {
    LeaseResidue { lease: lease.clone(), residue: Residue::new(nodes, "", in_flight_until) }
}
