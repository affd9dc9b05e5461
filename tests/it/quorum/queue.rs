//! Waiters over several nodes: order, hand-over, and a queue whose node fails.

use std::{thread::JoinHandle, time::Duration};

use distlock::{Config, LockGuard, RedisMgr};

use super::{
    await_renewals, await_waiting, config_short_timeout, expect_locked, expect_quorum, key,
    manager, nodes_holding, release, spawn_worker, wait_until_free_everywhere, warm_up,
};
use crate::{
    helpers::{
        SECOND, UnwrapReleased, await_queue_length, completes_within,
        expect_deadline_before_key_expiry, pttl, queue_key, queue_length, spawn_call,
        spawn_queued_waiter, timed, with_ttl,
    },
    support::{
        Fault, Nodes, RedisServer, TEST_TIMEOUT, Worker, command, contains, eventually,
        eventually_some,
    },
};

/// A waiter has the lock on the queue node, but not on the other nodes yet. Those reply late.
///
/// Promise: P9
#[test]
fn newcomer_is_refused_by_the_queue_node_alone() {
    let nodes = Nodes::start(3).behind_proxies(&[1, 2]);
    let mgr = manager(&nodes);
    warm_up(&nodes, &mgr);
    nodes.server(0).query::<()>(&["SET", &key("x"), "next holder", "PX", "600000"]);
    for node in [1, 2] {
        let late = Fault::DelayReply(Duration::from_millis(500));
        nodes.proxy(node).on_request(contains(key("x").as_str()), late).forever();
    }
    let error = mgr.try_lock("x").unwrap_err();
    assert_eq!(error.holder().map(|holder| holder.id()), Some("next holder"), "{error:?}");
    assert_eq!(nodes.keeping(&key("x"), "next holder"), [0]);
}

/// Makes a process wait for the lock, and returns once it is in the queue of this node.
fn enqueue(server: &RedisServer, worker: &mut Worker, name: &str, before: usize) {
    worker.send(&format!("lock {name}"));
    await_queue_length(server, name, before + 1);
}

#[test]
fn processes_are_served_in_queue_order() {
    let nodes = Nodes::start(5);
    let mgr = manager(&nodes);
    let guard = mgr.lock("x").unwrap();
    let mut workers: Vec<_> = (0..3).map(|_| spawn_worker(&nodes, &[])).collect();
    for (number, worker) in workers.iter_mut().enumerate() {
        enqueue(nodes.server(0), worker, "x", number);
    }
    let mut last = guard.fencing_token().as_u64();
    guard.release().unwrap().unwrap_released();
    for worker in &mut workers {
        let (token, id) = expect_locked(worker, "x");
        assert_eq!(mgr.holder("x").unwrap().unwrap().id(), id);
        assert!(token > last);
        last = token;
        release(worker, "x");
    }
}

/// Goal: waiters are notified and do not poll often. Method: count the requests at each node during
/// three renewals. Besides the renewals there are only rare polls, mostly at the queue node.
#[track_caller]
fn expect_few_requests(nodes: &Nodes, guard: &LockGuard) {
    let requests = || -> Vec<u64> {
        let requests_at = |node| {
            let calls = nodes.server(node).commandstats();
            ["evalsha", "eval"].iter().filter_map(|command| calls.get(*command)).sum()
        };
        (0..nodes.len()).map(requests_at).collect()
    };
    let before = requests();
    let ((), span) = timed(|| await_renewals(guard, 3));
    let requests: Vec<_> =
        requests().iter().zip(before).map(|(after, before)| after - before).collect();
    let seconds = span.as_secs_f64();
    let is_few = |count: &u64| *count as f64 <= 10.0 + 10.0 * seconds;
    assert!(requests.iter().all(is_few), "{requests:?} in {span:?}");
}

#[test]
fn waiters_send_few_requests() {
    let nodes = Nodes::start(5);
    let (holder, one, other) = (manager(&nodes), manager(&nodes), manager(&nodes));
    let guard = holder.lock_with("x", &with_ttl(3 * SECOND)).unwrap();
    let waiting: Vec<_> = (0..20)
        .map(|number| spawn_queued_waiter(nodes.server(0), [&one, &other][number % 2], "x"))
        .collect();
    expect_few_requests(&nodes, &guard);
    guard.release().unwrap().unwrap_released();
    waiting.into_iter().for_each(|waiter| drop(waiter.join().unwrap().unwrap()));
}

