//! What is left at the end, errors that nothing explains, and locks that come back from the dead:
//! none of these may be.

use super::{Finding, Rule};
use crate::history::{Done, event::Kind, story::Story};

/// What is left of an operation timeout, if the machine takes one part in so many, may not be
/// enough to take leave everywhere.
const SHARE: u64 = 4;

/// By then somebody has asked once more over each connection that is in use.
const LATE: u64 = 1_000_000_000;

pub(crate) fn find(story: &Story) -> Vec<Finding> {
    let finding = |at, until, seats, lock, text| Finding {
        rule: Rule::Remains,
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
            format!("at {} child {seat} could not go on: {why}", story.clock(*at)),
        )
    });
    let refusals = story.waits.iter().filter_map(|wait| {
        let why = wait.why.as_ref().filter(|why| why.starts_with("refused"))?;
        // An error says not what it answers: one that comes twice is taken for the answer to the
        // next request, and the answer to that, if it is an error too, for that to the one
        // after. So it goes on while there are errors, and once more.
        let refuses =
            |done: &Done| matches!(done.fault.kind, Kind::Full | Kind::Evict | Kind::ForeignBytes);
        let is_double =
            |done: &Done| matches!(done.fault.kind, Kind::DuplicateRequest | Kind::DuplicateReply);
        let explains = |done: &Done| {
            if !refuses(done)
                || done.from >= wait.until
                || done.until.saturating_add(LATE) <= wait.from
            {
                return false;
            }
            let during = |double: &Done| {
                double.from < done.until.max(wait.until) && double.until > done.from
            };
            done.until > wait.from
                || story.done.iter().any(|double| is_double(double) && during(double))
        };
        (!story.done.iter().any(explains)).then(|| {
            let text = format!(
                "at {} a server refused child {}: {why}",
                story.clock(wait.until),
                wait.seat
            );
            finding(wait.from, wait.until, vec![wait.seat], wait.lock, text)
        })
    });
    let revived = story.revived.iter().map(|(at, seat, lock)| {
        let text = format!(
            "at {} child {seat} was told that it held what it had been told was lost",
            story.clock(*at)
        );
        finding(*at, *at, vec![*seat], *lock, text)
    });
    leaks.chain(failures).chain(refusals).chain(revived).collect()
}

/// How many places in line were left by those whom the machine gave no time to take leave.
pub(crate) fn excused(story: &Story) -> usize {
    story.leaks.iter().filter(|(_, _, what)| is_excused(story, what)).count()
}

/// A manager that is shut down gives up the places of those who wait within one operation timeout,
/// and leaves to expire what it could not. So it is where the machine kept it, or the way to the
/// servers, waiting for a part of that time.
fn is_excused(story: &Story, what: &str) -> bool {
    let mut parts = what.split('|');
    let Some(pid) = parts.find_map(|part| part.strip_prefix("pid")?.parse().ok()) else {
        return false;
    };
    let kept_waiting = |from: u64| {
        let until = from.saturating_add(story.terms.operation_timeout);
        story.lateness(pid, from, until) + story.lateness(story.parent, from, until)
    };
    let mut ends = story.calls.iter().filter(|call| call.pid == pid && call.what == "shutdown");
    ends.any(|call| kept_waiting(call.from) > story.terms.operation_timeout / SHARE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::rules::tests::story;

    #[test]
    fn leaks_and_failures_are_told() {
        assert_eq!(find(&story("10 0 7 leak 2 threads")).len(), 1);
        assert_eq!(find(&story("10 1 7 failed no server")).len(), 1);
        assert_eq!(find(&story("10 1 7 done")).len(), 0);
    }

    #[test]
    fn who_was_given_no_time_to_take_leave_may_leave_a_place() {
        let left = |late: &str, what: &str| {
            let ends = "0 0 1 terms 1 100 100 0\n10 1 7 call shutdown 100\n110 1 7 back 0";
            let story = story(&format!("{ends}\n{late}\n900 0 1 leak {what}"));
            (find(&story).len(), excused(&story))
        };
        let place = "25 channel vm|pid7|tid8|ts9|c4 in a line";
        assert_eq!(left("60 0 7 late 20", place), (1, 0));
        assert_eq!(left("60 0 7 late 40", place), (0, 1));
        assert_eq!(left("60 0 1 late 40", place), (0, 1), "the ways lead through the parent");
        assert_eq!(left("60 0 5 late 40", place), (1, 0), "another process");
        assert_eq!(left("300 0 7 late 40", place), (1, 0), "another time");
        assert_eq!(
            left("60 0 7 late 40", &place.replace("pid7", "pid5")),
            (1, 0),
            "who did not end"
        );
        assert_eq!(left("60 0 7 late 40", "7 connections"), (1, 0), "no place");
    }

    #[test]
    fn lost_is_final() {
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
    fn a_server_refuses_when_it_is_full_and_only_then() {
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
        // Over before the call began, but not before the last error.
        let earlier = "4 0 1 fault 2 1 duplicate-request 0\n5 0 1 over 2";
        assert_eq!(find(&story(&format!("{before}\n{earlier}"))).len(), 0);
        let long_ago = refused.replace("10 ", "3000000000 ").replace("20 ", "3000000001 ");
        assert_eq!(
            find(&story(&format!("{long_ago}\n3 0 1 fault 1 1 full 0\n9 0 1 over 1\n{earlier}")))
                .len(),
            1
        );
    }
}
