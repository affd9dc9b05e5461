//! `Lease`: the state that a guard and the renewer share. A lease is held until it is released or
//! lost; the first end wins and is final.

use std::{
    fmt,
    sync::{Arc, OnceLock},
    time::Duration,
};

use crossbeam_channel::{Receiver, Sender, bounded};

use crate::{
    core::{
        claim::{Claim, Grant, InFlight, Residue},
        lock_lost::LockLost,
        quorum::{NodeDeadlines, NodeSet},
        token::FencingToken,
    },
    sys::{
        clock::{Moment, TimeSource},
        sync::{
            Mutex,
            atomic::{AtomicBool, AtomicU64, Ordering},
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
    pub(crate) in_flight: InFlight,
    /// The holder got it from another thread of the process, with its id.
    pub(crate) is_handed_over: bool,
    /// Dropping the guard does not wait for the release.
    pub(crate) is_released_in_background: bool,
    /// Time until which the lock stays taken, even if it is released earlier; `Moment::default()`
    /// for no such time.
    pub(crate) keep_until: Moment,
    /// Ttl of the renewals, in nanoseconds.
    ttl: AtomicU64,
    /// The longest ttl that a request for this lock has had, in nanoseconds.
    longest_ttl: AtomicU64,
    /// Time until which a renewal without a reply may be applied, in nanoseconds. If it was sent
    /// before the first change of the ttl, it may shorten the time of the lock.
    unanswered_until: AtomicU64,
    /// The holder has noticed that the lease has ended.
    end_is_noticed: AtomicBool,
    time: TimeSource,
    held_since: Moment,
    /// Queue entry that the release must remove, because it may still be in the queue, or a late
    /// request may add it; empty if there is none.
    pub(crate) queue_entry: Box<str>,
    /// As [`Grant::is_token_in_fence`].
    pub(crate) is_token_in_fence: bool,
    /// Nodes that may hold the lock.
    may_hold: Mutex<NodeSet>,
    /// What each node has confirmed. Only backends look inside.
    pub(crate) node_deadlines: Mutex<NodeDeadlines>,
    /// Deadline in nanoseconds. Written only while `end` is locked, so that it never moves after a
    /// thread has ended the lease because of it.
    deadline: AtomicU64,
    /// `None` until the lease has ended. The mutex guards that transition.
    end: Mutex<Option<Box<End>>>,
    /// Created by the first call of [`lost`](Self::lost), because a channel is larger than the
    /// other fields together.
    loss_channel: OnceLock<Arc<LossChannel>>,
}

struct End {
    how: LeaseEnd,
    /// The deadline until the lease ended.
    deadline: Moment,
    /// Time at which the lease was lost. `None` until the loss has been reported.
    lost_at: Option<Moment>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LeaseEnd {
    Released,
    Lost(LockLost),
}

/// A channel for the first loss of one lease, or of several that share it.
pub(crate) struct LossChannel {
    /// `None` once the first of the leases has ended.
    sender: Mutex<Option<Sender<LockLost>>>,
    receiver: Receiver<LockLost>,
}

impl LossChannel {
    pub(crate) fn new() -> Arc<LossChannel> {
        let (sender, receiver) = bounded(1);
        Arc::new(LossChannel { sender: Mutex::new(Some(sender)), receiver })
    }

    pub(crate) fn receiver(&self) -> &Receiver<LockLost> {
        &self.receiver
    }
}

impl Lease {
    pub(crate) fn new(mut claim: Claim, grant: Grant, held_since: Moment) -> Lease {
        claim.token = grant.token.0;
        let ttl = nanos(claim.ttl);
        Lease {
            claim,
            in_flight: grant.in_flight,
            is_handed_over: false,
            is_released_in_background: false,
            keep_until: Moment::default(),
            ttl: AtomicU64::new(ttl),
            longest_ttl: AtomicU64::new(ttl),
            unanswered_until: AtomicU64::new(0),
            end_is_noticed: AtomicBool::new(false),
            time: TimeSource::current(),
            held_since,
            deadline: AtomicU64::new(grant.deadline().as_nanos()),
            queue_entry: grant.queue_entry.into(),
            is_token_in_fence: grant.is_token_in_fence,
            may_hold: Mutex::new(grant.may_hold),
            node_deadlines: Mutex::new(grant.node_deadlines),
            end: Mutex::new(None),
            loss_channel: OnceLock::new(),
        }
    }

    /// The lease of the next holder in this process, which begins at `now`, in place of this one.
    pub(crate) fn successor(&self, release_in_background: bool, now: Moment) -> Lease {
        let grant = self.granted_until(self.node_deadlines.lock().clone());
        let token = FencingToken(self.claim.token + 1);
        let grant = Grant { token, is_token_in_fence: false, ..grant };
        let mut lease = Lease::new(self.claim.clone(), grant, now);
        lease.is_handed_over = true;
        lease.is_released_in_background = release_in_background;
        lease.deadline = AtomicU64::new(self.deadline().as_nanos());
        lease.set_ttl(self.longest_ttl());
        lease.set_ttl(self.ttl());
        lease
    }

    /// What the servers have granted, with these deadlines.
    pub(crate) fn granted_until(&self, node_deadlines: NodeDeadlines) -> Grant {
        Grant {
            token: self.token(),
            since: self.held_since,
            node_deadlines,
            provisional: false,
            in_flight: self.in_flight,
            may_hold: self.may_hold(),
            queue_entry: self.queue_entry.to_string(),
            is_token_in_fence: self.is_token_in_fence,
        }
    }

    pub(crate) fn token(&self) -> FencingToken {
        FencingToken(self.claim.token)
    }

    /// Reads the clock of the manager.
    pub(crate) fn now(&self) -> Moment {
        self.time.now()
    }

    /// Ttl of the renewals.
    pub(crate) fn ttl(&self) -> Duration {
        Duration::from_nanos(self.ttl.load(Ordering::Acquire))
    }

    /// Ttl of a renewal at `now`: at least the rest of the time for which the lock stays taken.
    pub(crate) fn ttl_at(&self, now: Moment) -> Duration {
        self.ttl().max(self.keep_until.duration_since(now))
    }

    /// Sets the ttl of later renewals. A renewal must follow: until one is confirmed, the server
    /// keeps the lock for the former ttl.
    pub(crate) fn set_ttl(&self, ttl: Duration) {
        self.longest_ttl.fetch_max(nanos(ttl), Ordering::AcqRel);
        self.ttl.store(nanos(ttl), Ordering::Release);
    }

    fn longest_ttl(&self) -> Duration {
        Duration::from_nanos(self.longest_ttl.load(Ordering::Acquire))
    }

    /// Whether the server may keep the lock for longer than the next renewal asks for.
    pub(crate) fn may_be_kept_longer(&self) -> bool {
        self.ttl() != self.claim.ttl || self.longest_ttl() != self.claim.ttl
    }

    /// Records a renewal without a reply, which may be applied until `until`.
    pub(crate) fn on_unanswered_renewal(&self, until: Moment) {
        self.unanswered_until.fetch_max(until.as_nanos(), Ordering::AcqRel);
    }

    /// Returns how long the server keeps the lock at least, after it has confirmed a renewal with
    /// this ttl that was sent at `sent`.
    pub(crate) fn kept_for(&self, ttl: Duration, sent: Moment) -> Duration {
        let may_be_shortened = sent.as_nanos() < self.unanswered_until.load(Ordering::Acquire);
        if may_be_shortened { ttl.min(self.claim.ttl) } else { ttl }
    }

    /// The claim, with the longest time for which the server may keep the lock.
    pub(crate) fn longest_claim(&self) -> Claim {
        Claim { ttl: self.longest_ttl(), ..self.claim.clone() }
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
    /// been confirmed yet in the current interval of the hold, or the lock may be kept for longer
    /// than at first.
    pub(crate) fn should_refresh_token(&self, now: Moment) -> bool {
        let confirmed = self.deadline().saturating_sub(self.ttl());
        let interval_of = |at| self.held_for(at).as_secs() / TOKEN_REFRESH_INTERVAL.as_secs();
        self.may_be_kept_longer() || interval_of(now) > interval_of(confirmed)
    }

    /// Nodes that may hold the lock.
    pub(crate) fn may_hold(&self) -> NodeSet {
        *self.may_hold.lock()
    }

    /// What a release that is not confirmed may leave on these nodes.
    pub(crate) fn residue(&self, nodes: NodeSet) -> Residue {
        let residue = Residue::new(nodes, &self.queue_entry, self.in_flight.until());
        Residue { keep_until: self.keep_until, ..residue }
    }

    /// Adds nodes that may hold the lock.
    pub(crate) fn add_nodes(&self, nodes: NodeSet) {
        let mut may_hold = self.may_hold.lock();
        *may_hold = may_hold.union(nodes);
    }

    /// Returns how the lease ended, or `None` if it has not.
    pub(crate) fn ended(&self) -> Option<LeaseEnd> {
        self.end.lock().as_ref().map(|end| end.how.clone())
    }

    /// Returns why a lease that is not held is not held.
    pub(crate) fn why_not_held(&self) -> LockLost {
        match self.ended() {
            Some(LeaseEnd::Lost(why)) => why,
            Some(LeaseEnd::Released) | None => LockLost::Expired,
        }
    }

    /// Once the lease has ended, returns true for the first caller only, which must then report how
    /// it ended.
    pub(crate) fn take_reporting_duty(&self, now: Moment) -> bool {
        let mut end = self.end.lock();
        let Some(end) = end.as_mut().filter(|end| end.lost_at.is_none()) else { return false };
        end.lost_at = Some(now.min(end.deadline));
        true
    }

    /// Returns why the lease was lost, and how long ago, once the loss has been reported.
    pub(crate) fn reported_loss(&self, now: Moment) -> Option<(LockLost, Duration)> {
        match self.end.lock().as_deref() {
            Some(End { how: LeaseEnd::Lost(why), lost_at: Some(lost_at), .. }) => {
                Some((why.clone(), now.duration_since(*lost_at)))
            }
            _ => None,
        }
    }

    /// Records that the holder has noticed that the lease has ended.
    pub(crate) fn on_end_noticed(&self) {
        self.end_is_noticed.store(true, Ordering::Relaxed);
    }

    /// Whether the holder has noticed that the lease has ended: it has asked, or has received the
    /// message of the channel.
    pub(crate) fn is_end_noticed(&self) -> bool {
        let is_received = |channel: &Arc<LossChannel>| channel.receiver().is_empty();
        self.end_is_noticed.load(Ordering::Relaxed)
            || self.loss_channel.get().is_some_and(is_received)
    }

    /// Sets the deadline to the time until which a quorum keeps the lock. Returns false and changes
    /// nothing if the lease has ended, or has expired at `now`. The deadline can move back, because
    /// nodes may report that they have lost a lock that they had confirmed.
    pub(crate) fn update_deadline(&self, deadline: Moment, now: Moment) -> bool {
        let end = self.end.lock();
        if end.is_some() || now >= self.deadline() {
            return false;
        }
        // A lease that too few nodes keep expires now, and was valid until now.
        self.deadline.store(deadline.max(now).as_nanos(), Ordering::Release);
        true
    }

    /// Moves the deadline to `until` if that is later, because servers have confirmed it.
    pub(crate) fn extend_deadline(&self, until: Moment, now: Moment) {
        if until > self.deadline() {
            self.update_deadline(until, now);
        }
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
        *end = Some(Box::new(End { how, deadline, lost_at: None }));
        drop(end);
        self.notify();
        true
    }

    /// Returns the channel that receives the reason of a loss, once. A release disconnects the
    /// channel without a message.
    pub(crate) fn lost(&self) -> &Receiver<LockLost> {
        let channel = self.loss_channel.get_or_init(LossChannel::new);
        // The lease may have ended before this call.
        self.notify();
        channel.receiver()
    }

    /// Uses a channel that several leases share, unless this lease has one already.
    pub(crate) fn report_loss_to(&self, channel: &Arc<LossChannel>) {
        let _ = self.loss_channel.set(channel.clone());
        self.notify();
    }

    fn notify(&self) {
        let Some(channel) = self.loss_channel.get() else { return };
        let Some(end) = self.ended() else { return };
        // The thread that takes the sender sends; dropping the sender disconnects the channel.
        let sender = channel.sender.lock().take();
        if let (Some(sender), LeaseEnd::Lost(why)) = (sender, end) {
            // The channel has room for the only message.
            let _ = sender.try_send(why);
        }
    }
}

fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
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
mod tests;
