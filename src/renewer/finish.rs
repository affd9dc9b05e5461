//! The end of the renewer: what is held is released, and what is left over is taken back, as far as the nodes answer until the
//! time is over.

use super::{
    tell_loss,
    undo::Undo,
    worker::{BATCH_MIN, Worker},
};
use crate::{
    clock::{self, Moment},
    error::LockLost,
    lease::End,
    node::calls::Ping,
    redlock::{NodeSet, Round, Trouble, Unheard, Vote},
};

/// So many are asked for before their answers are read, so that thousands do not take as many round trips. Fewer than a
/// connection may owe.
const AT_ONCE: usize = 32;

impl Worker {
    pub(super) fn finish(mut self) {
        let (leases, undos, errands) = {
            let mut state = self.desk.shared.state.lock();
            (state.schedule.take_all(), state.undos.take_all(), std::mem::take(&mut state.errands))
        };
        for lease in &leases {
            lease.end(End::Lost(LockLost::Shutdown));
            self.apart(|worker| tell_loss(worker.desk.redlock.observer(), lease));
        }
        for errand in errands {
            self.apart(|worker| worker.run_errand(errand));
        }
        let until = clock::now();
        // What its holder gives up at this moment is the holder's to release.
        let held = leases.iter().filter(|lease| lease.ended() != Some(End::Released)).map(|lease| Undo {
            claim: lease.claim.clone(),
            waiter: lease.place.clone(),
            nodes: lease.nodes(),
            unless_held: None,
            until,
        });
        // What is held goes first: others wait for it.
        let mut left: Vec<Undo> = held.chain(undos).collect();
        // An answer that is lost, or a connection that has ended meanwhile, is made up for by the second time.
        let first = self.take_back_all(&mut left);
        let trouble = self.take_back_all(&mut left).or(first);
        if !left.is_empty() {
            let why = trouble.map_or_else(|| "not all was confirmed in time".into(), |trouble| trouble.to_string());
            say!(warn, "shut down without releasing all locks, which are left to expire: {why}");
        }
        // Whoever has stopped this may not have waited for it.
        self.desk.redlock.observer().close();
    }

    /// Tries each once, and keeps those of which something is left. A node that does not answer, or cannot be reached, is not
    /// asked about the others.
    fn take_back_all(&mut self, left: &mut Vec<Undo>) -> Option<Trouble> {
        let (mut away, mut trouble) = (NodeSet::NONE, None);
        for some in left.chunks_mut(AT_ONCE) {
            trouble = self.take_back_some(some, &mut away).or(trouble);
        }
        left.retain(|undo| !undo.nodes.is_empty());
        trouble
    }

    /// The same for a few, whose answers come together.
    fn take_back_some(&mut self, some: &mut [Undo], away: &mut NodeSet) -> Option<Trouble> {
        let (mut trouble, mut under_way) = (None, Vec::new());
        for (index, undo) in some.iter_mut().enumerate() {
            let to = undo.nodes.without(*away);
            let Some(deadline) = self.half_of_the_rest().filter(|_| !to.is_empty()) else { continue };
            // The first makes sure of the connections, and that the script is known.
            let waits = index == 0 || !self.are_connected(to);
            let wait_until = if waits { deadline } else { clock::now() };
            let round = Round { wait_until, ..Round::all(to, deadline) };
            let Some(ballot) = self.apart(|worker| worker.take_back(undo, round)) else { continue };
            if !waits {
                under_way.push((index, ballot.receipts));
            } else {
                *away = away.with(ballot.silent()).with(self.unreached(&ballot));
                if !undo.nodes.is_empty() {
                    trouble = Some(Trouble::of(&self.desk.redlock, ballot, |_| "done".into()));
                }
            }
        }
        trouble = self.hear_out(&under_way, away).or(trouble);
        for (index, receipts) in under_way {
            let settled = receipts.iter().filter(|(_, receipt)| receipt.is_settled());
            some[index].nodes = some[index].nodes.without(settled.map(|(node, _)| *node).collect());
        }
        trouble
    }

    /// Asks those who owe answers whether they are there: their word comes behind what they owe.
    fn hear_out(&mut self, under_way: &[(usize, Unheard)], away: &mut NodeSet) -> Option<Trouble> {
        let receipts = under_way.iter().flat_map(|(_, receipts)| receipts);
        let owing: NodeSet = receipts.filter(|(_, receipt)| !receipt.is_settled()).map(|(node, _)| *node).collect();
        let deadline = self.half_of_the_rest().filter(|_| !owing.is_empty())?;
        let ballot =
            self.apart(|worker| worker.ask(Round::all(owing, deadline), BATCH_MIN, |_| Ping, |_, ()| Vote::Yes))?;
        *away = away.with(ballot.silent());
        let heard = ballot.voting(Vote::Yes);
        (!owing.without(heard).is_empty()).then(|| Trouble::of(&self.desk.redlock, ballot, |()| "it answers".into()))
    }

    /// Half the time, so that there is another half. `None` when it is over.
    fn half_of_the_rest(&self) -> Option<Moment> {
        let (now, stop) = (clock::now(), self.desk.limits().1);
        (now < stop).then(|| now.saturating_add(stop.after(now) / 2))
    }
}
