//! `PerLockTable`: metrics per lock, for a bounded number of locks. Pure.
//!
//! A program may use an unbounded number of lock names, for example one per order. When the table
//! is full, the clock algorithm evicts a lock that was not used again since the clock hand last
//! passed it; this approximates "least recently used". The numbers of an evicted lock are added to
//! `others`. So a frequently used lock keeps its entry even if many locks are used once, and the
//! sums over all entries stay correct.

use std::{collections::HashMap, time::Duration};

use super::timing::Timing;

/// Significant digits of the times. With one digit an entry needs a few kilobytes at most.
const PRECISION_DIGITS: u8 = 1;

/// Counts and times of one lock.
#[derive(Clone, Debug)]
pub(super) struct LockStats {
    pub(super) name: Box<str>,
    pub(super) acquired: u64,
    pub(super) contended: u64,
    pub(super) timed_out: u64,
    pub(super) lost: u64,
    pub(super) wait: Timing,
    pub(super) hold: Timing,
    pub(super) min_margin: Option<Duration>,
    /// Whether the lock was used again since the clock hand last passed.
    recently_used: bool,
}

impl LockStats {
    pub(super) fn new(name: &str) -> LockStats {
        LockStats {
            name: name.into(),
            acquired: 0,
            contended: 0,
            timed_out: 0,
            lost: 0,
            wait: Timing::new(PRECISION_DIGITS),
            hold: Timing::new(PRECISION_DIGITS),
            min_margin: None,
            recently_used: false,
        }
    }

    pub(super) fn record_margin(&mut self, margin: Duration) {
        self.min_margin = Some(self.min_margin.map_or(margin, |least| least.min(margin)));
    }

    fn merge(&mut self, other: &LockStats) {
        self.acquired += other.acquired;
        self.contended += other.contended;
        self.timed_out += other.timed_out;
        self.lost += other.lost;
        self.wait.add(&other.wait);
        self.hold.add(&other.hold);
        if let Some(margin) = other.min_margin {
            self.record_margin(margin);
        }
    }
}

#[derive(Debug)]
pub(super) struct PerLockTable {
    capacity: usize,
    stats: Vec<LockStats>,
    index: HashMap<Box<str>, usize>,
    /// Index of the next entry to consider for eviction.
    clock_hand: usize,
    pub(super) others: LockStats,
}

impl PerLockTable {
    pub(super) fn new(capacity: usize) -> PerLockTable {
        PerLockTable {
            capacity,
            stats: Vec::new(),
            index: HashMap::new(),
            clock_hand: 0,
            others: LockStats::new(""),
        }
    }

    /// Returns the entry of a lock that is being used. Marks the entry if it already existed.
    pub(super) fn touch(&mut self, name: &str) -> &mut LockStats {
        let existed = self.index.contains_key(name);
        let entry = self.entry(name);
        entry.recently_used |= existed;
        entry
    }

    /// Returns the entry of a lock, inserting it if necessary.
    pub(super) fn entry(&mut self, name: &str) -> &mut LockStats {
        let at = match self.index.get(name) {
            Some(at) => *at,
            None => self.insert_or_evict(name),
        };
        // Only a table without capacity has no entry.
        self.stats.get_mut(at).unwrap_or(&mut self.others)
    }

    fn insert_or_evict(&mut self, name: &str) -> usize {
        let at = self.stats.len();
        if at < self.capacity {
            self.stats.push(LockStats::new(name));
            self.index.insert(name.into(), at);
            return at;
        }
        // The first round clears all marks, so the next step finds an entry.
        for _ in 0..=self.capacity {
            let at = self.clock_hand;
            let Some(entry) = self.stats.get_mut(at) else { break };
            self.clock_hand = (at + 1) % self.capacity;
            if !std::mem::take(&mut entry.recently_used) {
                self.others.merge(entry);
                self.index.remove(&entry.name);
                *entry = LockStats::new(name);
                self.index.insert(name.into(), at);
                return at;
            }
        }
        usize::MAX
    }

    /// Returns up to `length` entries from index `from`, for a copy made in chunks.
    pub(super) fn chunk(&self, from: usize, length: usize) -> &[LockStats] {
        let end = from.saturating_add(length).min(self.stats.len());
        self.stats.get(from..end).unwrap_or(&[])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn names(table: &PerLockTable) -> Vec<String> {
        let mut names: Vec<_> =
            table.chunk(0, usize::MAX).iter().map(|entry| entry.name.to_string()).collect();
        names.sort();
        names
    }

    #[test]
    fn rarely_used_lock_is_evicted_into_others() {
        let mut table = PerLockTable::new(3);
        for name in ["a", "b", "often", "often", "x", "y", "often", "z", "1", "often", "2"] {
            let entry = table.touch(name);
            entry.acquired += 1;
            entry.wait.record(Duration::from_millis(1));
            entry.record_margin(Duration::from_secs(1));
        }
        assert!(names(&table).contains(&"often".to_owned()), "{:?}", names(&table));
        assert_eq!(table.entry("often").acquired, 4);
        assert_eq!((table.others.acquired, table.others.wait.count()), (5, 5));
        assert_eq!(table.others.min_margin, Some(Duration::from_secs(1)));
        assert!(table.entry("new").min_margin.is_none());
    }

    #[test]
    fn oldest_unused_lock_is_evicted_first() {
        let mut table = PerLockTable::new(3);
        for (asked, left) in [
            ("a", "a"),
            ("b", "ab"),
            ("c", "abc"),
            ("d", "bcd"),
            ("e", "cde"),
            ("f", "def"),
            ("g", "efg"),
        ] {
            table.touch(asked);
            assert_eq!(names(&table).concat(), left);
        }
        // An entry that was used again is spared once.
        for asked in ["e", "f", "g", "h", "i"] {
            table.touch(asked);
        }
        assert_eq!(names(&table), ["g", "h", "i"]);
    }

    #[test]
    fn evicted_counts_move_to_others() {
        let mut table = PerLockTable::new(1);
        for name in ["a", "b", "c"] {
            let entry = table.entry(name);
            (entry.acquired, entry.contended, entry.timed_out, entry.lost) = (1, 2, 3, 4);
        }
        let others = &table.others;
        assert_eq!(
            (others.acquired, others.contended, others.timed_out, others.lost),
            (2, 4, 6, 8)
        );
    }

    proptest! {
        /// No count is lost, the table never exceeds its capacity, and every entry has its own
        /// name.
        #[test]
        fn sums_are_preserved_by_eviction(
            capacity in 0usize..5,
            used in proptest::collection::vec(0u8..9, 0..80),
        ) {
            let mut table = PerLockTable::new(capacity);
            for name in &used {
                let entry = table.touch(&name.to_string());
                entry.acquired += 1;
                entry.hold.record(Duration::from_micros((*name).into()));
            }
            let names = names(&table);
            prop_assert!(names.len() <= capacity);
            prop_assert!(names.windows(2).all(|pair| pair[0] != pair[1]));
            let rows_sum: u64 = table.chunk(0, 99).iter().map(|entry| entry.acquired).sum();
            prop_assert_eq!(rows_sum + table.others.acquired, used.len() as u64);
            let holds: u64 = table.chunk(0, 99).iter().map(|entry| entry.hold.count()).sum();
            prop_assert_eq!(holds + table.others.hold.count(), used.len() as u64);
            for entry in table.chunk(0, 99) {
                prop_assert_eq!(
                    table.index.get(&entry.name).map(|at| &table.stats[*at].name),
                    Some(&entry.name)
                );
            }
        }
    }
}
