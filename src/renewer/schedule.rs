//! Which lease is renewed when, retried when, and lost when. Pure: `now` comes in, decisions go
//! out.

mod overdue;
mod room;

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use self::overdue::midpoint;
use crate::{
    clock::Moment,
    lease::Lease,
    redlock::{NodeDeadlines, NodeSet},
};

/// A lease is renewed each time this part of it has passed, which leaves two more tries.
const RENEWALS_PER_TTL: u32 = 3;
/// What falls due this soon goes along with what is due now.
const COALESCE_WINDOW: Duration = Duration::from_millis(10);
/// A lock that was handed over for a claim window is confirmed this soon; a shorter hold costs no
/// confirmation, and does not wake the renewer.
const CONFIRM_DELAY_MAX: Duration = Duration::from_millis(100);
const RETRY_DELAY_MIN: Duration = Duration::from_millis(5);
const RETRY_DELAY_MAX: Duration = Duration::from_secs(1);

/// Names one stay of one lease in the schedule; never used twice, so that news of an earlier stay
/// changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Generation(u64);

/// How a lease is to be kept.
#[derive(Clone, Debug)]
pub(crate) struct RenewalPlan {
    /// Until when each node keeps the lock.
    pub(crate) node_deadlines: NodeDeadlines,
    pub(crate) renew: bool,
    pub(crate) provisional: bool,
    pub(crate) hold_until: Moment,
}

#[derive(Debug)]
struct Entry {
    lease: Arc<Lease>,
    node_deadlines: NodeDeadlines,
    renew: bool,
    /// `NEVER` while a renewal is under way, and for leases that are not renewed.
    renew_at: Moment,
    hold_until: Moment,
    /// Where the entry stands among the ends.
    end_at: Moment,
    /// When half of the validity will be over; `NEVER` when that has been told.
    overdue_at: Moment,
}

/// Why a lease is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExpiryCause {
    Deadline,
    MaxHold,
}

#[derive(Debug, Default)]
pub(crate) struct Schedule {
    entries: HashMap<Generation, Entry>,
    renewals: BTreeSet<(Moment, Generation)>,
    ends: BTreeSet<(Moment, Generation)>,
    /// When leases come into danger whose renewal has been tried, and has not been confirmed.
    /// Others are not listed: most locks are given up before their first renewal.
    overdue: BTreeSet<(Moment, Generation)>,
    last_generation: u64,
}

impl Schedule {
    /// Takes a lease into care.
    pub(crate) fn insert(
        &mut self,
        lease: Arc<Lease>,
        plan: RenewalPlan,
        now: Moment,
    ) -> Generation {
        self.last_generation += 1;
        let generation = Generation(self.last_generation);
        let renew_at = if plan.provisional {
            // Also if it is not to be renewed: the claim window is not its lease.
            now.saturating_add(CONFIRM_DELAY_MAX.min(lease.deadline().duration_since(now) / 4))
        } else if !plan.renew {
            Moment::NEVER
        } else {
            now.saturating_add(lease.claim.ttl / RENEWALS_PER_TTL)
        };
        let RenewalPlan { node_deadlines, renew, hold_until, .. } = plan;
        let end_at = lease.deadline().min(hold_until);
        let danger_at = if renew { midpoint(now, lease.deadline()) } else { Moment::NEVER };
        self.ends.insert((end_at, generation));
        let entry = Entry {
            lease,
            node_deadlines,
            renew,
            renew_at: Moment::NEVER,
            hold_until,
            end_at,
            overdue_at: danger_at,
        };
        self.entries.insert(generation, entry);
        self.schedule_renewal(generation, renew_at);
        generation
    }

    /// Lets go of a lease. Whatever is under way for it changes nothing any more.
    pub(crate) fn remove(&mut self, generation: Generation) -> Option<Arc<Lease>> {
        let entry = self.entries.remove(&generation)?;
        self.renewals.remove(&(entry.renew_at, generation));
        self.ends.remove(&(entry.end_at, generation));
        self.overdue.remove(&(entry.overdue_at, generation));
        Some(entry.lease)
    }

    /// When there will be something to do.
    pub(crate) fn earliest(&self) -> Moment {
        earliest_in(&self.renewals).min(self.earliest_end())
    }

    /// When a lease will be over, at the earliest, if nothing is renewed in between.
    pub(crate) fn earliest_end(&self) -> Moment {
        earliest_in(&self.ends)
    }

    /// What is to be renewed at `now`, those first that have the least time left. It stays in the
    /// schedule, with only its end still watched, until [`renewed`](Self::renewed) or
    /// [`failed`](Self::failed) says how it went.
    pub(crate) fn take_due(&mut self, now: Moment) -> Vec<(Generation, Arc<Lease>)> {
        if earliest_in(&self.renewals) > now {
            return Vec::new();
        }
        let due = due_by(&self.renewals, now.saturating_add(COALESCE_WINDOW));
        let mut due: Vec<_> = due
            .into_iter()
            .filter_map(|generation| {
                self.schedule_renewal(generation, Moment::NEVER);
                Some((generation, self.watch_overdue(generation)?))
            })
            .collect();
        due.sort_by_cached_key(|(_, lease)| lease.deadline());
        due
    }

