//! Locks that pass from one holder to its successor, perhaps in another process.

use std::{sync::Arc, time::Duration};

use super::{HeldLock, Manager};
use crate::{
    backend::{AdoptReport, Feature, Passed},
    core::{
        claim::Claim,
        detached::Detached,
        id::generate_lock_id,
        lease::{Lease, LeaseEnd},
    },
    error::{Action, LockError, Result},
    observe::{HoldSpan, event::AcquiredEvent},
    renew::{Registration, RenewalPlan, report_loss},
    sys::clock::{self, Moment},
};

impl Manager {
    /// Renews a lease for the last time, if it can be detached.
    pub(crate) fn prepare_detach(&self, lease: &Lease, registration: &Registration) -> Result<()> {
        self.check_feature(Feature::Passing)?;
        if lease.keep_until != Moment::default() {
            let reason = "a lock that is held at least for a time cannot be detached; acquire it \
                          without hold_at_least";
            return Err(LockError::InvalidOptions { reason: reason.into() });
        }
        // A copy of the request that acquired the lock can still be applied. It would acquire the
        // lock again once the successor has released it.
        clock::sleep_until(lease.in_flight.until());
        self.renew(lease, registration)
    }

    /// Ends a lease, and leaves its lock on the server.
    pub(crate) fn detach(&self, held: HeldLock) -> Result<Detached> {
        let _time = self.time.enter();
        let HeldLock { lease, registration, span, .. } = held;
        let was_held = lease.is_held(clock::now()) && lease.end(LeaseEnd::Released);
        drop(registration);
        report_loss(&self.observer, &lease);
        let Claim { key, id, kind, .. } = &lease.claim;
        if !was_held {
            span.end("lost");
            let (name, why) = (key.name().to_owned(), lease.why_not_held());
            return Err(LockError::Lost { name, why });
        }
        span.end("detached");
        let (name, id) = (key.name().to_owned(), id.clone());
        Ok(Detached { name, id, kind: *kind, ttl: lease.ttl() })
    }

    /// Takes over a lock that its holder has detached.
    pub(crate) fn adopt(&self, detached: &Detached) -> Result<HeldLock> {
        let _time = self.time.enter();
        let Detached { name, id: former, kind, ttl } = detached;
        self.config.check_ttl(*ttl)?;
        self.check_feature(Feature::Passing)?;
        let (key, id) = (self.key(name)?, generate_lock_id());
        let claim = Claim { key, id, ttl: *ttl, kind: *kind, token: 0 };
        let observer = &self.observer;
        observer.attempted(name, &claim.id, Some(Duration::ZERO));
        let (began, deadline) = (clock::now(), self.operation_deadline());
        let waited = || clock::now().duration_since(began);
        let AdoptReport { result, residue } =
            observer.shield(|| self.backend.adopt(former, &claim, deadline));
        if let Some(residue) = residue {
            self.abandon(&claim, residue, self.time_left());
        }
        let grant = match result {
            Ok(Passed::To(grant)) => Ok(grant),
            Ok(Passed::Lost(why)) => Err(LockError::Lost { name: name.clone(), why }),
            Err(error) => Err(self.backend.lock_error(error, Action::Acquire, Some(name))),
        };
        let grant = grant.inspect_err(|error| {
            observer.not_acquired(name, &claim.id, waited(), error);
        })?;
        let span = HoldSpan::begin(name, &claim.id, grant.token.0);
        let plan = RenewalPlan { renew: true, provisional: false, hold_until: Moment::NEVER };
        let lease = Arc::new(Lease::new(claim, grant, clock::now()));
        match self.renewer.register(&lease, plan) {
            Some(registration) => {
                observer.acquired(AcquiredEvent {
                    lock: name,
                    id: &lease.claim.id,
                    token: lease.token,
                    waited: waited(),
                    contended: false,
                });
                let held = HeldLock { lease, registration, span, plan, local: None };
                self.ensure_held(held, self.time_left())
            }
            None => {
                let _ = self.release_lease(&lease, true, self.time_left());
                observer.not_acquired(name, &lease.claim.id, waited(), &LockError::Shutdown);
                Err(LockError::Shutdown)
            }
        }
    }
}
