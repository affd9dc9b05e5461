//! What N answers amount to. Pure.

use std::fmt;

use smallvec::SmallVec;

pub(crate) use crate::answer::Vote;
use crate::{
    clock::Moment,
    sync::atomic::{AtomicU32, Ordering},
};

/// What the answers amount to so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Verdict {
    /// It depends on answers that are still to come.
    Open,
    Won,
    /// Those who said no keep us from a quorum.
    Lost,
    /// So few answered that there is no quorum whatever they say.
    Unreachable,
}

/// More than half: any two quorums have a node in common.
pub(crate) const fn quorum(nodes: usize) -> usize {
    nodes / 2 + 1
}

/// Counts `votes`; `None` is an answer that may still come.
pub(crate) fn verdict(votes: impl ExactSizeIterator<Item = Option<Vote>>) -> Verdict {
    let needed = quorum(votes.len());
    let (mut yes, mut no, mut open) = (0, 0, 0);
    for vote in votes {
        match vote {
            Some(Vote::Yes) => yes += 1,
            Some(Vote::No) => no += 1,
            Some(Vote::Unknown) => {}
            None => open += 1,
        }
    }
    if yes >= needed {
        Verdict::Won
    } else if yes + no + open < needed {
        Verdict::Unreachable
    } else if yes + open >= needed || yes + no < needed {
        Verdict::Open
    } else {
        Verdict::Lost
    }
}

/// The token that a quorum has stored, or else the largest one that was seen, which a quorum has yet to store.
///
/// A token may be handed out only when a quorum has stored it: the largest of several counters does not rise from
/// holder to holder, because two quorums may have only a node in common whose counter is behind. With the token stored
/// where each later quorum has a node, that node hands out a larger one.
pub(crate) fn token(stored: &[u64], nodes: usize) -> Result<u64, u64> {
    let highest = stored.iter().copied().max().unwrap_or(0);
    let agreeing = stored.iter().filter(|token| **token == highest).count();
    if agreeing >= quorum(nodes) { Ok(highest) } else { Err(highest) }
}

/// Until when each node keeps a lock for us.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Votes {
    /// `None` where it is not kept for us.
    deadlines: SmallVec<[Option<Moment>; 1]>,
    /// Nodes whose word does not count for this lease.
    barred: NodeSet,
}

impl Votes {
    /// Of nodes that have said nothing yet.
    pub(crate) fn new(nodes: usize) -> Votes {
        let deadlines = SmallVec::from_elem(Some(Moment::from_nanos(0)), nodes);
        Votes { deadlines, barred: NodeSet::NONE }
    }

    /// A node keeps the lock until `deadline`, which does not move back.
    pub(crate) fn confirm(&mut self, node: usize, deadline: Moment) {
        if let Some(vote) = self.deadlines.get_mut(node)
            && !self.barred.has(node)
        {
            *vote = Some(vote.map_or(deadline, |vote| vote.max(deadline)));
        }
    }

    /// A node does not keep the lock for us, or not any more.
    pub(crate) fn strike(&mut self, node: usize) {
        if let Some(vote) = self.deadlines.get_mut(node) {
            *vote = None;
        }
    }

    /// A node may lose the lock again without a word, so that whatever it says does not count.
    pub(crate) fn bar(&mut self, node: usize) {
        self.strike(node);
        self.barred = self.barred.with(NodeSet::only(node));
    }

    pub(crate) fn barred(&self) -> NodeSet {
        self.barred
    }

    /// Whether a node, whose word would count, does not keep the lock at `now` as far as it has said.
    pub(crate) fn is_over(&self, node: usize, now: Moment) -> bool {
        let vote = self.deadlines.get(node).filter(|_| !self.barred.has(node));
        vote.is_some_and(|vote| vote.is_none_or(|deadline| deadline <= now))
    }

    /// Until when a quorum keeps the lock: the quorum-th largest of the deadlines. `None` when there cannot be a
    /// quorum any more.
    pub(crate) fn validity(&self) -> Option<Moment> {
        if let [vote] = *self.deadlines.as_slice() {
            return vote;
        }
        let mut deadlines: SmallVec<[Moment; 8]> = self.deadlines.iter().copied().flatten().collect();
        deadlines.sort_unstable_by(|a, b| b.cmp(a));
        deadlines.get(quorum(self.deadlines.len()) - 1).copied()
    }
}

