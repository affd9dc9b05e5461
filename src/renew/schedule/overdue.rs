//! Finds overdue renewals: those that were tried and not confirmed before half of the validity has
//! passed. Pure.

use std::sync::Arc;

use super::{Generation, Schedule, due_by, earliest_in};
use crate::{core::lease::Lease, sys::clock::Moment};

pub(super) fn midpoint(from: Moment, to: Moment) -> Moment {
    from.saturating_add(to.duration_since(from) / 2)
}

impl Schedule {
    /// Time at which the next renewal becomes overdue.
    pub(crate) fn earliest_overdue(&self) -> Moment {
        earliest_in(&self.overdue)
    }

    /// Returns the leases whose renewal is overdue at `now`. Each is returned once until its
    /// renewal is confirmed.
    pub(crate) fn take_overdue(&mut self, now: Moment) -> Vec<Arc<Lease>> {
        let generations = due_by(&self.overdue, now);
        generations
            .into_iter()
            .filter_map(|generation| self.reschedule_overdue(generation, Moment::NEVER))
            .collect()
    }

    /// Begins to watch a lease whose renewal is tried, and returns the lease.
    pub(super) fn watch_overdue(&mut self, generation: Generation) -> Option<Arc<Lease>> {
        let entry = self.entries.get(&generation)?;
        if entry.overdue_at != Moment::NEVER {
            self.overdue.insert((entry.overdue_at, generation));
        }
        Some(entry.lease.clone())
    }

    pub(super) fn reschedule_overdue(
        &mut self,
        generation: Generation,
        overdue_at: Moment,
    ) -> Option<Arc<Lease>> {
        let entry = self.entries.get_mut(&generation)?;
        self.overdue.remove(&(entry.overdue_at, generation));
        entry.overdue_at = overdue_at;
        Some(entry.lease.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::renew::schedule::{
        RenewalPlan,
        tests::{at, generations, lease, plan},
    };

    #[test]
    fn overdue_once_after_half_the_validity() {
        let mut schedule = Schedule::default();
        let held = lease(3_000, 2_900);
        let generation = schedule.insert(held.clone(), plan(), at(0));
        assert_eq!(schedule.earliest_overdue(), Moment::NEVER, "no renewal has been tried yet");
        schedule.take_due(at(1_000));
        assert_eq!(schedule.earliest_overdue(), at(1_450));
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
            (schedule.earliest_overdue(), schedule.take_overdue(at(3_350)).len()),
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
        assert_eq!(schedule.earliest_overdue(), Moment::NEVER);
        assert!(schedule.take_overdue(at(9_000)).is_empty());
    }
}
