//! Liveness: no acquisition fails because the servers could not be asked while there is no fault.

use std::collections::HashMap;

use super::{
    Finding, Rule,
    intervals::{Intervals, union},
    unexplained_losses::{polls_if_all_ran, quarantine, replied_always, was_disturbed},
};
use crate::history::model::{Story, Wait};

/// The start of the errors that report nothing about the lock: no reply of a server, and no free
/// connection.
const NO_ANSWER: [&str; 2] = ["unavailable", "exhausted"];
/// A process returns a borrowed connection within this time.
const BORROWED_MAX: u64 = 1_000_000_000;

pub(crate) fn find(story: &Story) -> Vec<Finding> {
    let borrowed = borrowed_connections(story);
    let is_unexplained = |wait: &&Wait| {
        let unanswered =
            wait.why.as_ref().is_some_and(|why| NO_ANSWER.iter().any(|word| why.starts_with(word)));
        unanswered && was_undisturbed(story, wait, borrowed.get(&wait.pid))
    };
    let finding = |wait: &Wait| Finding {
        rule: Rule::Other,
        lock: wait.lock,
        seats: vec![wait.seat],
        from: wait.from,
        until: wait.until,
        text: format!(
            "at {} child {} could not ask for lock {}, without any fault: {}",
            story.clock(wait.until),
            wait.seat,
            wait.lock,
            wait.why.as_deref().unwrap_or_default()
        ),
    };
    story.waits.iter().filter(is_unexplained).map(finding).collect()
}

/// Whether, for two operation timeouts before the wait ended, the process ran, had all its
/// connections, and could reach all nodes. Two, because a request in flight at the end of a fault
/// may fail one timeout later, and the next request may fail because of that.
fn was_undisturbed(story: &Story, wait: &Wait, borrowed: Option<&Intervals>) -> bool {
    let terms = &story.terms;
    let (from, until) = (wait.until.saturating_sub(2 * terms.operation_timeout), wait.until);
    if from < story.start + quarantine(story) {
        return false;
    }
    // Even if a connection was returned in the end, too little time may have been left to ask.
    if borrowed.into_iter().flatten().any(|(began, ended)| *began < until && *ended > from) {
        return false;
    }
    let Some(polls) = polls_if_all_ran(story, wait.pid, wait.lock, from, until) else {
        return false;
    };
    let was_reachable = |node: usize| {
        replied_always(&polls, node) && !was_disturbed(story, wait.lock, node, from, until)
    };
    (1..=terms.nodes).all(was_reachable)
}

/// Returns when each process may have borrowed connections from the pool.
pub(super) fn borrowed_connections(story: &Story) -> HashMap<u32, Intervals> {
    let mut borrowed: HashMap<u32, Intervals> = HashMap::new();
    for call in story.calls.iter().filter(|call| call.what == "connection") {
        let until = call.until.saturating_add(BORROWED_MAX);
        borrowed.entry(call.pid).or_default().push((call.from, until));
    }
    borrowed.into_iter().map(|(pid, intervals)| (pid, union(intervals))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::rules::tests::story;

    /// A ttl of 900 ms and an operation timeout of 100 ms. An acquisition begins at 8,990 ms and
    /// fails at 9,000 ms. Every 20 ms the nodes reply `said`, within two milliseconds.
    fn violations(nodes: usize, why: &str, said: &str, more: &str) -> usize {
        let mut lines = vec![
            format!("0 0 1 terms {nodes} 900000000 100000000 0"),
            "8990 1@1 7 wait".into(),
            format!("9000 1@1 7 again {why}: x"),
        ];
        lines.extend(
            (0..500).map(|poll| format!("{} 0@1 1 seen {}000000 {said}", 20 * poll + 2, 20 * poll)),
        );
        lines.extend(more.lines().map(str::to_owned));
        let text: Vec<String> = lines.iter().map(|line| line.replacen(' ', "000000 ", 1)).collect();
        find(&story(&text.join("\n"))).len()
    }

    fn one(more: &str) -> usize {
        violations(1, "unavailable", "-", more)
    }

    #[test]
    fn unanswered_acquisition_without_faults_is_found() {
        assert_eq!(one(""), 1);
        assert_eq!(violations(1, "exhausted", "-", ""), 1, "no connection was borrowed");
        assert_eq!(violations(1, "contended", "9:a", ""), 0, "the holder is known");
        assert_eq!(violations(3, "unavailable", "- - -", ""), 1);
    }

    #[test]
    fn recent_fault_of_a_node_is_an_excuse() {
        let fault = |node: u32, kind: &str, from: u64, until: u64| {
            format!("{from} 0 1 fault 1 {node} {kind} 0\n{until} 0 1 over 1")
        };
        assert_eq!(one(&fault(1, "freeze", 8000, 8801)), 0);
        assert_eq!(one(&fault(1, "freeze", 8000, 8799)), 1, "the fault ended too early");
        assert_eq!(one(&fault(1, "freeze", 9001, 9002)), 1, "the fault began later");
        assert_eq!(one(&fault(0, "blackhole", 8990, 8995)), 0, "all nodes had the fault");
        assert_eq!(violations(1, "unavailable", "?", ""), 0, "the poller got no reply either");
        let three = |more: &str| violations(3, "unavailable", "- - -", more);
        assert_eq!(three(&fault(2, "mute", 8900, 8950)), 0);
        assert_eq!(three(&fault(2, "forget", 6000, 6100)), 0, "it is in quarantine");
        assert_eq!(three(&fault(2, "forget", 5800, 5899)), 1);
        assert_eq!(three(&fault(2, "restart", 6000, 6100)), 0, "so is a node with its data");
        assert_eq!(three(&fault(2, "freeze", 6000, 6100)), 1);
    }

    #[test]
    fn quarantine_at_the_start_is_an_excuse() {
        let soon = |nodes| {
            let said = vec!["-"; nodes].join(" ");
            let polls = (0..200).map(|poll| {
                format!("\n{}000000 0@1 1 seen {}000000 {said}", 20 * poll + 2, 20 * poll)
            });
            let terms = format!("0 0 1 terms {nodes} 900000000 100000000 0");
            let wait = "2990000000 1@1 7 wait\n3000000000 1@1 7 again unavailable: x";
            find(&story(&format!("{terms}\n{wait}{}", polls.collect::<String>()))).len()
        };
        assert_eq!(soon(1), 1);
        assert_eq!(soon(3), 0);
    }

    #[test]
    fn process_that_did_not_run_is_excused() {
        assert_eq!(one("8900 0 7 stopped\n8950 0 7 continued"), 0);
        assert_eq!(one("8900 0 8 stopped\n8950 0 8 continued"), 1, "another process was stopped");
        assert_eq!(one("8900 0 7 late 46000000"), 0);
        assert_eq!(one("8900 0 7 late 45000000"), 1);
        assert_eq!(one("8900 0 1 late 46000000"), 0, "the parent has the proxies");
    }

    #[test]
    fn process_without_free_connections_is_excused() {
        let borrowed =
            |pid: u32, at: u64| format!("{at} 4 {pid} call connection 9\n{at} 4 {pid} back 0");
        for why in ["exhausted", "unavailable"] {
            assert_eq!(violations(1, why, "-", &borrowed(7, 8700)), 0, "{why}");
            assert_eq!(violations(1, why, "-", &borrowed(7, 7799)), 1, "{why}: they were returned");
            assert_eq!(
                violations(1, why, "-", &borrowed(8, 8700)),
                1,
                "{why}: another process borrowed them"
            );
        }
    }
}
