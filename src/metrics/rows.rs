//! `Rows`: what is counted for each lock, for so many of them. Pure.
//!
//! Names can be without number, such as one for each order. When there is no room, a row that has not been asked for again
//! since the hand came by last gives way (the "clock" that approximates "least recently used"), and what it has counted
//! goes on under "others". So a lock that is used often keeps its row, however many are used once, and nothing is lost
//! from the sums.

use std::{collections::HashMap, time::Duration};

use super::timing::Timing;

/// One digit of the times: a row then has a few kilobytes at most.
const DIGITS: u8 = 1;

/// What is counted for one lock.
#[derive(Clone, Debug)]
pub(super) struct Row {
    pub(super) name: Box<str>,
    pub(super) acquired: u64,
    pub(super) contended: u64,
    pub(super) timed_out: u64,
    pub(super) lost: u64,
    pub(super) wait: Timing,
    pub(super) hold: Timing,
    pub(super) least_margin: Option<Duration>,
    /// Asked for again since the hand came by.
    wanted: bool,
}

impl Row {
    pub(super) fn new(name: &str) -> Row {
        Row {
            name: name.into(),
            acquired: 0,
            contended: 0,
            timed_out: 0,
            lost: 0,
            wait: Timing::new(DIGITS),
            hold: Timing::new(DIGITS),
            least_margin: None,
            wanted: false,
        }
    }

    pub(super) fn margin(&mut self, margin: Duration) {
        self.least_margin = Some(self.least_margin.map_or(margin, |least| least.min(margin)));
    }

    fn add(&mut self, other: &Row) {
        self.acquired += other.acquired;
        self.contended += other.contended;
        self.timed_out += other.timed_out;
        self.lost += other.lost;
        self.wait.add(&other.wait);
        self.hold.add(&other.hold);
        if let Some(margin) = other.least_margin {
            self.margin(margin);
        }
    }
}

#[derive(Debug)]
pub(super) struct Rows {
    room: usize,
    rows: Vec<Row>,
    index: HashMap<Box<str>, usize>,
    /// The next row to look at when room is needed.
    hand: usize,
    pub(super) others: Row,
}

impl Rows {
    pub(super) fn new(room: usize) -> Rows {
        Rows { room, rows: Vec::new(), index: HashMap::new(), hand: 0, others: Row::new("") }
    }

    /// The row of a lock that is asked for.
    pub(super) fn asked_for(&mut self, name: &str) -> &mut Row {
        let known = self.index.contains_key(name);
        let row = self.of(name);
        row.wanted |= known;
        row
    }

    /// The row of a lock.
    pub(super) fn of(&mut self, name: &str) -> &mut Row {
        let at = match self.index.get(name) {
            Some(at) => *at,
            None => self.admit(name),
        };
        // Only without any room there is none.
        self.rows.get_mut(at).unwrap_or(&mut self.others)
    }

    fn admit(&mut self, name: &str) -> usize {
        let at = self.rows.len();
        if at < self.room {
            self.rows.push(Row::new(name));
            self.index.insert(name.into(), at);
            return at;
        }
        // One round takes all marks away.
        for _ in 0..=self.room {
            let at = self.hand;
            let Some(row) = self.rows.get_mut(at) else { break };
            self.hand = (at + 1) % self.room;
            if !std::mem::take(&mut row.wanted) {
                self.others.add(row);
                self.index.remove(&row.name);
                *row = Row::new(name);
                self.index.insert(name.into(), at);
                return at;
            }
        }
        usize::MAX
    }

    /// Some of the rows, for a copy that is made in pieces.
    pub(super) fn part(&self, from: usize, length: usize) -> &[Row] {
        let end = from.saturating_add(length).min(self.rows.len());
        self.rows.get(from..end).unwrap_or(&[])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn names(rows: &Rows) -> Vec<String> {
        let mut names: Vec<_> = rows.part(0, usize::MAX).iter().map(|row| row.name.to_string()).collect();
        names.sort();
        names
    }

    #[test]
    fn the_rarely_used_make_room_and_are_counted_under_others() {
        let mut rows = Rows::new(3);
        for name in ["a", "b", "often", "often", "x", "y", "often", "z", "1", "often", "2"] {
            let row = rows.asked_for(name);
            row.acquired += 1;
            row.wait.record(Duration::from_millis(1));
            row.margin(Duration::from_secs(1));
        }
        assert!(names(&rows).contains(&"often".to_owned()), "{:?}", names(&rows));
        assert_eq!(rows.of("often").acquired, 4);
        assert_eq!((rows.others.acquired, rows.others.wait.count()), (5, 5));
        assert_eq!(rows.others.least_margin, Some(Duration::from_secs(1)));
        assert!(rows.of("new").least_margin.is_none());
    }

    #[test]
    fn the_longest_there_make_room_first() {
        let mut rows = Rows::new(3);
        for (asked, left) in
            [("a", "a"), ("b", "ab"), ("c", "abc"), ("d", "bcd"), ("e", "cde"), ("f", "def"), ("g", "efg")]
        {
            rows.asked_for(asked);
            assert_eq!(names(&rows).concat(), left);
        }
        // Whoever was asked for again is spared, once.
        for asked in ["e", "f", "g", "h", "i"] {
            rows.asked_for(asked);
        }
        assert_eq!(names(&rows), ["g", "h", "i"]);
    }

    #[test]
    fn all_that_was_counted_goes_on_under_others() {
        let mut rows = Rows::new(1);
        for name in ["a", "b", "c"] {
            let row = rows.of(name);
            (row.acquired, row.contended, row.timed_out, row.lost) = (1, 2, 3, 4);
        }
        let others = &rows.others;
        assert_eq!((others.acquired, others.contended, others.timed_out, others.lost), (2, 4, 6, 8));
    }

    proptest! {
        /// Nothing is lost, there are never more rows than there is room for, and each has its own name.
        #[test]
        fn sums_stay_right(room in 0usize..5, used in proptest::collection::vec(0u8..9, 0..80)) {
            let mut rows = Rows::new(room);
            for name in &used {
                let row = rows.asked_for(&name.to_string());
                row.acquired += 1;
                row.hold.record(Duration::from_micros((*name).into()));
            }
            let names = names(&rows);
            prop_assert!(names.len() <= room && names.windows(2).all(|pair| pair[0] != pair[1]));
            let rows_sum: u64 = rows.part(0, 99).iter().map(|row| row.acquired).sum();
            prop_assert_eq!(rows_sum + rows.others.acquired, used.len() as u64);
            let holds: u64 = rows.part(0, 99).iter().map(|row| row.hold.count()).sum();
            prop_assert_eq!(holds + rows.others.hold.count(), used.len() as u64);
            for row in rows.part(0, 99) {
                prop_assert_eq!(rows.index.get(&row.name).map(|at| &rows.rows[*at].name), Some(&row.name));
            }
        }
    }
}
