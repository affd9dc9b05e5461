//! Locks that their holders leave to a successor.

use distlock::{Config, Detached, LockError, LockGuard, LockKind, LockLost, LockOptions, RedisMgr};

use crate::{
    family::Subject,
    helpers::{
        CALL_LIMIT, SECOND, UnwrapReleased, await_gone, config_long_timeouts, config_short_timeout,
        expect_deadline_before_key_expiry, get, manager, pttl, server_behind_proxy, spawn_call,
        with_ttl,
    },
    support::{Fault, RedisServer, TEST_TIMEOUT, contains, eventually},
};

const LOCK: &str = "lock:x";

/// Promise: P3
#[test]
fn detached_lock_is_adopted_once_with_a_new_token() {
    for subject in Subject::all() {
        let (mgr, other) = (subject.manager(), subject.manager());
        let guard = mgr.lock_with("x", &with_ttl(60 * SECOND)).unwrap();
        let (id, token) = (guard.id().clone(), guard.fencing_token());
        let lost = guard.lost().clone();
        let detached = guard.detach().unwrap();
        assert!(lost.recv().is_err(), "it is no loss");
        let metrics = mgr.metrics();
        assert_eq!((metrics.held(), metrics.detached(), metrics.released()), (0, 1, 0));
        let detached: Detached = detached.to_string().parse().unwrap();
        assert_eq!((detached.name(), detached.id(), detached.ttl()), ("x", &id, 60 * SECOND));
        assert_eq!(mgr.holder("x").unwrap().unwrap().id(), id.as_str());

        let adopted = other.adopt(&detached).unwrap();
        assert!(adopted.fencing_token() > token && adopted.id() != &id);
        assert!(adopted.remaining() > 30 * SECOND && adopted.kind() == LockKind::Mutex);
        assert_eq!(mgr.holder("x").unwrap().unwrap().id(), adopted.id().as_str());
        let error = mgr.adopt(&detached).unwrap_err();
        assert!(
            matches!(&error, LockError::Lost { why: LockLost::Taken { by, .. }, .. }
            if by.id() == adopted.id().as_str()),
            "{error:?}"
        );
        // What the former holder sends late hits nothing.
        assert!(!mgr.release_lock("x", id.as_str()).unwrap());
        adopted.renew().unwrap();
        adopted.release().unwrap().unwrap_released();
        let error = mgr.adopt(&detached).unwrap_err();
        assert!(matches!(error, LockError::Lost { why: LockLost::Gone, .. }), "{error:?}");
    }
}

/// Promise: P12
#[test]
fn members_of_groups_pass_to_successors() {
    for subject in Subject::all() {
        let (mgr, other) = (subject.manager(), subject.manager());
        let (rw, permits) = (mgr.rw_lock("rw").unwrap(), mgr.semaphore("s", 3).unwrap());
        let (reader, stays) = (rw.read().unwrap(), rw.read().unwrap());
        let reader = other.adopt(&reader.detach().unwrap()).unwrap();
        assert!(reader.kind() == LockKind::Read && rw.try_write().is_err());
        drop(stays);
        reader.renew().unwrap();
        assert!(rw.try_write().is_err());
        reader.release().unwrap().unwrap_released();
        let writer = rw.try_write().unwrap().detach().unwrap();
        let writer = other.adopt(&writer).unwrap();
        assert!(rw.try_read().is_err());
        drop(writer);
        assert!(rw.try_read().is_ok());

        let pair = LockGuard::from(permits.acquire_many(2).unwrap()).detach().unwrap();
        let pair = other.adopt(&pair).unwrap();
        pair.renew().unwrap();
        assert_eq!(permits.available().unwrap(), 1);
        let [holder] = &permits.holders().unwrap()[..] else { panic!("one holder") };
        assert_eq!(holder.id(), pair.id().as_str());
        pair.release().unwrap().unwrap_released();
        assert_eq!(permits.available().unwrap(), 3);
    }
}

#[cfg(feature = "testing")]
#[test]
fn adopted_lock_is_held_for_the_max_hold_of_its_manager() {
    let server = distlock::testing::MemoryServer::new();
    let mgr = server.manager_with(|config| config.max_hold(5 * SECOND));
    let detached = mgr.lock("x").unwrap().detach().unwrap();
    let guard = mgr.adopt(&detached).unwrap();
    server.advance(4 * SECOND);
    assert!(guard.is_held());
    server.advance(2 * SECOND);
    assert!(matches!(guard.lost().recv().unwrap(), LockLost::MaxHold));
}

/// Fault: N177
#[cfg(feature = "testing")]
#[test]
fn lock_that_nobody_adopts_expires() {
    let server = distlock::testing::MemoryServer::new();
    let mgr = server.manager();
    let guard = mgr.lock_with("x", &with_ttl(10 * SECOND)).unwrap();
    server.advance(5 * SECOND);
    let detached = guard.detach().unwrap();
    server.advance(9 * SECOND);
    assert!(mgr.is_locked("x").unwrap(), "it was renewed once");
    server.advance(2 * SECOND);
    assert!(!mgr.is_locked("x").unwrap(), "and then no more");
    assert!(mgr.adopt(&detached).unwrap_err().is_lost());
}

