//! The fenced resource: who lost a lock, and writes after its successor has been there, is refused.

use std::collections::{BTreeMap, HashMap};

use super::{Finding, Rule};
use crate::history::story::{Hold, Story};

#[derive(Debug, Default)]
pub(crate) struct Fenced {
    /// Writes of those whose successor had been there.
    pub(crate) stale_refused: usize,
    pub(crate) stale_accepted: usize,
    /// Writes of those who knew that their lock was lost.
    pub(crate) late: usize,
    pub(crate) findings: Vec<Finding>,
}

pub(crate) fn find(story: &Story) -> Fenced {
    let mut fenced = Fenced::default();
    // Whose write it is does not depend on tokens: they are what is judged.
    let mut by_seat: HashMap<(u32, u32, u32), Vec<&Hold>> = HashMap::new();
    for hold in &story.holds {
        by_seat.entry((hold.pid, hold.seat, hold.lock)).or_default().push(hold);
    }
    let mut newest: BTreeMap<u32, &Hold> = BTreeMap::new();
    for write in &story.writes {
        let holds = by_seat.get(&(write.pid, write.seat, write.lock));
        let Some(hold) = holds
            .and_then(|holds| holds[..holds.partition_point(|hold| hold.from <= write.at)].last())
        else {
            continue;
        };
        let successor = newest.get(&write.lock).filter(|newest| newest.from >= hold.until);
        fenced.late += usize::from(write.late);
        match successor {
            None if write.accepted => {
                let newest = newest.entry(write.lock).or_insert(hold);
                if hold.from > newest.from {
                    *newest = hold;
                }
            }
            None => {}
            Some(_) if !write.accepted => fenced.stale_refused += 1,
            Some(successor) => {
                fenced.stale_accepted += 1;
                fenced.findings.push(Finding {
                    rule: Rule::Fence,
                    lock: write.lock,
                    seats: vec![write.seat, successor.seat],
                    from: hold.from,
                    until: write.at,
                    text: format!(
                        "at {} child {} came with token {}, and was let in after child {} with {}, whose lock is newer",
                        story.clock(write.at),
                        write.seat,
                        write.token,
                        successor.seat,
                        successor.token
                    ),
                });
            }
        }
    }
    fenced
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::rules::tests::story;

    const LATE: &str = "10 1@1 7 enter 90 5 a\n11 1@1 7 met 5\n95 1@1 7 lost x\n100 2@1 8 enter 190 6 b\n101 2@1 8 met 6\n110 1@1 7 write 5 1 refused";

    fn counts(text: &str) -> (usize, usize, usize) {
        let fenced = find(&story(text));
        assert_eq!(fenced.findings.len(), fenced.stale_accepted);
        (fenced.stale_refused, fenced.stale_accepted, fenced.late)
    }

    #[test]
    fn who_comes_after_its_successor_is_refused() {
        assert_eq!(counts(LATE), (1, 0, 1));
        assert_eq!(counts(&LATE.replace("refused", "accepted")), (0, 1, 1));
    }

    #[test]
    fn equal_tokens_do_not_hide_it() {
        assert_eq!(
            counts(
                &LATE
                    .replace("190 6", "190 5")
                    .replace("met 6", "met 5")
                    .replace("refused", "accepted")
            )
            .1,
            1
        );
    }

    #[test]
    fn who_comes_late_and_before_its_successor_does_no_harm() {
        let before = LATE.replace(
            "101 2@1 8 met 6\n110 1@1 7 write 5 1 refused",
            "102 1@1 7 write 5 1 accepted\n103 2@1 8 met 6",
        );
        assert_eq!(counts(&before), (0, 0, 1));
    }

    #[test]
    fn two_that_believe_at_once_have_no_order_here() {
        // The larger token entered first: a server that forgot had answered it before the other.
        let both = "10 1@1 7 enter 190 6 a\n11 1@1 7 met 6\n20 2@1 8 enter 190 5 b\n30 1@1 7 write 6 1 accepted\n40 1@1 7 leave\n50 2@1 8 leave";
        assert_eq!(counts(both), (0, 0, 0));
    }

    #[test]
    fn locks_have_nothing_to_do_with_each_other() {
        assert_eq!(counts(&LATE.replace("@1 8", "@2 8").replace("refused", "accepted")), (0, 0, 1));
    }
}
