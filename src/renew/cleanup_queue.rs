//! The clean-up queue: abandoned claims that may have left a lock or a queue entry on a server.
//! Clean-up is retried until it succeeds or the residue has expired. Pure.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use crate::{
    backend::redlock::PendingAcks,
    core::{claim::Claim, lease::Lease, quorum::NodeSet},
    sys::clock::Moment,
};

/// Maximum length of the queue; otherwise memory would grow without a bound. Far more entries than
/// a process can add before the first ones expire.
pub(super) const CLEANUPS_MAX: usize = 65_536;
const RETRY_DELAY_MIN: Duration = Duration::from_millis(10);
const RETRY_DELAY_MAX: Duration = Duration::from_secs(1);

/// An abandoned claim. To clean up means to release the lock if the claim holds it, and to remove
/// the queue entry.
#[derive(Clone, Debug)]
pub(crate) struct Cleanup {
    pub(crate) claim: Claim,
    /// Queue entry, or empty.
    pub(crate) queue_entry: String,
    /// Nodes that are not cleaned up yet.
    pub(crate) nodes: NodeSet,
    /// Lease under the same claim. If the lease is still valid when this clean-up is due, the
    /// clean-up is dropped.
    pub(crate) unless_held: Option<Arc<Lease>>,
    /// Acks of releases whose replies were not awaited.
    pub(crate) pending_acks: PendingAcks,
    /// Time at which the residue has expired on the server.
    pub(crate) expires_at: Moment,
}

impl Cleanup {
    /// Nodes that have been asked and have not replied.
    pub(super) fn awaiting_ack(&self) -> NodeSet {
        self.nodes_by_ack(false).intersection(self.nodes)
    }

    /// Removes the nodes that have acknowledged the release.
    pub(super) fn drop_acknowledged(&mut self) {
        self.nodes = self.nodes.difference(self.nodes_by_ack(true));
        self.pending_acks.retain(|(_, ack)| !ack.is_acknowledged());
    }

    fn nodes_by_ack(&self, acknowledged: bool) -> NodeSet {
        self.pending_acks
            .iter()
            .filter(|(_, ack)| ack.is_acknowledged() == acknowledged)
            .map(|(node, _)| *node)
            .collect()
    }
}

#[derive(Debug, Default)]
pub(crate) struct CleanupQueue {
    /// Entries by the time of their next try, and a number that makes equal times distinct.
    entries: BTreeMap<(Moment, u64), (Cleanup, Duration)>,
    last_number: u64,
    /// An entry was dropped, and that has not been logged yet.
    overflowed: bool,
}

impl CleanupQueue {
    /// Adds an entry, to be tried at `at`. If the queue is full, drops the entry that is due next.
    pub(crate) fn add(&mut self, cleanup: Cleanup, at: Moment) {
        if self.entries.len() >= CLEANUPS_MAX {
            self.entries.pop_first();
            self.overflowed = true;
        }
        self.insert(cleanup, at, RETRY_DELAY_MIN);
    }

    /// Records that an entry was dropped before it could be added.
    pub(crate) fn note_overflow(&mut self) {
        self.overflowed = true;
    }

    /// Whether an entry was dropped since the last call.
    pub(crate) fn take_overflowed(&mut self) -> bool {
        std::mem::take(&mut self.overflowed)
    }

    pub(crate) fn earliest(&self) -> Moment {
        self.entries.first_key_value().map_or(Moment::NEVER, |((at, _), _)| *at)
    }

    /// Returns the next entry that is due at `now`, and the delay before the next try if this one
    /// fails. Drops entries that need no clean-up any more.
    pub(crate) fn take_due(&mut self, now: Moment) -> Option<(Cleanup, Duration)> {
        while self.earliest() <= now {
            let (_, (mut cleanup, delay)) = self.entries.pop_first()?;
            let held = cleanup.unless_held.as_ref().is_some_and(|lease| lease.ended().is_none());
            cleanup.drop_acknowledged();
            if now < cleanup.expires_at && !held && !cleanup.nodes.is_empty() {
                return Some((cleanup, delay));
            }
        }
        None
    }

    pub(crate) fn retry_later(&mut self, cleanup: Cleanup, delay: Duration, now: Moment) {
        self.insert(cleanup, now.saturating_add(delay), (delay * 2).min(RETRY_DELAY_MAX));
    }

    pub(crate) fn take_all(&mut self) -> Vec<Cleanup> {
        std::mem::take(&mut self.entries).into_values().map(|(cleanup, _)| cleanup).collect()
    }

    fn insert(&mut self, cleanup: Cleanup, at: Moment, delay: Duration) {
        self.last_number += 1;
        self.entries.insert((at, self.last_number), (cleanup, delay));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        backend::redis::AckTracker,
        core::{
            claim::{Grant, InFlight},
            id::generate_lock_id,
            key::LockKey,
            lease::LeaseEnd,
            quorum::NodeDeadlines,
            token::FencingToken,
        },
    };

