//! What not every backend can do, on one server: several locks at once, a lock that passes to its
//! successor, and a writer that becomes a reader.

use super::{
    Exchange, NodeError, NodeErrorKind, OneServerForEachLock, Purpose,
    requests_and_replies::{Acquire, AcquireAll, AcquireAllReply, AcquireReply, Adopt, AdoptReply},
};
use crate::{
    backend::{
        AdoptReport, AllAnswer, AllOutcome, AllRequest, Extras, Feature, Passed,
        error::BackendError,
    },
    core::{
        claim::{Claim, Grant, Residue},
        id::LockId,
        lease::Lease,
        lock_lost::LockLost,
        quorum::{NodeDeadlines, NodeSet},
        validity::{deadline_from_sent, request_timeout},
    },
    sys::clock::{self, Moment},
};

impl<B: OneServerForEachLock> Extras for B {
    fn refusal_of(&self, feature: Feature) -> Option<&'static str> {
        feature.refusal_of_one_server()
    }

    /// Acquires the locks of all claims, or none. Asks once more if the reply is lost: the first
    /// request gets half of the time, so that the second has the other half.
    fn acquire_all(&self, request: AllRequest<'_>) -> AllAnswer {
        let AllRequest { claims, repair_ttl_ms, call_deadline } = request;
        let Some(&Claim { ref key, ttl, .. }) = claims.first() else {
            return AllAnswer::unsupported();
        };
        let request = AcquireAll { claims, repair_ttl_ms };
        let ask = |until| self.exchange(key, &request, Purpose::Claim, until);
        let began = clock::now();
        let timeout = request_timeout(call_deadline.duration_since(began), ttl);
        let [halfway, deadline] = [timeout / 2, timeout].map(|part| began.saturating_add(part));
        let mut result = ask(halfway);
        let mut broken_until = began;
        let mut may_hold = false;
        let mut note = |result: &Result<_, NodeError>, until| {
            if result.as_ref().is_err_and(|error| error.outcome_unknown) {
                (broken_until, may_hold) = (until, true);
            }
        };
        note(&result, halfway);
        let is_late = matches!(&result, Ok(Exchange { reply: AcquireAllReply::Late { .. }, .. }));
        let may_be_held = |error: &NodeError| error.outcome_unknown && error.is_transient();
        if is_late || matches!(&result, Err(error) if may_be_held(error) || error.is_not_master()) {
            result = ask(deadline);
            note(&result, deadline);
        }
        let residue = || Residue::new(NodeSet::single(0), "", broken_until);
        let outcome = match result {
            Ok(Exchange { sent, reply: AcquireAllReply::Held { tokens, .. } }) => {
                if deadline_from_sent(sent, ttl) > clock::now() {
                    let grant = |token| Grant::of_one_server(token, sent, ttl, broken_until);
                    let grants = tokens.into_iter().map(grant).collect();
                    return AllAnswer { outcome: AllOutcome::Granted(grants), residue: None };
                }
                // The reply took longer than the lease.
                may_hold = true;
                AllOutcome::Failed(timed_out(true))
            }
            Ok(Exchange { reply: AcquireAllReply::Busy { index, holder, .. }, .. }) => {
                if let Some(yielding) = self.yielding() {
                    yielding.on_holder(claims[index].key.lock_key(), &holder, clock::now());
                }
                AllOutcome::Held { index, holder }
            }
            Ok(Exchange { reply: AcquireAllReply::WrongType { index }, .. }) => {
                AllOutcome::WrongType { index }
            }
            Ok(Exchange { reply: AcquireAllReply::Late { .. }, .. }) => {
                AllOutcome::Failed(timed_out(false))
            }
            Err(error) => AllOutcome::Failed(BackendError::Node(error)),
        };
        AllAnswer { outcome, residue: may_hold.then(residue) }
    }

    /// Turns a write lock into a read lock. Asks once more if the reply is lost: the first request
    /// gets half of the time, so that the second has the other half.
    fn downgrade(&self, lease: &Lease, deadline: Moment) -> Result<Passed, BackendError> {
        let request = Acquire::downgrade(lease);
        let ask = |until| self.exchange(request.key, &request, Purpose::Downgrade, until);
        let result = match ask(deadline.halfway()) {
            Ok(Exchange { reply: AcquireReply::Late { .. }, .. }) => ask(deadline),
            Err(failure) if failure.is_transient() || failure.is_not_master() => ask(deadline),
            result => result,
        };
        let Exchange { sent, reply } = result.map_err(BackendError::Node)?;
        match reply {
            AcquireReply::Held { .. } => {
                let mut node_deadlines = NodeDeadlines::new(1);
                node_deadlines.confirm(0, deadline_from_sent(sent, lease.ttl()));
                Ok(Passed::To(lease.granted_until(node_deadlines)))
            }
            AcquireReply::WrongType => Ok(Passed::Lost(LockLost::Gone)),
            AcquireReply::Busy { holder, .. } | AcquireReply::Queued { holder, .. } => {
                Ok(Passed::Lost(LockLost::Taken { by: Box::new(holder) }))
            }
            AcquireReply::Late { .. } => Err(timed_out(true)),
        }
    }

    /// Gives the lock of the holder `former` to this claim. Asks once more if the reply is lost:
    /// the first request gets half of the time, so that the second has the other half.
    fn adopt(&self, former: &LockId, claim: &Claim, deadline: Moment) -> AdoptReport {
        let request = Adopt { former: former.as_str(), claim };
        let ask = |until| self.exchange(&claim.key, &request, Purpose::Adopt, until);
        let (began, halfway) = (clock::now(), deadline.halfway());
        let is_unknown = |result: &Result<Exchange<AdoptReply>, NodeError>| {
            result.as_ref().is_err_and(|failure| failure.outcome_unknown)
        };
        let mut broken_until = began;
        let mut result = ask(halfway);
        let mut may_hold = is_unknown(&result);
        let is_late = matches!(&result, Ok(Exchange { reply: AdoptReply::Late { .. }, .. }));
        if is_late || matches!(&result, Err(error) if error.is_transient() || error.is_not_master())
        {
            broken_until = halfway;
            result = ask(deadline);
            may_hold |= is_unknown(&result);
        }
        let result = match result {
            Ok(Exchange { sent, reply: AdoptReply::Held { token, .. } }) => {
                Ok(Passed::To(Grant::of_one_server(token, sent, claim.ttl, broken_until)))
            }
            Ok(Exchange { reply: AdoptReply::Gone, .. }) => Ok(Passed::Lost(LockLost::Gone)),
            Ok(Exchange { reply: AdoptReply::HeldByOther(by), .. }) => {
                Ok(Passed::Lost(LockLost::Taken { by }))
            }
            Ok(Exchange { reply: AdoptReply::Late { .. }, .. }) => {
                Err(NodeError::outcome_unknown(NodeErrorKind::TimedOut))
            }
            Err(error) => Err(error),
        };
        let is_left = may_hold && result.is_err();
        AdoptReport {
            result: result.map_err(BackendError::Node),
            residue: is_left.then(|| Residue::new(NodeSet::single(0), "", deadline)),
        }
    }
}

fn timed_out(outcome_unknown: bool) -> BackendError {
    BackendError::Node(NodeError { outcome_unknown, kind: NodeErrorKind::TimedOut })
}
