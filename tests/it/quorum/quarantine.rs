//! A node that may have lost its data does not vote until every lease that it may have forgotten
//! has expired.

use std::time::Duration;

use distlock::{LockError, LockGuard, LockLost, RedisMgr, Vote};

use super::{
    TTL, await_renewals, config_long_timeouts, config_medium_timeout, expect_no_quorum,
    expect_quorum, key, manager, nodes_holding, quorum, wait_until_free_everywhere,
};
use crate::{
    helpers::{
        self, CALL_LIMIT, SECOND, UnwrapReleased, capture_log, completes_within, expect_loss,
        in_own_process, with_ttl,
    },
    support::{Nodes, RedisServer, TEST_TIMEOUT, command, eventually, rewrite},
};

/// The error of a node in quarantine.
pub(super) const IN_QUARANTINE: &str = "it may have lost its data in a restart";

/// A manager with the default quarantine of one ttl.
fn default_quarantine(nodes: &Nodes) -> RedisMgr {
    RedisMgr::new(helpers::config_long_timeouts(nodes.urls()).ttl(TTL)).unwrap()
}

/// A manager with a quarantine that outlasts any test, however slow the machine.
pub(super) fn long_quarantine(urls: impl Into<String>) -> RedisMgr {
    let config = helpers::config_long_timeouts(urls).operation_timeout(SECOND);
    RedisMgr::new(config.quarantine(600 * SECOND)).unwrap()
}

/// The uptime that a server reports: up to a second too long or too short.
pub(super) fn uptime(server: &RedisServer) -> Duration {
    let info: String = server.query(&["INFO", "server"]);
    let up = info.lines().find_map(|line| line.strip_prefix("uptime_in_seconds:")).unwrap();
    Duration::from_secs(up.trim().parse().unwrap())
}

/// Servers that have just started may have lost anything.
///
/// Fault: N127
#[test]
fn new_nodes_do_not_vote_at_first() {
    for count in [3, 5] {
        let nodes = Nodes::start(count);
        let mgr = default_quarantine(&nodes);
        // This quarantine outlasts the test on any machine.
        let strict = RedisMgr::new(config_medium_timeout(&nodes).quarantine(600 * SECOND)).unwrap();
        let error = strict.try_lock("x").unwrap_err();
        assert_eq!(expect_no_quorum(&nodes, &error), vec![Vote::Unknown; count]);
        let reason = "it may have lost its data in a restart, and votes again in ";
        let times_left: Vec<_> =
            error.nodes().iter().filter_map(|answer| answer.message.strip_prefix(reason)).collect();
        assert!(times_left.len() >= quorum(&nodes), "{error}");
        assert!(times_left.iter().all(|left| left.starts_with("9m5")), "time left: {error}");
        wait_until_free_everywhere(&nodes, "x");
        // A waiter gets the lock as soon as the nodes vote.
        let guard = completes_within(TEST_TIMEOUT, "lock", || mgr.lock("x").unwrap());
        expect_quorum(&nodes, &guard);
        let uptimes = (0..count).map(|node| uptime(nodes.server(node)));
        assert!(uptimes.max().unwrap() + SECOND >= TTL, "the nodes voted too early");
        guard.release().unwrap().unwrap_released();
        // From now on no call waits, except that of a new manager: for up to a second, because the
        // uptime is in whole seconds.
        drop(mgr.try_lock("x").unwrap());
        drop(completes_within(TEST_TIMEOUT, "lock", || {
            default_quarantine(&nodes).lock("x").unwrap()
        }));
    }
}

/// Fault: N144
#[test]
fn nodes_declared_new_vote_until_they_restart() {
    let nodes = Nodes::built(3, |_, builder| builder.durable());
    let config = || helpers::config_long_timeouts(nodes.urls()).quarantine(600 * SECOND);
    for name in ["a", "b"] {
        config().declare_nodes_new(false).unwrap();
        let guard = RedisMgr::new(config()).unwrap().try_lock(name).unwrap();
        expect_quorum(&nodes, &guard);
    }
    // One still has the declaration of its former run.
    nodes.restart(0);
    nodes.restart_empty(2);
    assert!(nodes.server(0).keys().contains(&"distlock:new".to_owned()));
    let error = RedisMgr::new(config()).unwrap().try_lock("x").unwrap_err();
    for node in [0, 2] {
        assert!(error.nodes()[node].message.contains(IN_QUARANTINE), "{error}");
    }
}

