//! A server with replicas, of which one is promoted: `Config::replicas` and `Config::quarantine`.

use std::{thread, time::Duration};

use distlock::{Config, LockError, LockLost, RedisMgr};

use crate::{
    faults::server::{follow, promote},
    helpers::{
        CALL_LIMIT, SECOND, UnwrapReleased, await_gone, completes_within, config_long_timeouts,
        config_medium_timeout, get, spawn_call, spawn_queued_waiter, with_ttl,
    },
    support::{Fault, FaultProxy, RedisServer, SlowLink, TEST_TIMEOUT, contains, eventually},
};

const LOCK: &str = "lock:x";

fn replicated(server: &RedisServer, count: u32, within: Duration) -> RedisMgr {
    RedisMgr::new(config_long_timeouts(server.url()).replicas(count, within)).unwrap()
}

/// A replica to which every byte takes `delay`.
fn distant_replica(master: &RedisServer, delay: Duration) -> RedisServer {
    let replica = RedisServer::start();
    let link = SlowLink::to(master.addr(), delay);
    replica.cli(&["REPLICAOF", "127.0.0.1", &link.addr().port().to_string()]);
    let is_up =
        || replica.query::<String>(&["INFO", "replication"]).contains("master_link_status:up");
    eventually("the replica is up", TEST_TIMEOUT, is_up);
    replica
}

