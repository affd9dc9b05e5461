//! Nodes that fail during a call: stalled connects, back-off, slow votes and slow releases.

use std::time::Duration;

use distlock::{LockGuard, RedisMgr};

use super::{
    TTL, config_long_timeouts, key, late_replies::releases_x, manager, nodes_holding, quorum,
    wait_until_free_everywhere, warm_up,
};
use crate::{
    helpers::{
        CALL_LIMIT, SECOND, UnwrapReleased, completes_within, is_renewal, pttl, spawn_call,
        with_ttl,
    },
    support::{
        ArmedFault, Fault, Nodes, TEST_TIMEOUT, any_request, contains, eventually, eventually_some,
    },
};

/// A node accepts connections and does not reply to the handshake. Each connection attempt costs a
/// thread and a socket until its deadline, so there must be few.
///
/// Fault: N60
/// Promise: P11
#[test]
fn stalled_node_gets_few_connection_attempts() {
    let nodes = Nodes::start(3).behind_proxies(&[2]);
    let mgr = manager(&nodes);
    drop(mgr.lock("x").unwrap());
    nodes.proxy(2).mute_new();
    nodes.proxy(2).reset_all();
    eventually("a connection attempt is pending", TEST_TIMEOUT, || {
        mgr.lock("x").unwrap().release().unwrap().unwrap_released();
        nodes.proxy(2).connections() > 0
    });
    for _ in 0..100 {
        mgr.lock("x").unwrap().release().unwrap().unwrap_released();
    }
    let pending = nodes.proxy(2).connections();
    assert!(pending <= 20, "{pending} connection attempts are pending");
    nodes.proxy(2).heal();
    eventually("it is asked again", TEST_TIMEOUT, || {
        let guard = mgr.lock("x").unwrap();
        nodes_holding(&nodes, &guard).len() == 3
    });
}

/// Releases a lock that all nodes hold, when the first node has died and the connection to the last
/// one breaks during the release. The fault makes one of the others slow.
fn release_with_failing_nodes(add_fault: impl FnOnce(&Nodes)) {
    let nodes = Nodes::start(3).behind_proxies(&[1, 2]);
    let mgr = manager(&nodes);
    let guard = eventually_some("all nodes hold it", TEST_TIMEOUT, || {
        let guard = mgr.lock("x").unwrap();
        (nodes_holding(&nodes, &guard) == [0, 1, 2]).then_some(guard)
    });
    nodes.kill(0);
    let reset = nodes.proxy(2).on_request(releases_x, Fault::ResetAfterRequest);
    add_fault(&nodes);
    completes_within(CALL_LIMIT, "release", || guard.release().unwrap()).unwrap_released();
    assert_eq!(reset.fired(), 1);
}

const RELEASE_DELAY: Duration = Duration::from_millis(300);

/// With two of three failed there is no quorum. One of these two can be asked again, and the slow
/// reply of the third must count then too.
///
/// Fault: N86
/// Promise: P9
#[test]
fn release_reads_slow_replies_before_it_retries() {
    release_with_failing_nodes(|nodes| {
        drop(nodes.proxy(1).on_request(releases_x, Fault::DelayReply(RELEASE_DELAY)).forever())
    });
}

/// The slow reply is that of the repeated request.
///
/// Fault: N86
#[test]
fn release_reads_slow_replies_to_its_retry() {
    release_with_failing_nodes(|nodes| {
        drop(nodes.proxy(2).on_request(releases_x, Fault::DelayReply(RELEASE_DELAY)).forever())
    });
}

/// Three nodes, and a manager with connections to all of them.
fn connected_nodes() -> (Nodes, RedisMgr) {
    let nodes = Nodes::start(3).behind_proxies(&[0, 1, 2]);
    let mgr = manager(&nodes);
    warm_up(&nodes, &mgr);
    (nodes, mgr)
}

const LOADING: &[u8] = b"-LOADING Redis is loading the dataset in memory\r\n";

/// Goal: a node in back-off is asked if the other nodes are no quorum. Method: one node fails until
/// it is in back-off, then it is healthy again. Another node reports that it is loading, which is
/// no reason to repeat the request.
fn expect_back_off_node_to_be_asked(call: impl Fn(&RedisMgr)) {
    let (nodes, mgr) = connected_nodes();
    let fails = nodes.proxy(2).on_request(any_request, Fault::ResetBeforeRequest).forever();
    eventually("it fails repeatedly", TEST_TIMEOUT, || {
        mgr.lock("warm").unwrap().release().unwrap().unwrap_released();
        fails.fired() >= 6
    });
    fails.disarm();
    let loading =
        nodes.proxy(1).on_request(any_request, Fault::ReplaceReply(LOADING.to_vec())).forever();
    completes_within(CALL_LIMIT, "the call", || call(&mgr));
    loading.disarm();
}

/// Fault: N115
/// Promise: P9
#[test]
fn node_in_back_off_is_asked_if_a_quorum_needs_it() {
    let calls: [fn(&RedisMgr); 3] = [
        |mgr| mgr.try_lock("x").unwrap().release().unwrap().unwrap_released(),
        |mgr| assert!(mgr.holder("x").unwrap().is_none()),
        |mgr| assert!(mgr.ping().unwrap() > Duration::ZERO),
    ];
    for call in calls {
        expect_back_off_node_to_be_asked(call);
    }
}

