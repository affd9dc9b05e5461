//! When each node voted, as the record shows it.

use crate::history::{Change, Event, Record};

/// The states of one node over time, as pairs of start and end.
#[derive(Debug, Default)]
pub(crate) struct NodeTimeline {
    /// Up, but without a vote.
    pub(crate) quarantines: Vec<(u64, u64)>,
    pub(crate) votes: Vec<(u64, u64)>,
    pub(crate) kills: Vec<u64>,
    /// Planned end of the first quarantine.
    first_quarantine_end: u64,
    restarts: usize,
}

/// The nodes in the order of their numbers.
#[derive(Debug, Default)]
pub(crate) struct Availability {
    pub(crate) nodes: Vec<NodeTimeline>,
}

impl Availability {
    pub(crate) fn of(records: &[Record]) -> Availability {
        let node = |record: &Record| match record.event {
            Event::Node { node, change } => Some((node, record.at, change)),
            _ => None,
        };
        let events: Vec<_> = records.iter().filter_map(node).collect();
        let count = events.iter().map(|(node, ..)| *node).max().unwrap_or(0);
        let timeline = |number| {
            let mut timeline = NodeTimeline::default();
            let (mut quarantined, mut voting) = (None, None);
            for (_, at, change) in events.iter().filter(|(node, ..)| *node == number) {
                timeline.quarantines.extend(quarantined.take().map(|from| (from, *at)));
                timeline.votes.extend(voting.take().map(|from| (from, *at)));
                match change {
                    Change::Up { votes_from } => {
                        quarantined = Some(*at);
                        if timeline.kills.is_empty() {
                            timeline.first_quarantine_end = *votes_from;
                        } else {
                            timeline.restarts += 1;
                        }
                    }
                    Change::Votes => voting = Some(*at),
                    Change::Down => timeline.kills.push(*at),
                }
            }
            timeline.quarantines.extend(quarantined.map(|from| (from, u64::MAX)));
            timeline.votes.extend(voting.map(|from| (from, u64::MAX)));
            timeline
        };
        Availability { nodes: (1..=count).map(timeline).collect() }
    }

    pub(crate) fn quorum(&self) -> usize {
        self.nodes.len() / 2 + 1
    }

    /// When the first lock may be granted: the end of the first quarantine of a quorum.
    pub(crate) fn first_quorum(&self) -> u64 {
        let mut ends: Vec<u64> = self.nodes.iter().map(|node| node.first_quarantine_end).collect();
        ends.sort_unstable();
        ends.get(self.quorum() - 1).copied().unwrap_or(0)
    }

    /// Number of nodes that were killed and came back.
    pub(crate) fn outages(&self) -> usize {
        self.nodes.iter().map(|node| node.restarts).sum()
    }

    /// Number of nodes that have voted before, and are down or in quarantine at this moment.
    pub(crate) fn unavailable_at(&self, at: u64) -> usize {
        let is_unavailable = |node: &&NodeTimeline| {
            let has_voted = node.votes.first().is_some_and(|(from, _)| *from <= at);
            has_voted && !node.votes.iter().any(|(from, until)| (*from..*until).contains(&at))
        };
        self.nodes.iter().filter(is_unavailable).count()
    }
}
