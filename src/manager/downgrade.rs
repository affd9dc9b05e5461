//! Turning a write lock into a read lock.

use std::sync::Arc;

use super::{
    HeldLock, Manager,
    release::{EndedLock, RETRIED},
};
use crate::{
    backend::Passed,
    core::{claim::Claim, kind::LockKind, lease::Lease, lock_lost::LockLost},
    error::{Action, LockError, Result},
    renew::RenewalPlan,
    sys::clock,
};

impl Manager {
    /// Ends the lease of the writer, and begins one of a reader with the same id and token. On the
    /// server there is no moment between them.
    pub(crate) fn downgrade(&self, held: HeldLock) -> Result<HeldLock> {
        let _time = self.time.enter();
        let HeldLock { lease, registration, span, plan, .. } = held;
        let held_until = lease.deadline();
        // The renewal must end first: it would not find the writer's id, and report a loss.
        let was_held = self.end_and_report(&lease, registration);
        if !was_held {
            return Err(self.give_up_lost(&lease, span, lease.why_not_held()));
        }
        let (kind, ttl) = (LockKind::Read, lease.ttl());
        let claim = Claim { kind, ttl, ..lease.claim.clone() };
        let name = claim.key.name();
        let deadline = self.backend.operation_deadline();
        let grant = match self.observer.shield(|| self.backend.downgrade(&lease, deadline)) {
            Ok(Passed::To(grant)) => grant,
            Ok(Passed::Lost(why)) => {
                let now = clock::now();
                // The lease has expired before a server was asked.
                let why = if now >= held_until { LockLost::Expired } else { why };
                let held_for = lease.held_for(now);
                self.observer.lost(name, &claim.id, lease.token(), &why, held_for);
                return Err(self.give_up_lost(&lease, span, why));
            }
            Err(error) => {
                // The request may have been carried out.
                let longest = Claim { kind, ..lease.longest_claim() };
                self.abandon(&longest, self.backend.lease_residue(&lease), self.time_left());
                let held_for = lease.held_for(clock::now());
                let ended = EndedLock { lease, span, was_held, held_for };
                self.report_ended(ended, None);
                let error = self.backend.lock_error(error, Action::Release, Some(name));
                return Err(error.advising(RETRIED));
            }
        };
        // A grant to the writer that is still to be confirmed is confirmed by this one.
        let plan = RenewalPlan { provisional: grant.provisional, ..plan };
        let now = clock::now();
        let held_since = now.saturating_sub(lease.held_for(now));
        let mut reader = Lease::new(claim, grant, held_since);
        reader.is_released_in_background = lease.is_released_in_background;
        let lease = Arc::new(reader);
        match self.renewer.register(&lease, plan) {
            Some(registration) => {
                let held = HeldLock { lease, registration, span, plan, local: None };
                self.ensure_held(held, self.time_left())
            }
            None => {
                let outcome = self.release_lease(&lease, true, self.time_left());
                let held_for = lease.held_for(clock::now());
                let ended = EndedLock { lease, span, was_held, held_for };
                self.report_ended(ended, outcome.as_ref().ok());
                Err(LockError::Shutdown)
            }
        }
    }
}
