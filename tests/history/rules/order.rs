//! Token order: of one lock, the later grant has the larger token, whatever fails.

use std::collections::BTreeMap;

use super::{Finding, Rule};
use crate::history::story::{Hold, Story};

pub(crate) fn find(story: &Story) -> Vec<Finding> {
    let mut found = Vec::new();
    let mut locks: BTreeMap<u32, Vec<&Hold>> = BTreeMap::new();
    for hold in &story.holds {
        locks.entry(hold.lock).or_default().push(hold);
    }
    for holds in locks.values() {
        found.extend(equal(story, holds));
        // Certain of any two: one was over, or at least believed in, before the other was even
        // asked for.
        found.extend(falling(story, holds, |hold| hold.from, |hold| hold.asked, |_, _| false));
        // Who believed after another had ceased to was granted after it too; but for a server that
        // forgot, and then answered the second before the first.
        let excused = |earlier: &Hold, later: &Hold| {
            let asked = earlier.asked.min(later.asked);
            story.excuses(later.lock, asked, later.from, later.from).next().is_some()
        };
        found.extend(falling(story, holds, |hold| hold.until, |hold| hold.from, excused));
    }
    found.sort_by_key(|finding| (finding.from, finding.seats.clone()));
    found.dedup_by_key(|finding| (finding.from, finding.seats.clone()));
    found
}

fn equal(story: &Story, holds: &[&Hold]) -> Vec<Finding> {
    let mut sorted = holds.to_vec();
    sorted.sort_by_key(|hold| (hold.token, hold.from));
    let twins = sorted.windows(2).filter(|pair| pair[0].token == pair[1].token);
    twins.map(|pair| finding(story, pair[0], pair[1])).collect()
}

/// Compares each with the largest token among those that were `over` when it `began`.
fn falling(
    story: &Story,
    holds: &[&Hold],
    over: impl Fn(&Hold) -> u64,
    began: impl Fn(&Hold) -> u64,
    excused: impl Fn(&Hold, &Hold) -> bool,
) -> Vec<Finding> {
    let (mut by_end, mut by_beginning) = (holds.to_vec(), holds.to_vec());
    by_end.sort_by_key(|hold| over(hold));
    by_beginning.sort_by_key(|hold| began(hold));
    let (mut ended, mut highest, mut found) =
        (by_end.into_iter().peekable(), None::<&Hold>, Vec::new());
    for later in by_beginning {
        while let Some(hold) = ended.next_if(|hold| over(hold) <= began(later)) {
            if highest.is_none_or(|highest| hold.token > highest.token) {
                highest = Some(hold);
            }
        }
        let wrong = highest
            .filter(|earlier| earlier.token >= later.token && !std::ptr::eq(*earlier, later));
        found.extend(
            wrong
                .filter(|earlier| !excused(earlier, later))
                .map(|earlier| finding(story, earlier, later)),
        );
    }
    found
}

fn finding(story: &Story, earlier: &Hold, later: &Hold) -> Finding {
    Finding {
        rule: Rule::Order,
        lock: later.lock,
        seats: vec![earlier.seat, later.seat],
        from: later.from,
        until: later.until,
        text: format!(
            "at {} child {} entered with token {} after child {} had entered with {}",
            story.clock(later.from),
            later.seat,
            later.token,
            earlier.seat,
            earlier.token
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::rules::tests::story;

    fn wrong(text: &str) -> usize {
        find(&story(&format!("0 0 1 terms 1 100 10 0\n{text}"))).len()
    }

    const TWO: &str = "10 1@1 7 wait\n12 2@1 8 wait\n20 1@1 7 enter 90 5 a\n30 1@1 7 leave\n40 2@1 8 enter 90 6 b\n50 2@1 8 leave";

    #[test]
    fn rising_tokens_are_well() {
        assert_eq!(wrong(TWO), 0);
    }

    #[test]
    fn equal_and_falling_tokens_are_found() {
        assert_eq!(wrong(&TWO.replace("90 6", "90 5")), 1);
        assert_eq!(wrong(&TWO.replace("90 6", "90 4")), 1);
    }

    #[test]
    fn other_locks_have_other_tokens() {
        assert_eq!(wrong(&TWO.replace("90 6", "90 4").replace("2@1", "2@2")), 0);
    }

    #[test]
    fn the_highest_counts_and_not_the_last() {
        let third = "\n55 3@1 9 wait\n60 3@1 9 enter 90 5 c";
        assert_eq!(
            wrong(&format!(
                "{}{third}",
                TWO.replace("90 5 a", "90 2 a").replace("90 6 b", "90 4 b")
            )),
            0
        );
        assert_eq!(
            wrong(&format!(
                "{}{third}",
                TWO.replace("90 5 a", "90 9 a").replace("90 6 b", "90 10 b")
            )),
            1
        );
    }

    #[test]
    fn answers_may_overtake_each_other_when_a_server_forgot() {
        // The second was granted first, then the server forgot, and gave the lock to the first.
        let late = TWO.replace("90 6", "90 4");
        let forgot = "\n15 0 1 fault 1 1 forget 0\n18 0 1 over 1";
        assert_eq!(wrong(&format!("{late}{forgot}")), 0);
        // Not if it was asked for after the other had entered.
        assert_eq!(wrong(&format!("{}{forgot}", late.replace("12 2@1", "21 2@1"))), 1);
        // Twins are never well.
        assert_eq!(wrong(&format!("{}{forgot}", TWO.replace("90 6", "90 5"))), 1);
    }
}
