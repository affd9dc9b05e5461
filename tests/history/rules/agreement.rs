//! Belief and servers agree: while somebody believes in a lock, a quorum of the nodes keeps it for
//! the holder, and for no shorter time than the holder believes.

use std::collections::BTreeMap;

use super::{Finding, Rule, span};
use crate::history::{
    event::{Kind, Said},
    story::{End, Hold, Seen, Story},
};

/// How much of a millisecond the nodes do not tell.
const MILLISECOND: u64 = 1_000_000;

/// What was compared, and what was found.
pub(crate) fn find(story: &Story) -> (usize, Vec<Finding>) {
    let (mut compared, mut found) = (0, Vec::new());
    let mut locks: BTreeMap<u32, Vec<&Hold>> = BTreeMap::new();
    for hold in &story.holds {
        locks.entry(hold.lock).or_default().push(hold);
    }
    // Beliefs that begin earlier may end later, but none lasts longer than the longest.
    let longest = story.holds.iter().map(|hold| hold.until - hold.from).max().unwrap_or(0);
    for seen in &story.seen {
        let Some(holds) = locks.get(&seen.lock) else { continue };
        let first = holds.partition_point(|hold| hold.from + longest < seen.until);
        let last = holds.partition_point(|hold| hold.from <= seen.from);
        for hold in holds
            .get(first..last)
            .unwrap_or_default()
            .iter()
            .filter(|hold| believed(hold) >= seen.until)
        {
            compared += 1;
            let Some(text) = disagreement(story, hold, seen) else { continue };
            if story.excuses(hold.lock, hold.asked, seen.until, seen.from).next().is_none() {
                found.push(Finding {
                    rule: Rule::Agreement,
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

/// Until when it surely believed: a loss is noticed some time after it.
fn believed(hold: &Hold) -> u64 {
    match (hold.end, hold.looks.last()) {
        (End::Lost, Some((at, _))) => *at,
        _ => hold.until,
    }
}

fn disagreement(story: &Story, hold: &Hold, seen: &Seen) -> Option<String> {
    let needed = seen.said.len() / 2 + 1;
    // Until when each node keeps it at most. What cannot be known, or does not count for a while,
    // may well keep it.
    let mut kept: Vec<u64> = Vec::new();
    for (node, said) in (1..).zip(&seen.said) {
        match said {
            Said::Kept { id, left_ms } if *id == hold.id => {
                kept.push(seen.until + (left_ms + 1) * MILLISECOND);
            }
            _ if *said == Said::Nothing || may_have_forgotten(story, node, hold, seen) => {
                kept.push(u64::MAX)
            }
            _ => {}
        }
    }
    let (at, who) = (story.clock(seen.from), hold.seat);
    if kept.len() < needed {
        let kept = kept.len();
        return Some(format!(
            "at {at} child {who} believed, and no more than {kept} of {needed} nodes kept the lock for it"
        ));
    }
    kept.sort_unstable_by(|one, other| other.cmp(one));
    let expiry = kept[needed - 1];
    let known = hold.looks.partition_point(|(at, _)| *at <= seen.from);
    let deadline = hold.looks.get(known.checked_sub(1)?)?.1;
    (deadline > expiry).then(|| {
        format!(
            "at {at} child {who} meant to believe for {} longer than the nodes keep the lock",
            span(deadline - expiry)
        )
    })
}

/// A node of several that was started without its data does not vote for as long as anybody may
/// believe in what it had given.
fn may_have_forgotten(story: &Story, node: usize, hold: &Hold, seen: &Seen) -> bool {
    story.terms.nodes > 1
        && story.done.iter().any(|done| {
            done.fault.kind == Kind::Forget
                && done.fault.node == node
                && done.from <= seen.until
                && done.until >= hold.asked
                && seen.from <= done.until.saturating_add(story.terms.ttl)
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::rules::tests::story;

    const MS: u64 = MILLISECOND;

    fn wrong(text: &str) -> usize {
        find(&story(text)).1.len()
    }

    /// A belief from 20 to 900 ms with a deadline at 1000 ms, and what one server says from 100 to
    /// 101 ms.
    fn one(said: &str) -> String {
        let at = |ms: u64| ms * MS;
        format!(
            "0 0 1 terms 1 {ttl} 10 0\n{} 1@1 7 wait\n{} 1@1 7 enter {ttl} 5 a\n{} 0@1 1 seen {} {said}\n{} 1@1 7 leave",
            at(10),
            at(20),
            at(101),
            at(100),
            at(900),
            ttl = at(1000)
        )
    }

    #[test]
    fn a_server_that_keeps_it_long_enough_agrees() {
        assert_eq!(find(&story(&one("898:a"))).0, 1);
        assert_eq!(wrong(&one("898:a")), 0);
        assert_eq!(wrong(&one("897:a")), 1, "until 999 ms");
    }

    #[test]
    fn a_free_lock_and_that_of_another_do_not_agree() {
        assert_eq!(wrong(&one("-")), 1);
        assert_eq!(wrong(&one("900:b")), 1);
        assert_eq!(wrong(&one("?")), 0, "who knows");
    }

    #[test]
    fn what_is_seen_before_and_after_a_belief_says_nothing() {
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
    fn a_loss_counts_from_the_last_yes() {
        let lost = |look: u64| {
            let text = one("-");
            let (before, _) = text.rsplit_once('\n').expect("several lines");
            wrong(&format!(
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
    fn a_server_that_forgot_is_an_excuse() {
        let forgot = |from: u64, until: u64| {
            let (from, until) = (from * MS, until * MS);
            wrong(&format!("{}\n{from} 0 1 fault 1 1 forget 0\n{until} 0 1 over 1", one("-")))
        };
        assert_eq!(forgot(50, 60), 0);
        assert_eq!(forgot(1, 9), 1, "before it was asked for");
        assert_eq!(forgot(102, 103), 1, "afterwards");
    }

    /// Three nodes, and what they say.
    fn three(said: &str) -> String {
        one(said).replace("terms 1", "terms 3")
    }

    #[test]
    fn a_quorum_is_enough() {
        assert_eq!(wrong(&three("899:a - 899:a")), 0);
        assert_eq!(wrong(&three("899:a - 899:b")), 1);
        assert_eq!(wrong(&three("899:a - ?")), 0);
        assert_eq!(wrong(&three("- - ?")), 1);
    }

    #[test]
    fn of_a_quorum_the_last_decides() {
        assert_eq!(wrong(&three("900:a 898:a -")), 0);
        assert_eq!(wrong(&three("900:a 897:a -")), 1);
        assert_eq!(wrong(&three("100:a 898:a 900:a")), 0);
    }

    #[test]
    fn a_node_in_quarantine_may_have_kept_it() {
        let forgot = |what: &str| {
            let (from, until) = (50 * MS, 60 * MS);
            wrong(&format!(
                "{}\n{from} 0 1 fault 1 2 {what} 0\n{until} 0 1 over 1",
                three("899:a - -")
            ))
        };
        assert_eq!(forgot("forget"), 0);
        assert_eq!(forgot("delete"), 1);
    }
}
