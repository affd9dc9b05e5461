//! `Row`: one lock as it stands on the screen; and in which order rows stand, and which of them. Pure.

use std::{cmp::Ordering, sync::Arc, time::Duration};

use crate::text::clean;

/// What the last look and those before it tell of one lock.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Row {
    pub(crate) name: Arc<str>,
    /// The holder's identifier.
    pub(crate) id: Arc<str>,
    /// The holder's host and process, if its identifier tells.
    pub(crate) host: Option<Box<str>>,
    pub(crate) pid: Option<u32>,
    pub(crate) age: Option<Duration>,
    /// Without it the lock never expires.
    pub(crate) left: Option<Duration>,
    /// `left` as a part of the whole time to live, as far as that is known by now.
    pub(crate) part: Option<f32>,
    /// The least part that was ever seen.
    pub(crate) closest: Option<f32>,
    pub(crate) waiting: u64,
    pub(crate) token: Option<u64>,
    /// Hand-overs per second.
    pub(crate) rate: f64,
    /// A quorum of the nodes says so.
    pub(crate) certain: bool,
}

impl Row {
    /// The holder, in few words.
    pub(crate) fn who(&self) -> String {
        who(self.host.as_deref(), self.pid, &self.id)
    }
}

/// A holder in few words, without anything that a terminal would obey.
pub(crate) fn who(host: Option<&str>, pid: Option<u32>, id: &str) -> String {
    match (host, pid) {
        (Some(host), Some(pid)) => format!("{} (pid {pid})", clean(host)),
        _ => clean(id),
    }
}

/// What rows can be sorted by; also a column of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Column {
    Name,
    Holder,
    Age,
    Left,
    Waiting,
    Rate,
    Closest,
    Token,
}

impl Column {
    /// As they stand from left to right.
    pub(crate) const ALL: [Column; 8] = [
        Column::Name,
        Column::Holder,
        Column::Age,
        Column::Left,
        Column::Waiting,
        Column::Rate,
        Column::Closest,
        Column::Token,
    ];

    pub(crate) fn next(self) -> Column {
        let at = Column::ALL.iter().position(|column| *column == self).unwrap_or(0);
        Column::ALL[(at + 1) % Column::ALL.len()]
    }

    /// What people look for stands first: long lines, old locks, close calls.
    fn falls(self) -> bool {
        matches!(self, Column::Age | Column::Waiting | Column::Rate | Column::Token)
    }
}

/// In which order rows stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sorting {
    pub(crate) by: Column,
    pub(crate) reversed: bool,
}

impl Sorting {
    /// Whether the largest stands first.
    pub(crate) fn falls(self) -> bool {
        self.by.falls() != self.reversed
    }

    fn compare(self, a: &Row, b: &Row) -> Ordering {
        let turn = |order: Ordering| if self.falls() { order.reverse() } else { order };
        let order = match self.by {
            Column::Name => turn(a.name.cmp(&b.name)),
            Column::Holder => turn((&a.host, a.pid, &a.id).cmp(&(&b.host, b.pid, &b.id))),
            Column::Age => known_first(a.age, b.age, |a, b| turn(a.cmp(b))),
            Column::Left => known_first(a.left, b.left, |a, b| turn(a.cmp(b))),
            Column::Waiting => turn(a.waiting.cmp(&b.waiting)),
            Column::Rate => turn(a.rate.total_cmp(&b.rate)),
            Column::Closest => known_first(a.closest, b.closest, |a, b| turn(a.total_cmp(b))),
            Column::Token => known_first(a.token, b.token, |a, b| turn(a.cmp(b))),
        };
        order.then_with(|| a.name.cmp(&b.name))
    }
}

/// What is not known stands at the end, whichever way the rest is turned.
fn known_first<T>(a: Option<T>, b: Option<T>, compare: impl Fn(&T, &T) -> Ordering) -> Ordering {
    match (a, b) {
        (Some(a), Some(b)) => compare(&a, &b),
        (a, b) => b.is_some().cmp(&a.is_some()),
    }
}

/// The places in `rows` of those that the filter lets pass, sorted.
pub(crate) fn arrange(rows: &[Row], filter: &str, sorting: Sorting, places: &mut Vec<usize>) {
    places.clear();
    places.extend((0..rows.len()).filter(|place| passes(&rows[*place].name, filter)));
    places.sort_by(|a, b| sorting.compare(&rows[*a], &rows[*b]));
}

/// Whether the filter stands somewhere in the name. Small letters stand for large ones too.
fn passes(name: &str, filter: &str) -> bool {
    let (name, filter) = (name.as_bytes(), filter.as_bytes());
    let same = |a: &u8, b: &u8| a == b || a.to_ascii_lowercase() == *b;
    filter.is_empty() || name.windows(filter.len()).any(|part| part.iter().zip(filter).all(|(a, b)| same(a, b)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::history::sample;

    fn names(rows: &[Row], filter: &str, sorting: Sorting) -> Vec<String> {
        let mut places = vec![7];
        arrange(rows, filter, sorting, &mut places);
        places.into_iter().map(|place| rows[place].name.to_string()).collect()
    }

    fn rows() -> Vec<Row> {
        let second = Duration::from_secs(1);
        vec![
            Row { waiting: 3, age: None, left: Some(second), closest: Some(0.5), ..sample("b", "x") },
            Row { waiting: 0, age: Some(second), left: None, closest: None, rate: 2.0, ..sample("A", "z") },
            Row { waiting: 3, age: Some(9 * second), left: Some(9 * second), token: Some(4), ..sample("c", "y") },
        ]
    }

    #[test]
    fn each_column_has_its_order_and_what_is_unknown_stands_last() {
        for (by, straight, reversed) in [
            (Column::Name, "Abc", "cbA"),
            (Column::Holder, "bcA", "Acb"),
            (Column::Age, "cAb", "Acb"),
            (Column::Left, "bcA", "cbA"),
            (Column::Waiting, "bcA", "Abc"),
            (Column::Rate, "Abc", "bcA"),
            (Column::Closest, "bAc", "bAc"),
            (Column::Token, "cAb", "cAb"),
        ] {
            assert_eq!(names(&rows(), "", Sorting { by, reversed: false }).concat(), straight, "{by:?}");
            assert_eq!(names(&rows(), "", Sorting { by, reversed: true }).concat(), reversed, "{by:?} reversed");
        }
    }

    #[test]
    fn holders_are_told_as_far_as_they_are_known() {
        let ours = Row { host: Some("web\u{202e}".into()), pid: Some(4711), ..sample("x", "id") };
        assert_eq!(ours.who(), "web\\u{202e} (pid 4711)");
        assert_eq!(sample("x", "\u{1b}c").who(), "\\u{1b}c");
    }

    #[test]
    fn all_columns_come_round() {
        let mut column = Column::Name;
        for _ in Column::ALL {
            column = column.next();
        }
        assert_eq!(column, Column::Name);
    }

    #[test]
    fn a_filter_is_a_part_of_the_name() {
        for (name, filter, pass) in [
            ("orders:42", "", true),
            ("orders:42", "rs:4", true),
            ("Orders", "orders", true),
            ("orders", "Orders", false),
            ("x", "xx", false),
            ("grün漢字", "漢", true),
        ] {
            assert_eq!(passes(name, filter), pass, "{name} {filter}");
        }
    }
}
