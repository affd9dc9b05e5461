//! Asks sentinels, and the replicas that they name. What they reply is judged elsewhere.

use std::collections::BTreeSet;

use distlock::{Config, LockError, RedisMgr};
use redis::RedisError;

use super::{
    collect::{query_info, try_contact},
    facts::{AskedSentinel, Contact, NodeFacts, Queried, Requirements},
    finding::Finding,
    sentinel_checks,
};
use crate::secrets::Secrets;

/// Maximum number of replicas that are asked; otherwise a sentinel could name any number.
const REPLICAS_MAX: usize = 32;

/// Finds nothing if the URL names no sentinels, or if there are several nodes. Fails only if the
/// configuration is invalid.
pub(super) fn examine(
    config: &Config,
    requirements: &Requirements,
    secrets: &Secrets,
) -> Result<Vec<Finding>, LockError> {
    if requirements.nodes > 1 {
        return Ok(Vec::new());
    }
    let asked: Vec<_> = config
        .examine_sentinels()?
        .into_iter()
        .map(|info| AskedSentinel {
            sentinel: info.sentinel,
            is_in_url: info.is_in_url,
            view: info.view,
        })
        .collect();
    if asked.is_empty() {
        return Ok(Vec::new());
    }
    let views = asked.iter().filter_map(|asked| asked.view.as_ref().ok());
    let named: BTreeSet<&str> =
        views.flat_map(|view| &view.replicas).map(|replica| replica.server.as_str()).collect();
    let replicas: Vec<_> = named
        .into_iter()
        .take(REPLICAS_MAX)
        .map(|server| query_replica(config, server, secrets))
        .collect();
    let of_replicas =
        replicas.iter().flat_map(|node| sentinel_checks::check_replica(node, requirements));
    let findings = sentinel_checks::check_sentinels(&asked, requirements.ttl);
    Ok(findings.into_iter().chain(of_replicas).collect())
}

fn query_replica(config: &Config, server: &str, secrets: &Secrets) -> NodeFacts {
    let away = |why: String| NodeFacts::new(server, Contact::Unreachable(why));
    let mgr = match RedisMgr::new(config.at_server(server)) {
        Ok(mgr) => mgr,
        Err(error) => return away(error.to_string()),
    };
    let mut node = NodeFacts::new(server, try_contact(&mgr));
    if node.contact != Contact::Reachable {
        return node;
    }
    let info = mgr.connection().map_err(|error| error.to_string()).and_then(|mut connection| {
        let failed = |error: RedisError| secrets.redact(&error.to_string());
        query_info(&mut connection, secrets).map_err(failed)
    });
    node.info = info.unwrap_or_else(Queried::Unsupported);
    node
}