/// Goal: a call reconnects to a node whose connection broke, instead of waiting for an unresponsive
/// node. Method: one node has been silent long enough to be asked only if a quorum needs it,
/// and the connection to another one is reset.
///
/// Fault: N115
#[test]
fn unresponsive_node_not_awaited_if_quorum_can_connect() {
    let (nodes, mgr) = connected_nodes();
    let silent = nodes.proxy(2).on_request(any_request, Fault::DropReply).forever();
    eventually("it is not asked any more", TEST_TIMEOUT, || {
        let before = silent.fired();
        mgr.lock("warm").unwrap().release().unwrap().unwrap_released();
        silent.fired() == before
    });
    let reset = nodes.proxy(1).on_request(any_request, Fault::ResetAfterRequest);
    let guard = completes_within(CALL_LIMIT, "lock", || {
        mgr.lock_with("x", &with_ttl(60 * SECOND).wait(Duration::ZERO)).unwrap()
    });
    assert_eq!(reset.fired(), 1);
    silent.disarm();
    guard.release().unwrap().unwrap_released();
}

/// The lease must end before its keys expire on a quorum. The keys are read first, so that a slow
/// machine cannot cause a failure.
#[track_caller]
fn expect_deadline_before_quorum_expiry(nodes: &Nodes, guard: &LockGuard) {
    let left = |node| pttl(nodes.server(node), &key(guard.name()));
    let mut keys: Vec<_> = (0..nodes.len()).map(left).collect();
    keys.sort();
    let (key_left, lease_left) = (keys[nodes.len() - quorum(nodes)], guard.remaining());
    // A server reports whole milliseconds.
    assert!(
        lease_left <= Duration::from_millis(u64::try_from(key_left + 1).unwrap_or(0)),
        "{lease_left:?} of {keys:?} ms"
    );
}

/// Goal: the time that votes take is subtracted from the lease. Method: two of three nodes have
/// granted the lock, and their replies come when a quarter of the ttl has passed.
///
/// Fault: F89
#[test]
fn slow_votes_shorten_the_lease() {
    let (nodes, mgr) = connected_nodes();
    let late =
        [1, 2].map(|node| nodes.proxy(node).on_request(contains("lock:x"), Fault::HoldReply));
    // A renewal would extend the keys; on a slow machine one is due before the keys are read.
    let renewals = [0, 1, 2].map(|node| {
        nodes.proxy(node).on_request(is_renewal("lock:x"), Fault::HoldRequest).forever()
    });
    let options = with_ttl(12 * SECOND).wait(Duration::ZERO);
    let acquiring = spawn_call(&mgr, "x", move |mgr, name| mgr.lock_with(name, &options));
    eventually("a vote is delayed", TEST_TIMEOUT, || late.iter().any(|late| late.fired() > 0));
    let left = |node| pttl(nodes.server(node), &key("x"));
    eventually("a quarter of the ttl has passed", TEST_TIMEOUT, || {
        (0..3).all(|node| left(node) < 9_000)
    });
    late.iter().for_each(ArmedFault::release);
    match acquiring.join().unwrap() {
        Ok(guard) => expect_deadline_before_quorum_expiry(&nodes, &guard),
        Err(error) => assert!(error.is_unavailable(), "{error:?}"),
    }
    renewals.iter().for_each(ArmedFault::release);
}

/// Goal: votes that take more than a third of the ttl are not awaited; they are released, and
/// requested again. Method: the replies of two of three nodes do not come until then.
///
/// Fault: F89
#[test]
fn late_votes_are_released_and_requested_again() {
    let (nodes, mgr) = connected_nodes();
    let late =
        [1, 2].map(|node| nodes.proxy(node).on_request(contains("lock:x"), Fault::HoldReply));
    let releases = [1, 2]
        .map(|node| nodes.proxy(node).on_request(releases_x, Fault::DelayReply(Duration::ZERO)));
    let acquiring =
        spawn_call(&mgr, "x", |mgr, name| mgr.lock_with(name, &with_ttl(TTL).wait(Duration::ZERO)));
    match acquiring.join().unwrap() {
        Ok(guard) => {
            // A vote is released before its node is asked again, and one of the two is needed.
            assert!(
                releases.iter().any(|release| release.fired() > 0),
                "a late vote was not released"
            );
            expect_deadline_before_quorum_expiry(&nodes, &guard);
        }
        // On a machine that stalled meanwhile.
        Err(error) => assert!(error.is_unavailable(), "{error:?}"),
    }
    late.iter().for_each(ArmedFault::release);
    wait_until_free_everywhere(&nodes, "x");
}

/// Goal: a node is asked again although the release of its vote is confirmed too slowly to be
/// awaited. Method: another client holds the lock on the first node, the last node is dead, and the
/// second node's replies to releases are delayed.
///
/// Fault: N113
/// Promise: P9
#[test]
fn node_that_confirms_releases_slowly_is_asked_again() {
    let nodes = Nodes::start(3).behind_proxies(&[1]);
    let mgr = RedisMgr::new(config_long_timeouts(&nodes).operation_timeout(2 * SECOND)).unwrap();
    warm_up(&nodes, &mgr);
    nodes.kill(2);
    nodes.server(0).query::<()>(&["SET", &key("x"), "other client", "PX", "600000"]);
    let slow = nodes
        .proxy(1)
        .on_request(releases_x, Fault::DelayReply(Duration::from_millis(300)))
        .forever();
    let waiting = spawn_call(&mgr, "x", |mgr, name| mgr.try_lock_for(name, 20 * SECOND));
    slow.wait_fired();
    nodes.server(0).query::<()>(&["DEL", &key("x")]);
    let guard = waiting.join().unwrap().unwrap();
    assert_eq!(nodes_holding(&nodes, &guard), [0, 1]);
    slow.disarm();
    slow.release();
}
