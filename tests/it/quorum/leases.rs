//! Held locks that some nodes have lost: renewal, re-acquisition, loss and release.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use distlock::{
    HandleEvent, LockError, LockGuard, LockInfo, LockLost, LostEvent, RedisMgr, ReleasedEvent,
};

use super::{
    TTL, await_renewals, config_long_timeouts, config_medium_timeout, config_short_timeout,
    expect_quorum, key, manager, nodes_holding, wait_until_free_everywhere, warm_up,
};
use crate::{
    helpers::{self, CALL_LIMIT, SECOND, UnwrapReleased, completes_within, expect_loss, with_ttl},
    support::{
        ArmedFault, Fault, Nodes, TEST_TIMEOUT, any_request, contains, eventually, eventually_some,
    },
};

/// A ttl long enough to distinguish a release from an expiry: what disappears soon after the loss
/// was released.
const LONG_TTL: Duration = Duration::from_secs(24);

/// Acquires a lock on all nodes.
fn held(nodes: &Nodes, mgr: &RedisMgr, ttl: Duration) -> LockGuard {
    let guard = mgr.lock_with("x", &with_ttl(ttl)).unwrap();
    eventually("all nodes hold it", TEST_TIMEOUT, || {
        nodes_holding(nodes, &guard).len() == nodes.len()
    });
    guard
}

fn give_to_other(nodes: &Nodes, node: usize) {
    nodes.server(node).query::<()>(&["SET", &key("x"), "other client", "PX", "600000"]);
}

/// Fault: F85
/// Promise: P9
#[test]
fn lease_survives_if_a_minority_loses_the_lock() {
    let nodes = Nodes::start(5);
    let (mgr, other) = (manager(&nodes), manager(&nodes));
    let guard = held(&nodes, &mgr, TTL);
    nodes.server(0).cli(&["DEL", &key("x")]);
    nodes.restart_empty(3);
    await_renewals(&guard, 3);
    expect_quorum(&nodes, &guard);
    let error = other.try_lock("x").unwrap_err();
    assert_eq!(error.holder().unwrap().id(), guard.id().as_str());
    guard.release().unwrap().unwrap_released();
    drop(completes_within(CALL_LIMIT, "the next lock", || other.lock("x").unwrap()));
    wait_until_free_everywhere(&nodes, "x");
}

/// Delays the replies of the last node about the lock, so that the others reply long before it.
fn with_slow_last_node(nodes: Nodes) -> Nodes {
    let nodes = nodes.behind_proxies(&[2]);
    nodes
        .proxy(2)
        .on_request(contains("lock:x"), Fault::DelayReply(Duration::from_millis(150)))
        .forever();
    nodes
}

/// Fault: N101
#[test]
fn renewal_waits_for_a_slow_node_if_another_lost_the_lock() {
    let nodes = with_slow_last_node(Nodes::start(3));
    let mgr = manager(&nodes);
    let guard = held(&nodes, &mgr, 10 * SECOND);
    nodes.server(1).cli(&["DEL", &key("x")]);
    await_renewals(&guard, 2);
    assert_eq!(nodes_holding(&nodes, &guard), [0, 1, 2]);
    guard.release().unwrap().unwrap_released();
}

/// Otherwise the lock would be lost when the next node loses it.
///
/// Fault: N110
/// Promise: P8
#[test]
fn lock_is_reacquired_on_a_slow_node() {
    let nodes = with_slow_last_node(Nodes::start(3));
    let mgr = manager(&nodes);
    let guard = held(&nodes, &mgr, 3 * SECOND);
    for node in [2, 0, 2, 1] {
        nodes.server(node).cli(&["DEL", &key("x")]);
        eventually("all nodes hold it again", TEST_TIMEOUT, || {
            guard.ensure_held().unwrap();
            nodes_holding(&nodes, &guard).len() == 3
        });
    }
    guard.release().unwrap().unwrap_released();
}

