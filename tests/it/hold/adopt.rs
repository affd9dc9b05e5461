//! Locks that their holder leaves to another process.

use std::time::Duration;

use distlock::{Detached, LockError, LockLost, RedisMgr, Released};

use crate::{
    family::Subject,
    helpers::{
        SECOND, UnwrapReleased, await_gone, config_long_timeouts, get, manager, pttl,
        server_behind_proxy, with_ttl,
    },
    support::{Cluster, Fault, Nodes, RedisServer, TEST_TIMEOUT, contains, eventually},
};

const LOCK: &str = "lock:x";

/// Promise: P1
#[test]
fn adopted_lock_has_one_successor_with_a_larger_token() {
    let cluster = Cluster::start(3);
    let of_cluster = || RedisMgr::new(config_long_timeouts(cluster.url())).unwrap();
    let pairs = Subject::all().into_iter().map(|subject| {
        let managers = [subject.manager(), subject.manager()];
        (Some(subject), managers)
    });
    for (_subject, [parent, child]) in pairs.chain([(None, [of_cluster(), of_cluster()])]) {
        let guard = parent.lock("x").unwrap();
        let (id, token) = (guard.id().clone(), guard.fencing_token());
        let text = guard.detach().unwrap().to_string();
        // Nobody gets between the two.
        assert!(child.try_lock("x").unwrap_err().is_contended());
        let detached: Detached = text.parse().unwrap();
        assert_eq!((detached.name(), detached.id()), ("x", &id));

        let adopted = child.adopt(&detached).unwrap();
        assert!(adopted.is_held() && adopted.fencing_token() > token);
        assert_ne!(adopted.id(), &id);
        assert_eq!(child.holder("x").unwrap().unwrap().id(), adopted.id().as_str());
        match parent.adopt(&detached).unwrap_err() {
            LockError::Held { holder, .. } => assert_eq!(holder.id(), adopted.id().as_str()),
            other => panic!("{other}"),
        }
        assert_eq!(adopted.release().unwrap(), Released::Released);
        match parent.adopt(&detached).unwrap_err() {
            LockError::Lost { why: LockLost::Gone, .. } => {}
            other => panic!("{other}"),
        }
        assert!(parent.try_lock("x").is_ok());
    }
}

/// The former holder renews the lock once more, and then neither renews nor releases it. The
/// successor renews it.
///
/// Promise: P3
#[test]
fn detached_lock_expires_unless_it_is_adopted() {
    let server = RedisServer::start();
    let (parent, child) = (manager(&server), manager(&server));
    let guard = parent.lock_with("x", &with_ttl(30 * SECOND).renew(false)).unwrap();
    server.cli(&["PEXPIRE", LOCK, "20000"]);
    let detached = guard.detach().unwrap();
    assert!(pttl(&server, LOCK) > 20_000);
    drop(parent);
    assert_eq!(get(&server, LOCK).as_deref(), Some(detached.id().as_str()));

    server.cli(&["PEXPIRE", LOCK, "1"]);
    await_gone(&server, LOCK);
    assert!(child.adopt(&detached).unwrap_err().is_lost());

    let short = |mgr: &RedisMgr| mgr.lock_with("x", &with_ttl(2 * SECOND)).unwrap();
    let detached = short(&child).detach().unwrap();
    let quick = RedisMgr::new(config_long_timeouts(server.url()).ttl(2 * SECOND)).unwrap();
    let adopted = quick.adopt(&detached).unwrap();
    let renewals = quick.metrics().renewals();
    eventually("it is renewed", TEST_TIMEOUT, || quick.metrics().renewals() > renewals + 3);
    adopted.release().unwrap().unwrap_released();
}

/// Fault: N177
#[test]
fn lost_reply_to_an_adoption_is_asked_for_again() {
    for fault in [Fault::ResetAfterRequest, Fault::CloseAfterRequest] {
        let (server, proxy, child) = server_behind_proxy(config_long_timeouts);
        let detached = manager(&server).lock("x").unwrap().detach().unwrap();
        let lost = proxy.on_request(contains(detached.id().as_str()), fault);
        let adopted = child.adopt(&detached).unwrap();
        assert_eq!(lost.fired(), 1);
        assert_eq!(get(&server, LOCK).as_deref(), Some(adopted.id().as_str()));
        adopted.release().unwrap().unwrap_released();
    }
}

#[test]
fn lost_lock_cannot_be_detached() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock("x").unwrap();
    server.cli(&["DEL", LOCK]);
    assert!(guard.detach().unwrap_err().is_lost());
    assert_eq!(get(&server, LOCK), None);
}

#[test]
fn locks_on_several_nodes_cannot_be_detached() {
    let nodes = Nodes::start(3);
    let config = config_long_timeouts(nodes.urls()).quarantine(Duration::ZERO);
    let mgr = RedisMgr::new(config).unwrap();
    let error = mgr.lock("x").unwrap().detach().unwrap_err();
    assert!(error.is_invalid() && error.to_string().contains("on one Redis server"), "{error}");
    // The guard has released it.
    assert!(!mgr.is_locked("x").unwrap());
}
