//! `Doubts`: locks given up by a quorum of the nodes, while others had been told and had not
//! answered. Where one refuses, or has never got the request, it would be kept for its whole lease.
//! Pure.

use std::collections::VecDeque;

use crate::{
    clock::Moment,
    grant::Claim,
    redlock::{NodeSet, PendingAcks},
};

/// A bound on memory. Far more than can be in doubt at a time: an answer that comes is read with
/// the next one.
const LENGTH_MAX: usize = 65_536;
/// So many are never gone through for those that have been answered.
const SHORT: usize = 64;

#[derive(Debug)]
pub(crate) struct Doubt {
    pub(crate) claim: Claim,
    /// Its entry in the queue, or empty.
    pub(crate) waiter: String,
    pub(crate) unheard: PendingAcks,
    /// What is in doubt then is taken back.
    pub(crate) until: Moment,
}

impl Doubt {
    /// The nodes that may not have done it.
    pub(super) fn nodes(&self) -> NodeSet {
        self.unheard
            .iter()
            .filter(|(_, receipt)| !receipt.is_acknowledged())
            .map(|(node, _)| *node)
            .collect()
    }
}

/// In the order in which they came, which is about that of their ends.
#[derive(Debug, Default)]
pub(crate) struct Doubts {
    list: VecDeque<Doubt>,
    /// How many the last sweep has left; the next one is due when there are twice as many.
    left: usize,
}

impl Doubts {
    /// False when there were too many and the oldest one had to go.
    pub(super) fn add(&mut self, doubt: Doubt) -> bool {
        while self.list.pop_front_if(|doubt| doubt.nodes().is_empty()).is_some() {}
        // Many may have been answered behind one that has not.
        self.left = self.left.min(self.list.len());
        if self.list.len() >= SHORT.max(2 * self.left) {
            self.list.retain(|doubt| !doubt.nodes().is_empty());
            self.left = self.list.len();
        }
        let room = self.list.len() < LENGTH_MAX;
        if !room {
            self.list.pop_front();
        }
        self.list.push_back(doubt);
        room
    }

    /// When there may be something to take back.
    pub(super) fn earliest(&self) -> Moment {
        self.list.front().map_or(Moment::NEVER, |doubt| doubt.until)
    }

    /// The next one that has come to its end at `now`, and the nodes on which it is in doubt still.
    pub(super) fn take_due(&mut self, now: Moment) -> Option<(Doubt, NodeSet)> {
        while let Some(doubt) =
            self.list.pop_front_if(|doubt| doubt.until <= now || doubt.nodes().is_empty())
        {
            let nodes = doubt.nodes();
            if !nodes.is_empty() {
                return Some((doubt, nodes));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{id::generate_lock_id, key::LockKey, node::AckTracker};
    use std::time::Duration;

    fn at(millis: u64) -> Moment {
        Moment::from_nanos(millis * 1_000_000)
    }

    fn doubt(links: &mut [AckTracker], until: u64) -> Doubt {
        let claim = Claim {
            key: LockKey::new("", "x").unwrap(),
            id: generate_lock_id(),
            ttl: Duration::from_secs(1),
        };
        let unheard = links
            .iter_mut()
            .enumerate()
            .map(|(node, receipts)| (node, receipts.issue(1)))
            .collect();
        Doubt { claim, waiter: String::new(), unheard, until: at(until) }
    }

    #[test]
    fn unanswered_release_is_due_at_its_deadline() {
        let mut links = [AckTracker::default(), AckTracker::default(), AckTracker::default()];
        let mut doubts = Doubts::default();
        doubts.add(doubt(&mut links, 100));
        links[1].record(false);
        links[2].record(true);
        assert!(doubts.take_due(at(99)).is_none());
        assert_eq!(doubts.earliest(), at(100));
        let (_, nodes) = doubts.take_due(at(100)).unwrap();
        assert_eq!(nodes, NodeSet::single(0).union(NodeSet::single(2)));
        assert!(doubts.take_due(at(100)).is_none());
    }

    #[test]
    fn answered_entry_dropped_by_next_add() {
        let (mut links, mut doubts) = ([AckTracker::default()], Doubts::default());
        for until in 0..1_000 {
            assert!(doubts.add(doubt(&mut links, until)));
            assert_eq!(doubts.list.len(), 1);
            links[0].record(false);
        }
        assert!(doubts.take_due(at(0)).is_none());
        assert_eq!(doubts.earliest(), Moment::NEVER, "nobody wakes up for it");
    }

    /// One connection lies idle with an answer that nobody reads, while others are in use.
    #[test]
    fn answered_entries_do_not_pile_up() {
        let (mut idle, mut busy) = ([AckTracker::default()], [AckTracker::default()]);
        let mut doubts = Doubts::default();
        doubts.add(doubt(&mut idle, 1 << 30));
        for _ in 0..2 * LENGTH_MAX {
            assert!(doubts.add(doubt(&mut busy, 1 << 30)));
            busy[0].record(false);
            assert!(doubts.list.len() <= 1_000, "{}", doubts.list.len());
        }
        assert!(doubts.take_due(at(1 << 30)).is_some(), "it had to go for those that are done");
    }

    #[test]
    fn list_length_is_bounded() {
        let (mut links, mut doubts) = ([AckTracker::default()], Doubts::default());
        for until in 0..LENGTH_MAX as u64 {
            assert!(doubts.add(doubt(&mut links, until)));
        }
        assert!(!doubts.add(doubt(&mut links, 1 << 30)));
        assert_eq!((doubts.list.len(), doubts.earliest()), (LENGTH_MAX, at(1)));
    }
}
