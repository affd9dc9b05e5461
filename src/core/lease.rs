//! `Lease`: the state that a guard and the renewer share. A lease is held until it is released or
//! lost; the first end wins and is final.

use std::{fmt, sync::OnceLock, time::Duration};

use crossbeam_channel::{Receiver, Sender, bounded};

use crate::{
    core::{
        claim::{Claim, Grant, InFlight},
        lock_lost::LockLost,
        quorum::{NodeDeadlines, NodeSet},
        token::FencingToken,
    },
    sys::{
        clock::{Moment, TimeSource},
        sync::{
            Mutex,
            atomic::{AtomicU64, Ordering},
        },
    },
};

/// Interval at which a renewal also extends the expiry of the token key, which is an hour after
/// that of the lock.
const TOKEN_REFRESH_INTERVAL: Duration = Duration::from_secs(900);

/// Deadline of a lease that has ended; earlier than any other time.
const ENDED: u64 = 0;

pub(crate) struct Lease {
    pub(crate) claim: Claim,
    pub(crate) token: FencingToken,
    pub(crate) in_flight: InFlight,
    time: TimeSource,
    held_since: Moment,
    /// Time at which the lease was lost. Zero until the loss has been reported.
    lost_at: AtomicU64,
    /// Queue entry that the release must remove, because it may still be in the queue, or a late
    /// request may add it; empty if there is none.
    pub(crate) queue_entry: String,
    /// Nodes that may hold the lock.
    may_hold: Mutex<NodeSet>,
    /// What each node has confirmed. Only backends look inside.
    pub(crate) node_deadlines: Mutex<NodeDeadlines>,
    /// Deadline in nanoseconds. Written only while `end` is locked, so that it never moves after a
    /// thread has ended the lease because of it.
    deadline: AtomicU64,
    /// How the lease ended, and its deadline until then. The mutex guards the transition from held
    /// to ended.
    end: Mutex<Option<(LeaseEnd, Moment)>>,
    /// Created by the first call of [`lost`](Self::lost), because a channel is larger than the
    /// other fields together.
    loss_channel: OnceLock<LossChannel>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LeaseEnd {
    Released,
    Lost(LockLost),
}

struct LossChannel {
    sender: Mutex<Option<Sender<LockLost>>>,
    receiver: Receiver<LockLost>,
}

impl Lease {
    pub(crate) fn new(claim: Claim, grant: Grant, held_since: Moment) -> Lease {
        Lease {
            claim,
            token: grant.token,
            in_flight: grant.in_flight,
            time: TimeSource::current(),
            held_since,
            lost_at: AtomicU64::new(0),
            deadline: AtomicU64::new(grant.deadline().as_nanos()),
            queue_entry: grant.queue_entry,
            may_hold: Mutex::new(grant.may_hold),
            node_deadlines: Mutex::new(grant.node_deadlines),
            end: Mutex::new(None),
            loss_channel: OnceLock::new(),
        }
    }

    /// Reads the clock of the manager.
    pub(crate) fn now(&self) -> Moment {
        self.time.now()
    }

    /// Whether the lease is valid at `now`. The first call that returns false ends the lease.
    pub(crate) fn is_held(&self, now: Moment) -> bool {
        if now < self.deadline() {
            return true;
        }
        self.expire(now);
        // A renewal may have been confirmed since the first check.
        now < self.deadline()
    }

    /// Time since the lock was acquired, at `now`.
    pub(crate) fn held_for(&self, now: Moment) -> Duration {
        now.duration_since(self.held_since)
    }

    /// Time until which the lease is valid; zero once the lease has ended.
    pub(crate) fn deadline(&self) -> Moment {
        Moment::from_nanos(self.deadline.load(Ordering::Acquire))
    }

