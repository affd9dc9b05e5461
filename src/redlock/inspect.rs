//! Questions that change nothing, and may be asked twice: who holds a lock, and whether the nodes are there.

use std::time::Duration;

use super::{Ballot, Links, Redlock, Round, Slip, Trouble, Verdict, Vote, quorum, strongest};
use crate::{
    clock::{self, Moment},
    holder::Holder,
    key::LockKey,
    node::{
        Call,
        calls::{Inspect, Inspected, Ping},
    },
};

/// How long to wait for the rest once a quorum has answered.
const GRACE: Duration = Duration::from_millis(20);

impl Redlock {
    /// Who holds a lock by the word of a quorum. A node that does not answer is only waited for where it matters.
    pub(crate) fn inspect(&self, key: &LockKey) -> Result<Inspected, Trouble> {
        let deadline = clock::now().saturating_add(self.operation_timeout());
        match self.holder(self.inspect_by(key, GRACE, deadline)?) {
            // Those who were not waited for may settle it.
            Err(_) if self.len() > 1 && clock::now() < deadline => {
                self.holder(self.inspect_by(key, self.operation_timeout(), deadline)?)
            }
            told => told,
        }
    }

    /// What the nodes know about a lock, as far as they answer within `patience`.
    pub(crate) fn inspect_all(&self, key: &LockKey, patience: Duration) -> Result<Ballot<Inspected>, Trouble> {
        self.inspect_by(key, patience, clock::now().saturating_add(patience))
    }

    fn inspect_by(&self, key: &LockKey, grace: Duration, deadline: Moment) -> Result<Ballot<Inspected>, Trouble> {
        let ballot = self.ask_twice(grace, deadline, |_| Inspect(key))?;
        match ballot.verdict() {
            Verdict::Won => Ok(ballot),
            _ => Err(Trouble::of(self, ballot, says)),
        }
    }

    /// `Err` when it cannot be told by what was said.
    fn holder(&self, ballot: Ballot<Inspected>) -> Result<Inspected, Trouble> {
        let nodes = self.len();
        if nodes == 1 {
            return match ballot.slips.into_iter().next() {
                Some(Slip::Said(answer)) => Ok(answer.reply),
                _ => Ok(Inspected::Free),
            };
        }
        let (mut wrong, mut silent, mut waiters) = (0, 0, 0);
        let mut named: Vec<&Holder> = Vec::new();
        for slip in &ballot.slips {
            match slip {
                Slip::Said(answer) => match &answer.reply {
                    Inspected::Held(holder) => {
                        named.push(holder);
                        // They stand in line on one of the nodes.
                        waiters = waiters.max(holder.waiters().unwrap_or(0));
                    }
                    Inspected::WrongType => wrong += 1,
                    Inspected::Free => {}
                },
                _ => silent += 1,
            }
        }
        let strongest = strongest(named.into_iter().map(|holder| (holder, holder)));
        match strongest {
            Some((count, holder)) if count >= quorum(nodes) => {
                let holder = holder.clone();
                Ok(Inspected::Held(holder.said_by(ballot.answers(self, says)).with_waiters(waiters)))
            }
            _ if wrong > nodes - quorum(nodes) => Ok(Inspected::WrongType),
            // Whoever the silent ones speak for, it is no quorum.
            strongest if strongest.map_or(0, |(count, _)| count) + silent < quorum(nodes) => Ok(Inspected::Free),
            _ => Err(Trouble::of(self, ballot, says)),
        }
    }

    /// How long a quorum takes to answer.
    pub(crate) fn ping(&self) -> Result<Duration, Trouble> {
        let asked = clock::now();
        let deadline = asked.saturating_add(self.operation_timeout());
        let ballot = self.ask_twice(Duration::ZERO, deadline, |_| Ping)?;
        match ballot.verdict() {
            Verdict::Won => Ok(clock::now().after(asked)),
            _ => Err(Trouble::of(self, ballot, |()| "it answers".into())),
        }
    }

    /// Connections may have gone stale, and are replaced at the second try.
    fn ask_twice<C: Call>(
        &self,
        grace: Duration,
        deadline: Moment,
        call: impl Fn(usize) -> C,
    ) -> Result<Ballot<C::Reply>, Trouble> {
        let mut links = self.links(deadline).map_err(Trouble::Alone)?;
        let ballot = self.ask_once(&mut links, deadline, grace, &call);
        let stale = |slip: &Slip<C::Reply>| matches!(slip, Slip::Failed(f) if f.sent && f.is_passing());
        if ballot.verdict() == Verdict::Won || !ballot.slips.iter().any(stale) {
            return Ok(ballot);
        }
        Ok(self.ask_once(&mut links, deadline, grace, &call))
    }

    fn ask_once<C: Call>(
        &self,
        links: &mut Links,
        deadline: Moment,
        grace: Duration,
        call: &impl Fn(usize) -> C,
    ) -> Ballot<C::Reply> {
        let round = Round { grace, ..Round::new(self.all(), deadline) };
        self.ask(links, round, call, |_, _| Vote::Yes)
    }
}

fn says(reply: &Inspected) -> String {
    match reply {
        Inspected::Held(holder) => format!("held by {holder}"),
        Inspected::Free => "free".into(),
        Inspected::WrongType => "its key holds something else than a lock".into(),
    }
}
