//! Decides when each lease is renewed, when a renewal is retried or overdue, and when a lease ends.
//! Pure: `now` comes in, decisions go out.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use crate::{
    core::{lease::Lease, lock_lost::LockLost},
    sys::clock::Moment,
};

/// Number of renewals per ttl. With three, two thirds of the ttl are left for retries when a
/// renewal fails.
const RENEWALS_PER_TTL: u32 = 3;
/// Maximum time by which a renewal is sent early in order to share a request with one that is due.
const COALESCE_WINDOW: Duration = Duration::from_millis(10);
/// Maximum delay until a provisional lease is confirmed. A lock that is released sooner needs no
/// confirmation, and does not wake the renewer.
const CONFIRM_DELAY_MAX: Duration = Duration::from_millis(100);
const RETRY_DELAY_MIN: Duration = Duration::from_millis(5);
const RETRY_DELAY_MAX: Duration = Duration::from_secs(1);

/// Identifies one registration of a lease. Never reused, so that a late reply cannot affect a newer
/// registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Generation(u64);

/// How to renew a lease, and when to end it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RenewalPlan {
    pub(crate) renew: bool,
    pub(crate) provisional: bool,
    pub(crate) hold_until: Moment,
}

#[derive(Debug)]
struct Entry {
    lease: Arc<Lease>,
    renew: bool,
    /// Time of the next renewal. `NEVER` for leases that are not renewed, and while a renewal is in
    /// flight, unless another one is asked for meanwhile.
    renew_at: Moment,
    /// The next renewal confirms the grant, whose lease is no longer than the claim window.
    provisional: bool,
    renewal_was_sent: bool,
    /// A renewal was sent and is not confirmed.
    renewal_is_unconfirmed: bool,
    hold_until: Moment,
    /// Key of this entry in `Schedule::ends`: when the lease ends, or a renewal that was tried
    /// becomes overdue.
    end_at: Moment,
    /// Time at which a renewal becomes overdue: half of the validity has passed. `NEVER` once that
    /// is reported, and for leases that are not renewed.
    overdue_at: Moment,
}

/// What the timer acts on.
pub(super) struct DueDeadlines {
    /// Leases that have ended and been removed.
    pub(super) expired: Vec<(Arc<Lease>, LockLost)>,
    /// Leases whose renewal is overdue.
    pub(super) overdue: Vec<Arc<Lease>>,
}

#[derive(Debug, Default)]
pub(crate) struct Schedule {
    entries: HashMap<Generation, Entry>,
    renewals: BTreeSet<(Moment, Generation)>,
    ends: BTreeSet<(Moment, Generation)>,
    last_generation: u64,
}

impl Schedule {
    /// Adds a lease.
    pub(crate) fn insert(
        &mut self,
        lease: Arc<Lease>,
        plan: RenewalPlan,
        now: Moment,
    ) -> Generation {
        self.last_generation += 1;
        let generation = Generation(self.last_generation);
        let renew_at = if plan.provisional {
            // Confirm even a lease that is not renewed, because it was granted for the claim window
            // only.
            now.saturating_add(CONFIRM_DELAY_MAX.min(lease.deadline().duration_since(now) / 4))
        } else if !plan.renew {
            Moment::NEVER
        } else {
            now.saturating_add(lease.ttl() / RENEWALS_PER_TTL)
        };
        let RenewalPlan { renew, provisional, hold_until } = plan;
        let end_at = lease.deadline().min(hold_until);
        let overdue_at = if renew { midpoint(now, lease.deadline()) } else { Moment::NEVER };
        self.ends.insert((end_at, generation));
        let entry = Entry {
            lease,
            renew,
            renew_at: Moment::NEVER,
            provisional,
            renewal_was_sent: false,
            renewal_is_unconfirmed: false,
            hold_until,
            end_at,
            overdue_at,
        };
        self.entries.insert(generation, entry);
        self.schedule_renewal(generation, renew_at);
        generation
    }

    /// Removes a lease. Later replies for this registration have no effect.
    pub(crate) fn remove(&mut self, generation: Generation) -> Option<Arc<Lease>> {
        let entry = self.entries.remove(&generation)?;
        self.renewals.remove(&(entry.renew_at, generation));
        self.ends.remove(&(entry.end_at, generation));
        Some(entry.lease)
    }

