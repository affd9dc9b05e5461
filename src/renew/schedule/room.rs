//! Limits how long an exchange may delay renewals that fall due while it is in flight. Pure.

use std::time::Duration;

use super::{Entry, Generation, Schedule, due_by, earliest_in, overdue::midpoint};
use crate::sys::clock::Moment;

impl Schedule {
    /// Time at which an exchange that began at `since` must make room for renewals, as far as that
    /// is known at `now`; call again at that time.
    ///
    /// Due renewals wait until `delay` has passed since the start. No renewal waits longer than the
    /// time that its lease then has left.
    pub(crate) fn makes_room_at(&self, since: Moment, delay: Duration, now: Moment) -> Moment {
        let due = earliest_in(&self.renewals);
        due.max(since.saturating_add(delay)).min(self.presses_at(since, now))
    }

    /// Time at which the lease of a due renewal has no more time left than the exchange has taken.
    fn presses_at(&self, since: Moment, now: Moment) -> Moment {
        // No lease ends before the first end. Until then, the entries need not be searched.
        let soonest = earliest_in(&self.renewals).max(midpoint(since, self.earliest_end()));
        if now < soonest {
            return soonest;
        }
        let waiting = due_by(&self.renewals, now);
        let waiting = waiting.iter().filter_map(|generation| self.entries.get(generation));
        let pressing = waiting.filter(|entry| entry.gains_by_renewal(now));
        let pressing = pressing.map(|entry| midpoint(since, entry.lease.deadline())).min();
        pressing.unwrap_or(Moment::NEVER).min(self.first_due_after(now))
    }

    fn first_due_after(&self, now: Moment) -> Moment {
        let later = (now.saturating_add(Duration::from_nanos(1)), Generation(0));
        self.renewals.range(later..).next().map_or(Moment::NEVER, |(at, _)| *at)
    }
}

impl Entry {
    /// Whether a renewal would extend the hold: not after the deadline, and not if `max_hold` ends
    /// it anyway.
    fn gains_by_renewal(&self, now: Moment) -> bool {
        let deadline = self.lease.deadline();
        now < deadline && deadline < self.hold_until
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        core::lease::LeaseEnd,
        renew::schedule::{
            RenewalPlan,
            tests::{at, lease, plan},
        },
    };

    const AT_ONCE: Duration = Duration::ZERO;

    #[test]
    fn nothing_due_needs_no_room() {
        let mut schedule = Schedule::default();
        assert_eq!(schedule.makes_room_at(at(0), AT_ONCE, at(0)), Moment::NEVER);
        schedule.insert(lease(3_000, 2_900), RenewalPlan { renew: false, ..plan() }, at(0));
        assert!(schedule.makes_room_at(at(0), AT_ONCE, at(2_000)) > at(2_000));
        assert_eq!(schedule.makes_room_at(at(0), Duration::MAX, at(2_000)), Moment::NEVER);
    }

    #[test]
    fn deferrable_exchange_yields_after_its_delay() {
        let mut schedule = Schedule::default();
        schedule.insert(lease(3_000, 2_900), plan(), at(0));
        assert_eq!(schedule.makes_room_at(at(500), AT_ONCE, at(500)), at(1_000));
        let moment = Duration::from_millis(50);
        assert_eq!(schedule.makes_room_at(at(980), moment, at(1_000)), at(1_030));
        // A lease with less time left has none to spare.
        schedule.insert(lease(60, 1_020), plan(), at(960));
        assert_eq!(schedule.makes_room_at(at(980), moment, at(990)), at(1_000));
    }

    #[test]
    fn renewal_waits_at_most_as_long_as_its_lease_has_left() {
        let mut schedule = Schedule::default();
        // The first is due when the exchange begins; the second is added later.
        schedule.insert(lease(30_000, 29_000), plan(), at(0));
        schedule.insert(lease(3_000, 13_900), plan(), at(11_000));
        let ask = |now| schedule.makes_room_at(at(10_000), Duration::MAX, at(now));
        assert!(ask(11_500) > at(11_500));
        assert_eq!([ask(11_950), ask(11_960)], [at(12_000); 2], "it is not due yet");
        assert_eq!(ask(12_000), at(11_950), "it has waited long enough");
        let ask = |now| schedule.makes_room_at(at(11_000), Duration::MAX, at(now));
        assert_eq!((ask(12_200), ask(12_450)), (at(12_450), at(12_450)));
    }

    #[test]
    fn hopeless_renewal_needs_no_room() {
        let mut schedule = Schedule::default();
        let released = lease(3_000, 2_900);
        schedule.insert(released.clone(), plan(), at(0));
        for hold_until in [2_000, 2_900] {
            schedule.insert(
                lease(3_000, 2_900),
                RenewalPlan { hold_until: at(hold_until), ..plan() },
                at(0),
            );
        }
        released.end(LeaseEnd::Released);
        assert_eq!(schedule.makes_room_at(at(0), Duration::MAX, at(1_900)), Moment::NEVER);
        schedule.insert(lease(3_000, 2_900), plan(), at(0));
        assert_eq!(schedule.makes_room_at(at(0), Duration::MAX, at(1_900)), at(1_450));
        assert_eq!(
            schedule.makes_room_at(at(0), Duration::MAX, at(2_900)),
            Moment::NEVER,
            "it has expired"
        );
    }
}
