//! Taking a lock anew on nodes that do not keep it: they were away when it was taken, or have been
//! restarted since. Otherwise a lock that is held for long would lose one node after the other, and
//! then be lost although a quorum was always there.

use std::{sync::Arc, time::Duration};

use super::{
    cleanup_queue::Cleanup,
    schedule::Generation,
    worker::{MissingOn, PREEMPTION_DELAY_MAX, Worker},
};
use crate::{
    clock::{self, Moment},
    grant::deadline_from_sent,
    lease::Lease,
    node::requests::{Acquire, AcquireMode, AcquireReply},
    redlock::{BroadcastOptions, EXPIRY_SLACK, NodeSet, PendingAcks, Response, Vote},
};

/// A node that says that it lacks a lock has answered sooner than this. What it has not taken by
/// then it does not take: the lock may be given up meanwhile.
const REACQUIRE_TIMEOUT: Duration = Duration::from_millis(250);

impl Worker {
    /// Takes locks anew, one after the other, until something is due that cannot wait: by the next
    /// renewal it is known which are lacking still. At least one each time, so that it comes to
    /// an end.
    pub(super) fn reacquire_all(&mut self, missing: Vec<MissingOn>) {
        for (generation, lease, nodes) in missing {
            // Where a node does not answer in time, the next renewal is soon enough for the others
            // too.
            let went_well = self
                .isolate_panic(|worker| worker.reacquire(generation, &lease, nodes))
                .unwrap_or(true);
            if !went_well || self.desk.is_wanted(clock::now()) {
                return;
            }
        }
    }

    /// Asks nodes for a lock that is held on others. A node gives it only if nobody else has it
    /// there, and stores a token no smaller than the holder's, who keeps its own. False if some
    /// did not answer in time.
    fn reacquire(&mut self, generation: Generation, lease: &Arc<Lease>, nodes: NodeSet) -> bool {
        if lease.ended().is_some() {
            // There is no time for it any more, which is no fault of the nodes.
            return true;
        }
        let claim = &lease.claim;
        // Whoever releases it from now on has to think of these nodes too.
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
        let responses = self.ask(
            BroadcastOptions::awaiting_all(nodes, deadline),
            PREEMPTION_DELAY_MAX,
            call,
            |_, _| Vote::Yes,
        );
        let unknown = responses.unanswered().union(responses.outcome_unknown());
        let (mut replies, mut acquired) = (Vec::new(), NodeSet::EMPTY);
        for (node, response) in responses.by_node.iter().enumerate() {
            if let Response::Replied(answer) = response
                && matches!(answer.reply, AcquireReply::Held { .. })
            {
                acquired = acquired.union(NodeSet::single(node));
                if self.desk.redlock.node(node).quarantine_left(answer.sent).is_none() {
                    replies.push((node, Some(deadline_from_sent(answer.sent, claim.ttl))));
                }
            }
        }
        let now = clock::now();
        let mut state = self.desk.shared.state.lock();
        let cleanup = |nodes: NodeSet, at: Moment| Cleanup {
            claim: claim.clone(),
            queue_entry: String::new(),
            nodes,
            unless_held: Some(lease.clone()),
            pending_acks: PendingAcks::new(),
            expires_at: at.saturating_add(claim.ttl),
        };
        if !unknown.is_empty() {
            // It may be taken after its holder has released it.
            let settled = deadline.saturating_add(EXPIRY_SLACK);
            state.cleanups.add(cleanup(unknown, settled), settled);
        }
        match state.schedule.record_replies(generation, &replies) {
            Some(Some(validity)) => {
                drop(state);
                lease.update_deadline(validity, now);
            }
            // Released meanwhile, perhaps before it was taken here.
            _ if !acquired.is_empty() => state.cleanups.add(cleanup(acquired, now), now),
            _ => {}
        }
        unknown.is_empty()
    }
}
