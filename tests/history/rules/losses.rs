//! Losses with a reason: nobody is told that its lock is lost where the nodes were there, and its
//! process ran; and everybody is told why.

use super::{Finding, Rule, span};
use crate::history::{
    event::{Kind, Said},
    story::{Call, End, Hold, Seen, Story, Wait},
};

/// A lease has room for a renewal that is late by this part of it, several times over. Where a
/// thread of the process, or of the one with the proxies, was measured to wait for longer, others
/// may have waited for much longer.
const LATE: u64 = 20;
/// So long a server that has a processor takes to answer the witness.
const PROMPT: u64 = 50_000_000;
/// A record with fewer answers of the nodes within a lease says nothing about them.
const LOOKS: usize = 5;
/// A node tells its age in whole seconds, of which both ends are cut.
const AGE_SLACK: u64 = 2_000_000_000;

/// How many losses there were, and those that nothing justifies or that were not told.
#[derive(Debug, Default)]
pub(crate) struct Losses {
    pub(crate) count: usize,
    pub(crate) findings: Vec<Finding>,
}

pub(crate) fn find(story: &Story) -> Losses {
    let mut losses = Losses::default();
    let lapsed: Vec<Hold> =
        story.lapsed.iter().filter(|wait| !was_shut_down(story, wait)).map(lapsed).collect();
    losses.count += story.lapsed.len() - lapsed.len();
    for hold in story.holds.iter().filter(|hold| hold.end == End::Lost).chain(&lapsed) {
        losses.count += 1;
        if is_excused(story, hold) {
            continue;
        }
        losses.findings.push(Finding {
            rule: Rule::Losses,
            lock: hold.lock,
            seats: vec![hold.seat],
            from: hold.from,
            until: hold.until,
            text: format!(
                "at {} child {} lost lock {} after {}, and nothing had happened to it or to enough of the nodes",
                story.clock(hold.until),
                hold.seat,
                hold.lock,
                span(hold.until - hold.from)
            ),
        });
    }
    losses.findings.extend(story.untold.iter().map(|(at, seat, lock)| Finding {
        rule: Rule::Losses,
        lock: *lock,
        seats: vec![*seat],
        from: *at,
        until: *at,
        text: format!(
            "at {} child {seat} had lost lock {lock}, and was not told so",
            story.clock(*at)
        ),
    }));
    losses
}

/// A time of no length that nobody knows the holder of: it is excused by anything that happened to
/// any node.
fn lapsed(wait: &Wait) -> Hold {
    let Wait { seat, pid, lock, from: asked, until, .. } = *wait;
    let (from, end) = (until, End::Lost);
    Hold {
        seat,
        pid,
        lock,
        token: 0,
        id: String::new(),
        asked,
        from,
        until,
        end,
        looks: Vec::new(),
    }
}

/// Whether its manager was shut down before anybody could look: a shutdown waits only for those who
/// are inside.
fn was_shut_down(story: &Story, wait: &Wait) -> bool {
    let shutdown = |call: &Call| call.pid == wait.pid && call.what == "shutdown";
    story
        .calls
        .iter()
        .any(|call| shutdown(call) && call.from <= wait.until && call.until >= wait.from)
}

/// Whether anything happened within a lease before the end that can have kept a renewal from being
/// made, answered or asked for, exchanges that were under way when it ceased included.
fn is_excused(story: &Story, hold: &Hold) -> bool {
    let terms = &story.terms;
    let (from, until) =
        (hold.until.saturating_sub(terms.ttl + terms.operation_timeout), hold.until);
    let Some(looks) = looks_where_all_ran(story, hold.pid, hold.lock, from, until) else {
        return true;
    };
    let well =
        |node: &usize| answered(&looks, *node) && !in_trouble(story, hold.lock, *node, from, until);
    // By two thirds of a lease before its end, those that have it are asked to renew it.
    let had = |node: &usize| {
        let ours = |seen: &&Seen| matches!(seen.said.get(node - 1), Some(Said::Kept { id, .. }) if *id == hold.id);
        looks.iter().filter(|seen| seen.from + terms.ttl * 2 / 3 >= until).all(ours)
    };
    let enough = (1..=terms.nodes).filter(well).filter(had).count() > terms.nodes / 2;
    !enough && !(1..=terms.nodes).all(|node| well(&node))
}