    fn at(millis: u64) -> Moment {
        Moment::from_nanos(millis * 1_000_000)
    }

    fn cleanup(until: u64) -> Cleanup {
        let claim = Claim {
            key: LockKey::new("", "x").unwrap(),
            id: generate_lock_id(),
            ttl: Duration::from_secs(1),
        };
        Cleanup {
            claim,
            queue_entry: String::new(),
            nodes: NodeSet::single(0),
            unless_held: None,
            pending_acks: PendingAcks::new(),
            expires_at: at(until),
        }
    }

    #[test]
    fn cleanup_retried_with_back_off_until_expiry() {
        let mut queue = CleanupQueue::default();
        queue.add(cleanup(5_000), at(100));
        let (mut now, mut tries, mut last_delay) = (100, 0, Duration::ZERO);
        while let Some((cleanup, delay)) = queue.take_due(at(now)) {
            assert!(delay >= last_delay && delay <= RETRY_DELAY_MAX);
            last_delay = delay;
            tries += 1;
            assert!(tries < 15, "the retries do not end");
            queue.retry_later(cleanup, delay, at(now));
            now = queue.earliest().as_nanos() / 1_000_000;
        }
        assert!(tries >= 8, "{tries} tries");
        assert!(now >= 5_000);
        assert_eq!(queue.earliest(), Moment::NEVER);
    }

    #[test]
    fn expired_or_still_held_cleanup_skipped() {
        let mut queue = CleanupQueue::default();
        queue.add(cleanup(100), at(100));
        let late =
            InFlight { broken_until: at(0), unanswered: NodeSet::EMPTY, unanswered_until: at(0) };
        let (token, votes, nodes) = (FencingToken(1), NodeDeadlines::new(1), NodeSet::single(0));
        let grant = Grant {
            token,
            node_deadlines: votes,
            provisional: false,
            in_flight: late,
            may_hold: nodes,
            queue_entry: String::new(),
        };
        let claimed = cleanup(500);
        let lease = Arc::new(Lease::new(claimed.claim.clone(), &grant, at(0)));
        let claimed = Cleanup { unless_held: Some(lease.clone()), ..claimed };
        queue.add(claimed.clone(), at(100));
        assert!(queue.take_due(at(100)).is_none());
        queue.add(claimed, at(100));
        lease.end(LeaseEnd::Released);
        assert!(queue.take_due(at(100)).is_some(), "its lease has ended");
    }

    /// Fault: N112
    #[test]
    fn acknowledged_node_not_asked_again() {
        let (mut links, mut queue) =
            ([AckTracker::default(), AckTracker::default()], CleanupQueue::default());
        let asked = links
            .iter_mut()
            .enumerate()
            .map(|(node, receipts)| (node, receipts.issue(1)))
            .collect();
        queue.add(
            Cleanup { nodes: NodeSet::first_n(3), pending_acks: asked, ..cleanup(500) },
            at(100),
        );
        links[0].record(false);
        links[1].record(true);
        let (again, _) = queue.take_due(at(100)).unwrap();
        assert_eq!(
            (again.nodes, again.awaiting_ack()),
            ([1, 2].into_iter().collect(), NodeSet::single(1))
        );
        let settled = links[1].issue(1);
        links[1].record(false);
        queue.add(
            Cleanup {
                nodes: NodeSet::single(1),
                pending_acks: PendingAcks::from_elem((1, settled), 1),
                ..again
            },
            at(100),
        );
        assert!(queue.take_due(at(100)).is_none());
    }

    #[test]
    fn cleanups_due_at_the_same_moment_both_kept() {
        let mut queue = CleanupQueue::default();
        queue.add(cleanup(500), at(100));
        queue.add(cleanup(500), at(100));
        assert_eq!(queue.take_all().len(), 2);
        assert_eq!(queue.earliest(), Moment::NEVER);
    }

    /// Fault: N85
    #[test]
    fn queue_length_is_bounded() {
        let mut queue = CleanupQueue::default();
        (0..CLEANUPS_MAX as u64).for_each(|n| queue.add(cleanup(1 << 40), at(n)));
        assert!(!queue.take_overflowed());
        queue.add(cleanup(1 << 40), at(1 << 30));
        assert_eq!(
            [queue.take_overflowed(), queue.take_overflowed()],
            [true, false],
            "logged once"
        );
        assert_eq!(queue.take_all().len(), CLEANUPS_MAX);
        queue.note_overflow();
        assert!(
            queue.take_overflowed(),
            "an entry that was dropped before it was added is logged too"
        );
    }
}
