//! Bounded waits and recovery from crashes: nobody waits for a lock that nobody believes in for
//! longer than what a dead holder can have left of its lease, and the time it takes to be told,
//! once nothing more is done to servers and processes. Nor do very many who came later get it
//! before.

use std::collections::{BTreeSet, HashMap};

use super::{
    Finding, Rule,
    silence::lent,
    span,
    spans::{Spans, cut, union, without},
};
use crate::history::{
    event::Kind,
    story::{Done, End, Hold, Story, Wait},
};

/// How soon the head of a line looks by itself, and everything around it.
const LOOK: u64 = 1_000_000_000;

/// So many who came later may get a lock before somebody who is in line, and to whom nothing
/// happens: one whose place was passed over may need several rounds to be seen to be there. In
/// peace and in good order it is none.
const OVERTAKERS: usize = 4;

/// The times in which a lock was free and wanted, and nothing was done to anybody.
#[derive(Debug, Default)]
pub(crate) struct Gaps {
    pub(crate) count: usize,
    pub(crate) longest: u64,
    /// How many waits saw so many others get the lock, long after anything had happened, that they
    /// could break the rule.
    pub(crate) lined: usize,
    /// By how many who came later somebody was overtaken in peace.
    pub(crate) overtaken: usize,
    pub(crate) findings: Vec<Finding>,
}

pub(crate) fn find(story: &Story) -> Gaps {
    let mut stops: HashMap<u32, Spans> = HashMap::new();
    for (pid, from, until) in &story.stops {
        stops.entry(*pid).or_default().push((*from, *until));
    }
    let stops: HashMap<u32, Spans> =
        stops.into_iter().map(|(pid, spans)| (pid, union(spans))).collect();
    let lent = lent(story);
    let locks: BTreeSet<u32> = story.waits.iter().map(|wait| wait.lock).collect();
    let mut gaps = Gaps::default();
    for lock in locks {
        let since = askers(story, lock);
        let (unrest, moments) = (unrest(story, lock), moments(story, lock, &since));
        let frozen: Spans = story
            .stops
            .iter()
            .filter(|(pid, _, until)| since.get(pid).is_some_and(|first| first <= until))
            .map(|(_, from, until)| (*from, *until))
            .collect();
        let holds = || story.holds.iter().filter(move |hold| hold.lock == lock);
        let got: Vec<&Hold> = holds().collect();
        let mut waited = Vec::new();
        for wait in story.waits.iter().filter(|wait| wait.lock == lock) {
            let awake = vec![(wait.from, wait.until)];
            let awake =
                stops.get(&wait.pid).map_or_else(|| awake.clone(), |stops| without(&awake, stops));
            // Without a connection nobody can line up.
            let able =
                lent.get(&wait.pid).map_or_else(|| awake.clone(), |lent| without(&awake, lent));
            let peace = cut(&without(&able, &unrest), &moments);
            let passed = peace.into_iter().map(|(from, until)| {
                let last = latest(&moments, from)
                    .max(stops.get(&wait.pid).and_then(|stops| last_end(stops, from)));
                let last = last.max(last_end(&unrest, from)).unwrap_or(story.start);
                overtakers(story, wait, &got, last, (from, until))
            });
            let (others, overtaken) =
                passed.fold((0, 0), |most, passed| (most.0.max(passed.0), most.1.max(passed.1)));
            gaps.lined += usize::from(others > OVERTAKERS);
            gaps.overtaken = gaps.overtaken.max(overtaken);
            if overtaken > OVERTAKERS {
                gaps.findings.push(Finding {
                    rule: Rule::Peace,
                    lock,
                    seats: vec![wait.seat],
                    from: wait.from,
                    until: wait.until,
                    text: format!(
                        "from {} on child {} waited for lock {lock}, and {overtaken} who came later got it before, in peace",
                        story.clock(wait.from),
                        wait.seat
                    ),
                });
            }
            waited.extend(awake);
        }
        let held = union(holds().map(|hold| (hold.from, hold.until.max(hold.from + 1))).collect());
        let free = without(&without(&union(waited), &held), &unrest);
        let mut left: Vec<u64> =
            holds().filter(|hold| hold.end == End::Left).map(|hold| hold.until).collect();
        left.sort_unstable();
        for (from, until) in cut(&free, &moments) {
            gaps.count += 1;
            gaps.longest = gaps.longest.max(until - from);
            let allowed = allowed(story, (from, until), &moments, &left, &frozen);
            if until - from > allowed {
                gaps.findings.push(Finding {
                    rule: Rule::Peace,
                    lock,
                    seats: Vec::new(),
                    from,
                    until,
                    text: format!(
                        "from {} on lock {lock} was free, wanted and not given for {}, in peace; {} are the bound",
                        story.clock(from),
                        span(until - from),
                        span(allowed)
                    ),
                });
            }
        }
    }
    gaps
}

