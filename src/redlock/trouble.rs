//! `Trouble`: why there is no answer to go by. Pure.

use super::{
    Redlock,
    ballot::{Ballot, Slip},
};
use crate::{
    answer::{Answers, NodeAnswer},
    clock,
    node::{Failure, Reason},
};

#[derive(Debug)]
pub(crate) enum Trouble {
    /// Of the one node, or before any node was asked.
    Alone(Failure),
    /// No quorum of several nodes.
    Several {
        answers: Vec<NodeAnswer>,
        /// Some node may have carried the request out.
        sent: bool,
        /// Trying again soon may help.
        passing: bool,
        /// A node does not vote yet, and will.
        quarantined: bool,
    },
}

impl Trouble {
    /// Of a ballot that came to nothing; `says` puts an answer into words.
    pub(crate) fn of<T>(redlock: &Redlock, mut ballot: Ballot<T>, says: impl Fn(&T) -> String) -> Trouble {
        let nodes = redlock.nodes();
        // What is open goes back in order, and need not be asked again.
        let sent = !ballot.broken().is_empty();
        if let [slip] = ballot.slips.as_mut_slice() {
            return match std::mem::replace(slip, Slip::NotAsked) {
                Slip::Failed(failure) => Trouble::Alone(failure),
                // An answer that came, and does not count.
                _ => Trouble::Alone(Failure { sent: false, reason: Reason::TimedOut }),
            };
        }
        let stuck = |slip: &&Slip<T>| matches!(slip, Slip::Failed(failure) if !failure.is_passing());
        let stuck = ballot.slips.iter().filter(stuck).count();
        let now = clock::now();
        let quarantined = nodes.iter().any(|node| node.quarantined(now).is_some());
        let answers = ballot.answers(redlock, says);
        Trouble::Several { answers, sent, passing: stuck <= nodes.len() - redlock.needed(), quarantined }
    }

    /// Whether trying again soon may help without anybody doing anything.
    pub(crate) fn is_passing(&self) -> bool {
        match self {
            Trouble::Alone(failure) => failure.is_passing(),
            Trouble::Several { passing, .. } => *passing,
        }
    }

    /// The server is no master. Where the connection had been there for a while, its name may lead elsewhere by now.
    pub(crate) fn is_about_a_replica(&self) -> bool {
        matches!(self, Trouble::Alone(failure) if failure.is_about_a_replica())
    }

    /// Whether the request may have been carried out somewhere.
    pub(crate) fn sent(&self) -> bool {
        match self {
            Trouble::Alone(failure) => failure.sent,
            Trouble::Several { sent, .. } => *sent,
        }
    }

    /// Nothing is known but that the time was over.
    pub(crate) fn is_silence(&self) -> bool {
        matches!(self, Trouble::Alone(Failure { reason: Reason::TimedOut, .. }))
    }

    /// No connection was free to ask.
    pub(crate) fn is_pool_exhausted(&self) -> bool {
        matches!(self, Trouble::Alone(Failure { reason: Reason::PoolExhausted, .. }))
    }

    /// Nodes do not vote yet, and it is known that they will.
    pub(crate) fn is_quarantine(&self) -> bool {
        matches!(self, Trouble::Several { quarantined: true, .. })
    }
}

impl std::fmt::Display for Trouble {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Trouble::Alone(failure) => failure.reason.fmt(f),
            Trouble::Several { answers, .. } => write!(f, "no quorum ({})", Answers(answers)),
        }
    }
}