/// The first renewal uses new connections, and connecting to the slow node takes longer than the
/// replies of the others.
///
/// Fault: N101
#[test]
fn renewal_waits_for_a_connect_if_a_node_lost_the_lock() {
    let nodes = Nodes::start(3).behind_proxies(&[2]);
    let mgr = manager(&nodes);
    let guard = mgr.lock_with("x", &with_ttl(10 * SECOND)).unwrap();
    eventually("all nodes hold it", TEST_TIMEOUT, || nodes_holding(&nodes, &guard).len() == 3);
    let slow = nodes
        .proxy(2)
        .on_request(any_request, Fault::DelayReply(Duration::from_millis(100)))
        .forever();
    nodes.server(1).cli(&["DEL", &key("x")]);
    await_renewals(&guard, 1);
    assert!(slow.fired() > 1 && nodes_holding(&nodes, &guard).len() > 1);
    guard.release().unwrap().unwrap_released();
}

/// Every renewal must wait for the slow node while the restarted one is in quarantine.
///
/// Fault: N101
#[test]
fn renewal_waits_for_a_slow_node_during_a_quarantine() {
    let durable = Nodes::built(3, |_, builder| builder.durable());
    let nodes = with_slow_last_node(durable.long_running());
    let mgr = RedisMgr::new(helpers::config_medium_timeout(nodes.urls()).quarantine(600 * SECOND))
        .unwrap();
    let guard = held(&nodes, &mgr, 10 * SECOND);
    nodes.restart(1);
    assert_eq!(nodes_holding(&nodes, &guard), [0, 1, 2]);
    await_renewals(&guard, 2);
    guard.release().unwrap().unwrap_released();
    nodes.kill(0);
    // An error describes the last round, which may have ended before this node replied.
    eventually("the error names the quarantine", TEST_TIMEOUT, || {
        let error = mgr.try_lock("y").unwrap_err();
        error.nodes()[1].message.contains("votes again in")
    });
}

/// Fault: F85
#[test]
fn lease_survives_if_a_minority_grants_it_to_another() {
    let nodes = Nodes::start(5);
    let mgr = manager(&nodes);
    let guard = held(&nodes, &mgr, TTL);
    [1, 4].into_iter().for_each(|node| give_to_other(&nodes, node));
    await_renewals(&guard, 3);
    expect_quorum(&nodes, &guard);
    guard.release().unwrap().unwrap_released();
    eventually("it is released where it was held", TEST_TIMEOUT, || {
        let left = nodes.values(&key("x"));
        [0, 2, 3].into_iter().all(|node| left[node].is_none())
    });
    assert_eq!(nodes.keeping(&key("x"), "other client"), [1, 4], "another's lock was released");
}

/// Fault: F85
#[test]
fn lease_is_lost_if_a_quorum_loses_the_lock() {
    let nodes = Nodes::start(5);
    let mgr = manager(&nodes);
    let guard = held(&nodes, &mgr, LONG_TTL);
    for node in [0, 2, 4] {
        nodes.server(node).cli(&["DEL", &key("x")]);
    }
    assert_eq!(expect_loss(&guard), LockLost::Gone);
    eventually("it is released on the other nodes", CALL_LIMIT, || {
        nodes.values(&key("x")).iter().all(Option::is_none)
    });
}

/// A node that died before the lock was acquired never confirmed it.
///
/// Fault: F85
/// Promise: P7
#[test]
fn lost_lock_is_reported_as_gone_although_a_node_is_dead() {
    let nodes = Nodes::start(3);
    nodes.kill(2);
    let mgr = manager(&nodes);
    let guard = mgr.lock_with("x", &with_ttl(TTL)).unwrap();
    nodes.server(0).cli(&["DEL", &key("x")]);
    assert_eq!(expect_loss(&guard), LockLost::Gone);
}

#[test]
fn lease_is_lost_if_a_quorum_grants_it_to_another() {
    let nodes = Nodes::start(5);
    let mgr = manager(&nodes);
    let guard = held(&nodes, &mgr, LONG_TTL);
    [0, 2, 4].into_iter().for_each(|node| give_to_other(&nodes, node));
    match expect_loss(&guard) {
        LockLost::Taken { by, .. } => assert_eq!(by.id(), "other client"),
        why => panic!("{why:?}"),
    }
    eventually("it is released on the other nodes", CALL_LIMIT, || {
        let left = nodes.values(&key("x"));
        [1, 3].into_iter().all(|node| left[node].is_none())
    });
    assert_eq!(nodes.keeping(&key("x"), "other client"), [0, 2, 4]);
}

