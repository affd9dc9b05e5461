//! `Lease`: the one living thing that a guard and the renewer share. Held, until it is released or lost; the first end
//! wins and is final.

use std::{fmt, sync::OnceLock, time::Duration};

use crossbeam_channel::{Receiver, Sender, bounded};

use crate::{
    clock::Moment,
    error::LockLost,
    grant::{Claim, Grant, Late},
    observer::Hold,
    redlock::{AtomicNodeSet, NodeSet},
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    token::FencingToken,
};

/// So often a holder keeps the last token from being forgotten, as it would be a day after it was given. Also with leases of
/// a day, renewed every third of it, the token outlives the lock.
const KEEP_TOKEN_EVERY: Duration = Duration::from_secs(6 * 3_600);

/// Stands for "ended" in the deadline: no moment is before it.
const ENDED: u64 = 0;

pub(crate) struct Lease {
    pub(crate) claim: Claim,
    pub(crate) token: FencingToken,
    pub(crate) late: Late,
    /// Since when it is held.
    pub(crate) hold: Hold,
    /// Somebody has told the handlers how it ended.
    told: AtomicBool,
    /// Its entry in a queue that it may stand in still or be put into, and has to leave with the release; or empty.
    pub(crate) place: String,
    /// The nodes that may keep it.
    nodes: AtomicNodeSet,
    /// In nanoseconds; only written under `end`, so that a deadline that was seen to have passed is never moved.
    deadline: AtomicU64,
    /// Guards the change from held to ended.
    end: Mutex<Option<End>>,
    /// Made when somebody first wants to hear; a channel is larger than all the rest.
    news: OnceLock<News>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Released,
    Lost(LockLost),
}

struct News {
    teller: Mutex<Option<Sender<LockLost>>>,
    hearer: Receiver<LockLost>,
}

impl Lease {
    pub(crate) fn open(claim: Claim, grant: &Grant, hold: Hold) -> Lease {
        Lease {
            claim,
            token: grant.token,
            late: grant.late,
            hold,
            told: AtomicBool::new(false),
            place: grant.place.clone(),
            nodes: AtomicNodeSet::new(grant.nodes),
            deadline: AtomicU64::new(grant.deadline().as_nanos()),
            end: Mutex::new(None),
            news: OnceLock::new(),
        }
    }

    /// Whether the holder may believe at `now`. The first time that the answer is no ends the lease.
    pub(crate) fn is_held(&self, now: Moment) -> bool {
        if now < self.deadline() {
            return true;
        }
        self.expire(now);
        // A confirmation may have come just before.
        now < self.deadline()
    }

    /// Until when the holder may believe; long ago when the lease has ended.
    pub(crate) fn deadline(&self) -> Moment {
        Moment::from_nanos(self.deadline.load(Ordering::Acquire))
    }

    /// Whether a renewal at `now` is to keep the token too: it is the first to be confirmed in the hold's next six hours.
    pub(crate) fn has_to_keep_token(&self, now: Moment) -> bool {
        let confirmed = self.deadline().saturating_sub(self.claim.ttl);
        let turn = |at| self.hold.held(at).as_secs() / KEEP_TOKEN_EVERY.as_secs();
        turn(now) > turn(confirmed)
    }

    /// The nodes that may keep the lock.
    pub(crate) fn nodes(&self) -> NodeSet {
        self.nodes.get()
    }

    /// The same goes for these from now on.
    pub(crate) fn also_on(&self, nodes: NodeSet) {
        self.nodes.add(nodes);
    }

    /// How the lease ended, if it has.
    pub(crate) fn ended(&self) -> Option<End> {
        self.end.lock().clone()
    }

    /// True for the first who asks: the one to tell how it ended.
    pub(crate) fn is_untold(&self) -> bool {
        !self.told.swap(true, Ordering::AcqRel)
    }

