//! Bounded calls: each call returns within its bound, plus the time for which the machine kept its
//! process waiting.

use super::{Finding, Rule, span};
use crate::history::model::{Call, Story};

/// Delay that is always allowed, because short waits for a processor are not measured.
const GRACE: u64 = 100_000_000;

/// By how much a call exceeded its bound, if it has one.
pub(crate) fn excess(call: &Call) -> Option<u64> {
    Some(call.until.saturating_sub(call.from).saturating_sub(call.bound?))
}

/// By how much a call may exceed its bound because its thread and process had to wait for a
/// processor. Twice what was measured, because other threads wait too, not only the one that
/// measures.
fn slack(story: &Story, call: &Call) -> u64 {
    let late = |pid| story.lateness(pid, call.from, call.until);
    GRACE + 2 * (call.delayed + late(call.pid) + late(story.parent))
}

pub(crate) fn find(story: &Story) -> Vec<Finding> {
    let too_long = |call: &&Call| {
        // A call of a killed process can also have been too long before the kill.
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
                    "at {} a call of child {} ({}) took {}, which exceeds its bound by {}; the \
                     machine explains {}",
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

    fn violations(more: &str, until: u64) -> usize {
        let until = until * 1_000_000;
        find(&story(&format!(
            "0 0 1 terms 1 9 9 0\n0 1@1 7 call lock 500000000\n{more}\n{until} 1@1 7 back"
        )))
        .len()
    }

    #[test]
    fn call_within_bound_and_grace_is_allowed() {
        assert_eq!(violations("", 600), 0);
        assert_eq!(violations("", 601), 1);
        assert_eq!(
            violations("", 601) + violations("5 2@1 7 call wait -\n990000000 2@1 7 back", 600),
            1
        );
    }

    #[test]
    fn process_lateness_excuses_a_long_call() {
        assert_eq!(violations("400000000 0 7 late 50000000", 700), 0);
        assert_eq!(violations("400000000 0 7 late 50000000", 701), 1);
        assert_eq!(
            violations("400000000 0 1 late 50000000", 700),
            0,
            "lateness of the parent counts too"
        );
        assert_eq!(violations("400000000 0 8 late 50000000", 700), 1, "another process was late");
        assert_eq!(violations("900000000 0 7 late 50000000", 700), 1, "not during the call");
    }

    #[test]
    fn thread_delay_excuses_a_long_call() {
        let text = |delayed: u64| {
            format!(
                "0 0 1 terms 1 9 9 0\n0 1@1 7 call lock 500000000\n700000000 1@1 7 back {delayed}"
            )
        };
        assert_eq!(find(&story(&text(50_000_000))).len(), 0);
        assert_eq!(find(&story(&text(49_999_999))).len(), 1);
    }

    #[test]
    fn call_that_never_returns_is_found() {
        let hangs = "0 0 1 terms 1 9 9 0\n0 1@1 7 call lock 500000000\n900000000 2@1 8 wait";
        assert_eq!(find(&story(hangs)).len(), 1);
        assert_eq!(find(&story(&format!("{hangs}\n900000000 0 7 killed"))).len(), 1);
        let doomed = hangs
            .replace("900000000 2@1", "500000000 0 7 doomed\n890000000 0 7 killed\n900000000 2@1");
        assert_eq!(find(&story(&doomed)).len(), 0, "the kill took a while");
        assert_eq!(
            find(&story(&hangs.replace("900000000 2@1", "500000000 0 7 killed\n900000000 2@1")))
                .len(),
            0
        );
    }
}