/// The other nodes are still declared new, and have been used.
///
/// Promise: P1
/// Fault: N253
#[test]
fn emptied_node_beside_used_ones_is_not_declared_new() {
    let nodes = Nodes::start(3);
    let config = || helpers::config_long_timeouts(nodes.urls()).quarantine(600 * SECOND);
    config().declare_nodes_new(false).unwrap();
    let guard = RedisMgr::new(config()).unwrap().try_lock("x").unwrap();
    expect_quorum(&nodes, &guard);
    nodes.restart_empty(0);
    let error = config().declare_nodes_new(false).unwrap_err();
    assert!(
        error.is_invalid() && error.to_string().contains("restarted without its data"),
        "{error}"
    );
    assert!(!nodes.server(0).keys().contains(&"distlock:new".to_owned()));
    guard.release().unwrap().unwrap_released();
    let error = config().declare_nodes_new(false).unwrap_err().to_string();
    assert!(error.contains("locks have been used or tried there"), "{error}");
    config().declare_nodes_new(true).unwrap();
    assert!(nodes.server(0).keys().contains(&"distlock:new".to_owned()));
}

/// Also if they were only tried: the error advises to declare them new.
///
/// Fault: N144
#[test]
fn used_nodes_are_declared_new_only_on_request() {
    let nodes = Nodes::start(3);
    let config = || helpers::config_long_timeouts(nodes.urls()).quarantine(600 * SECOND);
    let error = RedisMgr::new(config()).unwrap().try_lock("x").unwrap_err();
    expect_no_quorum(&nodes, &error);
    let error = error.to_string();
    assert!(
        error.contains("Config::declare_nodes_new") && error.contains("Config::quarantine(Dur"),
        "{error}"
    );
    wait_until_free_everywhere(&nodes, "x");
    nodes.server(1).cli(&["SET", "distlock:fence", "17"]);
    let LockError::InvalidConfig { reason, .. } = config().declare_nodes_new(false).unwrap_err()
    else {
        panic!("not refused")
    };
    assert!(reason.contains("locks have been used or tried there"), "{reason}");
    assert!(
        (0..3).all(|node| !nodes.server(node).keys().contains(&"distlock:new".to_owned())),
        "a node was declared new"
    );
    config().declare_nodes_new(true).unwrap();
    drop(RedisMgr::new(config()).unwrap().try_lock("x").unwrap());
}

/// Fault: N144
#[test]
fn nodes_are_declared_new_all_or_none() {
    let nodes = Nodes::start(3);
    let config = helpers::config_long_timeouts(nodes.urls());
    let none = || (0..2).all(|node| nodes.server(node).keys().is_empty());
    nodes.server(2).cli(&["REPLICAOF", "127.0.0.1", "1"]);
    let error = config.declare_nodes_new(true).unwrap_err();
    assert!(error.is_invalid() && error.to_string().contains("replica"), "{error}");
    assert!(none());
    nodes.kill(2);
    let error = config.declare_nodes_new(true).unwrap_err();
    assert!(error.is_unavailable() && none(), "{error}");
    let single = helpers::config_long_timeouts(nodes.url(0));
    single.declare_nodes_new(false).unwrap();
    assert!(none(), "a single server needs no declaration");
}

