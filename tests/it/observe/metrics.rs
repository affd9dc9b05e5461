//! The metrics of a manager, and the table in which they are displayed.

use std::time::Duration;

use distlock::RedisMgr;

use crate::{
    helpers::{
        SECOND, SHORT_TIMEOUT, UnwrapReleased, config_long_timeouts, config_short_timeout,
        expect_loss, manager, server_behind_proxy, spawn_queued_waiter, with_ttl,
    },
    support::{Fault, FaultProxy, RedisServer, TEST_TIMEOUT, command, eventually},
};

#[test]
fn each_operation_is_counted_once() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    for n in 0..20 {
        mgr.try_lock(&format!("n{}", n % 4)).unwrap().release().unwrap().unwrap_released();
    }
    let guard = mgr.lock("x").unwrap();
    mgr.try_lock("x").unwrap_err();
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    let metrics = mgr.metrics();
    assert_eq!((metrics.held(), metrics.waiting()), (1, 1));
    drop(guard);
    drop(waiting.join().unwrap().unwrap());
    let deleted = mgr.lock_with("deleted", &with_ttl(15 * SECOND)).unwrap();
    server.cli(&["DEL", "lock:deleted"]);
    expect_loss(&deleted);
    let kept = mgr.lock_with("kept", &with_ttl(15 * SECOND)).unwrap();
    eventually("a lock is renewed", TEST_TIMEOUT, || mgr.metrics().renewals() >= 1);
    drop((kept, deleted));
    let metrics = mgr.metrics();
    assert_eq!(
        (metrics.attempted(), metrics.acquired(), metrics.released(), metrics.lost()),
        (25, 24, 23, 1)
    );
    assert_eq!((metrics.contended(), metrics.timed_out(), metrics.failed()), (2, 1, 0));
    assert_eq!(
        (metrics.held(), metrics.waiting(), metrics.renewals_overdue(), metrics.renewals_failed()),
        (0, 0, 0, 0)
    );
    assert_eq!((metrics.wait().count(), metrics.hold().count()), (24, 24));
    assert_eq!(
        (metrics.renewal().count(), metrics.margin().count()),
        (metrics.renewals(), metrics.renewals())
    );
    assert!(metrics.margin().max() <= 30 * SECOND && metrics.margin().min() > Duration::ZERO);
    assert!(metrics.wait().min() > Duration::ZERO && metrics.wait().max() < TEST_TIMEOUT);
    assert!(
        metrics.hold().max() >= SECOND * 9 / 10,
        "a lock is held until it is renewed, after a third of the ttl: {:?}",
        metrics.hold()
    );
    let names: Vec<_> = metrics.locks().iter().map(|lock| lock.name()).collect();
    assert_eq!(names, ["deleted", "kept", "n0", "n1", "n2", "n3", "x"]);
    let of = |name: &str| metrics.locks().iter().find(|lock| lock.name() == name).unwrap();
    assert_eq!((of("n0").acquired(), of("n0").hold().count(), of("n0").lost()), (5, 5, 0));
    assert_eq!((of("x").acquired(), of("x").contended(), of("x").timed_out()), (2, 2, 1));
    assert_eq!((of("deleted").acquired(), of("deleted").lost()), (1, 1));
    assert!(of("kept").min_margin().is_some() && of("n0").min_margin().is_none());
    assert_eq!(metrics.others().acquired(), 0);
    mgr.shutdown();
    assert_eq!(mgr.metrics().acquired(), 24);
}