/// Two nodes have the lock for another client and one does not reply. No quorum can confirm the
/// lock or its loss, so the lease lasts until its deadline.
#[test]
fn lease_of_unknown_state_lasts_until_its_deadline() {
    let nodes = Nodes::start(5);
    let mgr = RedisMgr::new(config_short_timeout(&nodes)).unwrap();
    let guard = held(&nodes, &mgr, TTL);
    await_renewals(&guard, 1);
    [0, 2].into_iter().for_each(|node| give_to_other(&nodes, node));
    // It stops last. If its deadline had passed before, the loss on the others would end the lease.
    nodes.stop(1);
    assert_eq!(expect_loss(&guard), LockLost::Expired);
}

/// A node that is stopped between acquisition and release delays nothing, and is cleaned up when it
/// resumes.
#[test]
fn release_reaches_a_stopped_node_when_it_resumes() {
    let nodes = Nodes::start(3);
    for node in 0..3 {
        let mgr = RedisMgr::new(config_medium_timeout(&nodes)).unwrap();
        let guard = mgr.lock("x").unwrap();
        eventually("all nodes hold it", TEST_TIMEOUT, || nodes_holding(&nodes, &guard).len() == 3);
        nodes.stop(node);
        completes_within(CALL_LIMIT, "release", || guard.release().unwrap()).unwrap_released();
        let next = completes_within(CALL_LIMIT, "the next lock", || mgr.lock("x").unwrap());
        expect_quorum(&nodes, &next);
        completes_within(CALL_LIMIT, "release", || next.release().unwrap()).unwrap_released();
        nodes.cont(node);
        // The key itself expires after 30 s.
        completes_within(20 * SECOND, "the clean-up", || wait_until_free_everywhere(&nodes, "x"));
    }
}

/// No manager is left to repeat the release, but the request is already in the node's socket.
#[test]
fn release_reaches_a_stopped_node_without_its_manager() {
    let nodes = Nodes::start(3);
    let mgr = manager(&nodes);
    let guard = mgr.lock("x").unwrap();
    eventually("all nodes hold it", TEST_TIMEOUT, || nodes_holding(&nodes, &guard).len() == 3);
    nodes.stop(1);
    completes_within(CALL_LIMIT, "release", || guard.release().unwrap()).unwrap_released();
    drop(mgr);
    nodes.cont(1);
    completes_within(20 * SECOND, "the release", || wait_until_free_everywhere(&nodes, "x"));
}

#[test]
fn lock_is_reacquired_on_nodes_restarted_in_turn() {
    let nodes = Nodes::start(3);
    let (mgr, other) = (manager(&nodes), manager(&nodes));
    let guard = held(&nodes, &mgr, TTL);
    for node in [0, 1, 2] {
        nodes.restart_empty(node);
        eventually("the node holds it again", TEST_TIMEOUT, || {
            guard.ensure_held().unwrap();
            nodes_holding(&nodes, &guard).contains(&node)
        });
    }
    await_renewals(&guard, 2);
    assert!(guard.lost().is_empty());
    let token = guard.fencing_token();
    guard.release().unwrap().unwrap_released();
    wait_until_free_everywhere(&nodes, "x");
    assert!(
        completes_within(CALL_LIMIT, "the next lock", || other.lock("x").unwrap()).fencing_token()
            > token
    );
}

