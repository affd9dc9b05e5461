//! One or two of five nodes fail: locks are still acquired, held, handed over and released.

use std::time::Duration;

use distlock::{LockGuard, RedisMgr};

use super::{
    TTL, await_renewals, config_long_timeouts, config_medium_timeout, expect_quorum, key,
    nodes_holding, warm_up,
};
use crate::{
    helpers::{
        CALL_LIMIT, SECOND, UnwrapReleased, completes_within, queue_length, spawn_call, timed,
        with_ttl,
    },
    support::{
        Fault, FaultProxy, Nodes, TEST_TIMEOUT, any_request, contains, eventually, garbage_server,
    },
};

/// The failed nodes: the queue node, or one in the middle.
const ONE: [&[usize]; 2] = [&[0], &[2]];
/// The failed nodes: the queue node and another, or the last two.
const TWO: [&[usize]; 2] = [&[0, 3], &[3, 4]];

/// Goal: with any fault at these nodes, a lock is acquired, renewed, handed over and released, each
/// call within bounded time. Method: one lock is acquired before the fault, one after it.
fn expect_lock_to_survive(failed: &[usize], nodes: Nodes, fail: fn(&Nodes, usize)) {
    let healthy: Vec<_> = (0..nodes.len()).filter(|node| !failed.contains(node)).collect();
    let [mgr, other] = [(), ()].map(|()| RedisMgr::new(config_medium_timeout(&nodes)).unwrap());
    mgr.lock("early").unwrap().release().unwrap().unwrap_released();
    let early = mgr.lock_with("early", &with_ttl(TTL)).unwrap();
    failed.iter().for_each(|node| fail(&nodes, *node));
    let guard =
        completes_within(CALL_LIMIT, "lock", || mgr.lock_with("x", &with_ttl(TTL)).unwrap());
    expect_renewed(&nodes, &healthy, &guard, &other);
    expect_renewed(&nodes, &healthy, &early, &other);
    for guard in [guard, early] {
        let name = guard.name().to_owned();
        let waiting =
            spawn_call(&other, &name, |mgr, name| mgr.lock_with(name, &with_ttl(TTL)).unwrap());
        eventually("it waits", TEST_TIMEOUT, || has_waiter(&nodes, &guard));
        let last = guard.fencing_token();
        completes_within(CALL_LIMIT, "release", || guard.release().unwrap()).unwrap_released();
        let next = completes_within(CALL_LIMIT, "the hand-over", || waiting.join().unwrap());
        assert!(next.is_held() && next.fencing_token() > last);
        completes_within(CALL_LIMIT, "release", || next.release().unwrap()).unwrap_released();
        eventually("it is free on the healthy nodes", TEST_TIMEOUT, || {
            healthy.iter().all(|node| {
                nodes.server(*node).query::<Option<String>>(&["GET", &key(&name)]).is_none()
            })
        });
    }
}

/// Reports whether a waiter is queued on a node, or has the lock there as the head of the queue.
fn has_waiter(nodes: &Nodes, guard: &LockGuard) -> bool {
    let values = nodes.values(&key(guard.name()));
    let has_head = values.iter().flatten().any(|id| id != guard.id().as_str());
    has_head
        || nodes.running().iter().any(|node| queue_length(nodes.server(*node), guard.name()) > 0)
}

/// Waits for two renewals, the second of which shows the effect of the first. Other clients must be
/// refused.
#[track_caller]
fn expect_renewed(nodes: &Nodes, healthy: &[usize], guard: &LockGuard, other: &RedisMgr) {
    await_renewals(guard, 2);
    let holding = nodes_holding(nodes, guard);
    let held = healthy.iter().filter(|node| holding.contains(node)).count();
    assert!(held >= 3, "held on {holding:?}");
    let error =
        completes_within(CALL_LIMIT, "try_lock", || other.try_lock(guard.name()).unwrap_err());
    assert!(error.is_contended(), "{error:?}");
    assert_eq!(error.holder().unwrap().id(), guard.id().as_str());
}

/// Checks this fault with one failed node, and with two.
fn expect_lock_to_survive_fault(start: fn(&[usize]) -> Nodes, fail: fn(&Nodes, usize)) {
    for failed in ONE.iter().chain(&TWO) {
        expect_lock_to_survive(failed, start(failed), fail);
    }
}

