//! What the nodes said when they were asked.

use smallvec::SmallVec;

use super::{
    Redlock,
    quorum::{NodeSet, Verdict, Vote, verdict},
};
use crate::{
    answer::NodeAnswer,
    node::{Answer, Failure, Reason, Receipt},
};

/// What one node said.
#[derive(Debug)]
pub(crate) enum Slip<T> {
    NotAsked,
    /// Asked, and it has not answered yet: what it was asked may still be carried out.
    Open,
    Said(Answer<T>),
    Failed(Failure),
}

/// What the nodes said, in their order.
#[derive(Debug)]
pub(crate) struct Ballot<T> {
    pub(crate) slips: SmallVec<[Slip<T>; 1]>,
    pub(crate) votes: SmallVec<[Option<Vote>; 8]>,
    /// For the answers that were left behind.
    pub(crate) receipts: Unheard,
}

/// Nodes whose answers nobody waits for.
pub(crate) type Unheard = SmallVec<[(usize, Receipt); 1]>;

impl<T> Ballot<T> {
    pub(crate) fn verdict(&self) -> Verdict {
        verdict(self.votes.iter().copied())
    }

    /// The nodes with this vote.
    pub(crate) fn voting(&self, vote: Vote) -> NodeSet {
        self.votes.iter().enumerate().filter(|(_, cast)| **cast == Some(vote)).map(|(node, _)| node).collect()
    }

    /// In words; `says` puts an answer into words.
    pub(crate) fn answers(&self, redlock: &Redlock, says: impl Fn(&T) -> String) -> Vec<NodeAnswer> {
        let lines = self.slips.iter().zip(&self.votes).zip(redlock.nodes()).map(|((slip, vote), node)| {
            let vote = vote.unwrap_or(Vote::Unknown);
            let says = match slip {
                Slip::Said(answer) => match node.quarantined(answer.sent) {
                    Some(left) if vote == Vote::Unknown => Reason::Quarantined(left).to_string(),
                    _ => says(&answer.reply),
                },
                Slip::Open => "has not answered yet".into(),
                Slip::Failed(failure) => failure.reason.to_string(),
                Slip::NotAsked => "was not asked".into(),
            };
            NodeAnswer::new(node.label(), vote, says)
        });
        lines.collect()
    }

    /// The nodes that had not answered when the others had decided. The connection keeps its order.
    pub(crate) fn open(&self) -> NodeSet {
        self.nodes_where(|slip| matches!(slip, Slip::Open))
    }

    /// The nodes that may carry the request out without our hearing of it.
    pub(crate) fn broken(&self) -> NodeSet {
        self.nodes_where(|slip| matches!(slip, Slip::Failed(failure) if failure.sent))
    }

    /// The nodes that were asked and let the time pass.
    pub(crate) fn silent(&self) -> NodeSet {
        let timed_out = |failure: &Failure| matches!(failure.reason, Reason::TimedOut);
        self.nodes_where(|slip| matches!(slip, Slip::Failed(failure) if timed_out(failure))).with(self.open())
    }

    pub(crate) fn nodes_where(&self, which: impl Fn(&Slip<T>) -> bool) -> NodeSet {
        self.slips.iter().enumerate().filter(|(_, slip)| which(slip)).map(|(node, _)| node).collect()
    }
}
