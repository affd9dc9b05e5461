//! How locks are given up: by their holders, by others, and when they came to nothing.

use std::time::Duration;

use super::{HeldLock, ManagerInner};
use crate::{
    clock::{self, Moment},
    error::{Action, LockError, LockLost, Result},
    event::ReleasedEvent,
    grant::Claim,
    key::LockKey,
    lease::{Lease, LeaseEnd},
    node::requests::InspectReply,
    redlock::{
        AskError, NodeSet, ReleaseOutcome, ReleaseRequest, Response, retry_through_failover,
    },
    released::Released,
    renewer::report_loss,
};

/// How long a release waits for a pooled connection before it takes another way.
const POOL_TIMEOUT: Duration = Duration::from_millis(5);

impl ManagerInner {
    /// The end of the story: of the lease, of its renewal, of the lock; in this order, so that
    /// nobody believes in a lock that may be free. Takes at most `patience`.
    pub(crate) fn release(&self, held: HeldLock, timeout: Duration) -> Result<Released> {
        let HeldLock { lease, registration } = held;
        let was_held = lease.is_held(clock::now()) && lease.end(LeaseEnd::Released);
        drop(registration);
        self.report_loss(&lease);
        if lease.ended() == Some(LeaseEnd::Lost(LockLost::Shutdown)) {
            // The shutdown has released it, or left it to expire.
            return Err(LockError::Shutdown);
        }
        let held_for = lease.hold.held(clock::now());
        let (outcome, released_on) = self.release_lease(&lease, was_held, timeout);
        // A request that is still under way would find the lock free, and take it for nobody.
        let (now, in_flight) = (clock::now(), lease.in_flight);
        let unanswered = in_flight.unanswered_at(now).difference(released_on);
        if now < in_flight.broken_until {
            self.renewer.clean_up(
                &lease.claim,
                &lease.queue_entry,
                self.redlock.all_nodes(),
                in_flight.until(),
            );
        } else if !unanswered.is_empty() {
            self.renewer.clean_up(
                &lease.claim,
                &lease.queue_entry,
                unanswered,
                in_flight.unanswered_until,
            );
        }
        if was_held {
            self.report_release(&lease, held_for, &outcome);
        }
        outcome
    }

    fn report_loss(&self, lease: &Lease) {
        if let Some(LeaseEnd::Lost(_)) = lease.ended() {
            lease.hold.end("lost");
            report_loss(self.redlock.observer(), lease);
        }
    }

    /// Tells how a lock went in which its holder believed until now. The server may know better.
    fn report_release(&self, lease: &Lease, held_for: Duration, outcome: &Result<Released>) {
        let (observer, lock, id, token) =
            (self.redlock.observer(), lease.claim.key.name(), &lease.claim.id, lease.token);
        let why = match outcome {
            Ok(Released::Gone) => LockLost::Gone,
            Ok(Released::OwnedByOther(by)) => LockLost::Taken { by: Box::new(by.clone()) },
            Ok(Released::Released) | Err(_) => {
                lease.hold.end("released");
                return observer.released(ReleasedEvent {
                    lock,
                    id,
                    token,
                    held: held_for,
                    confirmed: outcome.is_ok(),
                });
            }
        };
        lease.hold.end("lost");
        observer.lost(lock, id, token, &why, held_for);
    }

    /// The same for a holder who does not ask how it went: a lock that is known to be lost is not
    /// released again.
    pub(crate) fn release_on_drop(&self, held: HeldLock, timeout: Duration) -> Result<()> {
        let is_held = held.lease.is_held(clock::now());
        self.report_loss(&held.lease);
        match held.lease.ended() {
            None if is_held => self.release(held, timeout).map(drop),
            None | Some(LeaseEnd::Lost(LockLost::Expired | LockLost::MaxHold)) => {
                // A renewal may have been applied without our knowing, or the first request may
                // still be.
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
                Ok(())
            }
            Some(_) => Ok(()),
        }
    }

