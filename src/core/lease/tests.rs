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
        token: 0,
    };
    let mut votes = NodeDeadlines::new(1);
    votes.confirm(0, at(deadline));
    let nodes = NodeSet::single(0);
    let late =
        InFlight { broken_until: at(0), unanswered: NodeSet::EMPTY, unanswered_until: at(0) };
    let grant = Grant {
        token: FencingToken(1),
        since: Moment::default(),
        node_deadlines: votes,
        provisional: false,
        in_flight: late,
        may_hold: nodes,
        queue_entry: String::new(),
        is_token_in_fence: false,
    };
    Lease::new(claim, grant, at(0))
}

/// Fault: F16
#[test]
fn lease_expires_at_its_deadline_for_good() {
    let lease = lease(100);
    assert!(lease.is_held(at(99)));
    assert!(!lease.is_held(at(100)));
    assert!(!lease.update_deadline(at(1_000), at(50)), "a confirmation must not revive the lease");
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
fn confirmation_extends_the_deadline_and_never_shortens_it() {
    let lease = lease(100);
    for (until, now, deadline) in [(90, 10, 100), (120, 20, 120), (150, 120, 120)] {
        lease.extend_deadline(at(until), at(now));
        assert_eq!(lease.deadline(), at(deadline));
    }
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
    lease = Lease::new(lease.claim.clone(), lease.granted_until(NodeDeadlines::new(1)), at(0));
    lease.deadline = AtomicU64::new(minutes(1).as_nanos());
    assert!(!lease.should_refresh_token(at(1)));
    assert!(lease.update_deadline(minutes(15), at(2)));
    assert!(!lease.should_refresh_token(at(minutes(15).as_nanos() - 1)));
    assert!(
        lease.should_refresh_token(minutes(15)) && lease.should_refresh_token(minutes(15)),
        "until it is confirmed"
    );
    assert!(lease.update_deadline(minutes(17), at(3)));
    assert!(!lease.should_refresh_token(minutes(17)) && lease.should_refresh_token(minutes(30)));
    lease.set_ttl(Duration::from_secs(24 * 3600));
    assert!(lease.should_refresh_token(minutes(17)), "the next renewal may be hours later");
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

/// Fault: N192
#[test]
fn longest_ttl_is_remembered() {
    let lease = lease(100);
    let (first, longest) = (lease.claim.ttl, Duration::from_secs(3600));
    assert!(!lease.may_be_kept_longer());
    for ttl in [longest, first] {
        lease.set_ttl(ttl);
        assert!(lease.may_be_kept_longer() && lease.longest_claim().ttl == longest);
    }
    let next = lease.successor(false, at(40));
    assert_eq!((next.ttl(), next.longest_claim().ttl), (first, longest));
}

#[test]
fn next_holder_has_a_lease_of_its_own() {
    let former = lease(100);
    former.set_ttl(Duration::from_secs(2));
    let next = former.successor(true, at(40));
    assert_eq!((next.token(), next.claim.token), (FencingToken(2), 2));
    assert_eq!((&next.claim.id, next.deadline()), (&former.claim.id, at(100)));
    assert_eq!((next.ttl(), next.held_for(at(50))), (former.ttl(), Duration::from_nanos(10)));
    assert!(next.is_released_in_background && former.end(LeaseEnd::Released));
    assert!(next.is_held(at(99)) && next.ended().is_none());
    assert_eq!(next.successor(false, at(60)).claim.token, 3);
}
