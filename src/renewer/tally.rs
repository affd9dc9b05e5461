//! `Tally`: what the nodes that answered say about one lock, and what that leaves of it.

use std::sync::Arc;

use super::{schedule::Generation, worker::Worker};
use crate::{
    clock::{self, Moment},
    error::LockLost,
    grant::deadline_from,
    holder::Holder,
    lease::Lease,
    node::calls::Renewed,
    redlock::{Ballot, NodeSet, Slip},
};

pub(super) struct Tally {
    /// Until when they keep it, or that they do not.
    pub(super) said: Vec<(usize, Option<Moment>)>,
    /// Those that do not keep it, and nobody else there.
    pub(super) missing: NodeSet,
    /// How many keep it whose word counts, and when the first of them was asked.
    pub(super) confirmed: usize,
    pub(super) first_sent: Moment,
    /// How it is lost, if it is.
    why: LockLost,
}

impl Worker {
    /// What was said about the lock at `index` of a batch.
    pub(super) fn tally(
        &self,
        lease: &Lease,
        ballot: &Ballot<(u64, Vec<Renewed>)>,
        index: usize,
        barred: NodeSet,
    ) -> Tally {
        let mut missing = NodeSet::NONE;
        let mut said = Vec::with_capacity(ballot.slips.len());
        let (mut confirmed, mut first_sent, mut why) = (0, Moment::NEVER, LockLost::Gone);
        for (node, slip) in ballot.slips.iter().enumerate() {
            let Slip::Said(answer) = slip else { continue };
            match answer.reply.1.get(index) {
                // A node that votes again keeps what it was given meanwhile; until then that does not count.
                Some(Renewed::Yes) if self.desk.redlock.node(node).quarantined(answer.sent).is_some() => {}
                Some(Renewed::Yes) => {
                    if !barred.has(node) {
                        confirmed += 1;
                        first_sent = first_sent.min(answer.sent);
                    }
                    said.push((node, Some(deadline_from(answer.sent, lease.claim.ttl))));
                }
                Some(Renewed::Gone) => {
                    said.push((node, None));
                    missing = missing.with(NodeSet::only(node));
                }
                Some(Renewed::Other(id)) => {
                    said.push((node, None));
                    why = LockLost::Taken { by: Box::new(Holder::known_by_id(id.clone())) };
                }
                None => {}
            }
        }
        Tally { said, missing, confirmed, first_sent, why }
    }

    /// Until when a quorum keeps it by all that has been said. Otherwise its lease ends, and `None`: so too if it has been let go of.
    pub(super) fn count(&self, generation: Generation, lease: &Arc<Lease>, tally: &Tally) -> Option<Moment> {
        // A lease that was released while its renewal was under way is not there any more, and that is no loss.
        let validity = self.desk.shared.state.lock().schedule.heard(generation, &tally.said)?;
        if validity.is_none() {
            let kept = self.desk.shared.state.lock().schedule.forget(generation);
            if kept.is_some() {
                self.desk.lose(lease, tally.why.clone());
                // Some of several nodes may keep it still, and any may be given it by what is under way.
                if self.desk.redlock.len() > 1 || clock::now() < lease.late.until() {
                    self.desk.take_back(lease);
                }
            }
        }
        validity
    }
}