/// A node that re-acquires a lock stores a later token than the holder's.
///
/// Fault: N111
#[test]
fn reacquired_lock_is_listed_with_the_token_of_its_holder() {
    let nodes = Nodes::start(3);
    let mgr = manager(&nodes);
    let guard = held(&nodes, &mgr, TTL);
    let stored = |node: usize| nodes.server(node).query::<u64>(&["GET", "distlock:token:{lock:x}"]);
    nodes.server(0).cli(&["DEL", &key("x")]);
    eventually("the first node holds it again", TEST_TIMEOUT, || {
        nodes_holding(&nodes, &guard).contains(&0)
    });
    assert!(stored(0) > stored(1));
    let queries: [fn(&RedisMgr) -> LockInfo; 2] =
        [|mgr| mgr.locks("*").unwrap().remove(0), |mgr| mgr.lock_info("x").unwrap().unwrap()];
    for query in queries {
        // The query may miss a node that replies late.
        let info = eventually_some("the holder's token is listed", TEST_TIMEOUT, || {
            Some(query(&mgr)).filter(|info| info.fencing_token() == Some(guard.fencing_token()))
        });
        // A third of the ttl has passed before the node re-acquires it.
        assert!(info.holder().held_for() > Some(TTL / 4), "{info:?}");
    }
    guard.release().unwrap().unwrap_released();
}

/// The node was dead when the lock was acquired. At the end of the lease its key is deleted, long
/// before the key expires.
#[test]
fn reacquired_lock_is_released_at_max_hold() {
    let nodes = Nodes::start(3);
    nodes.kill(2);
    let mgr = manager(&nodes);
    // Time for three renewals, each of which may re-acquire it on the node.
    let guard = mgr.lock_with("x", &with_ttl(16 * SECOND).max_hold(18 * SECOND)).unwrap();
    assert_eq!(nodes_holding(&nodes, &guard), [0, 1]);
    nodes.restart(2);
    eventually("the node holds it too", TEST_TIMEOUT, || {
        guard.ensure_held().unwrap();
        nodes_holding(&nodes, &guard).contains(&2)
    });
    assert_eq!(expect_loss(&guard), LockLost::MaxHold);
    eventually("it is free on all nodes", 8 * SECOND, || {
        nodes.values(&key("x")).iter().all(Option::is_none)
    });
}

/// Returns a manager that is cleaning up at a node which does not reply, until the fault is
/// released.
fn cleaning_up(pool_size: u32) -> (Nodes, RedisMgr, ArmedFault) {
    let nodes = Nodes::start(3).behind_proxies(&[2]);
    let mgr = RedisMgr::new(config_long_timeouts(&nodes).pool_size(pool_size)).unwrap();
    warm_up(&nodes, &mgr);
    let held = nodes.proxy(2).on_request(contains("lock:x"), Fault::HoldRequest).forever();
    completes_within(CALL_LIMIT, "release", || mgr.lock("x").unwrap().release().unwrap())
        .unwrap_released();
    // First the acquire, with its release behind it; then the release repeated in the background.
    held.wait_fired_times(2);
    (nodes, mgr, held)
}

/// A lock that is acquired during the clean-up is renewed on time.
///
/// Fault: N25
#[test]
fn cleanup_at_a_hung_node_delays_no_renewal() {
    let (nodes, mgr, held) = cleaning_up(10);
    let guard = mgr.lock_with("z", &with_ttl(2 * TTL)).unwrap();
    await_renewals(&guard, 3);
    held.release();
    completes_within(20 * SECOND, "the clean-up", || wait_until_free_everywhere(&nodes, "x"));
}

/// The pool has no connection left, so the release uses a reserved one.
///
/// Fault: N25
#[test]
fn cleanup_at_a_hung_node_delays_no_release() {
    let (_nodes, mgr, held) = cleaning_up(1);
    let guard = mgr.lock_with("z", &with_ttl(30 * TTL)).unwrap();
    let _borrowed = mgr.connection().unwrap();
    completes_within(CALL_LIMIT, "release", || guard.release().unwrap()).unwrap_released();
    held.release();
}

