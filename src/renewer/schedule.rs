//! Which lease is renewed when, retried when, and lost when. Pure: `now` comes in, decisions go out.

mod danger;
mod room;

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use self::danger::half_way;
use crate::{
    clock::Moment,
    lease::Lease,
    redlock::{NodeSet, Votes},
};

/// A lease is renewed each time this part of it has passed, which leaves two more tries.
const RENEWALS_PER_TTL: u32 = 3;
/// What falls due this soon goes along with what is due now.
const SLACK: Duration = Duration::from_millis(10);
/// A lock that was handed over for a claim window is confirmed this soon; a shorter hold costs no confirmation, and
/// does not wake the renewer.
const CONFIRM_AFTER: Duration = Duration::from_millis(100);
const RETRY_MIN: Duration = Duration::from_millis(5);
const RETRY_MAX: Duration = Duration::from_secs(1);

/// Names one stay of one lease in the schedule; never used twice, so that news of an earlier stay changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Generation(u64);

/// How a lease is to be kept.
#[derive(Clone, Debug)]
pub(crate) struct Upkeep {
    /// Until when each node keeps the lock.
    pub(crate) votes: Votes,
    pub(crate) renew: bool,
    pub(crate) provisional: bool,
    pub(crate) hold_until: Moment,
}

#[derive(Debug)]
struct Entry {
    lease: Arc<Lease>,
    votes: Votes,
    renew: bool,
    /// `NEVER` while a renewal is under way, and for leases that are not renewed.
    renew_at: Moment,
    hold_until: Moment,
    /// Where the entry stands among the ends.
    end_at: Moment,
    /// When half of the validity will be over; `NEVER` when that has been told.
    danger_at: Moment,
}

/// Why a lease is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Over {
    Deadline,
    MaxHold,
}

#[derive(Debug, Default)]
pub(crate) struct Schedule {
    entries: HashMap<Generation, Entry>,
    renewals: BTreeSet<(Moment, Generation)>,
    ends: BTreeSet<(Moment, Generation)>,
    /// When leases come into danger whose renewal has been tried, and has not been confirmed. Others are not listed: most
    /// locks are given up before their first renewal.
    dangers: BTreeSet<(Moment, Generation)>,
    last: u64,
}

impl Schedule {
    /// Takes a lease into care.
    pub(crate) fn keep(&mut self, lease: Arc<Lease>, upkeep: Upkeep, now: Moment) -> Generation {
        self.last += 1;
        let generation = Generation(self.last);
        let renew_at = if upkeep.provisional {
            // Also if it is not to be renewed: the claim window is not its lease.
            now.saturating_add(CONFIRM_AFTER.min(lease.deadline().after(now) / 4))
        } else if !upkeep.renew {
            Moment::NEVER
        } else {
            now.saturating_add(lease.claim.ttl / RENEWALS_PER_TTL)
        };
        let Upkeep { votes, renew, hold_until, .. } = upkeep;
        let end_at = lease.deadline().min(hold_until);
        let danger_at = if renew { half_way(now, lease.deadline()) } else { Moment::NEVER };
        self.ends.insert((end_at, generation));
        let entry = Entry { lease, votes, renew, renew_at: Moment::NEVER, hold_until, end_at, danger_at };
        self.entries.insert(generation, entry);
        self.renew_at(generation, renew_at);
        generation
    }

    /// Lets go of a lease. Whatever is under way for it changes nothing any more.
    pub(crate) fn forget(&mut self, generation: Generation) -> Option<Arc<Lease>> {
        let entry = self.entries.remove(&generation)?;
        self.renewals.remove(&(entry.renew_at, generation));
        self.ends.remove(&(entry.end_at, generation));
        self.dangers.remove(&(entry.danger_at, generation));
        Some(entry.lease)
    }

    /// When there will be something to do.
    pub(crate) fn earliest(&self) -> Moment {
        first(&self.renewals).min(self.earliest_end())
    }

    /// When a lease will be over, at the earliest, if nothing is renewed in between.
    pub(crate) fn earliest_end(&self) -> Moment {
        first(&self.ends)
    }

    /// What is to be renewed at `now`, those first that have the least time left. It stays in the schedule, with only its end still
    /// watched, until [`renewed`](Self::renewed) or [`failed`](Self::failed) says how it went.
    pub(crate) fn take_due(&mut self, now: Moment) -> Vec<(Generation, Arc<Lease>)> {
        if first(&self.renewals) > now {
            return Vec::new();
        }
        let due = up_to(&self.renewals, now.saturating_add(SLACK));
        let mut due: Vec<_> = due
            .into_iter()
            .filter_map(|generation| {
                self.renew_at(generation, Moment::NEVER);
                Some((generation, self.watch_danger(generation)?))
            })
            .collect();
        due.sort_by_cached_key(|(_, lease)| lease.deadline());
        due
    }

