//! The checks of a master with replicas: pure functions from facts to findings.

use super::{
    facts::{NodeFacts, Requirements},
    finding::Finding,
};

/// Reports whether a failover could lose locks.
pub(super) fn check_replicas(node: &NodeFacts, _: &Requirements) -> Option<Finding> {
    Some(match count_replicas(node)? {
        0 => Finding::ok("replicas", "none, so no failover can lose recent locks"),
        count => Finding::warning(
            "replicas",
            format!("{count} connected: a failover to one of them can lose the most recent locks"),
        )
        .advice(
            "set Config::replicas in the program, use fencing tokens where it matters, or use \
             several nodes without replicas",
        ),
    })
}

/// Reports whether a master rejects writes while it is cut off from its replicas. `INFO` has the
/// number of good replicas only if it does, so no permission to read settings is needed.
pub(super) fn check_cut_off(node: &NodeFacts, _: &Requirements) -> Option<Finding> {
    if count_replicas(node)? == 0 {
        return None;
    }
    Some(match node.info()?.get("min_slaves_good_slaves") {
        Some(_) => {
            Finding::ok("cut-off", "a master that is cut off from its replicas grants no locks")
        }
        None => no_cut_off("a master goes on granting locks while"),
    })
}

/// Reports a server without `min-replicas-to-write`. `says` begins the sentence.
pub(super) fn no_cut_off(says: &str) -> Finding {
    let says =
        format!("{says} it is cut off from its replicas, and its successor does not know them");
    Finding::warning("cut-off", says)
        .advice(
            "run these in redis-cli at the master and its replicas; no lock is then granted while \
             no replica is connected",
        )
        .config_set(&["min-replicas-to-write 1"])
}

/// Number of replicas that are connected to a master, and `None` for other servers.
fn count_replicas(node: &NodeFacts) -> Option<u64> {
    let info = node.info()?;
    (info.get("role") == Some("master")).then(|| info.number("connected_slaves"))
}
