//! The checks of a Redis Cluster as a whole: pure functions from facts to findings.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    facts::{Contact, Info, NodeFacts, Queried},
    finding::Finding,
    grant_command,
};
use crate::format;

/// Number of slots of every cluster.
const SLOTS: usize = 16_384;
/// Maximum number of nodes that one finding names.
const NAMED_MAX: usize = 8;
/// Permissions that these checks need and locks do not.
const PERMISSIONS: [&str; 2] = ["+cluster|info", "+cluster|nodes"];

/// One node, and what it replied.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) facts: NodeFacts,
    /// `cluster-require-full-coverage`.
    pub(super) coverage: Queried<String>,
    pub(super) view: Queried<View>,
}

/// How a node sees the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct View {
    /// `cluster_state` is `ok`.
    is_ok: bool,
    pub(super) nodes: Vec<Known>,
}

/// A node, as one of them sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Known {
    id: String,
    pub(super) address: String,
    is_master: bool,
    /// The node that replied.
    is_itself: bool,
    /// Most masters consider it down.
    has_failed: bool,
    /// The node that replied considers it down.
    may_have_failed: bool,
    master: String,
    slots: Vec<(usize, usize)>,
    /// Slots that it is moving away or receiving; known to itself only.
    moving: usize,
}

impl Default for Member {
    fn default() -> Member {
        Member {
            facts: NodeFacts::new("", Contact::Reachable),
            coverage: Queried::Unsupported("not queried".into()),
            view: Queried::Unsupported("not queried".into()),
        }
    }
}

impl Member {
    pub(super) fn silent(address: &str, why: String) -> Member {
        Member { facts: NodeFacts::new(address, Contact::Unreachable(why)), ..Member::default() }
    }

    pub(super) fn view(&self) -> Option<&View> {
        match &self.view {
            Queried::Known(view) => Some(view),
            _ => None,
        }
    }
}

impl View {
    /// Reads the replies to `CLUSTER INFO` and `CLUSTER NODES` of the node that was asked at this
    /// address. Leaves out lines that are malformed.
    pub(super) fn parse(state: &Info, nodes: &str, asked: &str) -> View {
        let nodes = nodes.lines().filter_map(|line| Known::parse(line, asked)).collect();
        View { is_ok: state.get("cluster_state") == Some("ok"), nodes }
    }
}

impl Known {
    fn parse(line: &str, asked: &str) -> Option<Known> {
        let mut words = line.split(' ');
        let (id, address, flags, master) =
            (words.next()?, words.next()?, words.next()?, words.next()?);
        let flags: Vec<_> = flags.split(',').collect();
        if flags.contains(&"handshake") {
            return None;
        }
        let (host, port) = address.split('@').next()?.rsplit_once(':')?;
        let address = match host {
            // Such a node does not know its own address.
            "" => asked.to_owned(),
            _ if host.contains(':') => format!("[{host}]:{port}"),
            _ => format!("{host}:{port}"),
        };
        let ranges: Vec<_> = words.skip(4).collect();
        let slots = ranges.iter().filter(|range| !range.starts_with('[')).filter_map(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            Some((first.parse().ok()?, last.trim().parse().ok()?))
        });
        Some(Known {
            id: id.to_owned(),
            address: format::escape(&address),
            is_master: flags.contains(&"master"),
            is_itself: flags.contains(&"myself"),
            has_failed: flags.contains(&"fail") || flags.contains(&"noaddr"),
            may_have_failed: flags.contains(&"fail?"),
            master: master.to_owned(),
            slots: slots.filter(|(first, last)| first <= last && *last < SLOTS).collect(),
            moving: ranges.iter().filter(|range| range.starts_with('[')).count(),
        })
    }

    fn slot_count(&self) -> usize {
        self.slots.iter().map(|(first, last)| last - first + 1).sum()
    }
}

pub(super) fn check_cluster(members: &[Member], user: &str) -> Vec<Finding> {
    let Some(view) = best_view(members) else {
        return check_views(members, user).into_iter().collect();
    };
    let findings = [
        Some(check_slots(members, view)),
        check_state(members),
        check_failed(members),
        check_replicas(view),
        check_moves(members),
        check_versions(members),
        check_coverage(members),
    ];
    findings.into_iter().flatten().collect()
}

