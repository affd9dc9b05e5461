//! Tests of the schedule: leases, times and outcomes in, decisions out.

use super::*;
use crate::core::{
    claim::{Claim, Grant, InFlight},
    id::generate_lock_id,
    key::LockKey,
    kind::LockKind,
    lease::LeaseEnd,
    quorum::{NodeDeadlines, NodeSet},
    token::FencingToken,
};
use proptest::prelude::*;

pub(in crate::renew) fn at(millis: u64) -> Moment {
    Moment::from_nanos(millis * 1_000_000)
}

pub(in crate::renew) fn lease(ttl_ms: u64, deadline_ms: u64) -> Arc<Lease> {
    let claim = Claim {
        key: LockKey::new("", "x").unwrap(),
        id: generate_lock_id(),
        ttl: Duration::from_millis(ttl_ms),
        kind: LockKind::Mutex,
        token: 0,
    };
    let (votes, nodes) = (deadline_on_one_node(deadline_ms), NodeSet::single(0));
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
    Arc::new(Lease::new(claim, grant, at(0)))
}

fn deadline_on_one_node(deadline_ms: u64) -> NodeDeadlines {
    let mut votes = NodeDeadlines::new(1);
    votes.confirm(0, at(deadline_ms));
    votes
}

pub(in crate::renew) fn plan() -> RenewalPlan {
    RenewalPlan { renew: true, provisional: false, hold_until: Moment::NEVER }
}

fn generations(due: Vec<(Generation, Arc<Lease>)>) -> Vec<Generation> {
    due.into_iter().map(|(generation, _)| generation).collect()
}

impl Schedule {
    /// Time of the next renewal or end.
    fn earliest(&self) -> Moment {
        self.earliest_renewal().min(earliest_in(&self.ends))
    }
}

#[test]
fn lease_renewed_every_third_of_ttl() {
    let mut schedule = Schedule::default();
    let lease = lease(3_000, 2_900);
    let generation = schedule.insert(lease.clone(), plan(), at(0));
    assert_eq!(schedule.earliest(), at(1_000));
    assert!(schedule.take_due(at(999)).is_empty());
    assert_eq!(generations(schedule.take_due(at(1_000))), [generation]);
    assert_eq!(schedule.earliest_renewal(), Moment::NEVER, "it is in flight");
    assert!(lease.update_deadline(at(3_901), at(1_002)));
    schedule.on_renewed(generation, at(1_001));
    assert_eq!(schedule.earliest(), at(2_001));
}

#[test]
fn renewals_due_soon_are_coalesced() {
    let mut schedule = Schedule::default();
    let first = schedule.insert(lease(3_000, 2_900), plan(), at(0));
    let second = schedule.insert(lease(3_000, 2_900), plan(), at(9));
    let third = schedule.insert(lease(3_000, 2_900), plan(), at(50));
    assert_eq!(generations(schedule.take_due(at(1_000))), [first, second]);
    assert_eq!(generations(schedule.take_due(at(1_050))), [third]);
}

#[test]
fn provisional_lease_confirmed_soon() {
    let mut schedule = Schedule::default();
    schedule.insert(lease(10_000, 900), RenewalPlan { provisional: true, ..plan() }, at(0));
    assert_eq!(schedule.earliest(), at(100));
    schedule.insert(lease(10_000, 8), RenewalPlan { provisional: true, ..plan() }, at(0));
    assert_eq!(schedule.earliest(), at(2));
}

#[test]
fn retries_get_closer_until_the_deadline() {
    let mut schedule = Schedule::default();
    let lease = lease(3_000, 2_900);
    let generation = schedule.insert(lease.clone(), plan(), at(0));
    let (mut now, mut tries, mut last_pause) = (at(1_000), 0, Duration::MAX);
    while !schedule
        .take_deadlines(now)
        .expired
        .iter()
        .any(|(over, why)| Arc::ptr_eq(over, &lease) && *why == LockLost::Expired)
    {
        if !schedule.take_due(now).is_empty() {
            tries += 1;
            schedule.on_failed(generation, now);
        }
        let next = schedule.earliest_renewal().min(lease.deadline());
        let pause = next.duration_since(now);
        assert!(
            pause > Duration::ZERO && pause <= last_pause,
            "retry delays must be positive and must not grow"
        );
        (now, last_pause) = (next, pause);
    }
    assert_eq!(now, at(2_900));
    assert!((5..200).contains(&tries), "{tries} tries");
    assert_eq!(schedule.earliest(), Moment::NEVER);
}

