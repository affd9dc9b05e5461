//! Leaving a lock to another process, and taking it over there.

use std::time::Duration;

use super::{HeldLock, ManagerInner};
use crate::{
    backend::Adopted,
    config::LockOptions,
    core::{
        claim::Claim,
        id::{LockId, generate_lock_id},
        kind::LockKind,
        lease::{Lease, LeaseEnd},
        lock_lost::LockLost,
    },
    error::{Action, LockError, Result},
    observe::{WaitSpan, event::ReleasedEvent},
    renew::{Registration, report_loss},
    sys::clock,
};

impl ManagerInner {
    /// Checks that locks can be adopted, and renews this one.
    pub(crate) fn prepare_detaching(
        &self,
        lease: &Lease,
        registration: &Registration,
    ) -> Result<()> {
        self.check_adoption()?;
        if lease.claim.kind != LockKind::Mutex {
            let reason = "only a mutex can be detached, not a read-write lock or permits";
            return Err(LockError::InvalidOptions { reason: reason.into() });
        }
        self.renew(lease, registration)
    }

    fn check_adoption(&self) -> Result<()> {
        let refusal = self.backend.refusal_of_adoption();
        refusal.map_or(Ok(()), |reason| Err(LockError::InvalidOptions { reason: reason.into() }))
    }

    /// Ends the lease, and leaves the lock on the server until its ttl has run out.
    pub(crate) fn detach(&self, held: HeldLock) -> Result<()> {
        let _time = self.time.enter();
        let HeldLock { lease, registration, span, .. } = held;
        let was_held = lease.is_held(clock::now()) && lease.end(LeaseEnd::Released);
        drop(registration);
        report_loss(&self.observer, &lease);
        let (lock, id, token) = (lease.claim.key.name(), &lease.claim.id, lease.token);
        if !was_held {
            span.end("lost");
            return Err(LockError::Lost { name: lock.to_owned(), why: lease.why_not_held() });
        }
        let held = lease.held_for(clock::now());
        self.observer.released(ReleasedEvent { lock, id, token, held, confirmed: false });
        span.end("released");
        Ok(())
    }

    /// Takes over the lock that is held under the id `former`.
    pub(crate) fn adopt(&self, name: &str, former: &LockId) -> Result<HeldLock> {
        let _time = self.time.enter();
        let params = self.config.resolve(&LockOptions::new())?;
        self.check_adoption()?;
        let claim = Claim {
            key: self.key(name)?,
            id: generate_lock_id(),
            ttl: params.ttl,
            kind: LockKind::Mutex,
        };
        self.observer.attempted(name, &claim.id, Some(Duration::ZERO));
        let wait_span = WaitSpan::begin(name, &claim.id);
        let deadline = self.operation_deadline();
        let left = || deadline.duration_since(clock::now());
        let adopted = self.observer.shield(|| self.backend.adopt(&claim, former, deadline));
        let error = match adopted {
            Adopted::Granted(grant) => {
                let waited = wait_span.end("acquired");
                return self.hold(claim, grant, &params, (waited, false), left);
            }
            Adopted::Gone => LockError::Lost { name: name.to_owned(), why: LockLost::Gone },
            Adopted::HeldByOther(holder) => {
                let server = self.backend.label().clone();
                LockError::Held { name: name.to_owned(), holder, server }
            }
            Adopted::Failed(error, residue) => {
                if let Some(residue) = residue {
                    self.abandon(&claim, residue, left());
                }
                self.backend.lock_error(error, Action::Acquire, Some(name))
            }
        };
        self.observer.not_acquired(name, &claim.id, wait_span.end("not acquired"), &error);
        Err(error)
    }
}
