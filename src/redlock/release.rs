//! Giving a lock up on all nodes, asked twice where the first answer is lost.

use std::time::Duration;

use super::{
    Links, Redlock, Round, Slip, Trouble,
    ballot::{Ballot, Unheard},
    quorum::{NodeSet, Vote, quorum},
};
use crate::{
    answer::NodeAnswer,
    clock::{self, Moment},
    holder::Holder,
    key::LockKey,
    node::{
        Answer,
        calls::{Release, ReleaseReply},
    },
    released::Released,
};

/// Between tries at a server that is no master.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_millis(200);

/// What is to be released.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Leaving<'a> {
    pub(crate) key: &'a LockKey,
    pub(crate) id: &'a [u8],
    /// Its entry in the queue, or empty.
    pub(crate) waiter: &'a str,
    /// Its holder believed in it until now.
    pub(crate) was_held: bool,
    /// Nodes that have not answered yet when they were asked for it.
    pub(crate) open: NodeSet,
    /// Nodes where an earlier try may have been carried out, of which the answer is lost.
    pub(crate) may_be_done: NodeSet,
}

impl<'a> Leaving<'a> {
    pub(crate) fn call(&self) -> Release<'a> {
        let Leaving { key, id, waiter, .. } = *self;
        Release { key, id, waiter, in_time: false }
    }

    pub(crate) fn vote(_: usize, answer: &Answer<ReleaseReply>) -> Vote {
        match answer.reply {
            ReleaseReply::Released | ReleaseReply::Gone => Vote::Yes,
            ReleaseReply::Other(_) | ReleaseReply::WrongType => Vote::No,
            ReleaseReply::Late { .. } => Vote::Unknown,
        }
    }

    /// The node on which others wait is told last: by then the lock is on its way to being free on the others.
    fn round(&self, to: NodeSet, deadline: Moment) -> Round<'static> {
        Round { backwards: true, all: !self.was_held, ears: self.open, ..Round::new(to, deadline) }
    }
}

/// How it went, and the nodes that have not said so.
#[derive(Debug)]
pub(crate) struct Ending {
    pub(crate) outcome: Result<Released, Trouble>,
    pub(crate) unsettled: NodeSet,
    /// Those that were told, and for whose answers nobody waited.
    pub(crate) unheard: Unheard,
    /// Those that kept it until now.
    pub(crate) released: NodeSet,
    /// Those where it may have been carried out without our hearing of it, for the next try.
    pub(crate) may_be_done: NodeSet,
}

/// Has the one server asked again, ever more seldom, while it is a master no more and the name does not lead to the next one yet.
/// `release` is told where its earlier tries may have been carried out. Nobody keeps a connection during the pauses.
pub(crate) fn past_a_failover(until: Moment, mut release: impl FnMut(NodeSet) -> Ending) -> Ending {
    let mut ending = release(NodeSet::NONE);
    let (mut pause, mut demoted) = (PAUSE_MIN, false);
    while let Err(trouble) = &ending.outcome {
        demoted |= trouble.is_about_a_replica();
        // On its way to the next one the name may also lead to nobody.
        let may_help = demoted && (trouble.is_about_a_replica() || trouble.is_passing());
        let next = clock::now().saturating_add(pause);
        // A try is worth nothing without the time for an answer.
        if !may_help || next.saturating_add(pause) >= until {
            break;
        }
        clock::rest(next);
        pause = (pause * 2).min(PAUSE_MAX);
        let again = release(ending.may_be_done);
        let silence = matches!(&again.outcome, Err(trouble) if trouble.is_silence());
        // That time ran out says less than what was said before.
        ending = if silence { Ending { outcome: ending.outcome, ..again } } else { again };
    }
    ending
}

impl Redlock {
    /// Asks all nodes, and again those whose answer is lost, within `patience`.
    ///
    /// "Nobody holds it" then means that the first request was carried out; and so does "somebody else" if it was held
    /// until then, for a release hands the lock on.
    pub(crate) fn release(&self, links: &mut Links, leaving: Leaving<'_>, patience: Duration) -> Ending {
        self.release_by(leaving, patience, |round| self.ask(links, round, |_| leaving.call(), Leaving::vote))
    }

