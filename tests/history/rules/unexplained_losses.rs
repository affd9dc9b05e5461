//! No loss without a cause: a lock is not lost while its process runs and enough nodes can be
//! reached. And every loss is reported with a reason.

use super::{Finding, Rule, span};
use crate::history::{
    event::{Kind, Said},
    model::{Call, End, Hold, Seen, Story, Wait},
    sharing::Sharing,
};

/// A lease can survive several renewals that are late by this part of it. If more lateness was
/// measured in the process, or in the parent, which has the proxies, then other threads there may
/// have waited for much longer, and the loss is excused.
const LATE_PART: u64 = 20;
/// Maximum time in which a server that has a processor replies to the poller.
const REPLY_MAX: u64 = 50_000_000;
/// Minimum number of polls within a lease. A record with fewer shows too little about the nodes.
const POLLS_MIN: usize = 5;
/// A node reports its uptime in whole seconds, so a quarantine can end this much later.
const UPTIME_SLACK: u64 = 2_000_000_000;

/// The number of losses, and those without a cause or without a reported reason.
#[derive(Debug, Default)]
pub(crate) struct Losses {
    pub(crate) count: usize,
    pub(crate) findings: Vec<Finding>,
}

pub(crate) fn find(story: &Story) -> Losses {
    let mut losses = Losses::default();
    let lost_on_arrival: Vec<Hold> = story
        .lost_on_arrival
        .iter()
        .filter(|wait| !was_shut_down(story, wait))
        .map(empty_hold)
        .collect();
    losses.count += story.lost_on_arrival.len() - lost_on_arrival.len();
    for hold in story.holds.iter().filter(|hold| hold.end == End::Lost).chain(&lost_on_arrival) {
        losses.count += 1;
        if is_excused(story, hold) {
            continue;
        }
        losses.findings.push(Finding {
            rule: Rule::UnexplainedLosses,
            lock: hold.lock,
            seats: vec![hold.seat],
            from: hold.from,
            until: hold.until,
            text: format!(
                "at {} child {} lost lock {} after {}, although its process ran and enough \
                 nodes were reachable",
                story.clock(hold.until),
                hold.seat,
                hold.lock,
                span(hold.until - hold.from)
            ),
        });
    }
    losses.findings.extend(story.unreported_losses.iter().map(|(at, seat, lock)| Finding {
        rule: Rule::UnexplainedLosses,
        lock: *lock,
        seats: vec![*seat],
        from: *at,
        until: *at,
        text: format!(
            "at {} child {seat} had lost lock {lock}, but no reason was reported",
            story.clock(*at)
        ),
    }));
    losses
}

/// A hold of zero length, for a lock that was lost before `lock()` returned. Its id is not known,
/// so a fault of any node excuses the loss.
fn empty_hold(wait: &Wait) -> Hold {
    let Wait { seat, pid, lock, from: asked, until, .. } = *wait;
    let (from, end) = (until, End::Lost);
    Hold {
        seat,
        pid,
        lock,
        token: 0,
        id: String::new(),
        sharing: Sharing::Mutex,
        downgraded: None,
        asked,
        from,
        until,
        end,
        looks: Vec::new(),
    }
}

/// Whether the manager was shut down during the wait. A worker shuts its manager down while no
/// thread holds a lock, but threads may still be acquiring one.
fn was_shut_down(story: &Story, wait: &Wait) -> bool {
    let shutdown = |call: &Call| call.pid == wait.pid && call.what == "shutdown";
    story
        .calls
        .iter()
        .any(|call| shutdown(call) && call.from <= wait.until && call.until >= wait.from)
}

/// Whether something may have prevented a renewal during the last lease. A request in flight at the
/// end of a fault may fail one operation timeout later.
fn is_excused(story: &Story, hold: &Hold) -> bool {
    let terms = &story.terms;
    let (from, until) =
        (hold.until.saturating_sub(terms.ttl + terms.operation_timeout), hold.until);
    let Some(polls) = polls_if_all_ran(story, hold.pid, hold.lock, from, until) else {
        return true;
    };
    let was_reachable = |node: &usize| {
        replied_always(&polls, *node) && !was_disturbed(story, hold.lock, *node, from, until)
    };
    // A renewal is due two thirds of a ttl before the end. Only nodes that had the lock since then
    // could confirm it.
    let had_lock = |node: &usize| {
        let is_ours = |seen: &&Seen| {
            let reply = seen.said.get(node - 1);
            matches!(reply, Some(Said::Kept { id, .. }) if *id == hold.id)
        };
        polls.iter().filter(|seen| seen.from + terms.ttl * 2 / 3 >= until).all(is_ours)
    };
    let enough = (1..=terms.nodes).filter(was_reachable).filter(had_lock).count() > terms.nodes / 2;
    !enough && !(1..=terms.nodes).all(|node| was_reachable(&node))
}

