//! Tests of the schedule: leases, moments and news in, decisions out.

use super::*;
use crate::{
    grant::{Claim, Grant, Late},
    id::generate_lock_id,
    key::LockKey,
    observer::Hold,
    token::FencingToken,
};
use proptest::prelude::*;

pub(super) fn at(millis: u64) -> Moment {
    Moment::from_nanos(millis * 1_000_000)
}

pub(super) fn lease(ttl_ms: u64, deadline_ms: u64) -> Arc<Lease> {
    let claim =
        Claim { key: LockKey::new("", "x").unwrap(), id: generate_lock_id(), ttl: Duration::from_millis(ttl_ms) };
    let (votes, nodes) = (kept_until(deadline_ms), NodeSet::only(0));
    let late = Late { broken_until: at(0), open: NodeSet::NONE, open_until: at(0) };
    let grant = Grant { token: FencingToken(1), votes, provisional: false, late, nodes, place: String::new() };
    Arc::new(Lease::open(claim, &grant, Hold::since(at(0))))
}

fn kept_until(deadline_ms: u64) -> Votes {
    let mut votes = Votes::new(1);
    votes.confirm(0, at(deadline_ms));
    votes
}

pub(super) fn renewed() -> Upkeep {
    Upkeep { votes: Votes::new(1), renew: true, provisional: false, hold_until: Moment::NEVER }
}

pub(super) fn generations(due: Vec<(Generation, Arc<Lease>)>) -> Vec<Generation> {
    due.into_iter().map(|(generation, _)| generation).collect()
}

#[test]
fn a_lease_is_renewed_every_third_of_its_ttl() {
    let mut schedule = Schedule::default();
    let generation = schedule.keep(lease(3_000, 2_900), renewed(), at(0));
    assert_eq!(schedule.earliest(), at(1_000));
    assert!(schedule.take_due(at(999)).is_empty());
    assert_eq!(generations(schedule.take_due(at(1_000))), [generation]);
    // Under way: nothing but the end is watched.
    assert_eq!(schedule.earliest(), at(2_900));
    schedule.renewed(generation, at(1_001));
    assert_eq!(schedule.earliest(), at(2_001));
}

#[test]
fn what_falls_due_soon_goes_along() {
    let mut schedule = Schedule::default();
    let first = schedule.keep(lease(3_000, 2_900), renewed(), at(0));
    let second = schedule.keep(lease(3_000, 2_900), renewed(), at(9));
    let third = schedule.keep(lease(3_000, 2_900), renewed(), at(50));
    assert_eq!(generations(schedule.take_due(at(1_000))), [first, second]);
    assert_eq!(generations(schedule.take_due(at(1_050))), [third]);
}

#[test]
fn a_handed_over_lock_is_confirmed_soon() {
    let mut schedule = Schedule::default();
    schedule.keep(lease(10_000, 900), Upkeep { provisional: true, ..renewed() }, at(0));
    assert_eq!(schedule.earliest(), at(100));
    schedule.keep(lease(10_000, 8), Upkeep { provisional: true, ..renewed() }, at(0));
    assert_eq!(schedule.earliest(), at(2));
}

#[test]
fn retries_come_closer_together_and_end_at_the_deadline() {
    let mut schedule = Schedule::default();
    let lease = lease(3_000, 2_900);
    let generation = schedule.keep(lease.clone(), renewed(), at(0));
    let (mut now, mut tries, mut last_pause) = (at(1_000), 0, Duration::MAX);
    while !schedule.take_over(now).iter().any(|(over, why)| Arc::ptr_eq(over, &lease) && *why == Over::Deadline) {
        if !schedule.take_due(now).is_empty() {
            tries += 1;
            schedule.failed(generation, now);
        }
        let pause = schedule.earliest().after(now);
        assert!(pause > Duration::ZERO && pause <= last_pause, "retries must not stand still, nor spread out");
        (now, last_pause) = (schedule.earliest(), pause);
    }
    assert_eq!(now, at(2_900));
    assert!((5..200).contains(&tries), "{tries} tries");
    assert_eq!(schedule.earliest(), Moment::NEVER);
}

