//! Looking at many locks: their names by scanning, then who holds them and who waits, in small batches. Changes nothing.

use std::collections::BTreeSet;

use super::{Ballot, Links, NodeSet, Redlock, Round, Slip, Trouble, Vote, strongest};
use crate::{
    clock::{self, Moment},
    key::LockKey,
    lock_info::LockInfo,
    node::{
        Call, Failure, Reason,
        survey::{Scan, Standing, Survey, Surveyed, key_pattern},
    },
};

/// Locks in one call of the script, which keeps a server from all else for less than a millisecond: far enough from the 5 ms
/// that nobody should have to wait, for slow machines and long lines as well.
const BATCH: usize = 50;
/// Waiters that are told of one lock in a list, and of all locks of a batch together.
const WAITERS_EACH: u64 = 100;
const WAITERS_TOTAL: u64 = 1_000;
/// Far more steps, and keys told in them, than it takes servers with locks to come to an end.
const SCAN_MAX: usize = 1 << 20;
/// So many bytes of what servers tell a list may keep: names of as many locks as above, and who holds them.
const KEPT_MAX: usize = 256 << 20;
/// So often a node is gone through from the beginning. One that cuts its connections again and again is most likely the same
/// server all the time, and a list of it is to come to an end.
const RESTARTS_MAX: u32 = 8;
/// So many operation timeouts all steps of a list may take together.
const LIST_MAX: u32 = 60;

/// A look at one lock.
#[derive(Debug)]
pub(crate) enum Look {
    Held(LockInfo),
    Free,
    WrongType,
}

/// How much a list may still keep, in bytes: those who are asked could tell of names and waiters without an end.
struct Room(usize);

impl Room {
    fn take(&mut self, bytes: usize) -> Result<(), Trouble> {
        self.0 = self.0.checked_sub(bytes).ok_or_else(endless)?;
        Ok(())
    }

    fn take_lock(&mut self, lock: &LockInfo) -> Result<(), Trouble> {
        let waiters: usize = lock.waiters().iter().map(|waiter| waiter.id().len()).sum();
        self.take(lock.name().len() + lock.holder().id().len() + waiters)
    }
}

/// How far one node has told its keys.
#[derive(Clone)]
struct Course {
    cursor: String,
    /// Since when the connection has been open over which it told the last ones.
    line: Option<Moment>,
    restarts: u32,
}

impl Course {
    fn begin() -> Course {
        Course { cursor: "0".to_owned(), line: None, restarts: 0 }
    }

    /// Keys have come over a connection, and this is where the next ones begin. True when these were the last. Over another
    /// connection there may be another server, to which the place means nothing, so that it has to begin anew.
    fn goes_on(&mut self, line: Option<Moment>, next: Option<String>) -> bool {
        let strange = self.cursor != "0" && self.line != line && self.restarts < RESTARTS_MAX;
        self.line = line;
        if strange {
            *self = Course { restarts: self.restarts + 1, ..Course::begin() };
            return false;
        }
        next.map(|next| self.cursor = next).is_none()
    }
}

fn endless() -> Trouble {
    Trouble::Alone(Failure::unclear(Reason::Garbled("it tells of ever more keys".into())))
}

impl Redlock {
    /// All locks that match, by name. A lock that a quorum of the nodes gave to somebody is known to one node, at least,
    /// of any quorum; so it takes a quorum that can be asked from beginning to end.
    pub(crate) fn locks(&self, prefix: &str, pattern: &str) -> Result<Vec<LockInfo>, Trouble> {
        let (began, timeout) = (clock::now(), self.operation_timeout());
        let end = began.saturating_add(timeout.saturating_mul(LIST_MAX));
        let mut links = self.links(began.saturating_add(timeout)).map_err(Trouble::Alone)?;
        let mut room = Room(KEPT_MAX);
        let (keys, mut nodes) = self.scan(&mut links, &mut room, prefix, &key_pattern(prefix, pattern), end)?;
        let mut locks = Vec::new();
        for batch in keys.chunks(BATCH) {
            let survey = |_| Survey { keys: batch, waiters_each: WAITERS_EACH, waiters_total: WAITERS_TOTAL };
            let ballot = self.ask_lasting(&mut links, nodes, &mut nodes, end, survey)?;
            for (index, key) in batch.iter().enumerate() {
                match self.look(key, &ballot, index) {
                    // Under no prefix, whatever does not look like a lock is anybody's data.
                    Look::Held(lock) if !prefix.is_empty() || lock.holder().lock_id().is_some() => {
                        room.take_lock(&lock)?;
                        locks.push(lock);
                    }
                    _ => {}
                }
            }
        }
        Ok(locks)
    }

    /// One lock, with as many of its waiters as go into a reply.
    pub(crate) fn look_at(&self, key: &LockKey) -> Result<Look, Trouble> {
        let end = clock::now().saturating_add(self.operation_timeout());
        let mut links = self.links(end).map_err(Trouble::Alone)?;
        let keys = std::slice::from_ref(key);
        let survey = |_| Survey { keys, waiters_each: WAITERS_TOTAL, waiters_total: WAITERS_TOTAL };
        let ballot = self.ask_lasting(&mut links, self.all(), &mut self.all(), end, survey)?;
        Ok(self.look(key, &ballot, 0))
    }