fn five_nodes(_: &[usize]) -> Nodes {
    Nodes::start(5)
}

fn five_nodes_with_proxies(failed: &[usize]) -> Nodes {
    Nodes::start(5).behind_proxies(failed)
}

/// Fault: F79
#[test]
fn lock_survives_killed_nodes() {
    expect_lock_to_survive_fault(five_nodes, |nodes, node| nodes.kill(node));
}

#[test]
fn lock_survives_stopped_nodes() {
    expect_lock_to_survive_fault(five_nodes, |nodes, node| nodes.stop(node));
}

#[test]
fn lock_survives_nodes_restarted_without_data() {
    expect_lock_to_survive_fault(five_nodes, |nodes, node| nodes.restart_empty(node));
}

#[test]
fn lock_survives_nodes_without_memory() {
    expect_lock_to_survive_fault(five_nodes, |nodes, node| {
        nodes.config_set(node, "maxmemory", "1")
    });
}

#[test]
fn lock_survives_read_only_nodes() {
    expect_lock_to_survive_fault(five_nodes, |nodes, node| {
        nodes.server(node).cli(&["REPLICAOF", "127.0.0.1", "1"]);
    });
}

#[test]
fn lock_survives_nodes_without_replicas() {
    expect_lock_to_survive_fault(five_nodes, |nodes, node| {
        nodes.config_set(node, "min-replicas-to-write", "1")
    });
}

/// Fault: F79
#[test]
fn lock_survives_unreachable_nodes() {
    expect_lock_to_survive_fault(five_nodes_with_proxies, |nodes, node| {
        nodes.proxy(node).blackhole()
    });
}

#[test]
fn lock_survives_nodes_that_send_no_replies() {
    expect_lock_to_survive_fault(five_nodes_with_proxies, |nodes, node| {
        nodes.proxy(node).one_way()
    });
}

#[test]
fn lock_survives_nodes_that_refuse_connections() {
    expect_lock_to_survive_fault(five_nodes_with_proxies, |nodes, node| nodes.proxy(node).refuse());
}

#[test]
fn lock_survives_slow_nodes() {
    expect_lock_to_survive_fault(five_nodes_with_proxies, |nodes, node| {
        slow_down(nodes.proxy(node))
    });
}

/// Fault: F79
#[test]
fn lock_survives_nodes_that_send_garbage() {
    expect_lock_to_survive_fault(five_nodes_with_proxies, |nodes, node| {
        send_garbage(nodes.proxy(node))
    });
}

fn slow_down(proxy: &FaultProxy) {
    proxy.on_request(any_request, Fault::DelayReply(DELAY)).forever();
}

fn send_garbage(proxy: &FaultProxy) {
    proxy.on_request(any_request, Fault::ReplaceReply(b"what?\r\n".to_vec())).forever();
}

const DELAY: Duration = Duration::from_millis(300);

/// A lock works with a manager that has never reached the failed nodes.
fn expect_lock_without(nodes: &Nodes, urls: &[String], healthy: &[usize]) {
    let config =
        || crate::helpers::config_medium_timeout(urls.join(",")).quarantine(Duration::ZERO);
    let [mgr, other] =
        [(), ()].map(|()| completes_within(CALL_LIMIT, "new", || RedisMgr::new(config()).unwrap()));
    let guard =
        completes_within(CALL_LIMIT, "lock", || mgr.lock_with("x", &with_ttl(TTL)).unwrap());
    expect_renewed(nodes, healthy, &guard, &other);
    completes_within(CALL_LIMIT, "release", || guard.release().unwrap()).unwrap_released();
    let next = completes_within(CALL_LIMIT, "lock", || other.lock("x").unwrap());
    completes_within(CALL_LIMIT, "release", || next.release().unwrap()).unwrap_released();
}

#[test]
fn lock_survives_nodes_that_never_ran() {
    for failed in ONE.iter().chain(&TWO) {
        let nodes = Nodes::start(5);
        failed.iter().for_each(|node| nodes.kill(*node));
        let urls: Vec<_> = (0..5).map(|node| nodes.url(node)).collect();
        expect_lock_without(&nodes, &urls, &nodes.running());
    }
}

