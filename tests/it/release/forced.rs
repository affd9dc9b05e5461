//! `force_release` and `force_release_if`, by which an operator takes a lock from its holder.

use std::time::Duration;

use distlock::{LockLost, RedisMgr, Released};

use super::LOCK;
use crate::{
    helpers::{
        SECOND, UnwrapReleased, config_long_timeouts, expect_loss, get, manager, queue_length,
        server_behind_proxy, spawn_call, spawn_queued_waiter, timed, with_ttl,
    },
    quorum::{self, wait_until_free_everywhere},
    support::{Fault, Nodes, RedisServer, contains},
};

/// The operation timeout where the test measures it, longer than `SLACK` so that a second timeout
/// would be noticed.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Extra time for a slow machine.
const SLACK: Duration = Duration::from_secs(4);

#[test]
fn force_release_hands_the_lock_to_the_next_waiter() {
    let server = RedisServer::start();
    let (mgr, operator) = (manager(&server), manager(&server));
    assert!(!operator.force_release("x").unwrap());
    let guard = mgr.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    assert!(operator.force_release("x").unwrap());
    let next = waiting.join().unwrap().unwrap();
    let Released::OwnedByOther(holder) = guard.release().unwrap() else {
        panic!("the lock was handed over")
    };
    assert_eq!(holder.id(), next.id().as_str());
    assert!(next.is_held());
}

#[test]
fn force_release_if_requires_the_id_of_the_holder() {
    let server = RedisServer::start();
    let (mgr, operator) = (manager(&server), manager(&server));
    let guard = mgr.lock_with("x", &with_ttl(3 * SECOND)).unwrap();
    let former = guard.id().to_string();
    let waiting = spawn_queued_waiter(&server, &operator, "x");
    let outcome = operator.force_release_if("x", "another").unwrap();
    assert!(matches!(outcome, Released::OwnedByOther(by) if by.id() == former));
    assert!(guard.is_held());
    operator.force_release_if("x", &former).unwrap().unwrap_released();
    let next = waiting.join().unwrap().unwrap();
    let loss = expect_loss(&guard);
    assert!(matches!(loss, LockLost::Taken { by, .. } if by.id() == next.id().as_str()));
    // The id of a former holder releases nothing.
    assert!(matches!(operator.force_release_if("x", &former), Ok(Released::OwnedByOther(_))));
    assert!(next.is_held());
    next.release().unwrap().unwrap_released();
    assert_eq!(operator.force_release_if("x", &former).unwrap(), Released::Gone);
}

#[test]
fn force_release_without_waiters_is_a_loss_as_gone() {
    let server = RedisServer::start();
    let (mgr, operator) = (manager(&server), manager(&server));
    let guard = mgr.lock_with("x", &with_ttl(3 * SECOND)).unwrap();
    operator.force_release_if("x", guard.id().as_str()).unwrap().unwrap_released();
    assert_eq!(expect_loss(&guard), LockLost::Gone);
}

/// Acquires the lock as a client of another kind, whose id may be any bytes.
fn foreign_set(server: &RedisServer, id: &[u8]) {
    let mut connection = redis::Client::open(server.url()).unwrap().get_connection().unwrap();
    redis::cmd("SET").arg(LOCK).arg(id).arg("PX").arg(600_000).exec(&mut connection).unwrap();
}

/// Ids that are not text, or too long to be reported in full.
fn strange_ids() -> Vec<Vec<u8>> {
    let random = b"\x00\xff \x80\r\n\xc3".to_vec();
    let texts = [
        "".to_owned(),
        " a\n b ".to_owned(),
        "é".repeat(300),
        format!("x{}", "é".repeat(300)),
        "i".repeat(1 << 20),
    ];
    texts
        .into_iter()
        .map(String::into_bytes)
        .chain([random, vec![0xff; 20], vec![0xff; 512], vec![0xff; 600]])
        .collect()
}

/// Fault: N41
#[test]
fn force_release_works_for_any_holder_id() {
    for count in [1, 3] {
        let nodes = Nodes::start(count);
        let config = config_long_timeouts(nodes.urls()).quarantine(Duration::ZERO);
        let mgr = RedisMgr::new(config).unwrap();
        let hold = |id: &[u8]| (0..count).for_each(|node| foreign_set(nodes.server(node), id));
        let holding = || {
            let holds = |node: &usize| nodes.server(*node).query::<bool>(&["EXISTS", LOCK]);
            (0..count).filter(holds).count()
        };
        for id in strange_ids() {
            let what = format!("{} on {count} nodes", id[..id.len().min(30)].escape_ascii());
            hold(&id);
            assert!(mgr.force_release("x").unwrap(), "{what}");
            assert_eq!(holding(), 0, "{what}");
            // By the part of the id that is reported, and by the whole id.
            hold(&id);
            let reported = mgr.holder("x").unwrap().unwrap().id().to_owned();
            assert_eq!(mgr.force_release_if("x", &reported).unwrap(), Released::Released, "{what}");
            if let Ok(whole) = std::str::from_utf8(&id) {
                hold(&id);
                assert_eq!(mgr.force_release_if("x", whole).unwrap(), Released::Released, "{what}");
            }
            assert_eq!(holding(), 0, "{what}");
            hold(b"\xff\xfe another");
            let outcome = mgr.force_release_if("x", &reported);
            assert!(matches!(outcome, Ok(Released::OwnedByOther(_))), "{what}: {outcome:?}");
            assert_eq!(holding(), count, "{what}");
        }
    }
}

