//! Leftovers at the end, failures, refusals that no fault explains, and locks that were reported as
//! held after their loss.

use super::{Finding, Rule};
use crate::history::{
    event::Kind,
    model::{FaultPeriod, Story},
};

/// If the machine takes this part of an operation timeout, the rest may not be enough to remove all
/// queue entries at shutdown.
const LATE_PART: u64 = 4;

/// Time in which each connection in use carries another request, also on a slow machine.
const REUSE_TIME: u64 = 5_000_000_000;

pub(crate) fn find(story: &Story) -> Vec<Finding> {
    let finding = |at, until, seats, lock, text| Finding {
        rule: Rule::Other,
        lock,
        seats,
        from: at,
        until,
        text,
    };
    let leaks = story.leaks.iter().filter(|(_, _, what)| !is_excused(story, what)).map(
        |(at, pid, what)| {
            finding(
                *at,
                *at,
                Vec::new(),
                0,
                format!("at {} process {pid} left {what}", story.clock(*at)),
            )
        },
    );
    let failures = story.failures.iter().map(|(at, seat, why)| {
        finding(
            *at,
            *at,
            vec![*seat],
            0,
            format!("at {} child {seat} failed: {why}", story.clock(*at)),
        )
    });
    let refusals = story.waits.iter().filter_map(|wait| {
        let why = wait.why.as_ref().filter(|why| why.starts_with("refused"))?;
        // An error reply has no nonce. If it comes twice, the second one is taken for the reply to
        // the next request. While replies are errors, that shifts each of them by one request, and
        // one further request is affected at the end.
        let causes_errors = |period: &FaultPeriod| {
            matches!(period.fault.kind, Kind::Full | Kind::Evict | Kind::ForeignBytes)
        };
        let duplicates = |period: &FaultPeriod| {
            matches!(period.fault.kind, Kind::DuplicateRequest | Kind::DuplicateReply)
        };
        let explains = |period: &FaultPeriod| {
            if !causes_errors(period)
                || period.from >= wait.until
                || period.until.saturating_add(REUSE_TIME) <= wait.from
            {
                return false;
            }
            let overlaps = |other: &FaultPeriod| {
                other.from < period.until.max(wait.until) && other.until > period.from
            };
            period.until > wait.from
                || story.faults.iter().any(|other| duplicates(other) && overlaps(other))
        };
        (!story.faults.iter().any(explains)).then(|| {
            let text = format!(
                "at {} a server refused child {}: {why}",
                story.clock(wait.until),
                wait.seat
            );
            finding(wait.from, wait.until, vec![wait.seat], wait.lock, text)
        })
    });
    let held_after_loss = story.held_after_loss.iter().map(|(at, seat, lock)| {
        let text = format!(
            "at {} is_held() returned true for child {seat} after the lock had been lost",
            story.clock(*at)
        );
        finding(*at, *at, vec![*seat], *lock, text)
    });
    leaks.chain(failures).chain(refusals).chain(held_after_loss).collect()
}

/// Counts the queue entries that were left because the machine was too slow to remove them.
pub(crate) fn excused(story: &Story) -> usize {
    story.leaks.iter().filter(|(_, _, what)| is_excused(story, what)).count()
}

