//! What the votes of N nodes amount to, and until when a quorum keeps a lock. Pure.

use std::fmt;

use smallvec::SmallVec;

pub(crate) use crate::core::node_reply::Vote;
use crate::sys::clock::Moment;

/// What the votes amount to so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Verdict {
    /// Depends on replies that have not arrived yet.
    Pending,
    Granted,
    /// The nodes that voted no prevent a quorum.
    Rejected,
    /// Fewer nodes than a quorum vote yes or no, so the lock is neither granted nor rejected.
    NoQuorum,
}

/// More than half of the nodes: any two quorums have a node in common.
pub(crate) const fn quorum(nodes: usize) -> usize {
    nodes / 2 + 1
}

/// Whether the nodes other than these `count` are too few for a quorum.
pub(crate) const fn prevents_quorum(count: usize, nodes: usize) -> bool {
    nodes - count < quorum(nodes)
}

/// Whether `count` nodes that agree cannot become a quorum, whatever the `pending` ones reply.
pub(crate) const fn is_out_of_reach(count: usize, pending: usize, nodes: usize) -> bool {
    count + pending < quorum(nodes)
}

/// Counts `votes`; `None` is a vote that may still come.
pub(crate) fn verdict(votes: impl ExactSizeIterator<Item = Option<Vote>>) -> Verdict {
    let needed = quorum(votes.len());
    let (mut yes, mut no, mut pending) = (0, 0, 0);
    for vote in votes {
        match vote {
            Some(Vote::Yes) => yes += 1,
            Some(Vote::No) => no += 1,
            Some(Vote::Unknown) => {}
            None => pending += 1,
        }
    }
    if yes >= needed {
        Verdict::Granted
    } else if yes + no + pending < needed {
        Verdict::NoQuorum
    } else if yes + pending >= needed || yes + no < needed {
        Verdict::Pending
    } else {
        Verdict::Rejected
    }
}

/// Returns the token that a quorum has stored. Otherwise the error is the largest token seen, which
/// a quorum must store first.
///
/// A token may be handed out only once a quorum has stored it. The largest of several counters does
/// not increase from holder to holder, because the only node that two quorums have in common may
/// have a counter that is behind. Once a quorum has stored the token, every later quorum has a node
/// that stores it, and that node hands out a larger one.
pub(crate) fn agreed_token(stored: &[u64], nodes: usize) -> Result<u64, u64> {
    let highest = stored.iter().copied().max().unwrap_or(0);
    let agreeing = stored.iter().filter(|token| **token == highest).count();
    if agreeing >= quorum(nodes) { Ok(highest) } else { Err(highest) }
}

/// Time until which each node keeps a lock for us.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NodeDeadlines {
    /// `None` where the node does not keep it.
    deadlines: SmallVec<[Option<Moment>; 1]>,
    /// Nodes whose votes do not count for this lease.
    excluded: NodeSet,
}

impl NodeDeadlines {
    /// Deadlines of nodes that have not replied yet.
    pub(crate) fn new(nodes: usize) -> NodeDeadlines {
        let deadlines = SmallVec::from_elem(Some(Moment::from_nanos(0)), nodes);
        NodeDeadlines { deadlines, excluded: NodeSet::EMPTY }
    }

    /// Records that a node keeps the lock until `deadline`. Its deadline never moves back.
    pub(crate) fn confirm(&mut self, node: usize, deadline: Moment) {
        if let Some(vote) = self.deadlines.get_mut(node)
            && !self.excluded.contains(node)
        {
            *vote = Some(vote.map_or(deadline, |vote| vote.max(deadline)));
        }
    }

    /// Records that a node does not keep the lock for us, or no longer does.
    pub(crate) fn revoke(&mut self, node: usize) {
        if let Some(vote) = self.deadlines.get_mut(node) {
            *vote = None;
        }
    }

    /// Excludes a node for the rest of the lease, because the node may lose the lock again without
    /// reporting it.
    pub(crate) fn exclude(&mut self, node: usize) {
        self.revoke(node);
        self.excluded = self.excluded.union(NodeSet::single(node));
    }

    pub(crate) fn excluded(&self) -> NodeSet {
        self.excluded
    }

    /// Nodes that do not keep the lock, according to their replies, and whose votes count.
    pub(crate) fn lacking(&self) -> NodeSet {
        let nodes = self.deadlines.iter().enumerate();
        let lacking = nodes.filter(|(_, deadline)| deadline.is_none()).map(|(node, _)| node);
        lacking.collect::<NodeSet>().difference(self.excluded)
    }

