//! Nodes that leave the cluster, and slots that no node serves.

use super::*;
use crate::helpers::config_short_timeout;

/// Of a lock whose node has no replica, and of one whose node is alive: by default, all nodes
/// refuse everything.
///
/// Fault: N186
#[test]
fn slots_that_no_node_serves_are_reported_in_time() {
    let cluster = Cluster::start(3);
    let config = config_short_timeout(cluster.url()).operation_timeout(SECOND);
    let mgr = RedisMgr::new(config).unwrap();
    let slots = NAMES.map(|name| slot(&cluster, name));
    drop(NAMES.map(|name| mgr.lock(name).unwrap()));
    let killed = cluster.owner(slots[0]);
    let elsewhere = slots.iter().position(|slot| cluster.owner(*slot).port() != killed.port());
    let elsewhere = NAMES[elsewhere.expect("the locks are on all nodes")];
    killed.kill();
    for node in cluster.nodes.iter().filter(|node| node.is_running()) {
        eventually("the others notice it", TEST_TIMEOUT, || {
            node.query::<String>(&["CLUSTER", "INFO"]).contains("cluster_state:fail")
        });
    }
    let failed = |name: &str| {
        let failed = completes_within(CALL_LIMIT, "the call", || mgr.try_lock(name).unwrap_err());
        assert!(failed.is_unavailable(), "{failed:?}");
        failed.to_string()
    };
    failed(NAMES[0]);
    let text = failed(elsewhere);
    assert!(text.contains("CLUSTERDOWN") && text.contains("distlock doctor"), "{text}");
    killed.restart();
    for name in NAMES {
        drop(lock_eventually(&mgr, name));
    }
}

/// Fault: N186
#[test]
fn manager_goes_on_without_the_only_node_of_its_url() {
    let cluster = Cluster::with_replicas(2);
    let only = &cluster.nodes[2];
    let url = format!("redis+cluster://{}", only.addr());
    let mgr = RedisMgr::new(Config::new(url).ttl(30 * SECOND)).unwrap();
    let held = NAMES.map(|name| mgr.lock(name).unwrap());
    only.kill();
    // Then the map of the manager is stale, and only the other master can correct it.
    let former = &cluster.nodes[1];
    cluster.fail_over(former);
    former.kill();
    for guard in held {
        eventually("it is found at its new node", TEST_TIMEOUT, || {
            matches!(mgr.try_lock(guard.name()), Err(LockError::Held { .. }))
        });
        guard.release().unwrap().unwrap_released();
    }
    drop(NAMES.map(|name| lock_eventually(&mgr, name)));
}

/// The node is alive, and may be asked because the manager still knows it.
///
/// Fault: N186
#[test]
fn node_that_was_forgotten_is_not_asked() {
    let cluster = Cluster::with_replicas(2);
    let mgr = manager(&cluster);
    let slot = slot(&cluster, "x");
    let held = mgr.lock_with("x", &with_ttl(6 * SECOND)).unwrap();
    let former = cluster.owner(slot);
    let id = former.node_id();
    cluster.fail_over(former);
    former.cli(&["CLUSTER", "RESET", "HARD"]);
    for node in cluster.nodes.iter().filter(|node| node.port() != former.port()) {
        node.cli(&["CLUSTER", "FORGET", &id]);
    }
    let renewed = mgr.metrics().renewals();
    eventually("it is renewed at the successor", TEST_TIMEOUT, || {
        mgr.metrics().renewals() >= renewed + 2
    });
    let waiting = spawn_waiter(&mgr, "x", 0);
    held.release().unwrap().unwrap_released();
    let next = completes_within(CALL_LIMIT, "the hand-over", || waiting.join().unwrap());
    next.release().unwrap().unwrap_released();
    assert_eq!(former.keys(), Vec::<String>::new());
}
