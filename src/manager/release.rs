//! How locks are released: by their holders, by other clients, and after an abandoned acquisition.

use std::{sync::Arc, time::Duration};

use super::{HeldLock, Manager};
use crate::{
    backend::{ReleaseReport, error::BackendError},
    core::{
        claim::{Claim, Residue},
        key::LockKey,
        lease::{Lease, LeaseEnd},
        lock_lost::LockLost,
    },
    error::{Action, LockError, Result},
    lock_info::Released,
    observe::{HoldSpan, event::ReleasedEvent},
    renew::{Registration, report_loss},
    sys::clock::{self, Moment},
};

/// What happens to a lock that its holder could not release.
pub(super) const RETRIED: &str = "its manager retries the release until the lock expires";
const LEFT_TO_EXPIRE: &str = "the lock is left to expire";
/// In a database, the connection is closed after a failure.
const ENDS_WITH_CONNECTION: &str = "the server releases the lock when it notices the closed \
    connection";

/// The error of a release whose manager ends right after it, and so retries nothing.
pub(super) fn without_retries(error: LockError) -> LockError {
    if error.advice() == RETRIED { error.advising(LEFT_TO_EXPIRE) } else { error }
}

/// A lock whose lease has ended, which has not been reported yet.
pub(super) struct EndedLock {
    pub(super) lease: Arc<Lease>,
    pub(super) span: HoldSpan,
    pub(super) was_held: bool,
    pub(super) held_for: Duration,
}

/// Ends a lease whose holder gives it up, then its renewal. Returns whether it was valid until now.
fn end_lease(lease: &Lease, registration: Registration) -> bool {
    let was_held = lease.is_held(clock::now()) && lease.end(LeaseEnd::Released);
    drop(registration);
    was_held
}

impl Manager {
    /// Ends the lease, then its renewal, then releases the lock on the server. In this order, a
    /// lock that may be free is never reported as held. Takes at most `timeout`.
    pub(crate) fn release(&self, held: HeldLock, timeout: Duration) -> Result<Released> {
        let _time = self.time.enter();
        let (ended, outcome) = self.end(held);
        let release = || self.release_lease(&ended.lease, ended.was_held, timeout);
        let outcome = outcome.unwrap_or_else(release);
        self.report_ended(ended, outcome.as_ref().ok());
        outcome
    }

    /// Ends a lease whose holder gives it up, then its renewal, and reports a loss. Returns whether
    /// it was valid until now.
    pub(super) fn end_and_report(&self, lease: &Lease, registration: Registration) -> bool {
        let was_held = end_lease(lease, registration);
        report_loss(&self.observer, lease);
        was_held
    }

    /// Hands the lock over inside the process, or ends its lease. Calls no handlers. Returns the
    /// outcome of the release too, unless the servers still keep the lock.
    pub(super) fn end(&self, held: HeldLock) -> (EndedLock, Option<Result<Released>>) {
        let HeldLock { lease, registration, span, .. } = match self.hand_over(held) {
            Ok(ended) => return (ended, Some(Ok(Released::Released))),
            Err(held) => held,
        };
        let was_held = end_lease(&lease, registration);
        let is_shut_down = lease.ended() == Some(LeaseEnd::Lost(LockLost::Shutdown));
        // A shutdown has released the lock, or left it to expire.
        let outcome = is_shut_down.then_some(Err(LockError::Shutdown));
        let held_for = lease.held_for(clock::now());
        (EndedLock { lease, span, was_held, held_for }, outcome)
    }

    /// Cleans up after a lock that turns out to be lost while its holder gives it up: an earlier
    /// request may still be applied. Returns the error of the call.
    pub(super) fn give_up_lost(&self, lease: &Lease, span: HoldSpan, why: LockLost) -> LockError {
        let residue = self.backend.lease_residue(lease);
        self.abandon(&lease.longest_claim(), residue, self.time_left());
        span.end("lost");
        LockError::Lost { name: lease.claim.key.name().to_owned(), why }
    }

    /// Reports how a lock has ended. `outcome` is that of its release, if the servers confirmed it.
    pub(super) fn report_ended(&self, ended: EndedLock, outcome: Option<&Released>) {
        let EndedLock { lease, span, was_held, held_for } = ended;
        report_loss(&self.observer, &lease);
        let was_lost = !was_held || self.report_release(&lease, held_for, outcome);
        span.end(if was_lost { "lost" } else { "released" });
    }