/// The holder changes after `force_release` has asked who it is. The ids of both holders look the
/// same as text, because their bytes are not valid UTF-8.
///
/// Fault: N41
#[test]
fn force_release_spares_a_later_holder_with_a_similar_id() {
    let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    assert_eq!(mgr.holder("warm").unwrap(), None);
    foreign_set(&server, &[0xff; 20]);
    // The first request asks for the holder; the second one releases.
    let late = proxy.on_request(contains(LOCK), Fault::HoldRequest).after(1);
    let forcing = spawn_call(&mgr, "x", |mgr, name| mgr.force_release(name));
    late.wait_fired();
    foreign_set(&server, &[0xfe; 20]);
    late.release();
    assert!(!forcing.join().unwrap().unwrap());
    assert!(server.query::<bool>(&["EXISTS", LOCK]));
}

/// The first request hands the lock to the waiter. The retry must not take it away from that
/// waiter.
#[test]
fn force_release_with_a_lost_reply_spares_the_next_holder() {
    for fault in [Fault::DropReply, Fault::ResetAfterRequest, Fault::CloseAfterRequest] {
        let (server, proxy, operator) =
            server_behind_proxy(|url| config_long_timeouts(url).operation_timeout(8 * SECOND));
        let mgr = manager(&server);
        let guard = mgr.lock("x").unwrap();
        let (second, third) =
            (spawn_queued_waiter(&server, &mgr, "x"), spawn_queued_waiter(&server, &mgr, "x"));
        let lost = proxy.on_request(contains(guard.id().as_str()), fault.clone());
        assert!(operator.force_release("x").unwrap(), "{fault:?}");
        assert_eq!(lost.fired(), 1, "the request does not contain the holder's id");
        let next = second.join().unwrap().unwrap();
        assert!(next.is_held(), "{fault:?}");
        assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()), "{fault:?}");
        assert_eq!(queue_length(&server, "x"), 1, "{fault:?}");
        next.release().unwrap().unwrap_released();
        third.join().unwrap().unwrap().release().unwrap().unwrap_released();
    }
}

/// Reading the holder takes most of the time, and then no reply comes.
///
/// Fault: N31
#[test]
fn force_release_takes_one_timeout_in_total() {
    let (_server, proxy, mgr) =
        server_behind_proxy(|url| config_long_timeouts(url).operation_timeout(TIMEOUT));
    let guard = mgr.lock_with("x", &with_ttl(600 * SECOND).renew(false)).unwrap();
    assert!(mgr.is_locked("x").unwrap());
    proxy.on_request(contains("lock:x"), Fault::DelayReply(TIMEOUT.mul_f64(0.9)));
    let silent = proxy.on_request(contains("lock:x"), Fault::DropReply).forever();
    let (outcome, took) = timed(|| mgr.force_release("x"));
    assert!(outcome.is_err() && took < TIMEOUT + SLACK, "{took:?}");
    silent.disarm();
    drop(guard);
}

/// Each of three clients has one node: the votes were split, and the clients have died.
#[test]
fn force_release_removes_every_partial_holder() {
    let nodes = Nodes::start(3);
    let mgr = quorum::manager(&nodes);
    for (node, client) in ["a", "b", "c"].into_iter().enumerate() {
        nodes.server(node).query::<()>(&["SET", &quorum::key("x"), client, "PX", "600000"]);
    }
    assert!(mgr.force_release("x").unwrap());
    wait_until_free_everywhere(&nodes, "x");
    drop(mgr.try_lock("x").unwrap());
}

/// Two clients have one node each. An unknown outcome for the second does not undo the removal of
/// the first.
#[test]
fn force_release_counts_if_it_removed_one_partial_holder() {
    let nodes = Nodes::start(3).behind_proxies(&[1, 2]);
    let mgr = quorum::manager(&nodes);
    for (node, client) in ["client 1", "client 2"].into_iter().enumerate() {
        nodes.server(node).query::<()>(&["SET", &quorum::key("x"), client, "PX", "600000"]);
    }
    for node in [1, 2] {
        nodes.proxy(node).on_request(contains("client 2"), Fault::ResetBeforeRequest).forever();
    }
    assert!(mgr.force_release("x").unwrap());
    assert_eq!(nodes.values(&quorum::key("x")), [None, Some("client 2".into()), None]);
}
