//! Bounded calls: each returns within the time it states, and what the machine kept its process
//! waiting.

use super::{Finding, Rule, span};
use crate::history::story::{Call, Story};

/// For what takes time and is nobody's fault, where nothing of it was measured.
const GRACE: u64 = 100_000_000;

/// How much longer than stated a call took, if it has a bound.
pub(crate) fn excess(call: &Call) -> Option<u64> {
    Some(call.until.saturating_sub(call.from).saturating_sub(call.bound?))
}

/// How much longer it may take on a machine that kept its thread and its process waiting for a
/// processor. Not only the thread that measures waits, hence twice what was measured.
fn slack(story: &Story, call: &Call) -> u64 {
    let late = |pid| story.lateness(pid, call.from, call.until);
    GRACE + 2 * (call.delayed + late(call.pid) + late(story.parent))
}

pub(crate) fn find(story: &Story) -> Vec<Finding> {
    let too_long = |call: &&Call| {
        // A process that was killed can still have been late before that.
        excess(call).is_some_and(|excess| excess > slack(story, call))
    };
    story
        .calls
        .iter()
        .filter(too_long)
        .map(|call| {
            let excess = excess(call).unwrap_or(0);
            Finding {
                rule: Rule::Bounds,
                lock: call.lock,
                seats: vec![call.seat],
                from: call.from,
                until: call.until,
                text: format!(
                    "at {} a call of child {} ({}) took {}, which is {} more than it may, and the machine explains {}",
                    story.clock(call.from),
                    call.seat,
                    call.what,
                    span(call.until - call.from),
                    span(excess),
                    span(slack(story, call)),
                ),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::rules::tests::story;

    fn wrong(more: &str, until: u64) -> usize {
        let until = until * 1_000_000;
        find(&story(&format!(
            "0 0 1 terms 1 9 9 0\n0 1@1 7 call lock 500000000\n{more}\n{until} 1@1 7 back"
        )))
        .len()
    }

    #[test]
    fn a_call_has_its_bound_and_a_grace() {
        assert_eq!(wrong("", 600), 0);
        assert_eq!(wrong("", 601), 1);
        assert_eq!(wrong("", 601) + wrong("5 2@1 7 call wait -\n990000000 2@1 7 back", 600), 1);
    }

    #[test]
    fn a_slow_machine_is_no_offence() {
        assert_eq!(wrong("400000000 0 7 late 50000000", 700), 0);
        assert_eq!(wrong("400000000 0 7 late 50000000", 701), 1);
        assert_eq!(wrong("400000000 0 1 late 50000000", 700), 0, "nor a slow parent");
        assert_eq!(wrong("400000000 0 8 late 50000000", 700), 1, "but another process");
        assert_eq!(wrong("900000000 0 7 late 50000000", 700), 1, "not meanwhile");
    }

    #[test]
    fn what_its_own_thread_had_to_wait_is_no_offence_either() {
        let text = |delayed: u64| {
            format!(
                "0 0 1 terms 1 9 9 0\n0 1@1 7 call lock 500000000\n700000000 1@1 7 back {delayed}"
            )
        };
        assert_eq!(find(&story(&text(50_000_000))).len(), 0);
        assert_eq!(find(&story(&text(49_999_999))).len(), 1);
    }

    #[test]
    fn a_call_that_never_returns_is_found() {
        let hangs = "0 0 1 terms 1 9 9 0\n0 1@1 7 call lock 500000000\n900000000 2@1 8 wait";
        assert_eq!(find(&story(hangs)).len(), 1);
        assert_eq!(find(&story(&format!("{hangs}\n900000000 0 7 killed"))).len(), 1);
        let doomed = hangs
            .replace("900000000 2@1", "500000000 0 7 doomed\n890000000 0 7 killed\n900000000 2@1");
        assert_eq!(find(&story(&doomed)).len(), 0, "dying takes a while");
        assert_eq!(
            find(&story(&hangs.replace("900000000 2@1", "500000000 0 7 killed\n900000000 2@1")))
                .len(),
            0
        );
    }
}
