//! `Holder`: what the server knows about the holder of a lock.

mod sentence;

use std::time::{Duration, SystemTime};

use crate::{
    core::{
        id::{LockId, Parts},
        kind::{HeldBy, LockKind, split_kept},
        node_reply::NodeReply,
    },
    sys::{
        clock,
        display::{ID_BYTES_MAX, truncate_id},
    },
};

/// What a server reports in place of the time left, if it has not read that.
const PTTL_NOT_READ: i64 = -3;

/// The holder of a lock: its identity, how long it has held the lock, and the time left. This is a
/// snapshot, and may be outdated by the time it is read.
///
/// A holder may use another library: any client that follows `SET key id NX PX ttl` competes for
/// the same lock, but does not queue. For such a client, only the raw [`id`](Self::id) and the time
/// left are known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    id: Box<str>,
    /// The bytes that the server reported, if they are not valid UTF-8.
    raw: Option<Box<[u8]>>,
    /// The last token granted for this lock; zero if unknown.
    token: u64,
    reported_at: ReportTime,
    held_for: Option<Duration>,
    ttl_left: Option<Duration>,
    /// The lock has an expiry that the server does not report.
    hides_expiry: bool,
    waiters: Option<u64>,
    /// The holder has released the lock, which stays taken until its expiry.
    is_kept: bool,
    /// The caller would fit beside the holder: only waiters exclude it, because they come first.
    admits_caller: bool,
    /// The thread of the caller has acquired the lock itself.
    is_own: bool,
    nodes: Box<[NodeReply]>,
    /// How a group holds the lock; `None` for one holder alone. In a box, because holders are parts
    /// of many results.
    group: Option<Box<Group>>,
}

/// How a group holds a lock.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Group {
    held_by: HeldBy,
    /// The permits that the caller has asked for, and the limit of its semaphore.
    asked: Option<(u32, u32)>,
}

/// The local time of a report. Reports that differ in nothing else are equal.
#[derive(Clone, Copy, Debug)]
struct ReportTime(SystemTime);

impl PartialEq for ReportTime {
    fn eq(&self, _: &ReportTime) -> bool {
        true
    }
}

impl Eq for ReportTime {}

impl Holder {
    /// A holder of which only the identifier is known.
    pub(crate) fn from_id(id: String) -> Holder {
        let (held_for, ttl_left, waiters) = (None, None, None);
        let (held_by, _) = HeldBy::split(id.as_bytes());
        let (is_kept, released) = split_kept(id.as_bytes(), false);
        let id = if is_kept { String::from_utf8_lossy(released).into_owned() } else { id };
        Holder {
            id: truncate_id(id).into(),
            is_kept,
            admits_caller: false,
            is_own: false,
            raw: None,
            token: 0,
            reported_at: ReportTime(clock::wall_clock()),
            held_for,
            ttl_left,
            hides_expiry: true,
            waiters,
            nodes: Box::default(),
            group: boxed(held_by),
        }
    }

    /// A holder as the scripts report it.
    ///
    /// `now_us` and `token` are both times on the server's clock, so the age of the lock needs no
    /// local clock: a token is the microsecond of its grant, or slightly larger.
    pub(crate) fn from_report(
        raw_id: &[u8],
        pttl_ms: i64,
        token: u64,
        waiters: u64,
        now_us: u64,
    ) -> Holder {
        let (held_by, raw_id) = HeldBy::split(raw_id);
        let raw_id = &raw_id[..raw_id.len().min(ID_BYTES_MAX)];
        let (is_kept, id) = split_kept(raw_id, held_by.is_group());
        let holder = Holder::from_id(String::from_utf8_lossy(id).into_owned());
        let raw = (holder.id.as_bytes() != raw_id).then(|| raw_id.into());
        // The token of a group is that of its latest member.
        let ours = !held_by.is_group() && holder.parts().is_some_and(|parts| parts.uuid.is_some());
        let held_for =
            (ours && token > 0).then(|| Duration::from_micros(now_us.saturating_sub(token)));
        let ttl_left = u64::try_from(pttl_ms).ok().map(Duration::from_millis);
        let (waiters, group) = (Some(waiters), boxed(held_by));
        Holder {
            raw,
            token,
            held_for,
            ttl_left,
            hides_expiry: pttl_ms == PTTL_NOT_READ,
            waiters,
            is_kept,
            group,
            ..holder
        }
    }

