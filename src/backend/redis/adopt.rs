//! Passing a lock to its successor on one server.

use super::{
    Exchange, NodeError, NodeErrorKind,
    requests_and_replies::{Adopt, AdoptReply},
};
use crate::{
    backend::{Passed, error::BackendError},
    core::{
        claim::{Claim, Grant, InFlight},
        id::LockId,
        lock_lost::LockLost,
        quorum::{NodeDeadlines, NodeSet},
        token::FencingToken,
        validity::deadline_from_sent,
    },
    sys::clock::{self, Moment},
};

/// Gives the lock of the holder `former` to this claim. Asks once more if the reply is lost: the
/// first request gets half of the time, so that the second has the other half.
pub(crate) fn adopt_on_one_server(
    former: &LockId,
    claim: &Claim,
    deadline: Moment,
    mut ask: impl FnMut(&Adopt<'_>, Moment) -> Result<Exchange<AdoptReply>, NodeError>,
) -> Result<Passed, BackendError> {
    let request = Adopt { former: former.as_str(), claim };
    let now = clock::now();
    let halfway = now.saturating_add(deadline.duration_since(now) / 2);
    let mut broken_until = now;
    let mut result = ask(&request, halfway);
    let is_late = matches!(&result, Ok(Exchange { reply: AdoptReply::Expired { .. }, .. }));
    if is_late || matches!(&result, Err(error) if error.is_transient() || error.is_not_master()) {
        broken_until = halfway;
        result = ask(&request, deadline);
    }
    let Exchange { sent, reply } = result.map_err(BackendError::Node)?;
    match reply {
        AdoptReply::Held { token, .. } => {
            let mut node_deadlines = NodeDeadlines::new(1);
            node_deadlines.confirm(0, deadline_from_sent(sent, claim.ttl));
            let unanswered = NodeSet::EMPTY;
            Ok(Passed::To(Grant {
                token: FencingToken(token),
                node_deadlines,
                provisional: false,
                in_flight: InFlight { broken_until, unanswered, unanswered_until: broken_until },
                may_hold: NodeSet::single(0),
                queue_entry: String::new(),
            }))
        }
        AdoptReply::Gone => Ok(Passed::Lost(LockLost::Gone)),
        AdoptReply::HeldByOther(by) => Ok(Passed::Lost(LockLost::Taken { by })),
        AdoptReply::Expired { .. } => {
            Err(BackendError::Node(NodeError::outcome_unknown(NodeErrorKind::TimedOut)))
        }
    }
}