/// Some of the nodes.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct NodeSet(u32);

impl NodeSet {
    /// How many nodes there can be.
    pub(crate) const ROOM: usize = 32;
    pub(crate) const NONE: NodeSet = NodeSet(0);

    pub(crate) fn first(nodes: usize) -> NodeSet {
        NodeSet(u32::MAX >> (Self::ROOM - nodes.clamp(1, Self::ROOM)))
    }

    pub(crate) fn only(node: usize) -> NodeSet {
        NodeSet(1 << node)
    }

    pub(crate) fn has(self, node: usize) -> bool {
        self.0 & (1 << node) != 0
    }

    pub(crate) fn with(self, other: NodeSet) -> NodeSet {
        NodeSet(self.0 | other.0)
    }

    pub(crate) fn without(self, other: NodeSet) -> NodeSet {
        NodeSet(self.0 & !other.0)
    }

    pub(crate) fn both(self, other: NodeSet) -> NodeSet {
        NodeSet(self.0 & other.0)
    }

    pub(crate) fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub(crate) fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    pub(crate) fn iter(self) -> impl DoubleEndedIterator<Item = usize> {
        (0..Self::ROOM - self.0.leading_zeros() as usize).filter(move |node| self.has(*node))
    }
}

/// Some of the nodes, and more of them later.
#[derive(Debug)]
pub(crate) struct AtomicNodeSet(AtomicU32);

impl AtomicNodeSet {
    pub(crate) fn new(nodes: NodeSet) -> AtomicNodeSet {
        AtomicNodeSet(AtomicU32::new(nodes.0))
    }

    pub(crate) fn get(&self) -> NodeSet {
        NodeSet(self.0.load(Ordering::Acquire))
    }

    pub(crate) fn add(&self, nodes: NodeSet) {
        self.0.fetch_or(nodes.0, Ordering::AcqRel);
    }
}

