//! Late requests and replies: what an abandoned request acquires on a node is cleaned up there.

use std::time::Duration;

use distlock::{LockLost, RedisMgr};

use super::{
    config_long_timeouts, config_medium_timeout, config_short_timeout, expect_no_quorum,
    expect_quorum, key, manager, nodes_holding, wait_until_free_everywhere, warm_up,
};
use crate::{
    helpers::{
        CALL_LIMIT, SECOND, SHORT_TIMEOUT, UnwrapReleased, completes_within, expect_loss,
        queue_length, spawn_call, timed, token_key, with_ttl,
    },
    support::{
        ArmedFault, Fault, Nodes, TEST_TIMEOUT, Worker, contains, eventually, eventually_some,
    },
};

/// Starts five nodes, of which another client holds a quorum. Once the test has stopped the first
/// node, an acquisition is rejected without waiting for it.
fn held_without_first_node() -> Nodes {
    let nodes = Nodes::start(5);
    hold(&nodes);
    nodes
}

const HELD: [usize; 3] = [1, 2, 3];

fn hold(nodes: &Nodes) {
    for node in HELD {
        nodes.server(node).query::<()>(&["SET", &key("x"), "other client", "PX", "600000"]);
    }
}

/// Resumes the first node, which executes the requests in its sockets. The lock must then become
/// free on this node.
#[track_caller]
fn expect_cleaned_up(nodes: &Nodes, before: u64) {
    nodes.cont(0);
    eventually("the requests are executed", TEST_TIMEOUT, || scripts(nodes, 0) > before);
    let left = || [nodes.values(&key("x"))[0].clone(), nodes.values(&key("x"))[4].clone()];
    // Without a clean-up, the key expires after 30 s.
    completes_within(20 * SECOND, "the clean-up", || {
        eventually("nothing is left", TEST_TIMEOUT, || left() == [None, None])
    });
    assert_eq!(nodes.keeping(&key("x"), "other client"), HELD);
}

/// Number of scripts that this node has executed.
pub(super) fn scripts(nodes: &Nodes, node: usize) -> u64 {
    let calls = nodes.server(node).commandstats();
    ["eval", "evalsha"].iter().filter_map(|command| calls.get(*command)).sum()
}

/// The vote of a node whose reply is late is cleaned up, with the manager still in use or dropped.
///
/// Fault: F89
/// Promise: P9
#[test]
fn late_vote_of_a_rejected_acquire_is_cleaned_up() {
    for drop_manager in [false, true] {
        let nodes = held_without_first_node();
        let mut mgr = Some(manager(&nodes));
        warm_up(&nodes, mgr.as_ref().unwrap());
        let before = scripts(&nodes, 0);
        nodes.stop(0);
        let error = completes_within(CALL_LIMIT, "try_lock", || {
            mgr.as_ref().unwrap().try_lock("x").unwrap_err()
        });
        assert!(error.is_contended(), "{error:?}");
        if drop_manager {
            mgr.take();
        }
        expect_cleaned_up(&nodes, before);
    }
}

/// The process is killed while it waits in another node's queue.
#[test]
fn late_vote_for_a_killed_process_is_void() {
    let nodes = held_without_first_node();
    let mut worker: Worker = super::spawn_worker(&nodes, &[]);
    worker.send("lock y");
    super::expect_locked(&worker, "y");
    let before = scripts(&nodes, 0);
    nodes.stop(0);
    worker.send("lock x");
    eventually("the worker waits", TEST_TIMEOUT, || {
        (1..5).any(|node| queue_length(nodes.server(node), "x") == 1)
    });
    worker.kill();
    expect_cleaned_up(&nodes, before);
}

/// Three nodes are stopped, so that there is no quorum. Requests that they execute later have
/// expired, and change nothing.
#[test]
fn request_executed_after_its_expiry_leaves_nothing() {
    let nodes = Nodes::start(5);
    let mgr = RedisMgr::new(config_short_timeout(&nodes)).unwrap();
    warm_up(&nodes, &mgr);
    let before: Vec<_> = (0..5).map(|node| scripts(&nodes, node)).collect();
    [0, 1, 2].into_iter().for_each(|node| nodes.stop(node));
    let error = completes_within(20 * SHORT_TIMEOUT, "try_lock", || mgr.try_lock("x").unwrap_err());
    expect_no_quorum(&nodes, &error);
    drop(mgr);
    [0, 1, 2].into_iter().for_each(|node| nodes.cont(node));
    eventually("the stopped nodes have executed the requests", TEST_TIMEOUT, || {
        [0, 1, 2].into_iter().all(|node| scripts(&nodes, node) > before[node])
    });
    let left = nodes.values(&key("x"));
    let ((), took) = timed(|| wait_until_free_everywhere(&nodes, "x"));
    assert!(took < 20 * SECOND, "the key expired instead of being cleaned up: {left:?}");
}