/// The queue node has forgotten the holder's lock. The head of the queue gets the lock there, and
/// is refused by the other nodes.
#[test]
fn waiters_send_few_requests_if_the_queue_node_lost_the_lock() {
    let nodes = Nodes::start(5).in_fixed_order();
    let (holder, other) = (manager(&nodes), manager(&nodes));
    let guard = holder.lock_with("x", &with_ttl(3 * SECOND)).unwrap();
    nodes.restart_empty(0);
    let waiting: Vec<_> =
        (0..3).map(|_| spawn_call(&other, "x", |mgr, name| mgr.lock(name).map(drop))).collect();
    await_waiting(&nodes, 0, 3, guard.id().as_str());
    expect_few_requests(&nodes, &guard);
    guard.release().unwrap().unwrap_released();
    waiting.into_iter().for_each(|waiter| waiter.join().unwrap().unwrap());
}

/// The reply of the queue node to one request of its head comes late. The other nodes refuse.
///
/// Fault: N246
/// Promise: P4
#[test]
fn late_reply_of_the_queue_node_costs_no_place() {
    let nodes = Nodes::start(3).in_fixed_order();
    let (holder, one, other) = (manager(&nodes), manager(&nodes), manager(&nodes));
    // The queue node loses the holder's lock, and no renewal brings it back.
    let guard = holder.lock_with("x", &with_ttl(600 * SECOND).renew(false)).unwrap();
    nodes.restart_empty(0);
    let ask = |mgr: &RedisMgr, name: &str| mgr.lock_with(name, &with_ttl(600 * SECOND)).unwrap();
    let first = spawn_call(&one, "x", ask);
    eventually("the queue node has a head", TEST_TIMEOUT, || {
        // Only the head has the lock for a claim window.
        (1..=20_000).contains(&nodes.server(0).query::<i64>(&["PTTL", &key("x")]))
    });
    let head = nodes.values(&key("x"))[0].clone().unwrap();
    let second = spawn_queued_waiter(nodes.server(0), &other, "x");
    let requests = nodes.server(0).monitor();
    let late = Fault::DelayReply(Duration::from_millis(130));
    let late = nodes.proxy(0).on_request(contains(head.as_str()), late);
    eventually("one reply is late", TEST_TIMEOUT, || late.fired() == 1);
    let is_request = |line: &&String| line.contains(head.as_str()) && !line.contains(" lua]");
    let sent = || requests.lines().iter().filter(is_request).count();
    let before = sent();
    eventually("the head has asked again", TEST_TIMEOUT, || sent() > before + 1);
    guard.release().unwrap().unwrap_released();
    eventually("one of them has it", TEST_TIMEOUT, || first.is_finished() || second.is_finished());
    assert!(first.is_finished(), "the head has lost its place");
    drop(first.join().unwrap());
    drop(second.join().unwrap().unwrap());
}

/// The head of the queue has the lock on the queue node only, and its process is killed. That vote
/// expires after one claim window.
///
/// Fault: F6
/// Promise: P4
#[test]
fn dead_head_of_the_queue_costs_one_claim_window() {
    let nodes = Nodes::start(5).in_fixed_order();
    let (holder, other) = (manager(&nodes), manager(&nodes));
    let mut head = spawn_worker(&nodes, &[("window_ms", "1000")]);
    let guard = holder.lock_with("x", &with_ttl(600 * SECOND).renew(false)).unwrap();
    nodes.restart_empty(0);
    head.send("lock x");
    let ttl_left = || nodes.server(0).query::<i64>(&["PTTL", &key("x")]);
    eventually("the head has the lock on the queue node", TEST_TIMEOUT, || {
        (1..=1000).contains(&ttl_left())
    });
    let waiting = spawn_queued_waiter(nodes.server(0), &other, "x");
    head.kill();
    assert!(ttl_left() <= 1000, "the dead head has it for {} ms", ttl_left());
    guard.release().unwrap().unwrap_released();
    eventually("the next waiter has the lock", TEST_TIMEOUT, || waiting.is_finished());
    let next = waiting.join().unwrap().unwrap();
    eventually("the queue node has the full ttl", TEST_TIMEOUT, || ttl_left() > 2_000);
    expect_quorum(&nodes, &next);
}