#[test]
fn max_hold_ends_a_healthy_lease() {
    let mut schedule = Schedule::default();
    schedule.insert(lease(3_000, 2_900), RenewalPlan { hold_until: at(500), ..plan() }, at(0));
    assert_eq!(schedule.earliest(), at(500));
    assert_eq!(schedule.take_deadlines(at(500)).expired[0].1, LockLost::MaxHold);
}

#[test]
fn unrenewed_provisional_lease_confirmed_once() {
    let mut schedule = Schedule::default();
    let lease = lease(10_000, 900);
    let generation = schedule.insert(
        lease.clone(),
        RenewalPlan { renew: false, provisional: true, ..plan() },
        at(0),
    );
    assert_eq!(generations(schedule.take_due(at(100))), [generation]);
    assert!(lease.update_deadline(at(9_900), at(101)));
    schedule.on_renewed(generation, at(100));
    assert_eq!(schedule.earliest(), at(9_900));
}

#[test]
fn unrenewed_lease_has_only_its_end_scheduled() {
    let mut schedule = Schedule::default();
    schedule.insert(lease(3_000, 2_900), RenewalPlan { renew: false, ..plan() }, at(0));
    assert!(schedule.take_due(at(2_800)).is_empty());
    assert_eq!(schedule.earliest(), at(2_900));
}

#[test]
fn late_outcome_for_removed_lease_ignored() {
    let mut schedule = Schedule::default();
    let generation = schedule.insert(lease(3_000, 2_900), plan(), at(0));
    assert_eq!(schedule.take_due(at(1_000)).len(), 1);
    assert!(schedule.remove(generation).is_some());
    schedule.on_renewed(generation, at(1_000));
    schedule.on_failed(generation, at(1_000));
    schedule.schedule_renewal(generation, at(1_000));
    assert!(!schedule.contains(generation));
    assert_eq!(schedule.earliest(), Moment::NEVER);
}

#[test]
fn requeued_renewal_is_still_due() {
    let mut schedule = Schedule::default();
    let generation = schedule.insert(lease(3_000, 2_900), plan(), at(0));
    schedule.take_due(at(1_000));
    schedule.schedule_renewal(generation, at(1_005));
    assert_eq!(schedule.earliest(), at(1_005));
    assert_eq!(generations(schedule.take_due(at(1_005))), [generation]);
}

#[test]
fn renewal_waits_at_most_as_long_as_its_lease_has_left() {
    let mut schedule = Schedule::default();
    assert!(!schedule.is_pressing(at(0), at(9_000)));
    // The first is due when the exchange begins; the second is added later.
    schedule.insert(lease(30_000, 29_000), plan(), at(0));
    schedule.insert(lease(3_000, 13_900), plan(), at(11_000));
    let presses = |now| schedule.is_pressing(at(10_000), at(now));
    assert!(!presses(11_999), "it is not due yet");
    assert!(presses(12_000), "it has waited long enough");
    let presses = |now| schedule.is_pressing(at(11_000), at(now));
    assert!(!presses(12_449) && presses(12_450));
}

#[test]
fn hopeless_renewal_does_not_press() {
    let mut schedule = Schedule::default();
    let released = lease(3_000, 2_900);
    schedule.insert(released.clone(), plan(), at(0));
    schedule.insert(lease(3_000, 2_900), RenewalPlan { renew: false, ..plan() }, at(0));
    for hold_until in [2_000, 2_900] {
        let plan = RenewalPlan { hold_until: at(hold_until), ..plan() };
        schedule.insert(lease(3_000, 2_900), plan, at(0));
    }
    released.end(LeaseEnd::Released);
    assert!(!schedule.is_pressing(at(0), at(1_900)));
    schedule.insert(lease(3_000, 2_900), plan(), at(0));
    assert!(schedule.is_pressing(at(0), at(1_900)));
    assert!(!schedule.is_pressing(at(0), at(2_900)), "it has expired");
}