    /// A holder as a database reports it, where a lock expires with its connection.
    #[cfg(feature = "mysql")]
    pub(crate) fn from_row(raw_id: &[u8], token: u64, waiters: Option<u64>, now_us: u64) -> Holder {
        let holder = Holder::from_report(raw_id, -1, token, 0, now_us);
        Holder { hides_expiry: true, waiters, ..holder }
    }

    pub(crate) fn token(&self) -> u64 {
        self.token
    }

    /// Adds the replies of the nodes.
    pub(crate) fn with_nodes(self, nodes: Vec<NodeReply>) -> Holder {
        Holder { nodes: nodes.into(), ..self }
    }

    /// Adds the number of waiters.
    pub(crate) fn waited_for_by(self, waiters: u64) -> Holder {
        Holder { waiters: Some(waiters), ..self }
    }

    /// A member of a group, of which the server reports the id and the time left.
    pub(crate) fn from_member(raw_id: &[u8], left_ms: i64, held_by: HeldBy) -> Holder {
        let (is_kept, id) = split_kept(raw_id, true);
        let holder = Holder::from_report(id, left_ms, 0, 0, 0);
        Holder { group: boxed(held_by), waiters: None, is_kept, ..holder }
    }

    /// Adds what a list of the members of its group says.
    pub(crate) fn with_group(self, held_by: HeldBy, member: Option<&Holder>) -> Holder {
        let (id, is_kept) = member
            .map_or_else(|| (self.id.clone(), self.is_kept), |one| (one.id.clone(), one.is_kept));
        Holder { group: boxed(held_by), id, is_kept, ..self }
    }

    /// Returns the permits that the caller has asked for, and the limit of its semaphore.
    fn asked(&self) -> Option<(u32, u32)> {
        self.group.as_ref()?.asked
    }

    /// Whether the thread of the caller has acquired the lock itself.
    pub(crate) fn is_own(&self) -> bool {
        self.is_own
    }

    /// Adds what the caller has asked for, whether it would fit beside the holder, and whether its
    /// thread has acquired the lock itself. Nobody joins a group whose members the server has lost.
    pub(crate) fn found_by(self, kind: LockKind, is_own: bool) -> Holder {
        let fits = match (kind, self.held_by()) {
            (LockKind::Read, HeldBy::Readers { count: Some(1..) }) => true,
            (LockKind::Permits { limit, count }, HeldBy::Permits { count: Some(used @ 1..) }) => {
                used.saturating_add(count.into()) <= limit.into()
            }
            _ => false,
        };
        let admits_caller = fits && self.waiters.is_some_and(|waiters| waiters > 0);
        let mut holder = Holder { admits_caller, is_own, ..self };
        if let (LockKind::Permits { limit, count }, Some(group)) = (kind, &mut holder.group) {
            group.asked = Some((count, limit));
        }
        holder
    }

    /// Whether the holder uses another library, as far as its id shows.
    pub(crate) fn is_foreign(&self) -> bool {
        self.group.is_none() && self.lock_id().is_none()
    }

    /// Returns whether one client holds the lock alone, or readers or holders of permits share it,
    /// and how many there are. The server does not report whether a single holder has a mutex or a
    /// write lock.
    pub fn held_by(&self) -> HeldBy {
        self.group.as_ref().map(|group| group.held_by).unwrap_or_default()
    }

    /// Returns the value of the lock key, cut after 512 bytes. Bytes that are not valid UTF-8
    /// appear as `U+FFFD`. If [several clients](Self::held_by) share the lock, returns the id of
    /// one of them if it is known, which the other methods are about too.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Returns the first 512 bytes of the value of the lock key, unchanged.
    pub(crate) fn id_bytes(&self) -> &[u8] {
        self.raw.as_deref().unwrap_or(self.id.as_bytes())
    }

    /// Returns the parsed identifier, if the holder uses this library.
    pub fn lock_id(&self) -> Option<LockId> {
        self.id.parse().ok()
    }