/// The request is delayed on its way to one node, while the lock is acquired and released on the
/// other nodes.
#[test]
fn request_that_arrives_after_the_release_leaves_nothing() {
    let nodes = Nodes::start(5).behind_proxies(&[2]);
    let mgr = RedisMgr::new(config_long_timeouts(&nodes)).unwrap();
    warm_up(&nodes, &mgr);
    let held = nodes.proxy(2).on_request(contains("lock:x"), Fault::HoldRequest);
    let guard = completes_within(CALL_LIMIT, "lock", || mgr.lock("x").unwrap());
    held.wait_fired();
    completes_within(CALL_LIMIT, "release", || guard.release().unwrap()).unwrap_released();
    let before = scripts(&nodes, 2);
    held.release();
    eventually("the request has arrived", TEST_TIMEOUT, || scripts(&nodes, 2) > before);
    completes_within(20 * SECOND, "the clean-up", || wait_until_free_everywhere(&nodes, "x"));
    let next = mgr.lock("x").unwrap();
    expect_quorum(&nodes, &next);
}

/// Replies of two nodes are lost with their connections, so that it is unknown whether they granted
/// the lock.
#[test]
fn vote_with_a_lost_reply_is_cleaned_up() {
    let nodes = Nodes::start(5).behind_proxies(&[0, 4]);
    let mgr = RedisMgr::new(config_medium_timeout(&nodes)).unwrap();
    eventually("all are connected", TEST_TIMEOUT, || {
        nodes_holding(&nodes, &mgr.lock("y").unwrap()).len() == nodes.len()
    });
    hold(&nodes);
    let resets = [0, 4]
        .map(|node| nodes.proxy(node).on_request(contains("lock:x"), Fault::ResetAfterRequest));
    // Repeated, because an acquisition does not ask a node whose last reply was slow.
    eventually("both replies were lost", TEST_TIMEOUT, || {
        let error = completes_within(CALL_LIMIT, "try_lock", || mgr.try_lock("x").unwrap_err());
        assert!(error.is_contended(), "{error:?}");
        resets.iter().all(|reset| reset.fired() > 0)
    });
    completes_within(20 * SECOND, "the clean-up", || {
        eventually("nothing is left", TEST_TIMEOUT, || {
            let left = nodes.values(&key("x"));
            left[0].is_none() && left[4].is_none()
        });
    });
}

/// Returns a manager whose first request for a lock also asks for a queue entry, because the
/// manager has waited before. The returned fault delays the first request for lock `x` to the
/// first node.
fn enqueueing(nodes: &Nodes) -> (RedisMgr, ArmedFault) {
    enqueueing_with(nodes, 10)
}

fn enqueueing_with(nodes: &Nodes, pool_size: u32) -> (RedisMgr, ArmedFault) {
    let (mgr, other) =
        (RedisMgr::new(config_long_timeouts(nodes).pool_size(pool_size)).unwrap(), manager(nodes));
    let guard = other.lock("warm").unwrap();
    assert!(mgr.try_lock_for("warm", SECOND).unwrap_err().is_timeout());
    guard.release().unwrap().unwrap_released();
    let held = nodes.proxy(0).on_request(contains("lock:x"), Fault::HoldRequest);
    (mgr, held)
}

/// Lets the delayed request arrive. Another client holds the lock by now, so the request adds a
/// queue entry for an acquisition whose lease has already ended.
fn deliver_and_await_entry(nodes: &Nodes, held: &ArmedFault) {
    let commands = nodes.server(0).monitor();
    held.release();
    commands.wait_for("lua] \"RPUSH\"");
}

/// Waits until the queue is empty. The queue key expires much later, so a clean-up must remove the
/// entry.
fn await_empty_queue(nodes: &Nodes) {
    eventually("the queue entry is removed", 40 * SECOND, || {
        queue_length(nodes.server(0), "x") == 0
    });
}

#[test]
fn queue_entry_that_arrives_after_the_release_is_removed() {
    let nodes = Nodes::start(3).behind_proxies(&[0]);
    let (mgr, held) = enqueueing(&nodes);
    let guard = mgr.lock_with("x", &with_ttl(60 * SECOND)).unwrap();
    held.wait_fired();
    guard.release().unwrap().unwrap_released();
    let next = manager(&nodes).lock("x").unwrap();
    deliver_and_await_entry(&nodes, &held);
    await_empty_queue(&nodes);
    expect_quorum(&nodes, &next);
}

