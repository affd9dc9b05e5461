//! `LockKind`: how a claim holds a lock, and the group that it is a member of. Pure.

use std::str::FromStr;

/// Maximum number of permits of one claim; otherwise one request would block a server.
pub(crate) const PERMITS_MAX: u32 = 9_999;

const READERS: &str = "distlock:read";
const PERMITS: &str = "distlock:permits";

/// How a lock is held: alone, or together with others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LockKind {
    /// Alone: [`RedisMgr::lock`](crate::RedisMgr::lock) and the like.
    #[default]
    Mutex,
    /// Together with other readers: [`RwLock::read`](crate::RwLock::read).
    Read,
    /// Alone, with readers and writers in one queue: [`RwLock::write`](crate::RwLock::write).
    Write,
    /// Together with other holders of permits: [`Semaphore::acquire`](crate::Semaphore::acquire).
    #[non_exhaustive]
    Permits {
        /// Number of permits that all holders may have together.
        limit: u32,
        /// Number of permits that this holder has.
        count: u32,
    },
}

/// What a claim needs of a group, whose members hold the lock together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Membership {
    /// Value of the lock key while the group holds the lock.
    pub(crate) group: &'static str,
    /// Maximum number of members; 0 for any number.
    pub(crate) limit: u32,
    /// Number of members that the claim needs.
    pub(crate) count: u32,
}

impl LockKind {
    /// Returns what the claim needs of a group; `None` if it holds the lock alone.
    pub(crate) fn membership(self) -> Option<Membership> {
        match self {
            LockKind::Mutex | LockKind::Write => None,
            LockKind::Read => Some(Membership { group: READERS, limit: 0, count: 1 }),
            LockKind::Permits { limit, count } => Some(Membership { group: PERMITS, limit, count }),
        }
    }

    /// Returns the kind as one word, which [`from_text`](Self::from_text) reads.
    pub(crate) fn text(self) -> String {
        match self {
            LockKind::Mutex => "mutex".into(),
            LockKind::Read => "read".into(),
            LockKind::Write => "write".into(),
            LockKind::Permits { limit, count } => format!("permits/{limit}/{count}"),
        }
    }

    pub(crate) fn from_text(text: &str) -> Option<LockKind> {
        Some(match text {
            "mutex" => LockKind::Mutex,
            "read" => LockKind::Read,
            "write" => LockKind::Write,
            permits => {
                let (limit, count) = permits.strip_prefix("permits/")?.split_once('/')?;
                let (limit, count) = (number(limit)?, number(count)?);
                if count == 0 || count > limit || count > PERMITS_MAX {
                    return None;
                }
                LockKind::Permits { limit, count }
            }
        })
    }

    /// Returns what a queue entry of this kind begins with.
    pub(crate) fn queue_entry_prefix(self) -> String {
        let Some(Membership { group, limit, count }) = self.membership() else {
            return String::new();
        };
        format!("{group}/{limit}/{count},")
    }
}

/// Reads a number that has no sign.
pub(crate) fn number<N: FromStr>(digits: &str) -> Option<N> {
    // `parse` would also take a leading plus.
    digits.bytes().all(|byte| byte.is_ascii_digit()).then(|| digits.parse().ok())?
}

/// Returns the limit of permits in a queue entry of a waiter for permits.
pub(crate) fn permit_limit(entry: &[u8]) -> Option<u32> {
    let numbers = entry.strip_prefix(PERMITS.as_bytes())?.strip_prefix(b"/")?;
    let limit = numbers.split(|byte| *byte == b'/').next()?;
    std::str::from_utf8(limit).ok()?.parse().ok().filter(|limit| *limit > 0)
}

/// Splits the value of a lock key, or a member of a group: whether it is kept after its release,
/// and the id.
pub(crate) fn split_kept(value: &[u8], is_member: bool) -> (bool, &[u8]) {
    let prefix: &[u8] = if is_member { b"kept " } else { b"distlock:kept " };
    value.strip_prefix(prefix).map_or((false, value), |id| (true, id))
}

