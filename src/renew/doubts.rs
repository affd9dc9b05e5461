//! Releases that a quorum has confirmed, while other nodes had not replied yet. A node that
//! refuses, or never got the request, would otherwise keep the lock for its whole lease. Pure.

use std::collections::VecDeque;

use crate::{
    backend::redlock::PendingAcks,
    core::{claim::Claim, quorum::NodeSet},
    sys::clock::Moment,
};

/// Maximum number of unacknowledged releases; bounds memory. Far more than are possible in
/// practice, because a late reply is read with the next one on its connection.
const LENGTH_MAX: usize = 65_536;
/// Length below which the list is never searched for acknowledged entries.
const SHORT: usize = 64;

#[derive(Debug)]
pub(crate) struct Doubt {
    pub(crate) claim: Claim,
    /// Queue entry, or empty.
    pub(crate) waiter: String,
    pub(crate) unheard: PendingAcks,
    /// Time at which nodes that have not acknowledged the release are cleaned up.
    pub(crate) until: Moment,
}

impl Doubt {
    /// Nodes that may not have applied the release.
    pub(super) fn nodes(&self) -> NodeSet {
        self.unheard
            .iter()
            .filter(|(_, receipt)| !receipt.is_acknowledged())
            .map(|(node, _)| *node)
            .collect()
    }
}

/// In order of arrival, which is roughly the order of `until`.
#[derive(Debug, Default)]
pub(crate) struct Doubts {
    list: VecDeque<Doubt>,
    /// Number of entries left by the last search. The list is searched again at twice that length.
    left: usize,
}

impl Doubts {
    /// Adds an entry. Returns false if the list was full and the oldest entry was dropped.
    pub(super) fn add(&mut self, doubt: Doubt) -> bool {
        while self.list.front().is_some_and(|doubt| doubt.nodes().is_empty()) {
            self.list.pop_front();
        }
        // Acknowledged entries may have gathered behind one that is not.
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

    /// Earliest time at which a clean-up may be needed.
    pub(super) fn earliest(&self) -> Moment {
        self.list.front().map_or(Moment::NEVER, |doubt| doubt.until)
    }

    /// Returns the next entry that is due at `now`, and the nodes that have not acknowledged it.
    pub(super) fn take_due(&mut self, now: Moment) -> Option<(Doubt, NodeSet)> {
        let is_due = |doubt: &Doubt| doubt.until <= now || doubt.nodes().is_empty();
        while self.list.front().is_some_and(is_due) {
            let doubt = self.list.pop_front()?;
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
    use crate::{
        backend::redis::AckTracker,
        core::{id::generate_lock_id, key::LockKey},
    };
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
        assert_eq!(doubts.earliest(), Moment::NEVER, "the entry needs no wake-up");
    }

    /// One idle connection has an unread reply while others are in use.
    ///
    /// Fault: N87
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
        assert!(
            doubts.take_due(at(1 << 30)).is_some(),
            "it was dropped in favour of acknowledged entries"
        );
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
