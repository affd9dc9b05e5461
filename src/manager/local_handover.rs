//! Handing a lock over to another thread of the process, without the server.
//!
//! The server's lock, its lease and its registration go on; the guard and its token are new. The
//! releasing thread does all of it, so that the lock is renewed although its next holder may not
//! run for a while: it chooses the next holder, registers its lease in place of its own, and ends
//! its own. If that fails, because the lease was lost meanwhile, the chosen thread asks the server.

use std::{sync::Arc, time::Duration};

use super::{HeldLock, Manager, release::EndedLock};
use crate::{
    backend::Inspection,
    config::LockParams,
    core::{
        claim::Claim,
        holder::Holder,
        id::LockId,
        kind::LockKind,
        lease::{Lease, LeaseEnd},
    },
    error::{Action, LockError, Result},
    local::{LocalHold, Representative, Terms, Turn, Wanted},
    observe::{HoldSpan, WaitSpan, event::AcquiredEvent},
    renew::{Registration, RenewalPlan},
    sys::clock::{self, Moment},
};

/// A lock between two threads of a process.
#[derive(Debug)]
pub(crate) struct HandedOver {
    lease: Arc<Lease>,
    registration: Registration,
    plan: RenewalPlan,
    hold: LocalHold<HandedOver>,
}

/// How an acquisition goes on after the wait inside the process.
pub(super) enum LocalTurn {
    /// With the lock.
    Taken(HandedOver),
    /// At the server.
    Asks { representative: Option<Representative<HandedOver>>, has_waited: bool },
}

impl Manager {
    /// Waits until another thread of this process hands the lock over, or until the caller must ask
    /// the server.
    pub(super) fn await_local_turn(
        &self,
        claim: &Claim,
        params: &LockParams,
        is_local: bool,
        since: Moment,
    ) -> Result<LocalTurn> {
        let alone = LocalTurn::Asks { representative: None, has_waited: false };
        let Some(queues) = self.local.as_ref().filter(|_| claim.kind == LockKind::Mutex) else {
            return Ok(alone);
        };
        let lock = claim.key.shared_lock_key();
        if params.wait == Some(Duration::ZERO) {
            return if queues.has_waiting(lock) {
                Err(self.behind_others(claim))
            } else {
                Ok(alone)
            };
        }
        let wanted = Wanted {
            terms: Terms { ttl: params.ttl, renew: params.renew, is_local },
            max_hold: params.max_hold,
            release_in_background: params.release_in_background,
        };
        let until = params.wait.map_or(Moment::NEVER, |wait| since.saturating_add(wait));
        let (turn, has_waited) = queues.enter(lock, wanted, until, params.cancel.as_ref());
        Ok(match turn {
            Turn::Taken(handed) => LocalTurn::Taken(handed),
            Turn::Represents(one) => LocalTurn::Asks { representative: Some(one), has_waited },
            // It asks once more, for the holder of the lock.
            Turn::TimedOut => LocalTurn::Asks { representative: None, has_waited },
            Turn::Cancelled => {
                let (name, now) = (claim.key.name().to_owned(), clock::now());
                return Err(LockError::Cancelled { name, waited: now.duration_since(since) });
            }
            Turn::Closed => return Err(LockError::Shutdown),
        })
    }

    /// The error of a caller that does not wait, while other threads of this process do. It must
    /// not overtake them, even if the lock is on its way to them.
    fn behind_others(&self, claim: &Claim) -> LockError {
        let (name, server) = (claim.key.name(), self.backend.label().clone());
        match self.observer.shield(|| self.backend.inspect(&claim.key)) {
            Ok(Inspection::Held(holder)) => {
                LockError::Held { name: name.to_owned(), holder: Box::new(holder), server }
            }
            Ok(Inspection::Free) => {
                let (name, waited) = (name.to_owned(), Duration::ZERO);
                let behind_own_threads = true;
                LockError::Timeout { name, holder: None, waited, server, behind_own_threads }
            }
            Ok(Inspection::WrongType) => self.backend.wrong_type(&claim.key),
            Err(error) => self.backend.lock_error(error, Action::Acquire, Some(name)),
        }
    }

    /// Makes a lock that was handed over that of the calling thread, which asked for it as `claim`.
    pub(super) fn take_over(
        &self,
        handed: HandedOver,
        claim: &Claim,
        wait_span: WaitSpan,
    ) -> HeldLock {
        let HandedOver { lease, registration, plan, hold } = handed;
        let (lock, id) = (claim.key.name(), &lease.claim.id);
        self.observer.contended(lock, &claim.id, || holder_of(id));
        let waited = wait_span.end("acquired");
        let span = HoldSpan::begin(lock, id, lease.token().0);
        let (token, contended) = (lease.token(), true);
        self.observer.acquired(AcquiredEvent { lock, id, token, waited, contended });
        HeldLock { lease, registration, span, plan, local: Some(hold) }
    }

    /// Hands the lock over to the thread of this process that has waited longest. Fails with the
    /// lock if it must be released at the server.
    pub(super) fn hand_over(&self, mut held: HeldLock) -> Result<EndedLock, HeldLock> {
        let Some(hold) = held.local.take() else { return Err(held) };
        let lease = &held.lease;
        // A release that removes a queue entry does not report the last token.
        let can_pass = !self.is_closed() && lease.queue_entry.is_empty();
        let is_local = can_pass && lease.is_held(clock::now());
        let terms = Terms { ttl: lease.ttl(), renew: held.plan.renew, is_local };
        let Some(passing) = hold.pass(terms) else { return Err(held) };
        let (wanted, now) = (passing.wanted(), clock::now());
        let hold_until = wanted.max_hold.map_or(Moment::NEVER, |limit| now.saturating_add(limit));
        let next = Arc::new(lease.successor(wanted.release_in_background, now));
        let is_registered = held.registration.replace(next.clone(), hold_until);
        if !is_registered || !lease.end(LeaseEnd::Released) {
            // The chosen thread asks the server instead.
            drop(passing);
            return Err(held);
        }
        let HeldLock { lease, registration, span, plan, .. } = held;
        let plan = RenewalPlan { hold_until, ..plan };
        passing.complete(|hold| HandedOver { lease: next, registration, plan, hold });
        let held_for = lease.held_for(clock::now());
        Ok(EndedLock { lease, span, was_held: true, held_for })
    }
}

/// The holder with this id, as far as its own process knows.
fn holder_of(id: &LockId) -> Holder {
    Holder::from_id(id.as_str().to_owned())
}
