//! Servers that are replaced: failovers, promoted replicas, and new socket files.

mod clock;
mod failover;
mod state;

use std::time::Duration;

use distlock::{LockLost, RedisMgr, Released};

use super::{LOCK, expect_renewals};
use crate::{
    helpers::{
        CALL_LIMIT, UnwrapReleased, await_gone, completes_within, config_long_timeouts,
        config_medium_timeout, config_short_timeout, expect_loss, get, is_renewal, manager, pttl,
        queue_key, server_with_scripts, spawn_queued_waiter, with_ttl,
    },
    support::{Fault, FaultProxy, RedisServer, TEST_TIMEOUT, eventually},
};

const TTL: Duration = Duration::from_secs(3);

/// Makes one server the replica of another, and waits until it has all data.
pub(crate) fn follow(replica: &RedisServer, master: &RedisServer) {
    replica.cli(&["REPLICAOF", "127.0.0.1", &master.port().to_string()]);
    let is_up =
        || replica.query::<String>(&["INFO", "replication"]).contains("master_link_status:up");
    eventually("the replica is up", TEST_TIMEOUT, is_up);
}

pub(crate) fn promote(replica: &RedisServer) {
    replica.cli(&["REPLICAOF", "NO", "ONE"]);
}

/// A failover that loses no data costs no lock, although the former master keeps its connections
/// open. Only new connections lead to the new master.
///
/// Fault: F38
#[test]
fn demoted_master_is_left_for_the_new_master() {
    let (old, new) = (RedisServer::start(), RedisServer::start());
    let proxy = FaultProxy::in_front_of(old.addr());
    let mgr = RedisMgr::new(config_medium_timeout(proxy.url())).unwrap();
    let guard = mgr.lock_with("x", &with_ttl(4 * TTL)).unwrap();
    expect_renewals(&old, &guard, 1);
    follow(&new, &old);
    assert_eq!(get(&new, LOCK).as_deref(), Some(guard.id().as_str()));
    proxy.lead_to(new.addr());
    promote(&new);
    follow(&old, &new);
    eventually("it uses the new master", TEST_TIMEOUT, || match mgr.try_lock("y") {
        Ok(guard) => get(&new, "lock:y").as_deref() == Some(guard.id().as_str()),
        Err(error) => {
            assert!(error.code() == Some("READONLY") || error.is_unavailable(), "{error}");
            false
        }
    });
    expect_renewals(&new, &guard, 1);
    guard.release().unwrap().unwrap_released();
    assert_eq!(get(&new, LOCK), None);
}

/// A planned failover: the master stops writes, waits until the replica has all data, and the two
/// swap their roles. The former master keeps its connections open. Its replies do not count once
/// the address leads elsewhere.
///
/// Fault: F38
#[test]
fn planned_failover_fails_no_call() {
    let (old, new) = (RedisServer::start(), RedisServer::start());
    let proxy = FaultProxy::in_front_of(old.addr());
    let [releases, tries, waits] = [(); 3].map(|()| {
        let mgr = RedisMgr::new(config_medium_timeout(proxy.url())).unwrap();
        mgr.lock("warm").unwrap().release().unwrap().unwrap_released();
        mgr
    });
    let guard = releases.lock_with("x", &with_ttl(10 * TTL)).unwrap();
    follow(&new, &old);
    let reports = |server: &RedisServer, what| {
        server.query::<String>(&["INFO", "replication"]).contains(what)
    };
    eventually("the master knows its replica", TEST_TIMEOUT, || reports(&old, "state=online"));
    old.cli(&["FAILOVER"]);
    eventually("the roles are swapped", TEST_TIMEOUT, || {
        reports(&new, "role:master") && reports(&old, "role:slave")
    });
    proxy.lead_to(new.addr());
    guard.release().unwrap().unwrap_released();
    assert_eq!(get(&new, LOCK), None);
    for next in [tries.try_lock("x").unwrap(), waits.lock("y").unwrap()] {
        assert_eq!(
            get(&new, &format!("lock:{}", next.name())).as_deref(),
            Some(next.id().as_str())
        );
        next.release().unwrap().unwrap_released();
    }
}

