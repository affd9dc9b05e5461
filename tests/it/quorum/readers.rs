//! Read-write locks over several nodes: votes of readers, tokens, and nodes that have lost members
//! or have missed a downgrade.

use std::{
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    thread,
    time::Duration,
};

use distlock::{LockOptions, RedisMgr, RwLock};

use super::{
    TTL, await_renewals, await_waiting, key, manager, nodes_holding, wait_until_free_everywhere,
    warm_up,
};
use crate::{
    helpers::{SECOND, UnwrapReleased, spawn_call, token_key, with_ttl},
    support::{Fault, Nodes, TEST_TIMEOUT, contains, eventually},
};

/// Longer than any test: what disappears was released, and has not expired.
fn outlasting() -> LockOptions {
    with_ttl(600 * SECOND)
}

fn give_to_writer(nodes: &Nodes, node: usize) {
    nodes.server(node).query::<()>(&["SET", &key("x"), "a writer", "PX", "600000"]);
}

/// The number of members on each running node.
fn members(nodes: &Nodes) -> Vec<u64> {
    let key = "distlock:members:{lock:x}";
    nodes.running().iter().map(|node| nodes.server(*node).query(&["ZCARD", key])).collect()
}

/// Promise: P9
/// Promise: P12
#[test]
fn reader_needs_a_quorum_of_nodes_without_a_writer() {
    let nodes = Nodes::start(3);
    let lock = manager(&nodes).rw_lock("x").unwrap();
    (1..3).for_each(|node| give_to_writer(&nodes, node));
    let error = lock.read_with(&outlasting().wait(Duration::ZERO)).unwrap_err();
    assert_eq!(error.holder().map(|holder| holder.id()), Some("a writer"), "{error:?}");
    eventually("its vote is released", TEST_TIMEOUT, || nodes.values(&key("x"))[0].is_none());
    nodes.server(2).cli(&["DEL", &key("x")]);
    let reader = lock.read_with(&outlasting()).unwrap();
    assert_eq!(members(&nodes), [1, 0, 1]);
    assert!(lock.try_write().unwrap_err().is_contended());
    reader.release().unwrap().unwrap_released();
    eventually("nothing is left", TEST_TIMEOUT, || members(&nodes) == [0, 0, 0]);
}

/// Every two quorums have a node in common, where readers exclude a writer.
///
/// Promise: P12
#[test]
fn readers_with_different_quorums_exclude_a_writer() {
    let nodes = Nodes::start(3).in_fixed_order();
    let (one, two) = (manager(&nodes), manager(&nodes));
    let (here, there) = (one.rw_lock("x").unwrap(), two.rw_lock("x").unwrap());
    nodes.kill(2);
    let first = here.read_with(&outlasting().renew(false)).unwrap();
    nodes.restart_empty(2);
    nodes.kill(0);
    let second = there.read_with(&outlasting().renew(false)).unwrap();
    assert!(second.fencing_token() > first.fencing_token());
    assert_eq!(members(&nodes), [2, 1]);
    let error = here.try_write().unwrap_err();
    assert!(error.is_contended(), "{error:?}");
    second.release().unwrap().unwrap_released();
    // The first reader is on node 1 alone, so it has no quorum of the nodes that reply.
    let error = there.try_write().unwrap_err();
    assert!(!error.is_unavailable() || first.is_held(), "{error:?}");
    first.release().unwrap().unwrap_released();
    let writer = there.write_with(&outlasting()).unwrap();
    assert!(writer.is_held());
}

/// Promise: P12
#[test]
fn restarted_node_gets_its_readers_back() {
    let nodes = Nodes::start(3).in_fixed_order();
    let lock = manager(&nodes).rw_lock("x").unwrap();
    let (first, second) = (read(&lock), read(&lock));
    for node in [2, 0] {
        nodes.restart_empty(node);
        eventually("it has them again", TEST_TIMEOUT, || {
            first.ensure_held().unwrap();
            second.ensure_held().unwrap();
            members(&nodes) == [2, 2, 2]
        });
        assert!(lock.try_write().unwrap_err().is_contended());
    }
    first.release().unwrap().unwrap_released();
    second.release().unwrap().unwrap_released();
    let writer = lock.write_with(&with_ttl(TTL)).unwrap();
    await_renewals(&writer, 1);
}

