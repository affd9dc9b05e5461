//! The properties that are checked, and for each rule a property that is violated without it.
//!
//! The bounds are chosen so that all of it takes about a minute without optimisation.

use super::{
    BOUNDED, EXCLUSIVE, LIVE, Model, QUORUM_KEYS, RISING, Rule,
    check::{Breakable, assert_holds, assert_violated},
    node::WALL_PER_TICK,
    world::{Faults, Kind, NODES},
};

pub(super) const NO_FAULTS: Faults = Faults { restarts: 0, breaks: 0, jumps: 0, others: 0 };

/// Clients that acquire a lock once and hold it for any time.
pub(super) const fn base_model<const C: usize>() -> Model<C> {
    Model {
        kinds: [Kind::Alone; C],
        downgrades: false,
        horizon: 4,
        ttl: 3,
        claim_window: 2,
        request_ttl: 1,
        turns: 1,
        rounds: 1,
        renewals: 0,
        renewals_expire: false,
        faults: NO_FAULTS,
        in_flight_max: 1,
        late_replies: false,
        queue: false,
        skew: [0; NODES],
        proposal_lead: Some(0),
        liveness_from: None,
        broken: &[],
    }
}

impl<const C: usize> Breakable for Model<C> {
    type Rule = Rule;

    fn with_broken(&self, broken: &'static [Rule]) -> Model<C> {
        Model { broken, ..self.clone() }
    }
}

#[test]
fn leases_stay_valid_if_messages_are_lost() {
    let two = Model::<2> { renewals: 1, faults: Faults { breaks: 1, ..NO_FAULTS }, ..base_model() };
    assert_holds(two.clone(), 90_000);
    assert_violated(&two, &[Rule::UnknownIsNotYes], QUORUM_KEYS);
    let strict = Model { renewals_expire: true, ..two };
    assert_violated(&strict, &[Rule::ExpiredAcquiresRefused], BOUNDED);
}

#[test]
fn late_renewal_blocks_others_for_one_more_ttl_at_most() {
    let one = Model::<1> { renewals: 1, faults: Faults { breaks: 3, ..NO_FAULTS }, ..base_model() };
    assert_holds(one.clone(), 1_000);
    assert_holds(Model { renewals_expire: true, ..one }, 1_000);
}

#[test]
fn late_replies_break_no_property() {
    let two =
        Model::<2> { horizon: 2, ttl: 2, in_flight_max: 3, late_replies: true, ..base_model() };
    assert_holds(two.clone(), 20_000);
    assert_violated(&two, &[Rule::DeadlineFromSent], EXCLUSIVE);
}

#[test]
fn clocks_that_run_ahead_break_no_property() {
    let two = Model::<2> { renewals: 1, faults: Faults { jumps: 1, ..NO_FAULTS }, ..base_model() };
    assert_holds(two.clone(), 100_000);
    assert_violated(&two, &[Rule::Margin], EXCLUSIVE);
}

#[test]
fn node_without_its_data_breaks_no_property() {
    let two =
        Model::<2> { renewals: 1, faults: Faults { restarts: 1, ..NO_FAULTS }, ..base_model() };
    assert_holds(two.clone(), 90_000);
    assert_violated(&two, &[Rule::Quarantine], EXCLUSIVE);
}

#[test]
fn successive_holders_break_no_property() {
    let two = Model::<2> { turns: 2, ..base_model() };
    assert_holds(two.clone(), 100_000);
    assert_violated(&two, &[Rule::OwnerCheck], EXCLUSIVE);
    // The largest of several counters, or of several clocks, does not rise from holder to holder.
    assert_violated(&two, &[Rule::SecondPhase], RISING);
    assert_violated(&two, &[Rule::ReleaseRaisesFence], RISING);
    assert_violated(
        &Model { proposal_lead: None, ..two },
        &[Rule::SecondPhase, Rule::ClockInTokens],
        RISING,
    );
}

