//! Examines a Redis Cluster: asks its nodes, and whether locks work. What they reply is judged
//! elsewhere.

use std::{thread, time::Duration};

use distlock::{Config, LockError, PooledConnection, RedisMgr};

use super::{
    Examination,
    cluster_checks::{Member, View, check_cluster},
    collect::{
        PROBE_TTL, ROUND_TRIP_SAMPLES, as_info, as_text, query, query_info, setting_value,
        to_queried, try_contact,
    },
    cross_checks::{NOT_TRIED, judge_handover},
    facts::{Contact, NodeFacts, Queried, Requirements},
    finding::Level,
    handover_probe::probe_handover,
    node_checks,
};
use crate::{secrets::Secrets, temp_lock::TempLock};

/// Maximum number of nodes that are asked at the same time.
const ASKED_MAX: usize = 16;

/// Examines the cluster. Fails only if the configuration is invalid.
pub(super) fn examine(
    config: &Config,
    requirements: &Requirements,
    user: &str,
    secrets: &Secrets,
) -> Result<Examination, LockError> {
    let config = config.clone().ttl(PROBE_TTL).quarantine(Duration::ZERO);
    let mgr = RedisMgr::new(config.clone())?;
    let mut members = query_members(&config, mgr.server(), secrets);
    members.iter_mut().for_each(|member| user.clone_into(&mut member.facts.user));
    let is_silent = |member: &Member| matches!(member.facts.contact, Contact::Unreachable(_));
    let is_unreachable = members.iter().all(is_silent);
    let mut node = NodeFacts::new(mgr.server(), try_contact(&mgr));
    user.clone_into(&mut node.user);
    if matches!(node.contact, Contact::Unreachable(_)) && !is_unreachable {
        // Only some nodes are unreachable, which has a finding of its own.
        node.contact = Contact::Reachable;
    }
    if node.contact == Contact::Reachable {
        node.round_trips = (0..ROUND_TRIP_SAMPLES).map_while(|_| mgr.ping().ok()).collect();
        node.round_trips.sort_unstable();
    }
    let own: Vec<_> = [
        node_checks::check_reach(&node, requirements),
        node_checks::check_latency(&node, requirements),
    ]
    .into_iter()
    .flatten()
    .map(|finding| finding.at(&node.server))
    .collect();
    let is_fit = !own.iter().any(|finding| finding.level == Level::Problem);
    let handover = (node.contact == Contact::Reachable && is_fit).then(|| {
        let name = TempLock::new(&requirements.prefix).name;
        probe_handover(&mgr, &name, Duration::ZERO)
    });
    let of_members = members.iter().flat_map(|member| {
        node_checks::check_member(&member.facts, requirements)
            .into_iter()
            .map(|finding| finding.at(&member.facts.server))
    });
    let handover = judge_handover(handover.as_ref(), NOT_TRIED, Duration::MAX);
    let findings = own.into_iter().chain(of_members).chain(check_cluster(&members, user));
    let servers = members.iter().map(|member| member.facts.server.clone());
    Ok(Examination {
        servers: [node.server.clone()].into_iter().chain(servers).collect(),
        findings: findings.chain([handover]).collect(),
        is_unreachable,
    })
}

/// Asks all nodes that the first one to reply knows. `label` lists the nodes of the URL.
fn query_members(config: &Config, label: &str, secrets: &Secrets) -> Vec<Member> {
    let listed = label.trim_start_matches("cluster ").split(", ").map(str::to_owned);
    let mut silent = Vec::new();
    for address in listed {
        let first = query_member(config, &address, secrets);
        let Some(view) = first.view() else {
            silent.push(first);
            continue;
        };
        // One that is not called by the name in the URL is asked again by the name it has.
        let known = view.nodes.iter().map(|node| node.address.clone());
        let others: Vec<_> = known.filter(|known| *known != address).collect();
        let is_itself = others.len() < view.nodes.len();
        let mut members = if is_itself { vec![first] } else { Vec::new() };
        for some in others.chunks(ASKED_MAX) {
            members.extend(thread::scope(|threads| {
                let ask = |address| threads.spawn(move || query_member(config, address, secrets));
                let asked: Vec<_> = some.iter().map(|address| (address, ask(address))).collect();
                let panicked =
                    |address: &str| Member::silent(address, "its check panicked".to_owned());
                let asked = asked.into_iter();
                asked
                    .map(|(address, member)| member.join().unwrap_or_else(|_| panicked(address)))
                    .collect::<Vec<_>>()
            }));
        }
        members.sort_by(|one, other| one.facts.server.cmp(&other.facts.server));
        return members;
    }
    silent
}

fn query_member(config: &Config, address: &str, secrets: &Secrets) -> Member {
    let mgr = match RedisMgr::new(config.at_server(address)) {
        Ok(mgr) => mgr,
        Err(error) => return Member::silent(address, error.to_string()),
    };
    let mut connection = match mgr.connection() {
        Ok(connection) => connection,
        Err(error) => return Member::silent(address, error.to_string()),
    };
    let mut member =
        Member { facts: NodeFacts::new(address, Contact::Reachable), ..Member::default() };
    if let Err(error) = query_details(&mut connection, &mut member, address, secrets) {
        member.facts.contact = Contact::Unreachable(secrets.redact(&error.to_string()));
    }
    member
}

fn query_details(
    connection: &mut PooledConnection,
    member: &mut Member,
    address: &str,
    secrets: &Secrets,
) -> Result<(), redis::RedisError> {
    let facts = &mut member.facts;
    facts.info = query_info(connection, secrets)?;
    let mut setting =
        |name| to_queried(query(connection, &["CONFIG", "GET", name]), secrets, setting_value);
    facts.timeout = setting("timeout")?;
    member.coverage = setting("cluster-require-full-coverage")?;
    let state = query(connection, &["CLUSTER", "INFO"]);
    let state = to_queried(state, secrets, |reply| as_info(reply, secrets))?;
    let nodes = query(connection, &["CLUSTER", "NODES"]);
    member.view = match (state, to_queried(nodes, secrets, as_text)?) {
        (Queried::Known(state), Queried::Known(nodes)) => {
            Queried::Known(View::parse(&state, &nodes, address))
        }
        (Queried::Unsupported(why), _) | (_, Queried::Unsupported(why)) => {
            Queried::Unsupported(why)
        }
        _ => Queried::Denied,
    };
    Ok(())
}