#[test]
fn lock_survives_nodes_with_an_unknown_password() {
    for failed in ONE.iter().chain(&TWO) {
        let nodes = Nodes::built(5, |node, builder| match failed.contains(&node) {
            true => builder.password("unknown password"),
            false => builder,
        })
        .behind_proxies(failed);
        let urls: Vec<_> = (0..5).map(|node| nodes.url(node)).collect();
        let healthy: Vec<_> = (0..5).filter(|node| !failed.contains(node)).collect();
        expect_lock_without(&nodes, &urls, &healthy);
    }
}

#[test]
fn lock_survives_nodes_that_are_not_redis() {
    let nodes = Nodes::start(5);
    let others = [garbage_server("HTTP/1.1 400 Bad Request\r\n\r\n"), garbage_server("+OK\r\n")];
    let mut urls: Vec<_> = (0..5).map(|node| nodes.url(node)).collect();
    (urls[0], urls[3]) = (others[0].url(), others[1].url());
    expect_lock_without(&nodes, &urls, &[1, 2, 4]);
}

/// Slow nodes are not awaited if three others reply: neither in the first acquisition nor in later
/// ones.
#[test]
fn slow_nodes_delay_no_call() {
    const LONG_DELAY: Duration = Duration::from_secs(3);
    for failed in ONE.iter().chain(&TWO) {
        let nodes = Nodes::start(5).behind_proxies(failed);
        let mgr = RedisMgr::new(config_long_timeouts(&nodes)).unwrap();
        failed.iter().for_each(|node| {
            let delay = Fault::DelayReply(LONG_DELAY);
            drop(nodes.proxy(*node).on_request(any_request, delay).forever())
        });
        let mut spans: Vec<_> = (0..11)
            .map(|_| timed(|| mgr.lock("x").unwrap().release().unwrap().unwrap_released()).1)
            .collect();
        spans.sort();
        assert!(spans[5] < SECOND, "{failed:?}: {spans:?}");
    }
}

/// Fault: F82
#[test]
fn stopped_nodes_delay_no_call() {
    for failed in ONE.iter().chain(&TWO) {
        let nodes = Nodes::start(5);
        let mgr = RedisMgr::new(config_long_timeouts(&nodes)).unwrap();
        mgr.lock("x").unwrap().release().unwrap().unwrap_released();
        failed.iter().for_each(|node| nodes.stop(*node));
        let mut spans: Vec<_> = (0..11)
            .map(|_| {
                let ((), span) = timed(|| {
                    let guard = mgr.lock("x").unwrap();
                    guard.ensure_held().unwrap();
                    guard.release().unwrap().unwrap_released();
                });
                span
            })
            .collect();
        spans.sort();
        assert!(spans[5] < SECOND, "{failed:?}: {spans:?}");
        let guard = mgr.lock("x").unwrap();
        expect_quorum(&nodes, &guard);
    }
}

/// An operator releases a lock by several ids, one after the other. Node 2 replies to none of the
/// requests.
///
/// Fault: N243
#[test]
fn silent_node_leaves_time_for_each_id() {
    let nodes = Nodes::start(3).behind_proxies(&[0, 1]);
    let mgr = RedisMgr::new(config_medium_timeout(&nodes)).unwrap();
    warm_up(&nodes, &mgr);
    // So that no reply is there already when its request has been sent.
    for node in [0, 1] {
        let late = Fault::DelayReply(Duration::from_millis(5));
        nodes.proxy(node).on_request(contains("lock:x"), late).forever();
    }
    nodes.stop(2);
    let set = |node: usize, id: &str| {
        nodes.server(node).query::<()>(&["SET", &key("x"), id, "PX", "600000"]);
    };
    set(0, "the id of a client that has lost it");
    set(1, "the id of the holder");
    assert!(mgr.force_release("x").unwrap());
    assert_eq!(nodes.values(&key("x")), [None, None, None]);
    for node in [0, 1] {
        let set = "redis.call('SET', KEYS[1], 'not text: \\255', 'PX', 600000)";
        nodes.server(node).query::<()>(&["EVAL", set, "1", &key("x")]);
    }
    mgr.force_release_if("x", "not text: \u{fffd}").unwrap().unwrap_released();
    assert_eq!(nodes.values(&key("x")), [None, None, None]);
}
