//! The checks of sentinels and of the replicas that they name: pure functions from facts to
//! findings.

use std::{collections::BTreeMap, time::Duration};

use distlock::SentinelView;

use super::{
    facts::{AskedSentinel, Contact, NodeFacts, Requirements},
    finding::{Finding, Level},
    node_checks::{check_eviction, check_reach, check_version},
    replica_checks::no_cut_off,
};
use crate::format;

/// Time of a failover, beyond the time after which the master counts as down: the vote, the
/// promotion, and the question of our manager. Measured: 1.2 to 2.3 s.
const FAILOVER_TIME: Duration = Duration::from_secs(2);
/// Smallest down-after-milliseconds that is advised; otherwise a short stall causes a failover.
const DOWN_AFTER_MIN: Duration = Duration::from_secs(1);

/// Runs all checks of the sentinels.
pub(super) fn check_sentinels(asked: &[AskedSentinel], ttl: Duration) -> Vec<Finding> {
    let views: Vec<_> = asked.iter().filter_map(|asked| asked.view.as_ref().ok()).collect();
    let together = [
        Some(check_votes(asked, &views)),
        check_master(asked, &views),
        check_failover(&views, ttl),
        check_promotion(&views),
    ];
    asked.iter().map(check_sentinel).chain(together.into_iter().flatten()).collect()
}

/// Runs all checks of a replica. Once it is the master, its settings count.
pub(super) fn check_replica(node: &NodeFacts, requirements: &Requirements) -> Vec<Finding> {
    let reach = check_reach(node, requirements).map(|finding| match node.contact {
        Contact::Reachable => finding,
        // Locks work as long as it is not the master.
        _ => Finding { level: Level::Warning, ..finding }.advice(
            "see that this machine reaches the address that the replica announces \
             (replica-announce-ip), and that the user exists there",
        ),
    });
    let cut_off = node.info().is_some_and(|info| info.get("min_slaves_good_slaves").is_none());
    let more = [
        check_version(node, requirements),
        check_eviction(node, requirements),
        cut_off.then(|| no_cut_off("once it is the master, it would go on granting locks while")),
    ];
    let findings = reach.into_iter().chain(more.into_iter().flatten());
    findings.map(|finding| finding.at(&node.server)).collect()
}

fn check_sentinel(AskedSentinel { sentinel, is_in_url, view }: &AskedSentinel) -> Finding {
    let finding = match view {
        Err(why) => Finding::warning("sentinel", format!("no answer: {}", format::escape(why)))
            .advice(if *is_in_url {
                "start it, or fix its address, the network or the login for sentinels"
            } else {
                "see that this machine reaches the address that the sentinel announces \
                 (sentinel announce-ip)"
            }),
        Ok(_) if !is_in_url => Finding::warning(
            "sentinel",
            "another sentinel names it, but the URL does not; it is not asked for the master",
        )
        .advice("add it to the URL"),
        Ok(view) => Finding::ok("sentinel", format!("names {}", shown(view))),
    };
    finding.at(sentinel)
}

fn shown(view: &SentinelView) -> String {
    let SentinelView { master, config_epoch, .. } = view;
    format!("{} as the master (configuration epoch {config_epoch})", format::escape(master))
}

/// Reports how many sentinels may fail before no failover is possible.
fn check_votes(asked: &[AskedSentinel], views: &[&SentinelView]) -> Finding {
    const CHECK: &str = "sentinels";
    let start = "start the sentinels that are unreachable, and see that they reach each other";
    let known = views.iter().map(|view| view.other_sentinels.saturating_add(1)).max();
    // A sentinel that is unreachable may have another name in the URL.
    let known = known.unwrap_or(asked.len() as u64);
    let answer = known.min(views.len() as u64);
    if views.is_empty() {
        return Finding::problem(CHECK, format!("none of {known} answers, so no master is known"))
            .advice(start);
    }
    let quorum = views.iter().map(|view| view.quorum).max().unwrap_or_default();
    if views.iter().any(|view| view.quorum != quorum) {
        let says = format!("their quorums differ; the largest is {quorum}");
        return Finding::warning(CHECK, says).advice("set the same quorum at all sentinels");
    }
    let needed = quorum.max(known / 2 + 1);
    let says =
        format!("{answer} of {known} sentinels answer, and a failover needs {needed} of them");
    if let Some(why) = views.iter().find_map(|view| view.quorum_failure.as_ref()) {
        let says = format!("{says}; no failover is possible: {}", format::escape(why));
        return Finding::warning(CHECK, says).advice(start);
    }
    match answer.checked_sub(needed) {
        None => Finding::warning(CHECK, format!("{says}; the others are not reached from here"))
            .advice("see that this machine reaches all sentinels"),
        Some(0) => {
            Finding::warning(CHECK, format!("{says}: none may fail")).advice(if answer < known {
                start
            } else {
                "use three sentinels, and a quorum of two"
            })
        }
        Some(more) if answer < known => {
            Finding::warning(CHECK, format!("{says}: {more} more may fail")).advice(start)
        }
        Some(more) => Finding::ok(CHECK, format!("{says}: {more} may fail")),
    }
}

