//! How locks are acquired, and their leases registered with the renewer.

use std::{sync::Arc, time::Duration};

use super::{
    HeldLock, Manager,
    local_handover::{HandedOver, LocalTurn},
};
use crate::{
    acquire::WaitTerms,
    backend::{Feature, ReservedPlaces},
    config::{LockOptions, LockParams},
    core::{
        claim::{Claim, Grant},
        id::generate_lock_id,
        key::LockKey,
        kind::LockKind,
        lease::Lease,
        lock_lost::LockLost,
    },
    error::{LockError, Result},
    local::{LocalHold, Representative},
    observe::{HoldSpan, WaitSpan, event::AcquiredEvent},
    renew::{Registration, RenewalPlan},
    sys::clock::{self, Moment},
};

/// What the caller will hold a lock through.
#[derive(Clone, Copy)]
pub(crate) enum HeldThrough<'a> {
    /// A guard of its own.
    Guard,
    /// One guard for several locks. The places are what the call has reserved for them.
    MultiGuard(&'a ReservedPlaces),
    /// Only its id. So no other lock of the process may have that id, and the lock is not handed
    /// over inside the process.
    Id,
}

/// A granted lock.
pub(super) struct Acquired {
    pub(super) claim: Claim,
    pub(super) grant: Grant,
    pub(super) waited: Duration,
    /// Another holder was reported at least once.
    pub(super) contended: bool,
    /// The lock may be handed over inside the process.
    pub(super) representative: Option<Representative<HandedOver>>,
}

/// A granted lock whose lease is registered, and which has not been reported yet.
pub(super) struct Registered {
    lease: Arc<Lease>,
    /// `None` if the manager was shut down meanwhile.
    registration: Option<Registration>,
    plan: RenewalPlan,
    local: Option<LocalHold<HandedOver>>,
    waited: Duration,
    contended: bool,
}

impl Manager {
    /// Acquires a lock of this kind, which must be [possible](Self::check_kind) here, and registers
    /// its lease with the renewer.
    pub(crate) fn acquire(
        &self,
        kind: LockKind,
        name: &str,
        options: &LockOptions,
        through: HeldThrough<'_>,
    ) -> Result<HeldLock> {
        let _time = self.time.enter();
        let params = self.config.resolve(options)?;
        let acquired = self.acquire_key(kind, self.key(name)?, &params, through);
        acquired.inspect_err(|error| self.await_shutdown_after(error))
    }

    pub(super) fn acquire_key(
        &self,
        kind: LockKind,
        key: LockKey,
        params: &LockParams,
        through: HeldThrough<'_>,
    ) -> Result<HeldLock> {
        let (places, is_local) = match through {
            HeldThrough::Guard => (None, true),
            HeldThrough::MultiGuard(places) => (Some(places), true),
            HeldThrough::Id => (None, false),
        };
        let is_kept = !params.hold_at_least.is_zero();
        if is_kept {
            self.check_feature(Feature::Keeping(kind))?;
        }
        let ttl = params.ttl.max(params.hold_at_least);
        let claim = Claim { key, id: generate_lock_id(), ttl, kind, token: 0 };
        let (name, observer) = (claim.key.name(), &self.observer);
        // Before the attempt is counted: a test that sees it may advance the clock at once.
        let since = clock::now();
        observer.attempted(name, &claim.id, params.wait);
        let wait_span = WaitSpan::begin(name, &claim.id);
        let time_limit =
            params.wait.unwrap_or(Duration::MAX).saturating_add(self.operation_timeout());
        let call_deadline = since.saturating_add(time_limit);
        let left = || self.time_left().min(call_deadline.duration_since(clock::now()));
        let is_local = is_local && !is_kept;
        let turn = match self.acquirer.rejection(&claim, false) {
            Some(error) => Err(error),
            None => self.await_local_turn(&claim, params, is_local, since),
        };
        let (representative, waited_locally) = match turn {
            Ok(LocalTurn::Taken(handed)) => {
                let held = self.take_over(handed, &claim, wait_span);
                return self.ensure_held(held, left());
            }
            Ok(LocalTurn::Asks { representative, has_waited }) => {
                self.complete_releases([&claim.key]);
                (representative, has_waited)
            }
            Err(error) => {
                observer.not_acquired(name, &claim.id, wait_span.end("not acquired"), &error);
                return Err(error);
            }
        };
        let terms = WaitTerms {
            since,
            wait: params.wait,
            cancel: params.cancel.as_ref(),
            places,
            outage_max: params.ttl,
            whole_ttl: is_kept,
            is_first_hold: &|id| self.renewer.is_first_hold(id),
            on_outage: &|| representative.iter().for_each(Representative::scatter),
        };
        let (grant, contended) = match observer.shield(|| self.acquirer.run(&claim, terms)) {
            Ok(granted) => granted,
            Err(failed) => {
                if let Some(residue) = failed.residue {
                    self.abandon(&claim, residue, left());
                }
                // User code runs next. Other threads must not depend on this one meanwhile.
                drop(representative);
                observer.not_acquired(
                    name,
                    &claim.id,
                    wait_span.end("not acquired"),
                    &failed.error,
                );
                return Err(failed.error);
            }
        };
        let waited = clock::now().duration_since(since);
        let contended = contended || waited_locally;
        let representative = representative.filter(|_| is_local);
        let acquired = Acquired { claim, grant, waited, contended, representative };
        let registered = self.register(acquired, params);
        // A subscriber may block.
        wait_span.end("acquired");
        self.report_held(registered, left())
    }