#[test]
fn take_all_keeps_insertion_order() {
    let mut schedule = Schedule::default();
    let leases = [2_900, 1_000, 2_000].map(|deadline| lease(3_000, deadline));
    let kept: Vec<_> =
        leases.iter().map(|lease| schedule.insert(lease.clone(), plan(), at(0))).collect();
    schedule.take_due(at(1_000));
    let taken = schedule.take_all();
    assert!(
        taken.len() == 3
            && taken.iter().zip(&leases).all(|(taken, lease)| Arc::ptr_eq(taken, lease))
    );
    assert!(kept.iter().all(|generation| !schedule.contains(*generation)));
    assert_eq!(schedule.earliest(), Moment::NEVER);
}

#[test]
fn moved_end_is_not_an_expiry() {
    let mut schedule = Schedule::default();
    let lease = lease(3_000, 2_900);
    schedule.insert(lease.clone(), RenewalPlan { renew: false, ..plan() }, at(0));
    assert!(lease.update_deadline(at(5_000), at(100)));
    assert!(schedule.take_deadlines(at(2_900)).expired.is_empty());
    assert_eq!(schedule.earliest(), at(5_000));
}

proptest! {
    /// Whatever the outcomes of renewals: every registered lease is scheduled at its end or
    /// earlier, and a removed lease does not come back.
    #[test]
    fn no_lease_is_overlooked(
        steps in proptest::collection::vec((0u8..6, 0usize..8, 1u64..400), 1..120),
    ) {
        let mut schedule = Schedule::default();
        let mut kept: Vec<(Generation, Arc<Lease>)> = Vec::new();
        let mut under_way: Vec<Generation> = Vec::new();
        let mut now = 0;
        for (what, which, span) in steps {
            now += span;
            let over: Vec<_> = schedule.take_deadlines(at(now)).expired;
            for (lease, _) in &over {
                prop_assert!(lease.deadline() <= at(now));
                kept.retain(|(_, other)| !Arc::ptr_eq(lease, other));
            }
            match what {
                0 | 1 => {
                    let lease = lease(span * 3, now + span * 3);
                    kept.push((schedule.insert(lease.clone(), plan(), at(now)), lease));
                }
                2 => under_way.extend(generations(schedule.take_due(at(now)))),
                3 if !under_way.is_empty() => {
                    let generation = under_way.remove(which % under_way.len());
                    if let Some((_, lease)) = kept.iter().find(|(other, _)| *other == generation) {
                        lease.update_deadline(at(now + span), at(now));
                    }
                    schedule.on_renewed(generation, at(now));
                }
                4 if !under_way.is_empty() => {
                    schedule.on_failed(under_way.remove(which % under_way.len()), at(now));
                }
                5 if !kept.is_empty() => {
                    let (generation, _) = kept.remove(which % kept.len());
                    schedule.remove(generation);
                }
                _ => {}
            }
            for (generation, lease) in &kept {
                prop_assert!(schedule.contains(*generation));
                prop_assert!(schedule.earliest() <= lease.deadline());
            }
            prop_assert_eq!(schedule.entries.len(), kept.len());
            prop_assert_eq!(schedule.ends.len(), kept.len());
        }
    }
}

#[test]
fn next_lease_keeps_the_renewals_of_the_former() {
    let mut schedule = Schedule::default();
    let former = lease(30_000, 30_000);
    let generation = schedule.insert(former.clone(), plan(), at(0));
    let renewal = schedule.earliest_renewal();
    let next = Arc::new(former.successor(false, at(5)));
    let replaced = schedule.replace(generation, next.clone(), at(9_000)).unwrap();
    assert!(Arc::ptr_eq(&replaced, &former));
    assert_eq!((schedule.earliest_renewal(), schedule.earliest_deadline()), (renewal, at(9_000)));
    let [(expired, why)] = &schedule.take_deadlines(at(9_000)).expired[..] else {
        panic!("max_hold")
    };
    assert_eq!((expired.token(), why), (FencingToken(2), &LockLost::MaxHold));
    assert!(schedule.replace(generation, next, Moment::NEVER).is_none(), "it has ended");
}