/// Returns the replies to the poller in this time. `None` if the process, the parent or a server
/// may have had no processor, or if there were too few polls to know.
pub(super) fn polls_if_all_ran(
    story: &Story,
    pid: u32,
    lock: u32,
    from: u64,
    until: u64,
) -> Option<Vec<&Seen>> {
    let late = story.lateness(pid, from, until) + story.lateness(story.parent, from, until);
    let first = story.seen.partition_point(|seen| seen.from < from);
    let within = |seen: &&Seen| seen.lock == lock && seen.until <= until;
    let polls: Vec<&Seen> =
        story.seen[first..].iter().take_while(|seen| seen.from <= until).filter(within).collect();
    let prompt = polls.iter().all(|seen| seen.until - seen.from <= REPLY_MAX);
    (late <= story.terms.ttl / LATE_PART && polls.len() >= POLLS_MIN && prompt).then_some(polls)
}

/// Whether the node replied to every poll.
pub(super) fn replied_always(polls: &[&Seen], node: usize) -> bool {
    polls.iter().all(|seen| seen.said.get(node - 1).is_some_and(|said| *said != Said::Nothing))
}

/// Whether the node had a fault in this time, or was still in quarantine because of one.
pub(super) fn was_disturbed(story: &Story, lock: u32, node: usize, from: u64, until: u64) -> bool {
    story.faults.iter().any(|period| {
        let restarted = matches!(period.fault.kind, Kind::Forget | Kind::Restart);
        let effect = if restarted { quarantine(story) } else { 0 };
        (period.fault.node == 0 || period.fault.node == node)
            && (period.lock == 0 || period.lock == lock)
            && period.from <= until
            && period.until.saturating_add(effect) >= from
    })
}

