//! Turning a write lock into a read lock on one server.

use super::{
    Exchange, NodeError, NodeErrorKind, OneServerForEachLock, Purpose,
    requests::{Acquire, AcquireReply},
};
use crate::{
    backend::{Passed, error::BackendError},
    core::{
        lease::Lease, lock_lost::LockLost, quorum::NodeDeadlines, validity::deadline_from_sent,
    },
    sys::clock::Moment,
};

/// Turns a write lock into a read lock. Asks once more if the reply is lost: the first request
/// gets half of the time, so that the second has the other half.
pub(super) fn downgrade(
    backend: &impl OneServerForEachLock,
    lease: &Lease,
    deadline: Moment,
) -> Result<Passed, BackendError> {
    let request = Acquire::downgrade(lease);
    let ask = |until| backend.exchange(request.key, &request, Purpose::Downgrade, until);
    let result = match ask(deadline.halfway()) {
        Ok(Exchange { reply: AcquireReply::Late, .. }) => ask(deadline),
        Err(failure) if failure.is_transient() || failure.is_not_master() => ask(deadline),
        result => result,
    };
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