/// While the server is down, its socket file may exist without a listener, or be missing. Then
/// there is a new one.
///
/// Fault: F29
#[test]
fn recreated_socket_file_costs_no_lock() {
    let server = RedisServer::builder().unix_socket().append_only(true).start();
    let mgr = RedisMgr::new(config_medium_timeout(server.unix_url())).unwrap();
    let guard = mgr.lock_with("x", &with_ttl(10 * TTL)).unwrap();
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    server.kill();
    for _ in 0..2 {
        let error = completes_within(CALL_LIMIT, "try_lock", || mgr.try_lock("y").unwrap_err());
        assert!(error.is_unavailable(), "{error}");
        let _ = std::fs::remove_file(server.socket_path());
    }
    server.restart();
    expect_renewals(&server, &guard, 1);
    guard.release().unwrap().unwrap_released();
    completes_within(TEST_TIMEOUT, "the hand-over", || waiting.join().unwrap().unwrap())
        .release()
        .unwrap()
        .unwrap_released();
}

/// A former master keeps its subscribers. Waiters must subscribe to the new master instead.
///
/// Fault: N32
/// Promise: P4
#[test]
fn waiters_queue_at_the_new_master() {
    let (old, new) = (RedisServer::start(), RedisServer::start());
    let proxy = FaultProxy::in_front_of(old.addr());
    let mgr = RedisMgr::new(config_medium_timeout(proxy.url())).unwrap();
    let holder = manager(&old);
    let commands = old.monitor();
    // Waits until the server is known to have the subscription. A new connection may be opened in
    // between, which makes the next waiter ask again.
    eventually("a waiter does not ask for the subscription", TEST_TIMEOUT, || {
        let first = holder.lock("warm").unwrap();
        let waiting = spawn_queued_waiter(&old, &mgr, "warm");
        first.release().unwrap().unwrap_released();
        waiting.join().unwrap().unwrap().release().unwrap().unwrap_released();
        commands.count("\"join-heard\"") > 0
    });
    follow(&new, &old);
    proxy.lead_to(new.addr());
    promote(&new);
    follow(&old, &new);
    eventually("it uses the new master", TEST_TIMEOUT, || mgr.try_lock("y").is_ok());
    let other = manager(&new);
    let held = other.lock("x").unwrap();
    let commands = new.monitor();
    let waiting = spawn_queued_waiter(&new, &mgr, "x");
    new.cli(&["ECHO", "queued"]);
    commands.wait_for("\"queued\"");
    assert_eq!(commands.count("\"join-heard\""), 0, "the subscription is elsewhere");
    eventually("it is subscribed to the new master", TEST_TIMEOUT, || {
        !new.query::<Vec<String>>(&["PUBSUB", "CHANNELS"]).is_empty()
    });
    held.release().unwrap().unwrap_released();
    assert!(other.try_lock("x").is_err(), "the lock was not handed over");
    let next = waiting.join().unwrap().unwrap();
    assert!(next.is_held());
    assert_eq!(get(&new, LOCK).as_deref(), Some(next.id().as_str()));
}

/// Otherwise a waiter could take a grant message from a replica for a lock of another client.
///
/// Fault: N33
/// Promise: P1
#[test]
fn grant_messages_are_not_replicated() {
    const CHANNEL: &str = "distlock:client:other";
    let (master, replica) = (RedisServer::start(), RedisServer::start());
    follow(&replica, &master);
    let held = manager(&master).lock("x").unwrap();
    let subscribe = |server: &RedisServer| {
        let mut connection = redis::Client::open(server.url()).unwrap().get_connection().unwrap();
        connection.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
        connection
            .send_packed_command(&redis::cmd("SUBSCRIBE").arg(CHANNEL).get_packed_command())
            .unwrap();
        connection.recv_response().unwrap();
        // Waiters do both. A server before Redis 7 has no sharded channels, and replies with an
        // error.
        connection
            .send_packed_command(&redis::cmd("SSUBSCRIBE").arg(CHANNEL).get_packed_command())
            .unwrap();
        drop(connection.recv_response());
        connection
    };
    let (mut at_master, mut at_replica) = (subscribe(&master), subscribe(&replica));
    master.cli(&["RPUSH", &queue_key("x"), &format!("20000 {CHANNEL} waiter")]);
    held.release().unwrap().unwrap_released();
    assert_eq!(get(&master, LOCK).as_deref(), Some("waiter"));
    master.cli(&["PUBLISH", CHANNEL, "the end"]);
    let receive = |connection: &mut redis::Connection| match connection.recv_response().unwrap() {
        redis::Value::Array(parts) => redis::from_redis_value::<String>(parts[2].clone()).unwrap(),
        other => panic!("{other:?}"),
    };
    assert!(receive(&mut at_master).ends_with(" 20000 waiter"));
    assert_eq!(receive(&mut at_master), "the end");
    assert_eq!(receive(&mut at_replica), "the end");
    eventually("the replica has the lock", TEST_TIMEOUT, || {
        get(&replica, LOCK).as_deref() == Some("waiter")
    });
}

