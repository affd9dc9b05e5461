//! What each of the servers that decide together is doing now, put together from the record and their answers.

use std::collections::HashMap;

use super::screen::{Palette, span};
use crate::history::{Change, Event, Record};

#[derive(Debug)]
pub(crate) struct Nodes {
    pub(crate) seats: Vec<NodeSeat>,
    /// When the first record was written.
    start: u64,
    /// Which child each process is, or was.
    children: HashMap<u32, u32>,
}

#[derive(Debug)]
pub(crate) struct NodeSeat {
    pub(crate) node: usize,
    label: String,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Starting,
    Quarantine { until: u64 },
    Up,
    Away { since: u64 },
}

/// What a node says about the lock.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct View {
    /// The process that it keeps the lock for.
    pub(crate) holder: Option<u32>,
    pub(crate) waiters: u64,
}

impl Nodes {
    pub(crate) fn new<'a>(labels: impl Iterator<Item = &'a str>, start: u64) -> Nodes {
        let seat = |(index, label): (usize, &str)| NodeSeat {
            node: index + 1,
            label: label.to_owned(),
            state: State::Starting,
        };
        Nodes { seats: labels.enumerate().map(seat).collect(), start, children: HashMap::new() }
    }

    /// More than half.
    fn quorum(&self) -> usize {
        self.seats.len() / 2 + 1
    }

    /// Those whose quarantine is over without the record knowing it.
    pub(crate) fn ripe(&self, now: u64) -> Vec<usize> {
        let ripe = |seat: &&NodeSeat| matches!(seat.state, State::Quarantine { until } if until <= now);
        self.seats.iter().filter(ripe).map(|seat| seat.node).collect()
    }

    /// Takes a record in. What is worth a line of its own where nothing can be redrawn is returned.
    pub(crate) fn apply(&mut self, record: &Record) -> Option<String> {
        let Event::Node { node, change } = record.event else {
            self.children.insert(record.pid, record.seat);
            return None;
        };
        let seat = self.seats.get_mut(node.checked_sub(1)?)?;
        let before = seat.state;
        let news = match change {
            Change::Up { votes_from } => {
                seat.state = State::Quarantine { until: votes_from };
                let left = span(votes_from.saturating_sub(record.at));
                let back = if before == State::Starting { "is up" } else { "is back" };
                format!("{back} on {} and knows nothing: in quarantine for {left}", seat.label)
            }
            Change::Votes => {
                seat.state = State::Up;
                "votes from now on".to_owned()
            }
            Change::Down => {
                seat.state = State::Away { since: record.at };
                "was killed, and with it all it knew".to_owned()
            }
        };
        let at = record.at.saturating_sub(self.start) as f64 / 1e9;
        Some(format!("{at:8.3} s  node {node:<3} {news}\n"))
    }

    pub(crate) fn lines(&self, views: &[Option<View>], now: u64, palette: Palette) -> Vec<String> {
        if self.seats.is_empty() {
            return Vec::new();
        }
        let rows = self.seats.iter().zip(views).map(|(seat, view)| {
            let keeps = view.map(|view| self.keeps(view)).unwrap_or_default();
            seat.line(&keeps, now, palette)
        });
        rows.chain([String::new(), self.summary(views, palette), String::new()]).collect()
    }

    fn keeps(&self, view: View) -> String {
        let mut text = match view.holder {
            Some(pid) => format!("keeps it for {}", self.name(pid)),
            None => "nobody has it".to_owned(),
        };
        if view.waiters > 0 {
            text.push_str(&format!(", {} in line", view.waiters));
        }
        text
    }

    fn name(&self, pid: u32) -> String {
        self.children.get(&pid).map_or_else(|| format!("pid {pid}"), |child| format!("child {child}"))
    }

    /// Who has a quorum.
    fn summary(&self, views: &[Option<View>], palette: Palette) -> String {
        let voting = self.seats.iter().zip(views).filter(|(seat, _)| seat.state == State::Up);
        let (mut voters, mut votes) = (0, HashMap::<u32, usize>::new());
        for (_, view) in voting {
            voters += 1;
            if let Some(pid) = view.and_then(|view| view.holder) {
                *votes.entry(pid).or_default() += 1;
            }
        }
        let nobody = votes.is_empty();
        match votes.into_iter().max_by_key(|(_, count)| *count) {
            Some((pid, count)) if count >= self.quorum() => {
                let of = palette.dim(format!("of {} nodes, {} are needed", self.seats.len(), self.quorum()));
                format!("  {} has the votes of {count} {of}", palette.green(self.name(pid)))
            }
            _ if voters < self.quorum() => {
                let text = palette.yellow("nobody can have it yet");
                format!("  {text}: fresh servers do not vote before the longest lease has passed")
            }
            _ if nobody => palette.dim("  nobody has the lock"),
            _ => palette.dim("  nobody has a quorum, the lock is changing hands"),
        }
    }
}

impl NodeSeat {
    /// Whether it answers, with a vote that counts or not.
    pub(crate) fn is_up(&self) -> bool {
        matches!(self.state, State::Up | State::Quarantine { .. })
    }

    fn line(&self, keeps: &str, now: u64, palette: Palette) -> String {
        let (word, detail) = match self.state {
            State::Starting => (palette.dim("starting  "), String::new()),
            State::Quarantine { until } => {
                let left = format!("votes in {}", span(until.saturating_sub(now)));
                let keeps = if keeps.is_empty() { String::new() } else { palette.dim(format!("   {keeps}")) };
                (palette.yellow("quarantine"), left + &keeps)
            }
            State::Up => (palette.green("up        "), keeps.to_owned()),
            State::Away { since } => {
                (palette.red("AWAY      "), format!("killed {} ago", span(now.saturating_sub(since))))
            }
        };
        format!("  node {:<3} {}  {word} {detail}", self.node, palette.dim(&self.label))
    }
}