/// The view of a node that works, if there is one.
fn best_view(members: &[Member]) -> Option<&View> {
    let views = || members.iter().filter_map(Member::view);
    views().find(|view| view.is_ok).or_else(|| views().next())
}

/// Reports why no node says how it sees the cluster.
fn check_views(members: &[Member], user: &str) -> Option<Finding> {
    let what = "cannot check slots, replicas, moves and versions";
    members.iter().find_map(|member| match &member.view {
        _ if member.facts.contact != Contact::Reachable => None,
        Queried::Denied => Some(
            Finding::unknown("slots", format!("{what}: {} are missing", PERMISSIONS.join(" and ")))
                .advice("run these in redis-cli as an administrator, at each node")
                .acl_setuser(grant_command::grant_command(user, PERMISSIONS)),
        ),
        Queried::Unsupported(why) => {
            Some(Finding::unknown("slots", format!("{what}: {}", format::escape(why))))
        }
        Queried::Known(_) => None,
    })
}

fn serving_masters(view: &View) -> Vec<&Known> {
    let serves = |node: &&Known| node.is_master && !node.has_failed && node.slot_count() > 0;
    let mut serving: Vec<_> = view.nodes.iter().filter(serves).collect();
    serving.sort_unstable_by(|one, other| one.address.cmp(&other.address));
    serving
}

/// Reports which masters serve the slots, and whether all are served.
fn check_slots(members: &[Member], view: &View) -> Finding {
    let serving = serving_masters(view);
    let shares =
        list(serving.iter().map(|node| format!("{} ({})", node.address, node.slot_count())));
    let served: usize = serving.iter().map(|node| node.slot_count()).sum();
    let masters = serving.len();
    if served >= SLOTS {
        let masters = if masters == 1 { "1 master".into() } else { format!("{masters} masters") };
        return Finding::ok("slots", format!("all {SLOTS} are served by {masters}: {shares}"));
    }
    let consequence = if members.iter().any(|member| is_setting(&member.coverage, "yes")) {
        "all nodes refuse all requests until they are (cluster-require-full-coverage yes)"
    } else {
        "locks in the others cannot be acquired"
    };
    Finding::problem("slots", format!("{served} of {SLOTS} are served, so {consequence}: {shares}"))
        .advice("bring the missing masters or their replicas back, or run redis-cli --cluster fix")
}

fn check_state(members: &[Member]) -> Option<Finding> {
    let down = members.iter().filter(|member| member.view().is_some_and(|view| !view.is_ok));
    let down: Vec<_> = down.map(|member| member.facts.server.clone()).collect();
    (!down.is_empty()).then(|| {
        Finding::problem(
            "state",
            format!("cluster_state is fail, so these refuse requests: {}", list(down.into_iter())),
        )
        .advice("bring back the nodes that are unreachable; most masters must see each other")
    })
}

/// Reports nodes that others consider down, and those that do not reply to us.
fn check_failed(members: &[Member]) -> Option<Finding> {
    let views = || members.iter().filter_map(Member::view).flat_map(|view| &view.nodes);
    let addresses = |is: fn(&Known) -> bool| -> BTreeSet<String> {
        views().filter(|node| is(node)).map(|node| node.address.clone()).collect()
    };
    let failed = addresses(|node| node.has_failed);
    let mut suspected = addresses(|node| node.may_have_failed);
    suspected.retain(|address| !failed.contains(address));
    let silent = members
        .iter()
        .filter(|member| member.facts.contact != Contact::Reachable)
        .map(|member| member.facts.server.clone())
        .filter(|address| !failed.contains(address) && !suspected.contains(address));
    let silent: BTreeSet<String> = silent.collect();
    let groups = [
        (failed, "down, as most masters say"),
        (suspected, "suspected to be down (fail?)"),
        (silent, "cannot be reached from here"),
    ];
    let says: Vec<_> = groups
        .into_iter()
        .filter(|(addresses, _)| !addresses.is_empty())
        .map(|(addresses, what)| format!("{what}: {}", list(addresses.into_iter())))
        .collect();
    (!says.is_empty()).then(|| {
        Finding::warning("nodes", says.join("; "))
            .advice("start them, or remove them with CLUSTER FORGET at every other node")
    })
}