/// Goal: re-acquiring many locks on a node that has lost them delays no renewal. Method: the node
/// is so slow that re-acquiring them in sequence would take much longer than a lease.
///
/// Fault: N26
/// Promise: P8
#[test]
fn reacquiring_many_locks_delays_no_renewal() {
    const MANY: usize = 400;
    let nodes = Nodes::start(3).behind_proxies(&[1]);
    let (mgr, watch) = (manager(&nodes), manager(&nodes));
    let guards: Vec<_> =
        (0..MANY).map(|n| mgr.lock_with(&format!("n{n}"), &with_ttl(2 * TTL)).unwrap()).collect();
    // A node that was slow for a moment is not asked, and gets these locks at the first renewal.
    let held_by = |node| nodes.server(node).query::<Vec<String>>(&["KEYS", "lock:n*"]).len();
    eventually("all nodes hold all locks", TEST_TIMEOUT, || {
        (0..3).all(|node| held_by(node) == MANY)
    });
    nodes
        .proxy(1)
        .on_request(contains("lock:n"), Fault::DelayReply(Duration::from_millis(40)))
        .forever();
    nodes.server(1).cli(&["FLUSHALL"]);
    let span = watch.lock_with("span", &with_ttl(4 * TTL).renew(false)).unwrap();
    assert!(span.lost().recv().is_ok());
    let lost: Vec<_> = guards.iter().filter_map(|guard| guard.lost().try_recv().ok()).collect();
    assert!(lost.is_empty() && guards.iter().all(LockGuard::is_held), "{lost:?}");
    eventually("some are held there again", TEST_TIMEOUT, || {
        nodes.server(1).query::<usize>(&["DBSIZE"]) >= MANY / 20
    });
}

/// Another client holds the lock on one node, and one node does not reply. Two of three may have
/// held it until the release, so this is no loss.
///
/// Fault: N30
#[test]
fn release_without_two_of_three_nodes_is_no_loss() {
    let nodes = Nodes::start(3);
    let ends = Arc::new(Ends::default());
    let mgr = RedisMgr::new(config_short_timeout(&nodes).event_handler(ends.clone())).unwrap();
    let guard = held(&nodes, &mgr, Duration::from_secs(300));
    give_to_other(&nodes, 0);
    nodes.stop(2);
    let outcome = completes_within(CALL_LIMIT, "release", || guard.release());
    assert!(matches!(outcome, Err(LockError::NoQuorum { .. })), "{outcome:?}");
    eventually("the end is reported", TEST_TIMEOUT, || ends.all() > 0);
    assert_eq!(ends.losses(), 0, "two of three nodes may have held it until then");
    nodes.cont(2);
    eventually("it is released where it was held", TEST_TIMEOUT, || {
        nodes.values(&key("x"))[1..].iter().all(Option::is_none)
    });
}

/// Counts the leases that ended by a loss, and by a release.
#[derive(Debug, Default)]
struct Ends {
    lost: AtomicUsize,
    released: AtomicUsize,
}

impl HandleEvent for Ends {
    fn lost(&self, _: &LostEvent<'_>) {
        self.lost.fetch_add(1, Ordering::SeqCst);
    }

    fn released(&self, _: &ReleasedEvent<'_>) {
        self.released.fetch_add(1, Ordering::SeqCst);
    }
}

impl Ends {
    fn losses(&self) -> usize {
        self.lost.load(Ordering::SeqCst)
    }

    fn all(&self) -> usize {
        self.losses() + self.released.load(Ordering::SeqCst)
    }
}

/// The renewer gives up re-acquiring a lock that is released meanwhile; it must not close the
/// connection, because the node is not at fault.
///
/// Fault: N46
#[test]
fn release_before_reacquisition_keeps_the_connection() {
    let nodes = Nodes::start(3).behind_proxies(&[0]);
    let mgr = RedisMgr::new(config_long_timeouts(&nodes).ttl(6 * SECOND)).unwrap();
    let [a, b] = ["aa", "bb"].map(|name| mgr.lock(name).unwrap());
    eventually("all nodes hold both", TEST_TIMEOUT, || {
        [&a, &b].iter().all(|guard| nodes_holding(&nodes, guard).len() == 3)
    });
    let reacquires =
        |words: &[Vec<u8>]| contains("lock:aa")(words) && contains("distlock:queue")(words);
    let held = nodes.proxy(0).on_request(reacquires, Fault::HoldRequest);
    await_renewals(&a, 1);
    let before = mgr.metrics().reconnected();
    nodes.server(0).cli(&["DEL", &key("aa"), &key("bb")]);
    held.wait_fired();
    b.release().unwrap().unwrap_released();
    held.release();
    await_renewals(&a, 2);
    assert_eq!(mgr.metrics().reconnected(), before);
}
