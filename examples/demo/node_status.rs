//! What each node is doing now, derived from the record and from the nodes' replies.

use std::collections::HashMap;

use super::screen::{Palette, format_nanos};
use crate::history::{Change, Event, Record};

#[derive(Debug)]
pub(crate) struct NodeTable {
    pub(crate) nodes: Vec<NodeStatus>,
    /// Time of the first record.
    start: u64,
    /// The child of each process, by pid.
    children: HashMap<u32, u32>,
}

#[derive(Debug)]
pub(crate) struct NodeStatus {
    pub(crate) node: usize,
    label: String,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Starting,
    Quarantine { until: u64 },
    Up,
    Down { since: u64 },
}

/// What a node reports about the lock.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LockView {
    /// The pid of the holder.
    pub(crate) holder: Option<u32>,
    pub(crate) waiters: u64,
}

impl NodeTable {
    pub(crate) fn new<'a>(labels: impl Iterator<Item = &'a str>, start: u64) -> NodeTable {
        let status = |(index, label): (usize, &str)| NodeStatus {
            node: index + 1,
            label: label.to_owned(),
            state: State::Starting,
        };
        NodeTable {
            nodes: labels.enumerate().map(status).collect(),
            start,
            children: HashMap::new(),
        }
    }

    fn quorum(&self) -> usize {
        self.nodes.len() / 2 + 1
    }

    /// Nodes whose quarantine has ended, but not in the record yet.
    pub(crate) fn ended_quarantines(&self, now: u64) -> Vec<usize> {
        let has_ended = |status: &&NodeStatus| match status.state {
            State::Quarantine { until } => until <= now,
            _ => false,
        };
        self.nodes.iter().filter(has_ended).map(|status| status.node).collect()
    }

    /// Updates the table. Returns a log line for output that cannot be redrawn.
    pub(crate) fn apply(&mut self, record: &Record) -> Option<String> {
        let Event::Node { node, change } = record.event else {
            self.children.insert(record.pid, record.seat);
            return None;
        };
        let status = self.nodes.get_mut(node.checked_sub(1)?)?;
        let before = status.state;
        let text = match change {
            Change::Up { votes_from } => {
                status.state = State::Quarantine { until: votes_from };
                let left = format_nanos(votes_from.saturating_sub(record.at));
                let up = if before == State::Starting { "is up" } else { "is back" };
                format!("{up} on {} without data: in quarantine for {left}", status.label)
            }
            Change::Votes => {
                status.state = State::Up;
                "votes from now on".to_owned()
            }
            Change::Down => {
                status.state = State::Down { since: record.at };
                "was killed; its data is lost".to_owned()
            }
        };
        let at = record.at.saturating_sub(self.start) as f64 / 1e9;
        Some(format!("{at:8.3} s  node {node:<3} {text}\n"))
    }

    pub(crate) fn lines(
        &self,
        views: &[Option<LockView>],
        now: u64,
        palette: Palette,
    ) -> Vec<String> {
        if self.nodes.is_empty() {
            return Vec::new();
        }
        let rows = self.nodes.iter().zip(views).map(|(status, view)| {
            let lock = view.map(|view| self.describe(view)).unwrap_or_default();
            status.line(&lock, now, palette)
        });
        rows.chain([String::new(), self.summary(views, palette), String::new()]).collect()
    }

    fn describe(&self, view: LockView) -> String {
        let mut text = match view.holder {
            Some(pid) => format!("holder: {}", self.name(pid)),
            None => "free".to_owned(),
        };
        if view.waiters > 0 {
            text.push_str(&format!(", {} queued", view.waiters));
        }
        text
    }

    fn name(&self, pid: u32) -> String {
        self.children
            .get(&pid)
            .map_or_else(|| format!("pid {pid}"), |child| format!("child {child}"))
    }

    /// Which child has a quorum.
    fn summary(&self, views: &[Option<LockView>], palette: Palette) -> String {
        let voting = self.nodes.iter().zip(views).filter(|(status, _)| status.state == State::Up);
        let (mut voters, mut votes) = (0, HashMap::<u32, usize>::new());
        for (_, view) in voting {
            voters += 1;
            if let Some(pid) = view.and_then(|view| view.holder) {
                *votes.entry(pid).or_default() += 1;
            }
        }
        let is_free = votes.is_empty();
        match votes.into_iter().max_by_key(|(_, count)| *count) {
            Some((pid, count)) if count >= self.quorum() => {
                let needed = palette.dim(format!(
                    "of {} nodes; {} are needed",
                    self.nodes.len(),
                    self.quorum()
                ));
                format!("  {} has the votes of {count} {needed}", palette.green(self.name(pid)))
            }
            _ if voters < self.quorum() => {
                let text = palette.yellow("the lock cannot be acquired yet");
                format!("  {text}: new servers do not vote until the longest ttl has passed")
            }
            _ if is_free => palette.dim("  the lock is free"),
            _ => palette.dim("  no child has a quorum: the lock is changing hands"),
        }
    }
}

impl NodeStatus {
    /// Whether the node responds, with or without a vote.
    pub(crate) fn is_up(&self) -> bool {
        matches!(self.state, State::Up | State::Quarantine { .. })
    }

    fn line(&self, lock: &str, now: u64, palette: Palette) -> String {
        let (name, detail) = match self.state {
            State::Starting => (palette.dim("starting  "), String::new()),
            State::Quarantine { until } => {
                let left = format!("votes in {}", format_nanos(until.saturating_sub(now)));
                let lock =
                    if lock.is_empty() { String::new() } else { palette.dim(format!("   {lock}")) };
                (palette.yellow("quarantine"), left + &lock)
            }
            State::Up => (palette.green("up        "), lock.to_owned()),
            State::Down { since } => (
                palette.red("DOWN      "),
                format!("killed {} ago", format_nanos(now.saturating_sub(since))),
            ),
        };
        format!("  node {:<3} {}  {name} {detail}", self.node, palette.dim(&self.label))
    }
}