    /// A quorum keeps the lock until `deadline`: moves it, unless the lease is over at `now`. It moves back when nodes
    /// say that they have lost what they had confirmed.
    pub(crate) fn revise(&self, deadline: Moment, now: Moment) -> bool {
        let end = self.end.lock();
        if end.is_some() || now >= self.deadline() {
            return false;
        }
        // Zero would stand for an end that has no reason yet.
        self.deadline.store(deadline.as_nanos().max(1), Ordering::Release);
        true
    }

    /// Ends the lease as expired if it is over at `now`; true if this call ended it.
    pub(crate) fn expire(&self, now: Moment) -> bool {
        self.finish(End::Lost(LockLost::Expired), |deadline| now >= deadline)
    }

    /// Ends the lease; true if it had not ended before.
    pub(crate) fn end(&self, how: End) -> bool {
        self.finish(how, |_| true)
    }

    fn finish(&self, how: End, due: impl FnOnce(Moment) -> bool) -> bool {
        let mut end = self.end.lock();
        if end.is_some() || !due(self.deadline()) {
            return false;
        }
        self.deadline.store(ENDED, Ordering::Release);
        *end = Some(how);
        drop(end);
        self.tell();
        true
    }

    /// The channel on which the loss is told, once; it closes without a word when the lock is released.
    pub(crate) fn lost(&self) -> &Receiver<LockLost> {
        let news = self.news.get_or_init(|| {
            let (teller, hearer) = bounded(1);
            News { teller: Mutex::new(Some(teller)), hearer }
        });
        // The lease may have ended before anybody listened.
        self.tell();
        &news.hearer
    }