    /// Has the lease of a granted lock renewed from now on. Calls no user code.
    pub(super) fn register(&self, acquired: Acquired, params: &LockParams) -> Registered {
        let Acquired { claim, grant, waited, contended, representative } = acquired;
        let is_kept = !params.hold_at_least.is_zero();
        let plan = RenewalPlan {
            renew: params.renew,
            provisional: grant.provisional,
            hold_until: hold_until(params),
        };
        let granted_at = grant.since;
        let mut lease = Lease::new(claim, grant, clock::now());
        lease.is_released_in_background = params.release_in_background;
        if is_kept {
            lease.set_ttl(params.ttl);
            lease.keep_until = clock::now().saturating_add(params.hold_at_least);
        }
        let lease = Arc::new(lease);
        let local = representative.map(|one| one.on_granted(granted_at, lease.deadline()));
        let registration =
            self.renewer.register(&lease, plan).inspect(|_| self.backend.on_registered(&lease));
        Registered { lease, registration, plan, local, waited, contended }
    }

    /// Reports a lock whose lease has been registered. Releases it within `timeout` if the manager
    /// was shut down, or if the lease has ended meanwhile.
    pub(super) fn report_held(
        &self,
        registered: Registered,
        timeout: Duration,
    ) -> Result<HeldLock> {
        let Registered { lease, registration, plan, local, waited, contended } = registered;
        let observer = &self.observer;
        let (lock, id, token) = (lease.claim.key.name(), &lease.claim.id, lease.token());
        match registration {
            Some(registration) => {
                let span = HoldSpan::begin(lock, id, token.0);
                observer.acquired(AcquiredEvent { lock, id, token, waited, contended });
                let held = HeldLock { lease: lease.clone(), registration, span, plan, local };
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

    /// Waits for the shutdown that has ended an acquisition with this error.
    pub(super) fn await_shutdown_after(&self, error: &LockError) {
        if matches!(error, LockError::Shutdown) {
            self.await_shutdown();
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
        let error = match LockError::not_held(&held.lease) {
            LockError::Lost { why: LockLost::Shutdown, .. } => LockError::Shutdown,
            lost => lost,
        };
        // An error of the release changes nothing: the lease has ended.
        let in_background = held.lease.is_released_in_background;
        let _ = self.give_up(held, in_background, timeout);
        Err(error)
    }
}

/// Until when a lock that is held from now on may be held.
pub(super) fn hold_until(params: &LockParams) -> Moment {
    params.max_hold.map_or(Moment::NEVER, |limit| clock::now().saturating_add(limit))
}
