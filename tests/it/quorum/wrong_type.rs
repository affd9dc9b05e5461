//! A key of another type on one of several nodes.

use std::time::Duration;

use super::{key, manager, nodes_holding};
use crate::{
    helpers::{
        CALL_LIMIT, SECOND, UnwrapReleased, await_queue_length, completes_within, queue_key,
        spawn_call, token_key,
    },
    support::{Nodes, eventually},
};

/// Waiters cannot queue on that node, so its reply does not mean that someone is ahead.
///
/// Fault: N61
/// Promise: P9
#[test]
fn lock_key_of_another_type_on_one_node_blocks_no_lock() {
    for odd in [0, 2] {
        let nodes = Nodes::start(3);
        nodes.server(odd).cli(&["RPUSH", &key("x"), "precious"]);
        let mgr = manager(&nodes);
        for wait in [Duration::ZERO, SECOND] {
            let guard = completes_within(CALL_LIMIT, "lock", || mgr.try_lock_for("x", wait));
            drop(guard.unwrap_or_else(|error| panic!("node {odd}, {wait:?}: {error}")));
        }
        assert_eq!(
            nodes.server(odd).query::<Vec<String>>(&["LRANGE", &key("x"), "0", "-1"]),
            ["precious"]
        );
    }
}

/// A fault of one lock on a node says nothing about other locks: the node still votes on them, and
/// their queue stays on it.
///
/// Fault: N75
/// Promise: P9
#[test]
fn wrong_type_for_one_lock_does_not_affect_others() {
    for odd_key in [queue_key("x"), token_key("x")] {
        let nodes = Nodes::start(3);
        nodes.server(0).cli(&["HSET", &odd_key, "field", "precious"]);
        let mgr = manager(&nodes);
        drop(mgr.lock("warm").unwrap());
        for _ in 0..6 {
            drop(completes_within(CALL_LIMIT, "lock", || mgr.lock("x").unwrap()));
        }
        // A waiter for that lock polls, but not in a busy loop.
        let guard = mgr.lock("x").unwrap();
        let requests = || nodes.server(1).calls("evalsha") + nodes.server(1).calls("eval");
        let before = requests();
        let error =
            completes_within(CALL_LIMIT, "lock", || mgr.try_lock_for("x", SECOND).unwrap_err());
        let sent = requests() - before;
        assert!(error.is_contended() && sent < 60, "{sent} requests within a second: {error}");
        let waiting = spawn_call(&mgr, "x", |mgr, name| mgr.try_lock_for(name, 30 * SECOND));
        eventually("it waits", CALL_LIMIT, || mgr.metrics().contended() >= 2);
        guard.release().unwrap().unwrap_released();
        drop(waiting.join().unwrap().unwrap());

        let guard = mgr.lock("y").unwrap();
        let waiting = spawn_call(&mgr, "y", |mgr, name| mgr.lock(name));
        await_queue_length(nodes.server(0), "y", 1);
        guard.release().unwrap().unwrap_released();
        drop(waiting.join().unwrap().unwrap());
    }
}

/// The key on the queue node is replaced by one of another type while the lock is held.
///
/// Fault: N61
#[test]
fn waiter_polls_if_the_queue_node_has_a_wrong_type() {
    let nodes = Nodes::start(3);
    let (mgr, other) = (manager(&nodes), manager(&nodes));
    let guard = mgr.lock("x").unwrap();
    eventually("all nodes have it", CALL_LIMIT, || nodes_holding(&nodes, &guard).len() == 3);
    let first = nodes.server(0);
    first.cli(&["DEL", &key("x")]);
    first.cli(&["RPUSH", &key("x"), "precious"]);

    let requests = || first.calls("evalsha") + first.calls("eval");
    let before = requests();
    let error =
        completes_within(CALL_LIMIT, "lock", || other.try_lock_for("x", SECOND).unwrap_err());
    let sent = requests() - before;
    assert_eq!(error.holder().map(|holder| holder.id()), Some(guard.id().as_str()), "{error}");
    assert!(sent < 60, "{sent} requests within a second");

    let waiting = spawn_call(&other, "x", |mgr, name| mgr.try_lock_for(name, 30 * SECOND));
    eventually("it waits", CALL_LIMIT, || other.metrics().contended() == 2);
    guard.release().unwrap().unwrap_released();
    drop(waiting.join().unwrap().unwrap());
    assert_eq!(first.query::<Vec<String>>(&["LRANGE", &key("x"), "0", "-1"]), ["precious"]);
}
