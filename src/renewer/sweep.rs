//! Taking back several at a time, whose answers come together: one after the other they would take a round trip each, which is
//! slower than locks over a long way leave more of them.

use std::time::Duration;

use super::{
    undo::Undo,
    worker::{BATCH_MIN, Worker},
};
use crate::{
    clock::{self, Moment},
    node::calls::{Ping, Release, ReleaseReply},
    redlock::{Ballot, NodeSet, Round, Slip, Trouble, Vote},
    text::Quoted,
};

/// So many are asked for before their answers are read. A connection may owe twice as many.
pub(super) const AT_ONCE: usize = 32;

/// What is left over must not hold up what is due, however many there are of it. It has been sent by then.
fn spare(since: Moment) -> Duration {
    since.saturating_add(BATCH_MIN).after(clock::now())
}

impl Worker {
    /// Takes back what is due, and puts off what could not be, with the pause that it came with.
    pub(super) fn sweep(&mut self, due: Vec<(Undo, Duration)>) {
        let (mut undos, pauses): (Vec<_>, Vec<_>) = due.into_iter().unzip();
        let redlock = self.desk.redlock.clone();
        let now = clock::now();
        // Many may wait for a node that does not answer; what is on the others must not wait with them.
        let rests = |node: &usize| redlock.len() > 1 && redlock.node(*node).rests(now);
        let mut away = redlock.all().iter().filter(rests).collect();
        let trouble = self.take_back_some(&mut undos, &mut away, |_| {
            // For each anew: what has no time left would close the connections to those who are well.
            Some(clock::now().saturating_add(redlock.operation_timeout()))
        });
        let mut left: Vec<_> = undos.into_iter().zip(pauses).collect();
        left.retain(|(undo, _)| !undo.nodes.is_empty());
        if let (Some(trouble), Some((undo, _))) = (trouble, left.first()) {
            say!(debug, "could not take back {} yet: {trouble}", Quoted(undo.claim.key.name()));
        }
        let now = clock::now();
        let list = &mut self.desk.shared.state.lock().undos;
        left.into_iter().for_each(|(undo, pause)| list.failed(undo, pause, now));
    }

    /// Tries each of these few once, and strikes off where it is done; not on those who are `away`, to whom it adds those who do
    /// not answer or cannot be reached. `deadline` says until when an answer is waited for, if there is time for one.
    pub(super) fn take_back_some(
        &mut self,
        some: &mut [Undo],
        away: &mut NodeSet,
        deadline: impl Fn(&Worker) -> Option<Moment>,
    ) -> Option<Trouble> {
        let (since, count, mut trouble) = (clock::now(), some.len(), None);
        for (index, undo) in some.iter_mut().enumerate() {
            let to = undo.nodes.without(*away);
            let Some(deadline) = deadline(self).filter(|_| !to.is_empty()) else { continue };
            // With one node the first makes sure that the script is known.
            let first = index == 0 && (count == 1 || self.desk.redlock.len() == 1);
            let waits = first || !self.can_be_left(to);
            let wait_until = if waits { deadline } else { clock::now() };
            let round = Round { wait_until, ..Round::all(to, deadline) };
            let Some(ballot) = self.apart(|worker| worker.take_back(undo, round, since)) else {
                // Whoever meets a defect would meet it again, and spoil it for the others each time.
                undo.nodes = NodeSet::NONE;
                continue;
            };
            if waits {
                *away = away.with(ballot.silent()).with(self.unreached(&ballot));
                if !undo.nodes.is_empty() {
                    trouble = Some(Trouble::of(&self.desk.redlock, ballot, |_| "done".into()));
                }
            }
        }
        trouble = self.hear_out(some, away, deadline(self), since).or(trouble);
        some.iter_mut().for_each(Undo::strike_settled);
        trouble
    }

    /// Takes back what may be left on the nodes that `round` is for, and strikes off those where it is done.
    fn take_back(&mut self, undo: &mut Undo, round: Round<'_>, since: Moment) -> Ballot<ReleaseReply> {
        let (claim, waiter) = (undo.claim.clone(), undo.waiter.clone());
        let release =
            |_| Release { key: &claim.key, id: claim.id.as_str().as_bytes(), waiter: &waiter, in_time: false };
        let mut ballot = self.ask(round, spare(since), release, |_, _| Vote::Yes);
        undo.nodes = undo.nodes.without(ballot.nodes_where(|slip| matches!(slip, Slip::Said(_))));
        undo.asked.append(&mut ballot.receipts);
        ballot
    }

    /// Asks those who owe answers whether they are there: their word comes behind what they owe.
    fn hear_out(
        &mut self,
        some: &[Undo],
        away: &mut NodeSet,
        deadline: Option<Moment>,
        since: Moment,
    ) -> Option<Trouble> {
        let owing = some.iter().fold(NodeSet::NONE, |owing, undo| owing.with(undo.owing()));
        let owing = owing.without(*away);
        let round = Round::all(owing, deadline.filter(|_| !owing.is_empty())?);
        let ballot = self.apart(|worker| worker.ask(round, spare(since), |_| Ping, |_, _| Vote::Yes))?;
        *away = away.with(ballot.silent());
        let heard = ballot.voting(Vote::Yes);
        (!owing.without(heard).is_empty()).then(|| Trouble::of(&self.desk.redlock, ballot, |()| "it answers".into()))
    }
}
