//! Turning a write lock into a read lock on one server.

use super::{
    Exchange, NodeError, NodeErrorKind, OneServerForEachLock, Purpose,
    one_server::ask_twice,
    requests::{Acquire, AcquireReply},
};
use crate::{
    backend::{Passed, error::BackendError},
    core::{
        lease::Lease, lock_lost::LockLost, quorum::NodeDeadlines, validity::deadline_from_sent,
    },
    sys::clock::Moment,
};

/// Turns a write lock into a read lock. Asks once more if the reply is lost.
pub(super) fn downgrade(
    backend: &impl OneServerForEachLock,
    lease: &Lease,
    deadline: Moment,
) -> Result<Passed, BackendError> {
    let request = Acquire::downgrade(lease);
    let (result, _) = ask_twice(
        deadline,
        |until| backend.exchange(request.key, &request, Purpose::Downgrade, until),
        |result| match result {
            Ok(exchange) => matches!(exchange.reply, AcquireReply::Late),
            Err(failure) => failure.is_transient() || failure.is_not_master(),
        },
    );
    let Exchange { sent, reply, .. } = result?;
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
        AcquireReply::Late => {
            Err(BackendError::Node(NodeError::outcome_unknown(NodeErrorKind::TimedOut)))
        }
    }
}