/// Locks with other names make the nodes' fences differ at any moment.
#[test]
fn releases_of_other_names_break_no_property() {
    let faults = Faults { others: 2, ..NO_FAULTS };
    let two = Model::<2> { horizon: 2, faults, proposal_lead: Some(2), ..base_model() };
    assert_holds(two.clone(), 50_000);
    assert_violated(&two, &[Rule::SecondPhase], RISING);
}

#[test]
fn three_clients_break_no_property() {
    assert_holds(Model::<3> { horizon: 5, ..base_model() }, 20_000);
}

/// A node that lost its counter starts at its clock, which must be above all tokens that others
/// issued before. Errors of the wall clocks must be less than the quarantine. Proposals that are
/// ahead of the clocks count towards that.
#[test]
fn tokens_rise_over_restarts_if_clock_errors_are_small() {
    let faults = Faults { restarts: 1, ..NO_FAULTS };
    let two = Model::<2> { horizon: 3, faults, ..base_model() };
    let quarantine = WALL_PER_TICK * two.ttl;
    assert_holds(Model { skew: [0, 0, quarantine - 1], ..two.clone() }, 100_000);
    assert_violated(&Model { skew: [0, 0, quarantine], ..two.clone() }, &[], RISING);
    assert_violated(&Model { proposal_lead: Some(quarantine), ..two.clone() }, &[], RISING);
    // Counters alone are not enough. Proposals that are clock times are, if they were sent after
    // the quarantine.
    assert_violated(&Model { proposal_lead: None, ..two.clone() }, &[Rule::ClockInTokens], RISING);
    let proposals = Model { skew: [0, 0, quarantine - WALL_PER_TICK], ..two };
    assert_holds(Model { broken: &[Rule::ClockInTokens], ..proposals.clone() }, 90_000);
    assert_violated(&proposals, &[Rule::ClockInTokens, Rule::SentAfterQuarantine], RISING);
}

#[test]
fn votes_that_were_undone_do_not_count() {
    // One client is enough to check its lease, and leaves room for more faults.
    let one = Model::<1> {
        horizon: 3,
        rounds: 2,
        renewals: 1,
        faults: Faults { breaks: 3, ..NO_FAULTS },
        ..base_model()
    };
    assert_holds(one.clone(), 100_000);
    assert_violated(&one, &[Rule::UndoneIsVoid], QUORUM_KEYS);
    assert_violated(&one, &[Rule::UndosAwaited], QUORUM_KEYS);
    assert_violated(&one, &[Rule::UndosExcludeRenewals], QUORUM_KEYS);
    assert_violated(&one, &[Rule::ExpiredUndosRefused], QUORUM_KEYS);
    assert_violated(&one, &[Rule::UnknownIsNotYes], QUORUM_KEYS);
}

#[test]
fn rejected_client_can_retry() {
    let two = Model::<2> {
        horizon: 2,
        rounds: 2,
        faults: Faults { breaks: 1, ..NO_FAULTS },
        ..base_model()
    };
    assert_holds(two.clone(), 80_000);
    assert_violated(&two, &[Rule::UndoneIsVoid], QUORUM_KEYS);
}

#[test]
fn every_client_gets_the_lock_in_the_end() {
    let two = Model::<2> { horizon: 3, queue: true, liveness_from: Some(3), ..base_model() };
    assert_holds(Model { rounds: 2, ..two.clone() }, 15_000);
    assert_holds(Model { faults: Faults { restarts: 1, ..NO_FAULTS }, ..two.clone() }, 40_000);
    assert_holds(
        Model {
            horizon: 2,
            liveness_from: Some(2),
            faults: Faults { breaks: 1, ..NO_FAULTS },
            ..two.clone()
        },
        30_000,
    );
    assert_holds(
        Model::<3> {
            horizon: 1,
            queue: true,
            liveness_from: Some(1),
            in_flight_max: 0,
            ..base_model()
        },
        15_000,
    );
    // Without a queue only chance keeps two clients from rejecting each other for ever.
    assert_violated(&Model { queue: false, ..two }, &[], LIVE);
}
