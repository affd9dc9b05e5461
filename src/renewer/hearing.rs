//! Whom to wait for although a quorum has answered: what a node nearby has lost, one far away may have kept all along.

use std::{sync::Arc, time::Duration};

use super::{
    schedule::Generation,
    worker::{SPARE, Worker},
};
use crate::{
    clock,
    lease::Lease,
    node::{
        Failure, Reason,
        calls::{Renew, Renewal, Renewed},
    },
    redlock::{Ballot, NodeSet, Round, Slip, Verdict, Vote, quorum},
};

/// What nodes have said about one lock.
#[derive(Clone, Copy, Debug, Default)]
struct Word {
    /// They keep it, and that counts.
    kept: NodeSet,
    /// They do not, or it would not count.
    lost: NodeSet,
}

/// Which of the silent ones among so many nodes have to be heard: those by whom a lock may be confirmed that is not yet, and
/// not lost either.
fn to_hear(nodes: usize, silent: NodeSet, words: impl Iterator<Item = Word>) -> NodeSet {
    let open = words.filter(|word| word.kept.len() < quorum(nodes) && nodes - word.lost.len() >= quorum(nodes));
    open.fold(NodeSet::NONE, |hear, word| hear.with(silent.without(word.lost)))
}

impl Worker {
    /// Asks those again who were not waited for, or left out, if some lock needs their word; not the `deaf`, to whom it adds those
    /// who do not answer now.
    pub(super) fn hear_the_rest(
        &mut self,
        batch: &[&(Generation, Arc<Lease>)],
        renewals: &[Renewal<'_>],
        left: Duration,
        ballot: &mut Ballot<(u64, Vec<Renewed>)>,
        deaf: &mut NodeSet,
    ) {
        // Left out, or connected to still when the others had answered.
        let passed_over =
            |failure: &Failure| !failure.sent && matches!(failure.reason, Reason::Resting | Reason::TimedOut);
        let passed_over = ballot.nodes_where(|slip| matches!(slip, Slip::Failed(failure) if passed_over(failure)));
        let silent = ballot.open().with(passed_over).without(*deaf);
        if ballot.verdict() != Verdict::Won || silent.is_empty() {
            return;
        }
        // One that was released meanwhile need not be confirmed.
        let barred: Vec<Option<NodeSet>> = {
            let schedule = &self.desk.shared.state.lock().schedule;
            let barred = |(generation, _): &&(Generation, _)| {
                schedule.is_kept(*generation).then(|| schedule.barred(*generation))
            };
            batch.iter().map(barred).collect()
        };
        let words = barred.into_iter().enumerate();
        let words = words.filter_map(|(index, barred)| Some(self.word(ballot, index, barred?)));
        let redlock = &self.desk.redlock;
        let to = to_hear(redlock.len(), silent, words);
        if to.is_empty() {
            return;
        }
        // Half of what a release has that waits for this thread.
        let patience = (left / 4).min(redlock.operation_timeout() / 2);
        let now = clock::now();
        let round = Round {
            wait_until: now.saturating_add(patience),
            ..Round::all(to, now.saturating_add(redlock.operation_timeout()))
        };
        let mut heard = self.ask(round, SPARE, |_| Renew(renewals), |_, _| Vote::Yes);
        for node in to.iter() {
            std::mem::swap(&mut ballot.slips[node], &mut heard.slips[node]);
            ballot.votes[node] = heard.votes[node];
        }
        *deaf = deaf.with(to.without(ballot.nodes_where(|slip| matches!(slip, Slip::Said(_)))));
    }

    fn word(&self, ballot: &Ballot<(u64, Vec<Renewed>)>, index: usize, barred: NodeSet) -> Word {
        let mut word = Word { kept: NodeSet::NONE, lost: barred };
        for (node, slip) in ballot.slips.iter().enumerate() {
            let Slip::Said(answer) = slip else { continue };
            match answer.reply.1.get(index) {
                Some(Renewed::Yes) if barred.has(node) => {}
                Some(Renewed::Yes) if self.desk.redlock.node(node).quarantined(answer.sent).is_some() => {}
                Some(Renewed::Yes) => word.kept = word.kept.with(NodeSet::only(node)),
                Some(Renewed::Gone | Renewed::Other(_)) => word.lost = word.lost.with(NodeSet::only(node)),
                None => {}
            }
        }
        word
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For each node a letter: `k`ept, `l`ost, what does not count, or `.` for a silent one.
    fn hears(locks: &[&str]) -> Vec<usize> {
        let at = |lock: &str, letter| lock.match_indices(letter).map(|(node, _)| node).collect::<NodeSet>();
        let words = locks.iter().map(|lock| Word { kept: at(lock, "k"), lost: at(lock, "l") });
        to_hear(locks[0].len(), at(locks[0], "."), words).iter().collect()
    }

    #[test]
    fn who_is_silent_is_heard_where_a_lock_may_be_kept_by_it() {
        for (lock, nodes) in [
            ("kk.", &[][..]),
            ("kl.", &[2]),
            // One that does not vote.
            ("kx.", &[2]),
            ("k..", &[1, 2]),
            // It is lost, whatever the third one says.
            ("ll.", &[]),
            ("lx.", &[2]),
            ("klk", &[]),
            ("kkk..", &[]),
            ("kkl..", &[3, 4]),
            ("kll..", &[3, 4]),
            ("lll..", &[]),
            // Too few for a quorum, but they may keep it for longer than it was known.
            ("kllx.", &[4]),
            ("k.", &[1]),
            ("l.", &[]),
        ] {
            assert_eq!(hears(&[lock]), nodes, "{lock}");
        }
    }

    #[test]
    fn one_lock_of_many_is_enough_to_ask() {
        assert!(hears(&["kk.", "kk.", "kk."]).is_empty());
        assert_eq!(hears(&["kk.", "kl.", "ll."]), [2]);
    }

    /// As where a late request may still arrive.
    #[test]
    fn nobody_is_heard_whose_word_would_not_count() {
        let barred = Word { kept: NodeSet::only(0), lost: NodeSet::only(1) };
        let silent = [1, 2].into_iter().collect();
        assert_eq!(to_hear(3, silent, [barred].into_iter()), NodeSet::only(2));
    }
}
