//! What is judged of all servers together.

use std::{collections::HashMap, time::Duration};

use super::{
    checks::{CLOCKS_APART_US, span_of},
    facts::{Facts, Node},
    finding::Finding,
};
use crate::text;

pub(super) fn of_all(facts: &Facts) -> Vec<Finding> {
    let findings = [count(facts), duplicates(facts), hosts(facts), clocks(facts), handover(facts)];
    findings.into_iter().flatten().collect()
}

fn count(facts: &Facts) -> Option<Finding> {
    let nodes = facts.nodes.len();
    match nodes {
        1 => None,
        _ if nodes.is_multiple_of(2) => Some(
            Finding::warning(
                "nodes",
                format!(
                    "{nodes} nodes survive the loss of {}, like {} nodes do, and one more can fail",
                    (nodes - 1) / 2,
                    nodes - 1
                ),
            )
            .advice("use an odd number"),
        ),
        _ => Some(Finding::ok("nodes", format!("{nodes} nodes, of which {} may be away", nodes / 2))),
    }
}

/// A server that is named twice votes twice.
fn duplicates(facts: &Facts) -> Option<Finding> {
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
        Finding::problem("duplicates", format!("{names} are one server, and would vote twice"))
            .advice("name each server once, and one database of it")
    })
}

fn hosts(facts: &Facts) -> Option<Finding> {
    let mut shared: HashMap<&str, usize> = HashMap::new();
    facts.nodes.iter().for_each(|node| *shared.entry(host(node)).or_default() += 1);
    let mut shared: Vec<&str> = shared.into_iter().filter(|(_, count)| *count > 1).map(|(host, _)| host).collect();
    shared.sort_unstable();
    (!shared.is_empty()).then(|| {
        Finding::warning(
            "hosts",
            format!("several nodes are on one machine ({}), and go down with it", shared.join(", ")),
        )
        .advice("put each node on a machine of its own")
    })
}

/// Socket files are all of this machine.
fn host(node: &Node) -> &str {
    match node.server.rsplit_once(':') {
        _ if node.server.starts_with('/') => "this one",
        Some((host, _)) => host,
        None => &node.server,
    }
}

fn clocks(facts: &Facts) -> Option<Finding> {
    let clocks: Vec<_> = facts.nodes.iter().filter_map(|node| Some((node.clock?, node))).collect();
    let (first, _) = clocks.iter().min_by_key(|(clock, _)| clock.ahead_us)?;
    let (last, ahead) = clocks.iter().max_by_key(|(clock, _)| clock.ahead_us)?;
    if clocks.len() < 2 {
        return None;
    }
    let apart = last.ahead_us.saturating_sub(first.ahead_us);
    let says = format!("the nodes' clocks are {} apart", span_of(apart));
    Some(if apart.saturating_sub(first.unsure_us.saturating_add(last.unsure_us)) <= CLOCKS_APART_US {
        Finding::ok("clocks", says)
    } else {
        Finding::warning(
            "clocks",
            format!("{says}, {} is furthest ahead: after a restart of all nodes tokens may go back", ahead.server),
        )
        .advice("keep all clocks by NTP")
    })
}

/// Who is told has the lock in little more than a round trip; who finds out by looking, after half a second or so. The best
/// times are compared, so that no stutter of a machine hides the one behind the other.
fn handover(facts: &Facts) -> Option<Finding> {
    const TOLD_WITHIN: Duration = Duration::from_millis(150);
    let trial = match facts.trial.as_ref()? {
        Ok(trial) => trial,
        Err(why) => {
            return Some(
                Finding::problem("handover", format!("trying out a lock failed: {}", text::clean(why)))
                    .advice("mend what is said above, and look again"),
            );
        }
    };
    let furthest = facts.nodes.iter().map(Node::best_round_trip).max().unwrap_or_default();
    let says = format!(
        "a lock was taken in {} and handed to the next in line in {}",
        text::span(trial.acquire),
        text::span(trial.handover)
    );
    Some(if trial.handover <= TOLD_WITHIN + furthest.saturating_mul(10) {
        Finding::ok("handover", says)
    } else {
        Finding::warning("handover", format!("{says}: it seems that nobody told it, and it found out by looking"))
            .advice("grant +publish, +subscribe and &distlock:client:*, and let pub/sub pass where there is a proxy")
    })
}

#[cfg(test)]
mod tests;
