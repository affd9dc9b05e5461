//! Holders and servers agree: while a thread considers a lock held, a quorum of the nodes has the
//! lock under its id, at least until the deadline of the lease.

use std::collections::BTreeMap;

use super::{Finding, Rule, span};
use crate::history::{
    event::{Kind, Said},
    model::{End, Hold, Seen, Story},
};

/// Nodes report times in whole milliseconds.
const MILLISECOND: u64 = 1_000_000;

/// Returns the number of comparisons and the violations.
pub(crate) fn find(story: &Story) -> (usize, Vec<Finding>) {
    let (mut compared, mut found) = (0, Vec::new());
    let mut locks: BTreeMap<u32, Vec<&Hold>> = BTreeMap::new();
    for hold in &story.holds {
        locks.entry(hold.lock).or_default().push(hold);
    }
    // Holds that begin earlier may end later, but none lasts longer than the longest.
    let longest = story.holds.iter().map(|hold| hold.until - hold.from).max().unwrap_or(0);
    for seen in &story.seen {
        let Some(holds) = locks.get(&seen.lock) else { continue };
        let first = holds.partition_point(|hold| hold.from + longest < seen.until);
        let last = holds.partition_point(|hold| hold.from <= seen.from);
        for hold in holds
            .get(first..last)
            .unwrap_or_default()
            .iter()
            // A group does not name all its members.
            .filter(|hold| hold.is_alone())
            .filter(|hold| surely_held_until(hold) >= seen.until)
        {
            compared += 1;
            let Some(text) = disagreement(story, hold, seen) else { continue };
            if story.excuses(hold.lock, hold.asked, seen.until, seen.from).next().is_none() {
                found.push(Finding {
                    rule: Rule::ServerAgreement,
                    lock: hold.lock,
                    seats: vec![hold.seat],
                    from: seen.from,
                    until: seen.until,
                    text,
                });
            }
        }
    }
    (compared, found)
}

/// When the thread last saw that it held the lock. A loss is noticed only after it has happened.
fn surely_held_until(hold: &Hold) -> u64 {
    match (hold.end, hold.looks.last()) {
        (End::Lost, Some((at, _))) => *at,
        _ => hold.until,
    }
}

fn disagreement(story: &Story, hold: &Hold, seen: &Seen) -> Option<String> {
    let needed = seen.said.len() / 2 + 1;
    // When the lock expires on each node at the latest. A node that did not reply, or is in
    // quarantine, may have the lock for ever.
    let mut expiries: Vec<u64> = Vec::new();
    for (node, said) in (1..).zip(&seen.said) {
        match said {
            Said::Kept { id, left_ms } if *id == hold.id => {
                expiries.push(seen.until + (left_ms + 1) * MILLISECOND);
            }
            _ if *said == Said::Nothing || may_have_forgotten(story, node, hold, seen) => {
                expiries.push(u64::MAX)
            }
            _ => {}
        }
    }
    let (at, child) = (story.clock(seen.from), hold.seat);
    if expiries.len() < needed {
        let nodes = expiries.len();
        return Some(format!(
            "at {at} child {child} considered the lock held, but only {nodes} of the needed \
             {needed} nodes had it"
        ));
    }
    expiries.sort_unstable_by(|one, other| other.cmp(one));
    let expiry = expiries[needed - 1];
    let known = hold.looks.partition_point(|(at, _)| *at <= seen.from);
    let deadline = hold.looks.get(known.checked_sub(1)?)?.1;
    (deadline > expiry).then(|| {
        format!(
            "at {at} the deadline of child {child} was {} after the expiry of the lock on the \
             nodes",
            span(deadline - expiry)
        )
    })
}

