//! `Holder`: what the server knows about the one who holds a lock.

use std::{
    fmt,
    time::{Duration, SystemTime},
};

use crate::{
    answer::NodeAnswer,
    clock,
    id::{LockId, Parts},
    text::{ID_BYTES_MAX, Quoted, Span, shortened},
};

/// Who holds a lock, where, since when, and for how much longer: a snapshot, already old when it is read.
///
/// A holder need not be of this library: any client that follows `SET key id NX PX ttl` competes for the same lock.
/// Of such a client only the raw [`id`](Self::id) is known, and the time left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    id: String,
    /// What the server told, where that is no text.
    raw: Option<Box<[u8]>>,
    /// The last one given of this lock; zero when it is not known.
    token: u64,
    held_for: Option<Duration>,
    ttl_left: Option<Duration>,
    waiters: Option<u64>,
    nodes: Vec<NodeAnswer>,
}

impl Holder {
    /// Only the identifier is known.
    pub(crate) fn known_by_id(id: String) -> Holder {
        let (held_for, ttl_left, waiters) = (None, None, None);
        Holder { id: shortened(id), raw: None, token: 0, held_for, ttl_left, waiters, nodes: Vec::new() }
    }

    /// As the scripts report it. `now_us` and `token` are both of the server's clock, which is why the age of a lock
    /// needs no clock of ours: a token is the microsecond of its grant, or a few more.
    pub(crate) fn reported(told: &[u8], pttl_ms: i64, token: u64, waiters: u64, now_us: u64) -> Holder {
        let told = &told[..told.len().min(ID_BYTES_MAX)];
        let id = shortened(String::from_utf8_lossy(told).into_owned());
        let raw = (id.as_bytes() != told).then(|| told.into());
        let ours = Parts::parse(&id).is_some_and(|parts| parts.uuid.is_some());
        let held_for = (ours && token > 0).then(|| Duration::from_micros(now_us.saturating_sub(token)));
        let ttl_left = u64::try_from(pttl_ms).ok().map(Duration::from_millis);
        Holder { id, raw, token, held_for, ttl_left, waiters: Some(waiters), nodes: Vec::new() }
    }

    pub(crate) fn token(&self) -> u64 {
        self.token
    }

    /// With what each node said about it.
    pub(crate) fn said_by(self, nodes: Vec<NodeAnswer>) -> Holder {
        Holder { nodes, ..self }
    }

    pub(crate) fn with_waiters(self, waiters: u64) -> Holder {
        Holder { waiters: Some(waiters), ..self }
    }

    /// The value of the lock key, cut after 512 bytes. Where it is no text, `U+FFFD` stands for what cannot be shown.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The first 512 bytes of the value of the lock key, as they are.
    pub(crate) fn id_bytes(&self) -> &[u8] {
        self.raw.as_deref().unwrap_or(self.id.as_bytes())
    }

    /// The identifier in parts, if the holder uses this library.
    pub fn lock_id(&self) -> Option<LockId> {
        self.id.parse().ok()
    }

    /// The holder's host name, if its identifier tells.
    pub fn host(&self) -> Option<&str> {
        self.parts().map(|parts| parts.host)
    }

    /// The holder's process, if its identifier tells.
    pub fn pid(&self) -> Option<u32> {
        self.parts().map(|parts| parts.pid)
    }

    /// The holder's thread, if its identifier tells.
    pub fn tid(&self) -> Option<u64> {
        self.parts().map(|parts| parts.tid)
    }

    /// How long the lock had been held when the server was asked, on the server's clock.
    pub fn held_for(&self) -> Option<Duration> {
        self.held_for
    }

    /// [`held_for`](Self::held_for) before now, on the local wall clock: for people, not for arithmetic.
    ///
    /// `None` also where that is before 1970: some clock is far off.
    pub fn since(&self) -> Option<SystemTime> {
        // Somebody else's token can make a lock older than time, which could not be written down.
        clock::wall().checked_sub(self.held_for?).filter(|since| *since >= SystemTime::UNIX_EPOCH)
    }

    /// How long the lock would last if it were not renewed; `None` when the key has no expiry, or when unknown.
    pub fn ttl_left(&self) -> Option<Duration> {
        self.ttl_left
    }

    /// How many wait for the lock, if the server was asked.
    pub fn waiters(&self) -> Option<u64> {
        self.waiters
    }

    /// What each of several nodes said; empty where there is one server.
    pub fn nodes(&self) -> &[NodeAnswer] {
        &self.nodes
    }

    fn parts(&self) -> Option<Parts<'_>> {
        Parts::parse(&self.id)
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.parts() {
            Some(parts) => write!(f, "{} (pid {}, thread {})", parts.host.escape_debug(), parts.pid, parts.tid)?,
            None => write!(f, "a client that calls itself {}", Quoted(&self.id))?,
        }
        if let (Some(held_for), Some(since)) = (self.held_for, self.since()) {
            write!(f, " since {} ({})", humantime::format_rfc3339_millis(since), Span(held_for))?;
        }
        match (self.ttl_left, self.waiters) {
            (Some(left), _) => write!(f, ", expires in {} unless renewed", Span(left)),
            (None, Some(_)) => f.write_str(", without an expiry"),
            (None, None) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "web-3|pid7|tid9|ts1763712345678|67e55044-10b1-426f-9247-bb680e5fe0c8";

    #[test]
    fn a_holder_reads_as_a_sentence() {
        let holder = Holder::reported(ID.as_bytes(), 8_400, 1_000_000, 2, 2_600_000);
        assert_eq!(holder.held_for(), Some(Duration::from_millis(1600)));
        assert_eq!((holder.host(), holder.pid(), holder.tid()), (Some("web-3"), Some(7), Some(9)));
        let text = holder.to_string();
        assert!(text.starts_with("web-3 (pid 7, thread 9) since 2"), "{text}");
        assert!(text.ends_with("Z (1.6 s), expires in 8.4 s unless renewed"), "{text}");
    }

    #[test]
    fn a_foreign_holder_is_not_dated_by_somebody_elses_token() {
        let holder = Holder::reported(b"lock_1804289383\n", -1, 1_000_000, 0, 2_600_000);
        assert_eq!(holder.held_for(), None);
        assert_eq!(holder.to_string(), "a client that calls itself \"lock_1804289383\\n\", without an expiry");
    }

    #[test]
    fn an_age_beyond_all_time_is_left_out_of_the_sentence() {
        let holder = Holder::reported(ID.as_bytes(), 8_400, 1, 0, 1 << 53);
        assert_eq!(holder.since(), None);
        assert_eq!(holder.to_string(), "web-3 (pid 7, thread 9), expires in 8.4 s unless renewed");
    }

    #[test]
    fn a_clock_that_went_back_gives_no_negative_age() {
        assert_eq!(Holder::reported(ID.as_bytes(), 1, 9_000_000, 0, 5).held_for(), Some(Duration::ZERO));
    }
}
