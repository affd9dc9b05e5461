//! What the replies to a renewal say about one lock, and which replies are still needed. Pure.

use crate::{
    backend::redis::requests::RenewReply,
    core::{
        holder::Holder,
        lock_lost::LockLost,
        quorum::{NodeSet, quorum},
    },
    sys::clock::Moment,
};

pub(super) struct Tally {
    /// Nodes whose confirmations count.
    pub(super) confirmed: NodeSet,
    /// Time at which the first of these was asked.
    pub(super) first_sent: Moment,
    /// Nodes that do not keep the lock, or whose replies do not count for this lease.
    lost: NodeSet,
    /// Nodes on which no client holds the lock.
    pub(super) missing: NodeSet,
    /// Reason to report if the lock is lost.
    pub(super) loss: LockLost,
}

impl Tally {
    pub(super) fn new(excluded: NodeSet) -> Tally {
        Tally {
            confirmed: NodeSet::EMPTY,
            first_sent: Moment::NEVER,
            lost: excluded,
            missing: NodeSet::EMPTY,
            loss: LockLost::Gone,
        }
    }

    /// Adds the reply of a node that was asked at `sent`. `votes` says whether its confirmation
    /// counts.
    pub(super) fn add(&mut self, node: usize, sent: Moment, reply: &RenewReply, votes: bool) {
        match reply {
            RenewReply::Renewed => {
                if votes && !self.lost.contains(node) {
                    self.confirmed = self.confirmed.union(NodeSet::single(node));
                    self.first_sent = self.first_sent.min(sent);
                }
                return;
            }
            RenewReply::Gone => self.missing = self.missing.union(NodeSet::single(node)),
            RenewReply::HeldByOther(id) => {
                self.loss = LockLost::Taken { by: Box::new(Holder::from_id(id.clone())) };
            }
        }
        self.lost = self.lost.union(NodeSet::single(node));
    }

    /// Whether a node has replied that it does not keep the lock.
    pub(super) fn reports_loss(&self) -> bool {
        !self.missing.is_empty() || self.loss != LockLost::Gone
    }
}

/// Returns the silent nodes whose replies are needed: those that may confirm a lock which is
/// neither confirmed nor lost yet.
pub(super) fn needed_nodes<'a>(
    nodes: usize,
    silent: NodeSet,
    tallies: impl Iterator<Item = &'a Tally>,
) -> NodeSet {
    let mut needed = NodeSet::EMPTY;
    for tally in tallies {
        if tally.confirmed.len() < quorum(nodes) && nodes - tally.lost.len() >= quorum(nodes) {
            needed = needed.union(silent.difference(tally.lost));
        }
    }
    needed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(nanos: u64) -> Moment {
        Moment::from_nanos(nanos)
    }

    /// One letter per node: `k`eeps the lock, `l`ost it, `x` for a confirmation that does not
    /// count, `e`xcluded, or `.` for a silent node.
    fn tally(lock: &str) -> Tally {
        let excluded = lock.match_indices('e').map(|(node, _)| node).collect();
        let mut tally = Tally::new(excluded);
        for (node, letter) in lock.bytes().enumerate() {
            let reply = if letter == b'l' { RenewReply::Gone } else { RenewReply::Renewed };
            if letter != b'.' {
                tally.add(node, at(node as u64), &reply, letter != b'x');
            }
        }
        tally
    }

    fn needs(locks: &[&str]) -> Vec<usize> {
        let silent = locks[0].match_indices('.').map(|(node, _)| node).collect();
        let tallies: Vec<_> = locks.iter().map(|lock| tally(lock)).collect();
        needed_nodes(locks[0].len(), silent, tallies.iter()).iter().collect()
    }

    /// Fault: N101
    #[test]
    fn silent_node_needed_if_it_may_decide() {
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
            // As for a node where a late request may still arrive.
            ("ke.", &[2]),
            ("le.", &[]),
        ] {
            assert_eq!(needs(&[lock]), nodes, "{lock}");
        }
    }

    #[test]
    fn one_undecided_lock_is_enough() {
        assert!(needs(&["kk.", "kk.", "kk."]).is_empty());
        assert_eq!(needs(&["kk.", "kl.", "ll."]), [2]);
    }

    #[test]
    fn reply_of_excluded_node_does_not_count() {
        let mut tally = Tally::new(NodeSet::single(0));
        tally.add(0, at(1), &RenewReply::Renewed, true);
        tally.add(2, at(7), &RenewReply::Renewed, true);
        tally.add(1, at(5), &RenewReply::Renewed, true);
        assert_eq!((tally.confirmed.len(), tally.first_sent), (2, at(5)));
        tally.add(0, at(8), &RenewReply::Gone, true);
        assert_eq!(tally.lost, NodeSet::single(0));
        tally.add(1, at(9), &RenewReply::Gone, true);
        assert_eq!((tally.missing, tally.loss), (NodeSet::first_n(2), LockLost::Gone));
    }
}