    /// Time until which a quorum keeps the lock: the quorum-th largest deadline. `None` if there
    /// cannot be a quorum any more.
    pub(crate) fn valid_until(&self) -> Option<Moment> {
        if let [vote] = *self.deadlines.as_slice() {
            return vote;
        }
        let mut deadlines: SmallVec<[Moment; 8]> =
            self.deadlines.iter().copied().flatten().collect();
        deadlines.sort_unstable_by(|a, b| b.cmp(a));
        deadlines.get(quorum(self.deadlines.len()) - 1).copied()
    }
}

/// A set of nodes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub(crate) struct NodeSet(u32);

impl NodeSet {
    /// Maximum number of nodes.
    pub(crate) const CAPACITY: usize = 32;
    pub(crate) const EMPTY: NodeSet = NodeSet(0);

    pub(crate) fn first_n(nodes: usize) -> NodeSet {
        NodeSet(u32::MAX >> (Self::CAPACITY - nodes.clamp(1, Self::CAPACITY)))
    }

    pub(crate) fn single(node: usize) -> NodeSet {
        NodeSet(1 << node)
    }

    pub(crate) fn contains(self, node: usize) -> bool {
        self.0 & (1 << node) != 0
    }

    pub(crate) fn union(self, other: NodeSet) -> NodeSet {
        NodeSet(self.0 | other.0)
    }

    pub(crate) fn difference(self, other: NodeSet) -> NodeSet {
        NodeSet(self.0 & !other.0)
    }

    pub(crate) fn intersection(self, other: NodeSet) -> NodeSet {
        NodeSet(self.0 & other.0)
    }

    pub(crate) fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub(crate) fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    pub(crate) fn iter(self) -> impl DoubleEndedIterator<Item = usize> {
        (0..Self::CAPACITY - self.0.leading_zeros() as usize)
            .filter(move |node| self.contains(*node))
    }
}

impl FromIterator<usize> for NodeSet {
    fn from_iter<I: IntoIterator<Item = usize>>(nodes: I) -> NodeSet {
        nodes.into_iter().fold(NodeSet::EMPTY, |set, node| set.union(NodeSet::single(node)))
    }
}