    /// What is over at `now`; no longer in the schedule afterwards.
    pub(crate) fn take_over(&mut self, now: Moment) -> Vec<(Arc<Lease>, Over)> {
        let mut over = Vec::new();
        for generation in up_to(&self.ends, now) {
            let Some(entry) = self.entries.get(&generation) else { continue };
            let why = if now >= entry.hold_until {
                Over::MaxHold
            } else if now >= entry.lease.deadline() {
                Over::Deadline
            } else {
                self.watch_end(generation);
                continue;
            };
            if let Some(lease) = self.forget(generation) {
                over.push((lease, why));
            }
        }
        over
    }

    pub(crate) fn is_kept(&self, generation: Generation) -> bool {
        self.entries.contains_key(&generation)
    }

    /// Nodes have said until when they keep a lock, or that they do not. Returns until when a quorum keeps it, or that
    /// there cannot be one any more; `None` for a lease that is not kept.
    ///
    /// A renewal that reached only some nodes moves only theirs.
    pub(crate) fn heard(&mut self, generation: Generation, said: &[(usize, Option<Moment>)]) -> Option<Option<Moment>> {
        let entry = self.entries.get_mut(&generation)?;
        for (node, deadline) in said {
            match deadline {
                Some(deadline) => entry.votes.confirm(*node, *deadline),
                None => entry.votes.strike(*node),
            }
        }
        Some(entry.votes.validity())
    }

    /// The nodes whose word does not count for a lease.
    pub(crate) fn barred(&self, generation: Generation) -> NodeSet {
        self.entries.get(&generation).map_or(NodeSet::NONE, |entry| entry.votes.barred())
    }

    /// So many, at most, of the leases that are renewed and that one of these nodes is not known to keep at `now`.
    pub(crate) fn unheard(&self, nodes: NodeSet, now: Moment, most: usize) -> Vec<(Generation, Arc<Lease>)> {
        let unheard = |entry: &Entry| entry.renew && nodes.iter().any(|node| entry.votes.is_over(node, now));
        let unheard = self.entries.iter().filter(|(_, entry)| unheard(entry));
        let mut unheard: Vec<_> = unheard.map(|(generation, entry)| (*generation, entry.lease.clone())).collect();
        // The same leases are always the same answer.
        unheard.sort_unstable_by_key(|(generation, _)| *generation);
        unheard.truncate(most);
        unheard
    }

    /// A renewal sent at `sent` was confirmed by a quorum.
    pub(crate) fn renewed(&mut self, generation: Generation, sent: Moment) {
        if let Some(entry) = self.entries.get(&generation) {
            let next = sent.saturating_add(entry.lease.claim.ttl / RENEWALS_PER_TTL);
            let danger_at = if entry.renew { half_way(sent, entry.lease.deadline()) } else { Moment::NEVER };
            self.renew_at(generation, if entry.renew { next } else { Moment::NEVER });
            self.move_danger(generation, danger_at);
            self.watch_end(generation);
        }
    }

    /// A renewal failed: try again, the sooner the less time is left.
    pub(crate) fn failed(&mut self, generation: Generation, now: Moment) {
        if let Some(entry) = self.entries.get(&generation) {
            let pause = (entry.lease.deadline().after(now) / 4).clamp(RETRY_MIN, RETRY_MAX);
            self.renew_at(generation, now.saturating_add(pause));
            self.watch_end(generation);
        }
    }

    /// A renewal was not tried after all; it is still due.
    pub(crate) fn put_back(&mut self, generation: Generation, now: Moment) {
        self.renew_at(generation, now);
    }

    /// Empties the schedule.
    pub(crate) fn take_all(&mut self) -> Vec<Arc<Lease>> {
        self.renewals.clear();
        self.ends.clear();
        self.dangers.clear();
        let mut entries: Vec<_> = self.entries.drain().collect();
        entries.sort_unstable_by_key(|(generation, _)| *generation);
        entries.into_iter().map(|(_, entry)| entry.lease).collect()
    }

    fn renew_at(&mut self, generation: Generation, at: Moment) {
        if let Some(entry) = self.entries.get_mut(&generation) {
            self.renewals.remove(&(entry.renew_at, generation));
            entry.renew_at = at;
            if at != Moment::NEVER {
                self.renewals.insert((at, generation));
            }
        }
    }

    /// The deadline of a lease has been moved.
    pub(crate) fn watch_end(&mut self, generation: Generation) {
        if let Some(entry) = self.entries.get_mut(&generation) {
            self.ends.remove(&(entry.end_at, generation));
            entry.end_at = entry.lease.deadline().min(entry.hold_until);
            self.ends.insert((entry.end_at, generation));
        }
    }
}

fn first(order: &BTreeSet<(Moment, Generation)>) -> Moment {
    order.first().map_or(Moment::NEVER, |(at, _)| *at)
}

fn up_to(order: &BTreeSet<(Moment, Generation)>, moment: Moment) -> Vec<Generation> {
    order.range(..=(moment, Generation(u64::MAX))).map(|(_, generation)| *generation).collect()
}

#[cfg(test)]
mod tests;
