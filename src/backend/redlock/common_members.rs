//! The members that a quorum of the nodes reports.

use std::collections::HashMap;

use crate::{
    backend::redis::requests::list::GroupReport,
    core::{holder::Holder, kind::HeldBy},
};

/// Returns the group that the nodes report, with the members that at least `needed` of them report.
/// Others are claims that are not granted yet, or that have lost nodes. If the nodes have more
/// members than they list, their number is the largest that `needed` nodes reach.
pub(super) fn common_members<'a>(
    reports: impl Iterator<Item = &'a GroupReport> + Clone,
    needed: usize,
) -> Option<GroupReport> {
    let (mut members, mut counts): (Vec<Holder>, HashMap<&str, usize>) = Default::default();
    for member in reports.clone().flat_map(|report| &report.members) {
        let count = counts.entry(member.id()).or_default();
        *count += 1;
        if *count == needed {
            members.push(member.clone());
        }
    }
    let listed = members.iter().filter_map(|member| member.held_by().members()).sum();
    // A node counts all members of a group, but lists only the first of a large one.
    let size = |report: &GroupReport| report.held_by.members().unwrap_or(0);
    let is_cut_short = |report: &GroupReport| size(report) > report.members.len() as u64;
    let mut sizes: Vec<u64> = reports.clone().map(size).collect();
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    let common_size = sizes.get(needed - 1).filter(|_| reports.clone().any(is_cut_short));
    let count = Some(common_size.copied().unwrap_or(0).max(listed));
    let held_by = match reports.clone().next()?.held_by {
        HeldBy::Permits { .. } => HeldBy::Permits { count },
        HeldBy::Readers { .. } | HeldBy::One => HeldBy::Readers { count },
    };
    Some(GroupReport { held_by, members })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_of_a_minority_are_left_out() {
        let report = |ids: &[&str]| {
            let held_by = HeldBy::Readers { count: Some(ids.len() as u64) };
            let one = HeldBy::Readers { count: Some(1) };
            let members = ids.iter().map(|id| Holder::from_member(id.as_bytes(), 9, one)).collect();
            GroupReport { held_by, members }
        };
        let reports = [report(&["a", "b"]), report(&["c", "a"]), report(&["b", "a"])];
        let group = common_members(reports.iter(), 2).unwrap();
        let ids: Vec<_> = group.members.iter().map(Holder::id).collect();
        assert_eq!(
            (ids.as_slice(), group.held_by),
            (&["a", "b"][..], HeldBy::Readers { count: Some(2) })
        );
        assert_eq!(common_members([].iter(), 2), None);
        let stray = [report(&["a"]), report(&["b"])];
        let group = common_members(stray.iter(), 2).unwrap();
        assert_eq!((group.members.len(), group.held_by), (0, HeldBy::Readers { count: Some(0) }));
    }

    /// Fault: N222
    #[test]
    fn members_that_no_node_lists_are_counted() {
        let one = HeldBy::Readers { count: Some(1) };
        let report = |size| GroupReport {
            held_by: HeldBy::Readers { count: Some(size) },
            members: vec![Holder::from_member(b"a", 9, one)],
        };
        let count = |sizes: [u64; 3]| {
            let group = common_members(sizes.map(report).iter(), 2).unwrap();
            group.held_by.members()
        };
        assert_eq!(count([1, 1, 1]), Some(1));
        assert_eq!(count([1_500, 1, 1_400]), Some(1_400));
        assert_eq!(count([1, 1_500, 0]), Some(1));
    }
}
