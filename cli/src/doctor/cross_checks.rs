//! The checks of all servers together.

use std::{collections::HashMap, time::Duration};

use super::{
    facts::{Contact, Facts, Handover, NodeFacts},
    finding::Finding,
    node_checks::{CLOCK_DIFFERENCE_MAX_US, UNUSED_NODES_ADVICE, format_us},
};
use crate::format;

pub(super) fn check_together(facts: &Facts) -> Vec<Finding> {
    let findings = [
        check_nodes(facts),
        check_duplicates(facts),
        check_hosts(facts),
        check_clocks(facts),
        check_handover(facts),
    ];
    findings.into_iter().flatten().collect()
}

/// Reports how many nodes may fail, how many already have, and how many do not vote yet.
fn check_nodes(facts: &Facts) -> Option<Finding> {
    let nodes = facts.nodes.len();
    if nodes == 1 {
        return None;
    }
    let away = facts.nodes.iter().filter(|node| node.contact != Contact::Reachable).count();
    let may_fail = (nodes - 1) / 2;
    let are_away = format!(
        "{away} of {nodes} nodes {}",
        if away == 1 { "is unreachable" } else { "are unreachable" }
    );
    if away <= may_fail
        && let Some(finding) = check_votes(facts, nodes - may_fail)
    {
        let message = match away {
            0 => finding.message,
            _ => format!("{are_away}; {}", finding.message),
        };
        return Some(Finding { message, ..finding });
    }
    if away > 0 {
        return Some(match may_fail.checked_sub(away) {
            None => Finding::problem(
                "nodes",
                format!("{are_away}, so no lock can be acquired: {} are needed", nodes - may_fail),
            )
            .advice("bring them back"),
            Some(0) => {
                Finding::warning("nodes", format!("{are_away}: none of the others may fail"))
                    .advice("bring them back")
            }
            Some(more) => Finding::warning("nodes", format!("{are_away}: {more} more may fail"))
                .advice("bring them back"),
        });
    }
    Some(if nodes.is_multiple_of(2) {
        Finding::warning(
            "nodes",
            format!(
                "{nodes} nodes survive the loss of {may_fail}, the same as {}; the additional \
                 node is only one more that can fail",
                nodes - 1
            ),
        )
        .advice("use an odd number")
    } else {
        Finding::ok(
            "nodes",
            format!("{nodes} nodes, all reachable, survive the loss of {may_fail}"),
        )
    })
}

/// Reports nodes in quarantine. A lock needs the votes of `quorum` nodes.
fn check_votes(facts: &Facts, quorum: usize) -> Option<Finding> {
    let quarantine = facts.requirements.quarantine;
    let reachable = facts.nodes.iter().filter(|node| node.contact == Contact::Reachable);
    let mut left: Vec<Duration> =
        reachable.clone().filter_map(|node| node.quarantine_left(quarantine)).collect();
    left.sort_unstable();
    let last = *left.last()?;
    let voting = reachable.clone().count() - left.len();
    let vote = if voting == 1 { "votes" } else { "vote" };
    let says = format!("{voting} of {} nodes {vote}", facts.nodes.len());
    // Each new client waits for these, until they restart as masters.
    let promoted: Vec<&str> =
        reachable.filter(|node| node.is_promoted()).map(|node| &*node.server).collect();
    let restart = match promoted.is_empty() {
        true => UNUSED_NODES_ADVICE.to_owned(),
        false => format!("restart {}, which followed another server before", promoted.join(", ")),
    };
    Some(match quorum.checked_sub(voting).and_then(|missing| missing.checked_sub(1)) {
        Some(last_missing) => {
            let until = format::duration(left.get(last_missing).copied().unwrap_or(last));
            Finding::problem("nodes", format!("{says}; a quorum votes again in {until}"))
                .advice(format!("wait for that; {restart}"))
        }
        None => {
            let others = match left.len() {
                1 => "1 is in quarantine, and votes".to_owned(),
                more => format!("{more} are in quarantine, and the last of them votes"),
            };
            let until = format::duration(last);
            Finding::warning("nodes", format!("{says}; {others} again in {until}")).advice(format!(
                "keep at least {quorum} of the nodes that vote running until then; {restart}"
            ))
        }
    })
}

/// A server that is listed twice would vote twice.
fn check_duplicates(facts: &Facts) -> Option<Finding> {
    let mut servers: HashMap<&str, Vec<&str>> = HashMap::new();
    for node in &facts.nodes {
        if let Some(run) = node.info().and_then(|info| info.get("run_id")) {
            servers.entry(run).or_default().push(&node.server);
        }
    }
    let mut twins: Vec<Vec<&str>> = servers.into_values().filter(|names| names.len() > 1).collect();
    twins.sort_unstable();
    let names = twins.iter().map(|names| names.join(" and ")).collect::<Vec<_>>().join("; ");
    (!twins.is_empty()).then(|| {
        Finding::problem(
            "duplicates",
            format!("{names} are the same server, which would vote twice"),
        )
        .advice("list each server once, with one of its databases")
    })
}