/// The proxy holds back the first request for the lock and cuts its connection. The second request
/// acquires the lock. The first one reaches the server only once the successor has released it.
///
/// Fault: N193
#[test]
fn late_request_after_a_detach_leaves_no_lock() {
    let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    let late = proxy.on_request(contains(LOCK), Fault::HoldRequest);
    let locking = spawn_call(&mgr, "x", |mgr, name| mgr.lock(name).unwrap());
    late.wait_fired();
    proxy.reset_all();
    let detached = locking.join().unwrap().detach().unwrap();
    manager(&server).adopt(&detached).unwrap().release().unwrap().unwrap_released();
    let commands = server.monitor();
    late.release();
    assert!(commands.wait_for(detached.id().as_str()).contains(LOCK));
    server.cli(&["ECHO", "all was recorded"]);
    commands.wait_for("all was recorded");
    assert_eq!(get(&server, LOCK), None);
}

/// The proxy holds back the first request of the adoption and cuts its connection. The second one
/// succeeds, and the successor extends its lease, before the first one reaches the server.
///
/// Fault: N193
/// Promise: P2
#[test]
fn late_adoption_does_not_shorten_an_extended_lock() {
    let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    let (rw, ttl) = (mgr.rw_lock("x").unwrap(), with_ttl(10 * SECOND));
    for is_reader in [false, true] {
        let detached = match is_reader {
            true => LockGuard::from(rw.read_with(&ttl).unwrap()).detach().unwrap(),
            false => mgr.lock_with("x", &ttl).unwrap().detach().unwrap(),
        };
        let late = proxy.on_request(contains(detached.id().as_str()), Fault::HoldRequest);
        let adopted = detached.clone();
        let adopting = spawn_call(&mgr, "x", move |mgr, _| mgr.adopt(&adopted).unwrap());
        late.wait_fired();
        proxy.reset_all();
        let guard = adopting.join().unwrap();
        // The connection of the renewer was cut too, and a renewal that was lost with it may still
        // shorten the lock for a while.
        let extend = || guard.extend(600 * SECOND).is_ok() && guard.remaining() > 500 * SECOND;
        eventually("it is extended", TEST_TIMEOUT, extend);
        let commands = server.monitor();
        late.release();
        commands.wait_for(detached.id().as_str());
        server.cli(&["ECHO", "all was recorded"]);
        commands.wait_for("all was recorded");
        expect_deadline_before_key_expiry(&server, &guard);
        assert!(guard.remaining() > 500 * SECOND && pttl(&server, LOCK) > 500_000);
        guard.release().unwrap().unwrap_released();
    }
}

/// Fault: N177
#[test]
fn lost_reply_to_an_adoption_is_asked_for_again() {
    for fault in [Fault::DropReply, Fault::ResetAfterRequest, Fault::ResetBeforeRequest] {
        let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
        let detached = mgr.lock_with("x", &with_ttl(600 * SECOND)).unwrap().detach().unwrap();
        let lost = proxy.on_request(contains(detached.id().as_str()), fault);
        let guard = mgr.adopt(&detached).unwrap();
        assert_eq!(lost.fired(), 1);
        assert_eq!(get(&server, LOCK).as_deref(), Some(guard.id().as_str()));
        expect_deadline_before_key_expiry(&server, &guard);
        guard.release().unwrap().unwrap_released();
    }
}

/// Fault: N191
#[test]
fn adoption_without_a_reply_leaves_nothing() {
    let (server, proxy, mgr) = server_behind_proxy(config_short_timeout);
    let detach = || mgr.lock_with("x", &with_ttl(600 * SECOND)).unwrap().detach().unwrap();
    // From here on, the server knows the script.
    drop(mgr.adopt(&detach()).unwrap());
    let detached = detach();
    proxy.one_way();
    let error = mgr.adopt(&detached).unwrap_err();
    assert!(error.is_unavailable(), "{error:?}");
    assert_ne!(get(&server, LOCK).as_deref(), Some(detached.id().as_str()), "it was carried out");
    proxy.heal();
    await_gone(&server, LOCK);

    let detached = detach();
    proxy.blackhole();
    assert!(mgr.adopt(&detached).unwrap_err().is_unavailable());
    proxy.heal();
    let adopted = mgr.adopt(&detached).unwrap();
    adopted.release().unwrap().unwrap_released();
}

/// Fault: N177
#[test]
fn lock_that_cannot_be_detached_is_released() {
    let (server, proxy, mgr) = server_behind_proxy(config_short_timeout);
    let guard = mgr.lock_with("x", &with_ttl(600 * SECOND)).unwrap();
    proxy.blackhole();
    assert!(guard.detach().unwrap_err().is_unavailable());
    proxy.heal();
    await_gone(&server, LOCK);
}

#[test]
fn lock_that_cannot_pass_is_refused_with_a_reason() {
    let reason = |error: LockError| match error {
        LockError::InvalidOptions { reason, .. } => reason,
        other => panic!("{other:?}"),
    };
    let server = RedisServer::start();
    let mgr = manager(&server);
    let kept = LockOptions::new().hold_at_least(60 * SECOND);
    let kept = mgr.lock_with("x", &kept).unwrap().detach().unwrap_err();
    assert!(reason(kept).contains("acquire the lock without hold_at_least"));
    assert!(pttl(&server, LOCK) > 0, "it stays taken");

    let detached = mgr.lock("y").unwrap().detach().unwrap();
    let nodes: Vec<_> = (0..3).map(|_| RedisServer::start()).collect();
    let config =
        Config::nodes(nodes.iter().map(RedisServer::url)).quarantine(std::time::Duration::ZERO);
    let several = RedisMgr::new(config.operation_timeout(CALL_LIMIT)).unwrap();
    let guard = several.lock("y").unwrap();
    for error in [several.adopt(&detached).map(drop), guard.detach().map(drop)] {
        assert!(reason(error.unwrap_err()).contains("on one Redis server or in a cluster only"));
    }
}
