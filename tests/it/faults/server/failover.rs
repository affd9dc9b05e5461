//! A failover in which the name leads to the former master for a while, or for ever.

use std::time::Duration;

use distlock::{LockError, RedisMgr, Released};

use crate::faults::{
    LOCK,
    server::{follow, promote},
};
use crate::{
    helpers::{
        CALL_LIMIT, SECOND, UnwrapReleased, completes_within, config_long_timeouts, get, in_thread,
        queue_key, server_with_scripts, with_ttl,
    },
    support::{CEILING, Fault, FaultProxy, Nodes, RedisServer, contains},
};

const LEASE: Duration = Duration::from_secs(60);

/// For as long as somebody or something takes to move the name.
#[test]
fn who_has_time_waits_for_the_name_to_follow_a_failover() {
    let (old, new) = (RedisServer::start(), RedisServer::start());
    let proxy = FaultProxy::in_front_of(old.addr());
    let mgr = RedisMgr::new(config_long_timeouts(proxy.url())).unwrap();
    let guard = mgr.lock_with("x", &with_ttl(LEASE)).unwrap();
    let by_id = mgr.acquire_lock("z", LEASE, Duration::ZERO).unwrap().unwrap();
    follow(&new, &old);
    promote(&new);
    follow(&old, &new);
    // Nothing is changed by these; they count who asks.
    let [release, other, limited, patient] = ["lock:x", "lock:z", "lock:y", "lock:w"]
        .map(|key| proxy.on_request(contains(key), Fault::DelayReply(Duration::ZERO)).forever());
    let releasing = in_thread(&mgr, "x", |_, _| guard.release());
    let releasing_other = in_thread(&mgr, "z", move |mgr, name| mgr.release_lock(name, &by_id));
    let trying = in_thread(&mgr, "y", |mgr, name| mgr.try_lock_for(name, CEILING));
    let waiting = in_thread(&mgr, "w", |mgr, name| mgr.lock(name));
    for asked in [release, other, limited, patient] {
        asked.wait_fired_times(4);
    }
    proxy.lead_to(new.addr());
    completes_within(CEILING, "releasing", || releasing.join().unwrap()).unwrap().unwrap_released();
    assert!(
        completes_within(CEILING, "releasing by id", || releasing_other.join().unwrap()).unwrap()
    );
    assert_eq!((get(&new, LOCK), get(&new, "lock:z")), (None, None));
    for (key, next) in [("lock:y", trying), ("lock:w", waiting)] {
        let next = completes_within(CEILING, key, || next.join().unwrap().unwrap());
        assert_eq!(get(&new, key).as_deref(), Some(next.id().as_str()));
    }
}

/// As replicas say it since Redis 7, and before.
const REFUSALS: [&str; 2] = [
    "-READONLY You can't write against a read only replica.\r\n",
    "-ERR Error running script (call to f_406b2760417a944904cfa8e8168429d8985c5ab8): @user_script:48: @user_script: 48: \
     -READONLY You can't write against a read only replica.\r\n",
];

/// What a replica refuses is not done. A request before that, whose answer was lost, may have been.
#[test]
fn who_releases_in_a_failover_is_told_what_its_first_request_did() {
    for (is_lost, refusal) in
        [(true, REFUSALS[0]), (false, REFUSALS[0]), (true, REFUSALS[1]), (false, REFUSALS[1])]
    {
        let server = server_with_scripts();
        let proxy = FaultProxy::in_front_of(server.addr());
        let mgr = RedisMgr::new(config_long_timeouts(proxy.url())).unwrap();
        let guard = mgr.lock_with("x", &with_ttl(LEASE)).unwrap();
        let line = queue_key("x");
        if is_lost {
            proxy.on_request(contains(&line), Fault::ResetAfterRequest);
        } else {
            server.cli(&["DEL", LOCK]);
        }
        let refused =
            proxy.on_request(contains(&line), Fault::ReplaceReply(refusal.into())).times(5);
        let released = guard.release().unwrap();
        assert_eq!(refused.fired(), 5);
        assert_eq!(released, if is_lost { Released::Released } else { Released::Gone });
    }
}

/// A replica for which there is no next master is told as one, within the time of whoever waits.
#[test]
fn a_replica_that_stays_one_is_told_when_the_time_is_over() {
    let server = RedisServer::start();
    let mgr =
        RedisMgr::new(config_long_timeouts(server.url()).operation_timeout(2 * SECOND)).unwrap();
    let guard = mgr.lock_with("y", &with_ttl(LEASE)).unwrap();
    server.cli(&["REPLICAOF", "127.0.0.1", "1"]);
    let told = |what: &str, error: LockError| {
        assert_eq!(error.code(), Some("READONLY"), "{what}: {error:?}")
    };
    for wait in [Duration::ZERO, SECOND / 2] {
        told(
            "trying",
            completes_within(wait + CALL_LIMIT, "trying", || {
                mgr.try_lock_for("x", wait).unwrap_err()
            }),
        );
    }
    told(
        "waiting",
        completes_within(CALL_LIMIT, "waiting", || {
            mgr.lock_with("x", &with_ttl(SECOND)).unwrap_err()
        }),
    );
    told("releasing", completes_within(CALL_LIMIT, "releasing", || guard.release().unwrap_err()));
    told(
        "by id",
        completes_within(CALL_LIMIT, "by id", || mgr.release_lock("x", "somebody").unwrap_err()),
    );
    // Each in its time, and none of them in a frenzy.
    let refused = server.refusals("READONLY");
    assert!((1..150).contains(&refused), "{refused}");
}

/// Nobody waits for the name of one of several nodes, nor for those of too many, where the
/// operation timeout is 20 s.
#[test]
fn of_several_nodes_a_replica_has_no_vote_and_holds_up_no_release() {
    let nodes = Nodes::start(3);
    let mgr = RedisMgr::new(config_long_timeouts(nodes.urls()).quarantine(Duration::ZERO)).unwrap();
    for replica in [2, 1] {
        let guard = mgr.lock_with("x", &with_ttl(LEASE)).unwrap();
        nodes.server(replica).cli(&["REPLICAOF", "127.0.0.1", "1"]);
        let released = completes_within(CALL_LIMIT, "releasing", || guard.release());
        match released {
            Ok(released) => assert!(replica == 2 && released == Released::Released, "{released:?}"),
            Err(error) => {
                assert!(replica == 1 && error.nodes()[2].message.contains("replica"), "{error}")
            }
        }
    }
}