/// Whether a leftover queue entry is excused. A manager that is shut down removes the queue entries
/// of its waiters within one operation timeout, and leaves the rest to expire. So an entry may be
/// left if the machine kept the manager, or the proxies to the servers, waiting for a part of that
/// time.
fn is_excused(story: &Story, what: &str) -> bool {
    let mut parts = what.split('|');
    let Some(pid) = parts.find_map(|part| part.strip_prefix("pid")?.parse().ok()) else {
        return false;
    };
    let kept_waiting = |from: u64| {
        let until = from.saturating_add(story.terms.operation_timeout);
        story.lateness(pid, from, until) + story.lateness(story.parent, from, until)
    };
    let mut shutdowns =
        story.calls.iter().filter(|call| call.pid == pid && call.what == "shutdown");
    shutdowns.any(|call| kept_waiting(call.from) > story.terms.operation_timeout / LATE_PART)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::rules::tests::story;

    #[test]
    fn leaks_and_failures_are_found() {
        assert_eq!(find(&story("10 0 7 leak 2 threads")).len(), 1);
        assert_eq!(find(&story("10 1 7 failed no server")).len(), 1);
        assert_eq!(find(&story("10 1 7 done")).len(), 0);
    }

    #[test]
    fn queue_entry_left_by_a_late_shutdown_is_excused() {
        let left = |late: &str, what: &str| {
            let ends = "0 0 1 terms 1 100 100 0\n10 1 7 call shutdown 100\n110 1 7 back 0";
            let story = story(&format!("{ends}\n{late}\n900 0 1 leak {what}"));
            (find(&story).len(), excused(&story))
        };
        let entry = "25 channel vm|pid7|tid8|ts9|c4 in a queue";
        assert_eq!(left("60 0 7 late 20", entry), (1, 0));
        assert_eq!(left("60 0 7 late 40", entry), (0, 1));
        assert_eq!(left("60 0 1 late 40", entry), (0, 1), "the parent has the proxies");
        assert_eq!(left("60 0 5 late 40", entry), (1, 0), "another process was late");
        assert_eq!(left("300 0 7 late 40", entry), (1, 0), "it was late at another time");
        assert_eq!(
            left("60 0 7 late 40", &entry.replace("pid7", "pid5")),
            (1, 0),
            "the process was not shut down"
        );
        assert_eq!(left("60 0 7 late 40", "7 connections"), (1, 0), "not a queue entry");
    }

    #[test]
    fn lock_held_again_after_its_loss_is_found() {
        let lost = "10 1@1 7 enter 90 5 a\n20 1@1 7 lost x\n30 1@1 7 look 90";
        assert_eq!(find(&story(lost)).len(), 1);
        assert_eq!(
            find(&story(&lost.replace(
                "30 1@1 7 look 90",
                "30 1@1 7 wait\n40 1@1 7 enter 90 6 b\n50 1@1 7 look 90"
            )))
            .len(),
            0
        );
    }

    #[test]
    fn refusal_without_a_full_server_is_found() {
        let refused = "10 1@1 7 wait\n20 1@1 7 again refused: OOM";
        assert_eq!(find(&story(refused)).len(), 1);
        assert_eq!(
            find(&story(&format!("{refused}\n5 0 1 fault 1 1 full 0\n15 0 1 over 1"))).len(),
            0
        );
        assert_eq!(
            find(&story(&format!("{refused}\n5 0 1 fault 1 1 full 0\n9 0 1 over 1"))).len(),
            1
        );
        assert_eq!(
            find(&story(&format!("{refused}\n5 0 1 fault 1 1 freeze 0\n15 0 1 over 1"))).len(),
            1
        );
        assert_eq!(find(&story(&refused.replace("refused", "contended"))).len(), 0);
        let before = format!("{refused}\n3 0 1 fault 1 1 full 0\n9 0 1 over 1");
        let twice = "8 0 1 fault 2 1 duplicate-request 0\n15 0 1 over 2";
        assert_eq!(find(&story(&format!("{before}\n{twice}"))).len(), 0);
        assert_eq!(find(&story(&format!("{refused}\n{twice}"))).len(), 1);
        // It ended before the call began, but after the server had become full.
        let earlier = "4 0 1 fault 2 1 duplicate-request 0\n5 0 1 over 2";
        assert_eq!(find(&story(&format!("{before}\n{earlier}"))).len(), 0);
        let long_ago = refused.replace("10 ", "9000000000 ").replace("20 ", "9000000001 ");
        assert_eq!(
            find(&story(&format!("{long_ago}\n3 0 1 fault 1 1 full 0\n9 0 1 over 1\n{earlier}")))
                .len(),
            1
        );
    }
}