/// If NTP sets the clock back to before the start of the server, the reported uptime is negative,
/// perhaps for hours.
///
/// Fault: N92
#[test]
fn negative_uptime_counts_as_a_recent_start() {
    let nodes = Nodes::start(3).behind_proxies(&[0, 1, 2]);
    for node in 0..nodes.len() {
        let set_back = |info: &str| {
            let line = |line: &str| match line.strip_prefix("uptime_in_seconds:") {
                Some(_) => "uptime_in_seconds:-7200".to_owned(),
                None => line.to_owned(),
            };
            info.lines().map(line).collect::<Vec<_>>().join("\r\n")
        };
        nodes.proxy(node).on_request(command("INFO"), rewrite(set_back)).forever();
    }
    let strict = RedisMgr::new(config_medium_timeout(&nodes).quarantine(600 * SECOND)).unwrap();
    let error = strict.try_lock("x").unwrap_err();
    let reason = "it may have lost its data in a restart, and votes again in ";
    let in_quarantine =
        error.nodes().iter().filter(|answer| answer.message.starts_with(reason)).count();
    assert!(in_quarantine >= quorum(&nodes), "{error}");
    // The quarantine is measured from the first connection of a manager.
    let guard =
        completes_within(TEST_TIMEOUT, "lock", || default_quarantine(&nodes).lock("x").unwrap());
    guard.release().unwrap().unwrap_released();
}

#[test]
fn one_or_two_nodes_have_no_quarantine_by_default() {
    for count in [1, 2] {
        let nodes = Nodes::start(count);
        drop(default_quarantine(&nodes).try_lock("x").unwrap());
    }
    let nodes = Nodes::start(2);
    let config = helpers::config_long_timeouts(nodes.urls()).ttl(TTL);
    let mgr = RedisMgr::new(config.quarantine(600 * SECOND)).unwrap();
    expect_no_quorum(&nodes, &mgr.try_lock("x").unwrap_err());
}

#[test]
fn quarantined_minority_delays_no_call() {
    let nodes = Nodes::start(5);
    let mgr = default_quarantine(&nodes);
    let guard = completes_within(TEST_TIMEOUT, "lock", || mgr.lock("x").unwrap());
    nodes.restart_empty(0);
    nodes.restart_empty(4);
    await_renewals(&guard, 2);
    guard.release().unwrap().unwrap_released();
    let next =
        completes_within(CALL_LIMIT, "lock", || default_quarantine(&nodes).lock("y").unwrap());
    expect_quorum(&nodes, &next);
}

/// Goal: a restart without data must not create a second holder. Method: client A has its lock from
/// {2, 3, 4}, because 0 and 1 are unreachable for it. Node 2 restarts without its data, so that
/// {0, 1, 2} do not know of A's lock. Returns whether A's lease is valid when client B gets the
/// lock.
fn has_two_holders(nodes: Nodes, quarantine: Duration, ttl: Duration) -> bool {
    let nodes = nodes.behind_proxies(&[0, 1]);
    let mut urls: Vec<_> = (0..5).map(|node| nodes.url(node)).collect();
    let config = |urls: &[String]| {
        helpers::config_long_timeouts(urls.join(","))
            .ttl(ttl)
            .operation_timeout(SECOND)
            .quarantine(quarantine)
    };
    let mgr = RedisMgr::new(config(&urls)).unwrap();
    (0..2).for_each(|node| urls[node] = nodes.server(node).url());
    let other = RedisMgr::new(config(&urls)).unwrap();
    // Both managers have reached all nodes, and all nodes vote.
    for mgr in [&mgr, &other] {
        completes_within(TEST_TIMEOUT, "lock", || mgr.lock("early").unwrap())
            .release()
            .unwrap()
            .unwrap_released();
    }
    (0..2).for_each(|node| nodes.proxy(node).blackhole());
    let guard = mgr.lock_with("x", &with_ttl(ttl).renew(false)).unwrap();
    assert_eq!(nodes_holding(&nodes, &guard), [2, 3, 4]);
    nodes.restart_empty(2);
    let next = completes_within(TEST_TIMEOUT, "lock", || other.lock("x").unwrap());
    // A's lease is read after B's has begun and before it has ended.
    let both = guard.is_held() && next.is_held();
    assert!(next.fencing_token() > guard.fencing_token());
    expect_quorum(&nodes, &next);
    both
}

/// Fault: F84
/// Promise: P9
#[test]
fn node_that_lost_its_data_does_not_grant_a_held_lock() {
    let ttl = 5 * SECOND;
    assert!(!has_two_holders(Nodes::start(5), ttl, ttl), "two clients hold the lock");
}