/// The lease has ended at its maximum hold time. The entry arrives before the guard is dropped, or
/// after.
#[test]
fn queue_entry_that_arrives_after_the_loss_is_removed() {
    for before_the_drop in [true, false] {
        let nodes = Nodes::start(3).behind_proxies(&[0]);
        let (mgr, held) = enqueueing(&nodes);
        let guard = mgr.lock_with("x", &with_ttl(60 * SECOND).max_hold(SECOND)).unwrap();
        held.wait_fired();
        assert_eq!(expect_loss(&guard), LockLost::MaxHold);
        let next = manager(&nodes).lock("x").unwrap();
        if before_the_drop {
            deliver_and_await_entry(&nodes, &held);
            drop(guard);
        } else {
            let removals = || nodes.server(0).commandstats().get("lrem").copied().unwrap_or(0);
            let before = removals();
            drop(guard);
            eventually("a clean-up has arrived first", TEST_TIMEOUT, || removals() > before);
            deliver_and_await_entry(&nodes, &held);
        }
        await_empty_queue(&nodes);
        expect_quorum(&nodes, &next);
    }
}

/// Goal: a node does not count for a lease while a release in flight could delete the lock there.
/// Method: delay the release of a vote from a lost round. Then the lock is acquired with the two
/// other nodes, one of which dies.
///
/// Promise: P9
#[test]
fn node_with_a_release_in_flight_does_not_carry_a_lease() {
    let nodes = Nodes::start(3).behind_proxies(&[2]);
    let mgr = manager(&nodes);
    warm_up(&nodes, &mgr);
    for node in [0, 1] {
        nodes.server(node).query::<()>(&["SET", &key("x"), "other client", "PX", "600000"]);
    }
    let held = nodes.proxy(2).on_request(releases_x, Fault::HoldRequest);
    let waiting = spawn_call(&mgr, "x", |mgr, name| mgr.lock_with(name, &with_ttl(18 * SECOND)));
    held.wait_fired();
    [1, 0].into_iter().for_each(|node| drop(nodes.server(node).cli(&["DEL", &key("x")])));
    let guard = waiting.join().unwrap().unwrap();
    assert_eq!(
        nodes_holding(&nodes, &guard),
        [0, 1, 2],
        "the vote of the last node has been released"
    );
    nodes.kill(0);
    assert_eq!(expect_loss(&guard), LockLost::Expired);
    // Of two live nodes only one counts, so the renewal has failed.
    assert_ne!(mgr.metrics().renewals_failed(), 0);
    held.release();
}

/// The release overtakes the acquire request, because it uses another connection: one from the
/// pool, or a reserved one.
///
/// Fault: N34
/// Promise: P4
#[test]
fn release_over_another_connection_removes_the_queue_entry() {
    for pool_size in [4, 1] {
        let nodes = Nodes::start(3).behind_proxies(&[0]);
        let (mgr, held) = enqueueing_with(&nodes, pool_size);
        let guard = mgr.lock("x").unwrap();
        held.wait_fired();
        let borrowed = mgr.connection().unwrap();
        guard.release().unwrap().unwrap_released();
        drop(borrowed);
        let next = manager(&nodes).lock("x").unwrap();
        deliver_and_await_entry(&nodes, &held);
        await_empty_queue(&nodes);
        expect_quorum(&nodes, &next);
    }
}

/// Goal: an unread reply is not forgotten if the other nodes are asked in several rounds. Method:
/// the network is so slow that a grant is confirmed at once, and the nodes return different tokens.
/// On the last node, the release overtakes the first request.
///
/// Fault: N57
#[test]
fn request_from_before_the_token_agreement_leaves_nothing() {
    let nodes = Nodes::start(3).behind_proxies(&[0, 1, 2]);
    let mgr = RedisMgr::new(config_medium_timeout(&nodes).claim_window(SECOND)).unwrap();
    let holder = manager(&nodes).lock("x").unwrap();
    let waiting = spawn_call(&mgr, "x", |mgr, name| mgr.lock_with(name, &with_ttl(60 * SECOND)));
    eventually("the waiter is queued", TEST_TIMEOUT, || queue_length(nodes.server(0), "x") == 1);
    nodes.server(0).query::<()>(&["SET", &token_key("x"), &(1_u64 << 52).to_string()]);
    let is_acquire = |words: &[Vec<u8>]| {
        ["lock:x", "try"].iter().all(|word| words.iter().any(|other| other == word.as_bytes()))
    };
    let held = nodes.proxy(2).on_request(is_acquire, Fault::HoldRequest);
    for node in [0, 1] {
        nodes
            .proxy(node)
            .on_request(contains("lock:x"), Fault::DelayReply(Duration::from_millis(200)))
            .forever();
    }
    holder.release().unwrap().unwrap_released();
    let guard = waiting.join().unwrap().unwrap();
    let before = scripts(&nodes, 2);
    guard.release().unwrap().unwrap_released();
    eventually("the release has arrived first", TEST_TIMEOUT, || scripts(&nodes, 2) > before);
    let before = scripts(&nodes, 2);
    held.release();
    eventually("the request has arrived", TEST_TIMEOUT, || scripts(&nodes, 2) > before);
    completes_within(40 * SECOND, "the clean-up", || wait_until_free_everywhere(&nodes, "x"));
}

