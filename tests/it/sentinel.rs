//! A master that Redis Sentinel names, and a master behind a name: failovers, former masters that
//! reply again, and sentinels that are unreachable.

mod processes;

use std::thread;

use distlock::{Config, LockError, RedisMgr};

use crate::{
    helpers::{
        CALL_LIMIT, SECOND, UnwrapReleased, completes_within, config_medium_timeout, get,
        spawn_call, with_ttl,
    },
    support::{FaultProxy, RedisServer, SentinelGroup, TEST_TIMEOUT, eventually, eventually_some},
};

/// With the usual operation timeout, so that a frozen server costs a second.
fn config(url: impl Into<String>) -> Config {
    Config::new(url).ttl(30 * SECOND)
}

fn manager(group: &SentinelGroup) -> RedisMgr {
    RedisMgr::new(config(group.url())).unwrap()
}

/// Opens several pooled connections.
fn fill_pool(mgr: &RedisMgr) {
    thread::scope(|threads| {
        for thread in 0..4 {
            threads.spawn(move || {
                for _ in 0..50 {
                    let guard = mgr.lock(&format!("fill{thread}")).unwrap();
                    guard.release().unwrap().unwrap_released();
                }
            });
        }
    });
}

/// Locks until that succeeds: while a failover lasts, calls fail.
fn lock_eventually(mgr: &RedisMgr, name: &str) -> distlock::LockGuard {
    eventually_some("the lock is granted", TEST_TIMEOUT, || mgr.try_lock(name).ok())
}

/// Fault: F30
#[test]
fn holders_and_waiters_follow_the_master() {
    let group = SentinelGroup::start(1);
    let (holder, waiter) = (manager(&group), manager(&group));
    let held = holder.lock_with("held", &with_ttl(3 * SECOND)).unwrap();
    let first = holder.lock("x").unwrap();
    let waiting = spawn_call(&waiter, "x", |mgr, name| mgr.lock(name).unwrap());
    eventually("it waits", TEST_TIMEOUT, || {
        holder.holder("x").unwrap().unwrap().waiters() == Some(1)
    });
    let replica = &group.servers[1];
    eventually("the replica has both locks", TEST_TIMEOUT, || {
        get(replica, "lock:held").is_some() && get(replica, "lock:x").is_some()
    });
    group.servers[0].kill();
    let new = group.await_other_master(&group.servers[0]);
    eventually("it is released", TEST_TIMEOUT, || {
        holder.force_release("x").is_ok() || get(new, "lock:x") != Some(first.id().to_string())
    });
    let next = waiting.join().unwrap();
    assert_eq!(get(new, "lock:x").as_deref(), Some(next.id().as_str()));
    assert!(next.fencing_token() > first.fencing_token());
    // The failover took part of the ttl. A renewal has kept the lock, or its loss has a reason.
    match held.ensure_held() {
        Ok(()) => assert_eq!(get(new, "lock:held").as_deref(), Some(held.id().as_str())),
        Err(LockError::Lost { .. }) => {}
        Err(other) => panic!("{other}"),
    }
    next.release().unwrap().unwrap_released();
}

/// The former master believes for a while that it still is one.
///
/// Fault: N149
#[test]
fn thawed_former_master_is_not_asked() {
    let group = SentinelGroup::start(1);
    let mgr = manager(&group);
    fill_pool(&mgr);
    let former = &group.servers[0];
    let asked = former.calls("evalsha");
    former.stop();
    let new = group.await_other_master(former);
    let guard = lock_eventually(&mgr, "y");
    former.cont();
    guard.release().unwrap().unwrap_released();
    assert_eq!(get(new, "lock:y"), None);
    fill_pool(&mgr);
    assert!(mgr.try_lock("z").is_ok());
    // One request may have reached the frozen server before the manager knew of the new master.
    assert!(former.calls("evalsha") <= asked + 1);
}

/// Otherwise it would not notice that a frozen master that goes on has been replaced.
///
/// Fault: N149
#[test]
fn idle_manager_asks_the_sentinels() {
    let group = SentinelGroup::start(0);
    // The interval is also at most a third of the ttl.
    let mgr = RedisMgr::new(config(group.url()).ttl(600 * SECOND)).unwrap();
    drop(mgr.lock("x").unwrap());
    // In seconds: the sentinel answered this connection a moment ago, and it is not new.
    let field = |client: &str, name: &str| -> u64 {
        let value = client.split(' ').find_map(|field| field.strip_prefix(name)).unwrap();
        value.parse().unwrap()
    };
    eventually("the sentinel is asked again", TEST_TIMEOUT, || {
        let clients: String = group.query(1, &["CLIENT", "LIST"]);
        let mut ours = clients.lines().filter(|client| client.contains("cmd=sentinel"));
        ours.any(|client| field(client, "age=") >= 4 && field(client, "idle=") <= 1)
    });
}