/// The same case without a quarantine, to show that the test above can fail.
///
/// Fault: F84
#[test]
fn node_without_a_quarantine_grants_a_lost_lock_again() {
    assert!(has_two_holders(Nodes::start(5), Duration::ZERO, 60 * SECOND));
}

/// A node cannot prove that it has all its data.
#[test]
fn restarted_node_with_its_data_does_not_vote_at_first() {
    let nodes = Nodes::built(3, |_, builder| builder.durable()).long_running();
    let mgr = long_quarantine(nodes.urls());
    drop(mgr.try_lock_for("x", CALL_LIMIT).unwrap());
    nodes.restart(0);
    nodes.restart(2);
    for mgr in [mgr, long_quarantine(nodes.urls())] {
        eventually("both are in quarantine", TEST_TIMEOUT, || {
            let error = mgr.try_lock("x").expect_err("a restarted node votes");
            assert_eq!(error.nodes().len(), 3, "{error:?}");
            [0, 2].iter().all(|node| error.nodes()[*node].message.contains(IN_QUARANTINE))
        });
    }
}

/// A contender has the vote of a node in quarantine, but nobody can get the lock.
///
/// Fault: F84
/// Promise: P7
#[test]
fn lock_that_a_quarantine_prevents_is_not_called_contended() {
    let nodes = Nodes::built(3, |_, builder| builder.durable()).long_running().in_fixed_order();
    let mgr = long_quarantine(nodes.urls());
    nodes.restart(0);
    nodes.restart(2);
    nodes.server(2).query::<()>(&["SET", &key("x"), "other client", "PX", "600000"]);
    eventually("the error names the quarantine", TEST_TIMEOUT, || {
        let error = mgr.try_lock("x").expect_err("a restarted node votes");
        assert!(!error.is_contended(), "{error:?}");
        error.nodes().len() == 3 && error.nodes()[0].message.contains(IN_QUARANTINE)
    });
}

/// They renew the lock, and only the third one counts.
///
/// Fault: F84
/// Promise: P7
#[test]
fn renewal_that_fails_because_of_a_quarantine_says_so() {
    let nodes = Nodes::built(3, |_, builder| builder.durable()).long_running();
    let mgr = long_quarantine(nodes.urls());
    let guard = mgr.lock_with("x", &with_ttl(600 * SECOND)).unwrap();
    eventually("all nodes hold it", TEST_TIMEOUT, || nodes_holding(&nodes, &guard).len() == 3);
    nodes.restart(0);
    nodes.restart(2);
    eventually("the error names the quarantine", TEST_TIMEOUT, || {
        let error = guard.renew().expect_err("restarted nodes vote");
        error.nodes().len() == 3
            && [0, 2].iter().all(|node| error.nodes()[*node].message.contains(IN_QUARANTINE))
            && error.nodes()[1].message == "renewed"
    });
}

/// These nodes write everything to disk before they reply, and have their data after a restart.
#[test]
fn nodes_that_keep_their_data_need_no_quarantine() {
    let nodes = Nodes::built(3, |_, builder| builder.durable());
    let (mgr, other) = (manager(&nodes), manager(&nodes));
    let guard = mgr.try_lock_for("x", CALL_LIMIT).unwrap();
    eventually("all nodes hold it", TEST_TIMEOUT, || nodes_holding(&nodes, &guard).len() == 3);
    nodes.restart(0);
    nodes.restart(2);
    assert_eq!(nodes_holding(&nodes, &guard), [0, 1, 2]);
    let error = other.try_lock("x").unwrap_err();
    assert!(error.is_contended(), "{error:?}");
    assert_eq!(error.holder().unwrap().id(), guard.id().as_str());
    guard.release().unwrap().unwrap_released();
    let next = other.try_lock_for("x", CALL_LIMIT).unwrap();
    expect_quorum(&nodes, &next);
}

