//! `LockId`: identifies an acquisition; readable by people, and never used twice.

use std::{cell::RefCell, fmt, str::FromStr, sync::OnceLock, time::SystemTime};

use uuid::Uuid;

use crate::sys::clock;
#[cfg(feature = "testing")]
use crate::sys::sim;

/// Identifies one acquisition of one lock: `hostname|pid1234|tid5678|ts1763712345678|<uuid v4>`.
///
/// The first four parts trace a stuck lock to a machine, a process, a thread, and the time of the
/// request (Unix time in milliseconds, on that machine's clock). The uuid makes the identifier
/// unique: two containers can share a host name and a pid, and a thread can ask twice within a
/// millisecond.
///
/// ```
/// let id = distlock::generate_lock_id();
/// assert_eq!(id.pid(), std::process::id());
/// assert_eq!(id.to_string().parse::<distlock::LockId>().unwrap(), id);
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct LockId(Box<str>);

impl LockId {
    /// Returns the identifier as it is stored in Redis.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the host name, with `|`, spaces and control characters replaced by `_`.
    pub fn host(&self) -> &str {
        self.parts().host
    }

    /// Returns the id of the process that asked for the lock.
    pub fn pid(&self) -> u32 {
        self.parts().pid
    }

    /// Returns the operating system's number of the thread that asked for the lock.
    pub fn tid(&self) -> u64 {
        self.parts().tid
    }

    /// Returns when the lock was asked for, in milliseconds since the Unix epoch, on the clock of
    /// [`host`](Self::host).
    pub fn asked_at_ms(&self) -> u64 {
        self.parts().ts_ms
    }

    /// Returns the uuid, which makes this identifier unique.
    pub fn uuid(&self) -> Uuid {
        self.parts().uuid.unwrap_or_default()
    }

    fn parts(&self) -> Parts<'_> {
        // A LockId is only constructed from a text that parses.
        Parts::parse(&self.0).unwrap_or_default()
    }
}

impl fmt::Display for LockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl fmt::Debug for LockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LockId({})", self.0)
    }
}

impl AsRef<str> for LockId {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl FromStr for LockId {
    type Err = ParseLockIdError;

    fn from_str(text: &str) -> Result<LockId, ParseLockIdError> {
        match Parts::parse(text) {
            Some(Parts { uuid: Some(_), .. }) => Ok(LockId(text.into())),
            _ => Err(ParseLockIdError(())),
        }
    }
}

/// The error of parsing a text that is not a [`LockId`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseLockIdError(());

impl fmt::Display for ParseLockIdError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not a lock identifier: expected hostname|pid…|tid…|ts…|uuid")
    }
}

impl std::error::Error for ParseLockIdError {}

/// The parts of an identifier. Parsing also accepts an older form without a uuid, which other
/// programs use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Parts<'a> {
    pub(crate) host: &'a str,
    pub(crate) pid: u32,
    pub(crate) tid: u64,
    pub(crate) ts_ms: u64,
    pub(crate) uuid: Option<Uuid>,
}

impl<'a> Parts<'a> {
    pub(crate) fn parse(text: &'a str) -> Option<Parts<'a>> {
        if text.len() > 512 || text.chars().any(|c| c.is_control() || c == ' ') {
            return None;
        }
        let mut fields = text.split('|');
        let host = fields.next().filter(|host| !host.is_empty())?;
        let pid = number(fields.next()?, "pid")?.try_into().ok()?;
        let tid = number(fields.next()?, "tid")?;
        let ts_ms = number(fields.next()?, "ts")?;
        let uuid = match fields.next() {
            None => None,
            Some(uuid) => Some(Uuid::try_parse(uuid).ok()?),
        };
        fields.next().is_none().then_some(Parts { host, pid, tid, ts_ms, uuid })
    }
}

fn number(field: &str, label: &str) -> Option<u64> {
    let digits = field.strip_prefix(label)?;
    // `parse` would also take a leading plus.
    digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse().ok())?
}

/// Creates the identifier of a new acquisition by the calling thread. The lock functions do this
/// themselves.
pub fn generate_lock_id() -> LockId {
    use fmt::Write as _;

    thread_local! {
        static ID_PREFIX: RefCell<(u32, String)> = const { RefCell::new((0, String::new())) };
    }
    let pid = process_id();
    let ts_ms = clock::wall_clock()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |since| since.as_millis());
    let mut uuid = Uuid::encode_buffer();
    let uuid = random_uuid().hyphenated().encode_lower(&mut uuid);
    let mut text = String::with_capacity(128);
    // Cached for each thread; a forked child must build it again.
    let known = ID_PREFIX.try_with(|known| {
        let mut known = known.borrow_mut();
        if known.0 != pid {
            *known = (pid, id_prefix(pid));
        }
        text.push_str(&known.1);
    });
    if known.is_err() {
        text.push_str(&id_prefix(pid));
    }
    // Writing to a string cannot fail.
    let _ = write!(text, "{ts_ms}|{uuid}");
    LockId(text.into())
}

/// Digits at the end of an identifier in which those of one request for several locks differ.
const COUNTED_DIGITS: usize = 12;