impl FromIterator<usize> for NodeSet {
    fn from_iter<I: IntoIterator<Item = usize>>(nodes: I) -> NodeSet {
        nodes.into_iter().fold(NodeSet::NONE, |set, node| set.with(NodeSet::only(node)))
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
    fn one_node_is_the_quorum_of_one() {
        for (votes, verdict) in
            [("y", Verdict::Won), ("n", Verdict::Lost), ("u", Verdict::Unreachable), (".", Verdict::Open)]
        {
            assert_eq!(count(votes), verdict, "{votes}");
        }
    }

    #[test]
    fn it_is_decided_as_soon_as_it_is_certain() {
        for (votes, verdict) in [
            ("yyy..", Verdict::Won),
            ("yy...", Verdict::Open),
            ("nnn..", Verdict::Lost),
            ("nn...", Verdict::Open),
            ("uuu", Verdict::Unreachable),
            ("uuu..", Verdict::Unreachable),
            ("yyuu.", Verdict::Open),
            ("yyuun", Verdict::Lost),
            ("nnuu.", Verdict::Open),
            ("nnuuy", Verdict::Lost),
            ("nnuuu", Verdict::Unreachable),
            ("yyuuu", Verdict::Unreachable),
            // Half is no quorum, and half that say no leave none.
            ("yyuu", Verdict::Unreachable),
            ("nnyy", Verdict::Lost),
            ("nn..", Verdict::Open),
            ("nnn.", Verdict::Lost),
            ("yn", Verdict::Lost),
            ("yn.", Verdict::Open),
        ] {
            assert_eq!(count(votes), verdict, "{votes}");
        }
    }

    #[test]
    fn a_token_counts_when_a_quorum_has_stored_it() {
        assert_eq!(token(&[7], 1), Ok(7));
        assert_eq!(token(&[10, 2, 2], 5), Err(10));
        assert_eq!(token(&[10, 10, 2], 5), Err(10));
        assert_eq!(token(&[10, 10, 10, 2], 5), Ok(10));
    }

    #[test]
    fn validity_is_the_quorum_th_largest_deadline() {
        let at = Moment::from_nanos;
        let mut votes = Votes::new(5);
        assert_eq!(votes.validity(), Some(at(0)));
        for (node, deadline) in [(0, 50), (1, 40), (2, 30)] {
            votes.confirm(node, at(deadline));
        }
        assert_eq!(votes.validity(), Some(at(30)));
        votes.confirm(4, at(45));
        assert_eq!(votes.validity(), Some(at(40)));
        votes.confirm(0, at(20));
        assert_eq!(votes.validity(), Some(at(40)), "a deadline moved back");
        votes.strike(0);
        assert_eq!(votes.validity(), Some(at(30)));
        votes.confirm(0, at(90));
        assert_eq!(votes.validity(), Some(at(40)), "it was taken anew");
        assert!(votes.barred().is_empty());
        votes.bar(0);
        assert_eq!(votes.barred(), NodeSet::only(0));
        votes.confirm(0, at(99));
        assert_eq!(votes.validity(), Some(at(30)), "a vote that does not count was counted");
        votes.strike(1);
        votes.strike(2);
        assert_eq!(votes.validity(), None);
    }

    /// All that so many nodes can have said so far.
    fn all_votes(nodes: u32) -> impl Iterator<Item = Vec<Option<Vote>>> {
        let votes = [None, Some(Vote::Yes), Some(Vote::No), Some(Vote::Unknown)];
        (0..4_usize.pow(nodes)).map(move |n| (0..nodes).map(|node| votes[n >> (2 * node) & 3]).collect())
    }

    #[test]
    fn a_verdict_is_final_and_not_late() {
        for votes in (1..=6).flat_map(all_votes) {
            let now = verdict(votes.iter().copied());
            let ends = [Vote::Yes, Vote::No, Vote::Unknown].map(|rest| {
                verdict(votes.iter().map(|vote| Some(vote.unwrap_or(rest))).collect::<Vec<_>>().into_iter())
            });
            match now {
                Verdict::Open => assert!(ends.iter().any(|end| *end != ends[0]), "{votes:?} is decided"),
                sure => assert!(ends.iter().all(|end| *end == sure), "{votes:?} is not {sure:?} yet"),
            }
        }
    }

    /// Why nodes are added and taken away one at a time.
    #[test]
    fn quorums_of_a_set_and_of_one_with_a_node_more_meet() {
        for nodes in 1..NodeSet::ROOM {
            let (before, after) = (quorum(nodes), quorum(nodes + 1));
            assert!(before + after > nodes + 1, "{nodes}");
        }
        // As where one is replaced, or two come at once.
        assert!(quorum(3) + quorum(3) <= 4 && quorum(1) + quorum(3) <= 3);
    }

    #[test]
    fn sets_are_joined_cut_and_taken_from_each_other() {
        let set = |nodes: &[usize]| nodes.iter().copied().collect::<NodeSet>();
        let (ours, theirs) = (set(&[0, 2, 3]), set(&[2, 5]));
        assert_eq!(ours.with(theirs), set(&[0, 2, 3, 5]));
        assert_eq!(ours.both(theirs), set(&[2]));
        assert_eq!(ours.without(theirs), set(&[0, 3]));
        assert_eq!(NodeSet::first(3), set(&[0, 1, 2]));
        assert!(NodeSet::NONE.is_empty() && !ours.is_empty());
        assert!(ours.has(2) && !ours.has(1));
        assert_eq!(format!("{ours:?}"), "{0, 2, 3}");
    }

    proptest! {
        #[test]
        fn a_set_is_what_was_put_in(nodes in proptest::collection::btree_set(0usize..NodeSet::ROOM, 0..NodeSet::ROOM)) {
            let set: NodeSet = nodes.iter().copied().collect();
            prop_assert_eq!(set.len(), nodes.len());
            prop_assert!(set.iter().eq(nodes.iter().copied()));
            prop_assert!(set.without(set).is_empty());
            prop_assert_eq!(NodeSet::first(NodeSet::ROOM).without(set).len(), NodeSet::ROOM - nodes.len());
        }
    }
}