/// What the witness was told of the lock in this time, if it, the process and the servers had a
/// processor as far as that can be seen.
pub(super) fn looks_where_all_ran(
    story: &Story,
    pid: u32,
    lock: u32,
    from: u64,
    until: u64,
) -> Option<Vec<&Seen>> {
    let late = story.lateness(pid, from, until) + story.lateness(story.parent, from, until);
    let first = story.seen.partition_point(|seen| seen.from < from);
    let within = |seen: &&Seen| seen.lock == lock && seen.until <= until;
    let looks: Vec<&Seen> =
        story.seen[first..].iter().take_while(|seen| seen.from <= until).filter(within).collect();
    let prompt = looks.iter().all(|seen| seen.until - seen.from <= PROMPT);
    (late <= story.terms.ttl / LATE && looks.len() >= LOOKS && prompt).then_some(looks)
}

/// Whether the witness had an answer of the node each time.
pub(super) fn answered(looks: &[&Seen], node: usize) -> bool {
    looks.iter().all(|seen| seen.said.get(node - 1).is_some_and(|said| *said != Said::Nothing))
}

/// Whether something was done to a node, or to the way to it, within these moments, or still
/// mattered then.
pub(super) fn in_trouble(story: &Story, lock: u32, node: usize, from: u64, until: u64) -> bool {
    story.done.iter().any(|done| {
        let lasts = if done.fault.kind == Kind::Forget { quarantine(story) } else { 0 };
        (done.fault.node == 0 || done.fault.node == node)
            && (done.lock == 0 || done.lock == lock)
            && done.from <= until
            && done.until.saturating_add(lasts) >= from
    })
}