/// Returns a lock on three nodes. One has lost it, and the renewer has re-acquired it there;
/// another node has died.
/// There is no quorum unless the node in quarantine counts.
fn held_with_a_node_in_quarantine(nodes: &Nodes) -> LockGuard {
    let mgr = RedisMgr::new(helpers::config_medium_timeout(nodes.urls()).quarantine(600 * SECOND))
        .unwrap();
    let guard = mgr.lock_with("x", &with_ttl(TTL)).unwrap();
    eventually("all nodes hold it", TEST_TIMEOUT, || nodes_holding(nodes, &guard).len() == 3);
    nodes.restart_empty(2);
    eventually("it is re-acquired", TEST_TIMEOUT, || {
        guard.ensure_held().unwrap();
        nodes_holding(nodes, &guard).contains(&2)
    });
    nodes.kill(1);
    guard
}

/// Fault: F84
/// Promise: P9
#[test]
fn node_in_quarantine_does_not_carry_a_lease() {
    let nodes = Nodes::start(3).long_running();
    let guard = held_with_a_node_in_quarantine(&nodes);
    assert_eq!(expect_loss(&guard), LockLost::Expired);
}

/// The lock is re-acquired repeatedly on the node in quarantine, each time for the full ttl.
///
/// Fault: F84
#[test]
fn reacquisition_in_quarantine_does_not_carry_a_lease() {
    let nodes = Nodes::start(3).long_running();
    let guard = held_with_a_node_in_quarantine(&nodes);
    let delete_lock = || nodes.server(2).cli(&["DEL", &key("x")]);
    delete_lock();
    eventually("it is re-acquired", TEST_TIMEOUT, || {
        nodes_holding(&nodes, &guard).contains(&2) || !guard.is_held()
    });
    // By now all replies of the dead node have been read.
    let mut last = guard.remaining();
    eventually("the lease ends", TEST_TIMEOUT, || {
        delete_lock();
        let left = guard.remaining();
        assert!(left <= last, "{left:?} left after {last:?}");
        last = left;
        left.is_zero()
    });
    assert_eq!(expect_loss(&guard), LockLost::Expired);
}

#[test]
fn ttl_longer_than_the_quarantine_is_invalid() {
    let nodes = Nodes::start(3);
    let mgr = RedisMgr::new(config_long_timeouts(&nodes).ttl(TTL).quarantine(2 * TTL)).unwrap();
    let error = mgr.lock_with("x", &with_ttl(3 * TTL)).unwrap_err();
    let LockError::InvalidOptions { reason, .. } = &error else { panic!("{error:?}") };
    assert!(reason.contains("quarantine (6s)") && reason.contains("ttl is 9s"), "{reason}");
    let error = mgr.acquire_lock("x", 3 * TTL, SECOND).unwrap_err();
    assert!(matches!(error, LockError::InvalidOptions { .. }), "{error:?}");
    let error =
        RedisMgr::new(config_long_timeouts(&nodes).ttl(3 * TTL).quarantine(2 * TTL)).unwrap_err();
    assert!(error.is_invalid(), "{error:?}");
    assert!(nodes.server(0).keys().is_empty());
    // Without a quarantine, any ttl is valid.
    drop(manager(&nodes).lock_with("x", &with_ttl(1000 * TTL)).unwrap());
    let longest = mgr.lock_with("x", &with_ttl(2 * TTL));
    drop(longest.unwrap());
    wait_until_free_everywhere(&nodes, "x");
}

#[test]
fn quarantine_is_logged_once_for_each_node() {
    if !in_own_process("quorum::quarantine::quarantine_is_logged_once_for_each_node", &[]) {
        return;
    }
    let logged = capture_log(log::LevelFilter::Warn);
    let nodes = Nodes::start(3);
    let mgr =
        RedisMgr::new(config_long_timeouts(&nodes).quarantine(600 * SECOND).ttl(TTL)).unwrap();
    expect_no_quorum(&nodes, &mgr.try_lock("x").unwrap_err());
    for node in 0..3 {
        let warning = format!(
            "127.0.0.1:{} may have lost its data in a restart; it votes again in",
            nodes.server(node).port()
        );
        let count = || {
            let logged = logged.lock();
            logged
                .iter()
                .filter(|line| line.starts_with("WARN ") && line.contains(&warning))
                .count()
        };
        // Two nodes in quarantine decide, so the third may still be connecting.
        eventually("the quarantine is logged", TEST_TIMEOUT, || count() > 0);
        assert_eq!(count(), 1, "{:?}", logged.lock());
    }
}
