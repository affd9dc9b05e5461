//! `Detail`: all that is known of one lock.

use std::time::Duration;

use distlock::LockInfo;

use crate::{text::clean, top::rows::who};

/// One lock with its line, as a server just told it. Nothing in it commands a terminal, except for the identifier.
#[derive(Clone, Debug)]
pub(crate) struct Detail {
    /// As it is, to release the lock by.
    pub(crate) id: String,
    pub(crate) who: String,
    pub(crate) thread: Option<u64>,
    /// When the holder asked for the lock, and when it got it.
    pub(crate) asked: Option<String>,
    pub(crate) since: Option<String>,
    pub(crate) age: Option<Duration>,
    pub(crate) left: Option<Duration>,
    pub(crate) token: Option<u64>,
    pub(crate) certain: bool,
    /// How many wait, and the first of them in order.
    pub(crate) waiting: u64,
    pub(crate) waiters: Vec<String>,
    /// What each of several nodes says.
    pub(crate) nodes: Vec<String>,
}

impl Detail {
    pub(crate) fn of(lock: &LockInfo) -> Detail {
        let holder = lock.holder();
        let asked = holder.lock_id().and_then(|id| {
            let at = std::time::UNIX_EPOCH.checked_add(Duration::from_millis(id.asked_at_ms()))?;
            in_calendar(at)
        });
        Detail {
            id: holder.id().to_owned(),
            who: who(holder.host(), holder.pid(), holder.id()),
            thread: holder.tid(),
            asked,
            since: holder.since().and_then(in_calendar),
            age: holder.held_for(),
            left: holder.ttl_left(),
            token: lock.fencing_token().map(u64::from),
            certain: lock.is_certain(),
            waiting: lock.waiting(),
            waiters: lock.waiters().iter().map(|waiter| clean(&waiter.to_string())).collect(),
            nodes: holder.nodes().iter().map(|node| clean(&node.to_string())).collect(),
        }
    }
}

/// A moment for people; `None` when the calendar cannot tell it, which others may have written.
fn in_calendar(at: std::time::SystemTime) -> Option<String> {
    /// The first second of the year 10000, where the format ends.
    const END: Duration = Duration::from_secs(253_402_300_800);
    let since_epoch = at.duration_since(std::time::UNIX_EPOCH).ok()?;
    (since_epoch < END).then(|| humantime::format_rfc3339_seconds(at).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::UNIX_EPOCH;

    #[test]
    fn moments_of_others_that_no_calendar_has_are_left_out() {
        let at = |seconds| in_calendar(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(1_763_712_345).as_deref(), Some("2025-11-21T08:05:45Z"));
        assert_eq!(at(253_402_300_799).as_deref(), Some("9999-12-31T23:59:59Z"));
        assert_eq!(at(253_402_300_800), None);
        assert_eq!(in_calendar(UNIX_EPOCH - Duration::from_secs(1)), None);
    }
}
