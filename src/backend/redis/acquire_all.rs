//! Acquiring several mutexes in one request on one server.

use super::{
    Exchange, NodeError, NodeErrorKind, OneServerForEachLock, Purpose,
    requests::{AcquireAll, AcquireAllReply},
};
use crate::{
    backend::{AllOutcome, AllRequest, AllResult, error::BackendError},
    core::{
        claim::{Claim, Grant, Residue},
        quorum::NodeSet,
        validity::{deadline_from_sent, request_timeout},
    },
    sys::clock,
};

/// Acquires the locks of all claims, or none. Asks once more if the reply is lost: the first
/// request gets half of the time, so that the second has the other half.
pub(super) fn acquire_all(
    backend: &impl OneServerForEachLock,
    request: AllRequest<'_>,
) -> AllResult {
    let AllRequest { claims, repair_ttl_ms, call_deadline } = request;
    let Some(&Claim { ref key, ttl, .. }) = claims.first() else {
        return AllResult::unsupported();
    };
    let request = AcquireAll { claims, repair_ttl_ms };
    let ask = |until| backend.exchange(key, &request, Purpose::Claim, until);
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
    let is_late = matches!(&result, Ok(Exchange { reply: AcquireAllReply::Late, .. }));
    let may_be_held = |error: &NodeError| error.is_reply_lost() || error.is_not_master();
    if is_late || result.as_ref().is_err_and(may_be_held) {
        result = ask(deadline);
        note(&result, deadline);
    }
    let residue = || Residue::new(NodeSet::single(0), "", broken_until);
    let outcome = match result {
        Ok(Exchange { sent, reply: AcquireAllReply::Held { tokens }, .. }) => {
            if deadline_from_sent(sent, ttl) > clock::now() {
                let grant = |token| Grant::of_one_server(token, sent, ttl, broken_until);
                let grants = tokens.into_iter().map(grant).collect();
                return AllResult { outcome: AllOutcome::Granted(grants), residue: None };
            }
            // The reply took longer than the lease.
            may_hold = true;
            AllOutcome::Failed(timed_out(true))
        }
        Ok(Exchange { reply: AcquireAllReply::Busy { index, holder, .. }, .. }) => {
            if let Some(yielding) = backend.yielding() {
                yielding.on_holder(claims[index].key.lock_key(), &holder, clock::now());
            }
            AllOutcome::Held { index, holder }
        }
        Ok(Exchange { reply: AcquireAllReply::WrongType { index }, .. }) => {
            AllOutcome::WrongType { index }
        }
        Ok(Exchange { reply: AcquireAllReply::Late, .. }) => AllOutcome::Failed(timed_out(false)),
        Err(error) => AllOutcome::Failed(BackendError::Node(error)),
    };
    AllResult { outcome, residue: may_hold.then(residue) }
}

fn timed_out(outcome_unknown: bool) -> BackendError {
    BackendError::Node(NodeError { outcome_unknown, kind: NodeErrorKind::TimedOut })
}