/// Creates identifiers for one request for several locks. Asking the system for random bits takes
/// longer than the rest, so only the first one does, and the others count on from it.
pub(crate) fn generate_lock_ids(count: usize) -> Vec<LockId> {
    let first = generate_lock_id();
    let (head, last) = first.0.split_at(first.0.len().saturating_sub(COUNTED_DIGITS));
    // The end of a uuid is hexadecimal, and random.
    let number = u64::from_str_radix(last, 16).unwrap_or(0);
    let id = |n| {
        let number = number.wrapping_add(n) & ((1 << (4 * COUNTED_DIGITS)) - 1);
        LockId(format!("{head}{number:0digits$x}", digits = COUNTED_DIGITS).into())
    };
    (0..count as u64).map(id).collect()
}

pub(crate) fn random_uuid() -> Uuid {
    #[cfg(feature = "testing")]
    if let Some(world) = sim::world() {
        return uuid::Builder::from_random_bytes(world.random().to_be_bytes()).into_uuid();
    }
    Uuid::new_v4()
}

/// Identifiers decide about pauses, so those of the simulator must not depend on its process.
fn process_id() -> u32 {
    #[cfg(feature = "testing")]
    if sim::world().is_some() {
        return u32::MAX;
    }
    std::process::id()
}

fn id_prefix(pid: u32) -> String {
    #[cfg(feature = "testing")]
    if sim::world().is_some() {
        return format!("simulated|pid{pid}|tid0|ts");
    }
    static HOST: OnceLock<String> = OnceLock::new();
    // Miri does not support the system call behind it.
    let host = || if cfg!(miri) { "miri".into() } else { gethostname::gethostname() };
    // Computed outside of `get_or_init`, so that a fork cannot copy a half-initialized cell.
    let host = match HOST.get() {
        Some(host) => host,
        None => HOST.get_or_init({
            let asked = host_field(&host().to_string_lossy());
            || asked
        }),
    };
    format!("{host}|pid{pid}|tid{}|ts", thread_id())
}

fn host_field(host: &str) -> String {
    let host: String = host
        .chars()
        .take(64)
        .map(|c| {
            if c == '|' || c.is_control() || c.is_whitespace() || c == char::REPLACEMENT_CHARACTER {
                '_'
            } else {
                c
            }
        })
        .collect();
    if host.is_empty() { "unknown".into() } else { host }
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn thread_id() -> u64 {
    rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs().into()
}

/// The number that Rust gave the thread: unique in the process, but unknown to the system's tools.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn thread_id() -> u64 {
    let text = format!("{:?}", std::thread::current().id());
    text.chars().filter(char::is_ascii_digit).collect::<String>().parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    #[test]
    fn id_contains_its_origin() {
        let id = generate_lock_id();
        assert_eq!(id.pid(), std::process::id());
        assert_eq!(id.tid(), thread_id());
        assert!(!id.host().is_empty());
        let now =
            clock::wall_clock().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_millis() as u64;
        assert!(now.abs_diff(id.asked_at_ms()) < 3_600_000);
        assert_eq!(id.uuid().get_version_num(), 4);
    }

    /// Fault: F71
    #[test]
    fn ids_are_unique_even_within_a_millisecond() {
        let ids: HashSet<_> = (0..10_000).map(|_| generate_lock_id()).collect();
        assert_eq!(ids.len(), 10_000);
    }

    #[test]
    fn ids_of_one_request_differ_and_parse() {
        let requests = [generate_lock_ids(1_000), generate_lock_ids(1_000)];
        let ids: HashSet<_> = requests.iter().flatten().collect();
        assert_eq!(ids.len(), 2_000);
        for id in ids {
            assert_eq!(id.as_str().parse::<LockId>().as_ref(), Ok(id));
            assert_eq!((id.tid(), id.uuid().get_version_num()), (thread_id(), 4));
        }
    }

    #[test]
    fn host_name_is_sanitized_to_one_field() {
        assert_eq!(host_field("a|b c\n\u{1b}d"), "a_b_c__d");
        assert_eq!(host_field(""), "unknown");
        assert_eq!(host_field(&"h".repeat(500)).len(), 64);
    }

    #[test]
    fn id_without_uuid_parses_but_is_no_lock_id() {
        let text = "web-3|pid7|tid9|ts1763712345678";
        assert_eq!(Parts::parse(text).unwrap().host, "web-3");
        assert!(text.parse::<LockId>().is_err());
    }

    proptest! {
        #[test]
        fn parsing_never_panics_and_keeps_the_text(text in ".{0,80}") {
            if let Ok(id) = text.parse::<LockId>() {
                prop_assert_eq!(id.as_str(), text);
            }
        }

        #[test]
        fn parts_round_trip(host in "[a-z0-9.-]{1,20}", pid: u32, tid: u64, ts: u64, uuid: u128) {
            let uuid = Uuid::from_u128(uuid);
            let id: LockId = format!("{host}|pid{pid}|tid{tid}|ts{ts}|{uuid}").parse().unwrap();
            prop_assert_eq!((id.host(), id.pid(), id.tid()), (&*host, pid, tid));
            prop_assert_eq!((id.asked_at_ms(), id.uuid()), (ts, uuid));
        }
    }
}