/// So long one of several nodes that forgot, or is new, does not vote.
pub(super) fn quarantine(story: &Story) -> u64 {
    if story.terms.nodes > 1 { story.terms.ttl + AGE_SLACK } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::rules::tests::story;

    /// A lease of 900 ms and a time limit of 100 ms: a lock is entered at 2,000 ms and lost at
    /// 5,000 ms, and each 50 ms the nodes say what is `said`, in two milliseconds.
    fn wrong(nodes: usize, said: impl Fn(u64) -> &'static str, more: &str) -> usize {
        wrong_after("1999 1@1 7 wait\n2000 1@1 7 enter 9999 5 a", nodes, said, more)
    }

    /// The same after another beginning.
    fn wrong_after(
        begun: &str,
        nodes: usize,
        said: impl Fn(u64) -> &'static str,
        more: &str,
    ) -> usize {
        let mut lines = vec![format!("0 0 1 terms {nodes} 900 100 0")];
        lines.extend(begun.lines().map(str::to_owned));
        lines.push("5000 1@1 7 lost x".into());
        lines.extend(
            (0..100).map(|look| {
                format!("{} 0@1 1 seen {} {}", 50 * look + 2, 50 * look, said(50 * look))
            }),
        );
        lines.extend(more.lines().map(str::to_owned));
        let timed = |line: &String| {
            let mut words: Vec<String> = line.split(' ').map(str::to_owned).collect();
            let spans: &[usize] = match words[3].as_str() {
                "terms" => &[0, 5, 6, 7],
                "enter" | "seen" | "late" => &[0, 4],
                _ => &[0],
            };
            spans.iter().for_each(|at| words[*at].push_str("000000"));
            words.join(" ")
        };
        let text: Vec<String> = lines.iter().map(timed).collect();
        let losses = find(&story(&text.join("\n")));
        assert_eq!(losses.count, 1);
        losses.findings.len()
    }

    fn one(more: &str) -> usize {
        wrong(1, |_| "500:a", more)
    }

    fn fault(node: u32, kind: &str, from: u64, until: u64) -> String {
        format!("{from} 0 1 fault {node} {node} {kind} 0\n{until} 0 1 over {node}\n")
    }

    #[test]
    fn a_loss_needs_a_reason() {
        assert_eq!(one(""), 1);
        assert_eq!(wrong(1, |_| "-", ""), 1, "and that it is gone is none: who took it?");
        assert_eq!(wrong(5, |_| "500:a 500:a 500:a 500:a 500:a", ""), 1);
    }

    #[test]
    fn what_was_done_to_the_node_within_the_lease_is_a_reason() {
        assert_eq!(one(&fault(1, "freeze", 3000, 4001)), 0);
        assert_eq!(one(&fault(1, "freeze", 3000, 3999)), 1, "that was over");
        assert_eq!(one(&fault(1, "freeze", 5001, 5002)), 1, "that came later");
        assert_eq!(one(&fault(0, "blackhole", 4500, 4600)), 0, "to all of them");
        assert_eq!(one("4500 0@1 1 fault 1 1 delete 0\n4501 0@1 1 over 1"), 0);
        assert_eq!(
            one("4500 0@2 1 fault 1 1 delete 0\n4501 0@2 1 over 1"),
            1,
            "another lock's key"
        );
    }

    #[test]
    fn who_did_not_run_could_not_renew() {
        assert_eq!(one("4500 0 7 stopped\n4600 0 7 continued"), 0);
        assert_eq!(one("4500 0 8 stopped\n4600 0 8 continued"), 1, "another process");
        assert_eq!(one("4600 0 7 late 46"), 0);
        assert_eq!(one("4600 0 7 late 45"), 1);
        assert_eq!(one("4600 0 1 late 46"), 0, "the one with the proxies");
        assert_eq!(one("3900 0 7 late 46"), 1, "that was before");
    }

    #[test]
    fn servers_that_were_slow_to_tell_may_have_been_slow_to_renew() {
        assert_eq!(one("4061 0@1 1 seen 4010 500:a"), 0);
        assert_eq!(one("4060 0@1 1 seen 4010 500:a"), 1);
        assert_eq!(wrong(1, |at| if at == 4500 { "?" } else { "500:a" }, ""), 0);
        assert_eq!(
            find(&story("0 0 1 terms 1 900 100 0\n10 1@1 7 enter 9999 5 a\n9000 1@1 7 lost x"))
                .findings
                .len(),
            0
        );
    }

    #[test]
    fn of_several_nodes_a_minority_is_no_reason_unless_it_was_needed() {
        let three = |said: &'static str, more: &str| wrong(3, |_| said, more);
        let away = fault(2, "freeze", 4500, 4600);
        assert_eq!(three("500:a 500:a 500:a", &away), 1);
        assert_eq!(three("500:a 500:a 500:b", &away), 0, "one of two that had it");
        assert_eq!(three("500:a 500:a 500:a", &(away + &fault(3, "mute", 4500, 4600))), 0);
        assert_eq!(
            three("500:a 500:a -", &fault(2, "forget", 1000, 1200)),
            0,
            "it does not vote yet"
        );
        assert_eq!(three("500:a 500:a -", &fault(2, "restart", 1000, 1200)), 1);
        let late = |at: u64| if at < 4500 { "500:a 500:a -" } else { "500:a 500:a 500:a" };
        assert_eq!(
            wrong(3, late, &fault(2, "freeze", 4500, 4600)),
            0,
            "it came too late to be renewed there"
        );
    }

    #[test]
    fn a_guard_that_is_dead_on_arrival_needs_a_reason_too() {
        let dead = |nodes: usize, said: &'static str, more: &str| {
            wrong_after("1999 1@1 7 wait", nodes, |_| said, more)
        };
        assert_eq!(dead(1, "500:a", ""), 1);
        assert_eq!(dead(1, "-", ""), 1);
        assert_eq!(dead(3, "- - -", ""), 1);
        assert_eq!(dead(1, "500:a", &fault(1, "freeze", 3000, 4001)), 0);
        assert_eq!(
            dead(3, "500:a 500:a 500:a", &fault(2, "freeze", 4500, 4600)),
            0,
            "it may have been needed"
        );
        assert_eq!(dead(1, "500:a", "4500 0 7 stopped\n4600 0 7 continued"), 0);
        let shutdown =
            |pid: u32, at: u64| format!("{at} 3 {pid} call shutdown 9\n{at} 3 {pid} back 0");
        assert_eq!(dead(1, "500:a", &shutdown(7, 4990)), 0);
        assert_eq!(dead(1, "500:a", &shutdown(7, 1998)), 1, "of an earlier manager");
        assert_eq!(dead(1, "500:a", &shutdown(8, 4990)), 1, "of another process");
        assert_eq!(one(&shutdown(7, 4990)), 1, "who is inside is waited for");
    }

    #[test]
    fn a_loss_is_told_even_if_the_lock_was_never_believed_in() {
        let lost = "10 1@1 7 wait\n20 1@1 7 lost without a word";
        assert_eq!(find(&story(lost)).findings.len(), 1);
        assert_eq!(find(&story(&lost.replace("without a word", "gone"))).findings.len(), 0);
    }
}
