//! What each child is doing now, derived from the record.

use super::screen::{Palette, format_nanos};
use crate::history::{Event, Record};

#[derive(Debug)]
pub(crate) struct ChildTable {
    pub(crate) children: Vec<ChildStatus>,
    /// Time of the first record.
    start: u64,
    rounds: u32,
}

/// One child. Its process changes when it is killed and replaced.
#[derive(Debug)]
pub(crate) struct ChildStatus {
    pub(crate) child: u32,
    pub(crate) pid: u32,
    pub(crate) state: State,
    pub(crate) stopped: bool,
    /// Number of rounds in which it acquired the lock, even if the lock was lost before it could
    /// begin.
    pub(crate) rounds: u32,
    lost: u32,
    killed: u32,
    waiting_since: u64,
    last_wait: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum State {
    Starting,
    Waiting,
    Holding {
        since: u64,
        deadline: u64,
        token: u64,
    },
    /// Between two rounds.
    Idle,
    Lost,
    Killed,
    Done,
    Failed,
}

impl ChildTable {
    pub(crate) fn new(children: u32, rounds: u32, start: u64) -> ChildTable {
        let status = |child| ChildStatus {
            child,
            pid: 0,
            state: State::Starting,
            stopped: false,
            rounds: 0,
            lost: 0,
            killed: 0,
            waiting_since: 0,
            last_wait: None,
        };
        ChildTable { children: (1..=children).map(status).collect(), start, rounds }
    }

    /// The rounds of all children together.
    pub(crate) fn total_rounds(&self) -> u32 {
        self.children.iter().map(|status| status.rounds).sum()
    }

    /// Updates the table. Returns a log line for output that cannot be redrawn.
    pub(crate) fn apply(&mut self, record: &Record) -> Option<String> {
        let index = usize::try_from(record.seat).ok()?.checked_sub(1)?;
        let status = self.children.get_mut(index)?;
        let before = status.state;
        let text = status.apply(record, before)?;
        let at = record.at.saturating_sub(self.start) as f64 / 1e9;
        Some(format!("{at:8.3} s  child {:<2} {text}\n", status.child))
    }

    pub(crate) fn lines(&self, now: u64, palette: Palette) -> Vec<String> {
        self.children.iter().map(|status| status.line(now, self.rounds, palette)).collect()
    }
}

impl ChildStatus {
    fn apply(&mut self, record: &Record, before: State) -> Option<String> {
        self.pid = record.pid;
        match &record.event {
            Event::Wait => {
                self.state = State::Waiting;
                self.waiting_since = record.at;
                None
            }
            Event::Enter { deadline, token, .. } => {
                let wait = record.at.saturating_sub(self.waiting_since);
                self.state =
                    State::Holding { since: record.at, deadline: *deadline, token: *token };
                self.last_wait = Some(wait);
                self.rounds += 1;
                Some(format!("acquired the lock after {}, token {token}", format_nanos(wait)))
            }
            Event::Look { deadline } => {
                if let State::Holding { deadline: last, .. } = &mut self.state {
                    *last = *deadline;
                }
                None
            }
            Event::Lost { why } => {
                if !matches!(before, State::Holding { .. }) {
                    self.rounds += 1;
                }
                self.lost += 1;
                self.state = State::Lost;
                Some(format!("lost the lock: {why}"))
            }
            Event::Write { token, accepted: false, .. } => {
                Some(format!("writes anyway, with token {token}: rejected by the resource"))
            }
            Event::Write { .. } => None,
            Event::Leave => {
                self.state = State::Idle;
                let State::Holding { since, .. } = before else { return None };
                Some(format!(
                    "releases the lock after {}",
                    format_nanos(record.at.saturating_sub(since))
                ))
            }
            Event::Done => {
                self.state = State::Done;
                Some("is done".into())
            }
            Event::Failed { why } => {
                self.state = State::Failed;
                Some(format!("failed: {why}"))
            }
            Event::Killed => {
                self.state = State::Killed;
                self.killed += 1;
                Some(format!("(pid {}) was killed while {}", record.pid, before.name()))
            }
            Event::Stopped => {
                self.stopped = true;
                Some(format!("was stopped while {}", before.name()))
            }
            Event::Continued => {
                self.stopped = false;
                Some("was continued".into())
            }
            Event::Again { why } => Some(format!("retries: {why}")),
            // Events that only the storm records.
            _ => None,
        }
    }

    fn line(&self, now: u64, rounds: u32, palette: Palette) -> String {
        let name = format!("{:<9}", if self.stopped { "STOPPED" } else { self.state.name() });
        let (name, detail) = match self.state {
            _ if self.stopped => (palette.red(name), format!("while {}", self.state.name())),
            State::Holding { deadline, token, .. } => {
                let left = format_nanos(deadline.saturating_sub(now));
                (palette.green(name), format!("token {token}, {left:>6} left"))
            }
            State::Waiting => (
                palette.yellow(name),
                format!("for {}", format_nanos(now.saturating_sub(self.waiting_since))),
            ),
            State::Lost | State::Killed | State::Failed => (palette.red(name), String::new()),
            State::Starting | State::Idle | State::Done => (palette.dim(name), String::new()),
        };
        let mut line = format!(
            "  child {:<2} {}  {name} {detail:<33} {:>2}/{rounds}",
            self.child,
            palette.dim(format!("pid {:<7}", self.pid)),
            self.rounds
        );
        if let Some(wait) = self.last_wait {
            line.push_str(&palette.dim(format!("  waited {}", format_nanos(wait))));
        }
        for (count, name) in [(self.lost, "lost"), (self.killed, "killed")] {
            if count > 0 {
                line.push_str(&palette.red(format!("  {name} {count}")));
            }
        }
        line
    }
}

impl State {
    fn name(self) -> &'static str {
        match self {
            State::Starting => "starting",
            State::Waiting => "waiting",
            State::Holding { .. } => "holding",
            State::Idle => "idle",
            State::Lost => "lost it",
            State::Killed => "killed",
            State::Done => "done",
            State::Failed => "failed",
        }
    }
}
