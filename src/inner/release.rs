//! How locks are released: by their holders, by other clients, and after an abandoned acquisition.

use std::time::Duration;

use super::{HeldLock, ManagerInner};
use crate::{
    backend::{
        redis::requests_and_replies::InspectReply,
        redlock::{AskError, ReleaseOutcome, ReleaseRequest, Response, retry_through_failover},
    },
    core::{
        claim::Claim,
        key::LockKey,
        lease::{Lease, LeaseEnd},
        lock_lost::LockLost,
        quorum::NodeSet,
    },
    error::{Action, LockError, Result},
    lock_info::Released,
    observe::event::ReleasedEvent,
    renew::report_loss,
    sys::clock::{self, Moment},
};

/// Maximum time that a release waits for a pooled connection before it uses a reserved one.
const POOL_TIMEOUT: Duration = Duration::from_millis(5);

impl ManagerInner {
    /// Ends the lease, then its renewal, then releases the lock on the server. In this order, a
    /// lock that may be free is never reported as held. Takes at most `timeout`.
    pub(crate) fn release(&self, held: HeldLock, timeout: Duration) -> Result<Released> {
        let HeldLock { lease, registration, span } = held;
        let was_held = lease.is_held(clock::now()) && lease.end(LeaseEnd::Released);
        drop(registration);
        report_loss(self.redlock.observer(), &lease);
        if lease.ended() == Some(LeaseEnd::Lost(LockLost::Shutdown)) {
            // The shutdown has released the lock or left it to expire.
            span.end("lost");
            return Err(LockError::Shutdown);
        }
        let held_for = lease.held_for(clock::now());
        let (outcome, released_on) = self.release_lease(&lease, was_held, timeout);
        // A request that is still in flight would find the lock free and acquire it again, although
        // it has no holder any more.
        let (now, in_flight) = (clock::now(), lease.in_flight);
        let unanswered = in_flight.unanswered_at(now).difference(released_on);
        if now < in_flight.broken_until {
            self.cleaner.clean_up(
                &lease.claim,
                &lease.queue_entry,
                self.redlock.all_nodes(),
                in_flight.until(),
            );
        } else if !unanswered.is_empty() {
            self.cleaner.clean_up(
                &lease.claim,
                &lease.queue_entry,
                unanswered,
                in_flight.unanswered_until,
            );
        }
        let was_lost = !was_held || self.report_release(&lease, held_for, &outcome);
        span.end(if was_lost { "lost" } else { "released" });
        outcome
    }

    /// Reports the end of a lease that was valid until its release. Returns whether the outcome
    /// shows that the lock was already lost on the server.
    fn report_release(
        &self,
        lease: &Lease,
        held_for: Duration,
        outcome: &Result<Released>,
    ) -> bool {
        let (observer, lock, id, token) =
            (self.redlock.observer(), lease.claim.key.name(), &lease.claim.id, lease.token);
        let why = match outcome {
            Ok(Released::Gone) => LockLost::Gone,
            Ok(Released::OwnedByOther(by)) => LockLost::Taken { by: Box::new(by.clone()) },
            Ok(Released::Released) | Err(_) => {
                let confirmed = outcome.is_ok();
                observer.released(ReleasedEvent { lock, id, token, held: held_for, confirmed });
                return false;
            }
        };
        observer.lost(lock, id, token, &why, held_for);
        true
    }

    /// Like [`release`](Self::release), for a caller that does not need the outcome. A lock that is
    /// known to be lost is not released again.
    pub(crate) fn release_on_drop(&self, held: HeldLock, timeout: Duration) -> Result<()> {
        let is_held = held.lease.is_held(clock::now());
        report_loss(self.redlock.observer(), &held.lease);
        match held.lease.ended() {
            None if is_held => self.release(held, timeout).map(drop),
            None | Some(LeaseEnd::Lost(LockLost::Expired | LockLost::MaxHold)) => {
                // A renewal may have been applied without a reply, and the first request may still
                // be applied.
                let lease = &held.lease;
                let nodes = if clock::now() < lease.in_flight.broken_until {
                    self.redlock.all_nodes()
                } else {
                    lease.may_hold()
                };
                self.abandon(
                    &lease.claim,
                    &lease.queue_entry,
                    nodes,
                    lease.in_flight.until(),
                    timeout,
                );
                held.span.end("lost");
                Ok(())
            }
            Some(_) => {
                held.span.end("lost");
                Ok(())
            }
        }
    }

