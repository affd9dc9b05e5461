//! Giving the lock of one holder to another client, on one server.

use super::{
    Exchange, NodeError, NodeErrorKind,
    requests_and_replies::{Adopt, AdoptReply},
};
use crate::{
    backend::{Adopted, error::BackendError},
    core::{
        claim::{Claim, Grant, InFlight, Residue},
        id::LockId,
        quorum::{NodeDeadlines, NodeSet},
        token::FencingToken,
        validity::deadline_from_sent,
    },
    sys::clock::{self, Moment},
};

/// Asks once more if the reply is lost: the first request gets half of the time, so that the second
/// has the other half.
pub(crate) fn adopt_on_one_server(
    claim: &Claim,
    former: &LockId,
    deadline: Moment,
    mut ask: impl FnMut(&Adopt<'_>, Moment) -> Result<Exchange<(u64, AdoptReply)>, NodeError>,
) -> Adopted {
    let (request, now) = (Adopt { claim, former }, clock::now());
    let halfway = now.saturating_add(deadline.duration_since(now) / 2);
    let mut broken_until = now;
    let result = match ask(&request, halfway) {
        Err(failure) if failure.is_transient() || failure.is_not_master() => {
            if failure.outcome_unknown {
                broken_until = halfway;
            }
            ask(&request, deadline)
        }
        result => result,
    };
    let mut failed = |failure: NodeError| {
        if failure.outcome_unknown {
            broken_until = deadline;
        }
        let is_left = clock::now() < broken_until || failure.outcome_unknown;
        let residue = is_left.then(|| Residue::new(NodeSet::single(0), "", broken_until));
        Adopted::Failed(BackendError::Node(failure), residue)
    };
    let timed_out = NodeError::outcome_unknown(NodeErrorKind::TimedOut);
    let Exchange { sent, reply: (_, reply) } = match result {
        Ok(exchange) => exchange,
        Err(failure) => return failed(failure),
    };
    match reply {
        AdoptReply::Held(token) => {
            let until = deadline_from_sent(sent, claim.ttl);
            if until <= clock::now() {
                return failed(timed_out);
            }
            let mut node_deadlines = NodeDeadlines::new(1);
            node_deadlines.confirm(0, until);
            let unanswered = NodeSet::EMPTY;
            Adopted::Granted(Grant {
                token: FencingToken(token),
                node_deadlines,
                provisional: false,
                in_flight: InFlight { broken_until, unanswered, unanswered_until: broken_until },
                may_hold: NodeSet::single(0),
                queue_entry: String::new(),
            })
        }
        AdoptReply::Gone => Adopted::Gone,
        AdoptReply::HeldByOther(holder) => Adopted::HeldByOther(holder),
        AdoptReply::Expired => failed(timed_out),
    }
}