/// Returns the id of the claim that a member belongs to. The members of a claim of several permits
/// are `id`, `id#2`, `id#3` and so on.
pub(crate) fn claim_of_member(member: &[u8]) -> &[u8] {
    match member.iter().rposition(|byte| *byte == b'#') {
        Some(at) if member[at + 1..].iter().all(u8::is_ascii_digit) => &member[..at],
        _ => member,
    }
}

/// Whether a lock key with this value is held by a group.
pub(crate) fn is_group(value: &[u8]) -> bool {
    [READERS, PERMITS].map(str::as_bytes).contains(&value)
}

/// How a lock is held, as a server reports it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum HeldBy {
    /// One holder alone: a mutex or a write lock.
    #[default]
    One,
    /// Readers.
    #[non_exhaustive]
    Readers {
        /// Number of readers; `None` if the server was not asked for it.
        count: Option<u64>,
    },
    /// Holders of permits of a semaphore.
    #[non_exhaustive]
    Permits {
        /// Number of permits that are in use; `None` if the server was not asked for it.
        count: Option<u64>,
    },
}

impl HeldBy {
    /// Splits what a server reports as the holder: an id, or `group`, or `group members member`.
    /// Returns the id of a holder, or the name of the group if no member is reported.
    pub(crate) fn split(report: &[u8]) -> (HeldBy, &[u8]) {
        let mut parts = report.splitn(3, |byte| *byte == b' ');
        let (group, count, member) = (parts.next().unwrap_or_default(), parts.next(), parts.next());
        let count = count.and_then(|digits| std::str::from_utf8(digits).ok()?.parse().ok());
        let held_by = if group == READERS.as_bytes() {
            HeldBy::Readers { count }
        } else if group == PERMITS.as_bytes() {
            HeldBy::Permits { count }
        } else {
            return (HeldBy::One, report);
        };
        let member = member.map(claim_of_member).filter(|member| !member.is_empty());
        (held_by, member.unwrap_or(group))
    }

    pub(crate) fn is_group(self) -> bool {
        self != HeldBy::One
    }

    /// Returns the number of readers or of permits in use, if it is known.
    pub(crate) fn members(self) -> Option<u64> {
        match self {
            HeldBy::One => None,
            HeldBy::Readers { count } | HeldBy::Permits { count } => count,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_entry_prefix_names_group_limit_and_count() {
        assert_eq!(LockKind::Mutex.queue_entry_prefix(), "");
        assert_eq!(LockKind::Write.queue_entry_prefix(), "");
        assert_eq!(LockKind::Read.queue_entry_prefix(), "distlock:read/0/1,");
        let permits = LockKind::Permits { limit: 7, count: 3 };
        assert_eq!(permits.queue_entry_prefix(), "distlock:permits/7/3,");
        assert_eq!(permit_limit(b"distlock:permits/7/3,100 channel id"), Some(7));
        for other in [&b"distlock:read/0/1,1 c id"[..], b"1 c id", b"distlock:permits/x/1,", b""] {
            assert_eq!(permit_limit(other), None);
        }
    }

    #[test]
    fn reported_holder_is_an_id_or_a_group() {
        let readers = |count| HeldBy::Readers { count };
        for (report, held_by, id) in [
            ("me and you", HeldBy::One, "me and you"),
            ("distlock:reader", HeldBy::One, "distlock:reader"),
            ("distlock:read", readers(None), "distlock:read"),
            ("distlock:read 0 ", readers(Some(0)), "distlock:read"),
            ("distlock:read 3 me and you", readers(Some(3)), "me and you"),
            ("distlock:permits 2 me#2", HeldBy::Permits { count: Some(2) }, "me"),
            ("distlock:permits x me", HeldBy::Permits { count: None }, "me"),
        ] {
            assert_eq!(HeldBy::split(report.as_bytes()), (held_by, id.as_bytes()), "{report}");
            assert_eq!(held_by.is_group(), is_group(report.split(' ').next().unwrap().as_bytes()));
        }
    }
}
