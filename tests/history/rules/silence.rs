//! Answers: nobody is told that it could not be found out who has a lock where nothing kept anybody
//! from finding out.

use std::collections::HashMap;

use super::{
    Finding, Rule,
    losses::{answered, in_trouble, looks_where_all_ran, quarantine},
    spans::{Spans, union},
};
use crate::history::story::{Story, Wait};

/// How an answer begins that says nothing about the lock: no server told, or there was no
/// connection to ask over.
const SILENT: [&str; 2] = ["unavailable", "exhausted"];
/// A connection that a process borrows for itself comes back within this time.
const LENT: u64 = 1_000_000_000;

pub(crate) fn find(story: &Story) -> Vec<Finding> {
    let lent = lent(story);
    let in_calm = |wait: &&Wait| {
        let silent =
            wait.why.as_ref().is_some_and(|why| SILENT.iter().any(|word| why.starts_with(word)));
        silent && is_calm(story, wait, lent.get(&wait.pid))
    };
    let finding = |wait: &Wait| Finding {
        rule: Rule::Remains,
        lock: wait.lock,
        seats: vec![wait.seat],
        from: wait.from,
        until: wait.until,
        text: format!(
            "at {} child {} was told nothing about lock {}, and nothing had happened: {}",
            story.clock(wait.until),
            wait.seat,
            wait.lock,
            wait.why.as_deref().unwrap_or_default()
        ),
    };
    story.waits.iter().filter(in_calm).map(finding).collect()
}

/// Whether the process ran, had its connections to itself, and all nodes were there, before the
/// answer. An exchange that was under way when something ceased may have come to nothing one time
/// limit later; the other one is for what follows from that.
fn is_calm(story: &Story, wait: &Wait, lent: Option<&Spans>) -> bool {
    let terms = &story.terms;
    let (from, until) = (wait.until.saturating_sub(2 * terms.operation_timeout), wait.until);
    if from < story.start + quarantine(story) {
        return false;
    }
    // Also where a connection came back at last: then too little time was left to ask.
    if lent.into_iter().flatten().any(|(began, ended)| *began < until && *ended > from) {
        return false;
    }
    let Some(looks) = looks_where_all_ran(story, wait.pid, wait.lock, from, until) else {
        return false;
    };
    let well =
        |node: usize| answered(&looks, node) && !in_trouble(story, wait.lock, node, from, until);
    (1..=terms.nodes).all(well)
}

/// When connections of each process may have been in other use.
pub(super) fn lent(story: &Story) -> HashMap<u32, Spans> {
    let mut lent: HashMap<u32, Spans> = HashMap::new();
    for call in story.calls.iter().filter(|call| call.what == "connection") {
        lent.entry(call.pid).or_default().push((call.from, call.until.saturating_add(LENT)));
    }
    lent.into_iter().map(|(pid, spans)| (pid, union(spans))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::rules::tests::story;

    /// A lease of 900 ms and a time limit of 100 ms: a lock is asked for at 8,990 ms, and at 9,000
    /// ms there is the answer. Each 20 ms the nodes say what is `said`, in two milliseconds.
    fn wrong(nodes: usize, why: &str, said: &str, more: &str) -> usize {
        let mut lines = vec![
            format!("0 0 1 terms {nodes} 900000000 100000000 0"),
            "8990 1@1 7 wait".into(),
            format!("9000 1@1 7 again {why}: x"),
        ];
        lines.extend(
            (0..500).map(|look| format!("{} 0@1 1 seen {}000000 {said}", 20 * look + 2, 20 * look)),
        );
        lines.extend(more.lines().map(str::to_owned));
        let text: Vec<String> = lines.iter().map(|line| line.replacen(' ', "000000 ", 1)).collect();
        find(&story(&text.join("\n"))).len()
    }

    fn one(more: &str) -> usize {
        wrong(1, "unavailable", "-", more)
    }

    #[test]
    fn in_calm_there_is_an_answer() {
        assert_eq!(one(""), 1);
        assert_eq!(wrong(1, "exhausted", "-", ""), 1, "nobody had borrowed a connection");
        assert_eq!(wrong(1, "contended", "9:a", ""), 0, "that is one");
        assert_eq!(wrong(3, "unavailable", "- - -", ""), 1);
    }

    #[test]
    fn what_happened_to_a_node_just_before_is_a_reason() {
        let fault = |node: u32, kind: &str, from: u64, until: u64| {
            format!("{from} 0 1 fault 1 {node} {kind} 0\n{until} 0 1 over 1")
        };
        assert_eq!(one(&fault(1, "freeze", 8000, 8801)), 0);
        assert_eq!(one(&fault(1, "freeze", 8000, 8799)), 1, "that was over");
        assert_eq!(one(&fault(1, "freeze", 9001, 9002)), 1, "that came later");
        assert_eq!(one(&fault(0, "blackhole", 8990, 8995)), 0, "to all of them");
        assert_eq!(wrong(1, "unavailable", "?", ""), 0, "the witness was told nothing either");
        let three = |more: &str| wrong(3, "unavailable", "- - -", more);
        assert_eq!(three(&fault(2, "mute", 8900, 8950)), 0);
        assert_eq!(three(&fault(2, "forget", 6000, 6100)), 0, "it does not vote yet");
        assert_eq!(three(&fault(2, "forget", 5800, 5899)), 1);
        assert_eq!(three(&fault(2, "restart", 6000, 6100)), 1);
    }

    #[test]
    fn new_nodes_do_not_vote_yet() {
        let soon = |nodes| {
            let said = vec!["-"; nodes].join(" ");
            let looks = (0..200).map(|look| {
                format!("\n{}000000 0@1 1 seen {}000000 {said}", 20 * look + 2, 20 * look)
            });
            let terms = format!("0 0 1 terms {nodes} 900000000 100000000 0");
            let asks = "2990000000 1@1 7 wait\n3000000000 1@1 7 again unavailable: x";
            find(&story(&format!("{terms}\n{asks}{}", looks.collect::<String>()))).len()
        };
        assert_eq!(soon(1), 1);
        assert_eq!(soon(3), 0);
    }

    #[test]
    fn who_did_not_run_could_not_ask() {
        assert_eq!(one("8900 0 7 stopped\n8950 0 7 continued"), 0);
        assert_eq!(one("8900 0 8 stopped\n8950 0 8 continued"), 1, "another process");
        assert_eq!(one("8900 0 7 late 46000000"), 0);
        assert_eq!(one("8900 0 7 late 45000000"), 1);
        assert_eq!(one("8900 0 1 late 46000000"), 0, "the one with the proxies");
    }

    #[test]
    fn who_has_lent_its_connections_cannot_ask() {
        let lent =
            |pid: u32, at: u64| format!("{at} 4 {pid} call connection 9\n{at} 4 {pid} back 0");
        for why in ["exhausted", "unavailable"] {
            assert_eq!(wrong(1, why, "-", &lent(7, 8700)), 0, "{why}");
            assert_eq!(wrong(1, why, "-", &lent(7, 7799)), 1, "{why}: they are back");
            assert_eq!(wrong(1, why, "-", &lent(8, 8700)), 1, "{why}: another process");
        }
    }
}
