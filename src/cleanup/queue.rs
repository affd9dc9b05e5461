//! The clean-up queue: abandoned claims that may have left a lock or a queue entry on a server.
//! Clean-up is retried until it succeeds or the residue has expired, unless the queue is full.
//! Pure.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use crate::{
    core::{
        backoff::{RETRY_PAUSE_MAX, retry_backoff},
        claim::{Claim, Residue},
        lease::Lease,
        validity::EXPIRY_SLACK,
    },
    sys::clock::Moment,
};

/// Maximum length of the queue; otherwise memory would grow without a bound. Far more entries than
/// a process can add before the first ones expire.
pub(super) const CLEANUPS_MAX: usize = 65_536;
/// Time for which a server keeps a queue that no waiter polls; `QUEUE_MS` in `notify.lua`.
const QUEUE_ENTRY_TTL: Duration = Duration::from_secs(60);
/// Bounds of the number of additions between two searches for acknowledged entries. Each addition
/// thus costs the search of about 64 entries on average.
const SEARCH_INTERVAL_MIN: usize = 64;
const SEARCH_INTERVAL_MAX: usize = 1_024;

/// An abandoned claim. To clean up means to release the lock if the claim holds it, and to remove
/// the queue entry.
#[derive(Clone, Debug)]
pub(super) struct Cleanup {
    pub(super) claim: Claim,
    pub(super) residue: Residue,
    /// Lease under the same claim. If the lease is still valid when this clean-up is due, the
    /// clean-up is dropped.
    unless_held: Option<Arc<Lease>>,
    /// Lease that this clean-up releases, for a holder that did not wait.
    pub(super) released: Option<Arc<Lease>>,
    /// A release was sent to all these nodes by its caller, and is repeated only if it is not
    /// acknowledged in time.
    is_follow_up: bool,
    /// Time at which the residue has expired on the server, if it was there at the first try.
    expires_at: Moment,
}

