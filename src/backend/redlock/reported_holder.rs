//! The holder that most of the nodes report.

use std::mem;

use crate::core::{holder::Holder, kind::HeldBy};

/// Returns the holder that most of the nodes report, as most of those nodes describe it, and how
/// many report it.
///
/// A node on which the lock was re-acquired reports a later token than the holder has, and so a
/// shorter age. On a tie the smallest token is therefore returned, and after that the first node's
/// report. The same replies always give the same result, so that a seed of the simulator determines
/// its run.
pub(crate) fn most_reported_holder<'a, T>(
    reported: impl Iterator<Item = (&'a Holder, T)>,
) -> Option<(usize, T)> {
    let reported: Vec<_> = reported.collect();
    let mut agreeing = largest_group(reported, |(one, _), (other, _)| is_same(one, other));
    // Zero is an unknown token, so it comes last.
    agreeing.sort_by_key(|(holder, _)| (holder.token() == 0, holder.token()));
    let count = agreeing.len();
    let same_token = largest_group(agreeing, |(one, _), (other, _)| one.token() == other.token());
    same_token.into_iter().next().map(|(_, with)| (count, with))
}

/// Whether two nodes report the same holder. Of a group, each may report another member.
fn is_same(one: &Holder, other: &Holder) -> bool {
    match (one.held_by(), other.held_by()) {
        (HeldBy::One, HeldBy::One) => one.id() == other.id(),
        (one, other) => mem::discriminant(&one) == mem::discriminant(&other),
    }
}

/// Returns the largest group of equal items; on a tie, the group of the first.
fn largest_group<T>(all: Vec<T>, alike: impl Fn(&T, &T) -> bool) -> Vec<T> {
    let mut groups: Vec<Vec<T>> = Vec::new();
    for one in all {
        match groups.iter_mut().find(|group| group.first().is_some_and(|first| alike(first, &one)))
        {
            Some(group) => group.push(one),
            None => groups.push(vec![one]),
        }
    }
    // `max_by_key` returns the last of equal maxima.
    groups.into_iter().rev().max_by_key(Vec::len).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn most_reported_holder_tie_goes_to_first_node() {
        let most = |ids: &[&str]| {
            let holders: Vec<_> = ids.iter().map(|id| Holder::from_id((*id).to_owned())).collect();
            most_reported_holder(holders.iter().enumerate().map(|(node, holder)| (holder, node)))
        };
        assert_eq!(most(&[]), None);
        assert_eq!(most(&["a"]), Some((1, 0)));
        assert_eq!(most(&["a", "b", "b"]), Some((2, 1)));
        assert_eq!(most(&["b", "a", "a", "b", "c"]), Some((2, 0)));
    }

    #[test]
    fn group_is_one_holder_whichever_member_a_node_reports() {
        let reports = ["distlock:read 2 a", "distlock:read 1 b", "a"];
        let holders = reports.map(|report| Holder::from_report(report.as_bytes(), 1, 7, 0, 100));
        let found = most_reported_holder(holders.iter().map(|holder| (holder, holder.id())));
        assert_eq!(found, Some((2, "a")));
    }

    /// Fault: N111
    #[test]
    fn most_reported_holder_comes_with_most_reported_token() {
        let reported = |reported: &[(&str, u64)]| {
            let holder =
                |(id, token): &(&str, u64)| Holder::from_report(id.as_bytes(), 1, *token, 0, 100);
            let holders: Vec<_> = reported.iter().map(holder).collect();
            most_reported_holder(holders.iter().enumerate().map(|(node, holder)| (holder, node)))
        };
        // Re-acquired on the first node.
        assert_eq!(reported(&[("a", 9), ("a", 7), ("a", 7)]), Some((3, 1)));
        assert_eq!(reported(&[("a", 9), ("a", 7), ("b", 7)]), Some((2, 1)));
        assert_eq!(reported(&[("a", 7), ("a", 9), ("a", 9)]), Some((3, 1)), "most reported one");
        assert_eq!(reported(&[("a", 9), ("a", 7), ("a", 8)]), Some((3, 1)), "smallest on a tie");
        assert_eq!(reported(&[("a", 0), ("a", 7)]), Some((2, 1)), "known one on a tie");
        assert_eq!(reported(&[("b", 7), ("a", 9), ("b", 7), ("a", 7), ("a", 7)]), Some((3, 3)));
        assert_eq!(reported(&[("a", 0), ("a", 7), ("a", 7)]), Some((3, 1)), "unknown one ignored");
    }
}
