//! How locks are acquired, and their leases registered with the renewer.

use std::{sync::Arc, time::Duration};

use super::{HeldLock, ManagerInner};
use crate::{
    acquire::WaitTerms,
    backend::Feature,
    config::{LockOptions, LockParams},
    core::{
        claim::{Claim, Grant},
        id::generate_lock_id,
        kind::LockKind,
        lease::Lease,
        lock_lost::LockLost,
    },
    error::{LockError, Result},
    observe::{HoldSpan, WaitSpan, event::AcquiredEvent},
    renew::RenewalPlan,
    sys::clock::{self, Moment},
};

/// A granted lock.
pub(super) struct Acquired {
    pub(super) claim: Claim,
    pub(super) grant: Grant,
    pub(super) waited: Duration,
    /// Another holder was reported at least once.
    pub(super) contended: bool,
}

impl ManagerInner {
    /// Acquires a lock, and registers its lease with the renewer.
    pub(crate) fn acquire(&self, name: &str, options: &LockOptions) -> Result<HeldLock> {
        self.acquire_as(LockKind::Mutex, name, options)
    }

    /// Acquires a lock of this kind, which must be [possible](Self::check_kind) here.
    pub(crate) fn acquire_as(
        &self,
        kind: LockKind,
        name: &str,
        options: &LockOptions,
    ) -> Result<HeldLock> {
        let _time = self.time.enter();
        let params = self.config.resolve(options)?;
        let is_kept = !params.hold_at_least.is_zero();
        if is_kept {
            self.check_feature(Feature::Keeping(kind))?;
        }
        let ttl = params.ttl.max(params.hold_at_least);
        let claim = Claim { key: self.key(name)?, id: generate_lock_id(), ttl, kind };
        self.complete_releases(&claim.key);
        let observer = &self.observer;
        observer.attempted(name, &claim.id, params.wait);
        let wait_span = WaitSpan::begin(name, &claim.id);
        let time_limit =
            params.wait.unwrap_or(Duration::MAX).saturating_add(self.operation_timeout());
        let call_deadline = clock::now().saturating_add(time_limit);
        let left = || self.time_left().min(call_deadline.duration_since(clock::now()));
        let terms = WaitTerms {
            wait: params.wait,
            cancel: params.cancel.as_ref(),
            outage_max: params.ttl,
            whole_ttl: is_kept,
        };
        let (grant, contended) = match observer.shield(|| self.acquirer.run(&claim, terms)) {
            Ok(granted) => granted,
            Err(failed) => {
                if let Some(residue) = failed.residue {
                    self.abandon(&claim, residue, left());
                }
                observer.not_acquired(
                    name,
                    &claim.id,
                    wait_span.end("not acquired"),
                    &failed.error,
                );
                return Err(failed.error);
            }
        };
        self.hold(
            Acquired { claim, grant, waited: wait_span.end("acquired"), contended },
            &params,
            left(),
        )
    }

    /// Makes a granted lock a held one, whose lease is registered with the renewer. Releases it
    /// within `timeout` if that is not possible.
    pub(super) fn hold(
        &self,
        acquired: Acquired,
        params: &LockParams,
        timeout: Duration,
    ) -> Result<HeldLock> {
        let Acquired { claim, grant, waited, contended } = acquired;
        let is_kept = !params.hold_at_least.is_zero();
        let observer = &self.observer;
        let span = HoldSpan::begin(claim.key.name(), &claim.id, grant.token.0);
        let plan = RenewalPlan {
            renew: params.renew,
            provisional: grant.provisional,
            hold_until: params
                .max_hold
                .map_or(Moment::NEVER, |limit| clock::now().saturating_add(limit)),
        };
        let mut lease = Lease::new(claim, grant, clock::now());
        lease.is_released_in_background = params.release_in_background;
        if is_kept {
            lease.set_ttl(params.ttl);
            lease.keep_until = clock::now().saturating_add(params.hold_at_least);
        }
        let lease = Arc::new(lease);
        let (lock, id, token) = (lease.claim.key.name(), &lease.claim.id, lease.token);
        match self.renewer.register(&lease, plan) {
            Some(registration) => {
                observer.acquired(AcquiredEvent { lock, id, token, waited, contended });
                let held = HeldLock { lease: lease.clone(), registration, span, plan };
                // The last act: a pause since the grant, or a slow event handler, may have
                // outlasted the lease.
                self.ensure_held(held, timeout)
            }
            None => {
                // The manager was shut down meanwhile. Try to release the lock. If that fails, the
                // lock expires.
                let _ = self.release_lease(&lease, true, timeout);
                observer.not_acquired(lock, id, waited, &LockError::Shutdown);
                Err(LockError::Shutdown)
            }
        }
    }

    /// Checks that there can be locks of this kind, under this name.
    pub(crate) fn check_kind(&self, kind: LockKind, name: &str) -> Result<()> {
        self.key(name)?;
        self.check_feature(Feature::Kind(kind))
    }

    /// Checks that the backend can do this.
    pub(super) fn check_feature(&self, feature: Feature) -> Result<()> {
        let refusal = self.backend.refusal_of(feature);
        refusal.map_or(Ok(()), |reason| Err(LockError::InvalidOptions { reason: reason.into() }))
    }

    pub(super) fn ensure_held(&self, held: HeldLock, timeout: Duration) -> Result<HeldLock> {
        if held.lease.is_held(clock::now()) {
            return Ok(held);
        }
        let name = held.lease.claim.key.name().to_owned();
        let why = held.lease.why_not_held();
        // An error of the release changes nothing: the lease has ended.
        let _ = self.release_on_drop(held, timeout);
        Err(if why == LockLost::Shutdown {
            LockError::Shutdown
        } else {
            LockError::Lost { name, why }
        })
    }
}