    /// What is over at `now`; no longer in the schedule afterwards.
    pub(crate) fn take_expired(&mut self, now: Moment) -> Vec<(Arc<Lease>, ExpiryCause)> {
        let mut expired = Vec::new();
        for generation in due_by(&self.ends, now) {
            let Some(entry) = self.entries.get(&generation) else { continue };
            let cause = if now >= entry.hold_until {
                ExpiryCause::MaxHold
            } else if now >= entry.lease.deadline() {
                ExpiryCause::Deadline
            } else {
                self.reschedule_end(generation);
                continue;
            };
            if let Some(lease) = self.remove(generation) {
                expired.push((lease, cause));
            }
        }
        expired
    }

    pub(crate) fn contains(&self, generation: Generation) -> bool {
        self.entries.contains_key(&generation)
    }

    /// Nodes have said until when they keep a lock, or that they do not. Returns until when a
    /// quorum keeps it, or that there cannot be one any more; `None` for a lease that is not
    /// kept.
    ///
    /// A renewal that reached only some nodes moves only theirs.
    pub(crate) fn record_replies(
        &mut self,
        generation: Generation,
        replies: &[(usize, Option<Moment>)],
    ) -> Option<Option<Moment>> {
        let entry = self.entries.get_mut(&generation)?;
        for (node, deadline) in replies {
            match deadline {
                Some(deadline) => entry.node_deadlines.confirm(*node, *deadline),
                None => entry.node_deadlines.revoke(*node),
            }
        }
        Some(entry.node_deadlines.valid_until())
    }

    /// The nodes whose word does not count for a lease.
    pub(crate) fn excluded(&self, generation: Generation) -> NodeSet {
        self.entries
            .get(&generation)
            .map_or(NodeSet::EMPTY, |entry| entry.node_deadlines.excluded())
    }

    /// So many, at most, of the leases that are renewed and that one of these nodes is not known to
    /// keep at `now`.
    pub(crate) fn without_recent_reply(
        &self,
        nodes: NodeSet,
        now: Moment,
        max: usize,
    ) -> Vec<(Generation, Arc<Lease>)> {
        let is_silent = |entry: &Entry| {
            entry.renew && nodes.iter().any(|node| entry.node_deadlines.has_lapsed(node, now))
        };
        let entries = self.entries.iter().filter(|(_, entry)| is_silent(entry));
        let mut leases: Vec<_> =
            entries.map(|(generation, entry)| (*generation, entry.lease.clone())).collect();
        // The same leases are always the same answer.
        leases.sort_unstable_by_key(|(generation, _)| *generation);
        leases.truncate(max);
        leases
    }

    /// A renewal sent at `sent` was confirmed by a quorum.
    pub(crate) fn on_renewed(&mut self, generation: Generation, sent: Moment) {
        if let Some(entry) = self.entries.get(&generation) {
            let next = sent.saturating_add(entry.lease.claim.ttl / RENEWALS_PER_TTL);
            let danger_at =
                if entry.renew { midpoint(sent, entry.lease.deadline()) } else { Moment::NEVER };
            self.schedule_renewal(generation, if entry.renew { next } else { Moment::NEVER });
            self.reschedule_overdue(generation, danger_at);
            self.reschedule_end(generation);
        }
    }

    /// A renewal failed: try again, the sooner the less time is left.
    pub(crate) fn on_failed(&mut self, generation: Generation, now: Moment) {
        if let Some(entry) = self.entries.get(&generation) {
            let delay = (entry.lease.deadline().duration_since(now) / 4)
                .clamp(RETRY_DELAY_MIN, RETRY_DELAY_MAX);
            self.schedule_renewal(generation, now.saturating_add(delay));
            self.reschedule_end(generation);
        }
    }

    /// A renewal was not tried after all; it is still due.
    pub(crate) fn requeue(&mut self, generation: Generation, now: Moment) {
        self.schedule_renewal(generation, now);
    }

    /// Empties the schedule.
    pub(crate) fn take_all(&mut self) -> Vec<Arc<Lease>> {
        self.renewals.clear();
        self.ends.clear();
        self.overdue.clear();
        let mut entries: Vec<_> = self.entries.drain().collect();
        entries.sort_unstable_by_key(|(generation, _)| *generation);
        entries.into_iter().map(|(_, entry)| entry.lease).collect()
    }

    fn schedule_renewal(&mut self, generation: Generation, at: Moment) {
        if let Some(entry) = self.entries.get_mut(&generation) {
            self.renewals.remove(&(entry.renew_at, generation));
            entry.renew_at = at;
            if at != Moment::NEVER {
                self.renewals.insert((at, generation));
            }
        }
    }

    /// The deadline of a lease has been moved.
    pub(crate) fn reschedule_end(&mut self, generation: Generation) {
        if let Some(entry) = self.entries.get_mut(&generation) {
            self.ends.remove(&(entry.end_at, generation));
            entry.end_at = entry.lease.deadline().min(entry.hold_until);
            self.ends.insert((entry.end_at, generation));
        }
    }
}

fn earliest_in(order: &BTreeSet<(Moment, Generation)>) -> Moment {
    order.first().map_or(Moment::NEVER, |(at, _)| *at)
}

fn due_by(order: &BTreeSet<(Moment, Generation)>, moment: Moment) -> Vec<Generation> {
    order.range(..=(moment, Generation(u64::MAX))).map(|(_, generation)| *generation).collect()
}

#[cfg(test)]
mod tests;
