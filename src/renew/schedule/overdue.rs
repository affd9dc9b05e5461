//! Finds overdue renewals: those that were tried and not confirmed before half of the validity has
//! passed. Pure.

use std::collections::BTreeSet;

use super::{Generation, due_by, earliest_in};
use crate::sys::clock::Moment;

pub(super) fn midpoint(from: Moment, to: Moment) -> Moment {
    from.saturating_add(to.duration_since(from) / 2)
}

/// Leases whose renewal was sent and is not confirmed, by the time at which it becomes overdue.
/// Other leases are not listed, because most locks are released before their first renewal.
#[derive(Debug, Default)]
pub(super) struct OverdueRenewals(BTreeSet<(Moment, Generation)>);

impl OverdueRenewals {
    /// Time at which the next renewal becomes overdue.
    pub(super) fn earliest(&self) -> Moment {
        earliest_in(&self.0)
    }

    /// The leases whose renewal is overdue at `now`.
    pub(super) fn due(&self, now: Moment) -> Vec<Generation> {
        due_by(&self.0, now)
    }

    /// Begins to watch a lease whose renewal is tried, and becomes overdue at `at`.
    pub(super) fn watch(&mut self, generation: Generation, at: Moment) {
        if at != Moment::NEVER {
            self.0.insert((at, generation));
        }
    }

    /// Stops watching a lease until its next renewal is tried.
    pub(super) fn stop(&mut self, generation: Generation, at: Moment) {
        self.0.remove(&(at, generation));
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::renew::schedule::{
        RenewalPlan, Schedule,
        tests::{at, generations, lease, plan},
    };

    #[test]
    fn overdue_once_after_half_the_validity() {
        let mut schedule = Schedule::default();
        let held = lease(3_000, 2_900);
        let generation = schedule.insert(held.clone(), plan(), at(0));
        assert_eq!(schedule.overdue.earliest(), Moment::NEVER, "no renewal has been tried yet");
        schedule.take_due(at(1_000));
        assert_eq!(schedule.overdue.earliest(), at(1_450));
        assert!(schedule.take_overdue(at(1_449)).is_empty());
        assert_eq!(schedule.take_overdue(at(1_450)).len(), 1);
        schedule.on_failed(generation, at(1_500));
        schedule.take_due(at(1_900));
        assert!(schedule.take_overdue(at(2_899)).is_empty(), "reported twice");
        // A confirmation begins a new period.
        assert!(held.update_deadline(at(4_800), at(2_000)));
        schedule.on_renewed(generation, at(1_900));
        assert_eq!(generations(schedule.take_due(at(2_900))), [generation]);
        assert_eq!(
            (schedule.overdue.earliest(), schedule.take_overdue(at(3_350)).len()),
            (at(3_350), 1)
        );
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
        assert_eq!(schedule.overdue.earliest(), Moment::NEVER);
        assert!(schedule.take_overdue(at(9_000)).is_empty());
    }
}