    /// Releases a lock of this manager, even if the pool is exhausted. Failed releases are retried
    /// in the background. Also returns the nodes that held the lock until this release.
    pub(super) fn release_lease(
        &self,
        lease: &Lease,
        was_held: bool,
        timeout: Duration,
    ) -> (Result<Released>, NodeSet) {
        let (claim, now) = (&lease.claim, clock::now());
        let deadline = now.saturating_add(timeout);
        let left = || deadline.duration_since(clock::now());
        let unanswered = lease.in_flight.unanswered_at(now);
        let ask = |may_be_done| {
            let (id, queue_entry) = (claim.id.as_str().as_bytes(), lease.queue_entry.as_str());
            let request = ReleaseRequest {
                key: &claim.key,
                id,
                queue_entry,
                was_held,
                unanswered,
                maybe_applied: may_be_done,
            };
            match self.redlock.checkout(clock::now().saturating_add(POOL_TIMEOUT).min(deadline)) {
                Ok(mut connections) => self.redlock.release(&mut connections, request, left()),
                // The pool is exhausted, or a shutdown has closed it.
                Err(_) => self.redlock.release_reserved(request, deadline),
            }
        };
        let ReleaseOutcome { result, unconfirmed, mut unacknowledged, released_on, .. } =
            retry_through_failover(deadline, ask);
        let may_hold = if result.is_err() && self.redlock.len() == 1 {
            lease.may_hold()
        } else {
            lease.may_hold().intersection(unconfirmed)
        };
        if !may_hold.is_empty() {
            // After a shutdown nothing runs in the background, and the lock is left to expire.
            self.cleaner.clean_up(claim, &lease.queue_entry, may_hold, now);
        }
        unacknowledged.retain(|(node, _)| lease.may_hold().contains(*node));
        if !unacknowledged.is_empty() {
            // Most of these acks arrive when their connections are used next.
            self.cleaner.follow_up(
                claim,
                &lease.queue_entry,
                unacknowledged,
                clock::now().saturating_add(self.operation_timeout()),
            );
        }
        let failed =
            |error| self.redlock.lock_error(error, Action::Release, Some(claim.key.name()));
        (result.map_err(failed), released_on)
    }

    /// Releases a lock held under `id`, in this or another process.
    pub(super) fn release_unregistered(&self, key: &LockKey, id: &str) -> Result<Released> {
        self.release_by_deadline(key, id.as_bytes(), false, self.operation_deadline())
    }

    /// Force-releases the lock if its holder has this id.
    pub(crate) fn force_release_if(&self, key: &LockKey, id: &str) -> Result<Released> {
        let deadline = self.operation_deadline();
        match self.release_by_deadline(key, id.as_bytes(), false, deadline)? {
            // The holder's id is not UTF-8, and `id` is the text shown for it. Compare the bytes
            // instead.
            Released::OwnedByOther(holder)
                if holder.id() == id && holder.id_bytes() != id.as_bytes() =>
            {
                self.release_by_deadline(key, holder.id_bytes(), false, deadline)
            }
            released => Ok(released),
        }
    }

    fn release_by_deadline(
        &self,
        key: &LockKey,
        id: &[u8],
        was_held: bool,
        deadline: Moment,
    ) -> Result<Released> {
        let failed = |error| self.redlock.lock_error(error, Action::Release, Some(key.name()));
        let ask = |may_be_done| match self.redlock.checkout(deadline) {
            Ok(mut connections) => {
                let request = ReleaseRequest {
                    key,
                    id,
                    queue_entry: "",
                    was_held,
                    unanswered: NodeSet::EMPTY,
                    maybe_applied: may_be_done,
                };
                self.redlock.release(
                    &mut connections,
                    request,
                    deadline.duration_since(clock::now()),
                )
            }
            Err(failure) => {
                let result = Err(AskError::Node(failure));
                ReleaseOutcome {
                    result,
                    maybe_applied: may_be_done,
                    ..ReleaseOutcome::without_reply(self.redlock.all_nodes())
                }
            }
        };
        retry_through_failover(deadline, ask).result.map_err(failed)
    }

    /// Force-releases the lock on all nodes, whichever holder each of them reports. Returns whether
    /// a lock was released.
    pub(crate) fn force_release(&self, key: &LockKey) -> Result<bool> {
        let failed = |error| self.redlock.lock_error(error, Action::Inspect, Some(key.name()));
        let deadline = self.operation_deadline();
        // Inspecting takes at most half of the time, which leaves the rest for the release.
        let responses =
            self.redlock.inspect_all(key, self.operation_timeout() / 2).map_err(failed)?;
        let mut ids: Vec<&[u8]> = Vec::new();
        for response in &responses.by_node {
            if let Response::Replied(answer) = response
                && let InspectReply::Held(holder) = &answer.reply
                && !ids.contains(&holder.id_bytes())
            {
                ids.push(holder.id_bytes());
            }
        }
        // Release by id: if a reply is lost, the retry must not affect the next holder.
        let outcomes: Vec<_> =
            ids.into_iter().map(|id| self.release_by_deadline(key, id, true, deadline)).collect();
        // If one release succeeded, its id was the only possible holder. The other outcomes do not
        // matter.
        if outcomes.iter().any(|outcome| matches!(outcome, Ok(Released::Released))) {
            return Ok(true);
        }
        outcomes.into_iter().find_map(Result::err).map_or(Ok(false), Err)
    }

    /// Cleans up the residue of a claim on these nodes. Takes at most `timeout`.
    pub(super) fn abandon(
        &self,
        claim: &Claim,
        queue_entry: &str,
        nodes: NodeSet,
        in_flight_until: Moment,
        timeout: Duration,
    ) {
        if !self.cleaner.clean_up(claim, queue_entry, nodes, in_flight_until) {
            // After a shutdown, nothing runs in the background, so this is the only try.
            let request = ReleaseRequest {
                key: &claim.key,
                id: claim.id.as_str().as_bytes(),
                queue_entry,
                was_held: false,
                unanswered: NodeSet::EMPTY,
                maybe_applied: NodeSet::EMPTY,
            };
            let until = clock::now().saturating_add(timeout);
            let outcome = self.redlock.release_reserved(request, until);
            if let Err(error) = outcome.result {
                log_safely!(
                    debug,
                    "could not clean up {:?}: {error}; it is left to expire",
                    claim.key
                );
            }
        }
    }
}