impl Cleanup {
    pub(super) fn new(claim: Claim, residue: Residue, at: Moment) -> Cleanup {
        let is_queued = !residue.queue_entry.is_empty();
        let lifetime = if is_queued { claim.ttl.max(QUEUE_ENTRY_TTL) } else { claim.ttl };
        Cleanup {
            claim,
            residue,
            unless_held: None,
            released: None,
            is_follow_up: false,
            expires_at: at.saturating_add(lifetime),
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct CleanupQueue {
    /// Entries and how often they failed, by the time of their next try and a number that makes
    /// equal times distinct.
    entries: BTreeMap<(Moment, u64), (Cleanup, u32)>,
    last_number: u64,
    /// Number of additions since the last search for acknowledged entries, and of the entries that
    /// it left.
    unsearched: usize,
    left: usize,
    /// An entry was dropped, and that has not been logged yet.
    overflowed: bool,
}

impl CleanupQueue {
    /// Adds what an abandoned claim may have left, to be cleaned up now, and again once none of its
    /// requests can be in flight any more. Such a request could arrive after the first clean-up.
    ///
    /// Adds a release that is not acknowledged yet for later: it is repeated where it is still not
    /// acknowledged then. A node that refuses it, or never got it, would otherwise keep the lock
    /// for its whole lease.
    pub(super) fn add_residue(&mut self, claim: &Claim, residue: Residue, now: Moment) {
        let in_flight_until = residue.in_flight_until;
        if !residue.pending_acks.is_empty() {
            let cleanup = Cleanup::new(claim.clone(), residue, in_flight_until);
            return self.add(Cleanup { is_follow_up: true, ..cleanup }, in_flight_until);
        }
        self.add_twice(claim.clone(), residue, now, None);
    }

    /// Adds the release of a lease whose holder does not wait.
    pub(super) fn add_release(&mut self, lease: &Arc<Lease>, residue: Residue, now: Moment) {
        self.add_twice(lease.longest_claim(), residue, now, Some(lease));
    }

    fn add_twice(
        &mut self,
        claim: Claim,
        residue: Residue,
        now: Moment,
        released: Option<&Arc<Lease>>,
    ) {
        let in_flight_until = residue.in_flight_until;
        let first = Cleanup::new(claim.clone(), residue.clone(), now);
        self.add(Cleanup { released: released.cloned(), ..first }, now);
        if in_flight_until > now {
            let at = in_flight_until.saturating_add(EXPIRY_SLACK);
            self.add(Cleanup::new(claim, residue, at), at);
        }
    }

    /// Adds what may be left of this lease at `at`, to be cleaned up then unless the lease is
    /// valid.
    pub(super) fn add_unless_held(&mut self, lease: &Arc<Lease>, residue: Residue, at: Moment) {
        let cleanup = Cleanup::new(lease.longest_claim(), residue, at);
        self.add(Cleanup { unless_held: Some(lease.clone()), ..cleanup }, at);
    }

    /// Adds an entry that comes before all others, whatever the length of the queue.
    pub(super) fn add_first(&mut self, cleanup: Cleanup) {
        self.insert(cleanup, Moment::from_nanos(0), 0);
    }

    /// Adds an entry, to be tried at `at`. If the queue is full, drops the entry that is due next.
    fn add(&mut self, cleanup: Cleanup, at: Moment) {
        while self
            .entries
            .first_key_value()
            .is_some_and(|(_, (first, _))| first.residue.is_acknowledged())
        {
            self.entries.pop_first();
        }
        // Acknowledged entries may have gathered behind one that is not.
        self.unsearched += 1;
        if self.unsearched >= self.left.clamp(SEARCH_INTERVAL_MIN, SEARCH_INTERVAL_MAX) {
            self.entries.retain(|_, (cleanup, _)| !cleanup.residue.is_acknowledged());
            (self.unsearched, self.left) = (0, self.entries.len());
        }
        if self.entries.len() >= CLEANUPS_MAX {
            self.entries.pop_first();
            self.overflowed = true;
        }
        self.insert(cleanup, at, 0);
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

    /// Returns the next entry that is due at `now`, and how often it has failed. Drops entries that
    /// need no clean-up any more.
    pub(super) fn take_due(&mut self, now: Moment) -> Option<(Cleanup, u32)> {
        while self.earliest() <= now {
            let (_, (mut cleanup, failures)) = self.entries.pop_first()?;
            let held = cleanup.unless_held.as_ref().is_some_and(|lease| lease.ended().is_none());
            cleanup.residue.drop_acknowledged();
            cleanup.is_follow_up = false;
            if now < cleanup.expires_at && !held && !cleanup.residue.is_empty() {
                return Some((cleanup, failures));
            }
        }
        None
    }

    /// Puts an entry back that has failed once more than `failures` times. Waiters wait for what it
    /// releases, so it is tried as often as they ask.
    pub(super) fn retry_later(&mut self, cleanup: Cleanup, failures: u32, now: Moment) {
        // What has failed together is tried again together, in one exchange.
        let pause = retry_backoff(failures, RETRY_PAUSE_MAX, now.as_nanos());
        self.insert(cleanup, now.saturating_add(pause), failures.saturating_add(1));
    }

    /// Empties the queue and returns what a shutdown tries to clean up. It follows up no releases,
    /// because most of them have only not been acknowledged yet.
    pub(super) fn take_all(&mut self) -> Vec<Cleanup> {
        let entries = std::mem::take(&mut self.entries).into_values();
        entries
            .map(|(cleanup, _)| cleanup)
            .filter(|cleanup| !cleanup.is_follow_up && !cleanup.residue.is_acknowledged())
            .collect()
    }

    fn insert(&mut self, cleanup: Cleanup, at: Moment, failures: u32) {
        self.last_number += 1;
        self.entries.insert((at, self.last_number), (cleanup, failures));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::{
        ack::{AckTracker, PendingAcks},
        claim::{Grant, InFlight},
        id::generate_lock_id,
        key::LockKey,
        kind::LockKind,
        lease::LeaseEnd,
        quorum::{NodeDeadlines, NodeSet},
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
            kind: LockKind::Mutex,
            token: 0,
        }
    }

    fn cleanup(until: u64) -> Cleanup {
        let residue = residue(NodeSet::single(0), "", at(0));
        Cleanup { expires_at: at(until), ..Cleanup::new(claim(), residue, at(0)) }
    }

    fn residue(nodes: NodeSet, queue_entry: &str, in_flight_until: Moment) -> Residue {
        let (queue_entry, pending_acks) = (queue_entry.to_owned(), PendingAcks::new());
        let keep_until = Moment::default();
        Residue { nodes, queue_entry, in_flight_until, keep_until, pending_acks }
    }

    /// A release that no connection has acknowledged yet.
    fn unacknowledged(connections: &mut [AckTracker], until: Moment) -> Residue {
        let pending_acks = acks(connections);
        let nodes = pending_acks.iter().map(|(node, _)| *node).collect();
        Residue { pending_acks, ..residue(nodes, "", until) }
    }

    /// One ack of each connection, in the order of the nodes.
    fn acks(connections: &mut [AckTracker]) -> PendingAcks {
        connections.iter_mut().enumerate().map(|(node, acks)| (node, acks.issue(1))).collect()
    }

    #[test]
    fn cleanup_retried_with_back_off_until_expiry() {
        let mut queue = CleanupQueue::default();
        queue.add(cleanup(5_000), at(100));
        let (mut now, mut tries) = (at(100), 0);
        while let Some((cleanup, failures)) = queue.take_due(now) {
            assert_eq!(failures, tries);
            tries += 1;
            assert!(tries < 20, "the retries do not end");
            queue.retry_later(cleanup, failures, now);
            let pause = queue.earliest().duration_since(now);
            assert!(pause <= RETRY_PAUSE_MAX + RETRY_PAUSE_MAX / 10, "{pause:?}");
            now = queue.earliest();
        }
        assert!(tries >= 12, "{tries} tries");
        assert!(now >= at(5_000));
        assert_eq!(queue.earliest(), Moment::NEVER);
        assert!(queue.is_empty());
    }

    #[test]
    fn claim_with_request_in_flight_cleaned_up_twice() {
        let (mut queue, nodes) = (CleanupQueue::default(), NodeSet::single(0));
        queue.add_residue(&claim(), residue(nodes, "", at(10)), at(10));
        assert!(queue.take_due(at(10)).is_some() && queue.is_empty());
        queue.add_residue(&claim(), residue(nodes, "", at(5_000)), at(10));
        assert!(queue.take_due(at(10)).is_some() && queue.take_due(at(5_000)).is_none());
        let again = at(5_000).saturating_add(EXPIRY_SLACK);
        assert!(queue.take_due(again).is_some(), "it expires a ttl after the last request");
    }

    #[test]
    fn queue_entry_expires_later_than_a_short_lock() {
        let mut queue = CleanupQueue::default();
        queue.add_residue(&claim(), residue(NodeSet::single(0), "entry", at(0)), at(0));
        queue.add_residue(&claim(), residue(NodeSet::single(0), "", at(0)), at(0));
        assert_eq!(queue.take_due(at(59_999)).unwrap().0.residue.queue_entry, "entry");
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
            since: at(0),
            node_deadlines: votes,
            provisional: false,
            in_flight: late,
            may_hold: nodes,
            queue_entry: String::new(),
            is_token_in_fence: false,
        };
        let lease = Arc::new(Lease::new(claim(), grant, at(0)));
        queue.add_unless_held(&lease, residue(nodes, "", at(0)), at(100));
        assert!(queue.take_due(at(100)).is_none());
        queue.add_unless_held(&lease, residue(nodes, "", at(0)), at(100));
        lease.end(LeaseEnd::Released);
        assert!(queue.take_due(at(100)).is_some(), "its lease has ended");
    }

    /// Fault: N112
    #[test]
    fn acknowledged_node_not_asked_again() {
        let mut links = [AckTracker::default(), AckTracker::default()];
        let mut queue = CleanupQueue::default();
        let pending_acks = acks(&mut links);
        let of_three = residue(NodeSet::first_n(3), "", at(0));
        let of_three = Residue { pending_acks, ..of_three };
        queue.add(Cleanup { residue: of_three, ..cleanup(500) }, at(100));
        links[0].record(false);
        links[1].record(true);
        let (again, _) = queue.take_due(at(100)).unwrap();
        assert_eq!(
            (again.residue.nodes, again.residue.awaiting_ack()),
            ([1, 2].into_iter().collect(), NodeSet::single(1))
        );
        let settled = links[1].issue(1);
        links[1].record(false);
        queue.add(
            Cleanup {
                residue: Residue {
                    nodes: NodeSet::single(1),
                    pending_acks: PendingAcks::from_elem((1, settled), 1),
                    ..again.residue
                },
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
        queue.add_residue(&claim(), unacknowledged(&mut links, at(100)), at(0));
        links[1].record(false);
        links[2].record(true);
        assert!(queue.take_due(at(99)).is_none());
        assert_eq!(queue.earliest(), at(100));
        let (cleanup, _) = queue.take_due(at(100)).unwrap();
        assert_eq!(cleanup.residue.nodes, NodeSet::single(0).union(NodeSet::single(2)));
        assert!(queue.take_due(at(100)).is_none());
    }

    #[test]
    fn acknowledged_entry_dropped_by_next_add() {
        let (mut links, mut queue) = ([AckTracker::default()], CleanupQueue::default());
        for until in 0..1_000 {
            queue.add_residue(&claim(), unacknowledged(&mut links, at(until)), at(0));
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
        queue.add_residue(&claim(), unacknowledged(&mut idle, at(1 << 30)), at(0));
        for _ in 0..2 * CLEANUPS_MAX {
            queue.add_residue(&claim(), unacknowledged(&mut busy, at(1 << 30)), at(0));
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
        queue.add_residue(&claim(), unacknowledged(&mut links, at(100)), at(0));
        assert_eq!(queue.take_all().len(), 1);
        queue.add_residue(&claim(), unacknowledged(&mut links, at(100)), at(0));
        // It was due, and failed.
        let (due, failures) = queue.take_due(at(100)).unwrap();
        queue.retry_later(due, failures, at(100));
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
            queue.add_residue(&claim(), unacknowledged(&mut links, at(1 << 30)), at(0));
        }
        links[0].record(false);
        (0..2 * SEARCH_INTERVAL_MAX as u64).for_each(|n| queue.add(cleanup(1 << 40), at(n)));
        let _ = queue.take_overflowed();
        assert!(queue.entries.len() < CLEANUPS_MAX, "{} entries", queue.entries.len());
    }
}
