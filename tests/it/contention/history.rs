//! A history of holds: processes record when their guards considered a lock held, on one clock, and
//! the test checks the record afterwards.
//!
//! An interval begins just after a check that returned "held", and ends just before a later check
//! that did. The lock was considered held all the while, so two overlapping intervals prove two
//! holders at a time, however slow the machine.

use std::{
    collections::BTreeMap,
    fmt,
    fs::{self, File},
    io::Write,
    path::Path,
};

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds on a clock that all processes share and that also runs while they are stopped.
pub(crate) fn boottime() -> u64 {
    let time = clock_gettime(ClockId::Boottime);
    u64::try_from(time.tv_sec).expect("time since boot") * 1_000_000_000
        + u64::try_from(time.tv_nsec).expect("nanoseconds")
}

/// One hold of a lock, as far as it was observed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hold {
    pub(crate) lock: String,
    /// Differs between any two acquisitions.
    pub(crate) id: String,
    /// `None` for clients without this library.
    pub(crate) token: Option<u64>,
    pub(crate) from: u64,
    pub(crate) until: u64,
}

impl Hold {
    fn line(&self) -> String {
        let Self { lock, id, token, from, until } = self;
        let token = token.unwrap_or(0);
        format!(
            "{{\"lock\":\"{lock}\",\"id\":\"{id}\",\"token\":{token},\
             \"from\":{from},\"until\":{until}}}\n"
        )
    }

    fn parse(line: &str) -> Option<Self> {
        let field = |name: &str| {
            let (_, rest) = line.split_once(&format!("\"{name}\":"))?;
            Some(rest.split([',', '}']).next()?.trim_matches('"').to_owned())
        };
        let number = |name| field(name)?.parse::<u64>().ok();
        line.ends_with('}').then_some(())?;
        Some(Self {
            lock: field("lock")?,
            id: field("id")?,
            token: number("token").map(|token| (token > 0).then_some(token))?,
            from: number("from")?,
            until: number("until")?,
        })
    }
}

/// Appends to a history file that several processes share.
pub(crate) struct Recorder {
    file: File,
}

impl Recorder {
    pub(crate) fn open(path: impl AsRef<Path>) -> Self {
        let file =
            File::options().create(true).append(true).open(path).expect("cannot open the history");
        Self { file }
    }

    /// One write per line, so that lines of different processes do not mix.
    pub(crate) fn record(&self, hold: &Hold) {
        (&self.file).write_all(hold.line().as_bytes()).expect("cannot write the history");
    }
}

/// Reads a history: one entry for each acquisition, in the order in which they began.
pub(crate) fn read(path: impl AsRef<Path>) -> Vec<Hold> {
    let text = fs::read_to_string(path).unwrap_or_default();
    // A process that is killed while it writes leaves an incomplete line.
    merge(text.lines().filter_map(Hold::parse))
}

fn merge(samples: impl Iterator<Item = Hold>) -> Vec<Hold> {
    let mut holds: BTreeMap<(String, String), Hold> = BTreeMap::new();
    for hold in samples {
        let known =
            holds.entry((hold.lock.clone(), hold.id.clone())).or_insert_with(|| hold.clone());
        known.from = known.from.min(hold.from);
        known.until = known.until.max(hold.until);
    }
    let mut holds: Vec<_> = holds.into_values().collect();
    holds.sort_by_key(|hold| hold.from);
    holds
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Violation {
    Overlap(Hold, Hold),
    TokenDidNotRise(Hold, Hold),
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (what, one, other) = match self {
            Self::Overlap(one, other) => {
                let both = one.until.min(other.until).saturating_sub(other.from);
                (format!("two holders for {} us", both / 1000), one, other)
            }
            Self::TokenDidNotRise(one, other) => {
                ("a token that did not rise".to_owned(), one, other)
            }
        };
        write!(f, "{what}:\n  {}  {}", one.line(), other.line())
    }
}