/// How many got the lock within these moments while somebody waited for it, once what happened
/// `last` before is over, and how many of them had asked later: a place in line that was lost with
/// a connection, say, is taken again by then. `got` is in order.
fn overtakers(
    story: &Story,
    wait: &Wait,
    got: &[&Hold],
    last: u64,
    (from, until): (u64, u64),
) -> (usize, usize) {
    let terms = &story.terms;
    let late = story.lateness(wait.pid, last, until) + story.lateness(story.parent, last, until);
    let settled = from.max(last + terms.ttl + 2 * terms.operation_timeout + LOOK) + 2 * late;
    let first = got.partition_point(|hold| hold.from < settled);
    let others = || got[first..].iter().take_while(|hold| hold.from < until);
    (others().count(), others().filter(|hold| hold.asked > settled).count())
}

/// The latest of these moments, which are in order, that is no later than this one.
fn latest(moments: &[u64], at: u64) -> Option<u64> {
    moments[..moments.partition_point(|moment| *moment <= at)].last().copied()
}

/// The same of the ends of spans.
fn last_end(spans: &Spans, at: u64) -> Option<u64> {
    spans[..spans.partition_point(|(_, end)| *end <= at)].last().map(|(_, end)| *end)
}

/// How long a lock may stay free within these moments.
fn allowed(
    story: &Story,
    (from, until): (u64, u64),
    moments: &[u64],
    left: &[u64],
    frozen: &Spans,
) -> u64 {
    let terms = &story.terms;
    let lease = terms.ttl + 2 * terms.operation_timeout;
    // What was left in order, long after anything happened, is handed over.
    let quiet =
        moments.partition_point(|moment| *moment <= from).checked_sub(1).map(|last| moments[last]);
    let handed_over =
        left.binary_search(&from).is_ok() && quiet.is_none_or(|last| last + lease + LOOK < from);
    let lease = if handed_over { 2 * terms.operation_timeout } else { lease };
    // Somebody who was stopped in line costs a claim window for each of its threads.
    let frozen = frozen.iter().filter(|(begin, end)| *begin < until && *end > from).count() as u64;
    let pids: BTreeSet<u32> = story
        .waits
        .iter()
        .filter(|wait| wait.from < until && wait.until > from)
        .map(|wait| wait.pid)
        .collect();
    let late = |pid: u32| story.lateness(pid, from, until);
    let late = late(story.parent) + pids.into_iter().map(late).max().unwrap_or(0);
    lease + LOOK + 4 * frozen * terms.claim_window + 2 * late
}

/// When so much is wrong that nobody need get the lock: with one server, anything; with several,
/// more than a minority. What is done to another lock is no matter of this one.
fn unrest(story: &Story, lock: u32) -> Spans {
    let nodes = story.terms.nodes;
    let minority = nodes.saturating_sub(1) / 2;
    let mut edges: Vec<(u64, bool, usize)> = Vec::new();
    let mut spans = Vec::new();
    for done in story.done.iter().filter(|done| concerns(done, lock)) {
        // A node that forgot does not vote for a while.
        let quarantine =
            if nodes > 1 && done.fault.kind == Kind::Forget { story.terms.ttl } else { 0 };
        let until = done.until.saturating_add(quarantine);
        if minority == 0 || done.fault.node == 0 {
            spans.push((done.from, until));
        } else {
            edges.push((done.from, true, done.fault.node));
            edges.push((until, false, done.fault.node));
        }
    }
    edges.sort_unstable();
    let (mut open, mut since) = (HashMap::<usize, u32>::new(), None);
    for (at, begins, node) in edges {
        let count = open.entry(node).or_default();
        *count = if begins { *count + 1 } else { count.saturating_sub(1) };
        let wrong = open.values().filter(|count| **count > 0).count();
        match (wrong > minority, since) {
            (true, None) => since = Some(at),
            (false, Some(begin)) => {
                spans.push((begin, at));
                since = None;
            }
            _ => {}
        }
    }
    spans.extend(since.map(|begin| (begin, u64::MAX)));
    union(spans)
}

fn concerns(done: &Done, lock: u32) -> bool {
    done.lock == 0 || done.lock == lock
}

/// Since when each process has wanted the lock.
fn askers(story: &Story, lock: u32) -> HashMap<u32, u64> {
    let asked =
        story.waits.iter().filter(|wait| wait.lock == lock).map(|wait| (wait.pid, wait.from));
    let held =
        story.holds.iter().filter(|hold| hold.lock == lock).map(|hold| (hold.pid, hold.asked));
    let mut since: HashMap<u32, u64> = HashMap::new();
    for (pid, at) in asked.chain(held) {
        since.entry(pid).and_modify(|first| *first = at.min(*first)).or_insert(at);
    }
    since
}