fn read(lock: &RwLock) -> distlock::ReadGuard {
    lock.read_with(&with_ttl(TTL)).unwrap()
}

/// The node keeps the lock for the writer, until a renewal finds that.
///
/// Fault: N184
/// Promise: P12
#[test]
fn downgrade_that_a_node_has_missed_is_repaired() {
    let nodes = Nodes::start(3).behind_proxies(&[2]);
    let mgr = manager(&nodes);
    let lock = mgr.rw_lock("x").unwrap();
    let writer = lock.write_with(&with_ttl(TTL)).unwrap();
    eventually("all nodes have it", TEST_TIMEOUT, || nodes_holding(&nodes, &writer).len() == 3);
    let (id, token) = (writer.id().to_string(), writer.fencing_token());
    let lost =
        nodes.proxy(2).on_request(contains("distlock:members:{lock:x}"), Fault::ResetBeforeRequest);
    let reader = writer.downgrade().unwrap();
    assert_eq!((reader.fencing_token(), reader.id().as_str()), (token, id.as_str()));
    // The lock of the writer must not expire there first.
    nodes.server(2).cli(&["PEXPIRE", &key("x"), "600000"]);
    eventually("node 2 has a reader too", TEST_TIMEOUT, || {
        reader.ensure_held().unwrap();
        members(&nodes) == [1, 1, 1]
    });
    assert_eq!(lost.fired(), 1);
    nodes.kill(0);
    let second = read(&lock);
    assert!(reader.is_held() && second.is_held() && second.fencing_token() > token);
}

#[test]
fn downgrade_without_a_quorum_ends_the_hold() {
    let nodes = Nodes::start(3);
    let mgr = RedisMgr::new(super::config_short_timeout(&nodes)).unwrap();
    let lock = mgr.rw_lock("x").unwrap();
    let writer = lock.write_with(&outlasting()).unwrap();
    (0..2).for_each(|node| nodes.kill(node));
    assert!(writer.downgrade().unwrap_err().is_unavailable());
    eventually("nothing is left", TEST_TIMEOUT, || nodes.values(&key("x"))[2].is_none());
    assert_eq!(mgr.metrics().held(), 0);
}

/// Goal: a token counts only once a quorum has stored it, so that the next writer's is larger.
/// Method: the counter of one node is ahead, so the nodes disagree at first.
///
/// Promise: P3
/// Promise: P12
#[test]
fn token_of_a_reader_is_stored_by_a_quorum() {
    let nodes = Nodes::start(3);
    let lock = manager(&nodes).rw_lock("x").unwrap();
    let stored = |node: usize| -> u64 {
        let token: Option<String> = nodes.server(node).query(&["GET", &token_key("x")]);
        token.map_or(0, |token| token.parse().unwrap())
    };
    let mut last = lock.read_with(&outlasting()).unwrap();
    for node in [0, 1, 2, 0] {
        let ahead = format!("{:016}", last.fencing_token().as_u64() + 60_000_000);
        nodes.server(node).query::<()>(&["SET", &token_key("x"), &ahead, "PX", "600000"]);
        let next = lock.read_with(&outlasting()).unwrap();
        let token = next.fencing_token();
        assert!(token > last.fencing_token());
        let storing = (0..3).filter(|node| stored(*node) >= token.as_u64()).count();
        assert!(storing >= 2, "{storing} nodes have stored {token}");
        last = next;
    }
    let token = last.fencing_token();
    drop(last);
    wait_until_free_everywhere(&nodes, "x");
    assert!(lock.write().unwrap().fencing_token() > token);
}