/// One node is dead, so that the quorum needs the queue node, which grants the lock for a claim
/// window only.
///
/// Promise: P2
#[test]
fn provisional_grant_is_valid_no_longer_than_on_its_node() {
    let nodes = Nodes::start(3);
    let (holder, other) = (manager(&nodes), manager(&nodes));
    nodes.kill(2);
    let guard = holder.lock("x").unwrap();
    let waiting = spawn_queued_waiter(nodes.server(0), &other, "x");
    guard.release().unwrap().unwrap_released();
    let next = completes_within(TEST_TIMEOUT, "the hand-over", || waiting.join().unwrap().unwrap());
    let ((left, kept_ms), span) =
        timed(|| (next.remaining(), nodes.server(0).query::<u64>(&["PTTL", &key("x")])));
    let kept = Duration::from_millis(kept_ms + 1).saturating_add(span);
    assert!(left <= kept, "valid for {left:?}, but the key expires in {kept:?}");
    eventually("the full ttl is confirmed", TEST_TIMEOUT, || next.remaining() > 2 * SECOND);
}

/// The quorum needs the queue node, which grants a claim window only. Replies are so slow that the
/// window could end before the renewer confirms the lock, so `lock` must confirm it itself.
///
/// Fault: N28
#[test]
fn grant_over_a_slow_network_is_confirmed_at_once() {
    let nodes = Nodes::start(3).behind_proxies(&[0, 1, 2]);
    // The claim window and all timeouts have their defaults. With this ttl, a slow machine has
    // time to try again.
    let manager =
        |urls: [String; 3]| Config::nodes(urls).ttl(10 * TEST_TIMEOUT).quarantine(Duration::ZERO);
    let near = RedisMgr::new(manager([0, 1, 2].map(|node| nodes.server(node).url()))).unwrap();
    let first = near.lock("x").unwrap();
    for node in 0..3 {
        nodes
            .proxy(node)
            .on_request(contains(key("x").as_str()), Fault::DelayReply(SECOND / 6))
            .forever();
    }
    let far = RedisMgr::new(manager([0, 1, 2].map(|node| nodes.proxy(node).url()))).unwrap();
    let waiting = spawn_queued_waiter(nodes.server(0), &far, "x");
    nodes.kill(2);
    first.release().unwrap().unwrap_released();
    let next = completes_within(TEST_TIMEOUT, "the hand-over", || waiting.join().unwrap().unwrap());
    let ttl_left: u64 = nodes.server(0).query(&["PTTL", &key("x")]);
    assert!(ttl_left > 2_000, "the queue node has it for {ttl_left} ms only");
    expect_quorum(&nodes, &next);
}

#[test]
fn release_wakes_the_next_waiter_before_its_next_poll() {
    let nodes = Nodes::start(5);
    let (mgr, other) = (manager(&nodes), manager(&nodes));
    let mut spans = Vec::new();
    for _ in 0..21 {
        let guard = mgr.lock("x").unwrap();
        let waiting = spawn_queued_waiter(nodes.server(0), &other, "x");
        let (next, span) = timed(|| {
            guard.release().unwrap().unwrap_released();
            waiting.join().unwrap().unwrap()
        });
        next.release().unwrap().unwrap_released();
        spans.push(span);
    }
    spans.sort();
    // Polls are half a second apart, so polling alone would take longer.
    assert!(spans[10] < SECOND / 4, "{spans:?}");
}

/// A waiter asks the queue node for the claim window only, and repairs a missing expiry there.
///
/// Fault: N98
#[test]
fn waiter_that_repairs_an_expiry_keeps_the_holders_lease() {
    let nodes = Nodes::start(3);
    let (mgr, other) = (manager(&nodes), manager(&nodes));
    let guard = mgr.lock_with("x", &with_ttl(300 * SECOND).renew(false)).unwrap();
    let waiting = spawn_call(&other, "x", |mgr, name| mgr.lock_with(name, &with_ttl(600 * SECOND)));
    await_queue_length(nodes.server(0), "x", 1);
    assert!(nodes.server(0).query::<bool>(&["PERSIST", &key("x")]));
    eventually("the waiter has polled", TEST_TIMEOUT, || pttl(nodes.server(0), &key("x")) > 0);
    expect_deadline_before_key_expiry(nodes.server(0), &guard);
    guard.release().unwrap().unwrap_released();
    drop(waiting.join().unwrap().unwrap());
}

#[test]
fn waiter_that_times_out_leaves_nothing_on_any_node() {
    let nodes = Nodes::start(5);
    let (mgr, other) = (manager(&nodes), manager(&nodes));
    let guard = mgr.lock("x").unwrap();
    let error = other.try_lock_for("x", Duration::from_millis(200)).unwrap_err();
    assert!(error.is_timeout() && error.is_contended(), "{error:?}");
    assert_eq!(error.holder().unwrap().id(), guard.id().as_str());
    eventually("all queues are empty", TEST_TIMEOUT, || {
        (0..5).all(|node| queue_length(nodes.server(node), "x") == 0)
    });
    expect_quorum(&nodes, &guard);
    guard.release().unwrap().unwrap_released();
    wait_until_free_everywhere(&nodes, "x");
    for node in 0..5 {
        assert!(!nodes.server(node).query::<bool>(&["EXISTS", &queue_key("x")]));
    }
}