    /// The same for a caller with its own way of asking.
    pub(crate) fn release_by(
        &self,
        leaving: Leaving<'_>,
        patience: Duration,
        mut ask: impl FnMut(Round<'_>) -> Ballot<ReleaseReply>,
    ) -> Ending {
        let started = clock::now();
        // Half the time, so that there is another half.
        let first = leaving.round(self.all(), started.saturating_add(patience / 2));
        let mut ballot = ask(Round { retried: true, ..first });
        let mut may_be_done = leaving.may_be_done.with(ballot.broken());
        let repeat = repeatable(&ballot);
        if !repeat.is_empty() && (self.len() == 1 || !is_certain(&ballot, leaving.was_held)) {
            let second = leaving.round(repeat, started.saturating_add(patience));
            let second = ask(Round { before: ballot.votes.clone(), ..second });
            for (node, (slip, vote)) in second.slips.into_iter().zip(second.votes).enumerate() {
                if repeat.has(node) {
                    (ballot.slips[node], ballot.votes[node]) = (slip, vote);
                }
            }
            may_be_done = may_be_done.with(ballot.broken());
            ballot.receipts.extend(second.receipts);
        }
        self.outcome(ballot, leaving.was_held, may_be_done)
    }

    fn outcome(&self, mut ballot: Ballot<ReleaseReply>, was_held: bool, may_be_done: NodeSet) -> Ending {
        let needed = quorum(self.len());
        let (mut released, mut gone, mut known) = (0, 0, 0);
        let (mut unsettled, mut kept) = (NodeSet::NONE, NodeSet::NONE);
        let mut other: Option<Holder> = None;
        let mut answers = Vec::new();
        let mut unheard = std::mem::take(&mut ballot.receipts);
        unheard.retain(|(node, _)| matches!(ballot.slips[*node], Slip::Open));
        for (node, slip) in ballot.slips.iter().enumerate() {
            let again = may_be_done.has(node);
            match slip {
                Slip::Said(answer) => match &answer.reply {
                    ReleaseReply::Released => {
                        released += 1;
                        kept = kept.with(NodeSet::only(node));
                    }
                    ReleaseReply::Gone if again => released += 1,
                    ReleaseReply::Other(_) if again && was_held => released += 1,
                    ReleaseReply::Gone | ReleaseReply::WrongType | ReleaseReply::Late { .. } => gone += 1,
                    ReleaseReply::Other(holder) => {
                        known += 1;
                        answers.push(NodeAnswer::new(self.node(node).label(), Vote::No, format!("held by {holder}")));
                        other.get_or_insert_with(|| holder.clone());
                    }
                },
                Slip::Failed(_) => unsettled = unsettled.with(NodeSet::only(node)),
                Slip::Open | Slip::NotAsked => {}
            }
        }
        known += released + gone;
        let outcome = if released >= needed || (was_held && released > 0 && released + gone >= needed) {
            Ok(Released::Released)
        } else if known < needed || (was_held && known - released <= self.len() - needed) {
            // Who held it until now has not lost it as long as the silent ones may have kept it.
            Err(Trouble::of(self, ballot, says))
        } else if let Some(holder) = other {
            Ok(Released::OwnedByOther(if self.len() > 1 { holder.said_by(answers) } else { holder }))
        } else {
            Ok(Released::Gone)
        };
        Ending { outcome, unsettled, unheard, released: kept, may_be_done }
    }
}

fn is_certain(ballot: &Ballot<ReleaseReply>, was_held: bool) -> bool {
    was_held && ballot.voting(Vote::Yes).len() >= quorum(ballot.votes.len())
}

/// The nodes where another try may help: also where a connection has stayed with a server that is no master any more.
fn repeatable(ballot: &Ballot<ReleaseReply>) -> NodeSet {
    ballot.nodes_where(
        |slip| matches!(slip, Slip::Failed(failure) if failure.is_passing() || failure.is_about_a_replica()),
    )
}

fn says(reply: &ReleaseReply) -> String {
    match reply {
        ReleaseReply::Released => "released it".into(),
        ReleaseReply::Gone => "nobody held it".into(),
        ReleaseReply::Other(holder) => format!("held by {holder}"),
        ReleaseReply::WrongType => "its key holds something else than a lock".into(),
        ReleaseReply::Late { .. } => "the request came too late".into(),
    }
}