#[test]
fn max_hold_ends_a_lease_that_is_well() {
    let mut schedule = Schedule::default();
    schedule.keep(lease(3_000, 2_900), Upkeep { hold_until: at(500), ..renewed() }, at(0));
    assert_eq!(schedule.earliest(), at(500));
    assert_eq!(schedule.take_over(at(500))[0].1, Over::MaxHold);
}

#[test]
fn without_renewal_a_handed_over_lock_is_confirmed_once() {
    let mut schedule = Schedule::default();
    let lease = lease(10_000, 900);
    let generation = schedule.keep(lease.clone(), Upkeep { renew: false, provisional: true, ..renewed() }, at(0));
    assert_eq!(generations(schedule.take_due(at(100))), [generation]);
    assert!(lease.revise(at(9_900), at(101)));
    schedule.renewed(generation, at(100));
    assert_eq!(schedule.earliest(), at(9_900));
}

#[test]
fn without_renewal_only_the_end_is_watched() {
    let mut schedule = Schedule::default();
    schedule.keep(lease(3_000, 2_900), Upkeep { renew: false, ..renewed() }, at(0));
    assert!(schedule.take_due(at(2_800)).is_empty());
    assert_eq!(schedule.earliest(), at(2_900));
}

#[test]
fn news_of_a_forgotten_lease_changes_nothing() {
    let mut schedule = Schedule::default();
    let generation = schedule.keep(lease(3_000, 2_900), renewed(), at(0));
    assert_eq!(schedule.take_due(at(1_000)).len(), 1);
    assert!(schedule.forget(generation).is_some());
    schedule.renewed(generation, at(1_000));
    schedule.failed(generation, at(1_000));
    schedule.put_back(generation, at(1_000));
    assert!(!schedule.is_kept(generation));
    assert_eq!(schedule.earliest(), Moment::NEVER);
}

#[test]
fn what_was_not_tried_is_due_still() {
    let mut schedule = Schedule::default();
    let generation = schedule.keep(lease(3_000, 2_900), renewed(), at(0));
    schedule.take_due(at(1_000));
    schedule.put_back(generation, at(1_005));
    assert_eq!(schedule.earliest(), at(1_005));
    assert_eq!(generations(schedule.take_due(at(1_005))), [generation]);
}

#[test]
fn a_lease_is_kept_for_as_long_as_most_nodes_keep_it() {
    let mut schedule = Schedule::default();
    let mut votes = Votes::new(3);
    votes.bar(2);
    let generation = schedule.keep(lease(3_000, 2_900), Upkeep { votes, ..renewed() }, at(0));
    assert_eq!(schedule.barred(generation), NodeSet::only(2));
    assert_eq!(schedule.heard(generation, &[(0, Some(at(3_900))), (1, Some(at(3_800)))]), Some(Some(at(3_800))));
    assert_eq!(schedule.heard(generation, &[(1, Some(at(4_800)))]), Some(Some(at(3_900))), "only one has renewed it");
    assert_eq!(schedule.heard(generation, &[(0, None)]), Some(None), "one of three is no quorum");
    schedule.forget(generation);
    assert_eq!(schedule.heard(generation, &[(0, Some(at(5_800)))]), None);
    assert_eq!(schedule.barred(generation), NodeSet::NONE);
}