/// Goal: a slow but healthy first node is the queue node, with any number of nodes. Method: its
/// reply to SUBSCRIBE takes more than a fifth of an operation timeout, and less than half of one.
///
/// Fault: N116
/// Promise: P4
#[test]
fn slow_first_node_is_the_queue_node() {
    let nodes = Nodes::start(5).behind_proxies(&[0]);
    let mgr = manager(&nodes);
    let guard = manager(&nodes).lock("x").unwrap();
    let slow =
        nodes.proxy(0).on_request(command("SUBSCRIBE"), Fault::DelayReply(5 * SECOND)).forever();
    let waiting = spawn_call(&mgr, "x", RedisMgr::lock);
    let queue_node = || (0..nodes.len()).find(|node| queue_length(nodes.server(*node), "x") > 0);
    assert_eq!(eventually_some("it is queued", TEST_TIMEOUT, queue_node), 0);
    assert_eq!(slow.fired(), 1);
    guard.release().unwrap().unwrap_released();
    drop(waiting.join().unwrap().unwrap());
}

/// Returns a holder, and a waiter that has moved to the queue of the second node, because the first
/// node has become unreachable. Its entry on the first node is still there.
fn moved_to_second_node(nodes: &Nodes) -> (LockGuard, JoinHandle<distlock::Result<LockGuard>>) {
    let near = RedisMgr::new(
        Config::nodes([0, 1, 2].map(|node| nodes.server(node).url())).quarantine(Duration::ZERO),
    );
    let holder = near.unwrap().lock_with("x", &with_ttl(600 * SECOND).renew(false)).unwrap();
    eventually("all nodes hold it", TEST_TIMEOUT, || nodes_holding(nodes, &holder).len() == 3);
    let waiting = spawn_queued_waiter(
        nodes.server(0),
        &RedisMgr::new(config_short_timeout(nodes)).unwrap(),
        "x",
    );
    let commands = nodes.server(1).monitor();
    nodes.proxy(0).refuse();
    await_queue_length(nodes.server(1), "x", 1);
    // After a few polls nothing is in flight to the first node, so no clean-up is pending there.
    let polls = || commands.lines().iter().filter(|line| line.contains("lua] \"LPOS\"")).count();
    eventually("it has polled a few times", TEST_TIMEOUT, || polls() >= 4);
    assert_eq!(queue_length(nodes.server(0), "x"), 1);
    (holder, waiting)
}

/// Waits for an empty queue; the queue key expires much later.
fn await_empty_queue(server: &RedisServer) {
    eventually("the queue is empty", 40 * SECOND, || queue_length(server, "x") == 0);
}

/// A second entry would stay in the queue when the first is served.
///
/// Fault: N114
#[test]
fn waiter_that_returns_to_a_queue_node_reuses_its_entry() {
    let nodes = Nodes::start(3).behind_proxies(&[0, 1, 2]);
    let (holder, waiting) = moved_to_second_node(&nodes);
    let commands = nodes.server(0).monitor();
    // The first node replies before the others, so that nothing must be cleaned up there.
    for node in [1, 2] {
        nodes.proxy(node).on_request(contains("lock:x"), Fault::DelayReply(SECOND / 5)).forever();
    }
    nodes.proxy(0).heal();
    commands.wait_for("lua] \"PEXPIRE\" \"distlock:queue:{lock:x}\"");
    holder.release().unwrap().unwrap_released();
    let next = waiting.join().unwrap().unwrap();
    await_empty_queue(nodes.server(0));
    drop(next);
}

/// Fault: N114
#[test]
fn queue_entry_on_an_unreachable_node_is_released_later() {
    let nodes = Nodes::start(3).behind_proxies(&[0]);
    let (holder, waiting) = moved_to_second_node(&nodes);
    for node in [1, 2] {
        nodes.server(node).query::<()>(&["DEL", &key("x")]);
    }
    let guard = waiting.join().unwrap().unwrap();
    assert_eq!(
        (nodes_holding(&nodes, &guard), queue_length(nodes.server(0), "x")),
        (vec![1, 2], 1)
    );
    nodes.proxy(0).heal();
    guard.release().unwrap().unwrap_released();
    await_empty_queue(nodes.server(0));
    drop(holder);
}
