//! Too few nodes reply: nobody gets the lock, every call reports why, and a holder considers its
//! lease valid only until its deadline.

use std::time::Duration;

use distlock::{LockError, LockGuard, LockLost, RedisMgr, Vote};

use super::{
    TTL, await_renewals, config_long_timeouts, config_medium_timeout, config_short_timeout,
    expect_no_quorum, expect_quorum, key, manager, nodes_holding, votes,
    wait_until_free_everywhere,
};
use crate::{
    helpers::{
        CALL_LIMIT, SHORT_TIMEOUT, UnwrapReleased, completes_within, expect_loss, spawn_call,
        timed, with_ttl,
    },
    support::{Nodes, TEST_TIMEOUT, eventually},
    worker::work,
};

/// Calls do not wait for a timeout when connections are refused. Votes of the other nodes are
/// released.
///
/// Fault: F80
/// Promise: P9
#[test]
fn calls_without_a_quorum_of_live_nodes_fail_at_once() {
    let nodes = Nodes::start(5);
    let (early, mgr) = (manager(&nodes), manager(&nodes));
    mgr.lock("x").unwrap().release().unwrap().unwrap_released();
    for node in [0, 2, 4] {
        nodes.kill(node);
    }
    // A manager with open connections, one that has never used its connections, and a new one.
    for mgr in [&mgr, &early, &manager(&nodes)] {
        // The operation timeout of these managers is much longer than the limit.
        let (error, took) = timed(|| mgr.try_lock("x").unwrap_err());
        assert!(took < CALL_LIMIT, "{took:?}: {error}");
        let votes = expect_no_quorum(&nodes, &error);
        assert_eq!(
            (votes[0], votes[2], votes[4]),
            (Vote::Unknown, Vote::Unknown, Vote::Unknown),
            "{error}"
        );
        assert!(error.to_string().contains("refused"), "{error}");
        wait_until_free_everywhere(&nodes, "x");
    }
    let error = completes_within(CALL_LIMIT, "reading the holder", || mgr.holder("x").unwrap_err());
    expect_no_quorum(&nodes, &error);
    let error = completes_within(CALL_LIMIT, "a ping", || mgr.ping().unwrap_err());
    expect_no_quorum(&nodes, &error);
    let error =
        completes_within(CALL_LIMIT, "a forced release", || mgr.force_release("x").unwrap_err());
    expect_no_quorum(&nodes, &error);
    assert!(error.to_string().starts_with("could not release lock \"x\""), "{error}");
}

/// Fault: F80
#[test]
fn calls_without_a_responsive_quorum_wait_one_timeout() {
    let nodes = Nodes::start(5);
    let mgr = RedisMgr::new(config_short_timeout(&nodes)).unwrap();
    mgr.lock("x").unwrap().release().unwrap().unwrap_released();
    for node in [0, 1, 2] {
        nodes.stop(node);
    }
    for _ in 0..3 {
        let error =
            completes_within(10 * SHORT_TIMEOUT, "try_lock", || mgr.try_lock("x").unwrap_err());
        let votes = expect_no_quorum(&nodes, &error);
        assert_eq!(votes[..3], [Vote::Unknown; 3], "{error}");
        wait_until_free_everywhere(&nodes, "x");
    }
    let wait = Duration::from_millis(700);
    let (error, took) = timed(|| mgr.try_lock_for("x", wait).unwrap_err());
    expect_no_quorum(&nodes, &error);
    assert!(took >= wait && took < wait + 10 * SHORT_TIMEOUT, "{took:?}");
    // A waiter without a limit gets the lock as soon as one node runs again.
    let waiting =
        spawn_call(&mgr, "x", |mgr, name| mgr.lock_with(name, &with_ttl(20 * TTL / 2)).unwrap());
    nodes.cont(1);
    let guard = completes_within(TEST_TIMEOUT, "the lock", || waiting.join().unwrap());
    expect_quorum(&nodes, &guard);
    nodes.cont(0);
    nodes.cont(2);
    guard.release().unwrap().unwrap_released();
    wait_until_free_everywhere(&nodes, "x");
}