    /// Releases a lock of our own; what fails is repeated in the background. Like keeping a lock,
    /// giving it up does not depend on the pool. Also tells which nodes kept it until now.
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
            let without_pool = || self.redlock.release_last(request, deadline);
            match self.redlock.checkout(clock::now().saturating_add(POOL_TIMEOUT).min(deadline)) {
                Ok(mut links) => self.redlock.release(&mut links, request, left()),
                // A lock that came after pool and renewer had been ended.
                Err(_) if self.is_closed() => without_pool(),
                Err(_) => {
                    match self.renewer.release(claim, queue_entry, was_held, may_be_done, deadline)
                    {
                        Some(outcome) => outcome,
                        None if self.is_closed() => without_pool(),
                        None => ReleaseOutcome::not_asked(self.redlock.all_nodes()),
                    }
                }
            }
        };
        let ReleaseOutcome {
            result: outcome,
            unconfirmed: unsettled,
            unacknowledged: mut unheard,
            released_on: released,
            ..
        } = retry_through_failover(deadline, ask);
        let may_hold = if outcome.is_err() && self.redlock.len() == 1 {
            lease.may_hold()
        } else {
            lease.may_hold().intersection(unsettled)
        };
        if !may_hold.is_empty() {
            // After a shutdown there is no background, and the lock is left to expire.
            self.renewer.clean_up(claim, &lease.queue_entry, may_hold, now);
        }
        unheard.retain(|(node, _)| lease.may_hold().contains(*node));
        if !unheard.is_empty() {
            // Most answers come with the next use of their connections.
            self.renewer.doubt(
                claim,
                &lease.queue_entry,
                unheard,
                clock::now().saturating_add(self.operation_timeout()),
            );
        }
        let failed =
            |trouble| self.redlock.lock_error(trouble, Action::Release, Some(claim.key.name()));
        (outcome.map_err(failed), released)
    }

    /// Releases what is held under `id`, by whomever.
    pub(super) fn release_unregistered(&self, key: &LockKey, id: &str) -> Result<Released> {
        self.release_by_deadline(key, id.as_bytes(), false, self.operation_deadline())
    }

    /// Takes the lock away from the holder of which this identifier is told.
    pub(crate) fn force_release_if(&self, key: &LockKey, id: &str) -> Result<Released> {
        let deadline = self.operation_deadline();
        match self.release_by_deadline(key, id.as_bytes(), false, deadline)? {
            // The text that is told stands for bytes that are none: those are its own, and
            // compared.
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
        let failed = |trouble| self.redlock.lock_error(trouble, Action::Release, Some(key.name()));
        let ask = |may_be_done| match self.redlock.checkout(deadline) {
            Ok(mut links) => {
                let request = ReleaseRequest {
                    key,
                    id,
                    queue_entry: "",
                    was_held,
                    unanswered: NodeSet::EMPTY,
                    maybe_applied: may_be_done,
                };
                self.redlock.release(&mut links, request, deadline.duration_since(clock::now()))
            }
            Err(failure) => {
                let outcome = Err(AskError::Node(failure));
                ReleaseOutcome {
                    result: outcome,
                    maybe_applied: may_be_done,
                    ..ReleaseOutcome::not_asked(self.redlock.all_nodes())
                }
            }
        };
        retry_through_failover(deadline, ask).result.map_err(failed)
    }

    /// Takes the lock away from whoever holds it, a quorum of the nodes or some of them; true if it
    /// did.
    pub(crate) fn force_release(&self, key: &LockKey) -> Result<bool> {
        let failed = |trouble| self.redlock.lock_error(trouble, Action::Inspect, Some(key.name()));
        let deadline = self.operation_deadline();
        // Half the time, so that there is another half for taking it away.
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
        // By their identifiers: should an answer be lost, asking again must not hit the next
        // holder.
        let outcomes: Vec<_> =
            ids.into_iter().map(|id| self.release_by_deadline(key, id, true, deadline)).collect();
        // Whose release went through was the only one who could hold it, whatever is not known of
        // the others.
        if outcomes.iter().any(|outcome| matches!(outcome, Ok(Released::Released))) {
            return Ok(true);
        }
        outcomes.into_iter().find_map(Result::err).map_or(Ok(false), Err)
    }

    /// Makes nodes forget a claim that came to nothing. Takes at most `patience`.
    pub(super) fn abandon(
        &self,
        claim: &Claim,
        queue_entry: &str,
        nodes: NodeSet,
        in_flight_until: Moment,
        timeout: Duration,
    ) {
        if !self.renewer.clean_up(claim, queue_entry, nodes, in_flight_until) {
            // Shut down: nobody is left to do it in the background. What fails is left to expire.
            let leaving = ReleaseRequest {
                key: &claim.key,
                id: claim.id.as_str().as_bytes(),
                queue_entry,
                was_held: false,
                unanswered: NodeSet::EMPTY,
                maybe_applied: NodeSet::EMPTY,
            };
            let outcome = self.redlock.release_last(leaving, clock::now().saturating_add(timeout));
            if let Err(trouble) = outcome.result {
                log_safely!(debug, "left {:?} to expire: {trouble}", claim.key);
            }
        }
    }
}
