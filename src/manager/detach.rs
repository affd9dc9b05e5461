//! Locks that pass from one holder to its successor, perhaps in another process.

use std::{sync::Arc, time::Duration};

use super::{HeldLock, Manager, acquire::Acquired};
use crate::{
    backend::{AdoptReport, Feature, Passed},
    config::LockOptions,
    core::{claim::Claim, detached::Detached, id::generate_lock_id, lease::Lease},
    error::{Action, LockError, Result},
    observe::event::DetachedEvent,
    renew::Registration,
    sys::clock::{self, Moment},
};

impl Manager {
    /// Renews a lease for the last time, if it can be detached.
    pub(crate) fn prepare_detach(
        &self,
        lease: &Arc<Lease>,
        registration: &Registration,
    ) -> Result<()> {
        let _time = self.time.enter();
        self.check_feature(Feature::Adoption)?;
        if lease.keep_until != Moment::default() {
            let reason = "detach and hold_at_least exclude each other; acquire the lock without \
                          hold_at_least";
            return Err(LockError::InvalidOptions { reason: reason.into() });
        }
        self.renew(&[(lease, registration)])?;
        // A copy of the request that acquired the lock can still be applied. It would acquire the
        // lock again once the successor has released it.
        clock::sleep_until(lease.in_flight.until());
        Ok(())
    }

    /// Ends a lease, and leaves its lock on the server.
    pub(crate) fn detach(&self, held: HeldLock) -> Result<Detached> {
        let _time = self.time.enter();
        let HeldLock { lease, registration, span, .. } = held;
        let Claim { key, id, kind, .. } = &lease.claim;
        if !self.end_and_report(&lease, registration) {
            return Err(self.give_up_lost(&lease, span, lease.why_not_held()));
        }
        let (lock, token, held) = (key.name(), lease.token(), lease.held_for(clock::now()));
        self.observer.detached(DetachedEvent { lock, id, token, held });
        span.end("detached");
        let (name, id) = (key.name().to_owned(), id.clone());
        Ok(Detached { name, id, kind: *kind, ttl: lease.ttl() })
    }

    /// Takes over a lock that its holder has detached.
    pub(crate) fn adopt(&self, detached: &Detached) -> Result<HeldLock> {
        let _time = self.time.enter();
        let Detached { name, id: former, kind, ttl } = detached;
        let params = self.config.resolve(&LockOptions::new().ttl(*ttl))?;
        self.check_feature(Feature::Adoption)?;
        let (key, id) = (self.key(name)?, generate_lock_id());
        let claim = Claim { key, id, ttl: *ttl, kind: *kind, token: 0 };
        let observer = &self.observer;
        observer.attempted(name, &claim.id, Some(Duration::ZERO));
        let (began, deadline) = (clock::now(), self.backend.operation_deadline());
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
        let (waited, timeout) = (waited(), self.time_left());
        let acquired = Acquired { claim, grant, waited, contended: false, representative: None };
        self.report_held(self.register(acquired, &params), timeout)
    }
}