/// Whether the node may have lost the lock in a restart. With several nodes, a node that was
/// restarted without its data is in quarantine until all leases from before have expired.
fn may_have_forgotten(story: &Story, node: usize, hold: &Hold, seen: &Seen) -> bool {
    story.terms.nodes > 1
        && story.faults.iter().any(|period| {
            period.fault.kind == Kind::Forget
                && period.fault.node == node
                && period.from <= seen.until
                && period.until >= hold.asked
                && seen.from <= period.until.saturating_add(story.terms.ttl)
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::rules::tests::story;

    const MS: u64 = MILLISECOND;

    fn violations(text: &str) -> usize {
        find(&story(text)).1.len()
    }

    /// A hold from 20 to 900 ms with a deadline at 1000 ms, and the reply of one server between 100
    /// and 101 ms.
    fn one(said: &str) -> String {
        let at = |ms: u64| ms * MS;
        format!(
            "\
                0 0 1 terms 1 {ttl} 10 0\n\
                {} 1@1 7 wait\n\
                {} 1@1 7 enter {ttl} 5 a\n\
                {} 0@1 1 seen {} {said}\n\
                {} 1@1 7 leave",
            at(10),
            at(20),
            at(101),
            at(100),
            at(900),
            ttl = at(1000)
        )
    }

    #[test]
    fn members_of_a_group_are_not_compared() {
        let enter = |as_kind: &str| one("-").replace("20000000 1@1 7 enter", as_kind);
        let reader = enter("15000000 1@1 7 as read\n20000000 1@1 7 enter");
        assert_eq!((violations(&one("-")), violations(&reader)), (1, 0));
        let writer = enter("15000000 1@1 7 as write\n20000000 1@1 7 enter");
        assert_eq!(violations(&writer), 1);
    }

    #[test]
    fn server_with_late_enough_expiry_agrees() {
        assert_eq!(find(&story(&one("898:a"))).0, 1);
        assert_eq!(violations(&one("898:a")), 0);
        assert_eq!(violations(&one("897:a")), 1, "it expires at 999 ms");
    }

    #[test]
    fn free_or_foreign_lock_disagrees() {
        assert_eq!(violations(&one("-")), 1);
        assert_eq!(violations(&one("900:b")), 1);
        assert_eq!(violations(&one("?")), 0, "the server did not reply");
    }

    #[test]
    fn reply_outside_the_hold_is_not_compared() {
        for (from, until) in [(19, 100), (800, 901)] {
            let moved = format!("{} 0@1 1 seen {} -", until * MS, from * MS);
            assert_eq!(
                find(&story(&one("898:a").replace("101000000 0@1 1 seen 100000000 898:a", &moved)))
                    .0,
                0
            );
        }
    }

    #[test]
    fn lost_hold_counts_until_last_seen_held() {
        let lost = |look: u64| {
            let text = one("-");
            let (before, _) = text.rsplit_once('\n').expect("several lines");
            violations(&format!(
                "{before}\n{} 1@1 7 look {}\n{} 1@1 7 lost x",
                look * MS,
                1000 * MS,
                900 * MS
            ))
        };
        assert_eq!(lost(99), 0);
        assert_eq!(lost(102), 1);
    }

    #[test]
    fn server_without_data_is_an_excuse() {
        let forgot = |from: u64, until: u64| {
            let (from, until) = (from * MS, until * MS);
            violations(&format!("{}\n{from} 0 1 fault 1 1 forget 0\n{until} 0 1 over 1", one("-")))
        };
        assert_eq!(forgot(50, 60), 0);
        assert_eq!(forgot(1, 9), 1, "before the acquisition");
        assert_eq!(forgot(102, 103), 1, "after the reply");
    }

    /// The same with three nodes.
    fn three(said: &str) -> String {
        one(said).replace("terms 1", "terms 3")
    }

    #[test]
    fn quorum_of_nodes_is_enough() {
        assert_eq!(violations(&three("899:a - 899:a")), 0);
        assert_eq!(violations(&three("899:a - 899:b")), 1);
        assert_eq!(violations(&three("899:a - ?")), 0);
        assert_eq!(violations(&three("- - ?")), 1);
    }

    #[test]
    fn earliest_expiry_of_the_quorum_decides() {
        assert_eq!(violations(&three("900:a 898:a -")), 0);
        assert_eq!(violations(&three("900:a 897:a -")), 1);
        assert_eq!(violations(&three("100:a 898:a 900:a")), 0);
    }

    #[test]
    fn node_in_quarantine_counts_as_having_the_lock() {
        let forgot = |what: &str| {
            let (from, until) = (50 * MS, 60 * MS);
            violations(&format!(
                "{}\n{from} 0 1 fault 1 2 {what} 0\n{until} 0 1 over 1",
                three("899:a - -")
            ))
        };
        assert_eq!(forgot("forget"), 0);
        assert_eq!(forgot("delete"), 1);
    }
}
