//! `LockDetail`: the details of one lock.

use std::time::Duration;

use distlock::{Holder, LockInfo};

use crate::{
    format::{duration, escape},
    holders,
    top::rows::{group_name, holder_name},
};

/// One lock with its queue. All texts are escaped for a terminal, except for
/// `id` and `ids`.
#[derive(Clone, Debug)]
pub(crate) struct LockDetail {
    pub(crate) id: String,
    /// The ids of all holders, as the server sent them, because a release must name them exactly.
    pub(crate) ids: Vec<String>,
    pub(crate) holder: String,
    /// How the lock is held.
    pub(crate) kind: String,
    /// The clients that share the lock; empty if one has it alone.
    pub(crate) members: Vec<String>,
    /// All holders have released the lock, which stays taken until it expires.
    pub(crate) is_kept: bool,
    pub(crate) thread: Option<u64>,
    /// When the holder requested the lock, and when it acquired it.
    pub(crate) requested_at: Option<String>,
    pub(crate) held_since: Option<String>,
    pub(crate) age: Option<Duration>,
    pub(crate) left: Option<Duration>,
    pub(crate) token: Option<u64>,
    pub(crate) certain: bool,
    /// Length of the queue, and its first entries in order.
    pub(crate) waiting: u64,
    pub(crate) waiters: Vec<String>,
    /// The reply of each node, if there are several.
    pub(crate) nodes: Vec<String>,
}

impl LockDetail {
    pub(crate) fn of(lock: &LockInfo) -> LockDetail {
        let holder = lock.holder();
        let requested_at = holder.lock_id().and_then(|id| {
            let at = std::time::UNIX_EPOCH.checked_add(Duration::from_millis(id.asked_at_ms()))?;
            format_time(at)
        });
        let name = holder_name(holder.host(), holder.pid(), holder.id());
        LockDetail {
            id: holder.id().to_owned(),
            ids: match lock.members() {
                [] => vec![holder.id().to_owned()],
                members => members.iter().map(|member| member.id().to_owned()).collect(),
            },
            holder: match lock.members().len() {
                0 => name,
                members => group_name(&holders::short_kind(holder.held_by()), &name, members),
            },
            kind: holders::long_kind(lock),
            members: lock.members().iter().map(describe_member).collect(),
            is_kept: holders::is_kept(lock),
            thread: holder.tid(),
            requested_at,
            held_since: holder.since().and_then(format_time),
            age: holder.held_for(),
            left: holder.ttl_left(),
            token: lock.fencing_token().map(u64::from),
            certain: lock.is_certain(),
            waiting: lock.waiting(),
            waiters: lock.waiters().iter().map(|waiter| escape(&waiter.to_string())).collect(),
            nodes: holder.nodes().iter().map(|node| escape(&node.to_string())).collect(),
        }
    }
}

/// A member of a group with its permits and the time left.
fn describe_member(member: &Holder) -> String {
    let name = holder_name(member.host(), member.pid(), member.id());
    let permits = match holders::permits(member) {
        Some(_) => format!(", {}", holders::short_kind(member.held_by())),
        None => String::new(),
    };
    let left = match member.ttl_left() {
        Some(left) if member.is_kept() => format!(", kept for another {}", duration(left)),
        Some(left) => format!(", {} left", duration(left)),
        None => String::new(),
    };
    name + &permits + &left
}

/// A time for display; `None` if it is out of the format's range, as another client's id may be.
fn format_time(at: std::time::SystemTime) -> Option<String> {
    /// Start of the year 10000, for which the format has no room.
    const END: Duration = Duration::from_secs(253_402_300_800);
    let since_epoch = at.duration_since(std::time::UNIX_EPOCH).ok()?;
    (since_epoch < END).then(|| humantime::format_rfc3339_seconds(at).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::UNIX_EPOCH;

    #[test]
    fn time_out_of_range_is_none() {
        let at = |seconds| format_time(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(1_763_712_345).as_deref(), Some("2025-11-21T08:05:45Z"));
        assert_eq!(at(253_402_300_799).as_deref(), Some("9999-12-31T23:59:59Z"));
        assert_eq!(at(253_402_300_800), None);
        assert_eq!(format_time(UNIX_EPOCH - Duration::from_secs(1)), None);
    }
}
