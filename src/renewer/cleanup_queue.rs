//! `UndoList`: what may have been left on the server and is taken back in the background, until it
//! is or has expired. Pure.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use crate::{
    clock::Moment,
    grant::Claim,
    lease::Lease,
    redlock::{NodeSet, PendingAcks},
};

/// Far more than a process can leave behind in the time that anything stays here; a bound on memory
/// all the same.
pub(super) const CLEANUPS_MAX: usize = 65_536;
const RETRY_DELAY_MIN: Duration = Duration::from_millis(10);
const RETRY_DELAY_MAX: Duration = Duration::from_secs(1);

/// A claim whose traces are to be removed: its lock released if it has it, its place in the line
/// given up.
#[derive(Clone, Debug)]
pub(crate) struct Cleanup {
    pub(crate) claim: Claim,
    /// Its entry in the queue, or empty.
    pub(crate) queue_entry: String,
    /// Where it has not been taken back yet.
    pub(crate) nodes: NodeSet,
    /// Not as long as this lease lives, which has the claim.
    pub(crate) unless_held: Option<Arc<Lease>>,
    /// For the answers to it that have not been waited for.
    pub(crate) pending_acks: PendingAcks,
    /// When the server has forgotten it by itself.
    pub(crate) expires_at: Moment,
}

impl Cleanup {
    /// Where it has been asked for, and the answer has not come.
    pub(super) fn awaiting_ack(&self) -> NodeSet {
        self.nodes_by_ack(false).intersection(self.nodes)
    }

    /// Strikes off where it has been asked for, and the answer has come since.
    pub(super) fn drop_acknowledged(&mut self) {
        self.nodes = self.nodes.difference(self.nodes_by_ack(true));
        self.pending_acks.retain(|(_, receipt)| !receipt.is_acknowledged());
    }

    fn nodes_by_ack(&self, settled: bool) -> NodeSet {
        self.pending_acks
            .iter()
            .filter(|(_, receipt)| receipt.is_acknowledged() == settled)
            .map(|(node, _)| *node)
            .collect()
    }
}

#[derive(Debug, Default)]
pub(crate) struct CleanupQueue {
    /// By the moment of the next try, and a number that keeps equal moments apart.
    entries: BTreeMap<(Moment, u64), (Cleanup, Duration)>,
    last_number: u64,
    /// Something had to go, and nobody has been told.
    overflowed: bool,
}

impl CleanupQueue {
    /// Adds one, to be tried at `at`. When the list is full, the next one has to go.
    pub(crate) fn add(&mut self, cleanup: Cleanup, at: Moment) {
        if self.entries.len() >= CLEANUPS_MAX {
            self.entries.pop_first();
            self.overflowed = true;
        }
        self.insert(cleanup, at, RETRY_DELAY_MIN);
    }

    /// Something that would have come to it had to go before.
    pub(crate) fn note_overflow(&mut self) {
        self.overflowed = true;
    }

    /// Whether something had to go since this was last asked.
    pub(crate) fn take_overflowed(&mut self) -> bool {
        std::mem::take(&mut self.overflowed)
    }

    pub(crate) fn earliest(&self) -> Moment {
        self.entries.first_key_value().map_or(Moment::NEVER, |((at, _), _)| *at)
    }

    /// The next one that is due at `now`, with the pause after which to try again should it fail.
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
        std::mem::take(&mut self.entries).into_values().map(|(undo, _)| undo).collect()
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
        grant::{Grant, InFlight},
        id::generate_lock_id,
        key::LockKey,
        lease::LeaseEnd,
        node::AckTracker,
        observer::HoldSpan,
        redlock::NodeDeadlines,
        token::FencingToken,
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
        let mut list = CleanupQueue::default();
        list.add(cleanup(5_000), at(100));
        let (mut now, mut tries, mut last_pause) = (100, 0, Duration::ZERO);
        while let Some((undo, pause)) = list.take_due(at(now)) {
            assert!(pause >= last_pause && pause <= RETRY_DELAY_MAX);
            last_pause = pause;
            tries += 1;
            assert!(tries < 15, "there is no end to it");
            list.retry_later(undo, pause, at(now));
            now = list.earliest().as_nanos() / 1_000_000;
        }
        assert!(tries >= 8, "{tries} tries");
        assert!(now >= 5_000);
        assert_eq!(list.earliest(), Moment::NEVER);
    }

    #[test]
    fn expired_or_still_held_cleanup_skipped() {
        let mut list = CleanupQueue::default();
        list.add(cleanup(100), at(100));
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
        let lease =
            Arc::new(Lease::new(claimed.claim.clone(), &grant, HoldSpan::starting_at(at(0))));
        let claimed = Cleanup { unless_held: Some(lease.clone()), ..claimed };
        list.add(claimed.clone(), at(100));
        assert!(list.take_due(at(100)).is_none());
        list.add(claimed, at(100));
        lease.end(LeaseEnd::Released);
        assert!(list.take_due(at(100)).is_some(), "its lease is over");
    }

    #[test]
    fn acknowledged_node_not_asked_again() {
        let (mut links, mut list) =
            ([AckTracker::default(), AckTracker::default()], CleanupQueue::default());
        let asked = links
            .iter_mut()
            .enumerate()
            .map(|(node, receipts)| (node, receipts.issue(1)))
            .collect();
        list.add(
            Cleanup { nodes: NodeSet::first_n(3), pending_acks: asked, ..cleanup(500) },
            at(100),
        );
        links[0].record(false);
        links[1].record(true);
        let (again, _) = list.take_due(at(100)).unwrap();
        assert_eq!(
            (again.nodes, again.awaiting_ack()),
            ([1, 2].into_iter().collect(), NodeSet::single(1))
        );
        let settled = links[1].issue(1);
        links[1].record(false);
        list.add(
            Cleanup {
                nodes: NodeSet::single(1),
                pending_acks: PendingAcks::from_elem((1, settled), 1),
                ..again
            },
            at(100),
        );
        assert!(list.take_due(at(100)).is_none());
    }

    #[test]
    fn cleanups_due_at_the_same_moment_both_kept() {
        let mut list = CleanupQueue::default();
        list.add(cleanup(500), at(100));
        list.add(cleanup(500), at(100));
        assert_eq!(list.take_all().len(), 2);
        assert_eq!(list.earliest(), Moment::NEVER);
    }

    #[test]
    fn queue_length_is_bounded() {
        let mut list = CleanupQueue::default();
        (0..CLEANUPS_MAX as u64).for_each(|n| list.add(cleanup(1 << 40), at(n)));
        assert!(!list.take_overflowed());
        list.add(cleanup(1 << 40), at(1 << 30));
        assert_eq!([list.take_overflowed(), list.take_overflowed()], [true, false], "told once");
        assert_eq!(list.take_all().len(), CLEANUPS_MAX);
        list.note_overflow();
        assert!(list.take_overflowed(), "what had to go before it came here is told too");
    }
}
