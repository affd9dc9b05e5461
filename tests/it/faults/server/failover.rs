//! Failovers after which the address leads to the former master for a while, or forever.

use std::time::Duration;

use distlock::{LockError, RedisMgr, Released};

use crate::faults::{
    LOCK,
    server::{follow, promote},
};
use crate::{
    helpers::{
        CALL_LIMIT, SECOND, UnwrapReleased, completes_within, config_long_timeouts, get, queue_key,
        server_with_scripts, spawn_call, with_ttl,
    },
    support::{Fault, FaultProxy, Nodes, RedisServer, TEST_TIMEOUT, contains},
};

const TTL: Duration = Duration::from_secs(60);

/// Calls go on until the address leads to the new master.
///
/// Fault: N80
#[test]
fn calls_retry_until_the_address_follows_a_failover() {
    let (old, new) = (RedisServer::start(), RedisServer::start());
    let proxy = FaultProxy::in_front_of(old.addr());
    let mgr = RedisMgr::new(config_long_timeouts(proxy.url())).unwrap();
    let guard = mgr.lock_with("x", &with_ttl(TTL)).unwrap();
    let by_id = mgr.acquire_lock("z", TTL, Duration::ZERO).unwrap().unwrap();
    follow(&new, &old);
    promote(&new);
    follow(&old, &new);
    // These faults change nothing; they count the requests.
    let [release, release_by_id, limited, unlimited] = ["lock:x", "lock:z", "lock:y", "lock:w"]
        .map(|key| proxy.on_request(contains(key), Fault::DelayReply(Duration::ZERO)).forever());
    let releasing = spawn_call(&mgr, "x", |_, _| guard.release());
    let releasing_by_id = spawn_call(&mgr, "z", move |mgr, name| mgr.release_lock(name, &by_id));
    let waiting_limited = spawn_call(&mgr, "y", |mgr, name| mgr.try_lock_for(name, TEST_TIMEOUT));
    let waiting = spawn_call(&mgr, "w", |mgr, name| mgr.lock(name));
    for requests in [release, release_by_id, limited, unlimited] {
        requests.wait_fired_times(4);
    }
    proxy.lead_to(new.addr());
    completes_within(TEST_TIMEOUT, "release", || releasing.join().unwrap())
        .unwrap()
        .unwrap_released();
    assert!(
        completes_within(TEST_TIMEOUT, "release by id", || releasing_by_id.join().unwrap())
            .unwrap()
    );
    assert_eq!((get(&new, LOCK), get(&new, "lock:z")), (None, None));
    for (key, next) in [("lock:y", waiting_limited), ("lock:w", waiting)] {
        let next = completes_within(TEST_TIMEOUT, key, || next.join().unwrap().unwrap());
        assert_eq!(get(&new, key).as_deref(), Some(next.id().as_str()));
    }
}

/// The refusals of replicas, since Redis 7 and before.
const REFUSALS: [&str; 2] = [
    "-READONLY You can't write against a read only replica.\r\n",
    "-ERR Error running script (call to f_406b2760417a944904cfa8e8168429d8985c5ab8): \
     @user_script:48: @user_script: 48: \
     -READONLY You can't write against a read only replica.\r\n",
];

/// A request that a replica refuses has no effect, but an earlier one whose reply was lost may have
/// released the lock.
///
/// Fault: N81, N120
/// Promise: P10
#[test]
fn release_during_a_failover_reports_its_first_request() {
    for (is_lost, refusal) in
        [(true, REFUSALS[0]), (false, REFUSALS[0]), (true, REFUSALS[1]), (false, REFUSALS[1])]
    {
        let server = server_with_scripts();
        let proxy = FaultProxy::in_front_of(server.addr());
        let mgr = RedisMgr::new(config_long_timeouts(proxy.url())).unwrap();
        let guard = mgr.lock_with("x", &with_ttl(TTL)).unwrap();
        let queue = queue_key("x");
        if is_lost {
            proxy.on_request(contains(&queue), Fault::ResetAfterRequest);
        } else {
            server.cli(&["DEL", LOCK]);
        }
        let refused =
            proxy.on_request(contains(&queue), Fault::ReplaceReply(refusal.into())).times(5);
        let released = guard.release().unwrap();
        assert_eq!(refused.fired(), 5);
        assert_eq!(released, if is_lost { Released::Released } else { Released::Gone });
    }
}

/// If there is no new master, each call reports the replica when its time has passed.
///
/// Fault: N80
#[test]
fn lasting_replica_is_reported_when_the_time_has_passed() {
    let server = RedisServer::start();
    let mgr =
        RedisMgr::new(config_long_timeouts(server.url()).operation_timeout(2 * SECOND)).unwrap();
    let guard = mgr.lock_with("y", &with_ttl(TTL)).unwrap();
    server.cli(&["REPLICAOF", "127.0.0.1", "1"]);
    let expect_readonly = |what: &str, error: LockError| {
        assert_eq!(error.code(), Some("READONLY"), "{what}: {error:?}")
    };
    for wait in [Duration::ZERO, SECOND / 2] {
        expect_readonly(
            "try_lock_for",
            completes_within(wait + CALL_LIMIT, "try_lock_for", || {
                mgr.try_lock_for("x", wait).unwrap_err()
            }),
        );
    }
    expect_readonly(
        "lock",
        completes_within(CALL_LIMIT, "lock", || mgr.lock_with("x", &with_ttl(SECOND)).unwrap_err()),
    );
    expect_readonly(
        "release",
        completes_within(CALL_LIMIT, "release", || guard.release().unwrap_err()),
    );
    expect_readonly(
        "release by id",
        completes_within(CALL_LIMIT, "release by id", || {
            mgr.release_lock("x", "other id").unwrap_err()
        }),
    );
    // Every call repeats its request, but not in a busy loop.
    let refused = server.refusals("READONLY");
    assert!((1..150).contains(&refused), "{refused}");
}

/// With several nodes, no call waits for one of them to be replaced by its new master, with or
/// without a quorum. The operation timeout of 20 s would be noticed.
///
/// Fault: N80
#[test]
fn replica_among_nodes_delays_no_release() {
    let nodes = Nodes::start(3);
    let mgr = RedisMgr::new(config_long_timeouts(nodes.urls()).quarantine(Duration::ZERO)).unwrap();
    for replica in [2, 1] {
        let guard = mgr.lock_with("x", &with_ttl(TTL)).unwrap();
        nodes.server(replica).cli(&["REPLICAOF", "127.0.0.1", "1"]);
        let released = completes_within(CALL_LIMIT, "release", || guard.release());
        match released {
            Ok(released) => assert!(replica == 2 && released == Released::Released, "{released:?}"),
            Err(error) => {
                assert!(replica == 1 && error.nodes()[2].message.contains("replica"), "{error}")
            }
        }
    }
}
