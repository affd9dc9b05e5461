//! `Desk`: what the renewer's thread can do without its connections: tell of losses and dangers,
//! and have things taken back.

use std::{sync::Arc, time::Duration};

use super::{
    RenewerState, Shared, report_loss, schedule::ExpiryCause, worker::PREEMPTION_DELAY_MAX,
};
use crate::{
    clock::{self, Moment},
    display::Quoted,
    error::LockLost,
    lease::{Lease, LeaseEnd},
    redlock::Redlock,
};

/// While an answer is out, this often is looked whether it is time to end, or something has come
/// that cannot wait for it.
const GLANCE: Duration = Duration::from_millis(20);

/// So long others wait, of what is to be taken back, for nodes that may not answer at all: enough
/// for a long way.
const TURN: Duration = Duration::from_millis(250);

/// What an answer that is out is to do.
pub(super) enum Watch {
    /// It may go on, and this is when to look again.
    Until(Moment),
    /// Something else cannot wait any longer.
    MakeRoom,
    /// It is time to end.
    End,
}

/// What can be done without the connections, while they are in use.
pub(super) struct Desk {
    pub(super) redlock: Arc<Redlock>,
    pub(super) shared: Arc<Shared>,
}

impl Desk {
    /// Ends what is over. The key is released if it is still ours: a renewal may have been applied
    /// unseen.
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

    /// Takes back what may be left of a lock that is over: where it was kept, and where a request
    /// for it may still arrive.
    pub(super) fn clean_up(&self, lease: &Lease) {
        let now = clock::now();
        let in_flight = &lease.in_flight;
        let nodes =
            if now < in_flight.broken_until { self.redlock.all_nodes() } else { lease.may_hold() };
        self.shared.state.lock().schedule_cleanup(
            &lease.claim,
            &lease.queue_entry,
            nodes,
            in_flight.until(),
            now,
        );
    }

    pub(super) fn end_as_lost(&self, lease: &Lease, why: LockLost) {
        if lease.end(LeaseEnd::Lost(why.clone())) {
            log_safely!(
                warn,
                "lock {} of {} is lost: {why}",
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

    /// When a lease ends next, and until when the server may be talked to.
    pub(super) fn limits(&self) -> (Moment, Moment) {
        let state = self.shared.state.lock();
        (state.schedule.earliest_end(), state.shutdown_deadline.unwrap_or(Moment::NEVER))
    }

    /// Whether there is something to do that waits for the thread.
    pub(super) fn is_wanted(&self, now: Moment) -> bool {
        let RenewerState { schedule, cleanups: undos, errands, shutdown_deadline: stop, .. } =
            &*self.shared.state.lock();
        let due = schedule.earliest().min(undos.earliest());
        now >= due || !errands.is_empty() || stop.is_some()
    }

    /// When an exchange that began at `since` has to make room for renewals, for releases that
    /// somebody waits for, and for what else is to be taken back.
    fn makes_room_at(&self, since: Moment, delay: Duration, now: Moment) -> Moment {
        let state = self.shared.state.lock();
        let errands =
            if state.errands.is_empty() { Moment::NEVER } else { since.saturating_add(delay) };
        let undos = if self.redlock.len() > 1 { state.cleanups.earliest() } else { Moment::NEVER };
        let undos = undos.max(since.saturating_add(delay.max(TURN)));
        state.schedule.makes_room_at(since, delay, now).min(errands).min(undos)
    }

    /// While an answer is out, holders of leases that run out are told. Says when to look again.
    pub(super) fn watch(
        &self,
        since: Moment,
        delay: Duration,
        before_shutdown: bool,
        now: Moment,
    ) -> Watch {
        let dangers = self.shared.state.lock().schedule.take_overdue(now);
        self.report_overdue(dangers, now);
        let (mut end, stop) = self.limits();
        if now >= stop {
            return Watch::End;
        }
        if now >= end {
            let over = self.shared.state.lock().schedule.take_expired(now);
            self.expire(over);
            end = self.limits().0;
        }
        let ending = before_shutdown && stop != Moment::NEVER;
        // What is held has to be released in the time that is left.
        let end_room =
            if ending { since.saturating_add(PREEMPTION_DELAY_MAX) } else { Moment::NEVER };
        let room = self.makes_room_at(since, delay, now).min(end_room);
        if now >= room {
            return Watch::MakeRoom;
        }
        Watch::Until(room.min(end).min(stop).min(now.saturating_add(GLANCE)))
    }
}
