//! What the renewer's thread does without its connections: report losses and overdue renewals.

use std::{sync::Arc, time::Duration};

use super::{
    RenewerState, ResidueSink, Shared, report_loss, schedule::ExpiryCause,
    worker::PREEMPTION_DELAY_MAX,
};
use crate::{
    backend::redlock::Redlock,
    core::{
        lease::{Lease, LeaseEnd},
        lock_lost::LockLost,
    },
    sys::{
        clock::{self, Moment},
        display::Quoted,
    },
};

/// Maximum interval between checks for shutdown and for urgent work while replies are awaited.
const GLANCE: Duration = Duration::from_millis(20);

/// What to do with an exchange that awaits replies.
pub(super) enum Watch {
    /// Continue, and check again at this time.
    Until(Moment),
    /// Stop: more urgent work is due.
    MakeRoom,
    /// Stop: the shutdown deadline has passed.
    End,
}

/// Part of the worker that can be used while its connections are in use.
pub(super) struct Desk {
    pub(super) redlock: Arc<Redlock>,
    pub(super) shared: Arc<Shared>,
    pub(super) residues: Arc<dyn ResidueSink>,
}

impl Desk {
    /// Ends leases that have expired. Also schedules the release of their keys, because a renewal
    /// may have been applied without a reply.
    pub(super) fn expire(&self, expired: impl IntoIterator<Item = (Arc<Lease>, ExpiryCause)>) {
        for (lease, why) in expired {
            let why = match why {
                ExpiryCause::Deadline => LockLost::Expired,
                ExpiryCause::MaxHold => LockLost::MaxHold,
            };
            // The holder may have noticed first.
            self.end_as_lost(&lease, why);
            if !matches!(lease.ended(), Some(LeaseEnd::Released)) {
                self.clean_up(&lease);
            }
        }
    }

    /// Schedules the clean-up of an ended lease: on the nodes that may hold the lock, and where a
    /// request for it may still arrive.
    pub(super) fn clean_up(&self, lease: &Lease) {
        let now = clock::now();
        let in_flight = &lease.in_flight;
        let nodes =
            if now < in_flight.broken_until { self.redlock.all_nodes() } else { lease.may_hold() };
        self.residues.clean_up(lease, nodes);
    }

    pub(super) fn end_as_lost(&self, lease: &Lease, why: LockLost) {
        if lease.end(LeaseEnd::Lost(why.clone())) {
            log_safely!(
                warn,
                "lock {} at {} is lost: {why}",
                Quoted(lease.claim.key.name()),
                self.redlock.label()
            );
        }
        report_loss(self.redlock.observer(), lease);
    }

    pub(super) fn report_failure(&self, failed: &[&Arc<Lease>], why: &Arc<str>) {
        let now = clock::now();
        for lease in failed {
            let (claim, left) = (&lease.claim, lease.deadline().duration_since(now));
            self.redlock.observer().renewal_failed(claim.key.name(), &claim.id, why, left);
        }
    }

    pub(super) fn report_overdue(&self, overdue: Vec<Arc<Lease>>, now: Moment) {
        for lease in overdue {
            let (claim, left) = (&lease.claim, lease.deadline().duration_since(now));
            self.redlock.observer().renewal_overdue(claim.key.name(), &claim.id, left);
        }
    }

    /// Returns the time at which the next lease ends, and the deadline for exchanges.
    pub(super) fn limits(&self) -> (Moment, Moment) {
        let state = self.shared.state.lock();
        (state.schedule.earliest_end(), state.shutdown_deadline.unwrap_or(Moment::NEVER))
    }

    /// Whether work for the thread is due.
    pub(super) fn is_wanted(&self, now: Moment) -> bool {
        let RenewerState { schedule, shutdown_deadline, .. } = &*self.shared.state.lock();
        now >= schedule.earliest() || shutdown_deadline.is_some()
    }

    /// Time at which an exchange that began at `since` must make room for renewals.
    fn makes_room_at(&self, since: Moment, delay: Duration, now: Moment) -> Moment {
        self.shared.state.lock().schedule.makes_room_at(since, delay, now)
    }

    /// Called while replies are awaited. Reports overdue renewals, ends expired leases, and decides
    /// whether the exchange goes on.
    pub(super) fn watch(
        &self,
        since: Moment,
        delay: Duration,
        before_shutdown: bool,
        now: Moment,
    ) -> Watch {
        let overdue = self.shared.state.lock().schedule.take_overdue(now);
        self.report_overdue(overdue, now);
        let (mut end, stop) = self.limits();
        if now >= stop {
            return Watch::End;
        }
        if now >= end {
            let expired = self.shared.state.lock().schedule.take_expired(now);
            self.expire(expired);
            end = self.limits().0;
        }
        let ending = before_shutdown && stop != Moment::NEVER;
        // The remaining time is needed to release what is held.
        let end_room =
            if ending { since.saturating_add(PREEMPTION_DELAY_MAX) } else { Moment::NEVER };
        let room = self.makes_room_at(since, delay, now).min(end_room);
        if now >= room {
            return Watch::MakeRoom;
        }
        Watch::Until(room.min(end).min(stop).min(now.saturating_add(GLANCE)))
    }
}
