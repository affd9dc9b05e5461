//! The durability record: a durable node that has lost nothing votes at once after a restart.

use distlock::{LockGuard, LockLost, RedisMgr, Vote};

use super::{
    TTL, config_medium_timeout, expect_no_quorum, expect_quorum, key, nodes_holding,
    quarantine::{default_quarantine, long_quarantine},
};
use crate::{
    helpers::{self, CALL_LIMIT, SECOND, UnwrapReleased, completes_within, expect_loss, with_ttl},
    support::{Nodes, TEST_TIMEOUT, eventually},
};

pub(super) const DURABILITY_KEY: &str = "distlock:memory";

/// These nodes write everything to disk before they reply, and have their data after a restart.
#[test]
fn durable_nodes_vote_at_once_after_a_restart() {
    let nodes = Nodes::durable(3);
    let [mgr, other] = [(), ()].map(|()| long_quarantine(nodes.urls()));
    let guard = mgr.try_lock_for("x", CALL_LIMIT).unwrap();
    eventually("all nodes hold it", TEST_TIMEOUT, || nodes_holding(&nodes, &guard).len() == 3);
    nodes.restart(0);
    nodes.restart(2);
    assert_eq!(nodes_holding(&nodes, &guard), [0, 1, 2]);
    let error = other.try_lock("x").unwrap_err();
    assert!(error.is_contended(), "{error:?}");
    assert_eq!(error.holder().unwrap().id(), guard.id().as_str());
    guard.release().unwrap().unwrap_released();
    let next = other.try_lock_for("x", CALL_LIMIT).unwrap();
    expect_quorum(&nodes, &next);
}

/// Returns a lock on three nodes, of which one has lost and re-acquired it, and another has died.
/// There is no quorum unless the node in quarantine counts.
fn held_with_a_node_in_quarantine(nodes: &Nodes) -> LockGuard {
    let mgr = RedisMgr::new(helpers::config_medium_timeout(nodes.urls()).quarantine(600 * SECOND))
        .unwrap();
    let guard = mgr.lock_with("x", &with_ttl(TTL)).unwrap();
    eventually("all nodes hold it", TEST_TIMEOUT, || nodes_holding(nodes, &guard).len() == 3);
    nodes.restart_empty(2);
    eventually("it is re-acquired", TEST_TIMEOUT, || {
        guard.ensure_held().unwrap();
        nodes_holding(nodes, &guard).contains(&2)
    });
    nodes.kill(1);
    guard
}

/// Fault: F84
/// Promise: P9
#[test]
fn node_in_quarantine_does_not_carry_a_lease() {
    let nodes = Nodes::durable(3);
    let guard = held_with_a_node_in_quarantine(&nodes);
    assert_eq!(expect_loss(&guard), LockLost::Expired);
}

/// The lock is re-acquired there repeatedly, each time for the full ttl.
///
/// Fault: F84
#[test]
fn reacquisition_in_quarantine_does_not_carry_a_lease() {
    let nodes = Nodes::durable(3);
    let guard = held_with_a_node_in_quarantine(&nodes);
    let delete_lock = || nodes.server(2).cli(&["DEL", &key("x")]);
    delete_lock();
    eventually("it is re-acquired", TEST_TIMEOUT, || {
        nodes_holding(&nodes, &guard).contains(&2) || !guard.is_held()
    });
    // By now all replies of the dead node have been read.
    let mut last = guard.remaining();
    eventually("the lease ends", TEST_TIMEOUT, || {
        delete_lock();
        let left = guard.remaining();
        assert!(left <= last, "{left:?} left after {last:?}");
        last = left;
        left.is_zero()
    });
    assert_eq!(expect_loss(&guard), LockLost::Expired);
}

/// A new node looks like one that has lost its disk. A manager that stays connected for a
/// quarantine writes the record, so that the node votes at once after its next restart.
#[test]
fn durability_record_is_written_after_a_quarantine() {
    let nodes = Nodes::built(3, |_, builder| builder.durable());
    let strict = long_quarantine(nodes.urls());
    assert_eq!(expect_no_quorum(&nodes, &strict.try_lock("x").unwrap_err()), [Vote::Unknown; 3]);
    let mgr = default_quarantine(&nodes);
    let is_recorded =
        || nodes.values(DURABILITY_KEY).iter().all(|record| record.as_deref() == Some("3000"));
    eventually("all records are written", TEST_TIMEOUT, || {
        drop(mgr.try_lock_for("x", SECOND));
        is_recorded()
    });
    for node in 0..3 {
        let expiry: i64 = nodes.server(node).query(&["PTTL", DURABILITY_KEY]);
        assert!((1_000_000_000..=30 * 86_400_000).contains(&expiry), "{expiry}");
        nodes.restart(node);
    }
    assert!(is_recorded(), "a record was lost in a restart");
    drop(completes_within(TEST_TIMEOUT, "lock", || default_quarantine(&nodes).lock("x").unwrap()));
    // There may have been longer leases than the recorded time.
    let strict = long_quarantine(nodes.urls());
    assert_eq!(expect_no_quorum(&nodes, &strict.try_lock("x").unwrap_err()), [Vote::Unknown; 3]);
}

/// Otherwise the record would count when the node is set to write everything again.
#[test]
fn record_is_deleted_if_the_node_is_no_longer_durable() {
    let nodes = Nodes::durable(3);
    (0..3).for_each(|node| nodes.config_set(node, "appendfsync", "everysec"));
    let mgr = long_quarantine(nodes.urls());
    assert_eq!(expect_no_quorum(&nodes, &mgr.try_lock("x").unwrap_err()), [Vote::Unknown; 3]);
    eventually("it is deleted", TEST_TIMEOUT, || {
        nodes.values(DURABILITY_KEY).iter().all(Option::is_none)
    });
}

/// A node that writes to disk every second may lose a second.
#[test]
fn nodes_that_sync_every_second_do_not_vote_at_first() {
    let nodes = Nodes::built(3, |_, builder| {
        builder.append_only(true).arg("--appendfsync").arg("everysec")
    });
    let mgr = long_quarantine(nodes.urls());
    assert_eq!(expect_no_quorum(&nodes, &mgr.try_lock("x").unwrap_err()), [Vote::Unknown; 3]);
}

/// While such a server rewrites its append-only file, it replies before its writes are on disk.
///
/// Fault: N58
#[test]
fn nodes_without_sync_on_rewrite_do_not_vote_at_first() {
    let nodes = Nodes::built(3, |_, builder| {
        builder.durable().arg("--no-appendfsync-on-rewrite").arg("yes")
    });
    (0..3).for_each(|node| drop(nodes.server(node).cli(&["SET", DURABILITY_KEY, "86400000"])));
    let mgr = RedisMgr::new(config_medium_timeout(&nodes).quarantine(600 * SECOND)).unwrap();
    assert_eq!(expect_no_quorum(&nodes, &mgr.try_lock("x").unwrap_err()), [Vote::Unknown; 3]);
    assert_eq!(nodes.values(DURABILITY_KEY), [None, None, None], "the record would count later");
}
