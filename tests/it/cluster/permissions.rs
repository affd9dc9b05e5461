//! The ACL permissions that locks in a cluster need.

use super::*;
use crate::{
    helpers::config_short_timeout,
    security::permissions::{list::LOCK_PERMISSIONS, run_all},
};

/// Beside those for one server, as the documentation lists them.
const CLUSTER: [&str; 2] = ["+cluster|slots", "+asking"];
const SHARDED: [&str; 4] = ["+ssubscribe", "+sunsubscribe", "+spublish", "+pubsub|shardnumsub"];

/// Fault: F76
#[test]
fn listed_permissions_suffice_in_a_cluster() {
    let page = include_str!("../../../docs/servers.md");
    let is_listed = |permission: &&str| page.contains(&format!("`{permission}`"));
    assert!(CLUSTER.iter().chain(&SHARDED).all(is_listed));
    let cluster = Cluster::start(2);
    let mut words = vec!["ACL", "SETUSER", "app", "reset", "on", ">pw", "resetchannels", "-@all"];
    words.extend(LOCK_PERMISSIONS.into_iter().chain(CLUSTER).chain(["+info"]));
    if RedisServer::has_sharded_channels() {
        words.extend(SHARDED);
    }
    cluster.nodes.iter().for_each(|node| drop(node.cli(&words)));
    let url = cluster.url().replace("://", "://app:pw@");
    let mgr = RedisMgr::new(config_short_timeout(url).operation_timeout(2 * SECOND)).unwrap();
    let slot = slot(&cluster, "x");
    run_all(cluster.owner(slot), &mgr).unwrap_or_else(|(step, error)| panic!("{step}: {error}"));

    // A lock whose slot moves is asked for with ASKING, and waited for at the new node.
    let guard = mgr.lock_with("x", &with_ttl(2 * SECOND)).unwrap();
    let waiting = spawn_waiter(&mgr, "x", 0);
    let (from, to) = cluster.begin_move(slot);
    cluster.move_keys(slot, from, to, &["lock:x"]);
    let renewed = mgr.metrics().renewals();
    eventually("it is renewed at the new node", TEST_TIMEOUT, || {
        mgr.metrics().renewals() >= renewed + 3
    });
    cluster.move_keys(slot, from, to, &[]);
    cluster.end_move(slot, from, to);
    guard.release().unwrap().unwrap_released();
    let next = completes_within(TEST_TIMEOUT, "the hand-over", || waiting.join().unwrap());
    next.release().unwrap().unwrap_released();

    for node in &cluster.nodes {
        let mut denied: Vec<String> = node
            .query::<Vec<redis::Value>>(&["ACL", "LOG"])
            .iter()
            .map(|e| format!("{e:?}"))
            .collect();
        // Before Redis 7, the library asks whether there are sharded channels, and need not know.
        denied.retain(|entry| RedisServer::has_sharded_channels() || !entry.contains("pubsub"));
        assert!(denied.is_empty(), "{denied:?}");
    }
}