fn check_replicas(view: &View) -> Option<Finding> {
    let masters = serving_masters(view);
    let has_replica = |master: &Known| {
        view.nodes
            .iter()
            .any(|node| !node.is_master && !node.has_failed && node.master == master.id)
    };
    let without = masters.iter().filter(|master| !has_replica(master));
    let without: Vec<_> = without.map(|master| master.address.clone()).collect();
    if masters.is_empty() {
        return None;
    }
    Some(if without.is_empty() {
        Finding::ok(
            "replicas",
            "each master has one to fail over to, which may lack the most recent locks then",
        )
    } else {
        Finding::warning(
            "replicas",
            format!("nothing takes over from these masters: {}", list(without.into_iter())),
        )
        .advice("add a replica to each, for example by redis-cli --cluster add-node")
    })
}

fn check_moves(members: &[Member]) -> Option<Finding> {
    let own = members.iter().filter_map(Member::view).flat_map(|view| &view.nodes);
    let moving: Vec<_> = own
        .filter(|node| node.is_itself && node.moving > 0)
        .map(|node| format!("{} ({})", node.address, node.moving))
        .collect();
    (!moving.is_empty()).then(|| {
        Finding::warning(
            "moves",
            format!(
                "slots are being moved, and requests for some of their locks wait for the end: {}",
                list(moving.into_iter())
            ),
        )
        .advice("if no move is in progress, run redis-cli --cluster fix")
    })
}

fn check_versions(members: &[Member]) -> Option<Finding> {
    let mut versions: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for member in members {
        let Some(info) = member.facts.info() else { continue };
        let valkey = info.redacted("valkey_version").map(|version| format!("Valkey {version}"));
        let redis = || info.redacted("redis_version").map(|version| format!("Redis {version}"));
        let Some(version) = valkey.or_else(redis) else { continue };
        versions.entry(version).or_default().push(member.facts.server.clone());
    }
    let only = versions.keys().next()?.clone();
    Some(if versions.len() == 1 {
        Finding::ok("versions", format!("{only} at all nodes"))
    } else {
        let versions = versions
            .into_iter()
            .map(|(version, servers)| format!("{version} at {}", list(servers.into_iter())));
        let says = versions.collect::<Vec<_>>().join("; ");
        Finding::warning("versions", format!("they differ: {says}"))
            .advice("finish the upgrade; before Redis 7, grant messages go to all nodes")
    })
}

/// Reports whether a node that is unreachable affects the locks of the others.
fn check_coverage(members: &[Member]) -> Option<Finding> {
    let check = "coverage";
    let settings = || members.iter().map(|member| &member.coverage);
    if settings().any(|setting| is_setting(setting, "yes")) {
        return Some(
            Finding::warning(
                check,
                "while the slots of one master are not served, all nodes refuse all requests \
                 (cluster-require-full-coverage yes)",
            )
            .advice("unless other programs need that, run these in redis-cli at each node")
            .config_set(&["cluster-require-full-coverage no"]),
        );
    }
    if settings().any(|setting| is_setting(setting, "no")) {
        return Some(Finding::ok(
            check,
            "a master that is unreachable does not affect the others' locks",
        ));
    }
    Some(
        Finding::unknown(check, "cannot check cluster-require-full-coverage")
            .advice("grant +config|get, or see that it is no at all nodes"),
    )
}

fn is_setting(setting: &Queried<String>, value: &str) -> bool {
    matches!(setting, Queried::Known(known) if known == value)
}

/// Names these, at most [`NAMED_MAX`] of them.
fn list(names: impl Iterator<Item = String>) -> String {
    let mut names: Vec<_> = names.collect();
    let more = names.len().saturating_sub(NAMED_MAX);
    names.truncate(NAMED_MAX);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    names.join(", ") + &more
}

#[cfg(test)]
mod tests;
