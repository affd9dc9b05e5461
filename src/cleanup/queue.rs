//! The clean-up queue: abandoned claims that may have left a lock or a queue entry on a server.
//! Clean-up is retried until it succeeds or the residue has expired. Pure.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use crate::{
    backend::redlock::EXPIRY_SLACK,
    core::{ack::PendingAcks, claim::Claim, lease::Lease, quorum::NodeSet},
    sys::clock::Moment,
};

/// Maximum length of the queue; otherwise memory would grow without a bound. Far more entries than
/// a process can add before the first ones expire.
pub(super) const CLEANUPS_MAX: usize = 65_536;
const RETRY_DELAY_MIN: Duration = Duration::from_millis(10);
const RETRY_DELAY_MAX: Duration = Duration::from_secs(1);
/// Time for which a server keeps a queue that no waiter polls; `QUEUE_MS` in `shared.lua`.
const QUEUE_ENTRY_TTL: Duration = Duration::from_secs(60);
/// Bounds of the number of additions between two searches for acknowledged entries. Each addition
/// thus costs at most the search of 64 entries.
const SEARCH_INTERVAL_MIN: usize = 64;
const SEARCH_INTERVAL_MAX: usize = 1_024;

/// An abandoned claim. To clean up means to release the lock if the claim holds it, and to remove
/// the queue entry.
#[derive(Clone, Debug)]
pub(super) struct Cleanup {
    pub(super) claim: Claim,
    /// Queue entry, or empty.
    pub(super) queue_entry: String,
    /// Nodes that are not cleaned up yet.
    pub(super) nodes: NodeSet,
    /// Lease under the same claim. If the lease is still valid when this clean-up is due, the
    /// clean-up is dropped.
    unless_held: Option<Arc<Lease>>,
    /// Acks of releases whose replies were not awaited.
    pub(super) pending_acks: PendingAcks,
    /// A release was sent to all these nodes by its caller, and is repeated only if it is not
    /// acknowledged in time.
    is_follow_up: bool,
    /// Time at which the residue has expired on the server, if it was there at the first try.
    expires_at: Moment,
}

impl Cleanup {
    pub(super) fn new(claim: &Claim, queue_entry: &str, nodes: NodeSet, at: Moment) -> Cleanup {
        let lifetime =
            if queue_entry.is_empty() { claim.ttl } else { claim.ttl.max(QUEUE_ENTRY_TTL) };
        Cleanup {
            claim: claim.clone(),
            queue_entry: queue_entry.to_owned(),
            nodes,
            unless_held: None,
            pending_acks: PendingAcks::new(),
            is_follow_up: false,
            expires_at: at.saturating_add(lifetime),
        }
    }

    /// Nodes that have been asked and have not replied.
    pub(super) fn awaiting_ack(&self) -> NodeSet {
        self.nodes_by_ack(false).intersection(self.nodes)
    }

    /// Removes the nodes that have acknowledged the release.
    pub(super) fn drop_acknowledged(&mut self) {
        self.nodes = self.nodes.difference(self.nodes_by_ack(true));
        self.pending_acks.retain(|(_, ack)| !ack.is_acknowledged());
    }

