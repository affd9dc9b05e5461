//! `UndoList`: what may have been left on the server and is taken back in the background, until it is or has expired.
//! Pure.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use crate::{
    clock::Moment,
    grant::Claim,
    lease::Lease,
    redlock::{NodeSet, Unheard},
};

/// Far more than a process can leave behind in the time that anything stays here; a bound on memory all the same.
pub(super) const LENGTH_MAX: usize = 65_536;
const RETRY_MIN: Duration = Duration::from_millis(10);
const RETRY_MAX: Duration = Duration::from_secs(1);

/// A claim whose traces are to be removed: its lock released if it has it, its place in the line given up.
#[derive(Clone, Debug)]
pub(crate) struct Undo {
    pub(crate) claim: Claim,
    /// Its entry in the queue, or empty.
    pub(crate) waiter: String,
    /// Where it has not been taken back yet.
    pub(crate) nodes: NodeSet,
    /// Not as long as this lease lives, which has the claim.
    pub(crate) unless_held: Option<Arc<Lease>>,
    /// For the answers to it that have not been waited for.
    pub(crate) asked: Unheard,
    /// When the server has forgotten it by itself.
    pub(crate) until: Moment,
}

impl Undo {
    /// Where it has been asked for, and the answer has not come.
    pub(super) fn owing(&self) -> NodeSet {
        self.answers(false).both(self.nodes)
    }

    /// Strikes off where it has been asked for, and the answer has come since.
    pub(super) fn strike_settled(&mut self) {
        self.nodes = self.nodes.without(self.answers(true));
        self.asked.retain(|(_, receipt)| !receipt.is_settled());
    }

    fn answers(&self, settled: bool) -> NodeSet {
        self.asked.iter().filter(|(_, receipt)| receipt.is_settled() == settled).map(|(node, _)| *node).collect()
    }
}

#[derive(Debug, Default)]
pub(crate) struct UndoList {
    /// By the moment of the next try, and a number that keeps equal moments apart.
    list: BTreeMap<(Moment, u64), (Undo, Duration)>,
    last: u64,
    /// Something had to go, and nobody has been told.
    overflowed: bool,
}

impl UndoList {
    /// Adds one, to be tried at `at`. When the list is full, the next one has to go.
    pub(crate) fn add(&mut self, undo: Undo, at: Moment) {
        if self.list.len() >= LENGTH_MAX {
            self.list.pop_first();
            self.overflowed = true;
        }
        self.put(undo, at, RETRY_MIN);
    }

    /// Something that would have come to it had to go before.
    pub(crate) fn overflow(&mut self) {
        self.overflowed = true;
    }

    /// Whether something had to go since this was last asked.
    pub(crate) fn take_overflowed(&mut self) -> bool {
        std::mem::take(&mut self.overflowed)
    }

    pub(crate) fn earliest(&self) -> Moment {
        self.list.first_key_value().map_or(Moment::NEVER, |((at, _), _)| *at)
    }

    /// The next one that is due at `now`, with the pause after which to try again should it fail.
    pub(crate) fn take_due(&mut self, now: Moment) -> Option<(Undo, Duration)> {
        while self.earliest() <= now {
            let (_, (mut undo, pause)) = self.list.pop_first()?;
            let held = undo.unless_held.as_ref().is_some_and(|lease| lease.ended().is_none());
            undo.strike_settled();
            if now < undo.until && !held && !undo.nodes.is_empty() {
                return Some((undo, pause));
            }
        }
        None
    }

    pub(crate) fn failed(&mut self, undo: Undo, pause: Duration, now: Moment) {
        self.put(undo, now.saturating_add(pause), (pause * 2).min(RETRY_MAX));
    }

    pub(crate) fn take_all(&mut self) -> Vec<Undo> {
        std::mem::take(&mut self.list).into_values().map(|(undo, _)| undo).collect()
    }

    fn put(&mut self, undo: Undo, at: Moment, pause: Duration) {
        self.last += 1;
        self.list.insert((at, self.last), (undo, pause));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        grant::{Grant, Late},
        id::generate_lock_id,
        key::LockKey,
        lease::End,
        node::Receipts,
        observer::Hold,
        redlock::Votes,
        token::FencingToken,
    };