    /// Reports the end of a lease that was valid until its release. Returns whether the outcome
    /// shows that the lock was already lost on the server.
    fn report_release(
        &self,
        lease: &Lease,
        held_for: Duration,
        outcome: Option<&Released>,
    ) -> bool {
        let (observer, lock, id, token) =
            (&self.observer, lease.claim.key.name(), &lease.claim.id, lease.token());
        let why = match outcome {
            Some(Released::Gone) => LockLost::Gone,
            Some(Released::OwnedByOther(by)) => LockLost::Taken { by: Box::new(by.clone()) },
            Some(Released::Released) | None => {
                let confirmed = outcome.is_some();
                observer.released(ReleasedEvent { lock, id, token, held: held_for, confirmed });
                return false;
            }
        };
        observer.lost(lock, id, token, &why, held_for);
        true
    }

    /// Whether releases can run in the background.
    pub(crate) fn releases_in_background(&self) -> bool {
        self.backend.releases_in_background()
    }

    /// Ends the lease, and has its lock released in the background. After a shutdown, takes at most
    /// `timeout`.
    fn release_in_background(&self, held: HeldLock, timeout: Duration) {
        let (ended, outcome) = self.end(held);
        if let Some(outcome) = outcome {
            self.report_ended(ended, outcome.as_ref().ok());
            return;
        }
        let lease = &ended.lease;
        let left = if ended.was_held {
            self.observer.shield(|| self.cleaner.release_later(lease))
        } else {
            // It was lost since the first look.
            self.observer.shield(|| self.cleaner.clean_up_lease(lease))
        };
        if let Err(residue) = left {
            self.clean_up_now(&lease.longest_claim(), &residue, timeout);
        }
        self.report_ended(ended, None);
    }

