//! How a lock is held, in words: alone or together with others, and whether it is only kept after
//! its release.

use distlock::{HeldBy, Holder, LockInfo};

use crate::format;

/// The holders of a lock in short, for tables: `alone`, `2 readers` or `3 permits`.
pub(crate) fn short_kind(held_by: HeldBy) -> String {
    match (held_by, count(held_by)) {
        (HeldBy::Readers { .. }, Some(1)) => "1 reader".into(),
        (HeldBy::Readers { .. }, Some(count)) => format!("{count} readers"),
        (HeldBy::Readers { .. }, None) => "readers".into(),
        (HeldBy::Permits { .. }, Some(1)) => "1 permit".into(),
        (HeldBy::Permits { .. }, Some(count)) => format!("{count} permits"),
        (HeldBy::Permits { .. }, None) => "permits".into(),
        _ => "alone".into(),
    }
}

/// The kind of the lock and its holders, for a page about one lock.
pub(crate) fn long_kind(lock: &LockInfo) -> String {
    let held_by = lock.holder().held_by();
    if let (HeldBy::Permits { .. }, Some(used), Some(limit)) =
        (held_by, count(held_by), lock.permit_limit())
    {
        return format!("semaphore, {used} of {limit} permits in use");
    }
    match held_by {
        HeldBy::Readers { .. } => format!("read-write lock, held by {}", short_kind(held_by)),
        HeldBy::Permits { .. } => format!("semaphore, {} in use", short_kind(held_by)),
        _ => "mutex or write lock, held by one client".into(),
    }
}

/// Number of readers or of permits in use.
pub(crate) fn count(held_by: HeldBy) -> Option<u64> {
    match held_by {
        HeldBy::Readers { count, .. } | HeldBy::Permits { count, .. } => count,
        _ => Some(1),
    }
}

/// The readers, or the permits in use, for the end of a sentence; `None` if one client has the
/// lock alone.
pub(crate) fn hold_now(held_by: HeldBy) -> Option<String> {
    let kind = short_kind(held_by);
    match (held_by, count(held_by)) {
        (HeldBy::Readers { .. }, Some(1)) => Some(format!("{kind} holds it now")),
        (HeldBy::Readers { .. }, _) => Some(format!("{kind} hold it now")),
        (HeldBy::Permits { .. }, Some(1)) => Some(format!("{kind} is in use now")),
        (HeldBy::Permits { .. }, _) => Some(format!("{kind} are in use now")),
        _ => None,
    }
}

/// Number of permits that a member has; `None` for a reader.
pub(crate) fn permits(member: &Holder) -> Option<u64> {
    match member.held_by() {
        HeldBy::Permits { count, .. } => count,
        _ => None,
    }
}

/// Whether all holders have released the lock, which stays taken until it expires.
pub(crate) fn is_kept(lock: &LockInfo) -> bool {
    match lock.members() {
        [] => lock.holder().is_kept(),
        members => members.iter().all(Holder::is_kept),
    }
}

/// A short name of the holder, with the number of others that share the lock: `web-1/7 +2`.
pub(crate) fn names(lock: &LockInfo) -> String {
    format::holder_name(lock.holder()) + &and_others(lock.members().len())
}

/// The members beside the one that is named.
pub(crate) fn and_others(members: usize) -> String {
    match members {
        0 | 1 => String::new(),
        members => format!(" +{}", members - 1),
    }
}

/// Time until the lock expires, for tables.
pub(crate) fn time_left(holder: &Holder, is_kept: bool) -> String {
    let kept = if is_kept { "kept " } else { "" };
    match holder.ttl_left() {
        Some(left) => kept.to_owned() + &format::duration(left),
        None if holder.never_expires() => "no expiry".into(),
        None => "-".into(),
    }
}
