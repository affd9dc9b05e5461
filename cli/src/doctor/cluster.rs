//! Examines a Redis Cluster as a whole: whether all masters reply, and whether locks work.

use std::time::Duration;

use distlock::{Config, LockError, RedisMgr};

use super::{
    Examination,
    collect::{PROBE_TTL, ROUND_TRIP_SAMPLES, try_contact},
    facts::{Contact, NodeFacts, Requirements},
    finding::{Finding, Level},
    handover_probe::probe_handover,
    mysql_checks::check_handover,
    node_checks,
};
use crate::temp_lock::TempLock;

/// Examines the cluster. Fails only if the configuration is invalid.
pub(super) fn examine(
    config: &Config,
    requirements: &Requirements,
) -> Result<Examination, LockError> {
    let mgr = RedisMgr::new(config.clone().ttl(PROBE_TTL).quarantine(Duration::ZERO))?;
    let contact = try_contact(&mgr);
    let mut node = NodeFacts::new(mgr.server(), contact);
    if node.contact == Contact::Reachable {
        node.round_trips = (0..ROUND_TRIP_SAMPLES).filter_map(|_| mgr.ping().ok()).collect();
    }
    let own: Vec<_> = [
        node_checks::check_reach(&node, requirements),
        node_checks::check_latency(&node, requirements),
    ]
    .into_iter()
    .flatten()
    .collect();
    let is_fit = !own.iter().any(|finding| finding.level == Level::Problem);
    let handover = (node.contact == Contact::Reachable && is_fit).then(|| {
        let name = TempLock::new(&requirements.prefix).name;
        probe_handover(&mgr, &name, Duration::ZERO)
    });
    let settings = Finding::unknown("settings", "the settings of the nodes are not checked")
        .advice(
            "see that all have maxmemory-policy noeviction, and cluster-require-full-coverage no \
             if a node that is away must not affect the locks of others",
        );
    let own = own.into_iter().map(|finding| finding.at(&node.server));
    Ok(Examination {
        findings: own.chain([check_handover(handover), settings]).collect(),
        is_unreachable: matches!(node.contact, Contact::Unreachable(_)),
        servers: vec![node.server],
    })
}