    /// Completes the releases of these locks that run in the background, so that an acquisition
    /// does not find a lock held by its own manager. Gives up after half an operation timeout, or
    /// when one cannot be completed.
    pub(super) fn complete_releases<'a>(&self, keys: impl IntoIterator<Item = &'a LockKey>) {
        let deadline = clock::now().saturating_add(self.operation_timeout() / 2);
        let pending = |key: &LockKey| self.cleaner.pending_releases(key.lock_key());
        for lease in keys.into_iter().flat_map(pending) {
            let release = || self.backend.complete_release(&lease, deadline);
            if self.observer.shield(release).is_err() {
                return;
            }
            self.cleaner.on_completed(&lease);
        }
    }

    /// Like [`release`](Self::release), for a caller that does not need the outcome. Does not wait
    /// if the release may run in the background. A lock that is known to be lost is not released
    /// again.
    pub(crate) fn give_up(
        &self,
        held: HeldLock,
        in_background: bool,
        timeout: Duration,
    ) -> Result<()> {
        let _time = self.time.enter();
        let is_held = held.lease.is_held(clock::now());
        report_loss(&self.observer, &held.lease);
        match held.lease.ended() {
            None if is_held && in_background && self.backend.releases_in_background() => {
                self.release_in_background(held, timeout);
                Ok(())
            }
            None if is_held => self.release(held, timeout).map(drop),
            None | Some(LeaseEnd::Lost(LockLost::Expired | LockLost::MaxHold)) => {
                // A renewal may have been applied without a reply, and the first request may still
                // be applied.
                let residue = self.backend.lease_residue(&held.lease);
                self.abandon(&held.lease.longest_claim(), residue, timeout);
                held.span.end("lost");
                Ok(())
            }
            Some(_) => {
                held.span.end("lost");
                Ok(())
            }
        }
    }

    /// Releases the lock of a lease. Failed releases are retried in the background.
    pub(super) fn release_lease(
        &self,
        lease: &Lease,
        was_held: bool,
        timeout: Duration,
    ) -> Result<Released> {
        let deadline = clock::now().saturating_add(timeout);
        self.observer.shield(|| {
            let report = self.backend.release_lease(lease, was_held, deadline);
            self.conclude_release(lease, was_held, report)
        })
    }

    pub(super) fn conclude_release(
        &self,
        lease: &Lease,
        was_held: bool,
        ReleaseReport { result, residues }: ReleaseReport,
    ) -> Result<Released> {
        let mut then = match residues.is_empty() {
            false => RETRIED,
            true if self.releases_in_background() => "",
            true => ENDS_WITH_CONNECTION,
        };
        for residue in residues {
            // After a shutdown nothing runs in the background, and the lock is left to expire.
            if self.cleaner.clean_up(&lease.longest_claim(), residue).is_err() {
                then = LEFT_TO_EXPIRE;
            }
        }
        match result {
            // The server keeps a lock for longer than its lease lasts.
            Ok(Released::Released) if !was_held => Ok(Released::Gone),
            result => {
                result.map_err(|error| self.release_error(error, &lease.claim.key).advising(then))
            }
        }
    }

    fn release_error(&self, error: BackendError, key: &LockKey) -> LockError {
        self.backend.lock_error(error, Action::Release, Some(key.name()))
    }

    /// Releases a lock held under `id`, in this or another process.
    pub(super) fn release_unregistered(&self, key: &LockKey, id: &str) -> Result<Released> {
        let _time = self.time.enter();
        self.release_id(key, id.as_bytes(), false, self.backend.operation_deadline())
    }

    /// Force-releases the lock if its holder has this id.
    pub(crate) fn force_release_if(&self, key: &LockKey, id: &str) -> Result<Released> {
        let _time = self.time.enter();
        let deadline = self.backend.operation_deadline();
        match self.release_id(key, id.as_bytes(), false, deadline)? {
            // The holder's id is not UTF-8, and `id` is the text shown for it. Compare the bytes
            // instead.
            Released::OwnedByOther(holder)
                if holder.id() == id && holder.id_bytes() != id.as_bytes() =>
            {
                self.release_id(key, holder.id_bytes(), false, deadline)
            }
            released => Ok(released),
        }
    }

    fn release_id(
        &self,
        key: &LockKey,
        id: &[u8],
        was_held: bool,
        deadline: Moment,
    ) -> Result<Released> {
        let released = self.backend.release_id(key, id, was_held, deadline);
        released.map_err(|error| self.release_error(error, key))
    }

    /// Force-releases the lock, whichever holders the servers report. Returns whether a lock was
    /// released.
    pub(crate) fn force_release(&self, key: &LockKey) -> Result<bool> {
        let _time = self.time.enter();
        let deadline = self.backend.operation_deadline();
        // Inspecting takes at most half of the time, which leaves the rest for the release.
        let inspect_until = clock::now().saturating_add(self.operation_timeout() / 2);
        let reported = || self.backend.reported_ids(key, inspect_until);
        let Some(ids) = self.look(key, Action::Release, reported)? else { return Ok(false) };
        // Release by id: if a reply is lost, the retry must not affect the next holder. All members
        // of a group are released by its name, and only once.
        // Each but the last gets half of the time: over several nodes, one may not reply.
        let release = |(index, id): (usize, &Vec<u8>)| {
            let until = if index + 1 < ids.len() { deadline.halfway() } else { deadline };
            self.release_id(key, id, true, until)
        };
        let outcomes: Vec<_> = ids.iter().enumerate().map(release).collect();
        // If one release succeeded, its id was the only possible holder. The other outcomes do not
        // matter.
        if outcomes.iter().any(|outcome| matches!(outcome, Ok(Released::Released))) {
            return Ok(true);
        }
        outcomes.into_iter().find_map(Result::err).map_or(Ok(false), Err)
    }

    /// Cleans up what an abandoned claim may have left. Takes at most `timeout`.
    pub(super) fn abandon(&self, claim: &Claim, residue: Residue, timeout: Duration) {
        let cleaned_up = self.observer.shield(|| self.cleaner.clean_up(claim, residue));
        if let Err(residue) = cleaned_up {
            // After a shutdown, nothing runs in the background, so this is the only try.
            self.clean_up_now(claim, &residue, timeout);
        }
    }

    fn clean_up_now(&self, claim: &Claim, residue: &Residue, timeout: Duration) {
        let until = clock::now().saturating_add(timeout);
        if let Err(error) = self.backend.clean_up_once(claim, residue, until) {
            log_safely!(debug, "could not clean up {:?}: {error}; it is left to expire", claim.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_release_says_what_becomes_of_the_lock() {
        let refused = || LockError::Refused {
            action: Action::Release,
            name: Some("x".into()),
            server: "h".into(),
            code: "OOM".into(),
            message: "no".into(),
            advice: RETRIED,
        };
        let text = refused().to_string();
        assert!(text.contains("refused with OOM no (free memory, or raise maxmemory)"), "{text}");
        assert!(text.ends_with("; its manager retries the release until the lock expires"));
        let text = without_retries(refused()).to_string();
        assert!(text.ends_with("); the lock is left to expire"), "{text}");
    }
}