    fn at(millis: u64) -> Moment {
        Moment::from_nanos(millis * 1_000_000)
    }

    fn undo(until: u64) -> Undo {
        let claim = Claim { key: LockKey::new("", "x").unwrap(), id: generate_lock_id(), ttl: Duration::from_secs(1) };
        Undo {
            claim,
            waiter: String::new(),
            nodes: NodeSet::only(0),
            unless_held: None,
            asked: Unheard::new(),
            until: at(until),
        }
    }

    #[test]
    fn tried_at_once_then_at_growing_distances_until_it_is_moot() {
        let mut list = UndoList::default();
        list.add(undo(5_000), at(100));
        let (mut now, mut tries, mut last_pause) = (100, 0, Duration::ZERO);
        while let Some((undo, pause)) = list.take_due(at(now)) {
            assert!(pause >= last_pause && pause <= RETRY_MAX);
            last_pause = pause;
            tries += 1;
            assert!(tries < 15, "there is no end to it");
            list.failed(undo, pause, at(now));
            now = list.earliest().as_nanos() / 1_000_000;
        }
        assert!(tries >= 8, "{tries} tries");
        assert!(now >= 5_000);
        assert_eq!(list.earliest(), Moment::NEVER);
    }

    #[test]
    fn what_the_server_has_forgotten_or_a_lease_has_is_left_alone() {
        let mut list = UndoList::default();
        list.add(undo(100), at(100));
        let late = Late { broken_until: at(0), open: NodeSet::NONE, open_until: at(0) };
        let (token, votes, nodes) = (FencingToken(1), Votes::new(1), NodeSet::only(0));
        let grant = Grant { token, votes, provisional: false, late, nodes, place: String::new() };
        let claimed = undo(500);
        let lease = Arc::new(Lease::open(claimed.claim.clone(), &grant, Hold::since(at(0))));
        let claimed = Undo { unless_held: Some(lease.clone()), ..claimed };
        list.add(claimed.clone(), at(100));
        assert!(list.take_due(at(100)).is_none());
        list.add(claimed, at(100));
        lease.end(End::Released);
        assert!(list.take_due(at(100)).is_some(), "its lease is over");
    }

    #[test]
    fn what_a_node_has_answered_meanwhile_is_not_asked_of_it_again() {
        let (mut links, mut list) = ([Receipts::default(), Receipts::default()], UndoList::default());
        let asked = links.iter_mut().enumerate().map(|(node, receipts)| (node, receipts.write(1))).collect();
        list.add(Undo { nodes: NodeSet::first(3), asked, ..undo(500) }, at(100));
        links[0].take(false);
        links[1].take(true);
        let (again, _) = list.take_due(at(100)).unwrap();
        assert_eq!((again.nodes, again.owing()), ([1, 2].into_iter().collect(), NodeSet::only(1)));
        let settled = links[1].write(1);
        links[1].take(false);
        list.add(Undo { nodes: NodeSet::only(1), asked: Unheard::from_elem((1, settled), 1), ..again }, at(100));
        assert!(list.take_due(at(100)).is_none());
    }

    #[test]
    fn what_is_due_at_the_same_moment_is_kept_apart() {
        let mut list = UndoList::default();
        list.add(undo(500), at(100));
        list.add(undo(500), at(100));
        assert_eq!(list.take_all().len(), 2);
        assert_eq!(list.earliest(), Moment::NEVER);
    }

    #[test]
    fn the_list_is_bounded() {
        let mut list = UndoList::default();
        (0..LENGTH_MAX as u64).for_each(|n| list.add(undo(1 << 40), at(n)));
        assert!(!list.take_overflowed());
        list.add(undo(1 << 40), at(1 << 30));
        assert_eq!([list.take_overflowed(), list.take_overflowed()], [true, false], "told once");
        assert_eq!(list.take_all().len(), LENGTH_MAX);
        list.overflow();
        assert!(list.take_overflowed(), "what had to go before it came here is told too");
    }
}
