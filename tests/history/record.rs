//! The record: one line per event. All processes append to one file and use one clock. Reports and
//! rules read nothing else.

use std::{
    error::Error,
    fmt,
    fs::File,
    io::{self, Read, Write},
    path::Path,
    str::FromStr,
};

use rustix::time::{ClockId, clock_gettime};

use super::event::{Event, Reading, number, word};

/// Maximum time of a record; otherwise sums of times could overflow.
const TIME_MAX: u64 = 1 << 62;

/// Nanoseconds since the machine started, the same for all of its processes.
///
/// Includes the time for which the machine is suspended, where the system has such a clock. The
/// library uses the same clock.
pub(crate) fn now() -> u64 {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    const CLOCK: ClockId = ClockId::Boottime;
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    const CLOCK: ClockId = ClockId::Monotonic;
    let time = clock_gettime(CLOCK);
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000_000
        + u64::try_from(time.tv_nsec).unwrap_or(0)
}

/// An event with its time and its subject. Recorded by the thread it is about, or by the parent
/// process.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Record {
    /// Nanoseconds on the clock that all processes share.
    pub(crate) at: u64,
    /// The number of a thread that acquires locks; zero if the event is about none, or about a
    /// whole process. A process that replaces a killed one has the same seats.
    pub(crate) seat: u32,
    /// The number of the lock; zero if there is only one, or if the event is about none.
    pub(crate) lock: u32,
    /// The process that had the seat then.
    pub(crate) pid: u32,
    pub(crate) event: Event,
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Record { at, seat, lock, pid, event } = self;
        match lock {
            0 => write!(f, "{at} {seat} {pid} {event}"),
            _ => write!(f, "{at} {seat}@{lock} {pid} {event}"),
        }
    }
}

impl FromStr for Record {
    type Err = Box<dyn Error + Send + Sync>;

    fn from_str(line: &str) -> Reading<Record> {
        let mut rest = line;
        let at = number(&mut rest)?;
        if at > TIME_MAX {
            return Err(format!("the time {at} is too large").into());
        }
        let place = word(&mut rest);
        let (mut seat, mut lock) = place.split_once('@').unwrap_or((place, "0"));
        let (seat, lock) = (number(&mut seat)?, number(&mut lock)?);
        Ok(Record { at, seat, lock, pid: number(&mut rest)?, event: rest.parse()? })
    }
}

/// Writes to the record.
#[derive(Debug)]
pub(crate) struct Journal {
    file: File,
}

impl Journal {
    pub(crate) fn open(path: &Path) -> io::Result<Journal> {
        // Each line is appended by a single write, so lines of several processes do not mix.
        Ok(Journal { file: File::options().create(true).append(true).open(path)? })
    }

    pub(crate) fn write(&self, record: &Record) -> io::Result<()> {
        (&self.file).write_all(format!("{record}\n").as_bytes())
    }

    /// Records an event that has just happened. Use this if there is only one lock.
    pub(crate) fn note(&self, seat: u32, pid: u32, event: Event) -> io::Result<()> {
        self.note_as_of(now(), seat, pid, event)
    }

    pub(crate) fn note_as_of(&self, at: u64, seat: u32, pid: u32, event: Event) -> io::Result<()> {
        self.write(&Record { at, seat, lock: 0, pid, event })
    }
}

/// Reads the record while it grows.
#[derive(Debug)]
pub(crate) struct Reader {
    file: File,
    line: usize,
    /// The start of a line that is not complete yet.
    rest: Vec<u8>,
}

impl Reader {
    pub(crate) fn open(path: &Path) -> io::Result<Reader> {
        Ok(Reader { file: File::open(path)?, line: 0, rest: Vec::new() })
    }

    /// Returns the records that were completed since the last call.
    pub(crate) fn read_on(&mut self) -> Reading<Vec<Record>> {
        self.file.read_to_end(&mut self.rest)?;
        let whole = self.rest.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
        let tail = self.rest.split_off(whole);
        let text = String::from_utf8(std::mem::replace(&mut self.rest, tail))?;
        let mut records = Vec::new();
        for line in text.lines() {
            self.line += 1;
            if !line.is_empty() && !line.starts_with('#') {
                let record = line
                    .parse()
                    .map_err(|error| format!("line {} of the record: {error}", self.line))?;
                records.push(record);
            }
        }
        Ok(records)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_line_parses_back() {
        for line in ["15 3@2 77 wait", "15 3 77 look 20", "0 0 0 plan 4"] {
            assert_eq!(line.parse::<Record>().expect(line).to_string(), line);
        }
        for line in ["", "x 1 1 wait", "1 1 wait", "9999999999999999999 1 1 wait", "1 1@ 1 wait"] {
            assert!(line.parse::<Record>().is_err(), "{line}");
        }
    }

    #[test]
    fn record_line_is_read_once_complete() {
        let file = tempfile::NamedTempFile::new().expect("no temporary file");
        let mut reader = Reader::open(file.path()).expect("the file exists");
        file.as_file().write_all(b"1 1 7 wait\n2 1 7 lo").expect("the file is writable");
        assert_eq!(reader.read_on().expect("valid records").len(), 1);
        file.as_file().write_all(b"ok 5\n").expect("the file is writable");
        assert_eq!(reader.read_on().expect("valid records")[0].event, Event::Look { deadline: 5 });
    }
}