fn check_hosts(facts: &Facts) -> Option<Finding> {
    let mut shared: HashMap<&str, usize> = HashMap::new();
    facts.nodes.iter().for_each(|node| *shared.entry(host_of(node)).or_default() += 1);
    let mut shared: Vec<&str> =
        shared.into_iter().filter(|(_, count)| *count > 1).map(|(host, _)| host).collect();
    shared.sort_unstable();
    (!shared.is_empty()).then(|| {
        Finding::warning(
            "hosts",
            format!(
                "several nodes are on the same machine ({}), and would fail with it",
                shared.join(", ")
            ),
        )
        .advice("put each node on its own machine")
    })
}

/// All Unix sockets are on this machine.
fn host_of(node: &NodeFacts) -> &str {
    match node.server.rsplit_once(':') {
        _ if node.server.starts_with('/') => "this one",
        Some((host, _)) => host,
        None => &node.server,
    }
}

fn check_clocks(facts: &Facts) -> Option<Finding> {
    let clocks: Vec<_> =
        facts.nodes.iter().filter_map(|node| Some((node.clock_offset?, node))).collect();
    let (first, _) = clocks.iter().min_by_key(|(clock, _)| clock.ahead_us)?;
    let (last, ahead) = clocks.iter().max_by_key(|(clock, _)| clock.ahead_us)?;
    if clocks.len() < 2 {
        return None;
    }
    let apart = last.ahead_us.saturating_sub(first.ahead_us);
    let says = format!("the nodes' clocks differ by {}", format_us(apart));
    Some(
        if apart.saturating_sub(first.error_us.saturating_add(last.error_us))
            <= CLOCK_DIFFERENCE_MAX_US
        {
            Finding::ok("clocks", says)
        } else {
            Finding::warning(
                "clocks",
                format!(
                    "{says}; {} is furthest ahead: after a restart of all nodes, tokens may go \
                     back",
                    ahead.server
                ),
            )
            .advice("synchronise all clocks with NTP")
        },
    )
}

/// With a grant message, a waiter has the lock after little more than a round trip. If it must find
/// out by polling, that takes about half a second. The fastest times are compared, because a slow
/// machine could make the first look like the second.
fn check_handover(facts: &Facts) -> Option<Finding> {
    const GRANTED_WITHIN: Duration = Duration::from_millis(150);
    let replies = |node: &&NodeFacts| !matches!(node.contact, Contact::Unreachable(_));
    let replying = facts.nodes.iter().filter(replies).count();
    let too_few = replying <= facts.nodes.len() / 2;
    let why_not = if too_few { "not tried, because too few servers reply" } else { NOT_TRIED };
    let furthest = facts.nodes.iter().map(NodeFacts::best_round_trip).max().unwrap_or_default();
    let polled_after = GRANTED_WITHIN + furthest.saturating_mul(10);
    let mut finding = judge_handover(facts.handover.as_ref(), why_not, polled_after);
    let has_quarantine = facts.nodes.len() > 1 && !facts.requirements.quarantine.is_zero();
    if facts.handover.is_some() && has_quarantine {
        finding.message += "; this test ignores the quarantine";
    }
    Some(finding)
}

/// The reason if the servers reply.
pub(super) const NOT_TRIED: &str = "not tried, because of the problems above";

/// Judges the hand-over of a test lock. If there is none, `why_not` is the reason. A waiter that
/// takes longer than `polled_after` seems to have got no grant message.
pub(super) fn judge_handover(
    handover: Option<&Result<Handover, String>>,
    why_not: &str,
    polled_after: Duration,
) -> Finding {
    const CHECK: &str = "handover";
    let times = match handover {
        None => return Finding::unknown(CHECK, why_not),
        Some(Err(why)) => {
            return Finding::problem(CHECK, format!("a test lock failed: {}", format::escape(why)))
                .advice("fix what the servers report, then run doctor again");
        }
        Some(Ok(times)) => times,
    };
    let says = format!(
        "a lock was acquired in {} and handed to the next waiter in {}",
        format::duration(times.acquire),
        format::duration(times.handover)
    );
    if times.handover <= polled_after {
        return Finding::ok(CHECK, says);
    }
    Finding::warning(
        CHECK,
        format!("{says}: the waiter seems to have polled, without a grant message"),
    )
    .advice("grant +publish, +subscribe and &distlock:client:*, and let pub/sub through any proxy")
}

#[cfg(test)]
mod tests;
