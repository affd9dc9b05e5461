//! Acquiring several mutexes in one request on one server.

use super::{
    Exchange, NodeError, NodeErrorKind, OneServerForEachLock, Purpose,
    one_server::ask_twice,
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

/// Acquires the locks of all claims, or none. Asks once more if the reply is lost.
pub(super) fn acquire_all(
    backend: &impl OneServerForEachLock,
    request: AllRequest<'_>,
) -> AllResult {
    let AllRequest { claims, repair_ttl_ms, call_deadline } = request;
    let Some(&Claim { ref key, ttl, .. }) = claims.first() else {
        return AllResult::unsupported();
    };
    let request = AcquireAll { claims, repair_ttl_ms };
    let began = clock::now();
    let timeout = request_timeout(call_deadline.duration_since(began), ttl);
    let (result, broken_until) = ask_twice(
        began.saturating_add(timeout),
        |until| backend.exchange(key, &request, Purpose::Claim, until),
        |result| match result {
            Ok(exchange) => matches!(exchange.reply, AcquireAllReply::Late),
            Err(failure) => failure.is_reply_lost() || failure.is_not_master(),
        },
    );
    let (mut may_hold, broken_until) = (broken_until.is_some(), broken_until.unwrap_or(began));
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
