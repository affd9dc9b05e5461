//! Exclusion of belief: of one lock, no two believe at once. Where one server forgot, that is
//! excused until those who had the lock from before can know.

use std::collections::BTreeMap;

use super::{Finding, Rule, span};
use crate::history::{
    event::Kind,
    story::{Done, Hold, Story},
};

/// How much later than it is due a renewal may have been answered on a machine on which nothing was
/// seen to be late.
const GRACE: u64 = 100_000_000;

/// Two beliefs in one lock that share an instant.
#[derive(Clone, Debug)]
pub(crate) struct Overlap<'a> {
    pub(crate) earlier: &'a Hold,
    pub(crate) later: &'a Hold,
    pub(crate) until: u64,
    /// The number of the fault that excuses it.
    pub(crate) excuse: Option<u32>,
}

impl Overlap<'_> {
    pub(crate) fn length(&self) -> u64 {
        self.until - self.later.from
    }
}

pub(crate) fn overlaps(story: &Story) -> Vec<Overlap<'_>> {
    let mut found = Vec::new();
    // Those before the current one that are not over when it begins.
    let mut open: BTreeMap<u32, Vec<&Hold>> = BTreeMap::new();
    for later in &story.holds {
        let open = open.entry(later.lock).or_default();
        open.retain(|earlier| earlier.until > later.from);
        for earlier in open.iter().copied() {
            let until = earlier.until.min(later.until);
            if until <= later.from {
                continue;
            }
            // Whoever was dispossessed may not believe on, not even when the other has left.
            let (old, new) =
                if earlier.token < later.token { (earlier, later) } else { (later, earlier) };
            let mut excuses =
                story.excuses(later.lock, old.asked, new.from.max(later.from), old.until);
            let excuse = excuses.find(|done| old.until <= knows_by(story, old, done));
            found.push(Overlap {
                earlier,
                later,
                until,
                excuse: excuse.map(|done| done.fault.number),
            });
        }
        open.push(later);
    }
    found
}

/// When a holder must know of what a server forgot: at its next renewal, where nothing stands in
/// its way, else when its deadline comes, which is judged elsewhere.
fn knows_by(story: &Story, hold: &Hold, fault: &Done) -> u64 {
    let (terms, pid, forgot) = (&story.terms, hold.pid, fault.until);
    // It may have been won before and been told of later, and then knows nothing of renewals yet.
    if hold.from >= forgot {
        return u64::MAX;
    }
    let due = forgot.saturating_add(terms.ttl / 3 + GRACE);
    let since = forgot.saturating_sub(terms.ttl / 3);
    let late = story.lateness(pid, since, due) + story.lateness(story.parent, since, due);
    let due = due.saturating_add(2 * late);
    // What failed shortly before may be tried again later. The fault itself stands in nobody's way
    // once it is over.
    let in_the_way = |done: &Done| {
        done.fault.number != fault.fault.number
            && hinders_renewing(done, hold.lock)
            && done.from < due
            && done.until.saturating_add(terms.operation_timeout) > since
    };
    let troubled = story.done.iter().any(in_the_way);
    // Who has gone on long before has renewed since.
    let stopped = story.stops.iter().any(|stop| stop.0 == pid && stop.1 < due && stop.2 > since);
    if troubled || stopped { u64::MAX } else { due }
}

/// Whether a renewal may have failed for it: one asks for no other lock's key, nor for the line and
/// the last token of its own, and a script that a server does not know is sent again at once.
fn hinders_renewing(done: &Done, lock: u32) -> bool {
    let elsewhere =
        matches!(done.fault.kind, Kind::FlushScripts | Kind::DeleteLine | Kind::DeleteFence);
    !elsewhere && (done.lock == 0 || done.lock == lock)
}

