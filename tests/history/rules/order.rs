//! Token order: of two grants of one lock, the later one has the larger token.

use std::collections::BTreeMap;

use super::{Finding, Rule};
use crate::history::{
    model::{Hold, Story},
    sharing::Sharing,
};

pub(crate) fn find(story: &Story) -> Vec<Finding> {
    let mut found = Vec::new();
    let mut locks: BTreeMap<u32, Vec<&Hold>> = BTreeMap::new();
    for hold in story.holds.iter().filter(|hold| hold.sharing != Sharing::Foreign) {
        locks.entry(hold.lock).or_default().push(hold);
    }
    for holds in locks.values() {
        found.extend(equal(story, holds));
        // If one lock was acquired before the other was requested, the order is certain.
        found.extend(falling(story, holds, |hold| hold.from, |hold| hold.asked, |_, _| false));
        // If one hold began after the other ended, it was granted later too. The exception is a
        // server that lost its data, and whose reply to the second request came before the first.
        let excused = |earlier: &Hold, later: &Hold| {
            let asked = earlier.asked.min(later.asked);
            story.excuses(later.lock, asked, later.from, later.from).next().is_some()
        };
        // Members of a group may notice their grants in another order.
        let holds: Vec<&Hold> = holds.iter().copied().filter(|hold| hold.is_alone()).collect();
        found.extend(falling(story, &holds, |hold| hold.until, |hold| hold.from, excused));
    }
    found.sort_by_key(|finding| (finding.from, finding.seats.clone()));
    found.dedup_by_key(|finding| (finding.from, finding.seats.clone()));
    found
}

fn equal(story: &Story, holds: &[&Hold]) -> Vec<Finding> {
    let mut sorted = holds.to_vec();
    sorted.sort_by_key(|hold| (hold.token, hold.from));
    // Over several nodes, readers that were acquired together may have the same token.
    let are_together = |one: &Hold, other: &Hold| {
        story.terms.nodes > 1
            && one.sharing.is_shared_with(other.sharing)
            && one.asked < other.from
            && other.asked < one.from
    };
    let twins = sorted.windows(2).filter(|pair| pair[0].token == pair[1].token);
    let twins = twins.filter(|pair| !are_together(pair[0], pair[1]));
    twins.map(|pair| finding(story, pair[0], pair[1])).collect()
}

/// Compares each hold with the largest token of those that were `over` when it `began`.
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
            "at {} child {} entered with token {} after child {} had entered with token {}",
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

    fn violations(text: &str) -> usize {
        find(&story(&format!("0 0 1 terms 1 100 10 0\n{text}"))).len()
    }

    const TWO: &str = "\
        10 1@1 7 wait\n\
        12 2@1 8 wait\n\
        20 1@1 7 enter 90 5 a\n\
        30 1@1 7 leave\n\
        40 2@1 8 enter 90 6 b\n\
        50 2@1 8 leave";

    #[test]
    fn rising_tokens_are_allowed() {
        assert_eq!(violations(TWO), 0);
    }

    #[test]
    fn equal_and_falling_tokens_are_found() {
        assert_eq!(violations(&TWO.replace("90 6", "90 5")), 1);
        assert_eq!(violations(&TWO.replace("90 6", "90 4")), 1);
    }

    #[test]
    fn tokens_of_different_locks_are_not_compared() {
        assert_eq!(violations(&TWO.replace("90 6", "90 4").replace("2@1", "2@2")), 0);
    }

    #[test]
    fn token_is_compared_with_the_highest_so_far() {
        let third = "\n55 3@1 9 wait\n60 3@1 9 enter 90 5 c";
        assert_eq!(
            violations(&format!(
                "{}{third}",
                TWO.replace("90 5 a", "90 2 a").replace("90 6 b", "90 4 b")
            )),
            0
        );
        assert_eq!(
            violations(&format!(
                "{}{third}",
                TWO.replace("90 5 a", "90 9 a").replace("90 6 b", "90 10 b")
            )),
            1
        );
    }

    #[test]
    fn members_of_a_group_may_notice_grants_in_another_order() {
        let readers = TWO.replace("20 1@1", "15 1@1 7 as read\n20 1@1");
        let readers = readers.replace("40 2@1", "35 2@1 8 as read\n40 2@1");
        let late = readers.replace("90 6", "90 4");
        assert_eq!(violations(&late), 0);
        // The later one was requested after the earlier one had entered.
        let requested = late.replace("12 2@1 8 wait\n", "");
        let requested = requested.replace("30 1@1", "21 2@1 8 wait\n30 1@1");
        assert_eq!(violations(&requested), 1);
    }

    #[test]
    fn readers_may_have_the_same_token_over_several_nodes_only() {
        let readers = TWO.replace("20 1@1", "15 1@1 7 as read\n20 1@1");
        let readers = readers.replace("40 2@1", "35 2@1 8 as read\n40 2@1");
        let same = readers.replace("90 6", "90 5");
        let over = |nodes: u32, text: &str| {
            find(&story(&format!("0 0 1 terms {nodes} 100 10 0\n{text}"))).len()
        };
        assert_eq!((over(1, &same), over(3, &same)), (1, 0));
        assert_eq!(over(3, &same.replacen("as read", "as write", 1)), 1, "a writer and a reader");
        // The later one was requested after the earlier one had entered.
        let requested = same.replace("12 2@1 8 wait\n", "");
        assert_eq!(over(3, &requested.replace("30 1@1", "21 2@1 8 wait\n30 1@1")), 1);
    }

    #[test]
    fn replies_may_be_reordered_if_the_server_lost_its_data() {
        // The second acquisition was granted first. Then the server lost its data and granted the
        // lock to the first one.
        let late = TWO.replace("90 6", "90 4");
        let forgot = "\n15 0 1 fault 1 1 forget 0\n18 0 1 over 1";
        assert_eq!(violations(&format!("{late}{forgot}")), 0);
        // Not if the second one was requested after the first had entered.
        assert_eq!(violations(&format!("{}{forgot}", late.replace("12 2@1", "21 2@1"))), 1);
        // Equal tokens are never allowed.
        assert_eq!(violations(&format!("{}{forgot}", TWO.replace("90 6", "90 5"))), 1);
    }
}