    /// Whether a renewal at `now` should also extend the expiry of the token key: no renewal has
    /// been confirmed yet in the current interval of the hold.
    pub(crate) fn should_refresh_token(&self, now: Moment) -> bool {
        let confirmed = self.deadline().saturating_sub(self.claim.ttl);
        let interval_of = |at| self.held_for(at).as_secs() / TOKEN_REFRESH_INTERVAL.as_secs();
        interval_of(now) > interval_of(confirmed)
    }

    /// Nodes that may hold the lock.
    pub(crate) fn may_hold(&self) -> NodeSet {
        *self.may_hold.lock()
    }

    /// Adds nodes that may hold the lock.
    pub(crate) fn add_nodes(&self, nodes: NodeSet) {
        let mut may_hold = self.may_hold.lock();
        *may_hold = may_hold.union(nodes);
    }

    /// Returns how the lease ended, or `None` if it has not.
    pub(crate) fn ended(&self) -> Option<LeaseEnd> {
        self.end.lock().as_ref().map(|(how, _)| how.clone())
    }

    /// Returns why a lease that is not held is not held.
    pub(crate) fn why_not_held(&self) -> LockLost {
        match self.ended() {
            Some(LeaseEnd::Lost(why)) => why,
            Some(LeaseEnd::Released) | None => LockLost::Expired,
        }
    }

