//! Events: which ones are reported over the life of a lock, in which order and on which thread.

use std::{thread, time::Duration};

use distlock::{LockError, LockGuard, LockLost, Released};

use super::recorder::recorded;
use crate::{
    helpers::{
        SECOND, SHORT_TIMEOUT, UnwrapReleased, await_gone, config_long_timeouts,
        config_medium_timeout, expect_loss, is_renewal, label, manager, server_with_scripts,
        spawn_call, spawn_queued_waiter, with_ttl,
    },
    support::{Fault, FaultProxy, Nodes, RedisServer, TEST_TIMEOUT, eventually},
};

const TTL: Duration = Duration::from_secs(3);

/// The time that is part of a recorded line.
fn milliseconds(line: &str) -> u64 {
    line.split(" with ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap()
}

#[test]
fn lock_events_come_in_order_on_the_calling_thread() {
    let server = RedisServer::start();
    let (events, mgr) = recorded(config_long_timeouts(server.url()));
    for finish in [|guard| LockGuard::release(guard).unwrap().unwrap_released(), drop::<LockGuard>]
    {
        events.clear();
        let guard = mgr.try_lock_for("x", SECOND).unwrap();
        let (id, token) = (guard.id().clone(), guard.fencing_token());
        finish(guard);
        let expected = [
            format!("attempted x {id} Some(1s)"),
            format!("acquired x {id} {token} contended=false"),
            format!("released x {id} {token} confirmed=true"),
        ];
        assert_eq!(events.lines(), expected);
        assert!(events.threads("").iter().all(|name| name.as_deref() == thread::current().name()));
    }
    events.clear();
    let id = mgr.acquire_lock("y", TTL, Duration::ZERO).unwrap().unwrap();
    assert!(mgr.release_lock("y", &id).unwrap());
    let kinds: Vec<_> =
        events.lines().iter().map(|line| line.split(' ').next().unwrap().to_owned()).collect();
    assert_eq!(kinds, ["attempted", "acquired", "released"]);
}

#[test]
fn contended_and_timed_out_events_name_the_holder() {
    let server = RedisServer::start();
    let (events, mgr) = recorded(config_long_timeouts(server.url()));
    let guard = manager(&server).lock("x").unwrap();
    let holder = guard.id().to_string();
    mgr.try_lock("x").unwrap_err();
    mgr.try_lock_for("x", Duration::from_millis(700)).unwrap_err();
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    eventually("each contention is reported", TEST_TIMEOUT, || events.count("contended x ") == 3);
    guard.release().unwrap().unwrap_released();
    let next = waiting.join().unwrap().unwrap();
    events.expect(&format!("acquired x {} {} contended=true", next.id(), next.fencing_token()));
    assert_eq!(
        (events.count("attempted x "), events.count("contended x "), events.count("timed out x ")),
        (3, 3, 2)
    );
    for line in events
        .lines()
        .iter()
        .filter(|line| line.starts_with("contended") || line.starts_with("timed out"))
    {
        assert!(line.ends_with(&format!(" by {holder}")), "{line}");
    }
    assert!(
        events.threads("contended").iter().all(|name| name.as_deref() == Some("distlock-outbox"))
    );
    assert!(!events.threads("timed out").contains(&Some("distlock-outbox".into())));
    drop(next);
}

#[test]
fn renewed_event_reports_the_margin() {
    let server = RedisServer::start();
    let (events, mgr) = recorded(config_long_timeouts(server.url()));
    let guard = mgr.lock_with("x", &with_ttl(5 * TTL)).unwrap();
    let line = events.expect(&format!("renewed x {}", guard.id()));
    // Renewed after a third of the ttl, so at most two thirds were left.
    assert!((0..=10_050).contains(&milliseconds(&line)), "{line}");
    assert!(
        events.threads("renewed").iter().all(|name| name.as_deref() == Some("distlock-outbox"))
    );
    assert_eq!(
        (events.count("renewal failed"), events.count("renewal overdue"), events.count("lost")),
        (0, 0, 0)
    );
}

/// Fault: F34
/// Promise: P7
#[test]
fn failed_renewals_are_reported_then_overdue_then_lost() {
    let server = server_with_scripts();
    let proxy = FaultProxy::in_front_of(server.addr());
    let (events, mgr) =
        recorded(config_long_timeouts(proxy.url()).operation_timeout(SHORT_TIMEOUT));
    let guard = mgr.lock_with("x", &with_ttl(3 * TTL)).unwrap();
    let (id, token) = (guard.id().clone(), guard.fencing_token());
    proxy.refuse();
    assert_eq!(expect_loss(&guard), LockLost::Expired);
    let lost = events.expect("lost ");
    assert_eq!(lost, format!("lost x {id} {token}: {}", LockLost::Expired));
    let failed = events.expect(&format!("renewal failed x {id} with "));
    assert!(milliseconds(&failed) <= 6_030 && !failed.ends_with(": "), "{failed}");
    let overdue = events.expect(&format!("renewal overdue x {id} with "));
    assert!((1..=4_500).contains(&milliseconds(&overdue)), "{overdue}");
    let order: Vec<_> =
        events.lines().into_iter().filter(|line| !line.starts_with("renewal failed")).collect();
    let at = |line: &String| order.iter().position(|other| other == line).unwrap();
    assert!(at(&overdue) < at(&lost));
    drop(guard);
    proxy.heal();
    await_gone(&server, "lock:x");
    assert_eq!(
        (events.count("lost"), events.count("renewal overdue"), events.count("released")),
        (1, 1, 0)
    );
}

#[test]
fn late_renewal_is_reported_overdue_but_not_lost() {
    let server = server_with_scripts();
    let proxy = FaultProxy::in_front_of(server.addr());
    let (events, mgr) = recorded(config_long_timeouts(proxy.url()));
    let guard = mgr.lock_with("x", &with_ttl(4 * SECOND)).unwrap();
    let held_back = proxy.on_request(is_renewal("lock:x"), Fault::HoldReply);
    let overdue = events.expect(&format!("renewal overdue x {}", guard.id()));
    assert!((1..=2_000).contains(&milliseconds(&overdue)), "{overdue}");
    held_back.release();
    events.expect(&format!("renewed x {}", guard.id()));
    assert!(guard.is_held());
    guard.release().unwrap().unwrap_released();
    assert_eq!((events.count("renewal overdue"), events.count("lost")), (1, 0));
}

/// Fault: F93
/// Promise: P7
#[test]
fn each_loss_is_reported_once() {
    let server = RedisServer::start();
    let (events, mgr) = recorded(config_long_timeouts(server.url()));
    let lock = |ttl| mgr.lock_with("x", &with_ttl(ttl).renew(false)).unwrap();
    // The holder notices the expiry before or after the renewer does.
    for renewer_is_first in [false, true] {
        events.clear();
        let guard = lock(Duration::from_millis(300));
        let id = guard.id().clone();
        if renewer_is_first {
            events.expect(&format!("lost x {id}"));
        } else {
            while guard.is_held() {
                thread::yield_now();
            }
        }
        drop(guard);
        assert!(events.expect(&format!("lost x {id}")).ends_with(&LockLost::Expired.to_string()));
        drop(lock(30 * SECOND));
        assert_eq!((events.count("lost"), events.count("released")), (1, 1));
    }
    // The release notices the loss.
    for (value, why) in
        [(None, LockLost::Gone.to_string()), (Some("another client"), "it is now held by".into())]
    {
        events.clear();
        let guard = lock(30 * SECOND);
        match value {
            None => drop(server.cli(&["DEL", "lock:x"])),
            Some(id) => drop(server.cli(&["SET", "lock:x", id])),
        }
        assert_ne!(guard.release().unwrap(), Released::Released);
        assert!(events.expect("lost x ").contains(&why), "{:?}", events.lines());
        assert_eq!(events.count("released"), 0);
        server.cli(&["DEL", "lock:x"]);
    }
    events.clear();
    let guard =
        mgr.lock_with("x", &with_ttl(30 * SECOND).max_hold(Duration::from_millis(50))).unwrap();
    assert!(events.expect("lost x ").ends_with(&LockLost::MaxHold.to_string()));
    drop(guard);
    events.clear();
    let guard = lock(30 * SECOND);
    mgr.shutdown();
    drop(guard);
    assert!(events.expect("lost x ").ends_with(&LockLost::Shutdown.to_string()));
    assert_eq!((events.count("lost"), events.count("released")), (1, 0));
}

#[test]
fn unconfirmed_release_is_reported_as_unconfirmed() {
    let server = server_with_scripts();
    let proxy = FaultProxy::in_front_of(server.addr());
    let (events, mgr) =
        recorded(config_long_timeouts(proxy.url()).operation_timeout(SHORT_TIMEOUT));
    let guard = mgr.lock("x").unwrap();
    let (id, token) = (guard.id().clone(), guard.fencing_token());
    proxy.refuse();
    assert!(guard.release().unwrap_err().is_unavailable());
    assert_eq!(events.expect("released "), format!("released x {id} {token} confirmed=false"));
    assert_eq!(events.count("lost"), 0);
}

#[test]
fn failed_acquisition_is_reported_as_failed() {
    let (events, mgr) = {
        let server = RedisServer::start();
        let (events, mgr) = recorded(config_medium_timeout(server.url()));
        server.cli(&["RPUSH", "lock:list", "precious"]);
        assert!(matches!(mgr.try_lock("list"), Err(LockError::WrongType { .. })));
        assert_eq!(events.count("failed list "), 1);
        (events, mgr)
    };
    assert!(mgr.try_lock("x").unwrap_err().is_unavailable());
    assert_eq!(
        (events.count("attempted"), events.count("failed"), events.count("timed out")),
        (2, 2, 0)
    );
    // A call with invalid arguments is not an attempt.
    assert!(mgr.try_lock("").unwrap_err().is_invalid());
    assert_eq!(events.count("attempted"), 2);
}

#[test]
fn acquisition_that_goes_on_trying_is_reported_once() {
    let server = RedisServer::start();
    let (events, mgr) = recorded(config_long_timeouts(server.url()));
    server.kill();
    let error = mgr.lock_with("x", &with_ttl(SECOND)).unwrap_err();
    assert!(error.to_string().contains("refused"), "{error}");
    let line = events.expect("retrying x ");
    let reason = format!(" {}: Connection refused", label(&server));
    assert!(line.contains(&reason), "{line}");
    assert_eq!(events.count("retrying "), 1, "{:?}", events.lines());
}

#[test]
fn outage_of_many_connections_is_reported_once() {
    let server = RedisServer::start();
    let (events, mgr) = recorded(config_long_timeouts(server.url()));
    let open_several = |name: &str| {
        let connections: Vec<_> = (0..4).map(|_| mgr.connection().unwrap()).collect();
        drop(mgr.try_lock(name).unwrap());
        drop(connections);
        let threads: Vec<_> = (0..4)
            .map(|n| {
                spawn_call(&mgr, &format!("{name}{n}"), |mgr, name| drop(mgr.lock(name).unwrap()))
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    };
    open_several("before");
    assert_eq!(events.count("reconnected"), 0);
    server.restart_empty();
    open_several("after");
    let line = events.expect("reconnected");
    assert_eq!(line, format!("reconnected {}", label(&server)));
    server.kill_clients(&["TYPE", "normal"]);
    drop(mgr.lock("again").unwrap());
    eventually("the second outage is reported", TEST_TIMEOUT, || events.count("reconnected") >= 2);
    assert_eq!(events.count("reconnected"), 2);
}

/// Fault: N5
#[test]
fn restart_of_a_node_is_reported_as_server_changed() {
    let nodes = Nodes::start(3);
    let (events, mgr) =
        recorded(config_long_timeouts(nodes.urls()).quarantine(60 * SECOND).ttl(10 * SECOND));
    // All nodes have just been started.
    eventually("all nodes are in quarantine", TEST_TIMEOUT, || events.count("changed") == 3);
    assert!(
        events.lines().iter().all(|line| line.ends_with("replaced=false quarantined=true")),
        "{:?}",
        events.lines()
    );
    nodes.restart_empty(1);
    eventually("the restart is reported", TEST_TIMEOUT, || {
        let _ = mgr.try_lock("x");
        events.count(&format!("changed {} replaced=true quarantined=true", label(nodes.server(1))))
            == 1
    });
}