/// Fault: F81
#[test]
fn half_of_an_even_number_of_nodes_is_no_quorum() {
    for count in [2, 4] {
        let nodes = Nodes::start(count);
        let mgr = manager(&nodes);
        mgr.lock("x").unwrap().release().unwrap().unwrap_released();
        (0..count / 2).for_each(|node| nodes.kill(node));
        let (error, took) = timed(|| mgr.try_lock("x").unwrap_err());
        assert!(took < CALL_LIMIT, "{took:?}: {error}");
        expect_no_quorum(&nodes, &error);
        wait_until_free_everywhere(&nodes, "x");
        nodes.restart_empty(0);
        let guard = mgr.lock("x").unwrap();
        expect_quorum(&nodes, &guard);
    }
}

/// If each of two holders has half of the nodes, neither has the lock, and calls report
/// contention, not a missing quorum.
///
/// Fault: F82
/// Promise: P9
#[test]
fn two_holders_with_half_of_the_nodes_are_contention() {
    let nodes = Nodes::start(4);
    let mgr = RedisMgr::new(config_medium_timeout(&nodes)).unwrap();
    for node in 0..4 {
        let id = ["one", "another"][node / 2];
        nodes.server(node).query::<()>(&["SET", &key("x"), id, "PX", "600000"]);
    }
    let try_lock =
        || completes_within(20 * SHORT_TIMEOUT, "try_lock", || mgr.try_lock("x").unwrap_err());
    let error = try_lock();
    assert!(error.is_contended(), "{error:?}");
    let error = completes_within(20 * SHORT_TIMEOUT, "the wait", || {
        mgr.try_lock_for("x", SHORT_TIMEOUT).unwrap_err()
    });
    assert!(error.is_contended(), "{error:?}");
    nodes.server(0).cli(&["DEL", &key("x")]);
    nodes.server(3).cli(&["DEL", &key("x")]);
    let error = try_lock();
    assert!(error.is_contended(), "{error:?}");
    nodes.server(2).cli(&["DEL", &key("x")]);
    let guard = completes_within(TEST_TIMEOUT, "lock", || mgr.lock("x").unwrap());
    expect_quorum(&nodes, &guard);
}

/// How a node fails, and how it recovers.
type NodeFault = (fn(&Nodes, usize), fn(&Nodes, usize));

/// Goal: if most nodes fail, the lease stays valid exactly until its deadline, and is then lost
/// once. Method: read the deadline after two renewals have failed, when no earlier renewal can be
/// in flight.
///
/// Fault: F86
/// Promise: P2
#[test]
fn lease_without_a_quorum_is_valid_until_its_deadline() {
    let faults: [NodeFault; 2] = [(Nodes::kill, Nodes::restart_empty), (Nodes::stop, Nodes::cont)];
    for (fail, recover) in faults {
        let nodes = Nodes::start(5);
        expect_valid_until_deadline(
            &nodes,
            |node| fail(&nodes, node),
            |node| recover(&nodes, node),
        );
    }
}

fn expect_valid_until_deadline(nodes: &Nodes, fail: impl Fn(usize), recover: impl Fn(usize)) {
    const FAILED: [usize; 3] = [0, 1, 3];
    // Time for two renewals to fail on a slow machine.
    let ttl = 2 * TTL;
    let mgr = RedisMgr::new(config_short_timeout(nodes)).unwrap();
    let guard = mgr.lock_with("x", &with_ttl(ttl)).unwrap();
    await_renewals(&guard, 1);
    FAILED.into_iter().for_each(fail);
    let renewed = || nodes.server(2).calls("pexpire");
    let before = renewed();
    eventually("two more renewals reach a live node", TEST_TIMEOUT, || renewed() >= before + 2);
    let left = guard.remaining();
    assert!(left > Duration::ZERO, "the machine is too slow for this ttl");
    let ((), took) = timed(|| watch_until_lost(&guard, left));
    assert!(took >= left, "lost {:?} before its deadline", left - took);
    assert_eq!(expect_loss(&guard), LockLost::Expired);
    assert!(
        completes_within(20 * SHORT_TIMEOUT, "try_lock", || mgr.try_lock("x").unwrap_err())
            .is_unavailable()
    );
    FAILED.into_iter().for_each(recover);
    let next = completes_within(TEST_TIMEOUT, "lock", || mgr.lock("x").unwrap());
    assert!(next.fencing_token() > guard.fencing_token());
    expect_quorum(nodes, &next);
    // The recovered nodes do not revive the lease.
    assert!(!guard.is_held());
}

