//! The record: one line per event, appended by all processes to one file on one clock. All that is shown and judged
//! comes from here.

use std::{
    fmt,
    fs::File,
    io::{self, Read, Write},
    path::Path,
    str::FromStr,
};

use crate::common::{Outcome, now};

/// So far from the end of the numbers that nothing that is added overflows.
const LATEST: u64 = 1 << 62;

/// Something that happened to a child, told by itself or by its parent, or to a server of the locks.
#[derive(Clone, Debug)]
pub(crate) struct Record {
    /// Nanoseconds on the clock that all processes share.
    pub(crate) at: u64,
    /// Zero where it is about none.
    pub(crate) child: u32,
    /// Which process the child was then: a killed one is replaced.
    pub(crate) pid: u32,
    pub(crate) event: Event,
}

#[derive(Clone, Debug)]
pub(crate) enum Event {
    /// It asks for the lock.
    Wait,
    /// `lock()` returned before this moment, and `is_held()` said yes after it.
    Enter { deadline: u64, token: u64, id: String },
    /// `is_held()` said yes after this moment. The deadline is what the guard promised then.
    Look { deadline: u64 },
    /// `is_held()` said no.
    Lost { why: String },
    /// The resource answered a write under this token.
    Write { token: u64, value: u64, accepted: bool },
    /// Its work is over and it will release the lock after this moment.
    Leave,
    /// It has done all its rounds.
    Done,
    /// It got no lock, and asks again.
    Again { why: String },
    /// It could not go on.
    Failed { why: String },
    /// The parent has killed it, and it is gone.
    Killed,
    /// The parent has frozen it.
    Stopped,
    /// The parent is about to wake it up.
    Continued,
    /// The demo has this many children.
    Plan { children: u32 },
    /// One of the servers that decide together.
    Node { node: usize, change: Change },
}

/// What happened to a node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Change {
    /// It answers, knows nothing, and does not vote before the longest lease has passed.
    Up { votes_from: u64 },
    /// Then that was over.
    Votes,
    /// The parent has killed it.
    Down,
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {} ", self.at, self.child, self.pid)?;
        match &self.event {
            Event::Wait => f.write_str("wait"),
            Event::Enter { deadline, token, id } => write!(f, "enter {deadline} {token} {id}"),
            Event::Look { deadline } => write!(f, "look {deadline}"),
            Event::Lost { why } => write!(f, "lost {}", why.escape_debug()),
            Event::Write { token, value, accepted } => {
                write!(f, "write {token} {value} {}", if *accepted { "accepted" } else { "refused" })
            }
            Event::Leave => f.write_str("leave"),
            Event::Done => f.write_str("done"),
            Event::Again { why } => write!(f, "again {}", why.escape_debug()),
            Event::Failed { why } => write!(f, "failed {}", why.escape_debug()),
            Event::Killed => f.write_str("killed"),
            Event::Stopped => f.write_str("stopped"),
            Event::Continued => f.write_str("continued"),
            Event::Plan { children } => write!(f, "plan {children}"),
            Event::Node { node, change: Change::Up { votes_from } } => write!(f, "node {node} up {votes_from}"),
            Event::Node { node, change: Change::Votes } => write!(f, "node {node} votes"),
            Event::Node { node, change: Change::Down } => write!(f, "node {node} down"),
        }
    }
}

impl FromStr for Record {
    type Err = Box<dyn std::error::Error + Send + Sync>;

    fn from_str(line: &str) -> Outcome<Record> {
        fn word<'a>(rest: &mut &'a str) -> &'a str {
            let (word, tail) = rest.split_once(' ').unwrap_or((rest, ""));
            *rest = tail;
            word
        }
        fn number<T: FromStr>(rest: &mut &str) -> Outcome<T> {
            let word = word(rest);
            word.parse().map_err(|_| format!("{word:?} is not a number").into())
        }
        let mut rest = line;
        let (at, child, pid): (u64, _, _) = (number(&mut rest)?, number(&mut rest)?, number(&mut rest)?);
        if at > LATEST {
            return Err(format!("{at} is no moment").into());
        }
        let event = match word(&mut rest) {
            "wait" => Event::Wait,
            "enter" => Event::Enter { deadline: number(&mut rest)?, token: number(&mut rest)?, id: rest.to_owned() },
            "look" => Event::Look { deadline: number(&mut rest)? },
            "lost" => Event::Lost { why: rest.to_owned() },
            "write" => Event::Write {
                token: number(&mut rest)?,
                value: number(&mut rest)?,
                accepted: match word(&mut rest) {
                    "accepted" => true,
                    "refused" => false,
                    other => return Err(format!("a write is accepted or refused, not {other:?}").into()),
                },
            },
            "leave" => Event::Leave,
            "done" => Event::Done,
            "again" => Event::Again { why: rest.to_owned() },
            "failed" => Event::Failed { why: rest.to_owned() },
            "killed" => Event::Killed,
            "stopped" => Event::Stopped,
            "continued" => Event::Continued,
            "plan" => Event::Plan { children: number(&mut rest)? },
            "node" => Event::Node {
                node: number(&mut rest)?,
                change: match word(&mut rest) {
                    "up" => Change::Up { votes_from: number(&mut rest)? },
                    "votes" => Change::Votes,
                    "down" => Change::Down,
                    other => return Err(format!("a node is up, votes or down, not {other:?}").into()),
                },
            },
            other => return Err(format!("{other:?} is no event").into()),
        };
        Ok(Record { at, child, pid, event })
    }
}

/// The writing end, of the parent or of a child.
#[derive(Debug)]
pub(crate) struct Journal {
    file: File,
}

impl Journal {
    pub(crate) fn open(path: &Path) -> io::Result<Journal> {
        // In one write each, lines that are appended do not mix.
        Ok(Journal { file: File::options().create(true).append(true).open(path)? })
    }

    pub(crate) fn write(&self, child: u32, pid: u32, event: Event) -> io::Result<()> {
        self.write_as_of(now(), child, pid, event)
    }

    pub(crate) fn write_as_of(&self, at: u64, child: u32, pid: u32, event: Event) -> io::Result<()> {
        (&self.file).write_all(format!("{}\n", Record { at, child, pid, event }).as_bytes())
    }
}

/// The reading end.
#[derive(Debug)]
pub(crate) struct Reader {
    file: File,
    line: usize,
    /// The beginning of a line whose end has not been read.
    rest: Vec<u8>,
}

impl Reader {
    pub(crate) fn open(path: &Path) -> io::Result<Reader> {
        Ok(Reader { file: File::open(path)?, line: 0, rest: Vec::new() })
    }

    /// What has been recorded since the last call.
    pub(crate) fn read_on(&mut self) -> Outcome<Vec<Record>> {
        self.file.read_to_end(&mut self.rest)?;
        let whole = self.rest.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
        let tail = self.rest.split_off(whole);
        let text = String::from_utf8(std::mem::replace(&mut self.rest, tail))?;
        let mut records = Vec::new();
        for line in text.lines() {
            self.line += 1;
            if !line.is_empty() && !line.starts_with('#') {
                let record = line.parse().map_err(|error| format!("line {} of the record: {error}", self.line))?;
                records.push(record);
            }
        }
        Ok(records)
    }
}
