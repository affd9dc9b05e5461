//! Which nodes voted when, as the record has it.

use crate::history::{Change, Event, Record};

/// One node.
#[derive(Debug, Default)]
pub(crate) struct Track {
    /// Up, but without a vote.
    pub(crate) quarantines: Vec<(u64, u64)>,
    pub(crate) votes: Vec<(u64, u64)>,
    pub(crate) kills: Vec<u64>,
    /// When its first quarantine was to end.
    fresh_until: u64,
    restarts: usize,
}

/// By number.
#[derive(Debug, Default)]
pub(crate) struct Availability {
    pub(crate) tracks: Vec<Track>,
}

impl Availability {
    pub(crate) fn of(records: &[Record]) -> Availability {
        let node = |record: &Record| match record.event {
            Event::Node { node, change } => Some((node, record.at, change)),
            _ => None,
        };
        let events: Vec<_> = records.iter().filter_map(node).collect();
        let nodes = events.iter().map(|(node, ..)| *node).max().unwrap_or(0);
        let track = |number| {
            let mut track = Track::default();
            let (mut quarantined, mut voting) = (None, None);
            for (_, at, change) in events.iter().filter(|(node, ..)| *node == number) {
                track.quarantines.extend(quarantined.take().map(|from| (from, *at)));
                track.votes.extend(voting.take().map(|from| (from, *at)));
                match change {
                    Change::Up { votes_from } => {
                        quarantined = Some(*at);
                        if track.kills.is_empty() {
                            track.fresh_until = *votes_from;
                        } else {
                            track.restarts += 1;
                        }
                    }
                    Change::Votes => voting = Some(*at),
                    Change::Down => track.kills.push(*at),
                }
            }
            track.quarantines.extend(quarantined.map(|from| (from, u64::MAX)));
            track.votes.extend(voting.map(|from| (from, u64::MAX)));
            track
        };
        Availability { tracks: (1..=nodes).map(track).collect() }
    }

    pub(crate) fn quorum(&self) -> usize {
        self.tracks.len() / 2 + 1
    }

    /// When the first lock may be given: then a quorum has been up for the lease.
    pub(crate) fn first_quorum(&self) -> u64 {
        let mut ends: Vec<u64> = self.tracks.iter().map(|track| track.fresh_until).collect();
        ends.sort_unstable();
        ends.get(self.quorum() - 1).copied().unwrap_or(0)
    }

    /// How many were killed, and came back.
    pub(crate) fn outages(&self) -> usize {
        self.tracks.iter().map(|track| track.restarts).sum()
    }

    /// How many of those that have voted before are down or in quarantine at this moment.
    pub(crate) fn out_at(&self, at: u64) -> usize {
        let out = |track: &&Track| {
            let began = track.votes.first().is_some_and(|(from, _)| *from <= at);
            began && !track.votes.iter().any(|(from, until)| (*from..*until).contains(&at))
        };
        self.tracks.iter().filter(out).count()
    }
}