    /// Returns true for the first caller only, which must then report how the lease ended.
    pub(crate) fn take_reporting_duty(&self, now: Moment) -> bool {
        let deadline = self.end.lock().as_ref().map_or(now, |(_, deadline)| *deadline);
        let lost_at = now.min(deadline).as_nanos().max(1);
        self.lost_at.compare_exchange(0, lost_at, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Returns why the lease was lost, and how long ago, once the loss has been reported.
    pub(crate) fn reported_loss(&self, now: Moment) -> Option<(LockLost, Duration)> {
        let lost_at = self.lost_at.load(Ordering::Acquire);
        match self.ended() {
            Some(LeaseEnd::Lost(why)) if lost_at > 0 => {
                Some((why, now.duration_since(Moment::from_nanos(lost_at))))
            }
            _ => None,
        }
    }

    /// Sets the deadline to the time until which a quorum keeps the lock. Returns false and changes
    /// nothing if the lease has ended, or has expired at `now`. The deadline can move back, because
    /// nodes may report that they have lost a lock that they had confirmed.
    pub(crate) fn update_deadline(&self, deadline: Moment, now: Moment) -> bool {
        let end = self.end.lock();
        if end.is_some() || now >= self.deadline() {
            return false;
        }
        // Do not store zero, which marks a lease that has ended.
        self.deadline.store(deadline.as_nanos().max(1), Ordering::Release);
        true
    }

    /// Ends the lease as expired if its deadline has passed at `now`. Returns whether this call
    /// ended it.
    pub(crate) fn expire(&self, now: Moment) -> bool {
        self.end_if(LeaseEnd::Lost(LockLost::Expired), |deadline| now >= deadline)
    }

    /// Ends the lease. Returns false if it had ended before.
    pub(crate) fn end(&self, how: LeaseEnd) -> bool {
        self.end_if(how, |_| true)
    }

    fn end_if(&self, how: LeaseEnd, due: impl FnOnce(Moment) -> bool) -> bool {
        let mut end = self.end.lock();
        let deadline = self.deadline();
        if end.is_some() || !due(deadline) {
            return false;
        }
        self.deadline.store(ENDED, Ordering::Release);
        *end = Some((how, deadline));
        drop(end);
        self.notify();
        true
    }

    /// Returns the channel that receives the reason of a loss, once. A release disconnects the
    /// channel without a message.
    pub(crate) fn lost(&self) -> &Receiver<LockLost> {
        let channel = self.loss_channel.get_or_init(|| {
            let (sender, receiver) = bounded(1);
            LossChannel { sender: Mutex::new(Some(sender)), receiver }
        });
        // The lease may have ended before this call.
        self.notify();
        &channel.receiver
    }

    fn notify(&self) {
        let Some(channel) = self.loss_channel.get() else { return };
        let Some(end) = self.ended() else { return };
        // The thread that takes the sender sends; dropping the sender disconnects the channel.
        let sender = channel.sender.lock().take();
        if let (Some(sender), LeaseEnd::Lost(why)) = (sender, end) {
            // The channel has room for one message, and only one is ever sent.
            let _ = sender.try_send(why);
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("key", &self.claim.key)
            .field("id", &self.claim.id)
            .field("deadline", &self.deadline())
            .field("ended", &self.ended())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::{id::generate_lock_id, key::LockKey, kind::LockKind};
    use crossbeam_channel::TryRecvError;
    use proptest::prelude::*;
    use std::time::Duration;

    fn at(nanos: u64) -> Moment {
        Moment::from_nanos(nanos)
    }

    fn lease(deadline: u64) -> Lease {
        let claim = Claim {
            key: LockKey::new("", "x").unwrap(),
            id: generate_lock_id(),
            ttl: Duration::from_secs(1),
            kind: LockKind::Mutex,
        };
        let mut votes = NodeDeadlines::new(1);
        votes.confirm(0, at(deadline));
        let nodes = NodeSet::single(0);
        let late =
            InFlight { broken_until: at(0), unanswered: NodeSet::EMPTY, unanswered_until: at(0) };
        let grant = Grant {
            token: FencingToken(1),
            node_deadlines: votes,
            provisional: false,
            in_flight: late,
            may_hold: nodes,
            queue_entry: String::new(),
        };
        Lease::new(claim, grant, at(0))
    }

    /// Fault: F16
    #[test]
    fn lease_expires_at_its_deadline_for_good() {
        let lease = lease(100);
        assert!(lease.is_held(at(99)));
        assert!(!lease.is_held(at(100)));
        assert!(
            !lease.update_deadline(at(1_000), at(50)),
            "a confirmation must not revive the lease"
        );
        assert!(!lease.is_held(at(0)), "not even for an earlier time");
        assert_eq!(lease.ended(), Some(LeaseEnd::Lost(LockLost::Expired)));
    }

    #[test]
    fn deadline_follows_the_quorum() {
        let lease = lease(100);
        assert!(lease.update_deadline(at(200), at(50)));
        assert!(lease.update_deadline(at(150), at(60)), "nodes may lose what they had confirmed");
        assert_eq!(lease.deadline(), at(150));
        assert!(!lease.update_deadline(at(900), at(150)), "too late");
    }

    #[test]
    fn late_confirmation_does_not_move_the_deadline() {
        let lease = lease(100);
        assert!(!lease.update_deadline(at(900), at(100)));
        assert!(!lease.is_held(at(100)));
    }

    #[test]
    fn first_end_wins_and_is_sent_once() {
        let lease = lease(100);
        assert_eq!(lease.lost().try_recv(), Err(TryRecvError::Empty));
        assert!(lease.end(LeaseEnd::Lost(LockLost::Gone)));
        assert!(!lease.end(LeaseEnd::Released));
        assert!(!lease.expire(at(500)));
        assert_eq!(lease.lost().try_recv(), Ok(LockLost::Gone));
        assert_eq!(lease.lost().try_recv(), Err(TryRecvError::Disconnected));
    }

    #[test]
    fn late_listener_receives_the_loss() {
        let lease = lease(100);
        lease.expire(at(100));
        assert_eq!(lease.lost().try_recv(), Ok(LockLost::Expired));
    }

    #[test]
    fn release_closes_the_channel_without_message() {
        let lease = lease(100);
        let lost = lease.lost().clone();
        assert!(lease.end(LeaseEnd::Released));
        assert_eq!(lost.try_recv(), Err(TryRecvError::Disconnected));
    }

    #[test]
    fn reporting_duty_is_taken_once_with_the_time_of_the_loss() {
        let lost_at = |deadline, why, noticed| {
            let lease = lease(deadline);
            assert!(lease.end(LeaseEnd::Lost(why)));
            assert_eq!(lease.reported_loss(at(noticed)), None);
            assert!(lease.take_reporting_duty(at(noticed)));
            assert!(!lease.take_reporting_duty(at(noticed + 50)));
            let (_, ago) = lease.reported_loss(at(1_000)).unwrap();
            1_000 - ago.as_nanos()
        };
        assert_eq!(lost_at(100, LockLost::Gone, 40), 40);
        assert_eq!(lost_at(100, LockLost::Expired, 400), 100, "noticed late");
    }

    #[test]
    fn added_nodes_may_hold_the_lock() {
        let lease = lease(100);
        assert_eq!(lease.may_hold(), NodeSet::single(0));
        lease.add_nodes(NodeSet::single(2));
        assert_eq!(lease.may_hold(), [0, 2].into_iter().collect());
    }

    #[test]
    fn debug_output_shows_key_and_end() {
        let lease = lease(100);
        lease.end(LeaseEnd::Lost(LockLost::Gone));
        let shown = format!("{lease:?}");
        assert!(shown.contains("LockKey(\"x\")") && shown.contains("Gone"), "{shown}");
    }

    /// Fault: N88
    #[test]
    fn token_refreshed_once_per_interval() {
        let minutes = |minutes: u64| at(minutes * 60_000_000_000);
        let mut lease = lease(0);
        lease.claim.ttl = Duration::from_secs(60);
        lease.deadline = AtomicU64::new(minutes(1).as_nanos());
        assert!(!lease.should_refresh_token(at(1)));
        assert!(lease.update_deadline(minutes(15), at(2)));
        assert!(!lease.should_refresh_token(at(minutes(15).as_nanos() - 1)));
        assert!(
            lease.should_refresh_token(minutes(15)) && lease.should_refresh_token(minutes(15)),
            "until it is confirmed"
        );
        assert!(lease.update_deadline(minutes(17), at(3)));
        assert!(
            !lease.should_refresh_token(minutes(17)) && lease.should_refresh_token(minutes(30))
        );
    }

    #[derive(Clone, Debug)]
    enum LeaseOp {
        Check(u64),
        UpdateDeadline(u64, u64),
        Expire(u64),
        Lose,
        Release,
    }

    fn any_op() -> impl Strategy<Value = LeaseOp> {
        prop_oneof![
            4 => (0u64..400).prop_map(LeaseOp::Check),
            4 => (0u64..500, 0u64..400)
                .prop_map(|(deadline, now)| LeaseOp::UpdateDeadline(deadline, now)),
            1 => (0u64..400).prop_map(LeaseOp::Expire),
            1 => Just(LeaseOp::Lose),
            1 => Just(LeaseOp::Release),
        ]
    }

    proptest! {
        /// Once one caller has seen the lease as lost, all callers do, whatever happens afterwards.
        #[test]
        fn lost_is_final(steps in proptest::collection::vec(any_op(), 1..40)) {
            let lease = lease(100);
            let mut over = false;
            for step in steps {
                match step {
                    LeaseOp::Check(now) => {
                        let held = lease.is_held(at(now));
                        prop_assert!(!(over && held), "the lease became valid again");
                        over |= !held;
                    }
                    LeaseOp::UpdateDeadline(deadline, now) => prop_assert!(
                        !(lease.update_deadline(at(deadline), at(now)) && over)
                    ),
                    LeaseOp::Expire(now) => over |= lease.expire(at(now)),
                    LeaseOp::Lose => { lease.end(LeaseEnd::Lost(LockLost::Gone)); over = true; }
                    LeaseOp::Release => { lease.end(LeaseEnd::Released); over = true; }
                }
                prop_assert_eq!(over, lease.ended().is_some());
            }
        }
    }
}