    fn is_acknowledged(&self) -> bool {
        self.nodes.difference(self.nodes_by_ack(true)).is_empty()
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
pub(super) struct CleanupQueue {
    /// Entries by the time of their next try, and a number that makes equal times distinct.
    entries: BTreeMap<(Moment, u64), (Cleanup, Duration)>,
    last_number: u64,
    /// Number of additions since the last search for acknowledged entries, and of the entries that
    /// it left.
    unsearched: usize,
    left: usize,
    /// An entry was dropped, and that has not been logged yet.
    overflowed: bool,
}

impl CleanupQueue {
    /// Adds an abandoned claim, to be cleaned up now, and again once none of its requests can be in
    /// flight any more. Such a request could arrive after the first clean-up.
    pub(super) fn add_claim(
        &mut self,
        claim: &Claim,
        queue_entry: &str,
        nodes: NodeSet,
        in_flight_until: Moment,
        now: Moment,
    ) {
        self.add(Cleanup::new(claim, queue_entry, nodes, now), now);
        if in_flight_until > now {
            let at = in_flight_until.saturating_add(EXPIRY_SLACK);
            self.add(Cleanup::new(claim, queue_entry, nodes, at), at);
        }
    }

    /// Adds a release that these nodes have not acknowledged yet, to be repeated at `at` where it
    /// is still not acknowledged then. A node that refuses it, or never got it, would otherwise
    /// keep the lock for its whole lease.
    pub(super) fn follow_up(
        &mut self,
        claim: &Claim,
        queue_entry: &str,
        pending_acks: PendingAcks,
        at: Moment,
    ) {
        let nodes = pending_acks.iter().map(|(node, _)| *node).collect();
        let cleanup = Cleanup::new(claim, queue_entry, nodes, at);
        self.add(Cleanup { pending_acks, is_follow_up: true, ..cleanup }, at);
    }

    /// Adds nodes that may hold the lock of this lease, to be cleaned up at `at` unless the lease
    /// is valid then.
    pub(super) fn add_unless_held(&mut self, lease: &Arc<Lease>, nodes: NodeSet, at: Moment) {
        let cleanup = Cleanup::new(&lease.claim, "", nodes, at);
        self.add(Cleanup { unless_held: Some(lease.clone()), ..cleanup }, at);
    }

    /// Adds an entry that comes before all others, whatever the length of the queue.
    pub(super) fn add_first(&mut self, cleanup: Cleanup) {
        self.insert(cleanup, Moment::from_nanos(0), RETRY_DELAY_MIN);
    }

    /// Adds an entry, to be tried at `at`. If the queue is full, drops the entry that is due next.
    fn add(&mut self, cleanup: Cleanup, at: Moment) {
        while self.entries.first_key_value().is_some_and(|(_, (first, _))| first.is_acknowledged())
        {
            self.entries.pop_first();
        }
        // Acknowledged entries may have gathered behind one that is not.
        self.unsearched += 1;
        if self.unsearched >= self.left.clamp(SEARCH_INTERVAL_MIN, SEARCH_INTERVAL_MAX) {
            self.entries.retain(|_, (cleanup, _)| !cleanup.is_acknowledged());
            (self.unsearched, self.left) = (0, self.entries.len());
        }
        if self.entries.len() >= CLEANUPS_MAX {
            self.entries.pop_first();
            self.overflowed = true;
        }
        self.insert(cleanup, at, RETRY_DELAY_MIN);
    }

    /// Whether an entry was dropped since the last call.
    pub(super) fn take_overflowed(&mut self) -> bool {
        std::mem::take(&mut self.overflowed)
    }

    /// Time of the next try; `NEVER` if the queue is empty.
    pub(super) fn earliest(&self) -> Moment {
        self.entries.first_key_value().map_or(Moment::NEVER, |((at, _), _)| *at)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the next entry that is due at `now`, and the delay before the next try if this one
    /// fails. Drops entries that need no clean-up any more.
    pub(super) fn take_due(&mut self, now: Moment) -> Option<(Cleanup, Duration)> {
        while self.earliest() <= now {
            let (_, (mut cleanup, delay)) = self.entries.pop_first()?;
            let held = cleanup.unless_held.as_ref().is_some_and(|lease| lease.ended().is_none());
            cleanup.drop_acknowledged();
            cleanup.is_follow_up = false;
            if now < cleanup.expires_at && !held && !cleanup.nodes.is_empty() {
                return Some((cleanup, delay));
            }
        }
        None
    }

    pub(super) fn retry_later(&mut self, cleanup: Cleanup, delay: Duration, now: Moment) {
        self.insert(cleanup, now.saturating_add(delay), (delay * 2).min(RETRY_DELAY_MAX));
    }

    /// Empties the queue and returns what a shutdown tries to clean up. It follows up no releases,
    /// because most of them have only not been acknowledged yet.
    pub(super) fn take_all(&mut self) -> Vec<Cleanup> {
        let entries = std::mem::take(&mut self.entries).into_values();
        entries
            .map(|(cleanup, _)| cleanup)
            .filter(|cleanup| !cleanup.is_follow_up && !cleanup.is_acknowledged())
            .collect()
    }

    fn insert(&mut self, cleanup: Cleanup, at: Moment, delay: Duration) {
        self.last_number += 1;
        self.entries.insert((at, self.last_number), (cleanup, delay));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::{
        ack::AckTracker,
        claim::{Grant, InFlight},
        id::generate_lock_id,
        key::LockKey,
        lease::LeaseEnd,
        quorum::NodeDeadlines,
        token::FencingToken,
    };

    fn at(millis: u64) -> Moment {
        Moment::from_nanos(millis * 1_000_000)
    }

    fn claim() -> Claim {
        Claim {
            key: LockKey::new("", "x").unwrap(),
            id: generate_lock_id(),
            ttl: Duration::from_secs(1),
        }
    }

    fn cleanup(until: u64) -> Cleanup {
        Cleanup { expires_at: at(until), ..Cleanup::new(&claim(), "", NodeSet::single(0), at(0)) }
    }

    /// One ack of each connection, in the order of the nodes.
    fn acks(connections: &mut [AckTracker]) -> PendingAcks {
        connections.iter_mut().enumerate().map(|(node, acks)| (node, acks.issue(1))).collect()
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
        assert!(queue.is_empty());
    }

    #[test]
    fn claim_with_request_in_flight_cleaned_up_twice() {
        let (mut queue, nodes) = (CleanupQueue::default(), NodeSet::single(0));
        queue.add_claim(&claim(), "", nodes, at(10), at(10));
        assert!(queue.take_due(at(10)).is_some() && queue.is_empty());
        queue.add_claim(&claim(), "", nodes, at(5_000), at(10));
        assert!(queue.take_due(at(10)).is_some() && queue.take_due(at(5_000)).is_none());
        let again = at(5_000).saturating_add(EXPIRY_SLACK);
        assert!(queue.take_due(again).is_some(), "it expires a ttl after the last request");
    }

    #[test]
    fn queue_entry_expires_later_than_a_short_lock() {
        let mut queue = CleanupQueue::default();
        queue.add_claim(&claim(), "entry", NodeSet::single(0), at(0), at(0));
        queue.add_claim(&claim(), "", NodeSet::single(0), at(0), at(0));
        assert_eq!(queue.take_due(at(59_999)).unwrap().0.queue_entry, "entry");
        assert!(queue.take_due(at(59_999)).is_none());
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
        let lease = Arc::new(Lease::new(claim(), &grant, at(0)));
        queue.add_unless_held(&lease, nodes, at(100));
        assert!(queue.take_due(at(100)).is_none());
        queue.add_unless_held(&lease, nodes, at(100));
        lease.end(LeaseEnd::Released);
        assert!(queue.take_due(at(100)).is_some(), "its lease has ended");
    }

    /// Fault: N112
    #[test]
    fn acknowledged_node_not_asked_again() {
        let mut links = [AckTracker::default(), AckTracker::default()];
        let mut queue = CleanupQueue::default();
        let pending_acks = acks(&mut links);
        queue.add(Cleanup { nodes: NodeSet::first_n(3), pending_acks, ..cleanup(500) }, at(100));
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
    fn unacknowledged_release_is_due_at_its_deadline() {
        let mut links = [AckTracker::default(), AckTracker::default(), AckTracker::default()];
        let mut queue = CleanupQueue::default();
        queue.follow_up(&claim(), "", acks(&mut links), at(100));
        links[1].record(false);
        links[2].record(true);
        assert!(queue.take_due(at(99)).is_none());
        assert_eq!(queue.earliest(), at(100));
        let (cleanup, _) = queue.take_due(at(100)).unwrap();
        assert_eq!(cleanup.nodes, NodeSet::single(0).union(NodeSet::single(2)));
        assert!(queue.take_due(at(100)).is_none());
    }

    #[test]
    fn acknowledged_entry_dropped_by_next_add() {
        let (mut links, mut queue) = ([AckTracker::default()], CleanupQueue::default());
        for until in 0..1_000 {
            queue.follow_up(&claim(), "", acks(&mut links), at(until));
            assert_eq!(queue.entries.len(), 1);
            links[0].record(false);
        }
        assert!(queue.take_due(at(1_000)).is_none() && queue.is_empty());
    }

    /// One idle connection has an unread reply while others are in use.
    ///
    /// Fault: N87
    #[test]
    fn acknowledged_entries_do_not_pile_up() {
        let (mut idle, mut busy) = ([AckTracker::default()], [AckTracker::default()]);
        let mut queue = CleanupQueue::default();
        queue.follow_up(&claim(), "", acks(&mut idle), at(1 << 30));
        for _ in 0..2 * CLEANUPS_MAX {
            queue.follow_up(&claim(), "", acks(&mut busy), at(1 << 30));
            busy[0].record(false);
            assert!(queue.entries.len() <= 1_000, "{}", queue.entries.len());
        }
        assert!(
            queue.take_due(at(1 << 30)).is_some() && !queue.take_overflowed(),
            "it was dropped in favour of acknowledged entries"
        );
    }

    #[test]
    fn shutdown_follows_up_no_release() {
        let (mut links, mut queue) = ([AckTracker::default()], CleanupQueue::default());
        queue.add(cleanup(500), at(200));
        queue.follow_up(&claim(), "", acks(&mut links), at(100));
        assert_eq!(queue.take_all().len(), 1);
        queue.follow_up(&claim(), "", acks(&mut links), at(100));
        // It was due, and failed.
        let (due, delay) = queue.take_due(at(100)).unwrap();
        queue.retry_later(due, delay, at(100));
        queue.add_first(cleanup(700));
        let all = queue.take_all();
        assert_eq!((all.len(), all[0].expires_at), (2, at(700)), "the first comes first");
        assert!(queue.is_empty());
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
        assert_eq!(queue.earliest(), at(1), "the entry that was due next is dropped");
        queue.add_first(cleanup(1 << 40));
        assert_eq!(queue.take_all().len(), CLEANUPS_MAX + 1);
    }

    /// Fault: N85
    #[test]
    fn full_queue_drops_acknowledged_entries_first() {
        let (mut links, mut queue) = ([AckTracker::default()], CleanupQueue::default());
        (0..CLEANUPS_MAX as u64 / 2).for_each(|n| queue.add(cleanup(1 << 40), at(n)));
        while queue.entries.len() < CLEANUPS_MAX {
            queue.follow_up(&claim(), "", acks(&mut links), at(1 << 30));
        }
        links[0].record(false);
        (0..2 * SEARCH_INTERVAL_MAX as u64).for_each(|n| queue.add(cleanup(1 << 40), at(n)));
        let _ = queue.take_overflowed();
        assert!(queue.entries.len() < CLEANUPS_MAX, "{} entries", queue.entries.len());
    }
}
