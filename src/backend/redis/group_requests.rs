//! Requests to one server about groups, besides acquiring, renewing and releasing.

use super::requests_and_replies::{GroupReport, ListMembers};
use crate::{
    backend::{Inspection, error::BackendError},
    core::{
        key::LockKey,
        kind::{LockKind, is_group},
    },
    lock_info::{LockInfo, Released},
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
