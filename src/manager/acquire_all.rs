//! How several locks are acquired: in one request, or one after the other.

use std::time::Duration;

use super::{
    HeldLock, HeldThrough, Manager,
    acquire::{Acquired, hold_until},
};
use crate::{
    backend::ReservedPlaces,
    config::{LockOptions, LockParams},
    core::{
        cancel::CancelToken,
        claim::Claim,
        id::{generate_lock_id, generate_lock_ids},
        key::LockKey,
        kind::LockKind,
    },
    error::{Action, LockError, Result},
    observe::{WaitSpan, event::TimedOutEvent},
    sys::clock::{self, Moment},
};

impl Manager {
    /// Acquires the locks of all these names, which are sorted, so that two calls never wait for
    /// each other. Without a wait, all at once if the backend can.
    pub(crate) fn acquire_all(
        &self,
        names: &[&str],
        options: &LockOptions,
    ) -> Result<Vec<HeldLock>> {
        let _time = self.time.enter();
        let params = self.config.resolve(options)?;
        let keys = names.iter().map(|name| self.key(name)).collect::<Result<Vec<_>>>()?;
        let is_at_once = params.wait.is_some_and(|wait| wait.is_zero()) && keys.len() > 1;
        let acquired = if is_at_once && self.backend.acquires_all(&keys) {
            self.acquire_at_once(keys, &params)
        } else {
            self.acquire_in_order(keys, &params)
        };
        acquired.inspect_err(|error| self.await_shutdown_after(error))
    }

    /// Acquires the locks one after the other.
    fn acquire_in_order(&self, keys: Vec<LockKey>, params: &LockParams) -> Result<Vec<HeldLock>> {
        let began = clock::now();
        let until = params.wait.map_or(Moment::NEVER, |wait| began.saturating_add(wait));
        // Before the first lock: calls that keep connections for their locks, while they wait for
        // further connections, could wait for each other.
        let places = self.reserve(&keys, until, params)?;
        let through = HeldThrough::MultiGuard(&places);
        let mut held: Vec<HeldLock> = Vec::with_capacity(keys.len());
        for key in keys {
            let now = clock::now();
            let wait = params.wait.map(|_| until.duration_since(now));
            // Its limit counts from when all are held, because the wait for the others is no hold.
            let one = LockParams { wait, max_hold: None, ..params.clone() };
            // If one is lost already, the call need not wait for the next.
            let lost = held.iter().find(|lock| !lock.lease.is_held(now));
            let acquired = match lost {
                Some(lost) => Err(LockError::not_held(&lost.lease)),
                None => self.acquire_key(LockKind::Mutex, key, &one, through),
            };
            match acquired {
                Ok(lock) => held.push(lock),
                Err(error) => {
                    self.give_back(held);
                    let waits = params.wait != Some(Duration::ZERO);
                    let waited = clock::now().duration_since(began);
                    return Err(if waits { after_wait(error, waited) } else { error });
                }
            }
        }
        let hold_until = hold_until(params);
        for lock in &mut held {
            lock.registration.limit_hold(hold_until);
            lock.plan.hold_until = hold_until;
        }
        Ok(held)
    }

    /// Reserves what the servers need for these locks, which are then acquired one after the other.
    /// Waits until the given time.
    fn reserve(
        &self,
        keys: &[LockKey],
        until: Moment,
        params: &LockParams,
    ) -> Result<ReservedPlaces> {
        let locks = u32::try_from(keys.len()).unwrap_or(u32::MAX);
        if let Some(max) = self.backend.locks_max().filter(|max| locks > *max) {
            let reason = format!(
                "{locks} names need as many connections, and there are at most {max}; raise \
                 MySqlConfig::max_connections, or give fewer names"
            );
            return Err(LockError::InvalidOptions { reason });
        }
        let (since, cancel) = (clock::now(), params.cancel.as_ref());
        self.backend.reserve(locks, until, cancel).map_err(|error| {
            // The first of the names stands for all.
            let name = keys.first().map(LockKey::name).unwrap_or_default();
            let waited = clock::now().duration_since(since);
            let error = if cancel.is_some_and(CancelToken::is_cancelled) {
                LockError::Cancelled { name: name.to_owned(), waited }
            } else {
                self.backend.lock_error(error, Action::Acquire, Some(name))
            };
            let id = generate_lock_id();
            self.observer.attempted(name, &id, params.wait);
            self.observer.not_acquired(name, &id, waited, &error);
            error
        })
    }

    /// Releases locks of a call that failed, in reverse, without waiting. In a database, where each
    /// release waits for its reply, releases all within one operation timeout.
    fn give_back(&self, held: Vec<HeldLock>) {
        let timeout = self.operation_timeout();
        let report = |released| match released {
            Ok(()) | Err(LockError::Shutdown) => {}
            Err(error) => log_safely!(warn, "{error}"),
        };
        if self.backend.releases_in_background() {
            held.into_iter().rev().for_each(|lock| report(self.give_up(lock, true, timeout)));
        } else {
            report(self.release_all_within(held, timeout).map(drop));
        }
    }

    /// Acquires the locks in one request.
    fn acquire_at_once(&self, keys: Vec<LockKey>, params: &LockParams) -> Result<Vec<HeldLock>> {
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
        let call_deadline = began.saturating_add(self.operation_timeout());
        let left = || self.time_left().min(call_deadline.duration_since(clock::now()));
        let refusal = claims.first().and_then(|claim| {
            let is_cancelled = params.cancel.as_ref().is_some_and(CancelToken::is_cancelled);
            let cancelled = || LockError::Cancelled {
                name: claim.key.name().to_owned(),
                waited: Duration::ZERO,
            };
            is_cancelled.then(cancelled).or_else(|| self.acquirer.rejection(claim, false))
        });
        if let Some(error) = refusal {
            self.report_not_acquired(&claims, spans, &error);
            return Err(error);
        }
        self.complete_releases(claims.iter().map(|claim| &claim.key));
        let grants = match observer.shield(|| self.acquirer.run_all(&claims, call_deadline)) {
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
        let waited = clock::now().duration_since(began);
        let acquired = claims.into_iter().zip(grants).map(|(claim, grant)| Acquired {
            claim,
            grant,
            waited,
            contended: false,
            representative: None,
        });
        // A slow event handler of one lock must not cost the others their leases, nor a slow
        // subscriber.
        let registered: Vec<_> = acquired.map(|acquired| self.register(acquired, params)).collect();
        for span in spans {
            span.end("acquired");
        }
        // Even if one cannot be held any more, the others must become locks that can be released.
        let held = registered.into_iter().map(|lock| self.report_held(lock, left()));
        let (held, failed): (Vec<_>, Vec<_>) = held.partition(Result::is_ok);
        let held: Vec<HeldLock> = held.into_iter().flatten().collect();
        match failed.into_iter().find_map(Result::err) {
            None => Ok(held),
            Some(error) => {
                self.give_back(held);
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

/// The error of a call that has waited, in place of that of a lock for which no time was left.
fn after_wait(error: LockError, waited: Duration) -> LockError {
    match error {
        LockError::Held { name, holder, server } => {
            let (holder, behind_own_threads) = (Some(holder), false);
            LockError::Timeout { name, holder, waited, server, behind_own_threads }
        }
        error => error,
    }
}
