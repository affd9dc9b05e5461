//! `Row`: one lock on the screen. Also filters and sorts rows. Pure.

use std::{cmp::Ordering, sync::Arc, time::Duration};

use distlock::{HeldBy, LockInfo};

use crate::{format::escape, holders};

/// What the polls so far show about one lock.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Row {
    pub(crate) name: Arc<str>,
    /// The holder's id.
    pub(crate) id: Arc<str>,
    /// The group that has the lock in words, and the ids of its members; none if one client has it
    /// alone.
    pub(crate) group: Option<Box<str>>,
    pub(crate) members: Vec<Box<str>>,
    /// All holders have released the lock, which stays taken until it expires.
    pub(crate) is_kept: bool,
    /// The holder's host and process, if its id contains them.
    pub(crate) host: Option<Box<str>>,
    pub(crate) pid: Option<u32>,
    pub(crate) age: Option<Duration>,
    /// Time left; `None` if the lock has no expiry.
    pub(crate) left: Option<Duration>,
    /// `left` as a fraction of the ttl, as far as the ttl is known.
    pub(crate) fraction_left: Option<f32>,
    /// The smallest fraction seen so far.
    pub(crate) closest_call: Option<f32>,
    pub(crate) waiting: u64,
    pub(crate) token: Option<u64>,
    /// Hand-overs per second.
    pub(crate) rate: f64,
    /// Whether a quorum of the nodes agrees.
    pub(crate) certain: bool,
}

impl Row {
    /// What one poll shows; `History` adds what earlier ones do.
    pub(crate) fn of(lock: &LockInfo) -> Row {
        let holder = lock.holder();
        let is_group = holder.held_by() != HeldBy::One;
        Row {
            name: lock.name().into(),
            id: holder.id().into(),
            group: is_group.then(|| holders::short_kind(holder.held_by()).into()),
            members: lock.members().iter().map(|member| member.id().into()).collect(),
            is_kept: holders::is_kept(lock),
            host: holder.host().map(Into::into),
            pid: holder.pid(),
            age: holder.held_for(),
            left: holder.ttl_left(),
            fraction_left: None,
            closest_call: None,
            waiting: lock.waiting(),
            token: lock.fencing_token().map(u64::from),
            rate: 0.0,
            certain: lock.is_certain(),
        }
    }

    /// A short name of the holder, or of a group and one of its members.
    pub(crate) fn holder_name(&self) -> String {
        let holder = holder_name(self.host.as_deref(), self.pid, &self.id);
        match &self.group {
            None => holder,
            Some(group) => {
                format!("{group}: {holder}{}", holders::and_others(self.members.len()))
            }
        }
    }

    /// The ids of all holders.
    pub(crate) fn ids(&self) -> Vec<String> {
        match self.members.as_slice() {
            [] => vec![self.id.to_string()],
            members => members.iter().map(|id| id.to_string()).collect(),
        }
    }
}

/// A short name of a holder, escaped for a terminal.
pub(crate) fn holder_name(host: Option<&str>, pid: Option<u32>, id: &str) -> String {
    match (host, pid) {
        (Some(host), Some(pid)) => format!("{} (pid {pid})", escape(host)),
        _ => escape(id),
    }
}

/// A column of the table, by which rows can be sorted. From left to right.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
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

    /// Whether the largest value comes first by default: long queues, old locks. Close calls are
    /// small values.
    fn sorts_descending(self) -> bool {
        matches!(self, Column::Age | Column::Waiting | Column::Rate | Column::Token)
    }
}

/// The order of the rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sorting {
    pub(crate) by: Column,
    pub(crate) reversed: bool,
}

impl Sorting {
    /// Whether the largest value comes first.
    pub(crate) fn is_descending(self) -> bool {
        self.by.sorts_descending() != self.reversed
    }