#[test]
fn lease_that_was_renewed_is_not_replaced() {
    let mut schedule = Schedule::default();
    let former = lease(30_000, 30_000);
    let next = Arc::new(former.successor(false, at(5)));
    let generation = schedule.insert(former, plan(), at(0));
    assert_eq!(generations(schedule.take_due(at(10_000))), [generation]);
    assert!(schedule.replace(generation, next.clone(), Moment::NEVER).is_none());
    schedule.on_renewed(generation, at(10_000));
    assert!(schedule.replace(generation, next, Moment::NEVER).is_none());
}

/// Fault: N274
/// Promise: P2
#[test]
fn renewal_asked_for_during_another_follows_it_at_once() {
    let mut schedule = Schedule::default();
    let held = lease(3_000, 2_900);
    let generation = schedule.insert(held.clone(), plan(), at(0));
    let ids = [held.claim.id.as_str().into()];
    for is_confirmed in [true, false] {
        let renew_at = schedule.earliest_renewal();
        assert_eq!(generations(schedule.take_due(renew_at)), [generation]);
        let now = renew_at.saturating_add(Duration::from_millis(5));
        schedule.renew_soon(&ids, now);
        if is_confirmed {
            schedule.on_renewed(generation, renew_at);
        } else {
            schedule.on_failed(generation, now);
        }
        assert_eq!(schedule.earliest_renewal(), now);
        assert_eq!(generations(schedule.take_due(now)), [generation]);
        schedule.on_renewed(generation, now);
        assert!(schedule.earliest_renewal() > now, "it is asked for once only");
    }
}

#[test]
fn overdue_once_after_half_the_validity() {
    let mut schedule = Schedule::default();
    let held = lease(3_000, 2_900);
    let generation = schedule.insert(held.clone(), plan(), at(0));
    assert_eq!(schedule.earliest_deadline(), at(2_900), "no renewal has been tried yet");
    schedule.take_due(at(1_000));
    assert_eq!(schedule.earliest_deadline(), at(1_450));
    assert!(schedule.take_deadlines(at(1_449)).overdue.is_empty());
    assert_eq!(schedule.take_deadlines(at(1_450)).overdue.len(), 1);
    assert_eq!(schedule.earliest_deadline(), at(2_900));
    schedule.on_failed(generation, at(1_500));
    schedule.take_due(at(1_900));
    assert!(schedule.take_deadlines(at(2_899)).overdue.is_empty(), "reported twice");
    // A confirmation begins a new period.
    assert!(held.update_deadline(at(4_800), at(2_000)));
    schedule.on_renewed(generation, at(1_900));
    assert_eq!(schedule.earliest_deadline(), at(4_800));
    assert_eq!(generations(schedule.take_due(at(2_900))), [generation]);
    assert_eq!(schedule.earliest_deadline(), at(3_350));
    assert_eq!(schedule.take_deadlines(at(3_350)).overdue.len(), 1);
}

#[test]
fn timely_or_disabled_renewal_never_overdue() {
    let mut schedule = Schedule::default();
    let held = lease(3_000, 2_900);
    let generation = schedule.insert(held.clone(), plan(), at(0));
    schedule.insert(lease(3_000, 2_900), RenewalPlan { renew: false, ..plan() }, at(0));
    let released = schedule.insert(lease(3_000, 2_900), plan(), at(0));
    schedule.take_due(at(1_000));
    schedule.remove(released);
    assert!(held.update_deadline(at(3_900), at(1_010)));
    schedule.on_renewed(generation, at(1_000));
    assert_eq!(schedule.earliest_deadline(), at(2_900), "the end of the second");
    assert!(schedule.take_deadlines(at(3_899)).overdue.is_empty());
    assert!(schedule.take_deadlines(at(9_000)).overdue.is_empty());
}
