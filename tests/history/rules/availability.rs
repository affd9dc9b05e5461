//! Availability: while there is no fault, a free lock that a thread waits for is acquired within a
//! bounded time, which is what a dead holder can have left of its lease plus the time to notify
//! waiters. The same holds for a free place in a group, if no waiter has to wait for more. And no
//! waiter is overtaken by many later ones.

mod places;

use std::collections::{BTreeSet, HashMap};

use super::{
    Finding, Rule,
    intervals::{Intervals, difference, split_at, union},
    liveness::borrowed_connections,
    span,
};
use crate::history::{
    event::Kind,
    model::{End, FaultPeriod, Hold, Story, Wait},
    sharing::Sharing,
};

/// Time after which the head of the queue polls, even if no grant message came.
const POLL_INTERVAL: u64 = 1_000_000_000;

/// Maximum number of later waiters that may acquire a lock before an undisturbed waiter, unless
/// processes [take turns](turns). A waiter whose queue entry was passed over may need several
/// rounds to be noticed. Usually there is no overtaker at all.
const OVERTAKERS_MAX: usize = 4;

/// The same for a mutex among other kinds, for each thread. One release admits many readers, and
/// each thread of a process may join the queue only when another one has released the lock.
const OVERTAKERS_BY_SEAT_MAX: usize = 4;

/// How many waiters of other processes may acquire a mutex while the other threads of a seat's
/// process have their turns. Each process has one thread in the queue: when a thread has had the
/// lock, the next one of its process joins the queue at its end.
fn turns(story: &Story, lock: u32) -> HashMap<u32, usize> {
    let mut seats_of: HashMap<u32, BTreeSet<u32>> = HashMap::new();
    for wait in story.waits.iter().filter(|wait| wait.lock == lock) {
        seats_of.entry(wait.pid).or_default().insert(wait.seat);
    }
    // A process that was killed is followed by another one with the same seats, of which it may
    // have used only some.
    let mut first_of: HashMap<u32, u32> = HashMap::new();
    let mut threads_of: HashMap<u32, usize> = HashMap::new();
    for seats in seats_of.values() {
        for seat in seats {
            let (first, most) = (seats.iter().min().copied().unwrap_or(*seat), seats.len());
            let known = first_of.entry(*seat).or_insert(first);
            *known = (*known).min(first);
            let threads = threads_of.entry(*seat).or_default();
            *threads = (*threads).max(most);
        }
    }
    let processes: BTreeSet<u32> = first_of.into_values().collect();
    let turns = |threads: usize| (threads - 1) * (processes.len() - 1);
    threads_of.into_iter().map(|(seat, threads)| (seat, turns(threads))).collect()
}

/// The times in which a lock was free although a thread waited for it and there was no fault.
#[derive(Debug, Default)]
pub(crate) struct Gaps {
    pub(crate) count: usize,
    pub(crate) longest: u64,
    /// Number of undisturbed waits during which enough other clients acquired the lock to
    /// break the rule.
    pub(crate) queued_waits: usize,
    /// Maximum number of later waiters that overtook one waiter.
    pub(crate) overtaken: usize,
    pub(crate) findings: Vec<Finding>,
}