    /// Replaces a lease by that of the next holder in this process. Its renewals stay as they are
    /// scheduled. Returns the former lease; `None` if it has ended, or if a renewal was sent: what
    /// comes of that concerns the former lease only.
    pub(crate) fn replace(
        &mut self,
        generation: Generation,
        next: Arc<Lease>,
        hold_until: Moment,
    ) -> Option<Arc<Lease>> {
        let entry = self.entries.get_mut(&generation)?;
        if entry.renewal_was_sent {
            return None;
        }
        let former = std::mem::replace(&mut entry.lease, next);
        entry.hold_until = hold_until;
        self.reschedule_end(generation);
        Some(former)
    }

    /// Limits how long a lease is held.
    pub(crate) fn limit_hold(&mut self, generation: Generation, hold_until: Moment) {
        if let Some(entry) = self.entries.get_mut(&generation) {
            entry.hold_until = hold_until;
            self.reschedule_end(generation);
        }
    }

    /// Time of the next renewal.
    pub(crate) fn earliest_renewal(&self) -> Moment {
        earliest_in(&self.renewals)
    }

    /// Time at which the next lease ends unless it is renewed, or a renewal becomes overdue.
    pub(crate) fn earliest_deadline(&self) -> Moment {
        earliest_in(&self.ends)
    }

    /// Whether the renewals that are due at `now` can no longer wait for an exchange that began at
    /// `since`: the lease of one of them has no more time left than the exchange has taken.
    pub(crate) fn is_pressing(&self, since: Moment, now: Moment) -> bool {
        // No lease ends before the first of these times. Until then, nothing need be searched.
        if now < midpoint(since, earliest_in(&self.ends)) {
            return false;
        }
        let due = self.renewals.range(..=(now, Generation(u64::MAX)));
        let mut due = due.filter_map(|(_, generation)| self.entries.get(generation));
        due.any(|entry| {
            let deadline = entry.lease.deadline();
            // A renewal extends no lease after its deadline, or that `max_hold` ends anyway.
            let is_useful = now < deadline && deadline < entry.hold_until;
            is_useful && now >= midpoint(since, deadline)
        })
    }

    /// Returns the leases to renew at `now`, the one with the least time left first. No further
    /// renewal of these leases is scheduled until [`on_renewed`](Self::on_renewed) or
    /// [`on_failed`](Self::on_failed) is called. Their ends stay scheduled.
    pub(crate) fn take_due(&mut self, now: Moment) -> Vec<(Generation, Arc<Lease>)> {
        if earliest_in(&self.renewals) > now {
            return Vec::new();
        }
        let due = due_by(&self.renewals, now.saturating_add(COALESCE_WINDOW));
        let mut due: Vec<_> = due
            .into_iter()
            .filter_map(|generation| {
                self.schedule_renewal(generation, Moment::NEVER);
                let entry = self.entries.get_mut(&generation)?;
                (entry.renewal_was_sent, entry.renewal_is_unconfirmed) = (true, true);
                let lease = entry.lease.clone();
                self.reschedule_end(generation);
                Some((generation, lease))
            })
            .collect();
        due.sort_by_cached_key(|(_, lease)| lease.deadline());
        due
    }

    /// Removes and returns the leases that have ended at `now`. Also returns those whose renewal is
    /// overdue, each once until its renewal is confirmed.
    pub(super) fn take_deadlines(&mut self, now: Moment) -> DueDeadlines {
        let (mut expired, mut overdue) = (Vec::new(), Vec::new());
        for generation in due_by(&self.ends, now) {
            let Some(entry) = self.entries.get_mut(&generation) else { continue };
            let cause = if now >= entry.hold_until {
                LockLost::MaxHold
            } else if now >= entry.lease.deadline() {
                LockLost::Expired
            } else {
                if entry.renewal_is_unconfirmed && now >= entry.overdue_at {
                    overdue.push(entry.lease.clone());
                    entry.overdue_at = Moment::NEVER;
                }
                self.reschedule_end(generation);
                continue;
            };
            if let Some(lease) = self.remove(generation) {
                expired.push((lease, cause));
            }
        }
        DueDeadlines { expired, overdue }
    }

    pub(crate) fn contains(&self, generation: Generation) -> bool {
        self.entries.contains_key(&generation)
    }

    /// Whether the lease with this id is that of the guard to which the servers granted the lock.
    pub(crate) fn is_first_hold(&self, id: &str) -> bool {
        let lease =
            |entry: &Entry| entry.lease.claim.id.as_str() == id && !entry.lease.is_handed_over;
        self.entries.values().any(lease)
    }