/// The former master refuses all commands, because it is configured not to serve stale data.
///
/// Fault: F39
#[test]
fn refusing_replica_is_left_for_the_new_master() {
    let (old, new) = (RedisServer::start(), RedisServer::start());
    let proxy = FaultProxy::in_front_of(old.addr());
    let mgr = RedisMgr::new(config_medium_timeout(proxy.url())).unwrap();
    drop(mgr.lock("x").unwrap());
    old.config_set("replica-serve-stale-data", "no");
    old.cli(&["REPLICAOF", "127.0.0.1", "1"]);
    proxy.lead_to(new.addr());
    eventually("it uses the new master", TEST_TIMEOUT, || match mgr.try_lock("x") {
        Ok(guard) => get(&new, LOCK).as_deref() == Some(guard.id().as_str()),
        Err(error) => {
            assert!(error.code() == Some("MASTERDOWN") || error.is_unavailable(), "{error}");
            false
        }
    });
}

/// The promoted replica has not received the last lock. For up to a renewal interval there are two
/// holders, and the fencing tokens show which one is later.
///
/// Fault: F40
#[test]
fn failover_that_loses_the_lock_is_noticed() {
    let (old, new) = (RedisServer::start(), RedisServer::start());
    let proxy = FaultProxy::in_front_of(old.addr());
    let mgr = RedisMgr::new(config_long_timeouts(proxy.url())).unwrap();
    mgr.lock("x").unwrap().release().unwrap().unwrap_released();
    follow(&new, &old);
    promote(&new);
    // The ttl is long enough for the next holder to come before the first renewal.
    let guard = mgr.lock_with("x", &with_ttl(4 * TTL)).unwrap();
    proxy.lead_to(new.addr());
    old.kill();
    proxy.reset_all();
    let other = RedisMgr::new(config_long_timeouts(proxy.url())).unwrap();
    let next = completes_within(CALL_LIMIT, "try_lock", || other.try_lock("x").unwrap());
    assert!(next.fencing_token() > guard.fencing_token());
    let why = expect_loss(&guard);
    assert!(matches!(&why, LockLost::Taken { by, .. } if by.id() == next.id().as_str()), "{why:?}");
    let released = guard.release();
    assert!(matches!(released, Ok(Released::OwnedByOther(_))), "{released:?}");
    assert!(next.is_held());
    assert_eq!(get(&new, LOCK).as_deref(), Some(next.id().as_str()));
}

/// The worst case of a lost reply: an abandoned renewal arrives when its process cannot release the
/// lock any more.
///
/// Fault: N22
#[test]
fn renewal_of_a_dead_holder_extends_its_lock_once() {
    let server = server_with_scripts();
    let proxy = FaultProxy::in_front_of(server.addr());
    let mgr = RedisMgr::new(config_short_timeout(proxy.url())).unwrap();
    let guard = mgr.lock_with("x", &with_ttl(4 * TTL)).unwrap();
    let late = proxy.on_request(is_renewal(LOCK), Fault::HoldRequest);
    late.wait_fired();
    proxy.blackhole();
    std::mem::forget(guard);
    let commands = server.monitor();
    late.release();
    commands.wait_for("lua] \"PEXPIRE\" \"lock:x\"");
    // The key expires after at most one ttl.
    assert!(pttl(&server, LOCK) <= 12_000);
    completes_within(TTL * 8 + CALL_LIMIT, "the expiry", || await_gone(&server, LOCK));
    assert_eq!(super::renewals(&commands, LOCK), 1);
}
