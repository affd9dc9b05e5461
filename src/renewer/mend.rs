//! Taking a lock anew on nodes that do not keep it: they were away when it was taken, or have been restarted since. Otherwise
//! a lock that is held for long would lose one node after the other, and then be lost although a quorum was always there.

use std::{sync::Arc, time::Duration};

use super::{
    schedule::Generation,
    undo::Undo,
    worker::{BATCH_MIN, Lacking, Worker},
};
use crate::{
    clock::{self, Moment},
    grant::deadline_from,
    lease::Lease,
    node::calls::{Acquire, Acquired, Mode},
    redlock::{LATE_SLACK, NodeSet, Round, Slip, Unheard, Vote},
};

/// A node that says that it lacks a lock has answered sooner than this. What it has not taken by then it does not take: the
/// lock may be given up meanwhile.
const MEND_MAX: Duration = Duration::from_millis(250);

impl Worker {
    /// Takes locks anew, one after the other, until something is due that cannot wait: by the next renewal it is known
    /// which are lacking still. At least one each time, so that it comes to an end.
    pub(super) fn mend_all(&mut self, lacking: Vec<Lacking>) {
        for (generation, lease, nodes) in lacking {
            // Where a node does not answer in time, the next renewal is soon enough for the others too.
            let went_well = self.apart(|worker| worker.mend(generation, &lease, nodes)).unwrap_or(true);
            if !went_well || self.desk.is_wanted(clock::now()) {
                return;
            }
        }
    }

    /// Asks nodes for a lock that is held on others. A node gives it only if nobody else has it there, and stores a token no
    /// smaller than the holder's, who keeps its own. False if some did not answer in time.
    fn mend(&mut self, generation: Generation, lease: &Arc<Lease>, nodes: NodeSet) -> bool {
        if lease.ended().is_some() {
            // There is no time for it any more, which is no fault of the nodes.
            return true;
        }
        let claim = &lease.claim;
        // Whoever releases it from now on has to think of these nodes too.
        lease.also_on(nodes);
        let deadline = clock::now().saturating_add(MEND_MAX).min(lease.deadline());
        let call = |_| Acquire {
            key: &claim.key,
            id: claim.id.as_str(),
            ttl_ms: claim.ttl_ms(),
            mode: Mode::Try,
            waiter: "",
            heal_ms: 0,
            token_min: lease.token.0,
        };
        let ballot = self.ask(Round::all(nodes, deadline), BATCH_MIN, call, |_, _| Vote::Yes);
        let unclear = ballot.open().with(ballot.broken());
        let (mut said, mut taken) = (Vec::new(), NodeSet::NONE);
        for (node, slip) in ballot.slips.iter().enumerate() {
            if let Slip::Said(answer) = slip
                && matches!(answer.reply, Acquired::Held { .. })
            {
                taken = taken.with(NodeSet::only(node));
                if self.desk.redlock.node(node).quarantined(answer.sent).is_none() {
                    said.push((node, Some(deadline_from(answer.sent, claim.ttl))));
                }
            }
        }
        let now = clock::now();
        let mut state = self.desk.shared.state.lock();
        let undo = |nodes: NodeSet, at: Moment| Undo {
            claim: claim.clone(),
            waiter: String::new(),
            nodes,
            unless_held: Some(lease.clone()),
            asked: Unheard::new(),
            until: at.saturating_add(claim.ttl),
        };
        if !unclear.is_empty() {
            // It may be taken after its holder has released it.
            let settled = deadline.saturating_add(LATE_SLACK);
            state.undos.add(undo(unclear, settled), settled);
        }
        match state.schedule.heard(generation, &said) {
            Some(Some(validity)) => {
                drop(state);
                lease.revise(validity, now);
            }
            // Released meanwhile, perhaps before it was taken here.
            _ if !taken.is_empty() => state.undos.add(undo(taken, now), now),
            _ => {}
        }
        unclear.is_empty()
    }
}