pub(crate) fn find(story: &Story) -> Vec<Finding> {
    let unexcused = overlaps(story).into_iter().filter(|overlap| overlap.excuse.is_none());
    unexcused
        .map(|overlap| {
            let Overlap { earlier, later, until, .. } = overlap;
            Finding {
                rule: Rule::Exclusion,
                lock: later.lock,
                seats: vec![earlier.seat, later.seat],
                from: later.from,
                until,
                text: format!(
                    "at {} child {} (token {}) and child {} (token {}) both believed, for {}",
                    story.clock(later.from),
                    earlier.seat,
                    earlier.token,
                    later.seat,
                    later.token,
                    span(overlap.length())
                ),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::rules::tests::story;

    /// One server; a lease of 3 s; all times in milliseconds until they are read.
    fn overlaps_of(lines: &str) -> Vec<(u64, bool)> {
        let text = lines.lines().map(|line| {
            let words = line.trim().split(' ').enumerate();
            let scaled = words.map(|(at, word)| {
                let is_time =
                    at == 0 || (at == 4 && (line.contains("enter") || line.contains("look")));
                if is_time { format!("{word}000000") } else { word.to_owned() }
            });
            scaled.collect::<Vec<_>>().join(" ")
        });
        let text: Vec<_> = text.collect();
        let story = story(&format!("0 0 1 terms 1 3000000000 500000000 0\n{}", text.join("\n")));
        overlaps(&story)
            .iter()
            .map(|overlap| (overlap.length() / 1_000_000, overlap.excuse.is_some()))
            .collect()
    }

    const FIRST: &str = "10 1@1 7 wait\n20 1@1 7 enter 3000 5 a";

    #[test]
    fn one_after_the_other_is_well() {
        let after = format!("{FIRST}\n900 1@1 7 leave\n900 2@1 8 enter 3900 6 b");
        assert_eq!(overlaps_of(&after), []);
        assert_eq!(
            overlaps_of(&after.replace("900 1@1 7 leave", "901 1@1 7 look 3500\n902 1@1 7 leave")),
            [(2, false)]
        );
    }

    #[test]
    fn other_locks_do_not_matter() {
        let both = format!("{FIRST}\n30 2@2 8 enter 3900 6 b\n40 2@2 8 leave\n50 1@1 7 leave");
        assert_eq!(overlaps_of(&both), []);
        assert_eq!(overlaps_of(&both.replace("@2", "@1")), [(10, false)]);
    }

    #[test]
    fn a_stopped_holder_believes_until_its_deadline() {
        let lines = |at: u64| {
            format!("{FIRST}\n30 0 7 stopped\n{at} 2@1 8 enter 9000 6 b\n4000 2@1 8 leave")
        };
        assert_eq!(overlaps_of(&lines(3000)), []);
        assert_eq!(overlaps_of(&lines(2999)), [(1, false)]);
    }

    #[test]
    fn three_at_once_are_three_overlaps() {
        let three = format!(
            "{FIRST}\n30 2@1 8 enter 3900 6 b\n40 3@1 9 enter 3900 7 c\n50 1@1 7 leave\n60 2@1 8 leave"
        );
        assert_eq!(overlaps_of(&three).len(), 3);
    }

    const AFTER: &str =
        "600 2@1 8 enter 3900 6 b\n700 1@1 7 look 3000\n800 1@1 7 lost x\n900 2@1 8 leave";

    #[test]
    fn a_server_that_forgot_is_an_excuse() {
        let forgot = format!("{FIRST}\n500 0 1 fault 1 1 forget 0\n550 0 1 over 1\n{AFTER}");
        assert_eq!(overlaps_of(&forgot), [(200, true)]);
        assert_eq!(overlaps_of(&forgot.replace("forget", "freeze")), [(200, false)]);
        assert_eq!(overlaps_of(&forgot.replace("forget", "restart")), [(200, false)]);
    }

    #[test]
    fn a_key_of_another_lock_is_no_excuse() {
        let deleted = format!("{FIRST}\n500 0@1 1 fault 1 1 delete 0\n501 0 1 over 1\n{AFTER}");
        assert_eq!(overlaps_of(&deleted), [(200, true)]);
        assert_eq!(overlaps_of(&deleted.replace("0@1 1 fault", "0@2 1 fault")), [(200, false)]);
    }

    #[test]
    fn what_happened_before_or_after_is_no_excuse() {
        let before = format!("1 0 1 fault 1 1 evict 0\n9 0 1 over 1\n{FIRST}\n{AFTER}");
        assert_eq!(overlaps_of(&before), [(200, false)]);
        assert_eq!(overlaps_of(&before.replace("9 0 1 over", "10 0 1 over")), [(200, true)]);
        let after = format!("{FIRST}\n{AFTER}\n601 0 1 fault 1 1 evict 0\n602 0 1 over 1");
        assert_eq!(overlaps_of(&after), [(200, false)]);
    }

    #[test]
    fn the_excuse_ends_when_the_next_renewal_has_told() {
        // A third of the lease and a tenth of a second after the key went: 1.601 s.
        let late = |at: u64| {
            format!(
                "{FIRST}\n500 0@1 1 fault 1 1 delete 0\n501 0 1 over 1\n600 2@1 8 enter 3900 6 b\n{at} 1@1 7 look 3000\n{at} 1@1 7 leave\n3000 2@1 8 leave"
            )
        };
        assert_eq!(overlaps_of(&late(1601)), [(1001, true)]);
        assert_eq!(overlaps_of(&late(1602)), [(1002, false)]);
        // Nor may it believe on when the other has left.
        let left = |at: u64| late(at).replace("3000 2@1", "700 2@1");
        assert_eq!(overlaps_of(&left(1601)), [(100, true)]);
        assert_eq!(overlaps_of(&left(1602)), [(100, false)]);
        // But whoever has the later grant may.
        let newer = left(1602)
            .replace("3000 5 a", "3000 8 a")
            .replace("20 1@1 7 enter", "490 2@1 8 wait\n510 1@1 7 enter");
        assert_eq!(overlaps_of(&newer), [(100, true)]);
        // A holder that was stopped meanwhile cannot have been told.
        let stopped = late(2500).replace("600 2", "550 0 7 stopped\n560 0 7 continued\n600 2");
        assert_eq!(overlaps_of(&stopped), [(1900, true)]);
    }

    #[test]
    fn what_stands_in_no_renewals_way_prolongs_no_excuse() {
        let late = format!(
            "{FIRST}\n500 0@1 1 fault 1 1 delete 0\n501 0 1 over 1\n600 2@1 8 enter 3900 6 b\n2900 1@1 7 look 3000\n2900 1@1 7 leave\n3000 2@1 8 leave"
        );
        assert_eq!(overlaps_of(&late), [(2300, false)]);
        for other in [
            "0@2 1 fault 2 1 delete",
            "0@2 1 fault 2 1 delete-fence",
            "0 1 fault 2 1 flush-scripts",
        ] {
            let more = format!("{late}\n400 {other} 0\n401 0 1 over 2");
            assert_eq!(overlaps_of(&more), [(2300, false)], "{other}");
        }
    }

    #[test]
    fn a_stop_that_was_over_long_before_is_no_excuse() {
        let long = "10 1@1 7 wait\n20 1@1 7 enter 3000 5 a\n21 0 7 stopped\n22 0 7 continued\n20000 1@1 7 look 23000\n20500 0@1 1 fault 1 1 delete 0\n20501 0 1 over 1\n20610 2@1 8 enter 23600 6 b\n22900 1@1 7 look 23000\n22900 1@1 7 leave\n23000 2@1 8 leave";
        assert_eq!(overlaps_of(long), [(2290, false)]);
    }

    #[test]
    fn the_excuse_ends_with_the_last_lease_from_before() {
        let stopped = "550 0 7 stopped\n560 0 7 continued\n600 2@1 8 enter 9000 6 b";
        let late = |at: u64| {
            format!(
                "{FIRST}\n500 0 1 fault 1 1 forget 0\n520 0 1 over 1\n{stopped}\n{at} 1@1 7 look 9000\n{at} 1@1 7 leave\n8000 2@1 8 leave"
            )
        };
        assert_eq!(overlaps_of(&late(3520)), [(2920, true)]);
        assert_eq!(overlaps_of(&late(3521)), [(2921, false)]);
    }

    #[test]
    fn several_nodes_have_no_excuse() {
        let text = "0 0 1 terms 5 3000 1 0\n1 1@1 7 wait\n2 1@1 7 enter 9 5 a\n3 0 1 fault 1 1 forget 0\n4 0 1 over 1\n5 2@1 8 enter 9 6 b";
        assert_eq!(find(&story(text)).len(), 1);
        assert_eq!(find(&story(&text.replace("terms 5", "terms 1"))).len(), 0);
    }
}
