//! Passing a lock to its successor on one server.

use super::{
    Exchange, NodeError, NodeErrorKind, OneServerForEachLock, Purpose,
    one_server::ask_twice,
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

/// Gives the lock of the holder `former` to this claim. Asks once more if the reply is lost.
pub(super) fn adopt(
    backend: &impl OneServerForEachLock,
    former: &LockId,
    claim: &Claim,
    deadline: Moment,
) -> AdoptReport {
    let request = Adopt { former: former.as_str(), claim };
    let began = clock::now();
    let (result, broken_until) = ask_twice(
        deadline,
        |until| backend.exchange(&claim.key, &request, Purpose::Adopt, until),
        |result| match result {
            Ok(exchange) => exchange.reply == AdoptReply::Late,
            Err(failure) => failure.is_transient() || failure.is_not_master(),
        },
    );
    let result = match result {
        Ok(Exchange { sent, reply: AdoptReply::Held { token }, .. }) => {
            let broken_until = broken_until.unwrap_or(began);
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
    let may_hold_until = broken_until.filter(|_| result.is_err());
    AdoptReport {
        result: result.map_err(BackendError::Node),
        residue: may_hold_until.map(|until| Residue::new(NodeSet::single(0), "", until)),
    }
}
