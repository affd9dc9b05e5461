//! When a lease is in danger: half of its validity is over, and the renewal that was tried has not been confirmed. Pure.

use std::sync::Arc;

use super::{Generation, Schedule, first, up_to};
use crate::{clock::Moment, lease::Lease};

pub(super) fn half_way(from: Moment, to: Moment) -> Moment {
    from.saturating_add(to.after(from) / 2)
}

impl Schedule {
    /// When the next lease comes into danger.
    pub(crate) fn earliest_danger(&self) -> Moment {
        first(&self.dangers)
    }

    /// What has come into danger by `now`; each is told once until it is renewed.
    pub(crate) fn take_dangers(&mut self, now: Moment) -> Vec<Arc<Lease>> {
        let generations = up_to(&self.dangers, now);
        generations.into_iter().filter_map(|generation| self.move_danger(generation, Moment::NEVER)).collect()
    }

    /// A renewal is tried; returns its lease.
    pub(super) fn watch_danger(&mut self, generation: Generation) -> Option<Arc<Lease>> {
        let entry = self.entries.get(&generation)?;
        if entry.danger_at != Moment::NEVER {
            self.dangers.insert((entry.danger_at, generation));
        }
        Some(entry.lease.clone())
    }

    pub(super) fn move_danger(&mut self, generation: Generation, danger_at: Moment) -> Option<Arc<Lease>> {
        let entry = self.entries.get_mut(&generation)?;
        self.dangers.remove(&(entry.danger_at, generation));
        entry.danger_at = danger_at;
        Some(entry.lease.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            Upkeep,
            tests::{at, generations, lease, renewed},
        },
        *,
    };

    #[test]
    fn a_lease_is_in_danger_once_when_half_of_it_has_passed_unconfirmed() {
        let mut schedule = Schedule::default();
        let held = lease(3_000, 2_900);
        let generation = schedule.keep(held.clone(), renewed(), at(0));
        assert_eq!(schedule.earliest_danger(), Moment::NEVER, "no renewal has been tried yet");
        schedule.take_due(at(1_000));
        assert_eq!(schedule.earliest_danger(), at(1_450));
        assert!(schedule.take_dangers(at(1_449)).is_empty());
        assert_eq!(schedule.take_dangers(at(1_450)).len(), 1);
        schedule.failed(generation, at(1_500));
        schedule.take_due(at(1_900));
        assert!(schedule.take_dangers(at(2_899)).is_empty(), "told twice");
        // Confirmed: from here on anew.
        assert!(held.revise(at(4_800), at(2_000)));
        schedule.renewed(generation, at(1_900));
        assert_eq!(generations(schedule.take_due(at(2_900))), [generation]);
        assert_eq!((schedule.earliest_danger(), schedule.take_dangers(at(3_350)).len()), (at(3_350), 1));
    }

    #[test]
    fn who_is_renewed_in_time_or_not_at_all_is_in_no_danger() {
        let mut schedule = Schedule::default();
        let held = lease(3_000, 2_900);
        let generation = schedule.keep(held.clone(), renewed(), at(0));
        schedule.keep(lease(3_000, 2_900), Upkeep { renew: false, ..renewed() }, at(0));
        let let_go = schedule.keep(lease(3_000, 2_900), renewed(), at(0));
        schedule.take_due(at(1_000));
        schedule.forget(let_go);
        assert!(held.revise(at(3_900), at(1_010)));
        schedule.renewed(generation, at(1_000));
        assert_eq!(schedule.earliest_danger(), Moment::NEVER);
        assert!(schedule.take_dangers(at(9_000)).is_empty());
    }
}