#[test]
fn who_has_said_nothing_for_a_whole_lease_is_unheard() {
    let mut schedule = Schedule::default();
    let mut keep = |renew, barred: Option<usize>| {
        let mut votes = Votes::new(3);
        barred.into_iter().for_each(|node| votes.bar(node));
        schedule.keep(lease(3_000, 2_900), Upkeep { votes, renew, ..renewed() }, at(0))
    };
    let [first, second] = [keep(true, None), keep(true, None)];
    // Its word would not count; and this one is not to live any longer.
    keep(true, Some(2));
    keep(false, None);
    for generation in [first, second] {
        schedule.heard(generation, &[(0, Some(at(2_900))), (1, Some(at(2_900)))]);
    }
    let unheard = |schedule: &Schedule, node, now, most| {
        let unheard = schedule.unheard(NodeSet::only(node), at(now), most);
        unheard.into_iter().map(|(generation, _)| generation).collect::<Vec<_>>()
    };
    assert_eq!(unheard(&schedule, 2, 1_000, 9), [first, second]);
    assert_eq!(unheard(&schedule, 2, 1_000, 1), [first]);
    schedule.heard(first, &[(2, Some(at(3_900)))]);
    assert_eq!(unheard(&schedule, 2, 3_899, 9), [second]);
    assert_eq!(unheard(&schedule, 2, 3_900, 9), [first, second]);
    schedule.heard(second, &[(0, None)]);
    assert_eq!(unheard(&schedule, 0, 1_000, 1), [second], "it may have been taken anew since");
}

#[test]
fn all_that_is_kept_is_taken_in_the_order_in_which_it_came() {
    let mut schedule = Schedule::default();
    let leases = [2_900, 1_000, 2_000].map(|deadline| lease(3_000, deadline));
    let kept: Vec<_> = leases.iter().map(|lease| schedule.keep(lease.clone(), renewed(), at(0))).collect();
    schedule.take_due(at(1_000));
    let taken = schedule.take_all();
    assert!(taken.len() == 3 && taken.iter().zip(&leases).all(|(taken, lease)| Arc::ptr_eq(taken, lease)));
    assert!(kept.iter().all(|generation| !schedule.is_kept(*generation)));
    assert_eq!((schedule.earliest(), schedule.earliest_danger()), (Moment::NEVER, Moment::NEVER));
}

#[test]
fn an_end_that_moved_is_not_an_end() {
    let mut schedule = Schedule::default();
    let lease = lease(3_000, 2_900);
    schedule.keep(lease.clone(), Upkeep { renew: false, ..renewed() }, at(0));
    assert!(lease.revise(at(5_000), at(100)));
    assert!(schedule.take_over(at(2_900)).is_empty());
    assert_eq!(schedule.earliest(), at(5_000));
}

proptest! {
    /// However renewals go: no lease that is kept is ever without a next moment at or before its end, every
    /// renewal that can still help is due before its deadline, and nothing forgotten comes back.
    #[test]
    fn nobody_is_overlooked(steps in proptest::collection::vec((0u8..6, 0usize..8, 1u64..400), 1..120)) {
        let mut schedule = Schedule::default();
        let mut kept: Vec<(Generation, Arc<Lease>)> = Vec::new();
        let mut under_way: Vec<Generation> = Vec::new();
        let mut now = 0;
        for (what, which, span) in steps {
            now += span;
            let over: Vec<_> = schedule.take_over(at(now));
            for (lease, _) in &over {
                prop_assert!(lease.deadline() <= at(now));
                kept.retain(|(_, other)| !Arc::ptr_eq(lease, other));
            }
            match what {
                0 | 1 => {
                    let lease = lease(span * 3, now + span * 3);
                    kept.push((schedule.keep(lease.clone(), renewed(), at(now)), lease));
                }
                2 => under_way.extend(generations(schedule.take_due(at(now)))),
                3 if !under_way.is_empty() => {
                    let generation = under_way.remove(which % under_way.len());
                    if let Some((_, lease)) = kept.iter().find(|(other, _)| *other == generation) {
                        lease.revise(at(now + span), at(now));
                    }
                    schedule.renewed(generation, at(now));
                }
                4 if !under_way.is_empty() => {
                    schedule.failed(under_way.remove(which % under_way.len()), at(now));
                }
                5 if !kept.is_empty() => {
                    let (generation, _) = kept.remove(which % kept.len());
                    schedule.forget(generation);
                }
                _ => {}
            }
            for (generation, lease) in &kept {
                prop_assert!(schedule.is_kept(*generation));
                prop_assert!(schedule.earliest() <= lease.deadline());
            }
            prop_assert_eq!(schedule.entries.len(), kept.len());
            prop_assert_eq!(schedule.ends.len(), kept.len());
        }
    }
}