/// Reports whether all sentinels name the same master, in the same epoch.
fn check_master(asked: &[AskedSentinel], views: &[&SentinelView]) -> Option<Finding> {
    const CHECK: &str = "master";
    let mut named: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for AskedSentinel { sentinel, view, .. } in asked {
        if let Ok(view) = view {
            named.entry(shown(view)).or_default().push(sentinel);
        }
    }
    let first = views.first()?;
    if named.len() > 1 {
        let each = named.iter().map(|(master, by)| format!("{}: {master}", by.join(", ")));
        let says = format!("the sentinels disagree: {}", each.collect::<Vec<_>>().join("; "));
        return Some(Finding::warning(CHECK, says).advice(
            "run doctor again after the failover; if they still disagree, see that the sentinels \
             reach each other",
        ));
    }
    let down = views.iter().filter(|view| view.flags.contains("_down")).count();
    Some(if down > 0 {
        let count = views.len();
        Finding::warning(CHECK, format!("{down} of {count} sentinels get no reply from it"))
            .advice("see that the sentinels reach the master")
    } else {
        Finding::ok(CHECK, format!("all name {}", shown(first)))
    })
}

/// Reports whether held locks outlast a failover. A lease is renewed every third of the ttl.
fn check_failover(views: &[&SentinelView], ttl: Duration) -> Option<Finding> {
    const CHECK: &str = "failover";
    let slowest = views.iter().max_by_key(|view| view.down_after)?;
    let time = slowest.down_after.saturating_add(FAILOVER_TIME);
    let lasts = ttl * 2 / 3;
    let next = slowest.failover_timeout.saturating_mul(2);
    let says = format!(
        "takes about {}, of which down-after-milliseconds is {}; if it fails, the next one \
         begins after {} (twice failover-timeout)",
        format::duration(time),
        format::duration(slowest.down_after),
        format::duration(next)
    );
    if time <= lasts {
        let says = format!("{says}; locks with a ttl of {} outlast it", format::duration(ttl));
        return Some(Finding::ok(CHECK, says));
    }
    let says = format!(
        "{says}; locks with a ttl of {} are lost, because they last for {} without a renewal",
        format::duration(ttl),
        format::duration(lasts)
    );
    // Whole seconds.
    let longer = Duration::from_secs((time * 3 / 2).as_millis().div_ceil(1_000) as u64);
    let longer = format!("use a ttl of {} or more", format::duration(longer));
    let shorter = lasts.saturating_sub(FAILOVER_TIME);
    let finding = Finding::warning(CHECK, says);
    Some(if shorter < DOWN_AFTER_MIN {
        finding.advice(format!("{longer}, and a down-after-milliseconds of a few seconds"))
    } else {
        let name = &slowest.name;
        let millis = shorter.as_millis();
        finding
            .advice(format!("{longer}, or run this in redis-cli at each sentinel"))
            .command(format!("SENTINEL SET {name} down-after-milliseconds {millis}"))
    })
}

/// Reports whether there is a replica that can become the master.
fn check_promotion(views: &[&SentinelView]) -> Option<Finding> {
    const CHECK: &str = "promotion";
    // The sentinel that knows most; another one may have started a moment ago.
    let replicas = &views.iter().max_by_key(|view| view.replicas.len())?.replicas;
    let known = replicas.len();
    let (mut down, mut fit) = (0, 0);
    for replica in replicas {
        down += usize::from(replica.is_down);
        fit += usize::from(!replica.is_down && replica.can_be_promoted);
    }
    let plural = if known == 1 { "replica" } else { "replicas" };
    let advice = "start a replica, or set its replica-priority to more than 0";
    Some(match (fit, down) {
        (0, 0) => Finding::warning(
            CHECK,
            format!("no failover is possible: none of {known} {plural} may become the master"),
        )
        .advice(advice),
        (0, _) => Finding::warning(
            CHECK,
            format!("no failover is possible: {down} of {known} {plural} are down"),
        )
        .advice(advice),
        (_, 0) => Finding::ok(CHECK, format!("{fit} of {known} {plural} can become the master")),
        _ => Finding::warning(CHECK, format!("{down} of {known} {plural} are down"))
            .advice("start them again, or remove them by SENTINEL RESET at each sentinel in turn"),
    })
}

#[cfg(test)]
mod tests;
