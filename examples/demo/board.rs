//! What each child is doing now, put together from the record.

use super::screen::{Palette, span};
use crate::history::{Event, Record};

#[derive(Debug)]
pub(crate) struct Board {
    pub(crate) seats: Vec<Seat>,
    /// When the first record was written.
    start: u64,
    rounds: u32,
}

/// One child; its processes may change.
#[derive(Debug)]
pub(crate) struct Seat {
    pub(crate) child: u32,
    pub(crate) pid: u32,
    pub(crate) state: State,
    pub(crate) stopped: bool,
    /// How often it has had the lock, or has found it lost before it began.
    pub(crate) rounds: u32,
    lost: u32,
    killed: u32,
    asked_at: u64,
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
    Away,
    Lost,
    Killed,
    Done,
    Failed,
}

impl Board {
    pub(crate) fn new(children: u32, rounds: u32, start: u64) -> Board {
        let seat = |child| Seat {
            child,
            pid: 0,
            state: State::Starting,
            stopped: false,
            rounds: 0,
            lost: 0,
            killed: 0,
            asked_at: 0,
            last_wait: None,
        };
        Board { seats: (1..=children).map(seat).collect(), start, rounds }
    }

    pub(crate) fn rounds_of_all(&self) -> u32 {
        self.seats.iter().map(|seat| seat.rounds).sum()
    }

    /// Takes a record in. What is worth a line of its own where nothing can be redrawn is returned.
    pub(crate) fn apply(&mut self, record: &Record) -> Option<String> {
        let index = usize::try_from(record.seat).ok()?.checked_sub(1)?;
        let seat = self.seats.get_mut(index)?;
        let before = seat.state;
        let news = seat.apply(record, before)?;
        let at = record.at.saturating_sub(self.start) as f64 / 1e9;
        Some(format!("{at:8.3} s  child {:<2} {news}\n", seat.child))
    }

    pub(crate) fn lines(&self, now: u64, palette: Palette) -> Vec<String> {
        self.seats.iter().map(|seat| seat.line(now, self.rounds, palette)).collect()
    }
}

impl Seat {
    fn apply(&mut self, record: &Record, before: State) -> Option<String> {
        self.pid = record.pid;
        match &record.event {
            Event::Wait => {
                self.state = State::Waiting;
                self.asked_at = record.at;
                None
            }
            Event::Enter { deadline, token, .. } => {
                let wait = record.at.saturating_sub(self.asked_at);
                self.state = State::Holding { since: record.at, deadline: *deadline, token: *token };
                self.last_wait = Some(wait);
                self.rounds += 1;
                Some(format!("holds, token {token}, after waiting {}", span(wait)))
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
                Some(format!("has lost the lock: {why}"))
            }
            Event::Write { token, accepted: false, .. } => {
                Some(format!("writes all the same, with token {token}: refused by the fence"))
            }
            Event::Write { .. } => None,
            Event::Leave => {
                self.state = State::Away;
                let State::Holding { since, .. } = before else { return None };
                Some(format!("leaves after {}", span(record.at.saturating_sub(since))))
            }
            Event::Done => {
                self.state = State::Done;
                Some("is done".into())
            }
            Event::Failed { why } => {
                self.state = State::Failed;
                Some(format!("cannot go on: {why}"))
            }
            Event::Killed => {
                self.state = State::Killed;
                self.killed += 1;
                Some(format!("(pid {}) was killed while {}", record.pid, before.word()))
            }
            Event::Stopped => {
                self.stopped = true;
                Some(format!("was stopped while {}", before.word()))
            }
            Event::Continued => {
                self.stopped = false;
                Some("was continued".into())
            }
            Event::Again { why } => Some(format!("asks again: {why}")),
            // What a larger party writes down.
            _ => None,
        }
    }

    fn line(&self, now: u64, rounds: u32, palette: Palette) -> String {
        let word = format!("{:<9}", if self.stopped { "STOPPED" } else { self.state.word() });
        let (word, detail) = match self.state {
            _ if self.stopped => (palette.red(word), format!("while {}", self.state.word())),
            State::Holding { deadline, token, .. } => {
                let left = span(deadline.saturating_sub(now));
                (palette.green(word), format!("token {token}, {left:>6} left"))
            }
            State::Waiting => (palette.yellow(word), format!("for {}", span(now.saturating_sub(self.asked_at)))),
            State::Lost | State::Killed | State::Failed => (palette.red(word), String::new()),
            State::Starting | State::Away | State::Done => (palette.dim(word), String::new()),
        };
        let mut line = format!(
            "  child {:<2} {}  {word} {detail:<33} {:>2}/{rounds}",
            self.child,
            palette.dim(format!("pid {:<7}", self.pid)),
            self.rounds
        );
        if let Some(wait) = self.last_wait {
            line.push_str(&palette.dim(format!("  waited {}", span(wait))));
        }
        for (count, word) in [(self.lost, "lost"), (self.killed, "killed")] {
            if count > 0 {
                line.push_str(&palette.red(format!("  {word} {count}")));
            }
        }
        line
    }
}

impl State {
    fn word(self) -> &'static str {
        match self {
            State::Starting => "starting",
            State::Waiting => "waiting",
            State::Holding { .. } => "holding",
            State::Away => "away",
            State::Lost => "lost it",
            State::Killed => "killed",
            State::Done => "done",
            State::Failed => "failed",
        }
    }
}