pub(crate) fn find(story: &Story) -> Gaps {
    let mut stops: HashMap<u32, Intervals> = HashMap::new();
    for (pid, from, until) in &story.stops {
        stops.entry(*pid).or_default().push((*from, *until));
    }
    let stops: HashMap<u32, Intervals> =
        stops.into_iter().map(|(pid, intervals)| (pid, union(intervals))).collect();
    let borrowed = borrowed_connections(story);
    let locks: BTreeSet<u32> = story.waits.iter().map(|wait| wait.lock).collect();
    let mut gaps = Gaps::default();
    for lock in locks {
        let since = first_requests(story, lock);
        let outages = outages(story, lock);
        let moments =
            if is_cluster(story) { Vec::new() } else { disturbances(story, lock, &since) };
        let frozen: Intervals = story
            .stops
            .iter()
            .filter(|(pid, _, until)| since.get(pid).is_some_and(|first| first <= until))
            .map(|(_, from, until)| (*from, *until))
            .collect();
        let holds = || story.holds.iter().filter(move |hold| hold.lock == lock);
        let all_holds: Vec<&Hold> = holds().collect();
        let mut waited = Vec::new();
        // The release of a mutex removes the queue entries of groups, but not those of mutexes.
        let has_mutexes = all_holds.iter().any(|hold| hold.sharing == Sharing::Mutex);
        let has_others = all_holds.iter().any(|hold| hold.sharing != Sharing::Mutex);
        let turns = turns(story, lock);
        let overtakers_max = |wait: &Wait| match (wait.sharing, has_mutexes, has_others) {
            (Sharing::Mutex, true, true) => OVERTAKERS_BY_SEAT_MAX * story.seats.len(),
            (_, true, true) => usize::MAX,
            (Sharing::Mutex, ..) => OVERTAKERS_MAX + turns.get(&wait.seat).copied().unwrap_or(0),
            _ => OVERTAKERS_MAX,
        };
        for wait in story.waits.iter().filter(|wait| wait.lock == lock) {
            let awake = vec![(wait.from, wait.until)];
            let awake = stops
                .get(&wait.pid)
                .map_or_else(|| awake.clone(), |stops| difference(&awake, stops));
            // Without a connection a thread cannot enter the queue.
            let able = borrowed
                .get(&wait.pid)
                .map_or_else(|| awake.clone(), |borrowed| difference(&awake, borrowed));
            let undisturbed = split_at(&difference(&able, &outages), &moments);
            let token = token_after(wait, &all_holds);
            let passed = undisturbed.into_iter().map(|(from, until)| {
                let last = latest(&moments, from)
                    .max(stops.get(&wait.pid).and_then(|stops| last_end(stops, from)));
                let last = last.max(last_end(&outages, from)).unwrap_or(story.start);
                overtakers(story, (wait, token), &all_holds, last, (from, until))
            });
            let (others, overtaken) =
                passed.fold((0, 0), |most, passed| (most.0.max(passed.0), most.1.max(passed.1)));
            gaps.queued_waits += usize::from(others > OVERTAKERS_MAX);
            gaps.overtaken = gaps.overtaken.max(overtaken);
            if overtaken > overtakers_max(wait) {
                gaps.findings.push(Finding {
                    rule: Rule::Availability,
                    lock,
                    seats: vec![wait.seat],
                    from: wait.from,
                    until: wait.until,
                    text: format!(
                        "from {} on child {} waited for lock {lock}, and {overtaken} later \
                         waiters acquired it first, without any fault",
                        story.clock(wait.from),
                        wait.seat
                    ),
                });
            }
            waited.extend(awake);
        }
        let held = union(holds().map(|hold| (hold.from, hold.until.max(hold.from + 1))).collect());
        let free = difference(&difference(&union(waited), &held), &outages);
        let mut left: Vec<u64> = holds().filter(hands_over).map(|hold| hold.until).collect();
        left.sort_unstable();
        if !(has_mutexes && has_others) {
            let waits: Vec<&Wait> = story.waits.iter().filter(|wait| wait.lock == lock).collect();
            for (wait, from, until) in places::unused(&waits, &all_holds) {
                let awake = vec![(from, until)];
                let awake = stops
                    .get(&wait.pid)
                    .map_or_else(|| awake.clone(), |stops| difference(&awake, stops));
                let unused = split_at(&difference(&awake, &outages), &moments);
                for (from, until) in unused {
                    let allowed = allowed(story, (from, until), &moments, &left, &frozen);
                    if until - from > allowed {
                        gaps.findings.push(Finding {
                            rule: Rule::Availability,
                            lock,
                            seats: vec![wait.seat],
                            from,
                            until,
                            text: format!(
                                "from {} on child {} waited for lock {lock} ({}) for {}, although \
                                 it could have joined the holders, and there was no fault; the \
                                 bound is {}",
                                story.clock(from),
                                wait.seat,
                                wait.sharing,
                                span(until - from),
                                span(allowed)
                            ),
                        });
                    }
                }
            }
        }
        for (from, until) in split_at(&free, &moments) {
            gaps.count += 1;
            gaps.longest = gaps.longest.max(until - from);
            let allowed = allowed(story, (from, until), &moments, &left, &frozen);
            if until - from > allowed {
                gaps.findings.push(Finding {
                    rule: Rule::Availability,
                    lock,
                    seats: Vec::new(),
                    from,
                    until,
                    text: format!(
                        "from {} on lock {lock} was free for {} although a thread waited and \
                         there was no fault; the bound is {}",
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

/// Whether a holder gives the lock to the next waiter when it leaves.
fn hands_over(hold: &&Hold) -> bool {
    hold.end == End::Left && hold.sharing != Sharing::Foreign
}

/// Returns the token with which a wait ended, or the largest one if it ended without the lock.
/// `holds` must be sorted.
fn token_after(wait: &Wait, holds: &[&Hold]) -> u64 {
    let first = holds.partition_point(|hold| hold.from < wait.until);
    let began_then = holds[first..].iter().take_while(|hold| hold.from == wait.until);
    began_then
        .filter(|hold| hold.seat == wait.seat)
        .map(|hold| hold.token)
        .next()
        .unwrap_or(u64::MAX)
}

/// Counts the holds that began during this undisturbed part of a wait, and those among them that
/// were also requested during it. The latter overtook the waiter, unless it has the smaller token:
/// then it was granted the lock first, and only learned of that later. Starts to count when the
/// effects of the `last` disturbance have ended, because by then a waiter has replaced a queue
/// entry that it lost. `holds` must be sorted.
fn overtakers(
    story: &Story,
    (wait, token): (&Wait, u64),
    holds: &[&Hold],
    last: u64,
    (from, until): (u64, u64),
) -> (usize, usize) {
    let terms = &story.terms;
    let late = story.lateness(wait.pid, last, until) + story.lateness(story.parent, last, until);
    let recovered_at = last + terms.ttl + 2 * terms.operation_timeout + POLL_INTERVAL;
    let settled = from.max(recovered_at) + 2 * late;
    let first = holds.partition_point(|hold| hold.from < settled);
    let others = || holds[first..].iter().take_while(|hold| hold.from < until);
    (
        others().count(),
        others()
            .filter(|hold| hold.asked > settled && hold.token < token)
            .filter(|hold| hold.sharing != Sharing::Foreign)
            .count(),
    )
}

/// Returns the latest of the sorted `moments` that is not after `at`.
fn latest(moments: &[u64], at: u64) -> Option<u64> {
    moments[..moments.partition_point(|moment| *moment <= at)].last().copied()
}

/// Returns the latest end of an interval that is not after `at`.
fn last_end(intervals: &Intervals, at: u64) -> Option<u64> {
    intervals[..intervals.partition_point(|(_, end)| *end <= at)].last().map(|(_, end)| *end)
}

/// Returns how long a lock may stay free in this interval.
fn allowed(
    story: &Story,
    (from, until): (u64, u64),
    moments: &[u64],
    left: &[u64],
    frozen: &Intervals,
) -> u64 {
    let terms = &story.terms;
    if is_cluster(story) {
        return terms.claim_window + 2 * lateness(story, from, until);
    }
    let lease = terms.ttl + 2 * terms.operation_timeout;
    // If the lock was released long after the last disturbance, it is handed over.
    let last_disturbance =
        moments.partition_point(|moment| *moment <= from).checked_sub(1).map(|last| moments[last]);
    let handed_over = left.binary_search(&from).is_ok()
        && last_disturbance.is_none_or(|last| last + lease + POLL_INTERVAL < from);
    let lease = if handed_over { 2 * terms.operation_timeout } else { lease };
    // A stopped process in the queue costs one claim window for each of its threads.
    let frozen = frozen.iter().filter(|(begin, end)| *begin < until && *end > from).count() as u64;
    let late = lateness(story, from, until);
    lease + POLL_INTERVAL + 4 * frozen * terms.claim_window + 2 * late
}

/// Whether slots moved or masters changed. In such a storm the workers have no faults, so no lease
/// and no queue entry is left behind. What a failover can cost beyond itself is one grant that did
/// not reach its waiter.
fn is_cluster(story: &Story) -> bool {
    let is_of_cluster = |kind| matches!(kind, Kind::Move | Kind::Failover | Kind::Promote);
    story.faults.iter().any(|period| is_of_cluster(period.fault.kind))
}

/// How long the parent and one of the waiting processes waited for a processor.
fn lateness(story: &Story, from: u64, until: u64) -> u64 {
    let pids: BTreeSet<u32> = story
        .waits
        .iter()
        .filter(|wait| wait.from < until && wait.until > from)
        .map(|wait| wait.pid)
        .collect();
    let late = |pid: u32| story.lateness(pid, from, until);
    late(story.parent) + pids.into_iter().map(late).max().unwrap_or(0)
}

/// Returns the times in which the lock need not be available: with one server, while there is any
/// fault; with several, while more than a minority of them has one. Faults of other locks do not
/// count.
fn outages(story: &Story, lock: u32) -> Intervals {
    let nodes = story.terms.nodes;
    let minority = nodes.saturating_sub(1) / 2;
    let mut edges: Vec<(u64, bool, usize)> = Vec::new();
    let mut outages = Vec::new();
    for period in story.faults.iter().filter(|period| affects(period, lock)) {
        if period.fault.kind == Kind::Move {
            // Locks wait for the end of a move, which takes milliseconds.
            continue;
        }
        // A restarted node does not vote during its quarantine.
        let restarted = matches!(period.fault.kind, Kind::Forget | Kind::Restart);
        let quarantine = if nodes > 1 && restarted { story.terms.ttl } else { 0 };
        let until = period.until.saturating_add(quarantine);
        if minority == 0 || period.fault.node == 0 {
            outages.push((period.from, until));
        } else {
            edges.push((period.from, true, period.fault.node));
            edges.push((until, false, period.fault.node));
        }
    }
    edges.sort_unstable();
    let (mut open, mut since) = (HashMap::<usize, u32>::new(), None);
    for (at, begins, node) in edges {
        let count = open.entry(node).or_default();
        *count = if begins { *count + 1 } else { count.saturating_sub(1) };
        let faulty = open.values().filter(|count| **count > 0).count();
        match (faulty > minority, since) {
            (true, None) => since = Some(at),
            (false, Some(begin)) => {
                outages.push((begin, at));
                since = None;
            }
            _ => {}
        }
    }
    outages.extend(since.map(|begin| (begin, u64::MAX)));
    union(outages)
}

fn affects(period: &FaultPeriod, lock: u32) -> bool {
    period.lock == 0 || period.lock == lock
}

/// Returns when each process first requested the lock.
fn first_requests(story: &Story, lock: u32) -> HashMap<u32, u64> {
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

/// Returns the times of events after which a server may keep the lock for a lease that no thread
/// has any more.
fn disturbances(story: &Story, lock: u32, since: &HashMap<u32, u64>) -> Vec<u64> {
    let mut moments: Vec<u64> = Vec::new();
    // An unknown script is sent again at once, which costs no lease and no queue entry.
    for period in story
        .faults
        .iter()
        .filter(|period| affects(period, lock) && period.fault.kind != Kind::FlushScripts)
    {
        moments.extend([period.from, period.until]);
    }
    // Only a process that has requested the lock can leave a lease of it.
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
mod tests;
