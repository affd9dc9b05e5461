//! Requests to one server about groups, besides acquiring, renewing and releasing.

use super::{
    Exchange, OneServerForEachLock, Purpose,
    requests_and_replies::{Downgrade, DowngradeReply, GroupReport, ListMembers},
};
use crate::{
    backend::{Inspection, Passed, error::BackendError},
    core::{
        claim::whole_ms,
        key::LockKey,
        kind::{LockKind, is_group},
        lease::Lease,
        lock_lost::LockLost,
        quorum::NodeDeadlines,
        validity::deadline_from_sent,
    },
    lock_info::{LockInfo, Released},
    sys::clock::Moment,
};

/// Releases a lock by an id whose kind is not known: by the id of a mutex first, because only the
/// reply shows that a group has the lock. The name of a group stands for all its members.
pub(crate) fn release_any_kind(
    id: &[u8],
    mut release: impl FnMut(LockKind) -> Result<Released, BackendError>,
) -> Result<Released, BackendError> {
    if is_group(id) {
        return release(LockKind::Write);
    }
    match release(LockKind::Mutex)? {
        Released::OwnedByOther(holder) if holder.held_by().is_group() => {
            // No number of permits: releases all members of the claim.
            release(LockKind::Permits { limit: 0, count: 0 })
        }
        released => Ok(released),
    }
}

/// Turns a write lock into a read lock. Asks once more if the reply is lost: the first request gets
/// half of the time, so that the second has the other half.
pub(crate) fn downgrade_on_one_server(
    backend: &impl OneServerForEachLock,
    lease: &Lease,
    deadline: Moment,
) -> Result<Passed, BackendError> {
    let claim = &lease.claim;
    let ttl = lease.ttl();
    let request = Downgrade { key: &claim.key, id: claim.id.as_str(), ttl_ms: whole_ms(ttl) };
    let ask = |until| backend.exchange(&claim.key, &request, Purpose::Downgrade, until);
    let result = match ask(deadline.halfway()) {
        Err(failure) if failure.is_transient() || failure.is_not_master() => ask(deadline),
        result => result,
    };
    let Exchange { sent, reply } = result.map_err(BackendError::Node)?;
    Ok(match reply {
        DowngradeReply::Done => {
            let mut node_deadlines = NodeDeadlines::new(1);
            node_deadlines.confirm(0, deadline_from_sent(sent, ttl));
            Passed::To(lease.granted_until(node_deadlines))
        }
        DowngradeReply::Gone => Passed::Lost(LockLost::Gone),
        DowngradeReply::HeldByOther(by) => Passed::Lost(LockLost::Taken { by: Box::new(by) }),
    })
}

/// Adds the members to the reports of locks that groups have. Asks only if there are any.
pub(crate) fn add_members(
    keys: &[LockKey],
    found: &mut [Inspection<LockInfo>],
    ask: impl FnOnce(&ListMembers<'_>) -> Result<Vec<Option<GroupReport>>, BackendError>,
) -> Result<(), BackendError> {
    let of_groups: Vec<_> = keys
        .iter()
        .zip(found)
        .filter_map(|(key, found)| match found {
            Inspection::Held(lock) if lock.holder().held_by().is_group() => Some((key, lock)),
            _ => None,
        })
        .collect();
    if of_groups.is_empty() {
        return Ok(());
    }
    let keys: Vec<_> = of_groups.iter().map(|(key, _)| *key).collect();
    let groups = ask(&ListMembers(&keys))?;
    for ((_, lock), group) in of_groups.into_iter().zip(groups) {
        if let Some(GroupReport { held_by, members }) = group {
            lock.set_group(held_by, members);
        }
    }
    Ok(())
}