/// How long a new or restarted node does not vote; zero if there is only one node.
pub(super) fn quarantine(story: &Story) -> u64 {
    if story.terms.nodes > 1 { story.terms.ttl + UPTIME_SLACK } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::rules::tests::story;

    /// A ttl of 900 ms and an operation timeout of 100 ms. A lock is acquired at 2,000 ms and lost
    /// at 5,000 ms. Every 50 ms the nodes reply `said`, within two milliseconds.
    fn violations(nodes: usize, said: impl Fn(u64) -> &'static str, more: &str) -> usize {
        violations_after("1999 1@1 7 wait\n2000 1@1 7 enter 9999 5 a", nodes, said, more)
    }

    /// The same with other records about the acquisition.
    fn violations_after(
        acquisition: &str,
        nodes: usize,
        said: impl Fn(u64) -> &'static str,
        more: &str,
    ) -> usize {
        let mut lines = vec![format!("0 0 1 terms {nodes} 900 100 0")];
        lines.extend(acquisition.lines().map(str::to_owned));
        lines.push("5000 1@1 7 lost x".into());
        lines.extend(
            (0..100).map(|poll| {
                format!("{} 0@1 1 seen {} {}", 50 * poll + 2, 50 * poll, said(50 * poll))
            }),
        );
        lines.extend(more.lines().map(str::to_owned));
        let timed = |line: &String| {
            let mut words: Vec<String> = line.split(' ').map(str::to_owned).collect();
            let times: &[usize] = match words[3].as_str() {
                "terms" => &[0, 5, 6, 7],
                "enter" | "seen" | "late" => &[0, 4],
                _ => &[0],
            };
            times.iter().for_each(|at| words[*at].push_str("000000"));
            words.join(" ")
        };
        let text: Vec<String> = lines.iter().map(timed).collect();
        let losses = find(&story(&text.join("\n")));
        assert_eq!(losses.count, 1);
        losses.findings.len()
    }

    fn one(more: &str) -> usize {
        violations(1, |_| "500:a", more)
    }

    fn fault(node: u32, kind: &str, from: u64, until: u64) -> String {
        format!("{from} 0 1 fault {node} {node} {kind} 0\n{until} 0 1 over {node}\n")
    }

    #[test]
    fn loss_without_faults_is_found() {
        assert_eq!(one(""), 1);
        assert_eq!(violations(1, |_| "-", ""), 1, "nothing explains why the lock is gone");
        assert_eq!(violations(5, |_| "500:a 500:a 500:a 500:a 500:a", ""), 1);
    }

    #[test]
    fn fault_of_the_node_within_the_lease_is_an_excuse() {
        assert_eq!(one(&fault(1, "freeze", 3000, 4001)), 0);
        assert_eq!(one(&fault(1, "freeze", 3000, 3999)), 1, "the fault ended too early");
        assert_eq!(one(&fault(1, "freeze", 5001, 5002)), 1, "the fault began later");
        assert_eq!(one(&fault(0, "blackhole", 4500, 4600)), 0, "all nodes had the fault");
        assert_eq!(one("4500 0@1 1 fault 1 1 delete 0\n4501 0@1 1 over 1"), 0);
        assert_eq!(
            one("4500 0@2 1 fault 1 1 delete 0\n4501 0@2 1 over 1"),
            1,
            "the key of another lock"
        );
    }

    #[test]
    fn process_that_did_not_run_is_excused() {
        assert_eq!(one("4500 0 7 stopped\n4600 0 7 continued"), 0);
        assert_eq!(one("4500 0 8 stopped\n4600 0 8 continued"), 1, "another process was stopped");
        assert_eq!(one("4600 0 7 late 46"), 0);
        assert_eq!(one("4600 0 7 late 45"), 1);
        assert_eq!(one("4600 0 1 late 46"), 0, "the parent has the proxies");
        assert_eq!(one("3900 0 7 late 46"), 1, "it was late before the lease");
    }

    #[test]
    fn slow_or_missing_poll_replies_are_an_excuse() {
        assert_eq!(one("4061 0@1 1 seen 4010 500:a"), 0);
        assert_eq!(one("4060 0@1 1 seen 4010 500:a"), 1);
        assert_eq!(violations(1, |at| if at == 4500 { "?" } else { "500:a" }, ""), 0);
        assert_eq!(
            find(&story("0 0 1 terms 1 900 100 0\n10 1@1 7 enter 9999 5 a\n9000 1@1 7 lost x"))
                .findings
                .len(),
            0
        );
    }

    #[test]
    fn fault_of_a_minority_excuses_only_if_it_was_needed() {
        let three = |said: &'static str, more: &str| violations(3, |_| said, more);
        let stopped = fault(2, "freeze", 4500, 4600);
        assert_eq!(three("500:a 500:a 500:a", &stopped), 1);
        assert_eq!(three("500:a 500:a 500:b", &stopped), 0, "only two nodes had the lock");
        assert_eq!(three("500:a 500:a 500:a", &(stopped + &fault(3, "mute", 4500, 4600))), 0);
        assert_eq!(
            three("500:a 500:a -", &fault(2, "forget", 1000, 1200)),
            0,
            "it is in quarantine"
        );
        assert_eq!(three("500:a 500:a -", &fault(2, "freeze", 1000, 1200)), 1);
        let late = |at: u64| if at < 4500 { "500:a 500:a -" } else { "500:a 500:a 500:a" };
        assert_eq!(
            violations(3, late, &fault(2, "freeze", 4500, 4600)),
            0,
            "the third node got the lock too late for the renewal"
        );
    }

    #[test]
    fn loss_before_lock_returns_needs_an_excuse_too() {
        let lost = |nodes: usize, said: &'static str, more: &str| {
            violations_after("1999 1@1 7 wait", nodes, |_| said, more)
        };
        assert_eq!(lost(1, "500:a", ""), 1);
        assert_eq!(lost(1, "-", ""), 1);
        assert_eq!(lost(3, "- - -", ""), 1);
        assert_eq!(lost(1, "500:a", &fault(1, "freeze", 3000, 4001)), 0);
        assert_eq!(
            lost(3, "500:a 500:a 500:a", &fault(2, "freeze", 4500, 4600)),
            0,
            "the node may have been needed"
        );
        assert_eq!(lost(1, "500:a", "4500 0 7 stopped\n4600 0 7 continued"), 0);
        let shutdown =
            |pid: u32, at: u64| format!("{at} 3 {pid} call shutdown 9\n{at} 3 {pid} back 0");
        assert_eq!(lost(1, "500:a", &shutdown(7, 4990)), 0);
        assert_eq!(lost(1, "500:a", &shutdown(7, 1998)), 1, "an earlier manager was shut down");
        assert_eq!(lost(1, "500:a", &shutdown(8, 4990)), 1, "another process was shut down");
        assert_eq!(one(&shutdown(7, 4990)), 1, "the shutdown waits for a holder");
    }

    #[test]
    fn loss_without_a_reported_reason_is_found() {
        let lost = "10 1@1 7 wait\n20 1@1 7 lost not reported";
        assert_eq!(find(&story(lost)).findings.len(), 1);
        assert_eq!(find(&story(&lost.replace("not reported", "gone"))).findings.len(), 0);
    }
}