/// Matches a release of lock `x`, over any connection.
pub(super) fn releases_x(words: &[Vec<u8>]) -> bool {
    let named = |name: &str| words.iter().any(|word| word == name.as_bytes());
    named("lock:x")
        && named("distlock:queue:{lock:x}")
        && !["try", "join", "look"].into_iter().any(named)
}

/// Releases a lock that all three nodes hold. The release to the last node is delayed, so the call
/// returns without that node's reply. The node's reply to the acquisition has been read, so nothing
/// but the release is unfinished there.
fn released_without_last_node(nodes: &Nodes, mgr: &RedisMgr) -> ArmedFault {
    warm_up(nodes, mgr);
    let guard = eventually_some("all nodes hold it", TEST_TIMEOUT, || {
        let delayed = nodes.proxy(1).on_request(contains("lock:x"), Fault::HoldReply);
        let guard = mgr.lock_with("x", &with_ttl(600 * SECOND)).unwrap();
        delayed.disarm();
        delayed.release();
        (nodes_holding(nodes, &guard) == [0, 1, 2]).then_some(guard)
    });
    let held = nodes.proxy(2).on_request(releases_x, Fault::HoldRequest);
    completes_within(CALL_LIMIT, "release", || guard.release().unwrap()).unwrap_released();
    held.wait_fired();
    held
}

/// The node rejects the release, because its scripts were flushed before. The next request over
/// that connection reads the rejection; if there is none, the clean-up does.
///
/// Fault: N79
/// Promise: P9
#[test]
fn release_rejected_after_the_call_is_repeated() {
    for next_request in [true, false] {
        let nodes = Nodes::start(3).behind_proxies(&[1, 2]);
        let mgr = RedisMgr::new(config_medium_timeout(&nodes)).unwrap();
        let held = released_without_last_node(&nodes, &mgr);
        let before = scripts(&nodes, 2);
        nodes.server(2).query::<()>(&["SCRIPT", "FLUSH"]);
        held.release();
        if next_request {
            eventually("the release is rejected", TEST_TIMEOUT, || scripts(&nodes, 2) > before);
            drop(mgr.lock("y").unwrap());
        }
        wait_until_free_everywhere(&nodes, "x");
    }
}

/// The connection breaks before the request arrives.
///
/// Fault: N79
#[test]
fn release_lost_after_the_call_is_repeated() {
    let nodes = Nodes::start(3).behind_proxies(&[1, 2]);
    let mgr = RedisMgr::new(config_medium_timeout(&nodes)).unwrap();
    let _held = released_without_last_node(&nodes, &mgr);
    nodes.proxy(2).reset_all();
    wait_until_free_everywhere(&nodes, "x");
}

/// The reply to the release is late, so the release is repeated. The repetition arrives when
/// another client already holds the lock.
///
/// Fault: N79
#[test]
fn repeated_release_leaves_the_next_holder_alone() {
    let nodes = Nodes::start(3).behind_proxies(&[1, 2]);
    let mgr = RedisMgr::new(config_medium_timeout(&nodes)).unwrap();
    let held = released_without_last_node(&nodes, &mgr);
    let again = nodes.proxy(2).on_request(releases_x, Fault::HoldRequest);
    held.release();
    wait_until_free_everywhere(&nodes, "x");
    let next = eventually_some("all nodes hold it", TEST_TIMEOUT, || {
        let guard = manager(&nodes).lock("x").unwrap();
        (nodes_holding(&nodes, &guard) == [0, 1, 2]).then_some(guard)
    });
    again.wait_fired();
    let before = scripts(&nodes, 2);
    again.release();
    eventually("the repeated release has arrived", TEST_TIMEOUT, || scripts(&nodes, 2) > before);
    assert_eq!(nodes_holding(&nodes, &next), [0, 1, 2]);
}
