//! Votes of lost rounds that cannot be released at once, while the claim goes on waiting.

use distlock::RedisMgr;

use super::{config_medium_timeout, key, late_replies::scripts, manager, warm_up};
use crate::{
    helpers::{SECOND, queue_length, spawn_call, with_ttl},
    support::{Fault, Nodes, TEST_TIMEOUT, contains, eventually},
};

/// Another client gets the lock on the first two of three nodes.
fn hold(nodes: &Nodes) {
    for node in [0, 1] {
        nodes.server(node).query::<()>(&["SET", &key("x"), "other client", "PX", "600000"]);
    }
}

/// The other nodes refuse the lock. Before the reply of the first one has arrived, the connection
/// to the node that granted the lock breaks, and no other can be opened.
///
/// Fault: N201
/// Promise: P5
#[test]
fn vote_that_could_not_be_released_is_released_later() {
    let nodes = Nodes::start(3).behind_proxies(&[0, 2]);
    let mgr = manager(&nodes);
    warm_up(&nodes, &mgr);
    hold(&nodes);
    let late = nodes.proxy(0).on_request(contains("lock:x"), Fault::HoldReply);
    let lost = nodes.proxy(2).on_request(contains("lock:x"), Fault::ResetAfterRequest);
    let waiting = spawn_call(&mgr, "x", |mgr, name| mgr.lock_with(name, &with_ttl(600 * SECOND)));
    lost.wait_fired();
    nodes.proxy(2).refuse();
    late.wait_fired();
    assert!(nodes.values(&key("x"))[2].is_some());
    late.release();
    eventually("it waits", TEST_TIMEOUT, || queue_length(nodes.server(0), "x") == 1);
    nodes.proxy(2).heal();
    eventually("the vote is released", TEST_TIMEOUT, || nodes.values(&key("x"))[2].is_none());
    [1, 0].into_iter().for_each(|node| drop(nodes.server(node).cli(&["DEL", &key("x")])));
    drop(waiting.join().unwrap().unwrap());
}

/// The connection breaks while the request is on its way, and the release overtakes the request on
/// another one. The caller waits until the request can no longer arrive.
///
/// Fault: N202
/// Promise: P5
#[test]
fn request_that_arrives_after_its_release_is_undone() {
    let nodes = Nodes::start(3).behind_proxies(&[0, 2]);
    let mgr = RedisMgr::new(config_medium_timeout(&nodes)).unwrap();
    warm_up(&nodes, &mgr);
    hold(&nodes);
    let late = nodes.proxy(0).on_request(contains("lock:x"), Fault::HoldReply);
    let held = nodes.proxy(2).on_request(contains("lock:x"), Fault::HoldRequest);
    let options = with_ttl(600 * SECOND).wait(6 * SECOND);
    let waiting = spawn_call(&mgr, "x", move |mgr, name| mgr.lock_with(name, &options));
    late.wait_fired();
    held.wait_fired();
    let before = scripts(&nodes, 2);
    nodes.proxy(2).lose_clients();
    late.release();
    eventually("the release has arrived", TEST_TIMEOUT, || scripts(&nodes, 2) > before);
    held.release();
    eventually("the request has arrived", TEST_TIMEOUT, || scripts(&nodes, 2) > before + 1);
    assert!(waiting.join().unwrap().unwrap_err().is_contended());
    eventually("the vote is released", TEST_TIMEOUT, || nodes.values(&key("x"))[2].is_none());
}