/// Fault: N150
#[test]
fn sentinels_that_are_away_stop_no_lock() {
    let group = SentinelGroup::start(0);
    let mgr = manager(&group);
    group.stop_sentinel(0);
    let late = manager(&group);
    drop(completes_within(CALL_LIMIT, "a lock", || late.lock("x").unwrap()));
    for index in 0..3 {
        group.kill_sentinel(index);
    }
    drop(late.lock("x").unwrap());
    group.servers[0].kill_clients(&["TYPE", "normal"]);
    drop(lock_eventually(&late, "x"));
    // It has not heard of a master before.
    let error = mgr.try_lock("x").unwrap_err();
    assert!(error.is_unavailable(), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("no sentinel names the master of \"main\""), "{text}");
    assert_eq!(text.matches("onnection refused").count(), 3, "{text}");
}

/// Fault: N150
#[test]
fn wrong_name_or_kind_of_server_is_explained() {
    let group = SentinelGroup::start(0);
    let refused = |url: String| {
        let mgr = RedisMgr::new(config(url)).unwrap();
        completes_within(CALL_LIMIT, "a lock", || mgr.lock("x").unwrap_err()).to_string()
    };
    let text = refused(group.url().replace("/main", "/other"));
    assert!(text.contains("it does not know this name"), "{text}");
    let text = refused(format!("redis+sentinel://{}/main", group.servers[0].addr()));
    assert!(text.contains("it is not a sentinel"), "{text}");
    for index in 0..3 {
        group.query::<()>(index, &["ACL", "SETUSER", "default", "resetpass", ">secret"]);
    }
    let text = refused(group.url());
    assert!(text.contains("NOAUTH") && text.contains("sentinel_pass, after ?"), "{text}");
    let urls = [group.url(), group.servers[0].url()];
    let several = RedisMgr::new(Config::nodes(urls)).unwrap_err().to_string();
    assert!(several.contains("must be independent servers"), "{several}");
}

/// A host name leads to the new master, and the connections in the pool to the former one.
///
/// Fault: N149
#[test]
fn former_master_behind_a_name_is_not_asked() {
    let (former, new) = (RedisServer::start(), RedisServer::start());
    let proxy = FaultProxy::in_front_of(former.addr());
    let mgr = RedisMgr::new(config(proxy.url())).unwrap();
    fill_pool(&mgr);
    let asked = former.calls("evalsha");
    former.stop();
    proxy.lead_to(new.addr());
    // The first calls still wait for the frozen server.
    let guard = lock_eventually(&mgr, "y");
    former.cont();
    guard.release().unwrap().unwrap_released();
    fill_pool(&mgr);
    assert_eq!(get(&new, "lock:y"), None);
    // A request had reached the former master before the name led elsewhere.
    assert!(former.calls("evalsha") <= asked + 4, "more than one for each connection");
}

/// A replica that lacks the lock would report it as gone, and one that lags behind knows an earlier
/// holder.
///
/// Fault: N151
/// Promise: P2
#[test]
fn renewal_does_not_ask_a_replica() {
    for earlier_holder in [None, Some("an earlier holder")] {
        for is_reader in [false, true] {
            let (server, replica) = (RedisServer::start(), RedisServer::start());
            if let Some(holder) = earlier_holder {
                replica.cli(&["SET", "lock:x", holder]);
            }
            replica.cli(&["REPLICAOF", "127.0.0.1", "1"]);
            let proxy = FaultProxy::in_front_of(server.addr());
            let mgr = RedisMgr::new(config_medium_timeout(proxy.url())).unwrap();
            let options = with_ttl(60 * SECOND);
            let guard = match is_reader {
                true => mgr.rw_lock("x").unwrap().read_with(&options).unwrap().into(),
                false => mgr.lock_with("x", &options).unwrap(),
            };
            proxy.lead_to(replica.addr());
            proxy.reset_all();
            let error = guard.renew().unwrap_err();
            assert!(!error.is_lost() && guard.is_held(), "{error:?}");
            let error = mgr.try_lock("x").unwrap_err();
            assert!(!error.is_contended(), "{error:?}");
            proxy.lead_to(server.addr());
            guard.renew().unwrap();
            guard.release().unwrap().unwrap_released();
        }
    }
}

/// The operator must see which address is wrong: the sentinels reply.
///
/// Fault: N264
#[test]
fn unreachable_master_is_named_as_the_sentinels_name_it() {
    let group = SentinelGroup::start(0);
    let mgr = manager(&group);
    drop(mgr.lock("x").unwrap());
    let master = &group.servers[0];
    let named = format!("127.0.0.1:{}, the master that the sentinels name", master.port());
    master.kill();
    eventually("the error names the master", TEST_TIMEOUT, || {
        let error = mgr.try_lock("x").unwrap_err();
        assert!(error.is_unavailable(), "{error:?}");
        error.to_string().contains(&named)
    });
}