/// Finds overlapping holds and tokens that did not rise.
pub(crate) fn violations(holds: &[Hold]) -> Vec<Violation> {
    let mut found = Vec::new();
    let mut locks: BTreeMap<&str, Vec<&Hold>> = BTreeMap::new();
    for hold in holds {
        locks.entry(&hold.lock).or_default().push(hold);
    }
    for holds in locks.values_mut() {
        holds.sort_by_key(|hold| hold.from);
        let (mut last, mut highest): (Option<&Hold>, Option<&Hold>) = (None, None);
        for hold in holds.iter() {
            if let Some(last) = last.filter(|last| hold.from < last.until) {
                found.push(Violation::Overlap(last.clone(), (*hold).clone()));
            }
            if let Some(before) =
                highest.filter(|before| hold.token.is_some() && hold.token <= before.token)
            {
                found.push(Violation::TokenDidNotRise(before.clone(), (*hold).clone()));
            }
            if last.is_none_or(|last| hold.until > last.until) {
                last = Some(hold);
            }
            if hold.token > highest.and_then(|hold| hold.token) {
                highest = Some(hold);
            }
        }
    }
    found
}

/// Reads a history, and panics if it contains a violation.
#[track_caller]
pub(crate) fn expect_no_violation(path: impl AsRef<Path>) -> Vec<Hold> {
    let holds = read(path);
    let found = violations(&holds);
    let texts: Vec<_> = found.iter().take(10).map(Violation::to_string).collect();
    assert!(
        found.is_empty(),
        "{} violations in {} holds:\n{}",
        found.len(),
        holds.len(),
        texts.join("\n")
    );
    holds
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hold(lock: &str, id: &str, token: u64, from: u64, until: u64) -> Hold {
        let token = (token > 0).then_some(token);
        Hold { lock: lock.into(), id: id.into(), token, from, until }
    }

    #[test]
    fn consecutive_holds_are_no_violation() {
        let holds =
            [hold("x", "a", 5, 10, 20), hold("x", "b", 6, 20, 30), hold("x", "foreign", 0, 31, 40)];
        assert_eq!(violations(&holds), []);
    }

    #[test]
    fn holds_of_different_locks_are_independent() {
        let holds = [hold("x", "a", 9, 10, 20), hold("y", "b", 3, 15, 30)];
        assert_eq!(violations(&holds), []);
    }

    #[test]
    fn overlapping_holds_are_found_in_any_order() {
        let (a, b) = (hold("x", "a", 5, 10, 20), hold("x", "b", 6, 19, 30));
        let expected = [Violation::Overlap(a.clone(), b.clone())];
        assert_eq!(violations(&[a.clone(), b.clone()]), expected);
        assert_eq!(violations(&[b, a]), expected);
    }

    #[test]
    fn hold_that_overlaps_several_is_found_for_each() {
        let holds =
            [hold("x", "a", 5, 10, 90), hold("x", "b", 6, 20, 30), hold("x", "foreign", 0, 40, 50)];
        let overlaps =
            violations(&holds).into_iter().filter(|one| matches!(one, Violation::Overlap(..)));
        assert_eq!(overlaps.count(), 2);
    }

    #[test]
    fn equal_tokens_are_found() {
        let (a, b) = (hold("x", "a", 5, 10, 20), hold("x", "b", 5, 21, 30));
        assert_eq!(violations(&[a.clone(), b.clone()]), [Violation::TokenDidNotRise(a, b)]);
    }

    #[test]
    fn falling_tokens_are_found_across_a_foreign_hold() {
        let (a, b) = (hold("x", "a", 5, 10, 20), hold("x", "b", 4, 30, 40));
        let found = violations(&[a.clone(), hold("x", "foreign", 0, 22, 25), b.clone()]);
        assert_eq!(found, [Violation::TokenDidNotRise(a, b)]);
    }

    #[test]
    fn samples_of_one_hold_are_merged() {
        let samples =
            [hold("x", "a", 5, 12, 20), hold("x", "a", 5, 10, 12), hold("x", "b", 6, 30, 31)];
        assert_eq!(
            merge(samples.into_iter()),
            [hold("x", "a", 5, 10, 20), hold("x", "b", 6, 30, 31)]
        );
    }

    #[test]
    fn history_is_read_as_written_except_for_a_torn_line() {
        let folder = tempfile::TempDir::new().expect("no temporary folder");
        let path = folder.path().join("history");
        let holds = [hold("x", "host|pid1|tid2", 5, 10, 20), hold("x", "foreign", 0, 21, 22)];
        let recorder = Recorder::open(&path);
        holds.iter().for_each(|hold| recorder.record(hold));
        (&recorder.file).write_all(b"{\"lock\":\"x\",\"id\":\"b\",\"tok").expect("cannot write");
        assert_eq!(read(&path), holds);
    }
}
