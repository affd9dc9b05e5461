//! Passing a lock to its successor on one server.

use super::{
    Exchange, NodeError, NodeErrorKind, OneServerForEachLock, Purpose,
    requests::{Adopt, AdoptReply},
};
use crate::{
    backend::{AdoptReport, Passed, error::BackendError},
    core::{
        claim::{Claim, Grant, Residue},
        id::LockId,
        lock_lost::LockLost,
        quorum::NodeSet,
    },
    sys::clock::{self, Moment},
};

/// Gives the lock of the holder `former` to this claim. Asks once more if the reply is lost:
/// the first request gets half of the time, so that the second has the other half.
pub(super) fn adopt(
    backend: &impl OneServerForEachLock,
    former: &LockId,
    claim: &Claim,
    deadline: Moment,
) -> AdoptReport {
    let request = Adopt { former: former.as_str(), claim };
    let ask = |until| backend.exchange(&claim.key, &request, Purpose::Adopt, until);
    let (began, halfway) = (clock::now(), deadline.halfway());
    let is_unknown = |result: &Result<Exchange<AdoptReply>, NodeError>| {
        result.as_ref().is_err_and(|failure| failure.outcome_unknown)
    };
    let mut broken_until = began;
    let mut result = ask(halfway);
    let mut may_hold = is_unknown(&result);
    let is_late = matches!(&result, Ok(Exchange { reply: AdoptReply::Late, .. }));
    if is_late || matches!(&result, Err(error) if error.is_transient() || error.is_not_master()) {
        broken_until = halfway;
        result = ask(deadline);
        may_hold |= is_unknown(&result);
    }
    let result = match result {
        Ok(Exchange { sent, reply: AdoptReply::Held { token }, .. }) => {
            Ok(Passed::To(Grant::of_one_server(token, sent, claim.ttl, broken_until)))
        }
        Ok(Exchange { reply: AdoptReply::Gone, .. }) => Ok(Passed::Lost(LockLost::Gone)),
        Ok(Exchange { reply: AdoptReply::HeldByOther(by), .. }) => {
            Ok(Passed::Lost(LockLost::Taken { by }))
        }
        Ok(Exchange { reply: AdoptReply::Late, .. }) => {
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
