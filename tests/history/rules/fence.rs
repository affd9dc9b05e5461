//! Fencing: the resource rejects a write of a former holder once a later holder has reached it.

use std::collections::{BTreeMap, HashMap};

use super::{Finding, Rule};
use crate::history::model::{Hold, Story};

#[derive(Debug, Default)]
pub(crate) struct Fenced {
    /// Writes by former holders after a later holder had reached the resource.
    pub(crate) stale_refused: usize,
    pub(crate) stale_accepted: usize,
    /// Writes by holders that knew of their loss.
    pub(crate) late: usize,
    pub(crate) findings: Vec<Finding>,
}

pub(crate) fn find(story: &Story) -> Fenced {
    let mut fenced = Fenced::default();
    // Find the hold of a write by seat, not by token, because tokens are what is checked.
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
                        "at {} the resource accepted child {} with token {} after child {} with \
                         token {}, whose hold is newer",
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

    const LATE: &str = "\
        10 1@1 7 enter 90 5 a\n\
        11 1@1 7 met 5\n\
        95 1@1 7 lost x\n\
        100 2@1 8 enter 190 6 b\n\
        101 2@1 8 met 6\n\
        110 1@1 7 write 5 1 refused";

    fn counts(text: &str) -> (usize, usize, usize) {
        let fenced = find(&story(text));
        assert_eq!(fenced.findings.len(), fenced.stale_accepted);
        (fenced.stale_refused, fenced.stale_accepted, fenced.late)
    }

    #[test]
    fn write_after_the_successor_must_be_refused() {
        assert_eq!(counts(LATE), (1, 0, 1));
        assert_eq!(counts(&LATE.replace("refused", "accepted")), (0, 1, 1));
    }

    #[test]
    fn stale_write_with_equal_token_is_found() {
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
    fn late_write_before_the_successor_is_allowed() {
        let before = LATE.replace(
            "101 2@1 8 met 6\n110 1@1 7 write 5 1 refused",
            "102 1@1 7 write 5 1 accepted\n103 2@1 8 met 6",
        );
        assert_eq!(counts(&before), (0, 0, 1));
    }

    #[test]
    fn overlapping_holds_have_no_order_at_the_resource() {
        // A server without its data replied to the larger token first.
        let both = "\
            10 1@1 7 enter 190 6 a\n\
            11 1@1 7 met 6\n\
            20 2@1 8 enter 190 5 b\n\
            30 1@1 7 write 6 1 accepted\n\
            40 1@1 7 leave\n\
            50 2@1 8 leave";
        assert_eq!(counts(both), (0, 0, 0));
    }

    #[test]
    fn different_locks_are_fenced_separately() {
        assert_eq!(counts(&LATE.replace("@1 8", "@2 8").replace("refused", "accepted")), (0, 0, 1));
    }
}