    /// Returns the holder's host name, if the identifier contains it.
    pub fn host(&self) -> Option<&str> {
        self.parts().map(|parts| parts.host)
    }

    /// Returns the holder's process id, if the identifier contains it.
    pub fn pid(&self) -> Option<u32> {
        self.parts().map(|parts| parts.pid)
    }

    /// Returns the holder's thread id, if the identifier contains it.
    pub fn tid(&self) -> Option<u64> {
        self.parts().map(|parts| parts.tid)
    }

    /// Returns how long the lock had been held when the server replied, by the server's clock.
    pub fn held_for(&self) -> Option<Duration> {
        self.held_for
    }

    /// Returns the local time at which the lock was acquired: the time of the server's reply minus
    /// [`held_for`](Self::held_for). For display, not for arithmetic.
    ///
    /// Also `None` if that time is before 1970, because a clock is wrong.
    pub fn since(&self) -> Option<SystemTime> {
        // A token written by another client can make the age impossibly large.
        self.reported_at
            .0
            .checked_sub(self.held_for?)
            .filter(|since| *since >= SystemTime::UNIX_EPOCH)
    }

    /// Returns the time until the lock expires unless it is renewed; `None` if the key has no
    /// expiry, or if its expiry is unknown.
    pub fn ttl_left(&self) -> Option<Duration> {
        self.ttl_left
    }

    /// Returns whether the lock has no expiry at all, so that it stays held if its holder dies.
    /// `false` if that is not known.
    pub fn never_expires(&self) -> bool {
        self.ttl_left.is_none() && !self.hides_expiry
    }

    /// Returns true if the holder has released the lock, which stays taken until its expiry,
    /// because it was acquired with
    /// [`LockOptions::hold_at_least`](crate::LockOptions::hold_at_least).
    pub fn is_kept(&self) -> bool {
        self.is_kept
    }

    /// Returns the local time until which the lock is [kept](Self::is_kept) after its release:
    /// the time of the server's reply plus [`ttl_left`](Self::ttl_left). For display, not for
    /// arithmetic.
    pub fn kept_until(&self) -> Option<SystemTime> {
        self.reported_at.0.checked_add(self.ttl_left.filter(|_| self.is_kept)?)
    }

    /// Returns the number of waiters at the server; `None` if it was not asked for it. Threads of
    /// one manager that wait for the same lock are one waiter, unless
    /// [`Config::local_handover`](crate::Config::local_handover) is off, which
    /// [`Config::yield_to_others`](crate::Config::yield_to_others) does too.
    pub fn waiters(&self) -> Option<u64> {
        self.waiters
    }

    /// Returns the reply of each of several nodes; empty with a single server.
    pub fn nodes(&self) -> &[NodeReply] {
        &self.nodes
    }

    fn parts(&self) -> Option<Parts<'_>> {
        Parts::parse(&self.id)
    }
}

/// With the feature `testing`: a holder, for tests.
///
/// ```
/// use std::time::Duration;
///
/// use distlock::Holder;
///
/// let holder = Holder::new("otherhost|pid7|tid7|ts1").with_ttl_left(Duration::from_secs(8));
/// assert_eq!(holder.to_string(), "otherhost (pid 7, thread 7), expires in 8s unless renewed");
/// ```
#[cfg(feature = "testing")]
impl Holder {
    /// Creates a holder of which only the identifier is known.
    pub fn new(id: impl Into<String>) -> Holder {
        Holder::from_id(id.into())
    }

    /// Sets [`ttl_left`](Self::ttl_left).
    pub fn with_ttl_left(self, ttl_left: Duration) -> Holder {
        Holder { ttl_left: Some(ttl_left), hides_expiry: false, ..self }
    }

    /// Sets [`held_for`](Self::held_for).
    pub fn with_held_for(self, held_for: Duration) -> Holder {
        Holder { held_for: Some(held_for), ..self }
    }

    /// Sets [`waiters`](Self::waiters).
    pub fn with_waiters(self, waiters: u64) -> Holder {
        self.waited_for_by(waiters)
    }

    /// Sets [`held_by`](Self::held_by).
    pub fn with_held_by(self, held_by: HeldBy) -> Holder {
        self.with_group(held_by, None)
    }
}