/// The queue node refuses readers where a writer waits, but they win votes of the other nodes for a
/// moment.
///
/// Promise: P4
/// Promise: P12
#[test]
fn readers_that_keep_trying_do_not_keep_a_writer_out() {
    let nodes = Nodes::start(3);
    let mgr = manager(&nodes);
    warm_up(&nodes, &mgr);
    let lock = mgr.rw_lock("x").unwrap();
    let reader = lock.read().unwrap();
    let writer = spawn_call(&mgr, "x", |mgr, name| {
        mgr.rw_lock(name).unwrap().try_write_for(TEST_TIMEOUT).map(drop)
    });
    await_waiting(&nodes, 0, 2, "no such id");
    let (has_ended, tries) = (AtomicBool::new(false), AtomicU32::new(0));
    thread::scope(|threads| {
        for _ in 0..6 {
            threads.spawn(|| {
                let here = manager(&nodes).rw_lock("x").unwrap();
                while !has_ended.load(Ordering::SeqCst) {
                    drop(here.try_read());
                    tries.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        eventually("they try", TEST_TIMEOUT, || tries.load(Ordering::SeqCst) > 100);
        drop(reader);
        let result = writer.join().unwrap();
        has_ended.store(true, Ordering::SeqCst);
        result.unwrap();
    });
}

/// The other nodes know of no queue.
///
/// Promise: P4
/// Promise: P12
#[test]
fn reader_waits_for_a_queue_node_that_replies_late() {
    let nodes = Nodes::start(3).behind_proxies(&[0]);
    let (mgr, other) = (manager(&nodes), manager(&nodes));
    warm_up(&nodes, &other);
    let lock = mgr.rw_lock("x").unwrap();
    let reader = lock.read_with(&outlasting()).unwrap();
    let writer = spawn_call(&mgr, "x", |mgr, name| {
        mgr.rw_lock(name).unwrap().try_write_for(TEST_TIMEOUT).map(drop)
    });
    await_waiting(&nodes, 0, 2, "no such id");
    let late = Fault::DelayReply(SECOND / 4);
    nodes.proxy(0).on_request(contains("lock:x"), late).forever();
    let error = other.rw_lock("x").unwrap().try_read().unwrap_err();
    assert!(error.is_contended(), "{error:?}");
    reader.release().unwrap().unwrap_released();
    writer.join().unwrap().unwrap();
}

#[test]
fn semaphore_of_one_permit_works_over_several_nodes() {
    let nodes = Nodes::start(3);
    let (here, there) = (manager(&nodes), manager(&nodes));
    let (here, there) = (here.semaphore("x", 1).unwrap(), there.semaphore("x", 1).unwrap());
    let permit = here.acquire().unwrap();
    assert!(there.try_acquire().unwrap_err().is_contended());
    assert_eq!((there.available().unwrap(), there.holders().unwrap().len()), (0, 1));
    let token = permit.fencing_token();
    permit.release().unwrap().unwrap_released();
    assert!(there.acquire().unwrap().fencing_token() > token);
    assert_eq!(here.available().unwrap(), 1);
}

/// Node 2 neither replies nor refuses requests. The others reply at once.
///
/// Fault: N243
#[test]
fn silent_node_keeps_no_reader_from_an_operator() {
    let nodes = Nodes::start(3).behind_proxies(&[0, 1]);
    let mgr = RedisMgr::new(super::config_medium_timeout(&nodes)).unwrap();
    let lock = mgr.rw_lock("x").unwrap();
    let reader = lock.read_with(&outlasting()).unwrap();
    eventually("all nodes have it", TEST_TIMEOUT, || members(&nodes) == [1, 1, 1]);
    // So that no reply is there already when its request has been sent.
    for node in [0, 1] {
        let late = Fault::DelayReply(Duration::from_millis(5));
        nodes.proxy(node).on_request(contains("lock:x"), late).forever();
    }
    nodes.stop(2);
    let found = mgr.lock_info("x").unwrap().unwrap();
    let ids: Vec<_> = found.members().iter().map(|member| member.id()).collect();
    assert_eq!((ids, found.is_certain()), (vec![reader.id().as_str()], true));
    mgr.force_release_if("x", reader.id().as_str()).unwrap().unwrap_released();
    assert_eq!(members(&nodes), [0, 0]);
}