    fn tell(&self) {
        let Some(news) = self.news.get() else { return };
        let Some(end) = self.ended() else { return };
        // Whoever takes the sender tells; dropping it closes the channel.
        let teller = news.teller.lock().take();
        if let (Some(teller), End::Lost(why)) = (teller, end) {
            // There is room for one, and only one is ever sent.
            let _ = teller.try_send(why);
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
    use crate::{id::generate_lock_id, key::LockKey, redlock::Votes};
    use crossbeam_channel::TryRecvError;
    use proptest::prelude::*;
    use std::time::Duration;

    fn at(nanos: u64) -> Moment {
        Moment::from_nanos(nanos)
    }

    fn lease(deadline: u64) -> Lease {
        let claim = Claim { key: LockKey::new("", "x").unwrap(), id: generate_lock_id(), ttl: Duration::from_secs(1) };
        let mut votes = Votes::new(1);
        votes.confirm(0, at(deadline));
        let nodes = NodeSet::only(0);
        let late = Late { broken_until: at(0), open: NodeSet::NONE, open_until: at(0) };
        let grant = Grant { token: FencingToken(1), votes, provisional: false, late, nodes, place: String::new() };
        Lease::open(claim, &grant, Hold::since(at(0)))
    }

    #[test]
    fn belief_ends_at_the_deadline_and_does_not_come_back() {
        let lease = lease(100);
        assert!(lease.is_held(at(99)));
        assert!(!lease.is_held(at(100)));
        assert!(!lease.revise(at(1_000), at(50)), "a confirmation must not resurrect");
        assert!(!lease.is_held(at(0)), "not even at the beginning of time");
        assert_eq!(lease.ended(), Some(End::Lost(LockLost::Expired)));
    }

    #[test]
    fn the_deadline_follows_what_a_quorum_keeps() {
        let lease = lease(100);
        assert!(lease.revise(at(200), at(50)));
        assert!(lease.revise(at(150), at(60)), "nodes may lose what they had confirmed");
        assert_eq!(lease.deadline(), at(150));
        assert!(!lease.revise(at(900), at(150)), "too late");
    }

    #[test]
    fn a_confirmation_that_comes_after_the_deadline_leaves_it_alone() {
        let lease = lease(100);
        assert!(!lease.revise(at(900), at(100)));
        assert!(!lease.is_held(at(100)));
    }

    #[test]
    fn the_first_end_wins_and_is_told_once() {
        let lease = lease(100);
        assert_eq!(lease.lost().try_recv(), Err(TryRecvError::Empty));
        assert!(lease.end(End::Lost(LockLost::Gone)));
        assert!(!lease.end(End::Released));
        assert!(!lease.expire(at(500)));
        assert_eq!(lease.lost().try_recv(), Ok(LockLost::Gone));
        assert_eq!(lease.lost().try_recv(), Err(TryRecvError::Disconnected));
    }

    #[test]
    fn who_listens_late_hears_it_all_the_same() {
        let lease = lease(100);
        lease.expire(at(100));
        assert_eq!(lease.lost().try_recv(), Ok(LockLost::Expired));
    }

    #[test]
    fn a_release_closes_the_channel_without_a_word() {
        let lease = lease(100);
        let lost = lease.lost().clone();
        assert!(lease.end(End::Released));
        assert_eq!(lost.try_recv(), Err(TryRecvError::Disconnected));
    }

    #[test]
    fn one_alone_tells_the_handlers_how_it_ended() {
        let lease = lease(100);
        assert!(lease.is_untold());
        assert!(!lease.is_untold());
        assert!(!lease.is_untold());
    }

    #[test]
    fn nodes_that_take_the_lock_later_are_among_those_that_may_keep_it() {
        let lease = lease(100);
        assert_eq!(lease.nodes(), NodeSet::only(0));
        lease.also_on(NodeSet::only(2));
        assert_eq!(lease.nodes(), [0, 2].into_iter().collect());
    }

    #[test]
    fn what_is_shown_of_it_is_which_lock_and_how_it_ended() {
        let lease = lease(100);
        lease.end(End::Lost(LockLost::Gone));
        let shown = format!("{lease:?}");
        assert!(shown.contains("LockKey(\"x\")") && shown.contains("Gone"), "{shown}");
    }

    #[test]
    fn the_token_is_kept_by_the_first_renewal_that_is_confirmed_in_each_six_hours() {
        let hours = |hours: u64| at(hours * 3_600_000_000_000);
        let mut lease = lease(0);
        lease.claim.ttl = Duration::from_secs(3_600);
        lease.deadline = AtomicU64::new(hours(1).as_nanos());
        assert!(!lease.has_to_keep_token(at(1)));
        assert!(lease.revise(hours(6), at(2)));
        assert!(!lease.has_to_keep_token(at(hours(6).as_nanos() - 1)));
        assert!(lease.has_to_keep_token(hours(6)) && lease.has_to_keep_token(hours(6)), "until it is confirmed");
        assert!(lease.revise(hours(8), at(3)));
        assert!(!lease.has_to_keep_token(hours(8)) && lease.has_to_keep_token(hours(12)));
    }

    #[derive(Clone, Debug)]
    enum Step {
        Look(u64),
        Revise(u64, u64),
        Expire(u64),
        Lose,
        Release,
    }

    fn any_step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0u64..400).prop_map(Step::Look),
            4 => (0u64..500, 0u64..400).prop_map(|(deadline, now)| Step::Revise(deadline, now)),
            1 => (0u64..400).prop_map(Step::Expire),
            1 => Just(Step::Lose),
            1 => Just(Step::Release),
        ]
    }

    proptest! {
        /// Once anybody was told "no", everybody is, whatever happens afterwards.
        #[test]
        fn lost_is_final(steps in proptest::collection::vec(any_step(), 1..40)) {
            let lease = lease(100);
            let mut over = false;
            for step in steps {
                match step {
                    Step::Look(now) => {
                        let held = lease.is_held(at(now));
                        prop_assert!(!(over && held), "came back from the dead");
                        over |= !held;
                    }
                    Step::Revise(deadline, now) => prop_assert!(!(lease.revise(at(deadline), at(now)) && over)),
                    Step::Expire(now) => over |= lease.expire(at(now)),
                    Step::Lose => { lease.end(End::Lost(LockLost::Gone)); over = true; }
                    Step::Release => { lease.end(End::Released); over = true; }
                }
                prop_assert_eq!(over, lease.ended().is_some());
            }
        }
    }
}