    /// The keys of all nodes, each once, and the nodes that told theirs to the end.
    fn scan(
        &self,
        links: &mut Links,
        room: &mut Room,
        prefix: &str,
        pattern: &str,
        end: Moment,
    ) -> Result<(Vec<LockKey>, NodeSet), Trouble> {
        let mut courses = vec![Course::begin(); self.len()];
        let mut found: BTreeSet<LockKey> = BTreeSet::new();
        let (mut open, mut lasting, mut told) = (self.all(), self.all(), 0);
        while !open.is_empty() {
            told += 1;
            if told > SCAN_MAX {
                return Err(endless());
            }
            let scan = |node: usize| Scan { cursor: &courses[node].cursor, pattern };
            let ballot = self.ask_lasting(links, open, &mut lasting, end, scan)?;
            open = open.both(lasting);
            for (node, slip) in ballot.slips.into_iter().enumerate() {
                if let Slip::Said(answer) = slip {
                    told += answer.reply.keys.len();
                    for key in answer.reply.keys {
                        // What cannot be the name of a lock was put there by somebody else, and is of any length.
                        let Some(Ok(key)) = key.strip_prefix(prefix).map(|name| LockKey::new(prefix, name)) else {
                            continue;
                        };
                        let bytes = key.lock().len();
                        if found.insert(key) {
                            room.take(bytes)?;
                        }
                    }
                    if courses[node].goes_on(links.0[node].opened_at(), answer.reply.next) {
                        open = open.without(NodeSet::only(node));
                    }
                }
            }
        }
        Ok((found.into_iter().collect(), lasting))
    }

    /// Asks nodes, and again those whose connection had gone stale, within one operation timeout and before `end`. Who does
    /// not answer is struck off `lasting`; fails when no quorum of them is left.
    fn ask_lasting<C: Call>(
        &self,
        links: &mut Links,
        to: NodeSet,
        lasting: &mut NodeSet,
        end: Moment,
        call: impl Fn(usize) -> C,
    ) -> Result<Ballot<C::Reply>, Trouble> {
        let deadline = clock::now().saturating_add(self.operation_timeout()).min(end);
        let mut ballot = self.ask(links, Round::all(to, deadline), &call, |_, _| Vote::Yes);
        let stale = ballot.nodes_where(|slip| matches!(slip, Slip::Failed(f) if f.sent && f.is_passing()));
        if !stale.is_empty() && clock::now() < deadline {
            let second = self.ask(links, Round::all(stale, deadline), &call, |_, _| Vote::Yes);
            for (node, (slip, vote)) in second.slips.into_iter().zip(second.votes).enumerate() {
                if stale.has(node) {
                    (ballot.slips[node], ballot.votes[node]) = (slip, vote);
                }
            }
        }
        *lasting = lasting.without(to.without(ballot.voting(Vote::Yes)));
        if lasting.len() < self.needed() {
            return Err(Trouble::of(self, ballot, |_| "it answers".into()));
        }
        Ok(ballot)
    }

    /// What the answers say about the lock at `index` of a batch: held by whom the most of the nodes say.
    fn look(&self, key: &LockKey, ballot: &Ballot<(u64, Vec<Surveyed>)>, index: usize) -> Look {
        let (mut wrong, mut line): (usize, Option<&Standing>) = (0, None);
        let mut named: Vec<&Standing> = Vec::new();
        for slip in &ballot.slips {
            let Slip::Said(answer) = slip else { continue };
            match answer.reply.1.get(index) {
                Some(Surveyed::Held(standing)) => {
                    named.push(standing);
                    // All stand in line on one of the nodes.
                    if line.is_none_or(|line| standing.holder.waiters() > line.holder.waiters()) {
                        line = Some(standing);
                    }
                }
                Some(Surveyed::WrongType) => wrong += 1,
                Some(Surveyed::Free) | None => {}
            }
        }
        let strongest = strongest(named.into_iter().map(|standing| (&standing.holder, standing)));
        let (Some((count, standing)), Some(line)) = (strongest, line) else {
            return if wrong > self.len() - self.needed() { Look::WrongType } else { Look::Free };
        };
        let mut holder = standing.holder.clone().with_waiters(line.holder.waiters().unwrap_or(0));
        if self.len() > 1 {
            let says = |reply: &(u64, Vec<Surveyed>)| reply.1.get(index).map_or_else(String::new, says);
            holder = holder.said_by(ballot.answers(self, says));
        }
        let certain = count >= self.needed();
        Look::Held(LockInfo::new(key.name(), holder, standing.token, line.waiters.clone(), certain))
    }
}

fn says(answer: &Surveyed) -> String {
    match answer {
        Surveyed::Held(Standing { holder, .. }) => format!("held by {holder}"),
        Surveyed::Free => "free".into(),
        Surveyed::WrongType => "its key holds something else than a lock".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_in_one_servers_keys_is_none_in_anothers() {
        let at = |nanos| Some(Moment::from_nanos(nanos));
        let to = |cursor: &str| Some(cursor.to_owned());
        let mut course = Course::begin();
        assert!(!course.goes_on(at(1), to("17")) && !course.goes_on(at(1), to("5")));
        assert_eq!(course.cursor, "5");
        assert!(!course.goes_on(at(2), None), "these were the last of another server");
        assert_eq!(course.cursor, "0");
        assert!(!course.goes_on(at(3), to("17")), "it begins there");
        assert!(course.goes_on(at(3), None));
        // Who cuts every connection comes to an end all the same.
        let mut course = Course::begin();
        let steps = (1..).take_while(|step| !course.goes_on(at(*step), (step % 100 != 0).then(|| step.to_string())));
        assert_eq!(steps.count(), 99);
    }
}
