//! Acquiring a lock: ask, wait for the grant, ask again. Ends with a grant, or with the error that
//! explains why there is none.

mod attempt_loop;
mod circuit_breaker;
mod failures;
mod poll_times;

use std::{sync::Arc, time::Duration};

use self::attempt_loop::Attempt;
pub(crate) use self::circuit_breaker::CircuitBreaker;
use crate::{
    backend::{AcquireRequest, AllOutcome, AllRequest, AllResult, Backend, ReservedPlaces},
    core::{
        cancel::CancelToken,
        claim::{Claim, Grant, Residue},
        validity::request_timeout,
    },
    error::{Action, LockError},
    observe::Observer,
    sys::clock::{self, Moment},
    wait::GrantListener,
};

/// Minimum TTL that is set on another holder's key without one, in milliseconds. Leases are renewed
/// after a third, so a holder with a lease of up to three minutes has set its own TTL again by
/// then.
const REPAIRED_TTL_MIN_MS: u64 = 60_000;

/// What all acquisitions of a manager share.
#[derive(Debug)]
pub(crate) struct Acquirer {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) observer: Arc<Observer>,
    pub(crate) listener: Arc<GrantListener>,
    pub(crate) claim_window: Duration,
    /// A lock key without a TTL is given one. False with an empty prefix, where the key may be
    /// anybody's data.
    pub(crate) repair_ttl: bool,
    /// Makes calls fail fast; `None` if they are to try until their wait ends.
    pub(crate) breaker: Option<CircuitBreaker>,
}

/// How a claim is pursued.
#[derive(Clone, Copy)]
pub(crate) struct WaitTerms<'a> {
    /// Time of the call.
    pub(crate) since: Moment,
    /// Maximum wait from then on; `None` for no limit.
    pub(crate) wait: Option<Duration>,
    pub(crate) cancel: Option<&'a CancelToken>,
    /// What the call has reserved for several locks.
    pub(crate) places: Option<&'a ReservedPlaces>,
    /// Without a limit of the wait, how long to go on while the servers are unavailable.
    pub(crate) outage_max: Duration,
    /// The lock must be granted for its whole ttl, and not for the claim window only.
    pub(crate) whole_ttl: bool,
    /// Whether the lock with this id is still held by the guard to which the servers granted it.
    pub(crate) is_first_hold: &'a dyn Fn(&str) -> bool,
    /// Called when the servers are unreachable, and the claim is pursued nevertheless.
    pub(crate) on_outage: &'a dyn Fn(),
}

/// An acquisition that ended without the lock.
#[derive(Debug)]
pub(crate) struct NotAcquired {
    pub(crate) error: LockError,
    /// What the servers may still know of the claim, and must be made to forget.
    pub(crate) residue: Option<Residue>,
}

impl Acquirer {
    /// Acquires the lock. Returns within the maximum wait plus one operation timeout. The flag says
    /// whether the lock was contended.
    pub(crate) fn run(
        &self,
        claim: &Claim,
        terms: WaitTerms<'_>,
    ) -> Result<(Grant, bool), Box<NotAcquired>> {
        self.admit(claim)?;
        let (started, operation_timeout) = (terms.since, self.backend.operation_timeout());
        let WaitTerms { wait, cancel, places, .. } = terms;
        let wait_deadline = wait.map_or(Moment::NEVER, |wait| started.saturating_add(wait));
        let channel = self.backend.channel_for(self.listener.channel(), &claim.key);
        let request = AcquireRequest {
            claim,
            channel: &channel,
            claim_window: self.claim_window.min(claim.ttl),
            repair_ttl_ms: self.repair_ttl_ms(claim),
            wait_deadline,
            call_deadline: wait_deadline.saturating_add(operation_timeout),
            cancel,
            places,
        };
        let mut attempt = Attempt::new(self, request, terms);
        attempt.run().map_err(|error| Box::new(NotAcquired { error, residue: attempt.residue() }))
    }

    /// Acquires the locks of all these claims if all are free. Does not wait.
    pub(crate) fn run_all(
        &self,
        claims: &[Claim],
        call_deadline: Moment,
    ) -> Result<Vec<Grant>, Box<NotAcquired>> {
        let Some(first) = claims.first() else { return Ok(Vec::new()) };
        self.admit(first)?;
        let backend = &self.backend;
        let failed = |error| backend.lock_error(error, Action::Acquire, Some(first.key.name()));
        let repair_ttl_ms = self.repair_ttl_ms(first);
        let request = AllRequest { claims, repair_ttl_ms, call_deadline };
        let AllResult { outcome, residue } = backend.acquire_all(request);
        if let Some(breaker) = &self.breaker {
            match &outcome {
                AllOutcome::Failed(error) => {
                    breaker.on_failure(clock::now(), self.request_timeout(first), error);
                }
                _ => breaker.on_reply(),
            }
        }
        let error = match outcome {
            AllOutcome::Granted(grants) => return Ok(grants),
            AllOutcome::Held { index, holder } => {
                let Claim { key, id, .. } = claims.get(index).unwrap_or(first);
                self.observer.contended(key.name(), id, || (*holder).clone());
                let (name, server) = (key.name().to_owned(), backend.label().clone());
                LockError::Held { name, holder, server }
            }
            AllOutcome::WrongType { index } => {
                backend.wrong_type(&claims.get(index).unwrap_or(first).key)
            }
            AllOutcome::Failed(error) => failed(error),
        };
        Err(Box::new(NotAcquired { error, residue }))
    }

    /// Returns why a call for this claim must fail at once, while the servers are unreachable.
    pub(crate) fn rejection(&self, claim: &Claim, asks_now: bool) -> Option<LockError> {
        let breaker = self.breaker.as_ref()?;
        let probe_time = asks_now.then(|| self.backend.operation_timeout().saturating_mul(2));
        let error = breaker.reject(clock::now(), self.request_timeout(claim), probe_time)?;
        Some(self.backend.lock_error(error, Action::Acquire, Some(claim.key.name())))
    }

    /// Fails if a call for this claim must fail at once. Otherwise the call asks.
    fn admit(&self, claim: &Claim) -> Result<(), Box<NotAcquired>> {
        let rejected = |error| Err(Box::new(NotAcquired { error, residue: None }));
        self.rejection(claim, true).map_or(Ok(()), rejected)
    }

    fn request_timeout(&self, claim: &Claim) -> Duration {
        request_timeout(self.backend.operation_timeout(), claim.ttl)
    }

    /// TTL for another holder's key that has none. That holder's lease is not known here.
    fn repair_ttl_ms(&self, claim: &Claim) -> u64 {
        if self.repair_ttl { claim.ttl_ms().max(REPAIRED_TTL_MIN_MS) } else { 0 }
    }
}
