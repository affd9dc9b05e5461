//! How several locks are acquired in one request.

use std::time::Duration;

use super::{HeldLock, Manager, acquire::Acquired};
use crate::{
    config::LockOptions,
    core::{
        cancel::CancelToken, claim::Claim, id::generate_lock_ids, key::LockKey, kind::LockKind,
    },
    error::{LockError, Result},
    observe::{WaitSpan, event::TimedOutEvent},
    sys::clock,
};

impl Manager {
    /// Acquires the locks of all these names in one request. Returns `None` if they must be
    /// acquired one after the other: because the call may wait, or because the backend cannot do
    /// otherwise.
    pub(crate) fn acquire_at_once(
        &self,
        names: &[&str],
        options: &LockOptions,
    ) -> Option<Result<Vec<HeldLock>>> {
        let _time = self.time.enter();
        let is_at_once = names.len() > 1 && options.wait_limit().is_some_and(|wait| wait.is_zero());
        if !is_at_once {
            return None;
        }
        match names.iter().map(|name| self.key(name)).collect::<Result<Vec<_>>>() {
            Ok(keys) if !self.backend.acquires_all(&keys) => None,
            Ok(keys) => Some(self.acquire_keys(keys, options)),
            Err(error) => Some(Err(error)),
        }
    }

    fn acquire_keys(&self, keys: Vec<LockKey>, options: &LockOptions) -> Result<Vec<HeldLock>> {
        let params = self.config.resolve(options)?;
        let (observer, ttl, kind) = (&self.observer, params.ttl, LockKind::Mutex);
        let ids = generate_lock_ids(keys.len());
        let claim = |(key, id)| Claim { key, id, ttl, kind, token: 0 };
        let claims: Vec<Claim> = keys.into_iter().zip(ids).map(claim).collect();
        let begin = |Claim { key, id, .. }: &Claim| {
            observer.attempted(key.name(), id, params.wait);
            WaitSpan::begin(key.name(), id)
        };
        let spans: Vec<WaitSpan> = claims.iter().map(begin).collect();
        let began = clock::now();
        let call_deadline = began.saturating_add(self.operation_timeout().saturating_mul(2));
        let left = || self.time_left().min(call_deadline.duration_since(clock::now()));
        let refusal = claims.first().and_then(|claim| {
            let is_cancelled = params.cancel.as_ref().is_some_and(CancelToken::is_cancelled);
            let cancelled = || LockError::Cancelled {
                name: claim.key.name().to_owned(),
                waited: Duration::ZERO,
            };
            is_cancelled.then(cancelled).or_else(|| self.acquirer.outage(claim))
        });
        if let Some(error) = refusal {
            self.report_not_acquired(&claims, spans, &error);
            return Err(error);
        }
        self.complete_releases(claims.iter().map(|claim| &claim.key), began);
        let grants = match observer.shield(|| self.acquirer.run_all(&claims)) {
            Ok(grants) => grants,
            Err(failed) => {
                if let Some(residue) = failed.residue {
                    for claim in &claims {
                        self.abandon(claim, residue.clone(), left());
                    }
                }
                self.report_not_acquired(&claims, spans, &failed.error);
                return Err(failed.error);
            }
        };
        let granted = claims.into_iter().zip(grants).zip(spans);
        let acquired = granted.map(|((claim, grant), span)| {
            let waited = span.end("acquired");
            Acquired { claim, grant, waited, contended: false, representative: None }
        });
        // A slow event handler of one lock must not cost the others their leases.
        let registered: Vec<_> =
            acquired.map(|acquired| self.register(acquired, &params)).collect();
        // Even if one cannot be held any more, the others must become locks that can be released.
        let held = registered.into_iter().map(|lock| self.report_held(lock, left()));
        let (held, failed): (Vec<_>, Vec<_>) = held.partition(Result::is_ok);
        let held: Vec<HeldLock> = held.into_iter().flatten().collect();
        match failed.into_iter().find_map(Result::err) {
            None => Ok(held),
            Some(error) => {
                for lock in held {
                    // What cannot be released now is released in the background.
                    let _ = self.release_later(lock, left());
                }
                Err(error)
            }
        }
    }

    /// Each attempt that was reported must end in a report. Only one of the locks need be held.
    fn report_not_acquired(&self, claims: &[Claim], spans: Vec<WaitSpan>, error: &LockError) {
        for (Claim { key, id, .. }, span) in claims.iter().zip(spans) {
            let (lock, waited) = (key.name(), span.end("not acquired"));
            match error {
                LockError::Held { name, .. } if name != lock => {
                    self.observer.timed_out(TimedOutEvent { lock, id, waited, holder: None });
                }
                _ => self.observer.not_acquired(lock, id, waited, error),
            }
        }
    }
}