    /// Records that the renewal sent at `sent` is confirmed, and schedules the next one. Returns
    /// whether it confirmed the grant.
    pub(crate) fn on_renewed(&mut self, generation: Generation, sent: Moment) -> bool {
        let Some(entry) = self.entries.get_mut(&generation) else { return false };
        let confirms_grant = std::mem::take(&mut entry.provisional);
        let deadline = entry.lease.deadline();
        // A longer ttl may have been set after this renewal was sent.
        let next = sent.saturating_add(entry.lease.ttl() / RENEWALS_PER_TTL);
        let next = next.min(midpoint(sent, deadline));
        let (next, overdue_at) = match entry.renew {
            true => (next, midpoint(sent, deadline)),
            false => (Moment::NEVER, Moment::NEVER),
        };
        (entry.renewal_is_unconfirmed, entry.overdue_at) = (false, overdue_at);
        self.schedule_next(generation, next);
        self.reschedule_end(generation);
        confirms_grant
    }

    /// Records that a renewal failed, and schedules a retry after a quarter of the time left,
    /// within the bounds of the retry delay.
    pub(crate) fn on_failed(&mut self, generation: Generation, now: Moment) {
        if let Some(entry) = self.entries.get(&generation) {
            let delay = (entry.lease.deadline().duration_since(now) / 4)
                .clamp(RETRY_DELAY_MIN, RETRY_DELAY_MAX);
            self.schedule_next(generation, now.saturating_add(delay));
            self.reschedule_end(generation);
        }
    }

    /// Empties the schedule and returns its leases in the order of their registration.
    pub(crate) fn take_all(&mut self) -> Vec<Arc<Lease>> {
        self.renewals.clear();
        self.ends.clear();
        let mut entries: Vec<_> = self.entries.drain().collect();
        entries.sort_unstable_by_key(|(generation, _)| *generation);
        entries.into_iter().map(|(_, entry)| entry.lease).collect()
    }

    /// Schedules the next renewal.
    pub(crate) fn schedule_renewal(&mut self, generation: Generation, at: Moment) {
        if let Some(entry) = self.entries.get_mut(&generation) {
            self.renewals.remove(&(entry.renew_at, generation));
            entry.renew_at = at;
            if at != Moment::NEVER {
                self.renewals.insert((at, generation));
            }
        }
    }

    /// Schedules the renewal that follows one that has ended. While that was in flight, an earlier
    /// one may have been asked for.
    fn schedule_next(&mut self, generation: Generation, at: Moment) {
        if let Some(entry) = self.entries.get(&generation) {
            self.schedule_renewal(generation, at.min(entry.renew_at));
        }
    }

    /// Schedules a renewal of the leases of these claims.
    pub(crate) fn renew_soon(&mut self, ids: &[Box<str>], now: Moment) {
        let ids: HashSet<&str> = ids.iter().map(|id| &**id).collect();
        let entries = self.entries.iter();
        let due = entries.filter(|(_, entry)| ids.contains(entry.lease.claim.id.as_str()));
        let due: Vec<_> = due.map(|(generation, _)| *generation).collect();
        due.into_iter().for_each(|generation| self.schedule_renewal(generation, now));
    }

    /// Reschedules the end of a lease whose deadline has moved, or the moment before at which its
    /// renewal becomes overdue. That matters only once a renewal was tried: most locks are released
    /// before their first.
    pub(crate) fn reschedule_end(&mut self, generation: Generation) {
        if let Some(entry) = self.entries.get_mut(&generation) {
            self.ends.remove(&(entry.end_at, generation));
            entry.end_at = entry.lease.deadline().min(entry.hold_until);
            if entry.renewal_is_unconfirmed {
                entry.end_at = entry.end_at.min(entry.overdue_at);
            }
            self.ends.insert((entry.end_at, generation));
        }
    }
}

fn earliest_in(order: &BTreeSet<(Moment, Generation)>) -> Moment {
    order.first().map_or(Moment::NEVER, |(at, _)| *at)
}

fn midpoint(from: Moment, to: Moment) -> Moment {
    from.saturating_add(to.duration_since(from) / 2)
}

fn due_by(order: &BTreeSet<(Moment, Generation)>, moment: Moment) -> Vec<Generation> {
    order.range(..=(moment, Generation(u64::MAX))).map(|(_, generation)| *generation).collect()
}

#[cfg(test)]
pub(super) mod tests;