#[test]
fn metrics_table_is_readable_with_any_lock_names() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    assert!(mgr.metrics().to_string().contains("acquired 0, lost 0"));
    for n in 0..30 {
        drop(mgr.try_lock(&format!("n{n}")).unwrap());
    }
    for _ in 0..2 {
        drop(mgr.try_lock("\u{1b}[31m\nred").unwrap());
    }
    let table = mgr.metrics().to_string();
    let lines: Vec<_> = table.lines().collect();
    assert_eq!(lines[0], format!("locks at {}: 0 held, 0 waiting", mgr.server()));
    assert_eq!(lines[1], "  attempted 32, acquired 32, released 32, lost 0");
    for (at, word) in
        [(3, "count"), (4, "wait"), (5, "hold"), (6, "renewal"), (7, "margin"), (9, "lock")]
    {
        assert!(lines[at].contains(word), "{table}");
    }
    assert!(lines[4].split_whitespace().nth(1) == Some("32"), "{table}");
    assert!(lines[6].split_whitespace().eq(["renewal", "0", "-", "-", "-", "-", "-"]), "{table}");
    // The most used lock comes first.
    assert!(lines[10].starts_with("  \"\\u{1b}[31m\\nred\""), "{table}");
    assert_eq!(*lines.last().unwrap(), "  and 11 more");
    assert!(!table.chars().any(|letter| letter.is_control() && letter != '\n'));
}

#[test]
fn failures_and_outages_are_counted() {
    let server = RedisServer::start();
    let proxy = FaultProxy::in_front_of(server.addr());
    let mgr =
        RedisMgr::new(config_long_timeouts(proxy.url()).operation_timeout(SHORT_TIMEOUT)).unwrap();
    let guard = mgr.lock_with("x", &with_ttl(9 * SECOND)).unwrap();
    proxy.refuse();
    assert!(mgr.try_lock("y").unwrap_err().is_unavailable());
    expect_loss(&guard);
    let metrics = mgr.metrics();
    assert_eq!(
        (metrics.failed(), metrics.lost(), metrics.renewals_overdue(), metrics.renewals()),
        (1, 1, 1, 0)
    );
    assert!(metrics.renewals_failed() >= 1);
    proxy.heal();
    drop(mgr.lock("y").unwrap());
    assert_eq!(mgr.metrics().reconnected(), 1);
}

/// A call that times out while it connects knows nothing about the server, so it must not count an
/// outage.
#[test]
fn timeout_while_connecting_counts_no_outage() {
    let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    let holder = manager(&server).lock("x").unwrap();
    let handshake = proxy.on_request(command("time"), Fault::HoldRequest);
    eventually("a call times out while it connects", TEST_TIMEOUT, || {
        assert!(mgr.try_lock_for("x", Duration::from_millis(50)).unwrap_err().is_contended());
        handshake.fired() > 0
    });
    handshake.release();
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    drop(holder);
    drop(waiting.join().unwrap().unwrap());
    assert_eq!(mgr.metrics().reconnected(), 0);
}

#[test]
fn per_lock_table_keeps_used_names_and_total_of_others() {
    let server = RedisServer::start();
    let mgr =
        RedisMgr::new(config_short_timeout(server.url()).operation_timeout(20 * SECOND)).unwrap();
    for n in 0..1_100 {
        drop(mgr.try_lock(&format!("n{n}")).unwrap());
        drop(mgr.try_lock("often").unwrap());
    }
    let metrics = mgr.metrics();
    assert_eq!(metrics.locks().len(), 1_000);
    let often = metrics.locks().iter().find(|lock| lock.name() == "often").unwrap();
    assert_eq!(often.acquired(), 1_100);
    let rows: u64 = metrics.locks().iter().map(|lock| lock.acquired()).sum();
    assert_eq!(
        (rows + metrics.others().acquired(), metrics.others().hold().count()),
        (2_200, metrics.others().acquired())
    );
}

/// Fault: N265
#[test]
fn confirmed_hand_over_has_no_margin() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    let guard = other.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    drop(guard);
    let held = waiting.join().unwrap();
    eventually("the grant is confirmed", TEST_TIMEOUT, || mgr.metrics().renewals() == 1);
    let metrics = mgr.metrics();
    assert_eq!((metrics.renewal().count(), metrics.margin().count()), (1, 0));
    assert!(metrics.locks().iter().all(|lock| lock.min_margin().is_none()));
    drop(held);
}