fn boxed(held_by: HeldBy) -> Option<Box<Group>> {
    held_by.is_group().then(|| Box::new(Group { held_by, asked: None }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "web-3|pid7|tid9|ts1763712345678|67e55044-10b1-426f-9247-bb680e5fe0c8";

    #[test]
    fn holder_displays_as_a_sentence() {
        let holder = Holder::from_report(ID.as_bytes(), 8_400, 1_000_000, 2, 2_600_000);
        assert_eq!(holder.held_for(), Some(Duration::from_millis(1600)));
        assert_eq!((holder.host(), holder.pid(), holder.tid()), (Some("web-3"), Some(7), Some(9)));
        let text = holder.to_string();
        assert!(text.starts_with("web-3 (pid 7, thread 9) since 2"), "{text}");
        assert!(text.ends_with("Z (1.6s), expires in 8.4s unless renewed"), "{text}");
    }

    #[test]
    fn kept_lock_says_until_when() {
        let kept = Holder::from_report(
            format!("distlock:kept {ID}").as_bytes(),
            8_400,
            1_000_000,
            0,
            2_600_000,
        );
        assert!(kept.is_kept() && kept.kept_until().is_some() && !kept.is_foreign());
        assert_eq!((kept.id(), kept.host()), (ID, Some("web-3")));
        assert_eq!(kept.id_bytes(), format!("distlock:kept {ID}").as_bytes());
        let text = kept.to_string();
        assert!(
            text.starts_with("web-3 (pid 7, thread 9), which has released it; it is"),
            "{text}"
        );
        assert!(text.ends_with("Z (for another 8.4s)"), "{text}");

        let permits = format!("distlock:permits 2 kept {ID}#2");
        let permits = Holder::from_report(permits.as_bytes(), 8_400, 0, 0, 0);
        assert!(permits.is_kept() && permits.id() == ID);
        let held = Holder::from_report(ID.as_bytes(), 8_400, 0, 0, 0);
        assert_eq!((held.is_kept(), held.kept_until()), (false, None));
        assert!(Holder::from_id(format!("distlock:kept {ID}")).is_kept());
        assert!(Holder::from_member(format!("kept {ID}").as_bytes(), 1, HeldBy::One).is_kept());
    }

    /// A caller that waits in the server's queue shows its last report much later.
    #[test]
    fn times_of_a_report_stay_as_they_are() {
        let held = Holder::from_report(ID.as_bytes(), 8_400, 1_000_000, 0, 2_600_000);
        let kept = format!("distlock:kept {ID}");
        let kept = Holder::from_report(kept.as_bytes(), 8_400, 1_000_000, 0, 2_600_000);
        let (since, until) = (held.since().unwrap(), kept.kept_until().unwrap());
        let read = clock::wall_clock();
        while clock::wall_clock() == read {}
        assert_eq!((held.since(), kept.kept_until()), (Some(since), Some(until)));
    }

    #[test]
    fn expiry_that_was_not_read_is_unknown() {
        let holder = Holder::from_report(ID.as_bytes(), PTTL_NOT_READ, 0, 0, 0);
        assert!(holder.ttl_left().is_none() && !holder.never_expires());
    }

    #[test]
    fn foreign_holder_gets_no_age_from_the_token() {
        let holder = Holder::from_report(b"lock_1804289383\n", -1, 1_000_000, 0, 2_600_000);
        assert!(holder.never_expires());
        assert_eq!(holder.held_for(), None);
        assert_eq!(
            holder.to_string(),
            "a client that calls itself \"lock_1804289383\\n\", without an expiry"
        );
    }

    #[test]
    fn impossible_age_is_not_displayed() {
        let holder = Holder::from_report(ID.as_bytes(), 8_400, 1, 0, 1 << 53);
        assert_eq!(holder.since(), None);
        assert_eq!(holder.to_string(), "web-3 (pid 7, thread 9), expires in 8.4s unless renewed");
    }

    #[test]
    fn age_is_zero_if_the_clock_went_back() {
        assert_eq!(
            Holder::from_report(ID.as_bytes(), 1, 9_000_000, 0, 5).held_for(),
            Some(Duration::ZERO)
        );
    }
}