/// Waits for the loss. The deadline must not move: the time left shrinks by at least the time that
/// has passed.
#[track_caller]
fn watch_until_lost(guard: &LockGuard, left: Duration) {
    let mut passed = Duration::ZERO;
    while guard.is_held() {
        let ((), span) = timed(|| work(Duration::from_millis(5)));
        passed += span;
        let now = guard.remaining();
        assert!(now.is_zero() || passed + now <= left, "{now:?} left after {passed:?} of {left:?}");
    }
}

/// Fault: F86
#[test]
fn lease_survives_if_the_quorum_returns_before_its_deadline() {
    let nodes = Nodes::start(5);
    let mgr = RedisMgr::new(config_short_timeout(&nodes)).unwrap();
    let guard = mgr.lock_with("x", &with_ttl(2 * TTL)).unwrap();
    await_renewals(&guard, 1);
    [0, 1, 2].into_iter().for_each(|node| nodes.stop(node));
    // The renewal that was seen above may not have reached this node yet.
    let before = nodes.server(3).calls("pexpire");
    eventually("a renewal has failed", TEST_TIMEOUT, || {
        nodes.server(3).calls("pexpire") >= before + 2
    });
    [0, 1, 2].into_iter().for_each(|node| nodes.cont(node));
    await_renewals(&guard, 2);
    assert!(guard.lost().is_empty());
    guard.release().unwrap().unwrap_released();
    wait_until_free_everywhere(&nodes, "x");
}

/// A release that reaches only a minority reports an error. The manager cleans up the other nodes
/// when they reply again, long before the key expires.
#[test]
fn release_without_a_quorum_fails_and_is_completed_later() {
    let nodes = Nodes::start(5);
    let mgr = RedisMgr::new(config_long_timeouts(&nodes).operation_timeout(SHORT_TIMEOUT)).unwrap();
    let guard = mgr.lock("x").unwrap();
    [0, 1, 2].into_iter().for_each(|node| nodes.stop(node));
    let error = completes_within(20 * SHORT_TIMEOUT, "release", || guard.release().unwrap_err());
    expect_no_quorum(&nodes, &error);
    [0, 1, 2].into_iter().for_each(|node| nodes.cont(node));
    let ((), took) = timed(|| wait_until_free_everywhere(&nodes, "x"));
    assert!(took < Duration::from_secs(20), "the key was left to its ttl of 30 s: {took:?}");
}

#[test]
fn held_lock_is_reported_with_the_reply_of_each_node() {
    let nodes = Nodes::start(5);
    let (mgr, other) = (manager(&nodes), manager(&nodes));
    assert_eq!(other.holder("x").unwrap(), None);
    let guard = mgr.lock("x").unwrap();
    eventually("all nodes have it", CALL_LIMIT, || nodes_holding(&nodes, &guard).len() == 5);

    let holder = other.holder("x").unwrap().unwrap();
    assert_eq!(holder.id(), guard.id().as_str());
    let votes_seen = votes(&nodes, holder.nodes());
    assert!(votes_seen.iter().filter(|vote| **vote == Vote::Yes).count() >= 3, "{votes_seen:?}");
    let held =
        holder.nodes().iter().filter(|answer| answer.message.starts_with("held by ")).count();
    assert!(held >= 3, "{:?}", holder.nodes());

    let error = other.try_lock("x").unwrap_err();
    let LockError::Held { holder, .. } = &error else { panic!("{error:?}") };
    assert_eq!(holder.id(), guard.id().as_str());
    let votes_seen = votes(&nodes, holder.nodes());
    assert!(votes_seen.iter().filter(|vote| **vote == Vote::No).count() >= 3, "{votes_seen:?}");
    assert_eq!(error.nodes(), holder.nodes());
    assert!(error.is_contended() && !error.is_unavailable());

    guard.release().unwrap().unwrap_released();
    wait_until_free_everywhere(&nodes, "x");
    assert_eq!(other.holder("x").unwrap(), None);
    drop(other.try_lock("x").unwrap());
}