/// When something happened after which a lease of the lock may be left over that nobody believes
/// in.
fn moments(story: &Story, lock: u32, since: &HashMap<u32, u64>) -> Vec<u64> {
    let mut moments: Vec<u64> = Vec::new();
    // A script that a server does not know is sent again; no lease and no place in line is lost by
    // that.
    for done in story
        .done
        .iter()
        .filter(|done| concerns(done, lock) && done.fault.kind != Kind::FlushScripts)
    {
        moments.extend([done.from, done.until]);
    }
    // Only who has asked for it can leave anything of it.
    let wanted = |pid: u32, by: u64| since.get(&pid).is_some_and(|first| *first <= by);
    moments.extend(story.kills.iter().filter(|(pid, at)| wanted(*pid, *at)).map(|(_, at)| *at));
    let stops = story.stops.iter().filter(|(pid, _, until)| wanted(*pid, *until));
    moments.extend(stops.flat_map(|(_, from, until)| [*from, *until]));
    let failed = |wait: &&Wait| {
        wait.lock == lock && wait.why.as_ref().is_some_and(|why| !why.starts_with("contended"))
    };
    moments.extend(story.waits.iter().filter(failed).map(|wait| wait.until));
    moments.sort_unstable();
    moments
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::rules::tests::story;

    /// A lease of 3 s, a time limit of half a second: 5 s after a crash, and 2 s after a release.
    fn wrong(nodes: usize, text: &str) -> usize {
        let text = text
            .lines()
            .map(|line| line.replacen(' ', "000000 ", 1))
            .collect::<Vec<_>>()
            .join("\n");
        let terms =
            "0 0 1 terms NODES 3000000000 500000000 200000000".replace("NODES", &nodes.to_string());
        find(&story(&format!("{terms}\n{text}"))).findings.len()
    }

    fn crash(followed: u64) -> String {
        format!(
            "10 1@1 7 enter 2000000000 5 a\n20 2@1 8 wait\n1000 0 7 killed\n{followed} 2@1 8 enter 9000000000 6 b"
        )
    }

    #[test]
    fn a_dead_holder_is_followed_after_its_lease() {
        assert_eq!(wrong(1, &crash(6000)), 0);
        assert_eq!(wrong(1, &crash(6001)), 1);
    }

    #[test]
    fn what_is_released_is_handed_over_sooner() {
        let left = |at: u64| crash(at).replace("1000 0 7 killed", "1000 1@1 7 leave");
        assert_eq!(wrong(1, &left(3000)), 0);
        assert_eq!(wrong(1, &left(3001)), 1);
        let killed =
            |lock: u32| wrong(1, &format!("{}\n4 3@{lock} 9 wait\n5 0 9 killed", left(3001)));
        assert_eq!(killed(1), 0, "something had happened just before");
        assert_eq!(killed(2), 1, "to somebody who wanted another lock");
    }

    #[test]
    fn nobody_has_to_follow_whom_nobody_waits_for() {
        assert_eq!(wrong(1, &crash(9000).replace("20 2@1", "4000 2@1")), 0);
        assert_eq!(wrong(1, &crash(9001).replace("20 2@1", "4000 2@1")), 1);
        assert_eq!(wrong(1, &format!("{}\n3000 0 8 stopped\n8000 0 8 continued", crash(9000))), 0);
    }

    #[test]
    fn a_wait_that_is_given_up_and_begun_again_is_a_wait() {
        let again = |why: &str| {
            let text = format!("3000 2@1 8 again {why}\n3000 2@1 8 wait\n6100 2");
            wrong(1, &crash(6100).replace("6100 2", &text))
        };
        assert_eq!(again("contended: by a"), 1);
        assert_eq!(
            again("unavailable: no answer"),
            0,
            "what that call left may take another lease"
        );
    }

    #[test]
    fn while_the_server_is_away_nobody_can_follow() {
        let away = |node: u32| {
            format!("{}\n2000 0 1 fault 1 {node} freeze 0\n8000 0 1 over 1", crash(12900))
        };
        assert_eq!(wrong(1, &away(1)), 0);
        assert_eq!(wrong(5, &away(1)), 1, "one of several is enough");
        assert_eq!(wrong(5, &away(0)), 0, "but not all of them");
        assert_eq!(
            wrong(1, &away(1).replace("12900", "13001")),
            1,
            "then it counts from its return"
        );
    }

    #[test]
    fn what_happens_to_another_lock_begins_no_new_lease_of_this_one() {
        let often = |what: &str| {
            let times = (0..20).map(|n| 2000 + 2900 * n);
            times.map(|at| format!("\n{}", what.replace("AT", &at.to_string()))).collect::<String>()
        };
        assert_eq!(wrong(1, &crash(60_000)), 1);
        let line = "AT 0@2 1 fault AT 1 delete 0\nAT 0 1 over AT";
        assert_ne!(wrong(1, &(crash(60_000) + &often(line))), 0, "a key of another lock");
        let line = "AT 3@2 9 wait\nAT 3@2 9 again unavailable: x";
        assert_ne!(wrong(1, &(crash(60_000) + &often(line))), 0, "a call for another lock");
        let line = "AT 0 1 fault AT 1 flush-scripts 0\nAT 0 1 over AT";
        assert_ne!(wrong(1, &(crash(60_000) + &often(line))), 0, "scripts, which are sent again");
    }

    #[test]
    fn who_was_stopped_and_wanted_another_lock_costs_this_one_no_time() {
        let stopped = |wanted: u32| {
            let asked = format!("1 3@{wanted} 9 wait\n2 3@{wanted} 9 again contended: by a");
            wrong(1, &format!("{asked}\n{}\n1500 0 9 stopped\n9000 0 9 continued", crash(6700)))
        };
        assert_eq!(stopped(1), 0);
        assert_eq!(stopped(2), 1);
    }

    #[test]
    fn who_waits_is_not_overtaken_by_very_many() {
        // What came before the first has settled after 5 s.
        let line = |later: u64, more: &str| {
            let turn = |n: u64| {
                let at = 6000 + 100 * n;
                format!(
                    "{at} 1@1 7 wait\n{} 1@1 7 enter 90000000000 {n} a\n{} 1@1 7 leave\n",
                    at + 1,
                    at + 99
                )
            };
            let turns: String = (0..later).map(turn).collect();
            wrong(
                1,
                &format!(
                    "1 2@1 8 wait\n2 3@1 9 enter 5999000000 1 x\n5999 3@1 9 leave\n{turns}{more}"
                ),
            )
        };
        assert_eq!(line(4, ""), 0);
        assert_eq!(line(5, ""), 1);
        assert_eq!(
            line(60, "6001 0 8 stopped\n6002 0 8 continued"),
            1,
            "it was stopped in line, long ago"
        );
        assert_eq!(line(50, "6001 0 8 stopped\n6002 0 8 continued"), 0, "it was stopped in line");
        assert_eq!(
            line(50, "6001 0 1 fault 1 1 cut-clients 0\n6002 0 1 over 1"),
            0,
            "its connection was cut"
        );
        assert_eq!(
            line(50, "6001 0@2 1 fault 1 1 delete 0\n6002 0 1 over 1"),
            1,
            "another lock's key"
        );
        assert_eq!(line(5, "6700 2@1 8 enter 90000000000 99 b"), 1, "even if it gets it at last");
    }

    #[test]
    fn who_begins_to_wait_long_after_anything_happened_is_in_line_at_once() {
        let line = |later: u64, more: &str| {
            let turn = |n: u64| {
                let at = 20_000 + 100 * n;
                format!(
                    "{at} 1@1 7 wait\n{} 1@1 7 enter 90000000000 {n} a\n{} 1@1 7 leave\n",
                    at + 1,
                    at + 99
                )
            };
            let turns: String = (0..later).map(turn).collect();
            wrong(
                1,
                &format!(
                    "19998 2@1 8 wait\n19997 3@1 9 enter 90000000000 1 x\n19999 3@1 9 leave\n{turns}{more}"
                ),
            )
        };
        assert_eq!(line(4, ""), 0);
        assert_eq!(line(5, ""), 1);
        assert_eq!(line(6, "14000 0 1 fault 1 1 mute 0\n14998 0 1 over 1"), 1, "that was long ago");
        assert_eq!(
            line(6, "14000 0 1 fault 1 1 mute 0\n15598 0 1 over 1"),
            0,
            "no five have come since that is over"
        );
        assert_eq!(line(6, "15500 0 8 stopped\n15598 0 8 continued"), 0, "it was stopped itself");
        assert_eq!(line(6, "19000 4 8 call connection 9\n19001 4 8 back 0"), 1);
        assert_eq!(
            line(6, "19600 4 8 call connection 9\n19601 4 8 back 0"),
            0,
            "it had no connection to line up"
        );
        assert_eq!(
            line(6, "19600 4 7 call connection 9\n19601 4 7 back 0"),
            1,
            "that was another process"
        );
        assert_eq!(line(6, "20300 0 8 late 300000000"), 0, "it did not run");
    }

    #[test]
    fn more_than_a_minority_is_no_quorum() {
        let away = |nodes: &[u32]| {
            let lines = nodes.iter().map(|node| {
                format!("\n2000 0 1 fault {node} {node} freeze 0\n8000 0 1 over {node}")
            });
            wrong(5, &(crash(12900) + &lines.collect::<String>()))
        };
        assert_eq!(away(&[1, 2]), 1);
        assert_eq!(away(&[1, 2, 4]), 0);
    }
}