/// The master is killed as soon as the last lock is held, and the replica that has received most
/// is promoted, as Sentinel does.
///
/// Fault: N168
/// Promise: P1
#[test]
fn no_lock_is_lost_if_replicas_had_it() {
    let server = RedisServer::builder().arg("--repl-diskless-sync-delay").arg("0").start();
    let replicas = [5, 20].map(|ms| distant_replica(&server, Duration::from_millis(ms)));
    let mgr = replicated(&server, 1, 10 * SECOND);
    let guards = thread::scope(|threads| {
        let hold_some = |thread: usize| {
            let mgr = &mgr;
            let lock = move |lock| mgr.lock(&format!("{thread}-{lock}")).unwrap();
            threads.spawn(move || (0..25).map(lock).collect::<Vec<_>>())
        };
        let threads: Vec<_> = (0..8).map(hold_some).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    server.kill();
    replicas.iter().for_each(promote);
    let missing = |replica: &RedisServer| {
        let is_missing = |guard: &&distlock::LockGuard| {
            get(replica, &format!("lock:{}", guard.name())).as_deref() != Some(guard.id().as_str())
        };
        guards.iter().filter(is_missing).count()
    };
    let missing = replicas.each_ref().map(missing);
    assert!(guards.len() == 200 && missing.contains(&0), "the replicas lack {missing:?} locks");
}

/// Fault: N168
#[test]
fn lock_that_too_few_replicas_have_is_released() {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(
        Config::new(server.url()).operation_timeout(SECOND).replicas(1, Duration::from_millis(1)),
    )
    .unwrap();
    for wait in [Duration::ZERO, Duration::from_millis(100)] {
        let error = mgr.try_lock_for("x", wait).unwrap_err();
        assert!(error.is_unavailable(), "{error}");
        let reason = "only 0 of 1 replicas had the lock within 1ms (Config::replicas)";
        assert!(error.to_string().contains(reason), "{error}");
        await_gone(&server, LOCK);
    }
    let replica = RedisServer::start();
    follow(&replica, &server);
    let mgr = replicated(&server, 1, 10 * SECOND);
    mgr.try_lock("x").unwrap().release().unwrap().unwrap_released();
}

/// The grant message comes from the master, before any replica has the lock.
///
/// Fault: N168
#[test]
fn waiter_holds_the_lock_only_once_a_replica_has_it() {
    let (server, replica) = (RedisServer::start(), RedisServer::start());
    follow(&replica, &server);
    let [holder, waiter] = [0, 1].map(|_| replicated(&server, 1, 10 * SECOND));
    let held = holder.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &waiter, "x");
    replica.stop();
    held.release().unwrap().unwrap_released();
    eventually("it waits for the replica", TEST_TIMEOUT, || {
        server.query::<String>(&["INFO", "clients"]).contains("blocked_clients:1")
    });
    assert!(!waiting.is_finished());
    replica.cont();
    let guard = completes_within(CALL_LIMIT, "the wait", || waiting.join().unwrap().unwrap());
    eventually("the replica has it", TEST_TIMEOUT, || {
        get(&replica, LOCK).as_deref() == Some(guard.id().as_str())
    });
}

/// A replica that was cut off long ago could be promoted, and has the lock with an old expiry.
///
/// Fault: N168
#[test]
fn renewal_that_no_replica_has_does_not_extend_the_lease() {
    let (server, replica) = (RedisServer::start(), RedisServer::start());
    follow(&replica, &server);
    let within = Duration::from_millis(100);
    let mgr = RedisMgr::new(config_medium_timeout(server.url()).replicas(1, within)).unwrap();
    let guard = mgr.lock_with("x", &with_ttl(3 * SECOND)).unwrap();
    let renewed = mgr.metrics().renewals();
    eventually("it is renewed", TEST_TIMEOUT, || mgr.metrics().renewals() > renewed);
    replica.stop();
    let lost = guard.lost().recv_timeout(TEST_TIMEOUT).unwrap();
    assert!(matches!(lost, LockLost::Expired), "{lost}");
    replica.cont();
}

/// The replica would keep the lock for a writer, until the expiry that the writer had.
///
/// Fault: N168
/// Promise: P1
#[test]
fn reader_needs_the_replicas_that_its_write_lock_had() {
    let (server, replica) = (RedisServer::start(), RedisServer::start());
    follow(&replica, &server);
    let within = Duration::from_millis(100);
    let mgr = RedisMgr::new(config_medium_timeout(server.url()).replicas(1, within)).unwrap();
    let lock = mgr.rw_lock("x").unwrap();
    lock.write().unwrap().downgrade().unwrap().release().unwrap().unwrap_released();
    let writer = lock.write().unwrap();
    replica.stop();
    let error = writer.downgrade().unwrap_err();
    assert!(error.to_string().contains("only 0 of 1 replicas had the lock"), "{error}");
    replica.cont();
    await_gone(&server, LOCK);
}

/// The new master lacks the lock. Nobody gets it there while its former holder may rely on it.
///
/// Fault: N169
/// Promise: P1
#[test]
fn new_master_grants_nothing_during_the_quarantine() {
    let (server, new) = (RedisServer::start(), RedisServer::start());
    new.cli(&["REPLICAOF", "127.0.0.1", "1"]);
    let proxy = FaultProxy::in_front_of(server.addr());
    let quarantine = 6 * SECOND;
    let config = || config_medium_timeout(proxy.url()).ttl(3 * SECOND).quarantine(quarantine);
    config().declare_nodes_new(false).unwrap();
    let [holder, other] = [0, 1].map(|_| RedisMgr::new(config()).unwrap());
    let guard = holder.lock("x").unwrap();
    drop(other.lock("y").unwrap());
    let detached = holder.lock("d").unwrap().detach().unwrap();
    // The former master may have passed it on already, without a replica hearing of it.
    new.cli(&["REPLICAOF", "NO", "ONE"]);
    new.cli(&["SET", "lock:d", detached.id().as_str(), "PX", "600000"]);
    new.cli(&["REPLICAOF", "127.0.0.1", "1"]);
    server.kill();
    promote(&new);
    proxy.lead_to(new.addr());
    let error = other.try_lock_for("x", SECOND).unwrap_err();
    let reason = "it may have lost locks in a restart or a failover, and grants none for ";
    assert!(error.to_string().contains(reason), "{error}");
    let error = other.adopt(&detached).unwrap_err();
    assert!(error.to_string().contains(reason), "{error}");
    let next = other.lock("x").unwrap();
    assert!(matches!(guard.ensure_held(), Err(LockError::Lost { .. })));
    assert!(next.fencing_token() > guard.fencing_token());
    // A manager that sees the new master first cannot know since when it is one.
    let error = RedisMgr::new(config()).unwrap().try_lock("z").unwrap_err();
    assert!(error.to_string().contains(reason), "{error}");
}

/// The request goes to the former master, which still replies. Before its reply arrives, another
/// thread of the manager connects to the new one, which may have granted the lock already.
///
/// Fault: N169
/// Promise: P1
#[test]
fn grant_of_a_former_master_does_not_count() {
    let (former, new) = (RedisServer::start(), RedisServer::start());
    let proxy = FaultProxy::in_front_of(former.addr());
    let config = config_medium_timeout(proxy.url()).ttl(3 * SECOND).quarantine(6 * SECOND);
    config.declare_nodes_new(false).unwrap();
    let mgr = RedisMgr::new(config).unwrap();
    drop(mgr.lock("y").unwrap());
    let reply = proxy.on_request(contains("lock:x"), Fault::HoldReply);
    let asking = spawn_call(&mgr, "x", |mgr, name| mgr.try_lock(name).map(drop));
    reply.wait_fired();
    proxy.lead_to(new.addr());
    let reason = "it may have lost locks in a restart or a failover, and grants none for ";
    let error = mgr.try_lock("z").unwrap_err();
    assert!(error.to_string().contains(reason), "{error}");
    reply.release();
    let error = asking.join().unwrap().unwrap_err();
    assert!(error.to_string().contains(reason), "{error}");
}
