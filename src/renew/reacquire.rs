//! Re-acquires a lock on nodes that do not have it: they were unreachable when it was acquired, or
//! have been restarted since. Otherwise a lock held for a long time could lose one node after
//! another, and end although a quorum was reachable all the time.

use std::{sync::Arc, time::Duration};

use super::{
    schedule::Generation,
    worker::{MissingOn, Worker},
};
use crate::{
    backend::{
        redis::requests_and_replies::{Acquire, AcquireMode, AcquireReply},
        redlock::{BroadcastOptions, Response},
    },
    core::{
        lease::Lease,
        node_answer::Vote,
        quorum::NodeSet,
        validity::{EXPIRY_SLACK, deadline_from_sent},
    },
    sys::clock,
};

/// Timeout of a re-acquisition. The node ignores the request after this time, because the lock may
/// have been released by then. Long enough for a node that has just replied to a renewal.
const REACQUIRE_TIMEOUT: Duration = Duration::from_millis(250);

impl Worker {
    /// Re-acquires locks one by one, until urgent work is due. The next renewal finds the locks
    /// that are still missing. Each call tries at least one lock; otherwise constant urgent work
    /// would prevent all progress.
    pub(super) fn reacquire_all(&mut self, missing: Vec<MissingOn>) {
        for (generation, lease, nodes) in missing {
            // If a node does not reply in time, the next renewal is soon enough for the other locks
            // as well.
            let went_well = self
                .isolate_panic(|worker| worker.reacquire(generation, &lease, nodes))
                .unwrap_or(true);
            if !went_well || self.context.shared.has_due_renewals(clock::now()) {
                return;
            }
        }
    }

    /// Asks nodes for a lock that is held on others. A node grants it only if no other client holds
    /// it there, and stores a token that is at least that of the lease. The lease keeps its token.
    /// Returns false if a node did not reply in time.
    fn reacquire(&mut self, generation: Generation, lease: &Arc<Lease>, nodes: NodeSet) -> bool {
        if lease.ended().is_some() {
            // The lease has ended, but no node has failed.
            return true;
        }
        let claim = &lease.claim;
        // A release must include these nodes from now on.
        lease.add_nodes(nodes);
        let deadline = clock::now().saturating_add(REACQUIRE_TIMEOUT).min(lease.deadline());
        let call = |_| Acquire {
            key: &claim.key,
            id: claim.id.as_str(),
            ttl_ms: claim.ttl_ms(),
            mode: AcquireMode::Try,
            queue_entry: "",
            repair_ttl_ms: 0,
            token_min: lease.token.0,
        };
        let responses =
            self.ask(BroadcastOptions::awaiting_all(nodes, deadline), call, |_, _| Vote::Yes);
        let unknown = responses.unanswered().union(responses.outcome_unknown());
        let (mut replies, mut acquired) = (Vec::new(), NodeSet::EMPTY);
        for (node, response) in responses.by_node.iter().enumerate() {
            if let Response::Replied(exchange) = response
                && matches!(exchange.reply, AcquireReply::Held { .. })
            {
                acquired = acquired.union(NodeSet::single(node));
                if self.context.redlock.node(node).quarantine_left(exchange.sent).is_none() {
                    replies.push((node, Some(deadline_from_sent(exchange.sent, claim.ttl))));
                }
            }
        }
        let now = clock::now();
        let residues = &self.context.residues;
        if !unknown.is_empty() {
            // The request may be applied after the holder has released the lock.
            residues.clean_up_unless_held(lease, unknown, deadline.saturating_add(EXPIRY_SLACK));
        }
        let validity =
            self.context.shared.state.lock().schedule.record_replies(generation, &replies);
        match validity {
            Some(Some(validity)) => drop(lease.update_deadline(validity, now)),
            // Released or ended meanwhile, perhaps before the node granted the lock.
            _ if !acquired.is_empty() => residues.clean_up_unless_held(lease, acquired, now),
            _ => {}
        }
        unknown.is_empty()
    }
}
