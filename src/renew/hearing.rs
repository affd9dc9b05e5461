//! Decides which nodes to wait for although a quorum has replied: a distant node may still keep a
//! lock that a nearby one has lost.

use std::{sync::Arc, time::Duration};

use super::{schedule::Generation, worker::Worker};
use crate::{
    backend::{
        redis::{
            NodeError, NodeErrorKind,
            requests_and_replies::{Renew, RenewReply, Renewal},
        },
        redlock::{BroadcastOptions, Response, Responses},
    },
    core::{
        lease::Lease,
        node_answer::Vote,
        quorum::{NodeSet, Verdict, quorum},
    },
    sys::clock,
};

/// What nodes replied about one lock.
#[derive(Clone, Copy, Debug, Default)]
struct Word {
    /// Nodes that keep it and whose replies count.
    kept: NodeSet,
    /// Nodes that do not keep it, or whose replies do not count.
    lost: NodeSet,
}

/// Returns the silent nodes whose replies are needed: those that may confirm a lock which is
/// neither confirmed nor lost yet.
fn to_hear(nodes: usize, silent: NodeSet, words: impl Iterator<Item = Word>) -> NodeSet {
    let open = words
        .filter(|word| word.kept.len() < quorum(nodes) && nodes - word.lost.len() >= quorum(nodes));
    open.fold(NodeSet::EMPTY, |hear, word| hear.union(silent.difference(word.lost)))
}

impl Worker {
    /// Asks silent or skipped nodes again if a lock depends on their reply, except the nodes in
    /// `deaf`. Adds those that do not reply now to `deaf`.
    pub(super) fn hear_the_rest(
        &mut self,
        batch: &[&(Generation, Arc<Lease>)],
        renewals: &[Renewal<'_>],
        left: Duration,
        ballot: &mut Responses<(u64, Vec<RenewReply>)>,
        deaf: &mut NodeSet,
    ) {
        // Skipped because of back-off, or still connecting when the others had replied.
        let passed_over = |failure: &NodeError| {
            !failure.outcome_unknown
                && matches!(failure.kind, NodeErrorKind::BackingOff | NodeErrorKind::TimedOut)
        };
        let passed_over = ballot
            .nodes_where(|slip| matches!(slip, Response::Failed(failure) if passed_over(failure)));
        let silent = ballot.unanswered().union(passed_over).difference(*deaf);
        if ballot.verdict() != Verdict::Granted || silent.is_empty() {
            return;
        }
        // A lock that was released meanwhile needs no confirmation.
        let barred: Vec<Option<NodeSet>> = {
            let schedule = &self.context.shared.state.lock().schedule;
            let barred = |(generation, _): &&(Generation, _)| {
                schedule.contains(*generation).then(|| schedule.excluded(*generation))
            };
            batch.iter().map(barred).collect()
        };
        let words = barred.into_iter().enumerate();
        let words = words.filter_map(|(index, barred)| Some(self.word(ballot, index, barred?)));
        let redlock = &self.context.redlock;
        let to = to_hear(redlock.len(), silent, words);
        if to.is_empty() {
            return;
        }
        let wait_max = (left / 4).min(redlock.operation_timeout() / 2);
        let now = clock::now();
        let round = BroadcastOptions {
            wait_until: now.saturating_add(wait_max),
            ..BroadcastOptions::awaiting_all(to, now.saturating_add(redlock.operation_timeout()))
        };
        let mut heard = self.ask(round, |_| Renew(renewals), |_, _| Vote::Yes);
        for node in to.iter() {
            std::mem::swap(&mut ballot.by_node[node], &mut heard.by_node[node]);
            ballot.votes[node] = heard.votes[node];
        }
        *deaf = deaf
            .union(to.difference(ballot.nodes_where(|slip| matches!(slip, Response::Replied(_)))));
    }

    fn word(
        &self,
        ballot: &Responses<(u64, Vec<RenewReply>)>,
        index: usize,
        barred: NodeSet,
    ) -> Word {
        let mut word = Word { kept: NodeSet::EMPTY, lost: barred };
        for (node, slip) in ballot.by_node.iter().enumerate() {
            let Response::Replied(answer) = slip else { continue };
            match answer.reply.1.get(index) {
                Some(RenewReply::Renewed) if barred.contains(node) => {}
                Some(RenewReply::Renewed)
                    if self.context.redlock.node(node).quarantine_left(answer.sent).is_some() => {}
                Some(RenewReply::Renewed) => word.kept = word.kept.union(NodeSet::single(node)),
                Some(RenewReply::Gone | RenewReply::HeldByOther(_)) => {
                    word.lost = word.lost.union(NodeSet::single(node))
                }
                None => {}
            }
        }
        word
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One letter per node: `k`ept, `l`ost, `x` for a reply that does not count, or `.` for a
    /// silent node.
    fn hears(locks: &[&str]) -> Vec<usize> {
        let at = |lock: &str, letter| {
            lock.match_indices(letter).map(|(node, _)| node).collect::<NodeSet>()
        };
        let words = locks.iter().map(|lock| Word { kept: at(lock, "k"), lost: at(lock, "l") });
        to_hear(locks[0].len(), at(locks[0], "."), words).iter().collect()
    }

    /// Fault: N101
    #[test]
    fn silent_node_awaited_if_it_may_decide() {
        for (lock, nodes) in [
            ("kk.", &[][..]),
            ("kl.", &[2]),
            // A node that does not vote.
            ("kx.", &[2]),
            ("k..", &[1, 2]),
            // Lost, whatever the third node replies.
            ("ll.", &[]),
            ("lx.", &[2]),
            ("klk", &[]),
            ("kkk..", &[]),
            ("kkl..", &[3, 4]),
            ("kll..", &[3, 4]),
            ("lll..", &[]),
            // Too few confirmations for a quorum, but the reply may extend the known validity.
            ("kllx.", &[4]),
            ("k.", &[1]),
            ("l.", &[]),
        ] {
            assert_eq!(hears(&[lock]), nodes, "{lock}");
        }
    }

    #[test]
    fn one_undecided_lock_is_enough_to_ask() {
        assert!(hears(&["kk.", "kk.", "kk."]).is_empty());
        assert_eq!(hears(&["kk.", "kl.", "ll."]), [2]);
    }

    /// As for a node where a late request may still arrive.
    #[test]
    fn excluded_node_not_awaited() {
        let barred = Word { kept: NodeSet::single(0), lost: NodeSet::single(1) };
        let silent = [1, 2].into_iter().collect();
        assert_eq!(to_hear(3, silent, [barred].into_iter()), NodeSet::single(2));
    }
}