impl fmt::Debug for NodeSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn count(votes: &str) -> Verdict {
        let votes: Vec<_> = votes
            .chars()
            .map(|letter| match letter {
                'y' => Some(Vote::Yes),
                'n' => Some(Vote::No),
                'u' => Some(Vote::Unknown),
                _ => None,
            })
            .collect();
        verdict(votes.into_iter())
    }

    #[test]
    fn verdict_of_one_node_is_its_vote() {
        for (votes, verdict) in [
            ("y", Verdict::Granted),
            ("n", Verdict::Rejected),
            ("u", Verdict::NoQuorum),
            (".", Verdict::Pending),
        ] {
            assert_eq!(count(votes), verdict, "{votes}");
        }
    }

    #[test]
    fn verdict_is_given_as_soon_as_it_is_certain() {
        for (votes, verdict) in [
            ("yyy..", Verdict::Granted),
            ("yy...", Verdict::Pending),
            ("nnn..", Verdict::Rejected),
            ("nn...", Verdict::Pending),
            ("uuu", Verdict::NoQuorum),
            ("uuu..", Verdict::NoQuorum),
            ("yyuu.", Verdict::Pending),
            ("yyuun", Verdict::Rejected),
            ("nnuu.", Verdict::Pending),
            ("nnuuy", Verdict::Rejected),
            ("nnuuu", Verdict::NoQuorum),
            ("yyuuu", Verdict::NoQuorum),
            // Half of the nodes is no quorum, and half of them voting no prevents one.
            ("yyuu", Verdict::NoQuorum),
            ("nnyy", Verdict::Rejected),
            ("nn..", Verdict::Pending),
            ("nnn.", Verdict::Rejected),
            ("yn", Verdict::Rejected),
            ("yn.", Verdict::Pending),
        ] {
            assert_eq!(count(votes), verdict, "{votes}");
        }
    }

    #[test]
    fn token_agreed_only_if_quorum_stored_it() {
        assert_eq!(agreed_token(&[7], 1), Ok(7));
        assert_eq!(agreed_token(&[10, 2, 2], 5), Err(10));
        assert_eq!(agreed_token(&[10, 10, 2], 5), Err(10));
        assert_eq!(agreed_token(&[10, 10, 10, 2], 5), Ok(10));
    }

    /// Fault: F89
    #[test]
    fn valid_until_is_quorum_th_largest_deadline() {
        let at = Moment::from_nanos;
        let mut deadlines = NodeDeadlines::new(5);
        assert_eq!(deadlines.valid_until(), Some(at(0)));
        for (node, deadline) in [(0, 50), (1, 40), (2, 30)] {
            deadlines.confirm(node, at(deadline));
        }
        assert_eq!(deadlines.valid_until(), Some(at(30)));
        deadlines.confirm(4, at(45));
        assert_eq!(deadlines.valid_until(), Some(at(40)));
        deadlines.confirm(0, at(20));
        assert_eq!(deadlines.valid_until(), Some(at(40)), "a deadline moved back");
        deadlines.revoke(0);
        assert_eq!(deadlines.lacking(), NodeSet::single(0));
        assert_eq!(deadlines.valid_until(), Some(at(30)));
        deadlines.confirm(0, at(90));
        assert!(deadlines.lacking().is_empty());
        assert_eq!(deadlines.valid_until(), Some(at(40)), "the lock was re-acquired");
        assert!(deadlines.excluded().is_empty());
        deadlines.exclude(0);
        assert_eq!(deadlines.excluded(), NodeSet::single(0));
        assert!(deadlines.lacking().is_empty());
        deadlines.confirm(0, at(99));
        assert_eq!(deadlines.valid_until(), Some(at(30)), "a vote that does not count was counted");
        deadlines.revoke(1);
        deadlines.revoke(2);
        assert_eq!(deadlines.valid_until(), None);
    }

    /// All combinations of votes that this many nodes can have cast so far.
    fn all_votes(nodes: u32) -> impl Iterator<Item = Vec<Option<Vote>>> {
        let votes = [None, Some(Vote::Yes), Some(Vote::No), Some(Vote::Unknown)];
        (0..4_usize.pow(nodes))
            .map(move |n| (0..nodes).map(|node| votes[n >> (2 * node) & 3]).collect())
    }

    #[test]
    fn verdict_is_final_and_never_late() {
        for votes in (1..=6).flat_map(all_votes) {
            let now = verdict(votes.iter().copied());
            let ends = [Vote::Yes, Vote::No, Vote::Unknown].map(|rest| {
                verdict(
                    votes
                        .iter()
                        .map(|vote| Some(vote.unwrap_or(rest)))
                        .collect::<Vec<_>>()
                        .into_iter(),
                )
            });
            match now {
                Verdict::Pending => {
                    assert!(ends.iter().any(|end| *end != ends[0]), "{votes:?} is decided")
                }
                sure => {
                    assert!(ends.iter().all(|end| *end == sure), "{votes:?} is not {sure:?} yet")
                }
            }
        }
    }

    /// Nodes are added and removed one at a time for this reason.
    ///
    /// Fault: N90
    #[test]
    fn quorums_overlap_after_one_node_is_added() {
        for nodes in 1..NodeSet::CAPACITY {
            let (before, after) = (quorum(nodes), quorum(nodes + 1));
            assert!(before + after > nodes + 1, "{nodes}");
        }
        // Not so if one node is replaced, or if two are added at once.
        assert!(quorum(3) + quorum(3) <= 4 && quorum(1) + quorum(3) <= 3);
    }

    #[test]
    fn quorum_is_prevented_by_those_without_whom_there_is_none() {
        let prevents: Vec<_> = (0..=5).map(|count| prevents_quorum(count, 5)).collect();
        assert_eq!(prevents, [false, false, false, true, true, true]);
        // With four nodes, two of each opinion prevent both quorums.
        assert!(!prevents_quorum(1, 4) && prevents_quorum(2, 4));
        assert!(is_out_of_reach(1, 1, 5) && !is_out_of_reach(1, 2, 5) && !is_out_of_reach(3, 0, 5));
    }

    #[test]
    fn node_set_union_intersection_difference() {
        let set = |nodes: &[usize]| nodes.iter().copied().collect::<NodeSet>();
        let (ours, theirs) = (set(&[0, 2, 3]), set(&[2, 5]));
        assert_eq!(ours.union(theirs), set(&[0, 2, 3, 5]));
        assert_eq!(ours.intersection(theirs), set(&[2]));
        assert_eq!(ours.difference(theirs), set(&[0, 3]));
        assert_eq!(NodeSet::first_n(3), set(&[0, 1, 2]));
        assert!(NodeSet::EMPTY.is_empty() && !ours.is_empty());
        assert!(ours.contains(2) && !ours.contains(1));
        assert_eq!(format!("{ours:?}"), "{0, 2, 3}");
    }

    proptest! {
        #[test]
        fn node_set_contains_what_was_inserted(
            nodes in proptest::collection::btree_set(
                0usize..NodeSet::CAPACITY,
                0..NodeSet::CAPACITY
            ),
        ) {
            let set: NodeSet = nodes.iter().copied().collect();
            prop_assert_eq!(set.len(), nodes.len());
            prop_assert!(set.iter().eq(nodes.iter().copied()));
            prop_assert!(set.difference(set).is_empty());
            prop_assert_eq!(
                NodeSet::first_n(NodeSet::CAPACITY).difference(set).len(),
                NodeSet::CAPACITY - nodes.len()
            );
        }
    }
}