    fn compare(self, a: &Row, b: &Row) -> Ordering {
        let directed = |order: Ordering| if self.is_descending() { order.reverse() } else { order };
        let order = match self.by {
            Column::Name => directed(a.name.cmp(&b.name)),
            Column::Holder => directed((&a.host, a.pid, &a.id).cmp(&(&b.host, b.pid, &b.id))),
            Column::Age => compare_known(a.age, b.age, |a, b| directed(a.cmp(b))),
            Column::Left => compare_known(a.left, b.left, |a, b| directed(a.cmp(b))),
            Column::Waiting => directed(a.waiting.cmp(&b.waiting)),
            Column::Rate => directed(a.rate.total_cmp(&b.rate)),
            Column::Closest => {
                compare_known(a.closest_call, b.closest_call, |a, b| directed(a.total_cmp(b)))
            }
            Column::Token => compare_known(a.token, b.token, |a, b| directed(a.cmp(b))),
        };
        order.then_with(|| a.name.cmp(&b.name))
    }
}

/// Puts unknown values last, in either direction.
fn compare_known<T>(a: Option<T>, b: Option<T>, compare: impl Fn(&T, &T) -> Ordering) -> Ordering {
    match (a, b) {
        (Some(a), Some(b)) => compare(&a, &b),
        (a, b) => b.is_some().cmp(&a.is_some()),
    }
}

/// The positions in `rows` of those that match the filter, sorted.
pub(crate) fn filter_and_sort(
    rows: &[Row],
    filter: &str,
    sorting: Sorting,
    visible: &mut Vec<usize>,
) {
    visible.clear();
    visible.extend((0..rows.len()).filter(|at| matches_filter(&rows[*at].name, filter)));
    visible.sort_by(|a, b| sorting.compare(&rows[*a], &rows[*b]));
}

/// Whether the name contains the filter. A lower-case letter matches both cases.
fn matches_filter(name: &str, filter: &str) -> bool {
    let (name, filter) = (name.as_bytes(), filter.as_bytes());
    let same = |a: &u8, b: &u8| a == b || a.to_ascii_lowercase() == *b;
    filter.is_empty()
        || name.windows(filter.len()).any(|part| part.iter().zip(filter).all(|(a, b)| same(a, b)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::history::test_row;

    fn names(rows: &[Row], filter: &str, sorting: Sorting) -> Vec<String> {
        let mut visible = vec![7];
        filter_and_sort(rows, filter, sorting, &mut visible);
        visible.into_iter().map(|at| rows[at].name.to_string()).collect()
    }

    fn rows() -> Vec<Row> {
        let second = Duration::from_secs(1);
        vec![
            Row {
                waiting: 3,
                age: None,
                left: Some(second),
                closest_call: Some(0.5),
                ..test_row("b", "x")
            },
            Row {
                waiting: 0,
                age: Some(second),
                left: None,
                closest_call: None,
                rate: 2.0,
                ..test_row("A", "z")
            },
            Row {
                waiting: 3,
                age: Some(9 * second),
                left: Some(9 * second),
                token: Some(4),
                ..test_row("c", "y")
            },
        ]
    }

    #[test]
    fn rows_sort_by_column_with_unknown_values_last() {
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
            assert_eq!(
                names(&rows(), "", Sorting { by, reversed: false }).concat(),
                straight,
                "{by:?}"
            );
            assert_eq!(
                names(&rows(), "", Sorting { by, reversed: true }).concat(),
                reversed,
                "{by:?} reversed"
            );
        }
    }

    #[test]
    fn holder_name_is_escaped() {
        let row = Row { host: Some("web\u{202e}".into()), pid: Some(4711), ..test_row("x", "id") };
        assert_eq!(row.holder_name(), "web\\u{202e} (pid 4711)");
        assert_eq!(test_row("x", "\u{1b}c").holder_name(), "\\u{1b}c");
        let three = Row { group: Some("4 permits".into()), members: vec!["id".into(); 3], ..row };
        assert_eq!(three.holder_name(), "4 permits: web\\u{202e} (pid 4711) +2");
    }

    #[test]
    fn next_column_cycles_through_all() {
        let mut column = Column::Name;
        for _ in Column::ALL {
            column = column.next();
        }
        assert_eq!(column, Column::Name);
    }

    #[test]
    fn filter_matches_part_of_name() {
        for (name, filter, pass) in [
            ("orders:42", "", true),
            ("orders:42", "rs:4", true),
            ("Orders", "orders", true),
            ("orders", "Orders", false),
            ("x", "xx", false),
            ("grün漢字", "漢", true),
        ] {
            assert_eq!(matches_filter(name, filter), pass, "{name} {filter}");
        }
    }
}
