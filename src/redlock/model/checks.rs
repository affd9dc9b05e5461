//! What is checked. Where a rule is broken, the promise that rests on it falls.
//!
//! Bounds are chosen so that all of it takes about a minute without optimisation.

use stateright::{Checker as _, HasDiscoveries, Model as _};

use super::{
    ALONE, BACKED, BOUNDED, CALM, Model, RISING, Rule,
    node::WALL_PER_TICK,
    world::{Faults, NODES},
};

const NO_FAULTS: Faults = Faults { restarts: 0, breaks: 0, jumps: 0 };

/// Clients that take a lock once and keep it for as long as they like.
const fn clients<const C: usize>() -> Model<C> {
    Model {
        horizon: 4,
        ttl: 3,
        claim: 2,
        patience: 1,
        turns: 1,
        rounds: 1,
        renewals: 0,
        renewals_expire: false,
        faults: NO_FAULTS,
        late_max: 1,
        slow: false,
        line: false,
        skew: [0; NODES],
        lead: Some(0),
        calm_from: None,
        broken: &[],
    }
}

/// All promises hold, in so many states at least.
fn stands<const C: usize>(model: Model<C>, states_min: usize) {
    let checker = model.checker().spawn_bfs().join();
    checker.assert_properties();
    let states = checker.unique_state_count();
    assert!(states > states_min, "only {states} states");
}

/// With these rules broken, a promise falls.
fn falls<const C: usize>(model: &Model<C>, broken: &'static [Rule], promise: &'static str) {
    let model = Model { broken, ..model.clone() };
    let checker =
        model.checker().finish_when(HasDiscoveries::AllOf([promise].into())).spawn_bfs().join();
    assert!(checker.discovery(promise).is_some(), "{broken:?} makes no difference to: {promise}");
}

#[test]
fn leases_hold_whatever_gets_lost() {
    let two = Model::<2> { renewals: 1, faults: Faults { breaks: 1, ..NO_FAULTS }, ..clients() };
    stands(two.clone(), 90_000);
    falls(&two, &[Rule::UnknownIsNoYes], BACKED);
    let strict = Model { renewals_expire: true, ..two };
    falls(&strict, &[Rule::LateAcquiresRefused], BOUNDED);
}

#[test]
fn a_late_renewal_keeps_others_waiting_at_most_once_more() {
    let one = Model::<1> { renewals: 1, faults: Faults { breaks: 3, ..NO_FAULTS }, ..clients() };
    stands(one.clone(), 1_000);
    stands(Model { renewals_expire: true, ..one }, 1_000);
}

#[test]
fn answers_may_come_late() {
    let two = Model::<2> { horizon: 2, ttl: 2, late_max: 3, slow: true, ..clients() };
    stands(two.clone(), 20_000);
    falls(&two, &[Rule::DeadlineFromSent], ALONE);
}

#[test]
fn clocks_may_run_ahead() {
    let two = Model::<2> { renewals: 1, faults: Faults { jumps: 1, ..NO_FAULTS }, ..clients() };
    stands(two.clone(), 100_000);
    falls(&two, &[Rule::Margin], ALONE);
}

#[test]
fn a_node_that_forgot_everything_harms_nobody() {
    let two = Model::<2> { renewals: 1, faults: Faults { restarts: 1, ..NO_FAULTS }, ..clients() };
    stands(two.clone(), 90_000);
    falls(&two, &[Rule::Quarantine], ALONE);
}

#[test]
fn turn_follows_turn() {
    let two = Model::<2> { turns: 2, ..clients() };
    stands(two.clone(), 100_000);
    falls(&two, &[Rule::OwnerCheck], ALONE);
    // The largest of several counters, or of several clocks, does not rise from holder to holder.
    falls(&two, &[Rule::SecondPhase], RISING);
    falls(&Model { lead: None, ..two }, &[Rule::SecondPhase, Rule::ClockInTokens], RISING);
}

#[test]
fn three_clients_are_no_different() {
    stands(Model::<3> { horizon: 5, ..clients() }, 20_000);
}

/// A node that forgot its counter starts at its clock, which must be above what others had given
/// before: wall clocks may be wrong by less than the quarantine, and proposals, which run ahead of
/// them, count towards that.
#[test]
fn tokens_rise_over_restarts_if_clocks_are_not_too_wrong() {
    let faults = Faults { restarts: 1, ..NO_FAULTS };
    let two = Model::<2> { horizon: 3, faults, ..clients() };
    let quarantine = WALL_PER_TICK * two.ttl;
    stands(Model { skew: [0, 0, quarantine - 1], ..two.clone() }, 100_000);
    falls(&Model { skew: [0, 0, quarantine], ..two.clone() }, &[], RISING);
    falls(&Model { lead: Some(quarantine), ..two.clone() }, &[], RISING);
    // Counters alone are not enough. Proposals that are clocks are, even so, if they were sent
    // after the quarantine.
    falls(&Model { lead: None, ..two.clone() }, &[Rule::ClockInTokens], RISING);
    let proposals = Model { skew: [0, 0, quarantine - WALL_PER_TICK], ..two };
    stands(Model { broken: &[Rule::ClockInTokens], ..proposals.clone() }, 90_000);
    falls(&proposals, &[Rule::ClockInTokens, Rule::AskedAfterQuarantine], RISING);
}

#[test]
fn what_is_taken_back_is_not_believed_in() {
    // One client is enough to see whether its belief is backed, and leaves room for more faults.
    let one = Model::<1> {
        horizon: 3,
        rounds: 2,
        renewals: 1,
        faults: Faults { breaks: 3, ..NO_FAULTS },
        ..clients()
    };
    stands(one.clone(), 100_000);
    falls(&one, &[Rule::UndoneIsVoid], BACKED);
    falls(&one, &[Rule::UndosWaitedFor], BACKED);
    falls(&one, &[Rule::UndosBarRenewals], BACKED);
    falls(&one, &[Rule::LateUndosRefused], BACKED);
    falls(&one, &[Rule::UnknownIsNoYes], BACKED);
}

#[test]
fn who_lost_asks_again() {
    let two = Model::<2> {
        horizon: 2,
        rounds: 2,
        faults: Faults { breaks: 1, ..NO_FAULTS },
        ..clients()
    };
    stands(two.clone(), 80_000);
    falls(&two, &[Rule::UndoneIsVoid], BACKED);
}

#[test]
fn everybody_gets_the_lock_in_the_end() {
    let two = Model::<2> { horizon: 3, line: true, calm_from: Some(3), ..clients() };
    stands(Model { rounds: 2, ..two.clone() }, 15_000);
    stands(Model { faults: Faults { restarts: 1, ..NO_FAULTS }, ..two.clone() }, 40_000);
    stands(
        Model {
            horizon: 2,
            calm_from: Some(2),
            faults: Faults { breaks: 1, ..NO_FAULTS },
            ..two.clone()
        },
        30_000,
    );
    stands(
        Model::<3> { horizon: 1, line: true, calm_from: Some(1), late_max: 0, ..clients() },
        15_000,
    );
    // Without a line only chance keeps two clients from taking the votes from each other for ever.
    falls(&Model { line: false, ..two }, &[], CALM);
}
