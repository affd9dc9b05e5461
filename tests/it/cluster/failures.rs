//! Nodes that die, hang or hand their slots to a replica.

use super::*;
use crate::helpers::config_short_timeout;

/// Otherwise all nodes refuse everything while the slots of one are not served.
fn partial_coverage(server: RedisServerBuilder) -> RedisServerBuilder {
    server.arg("--cluster-require-full-coverage").arg("no")
}

/// Fault: N175
#[test]
fn failover_of_a_killed_master_keeps_locks_and_waiters() {
    let cluster = Cluster::start_with(3, true, &partial_coverage);
    let (holder, waiter) = (manager(&cluster), manager(&cluster));
    let slot = slot(&cluster, "x");
    let held = holder.lock("x").unwrap();
    let elsewhere: Vec<_> = NAMES
        .iter()
        .filter(|name| {
            cluster.owner(self::slot(&cluster, name)).port() != cluster.owner(slot).port()
        })
        .map(|name| holder.lock_with(name, &with_ttl(10 * SECOND)).unwrap())
        .collect();
    assert!(!elsewhere.is_empty());
    let waiting = spawn_waiter(&waiter, "x", 0);
    let former = cluster.owner(slot);
    let replica = cluster.replica_of(former);
    eventually("the replica has the lock and the waiter", TEST_TIMEOUT, || {
        replica.keys().iter().filter(|key| key.contains("lock:x")).count() == 3
    });
    former.kill();
    cluster.await_other_owner(slot, former);
    let token = held.fencing_token();
    eventually("it is released", TEST_TIMEOUT, || {
        holder.force_release("x").is_ok_and(|released| released)
            || holder
                .holder("x")
                .is_ok_and(|now| now.is_some_and(|now| now.id() != held.id().as_str()))
    });
    let next = completes_within(TEST_TIMEOUT, "the hand-over", || waiting.join().unwrap());
    assert!(next.fencing_token() > token);
    next.release().unwrap().unwrap_released();
    // The other nodes served their locks all the time.
    for guard in elsewhere {
        assert!(guard.is_held(), "{} was lost", guard.name());
        guard.release().unwrap().unwrap_released();
    }
}

/// The former master believes for a while that it still is one.
///
/// Fault: N175
#[test]
fn thawed_former_master_is_not_asked() {
    let cluster = Cluster::with_replicas(3);
    let mgr = manager(&cluster);
    let slot = slot(&cluster, "y");
    drop(mgr.lock("y").unwrap());
    let former = cluster.owner(slot);
    former.stop();
    eventually("a replica serves the slot", TEST_TIMEOUT, || {
        cluster.nodes.iter().filter(|node| node.port() != former.port()).any(|node| {
            node.query::<String>(&["CLUSTER", "NODES"])
                .lines()
                .any(|line| line.contains(&format!(":{}@", former.port())) && line.contains("fail"))
                && node.query::<String>(&["CLUSTER", "INFO"]).contains("cluster_state:ok")
        })
    });
    let guard = lock_eventually(&mgr, "y");
    former.cont();
    guard.release().unwrap().unwrap_released();
    assert_eq!(mgr.holder("y").unwrap(), None);
    drop(lock_eventually(&mgr, "y"));
}

/// Fault: N175
#[test]
fn manual_failovers_lose_no_lock_and_no_waiter() {
    let cluster = Cluster::with_replicas(3);
    let (holder, waiter) = (manager(&cluster), manager(&cluster));
    let slot = slot(&cluster, "x");
    for _ in 0..2 {
        let held = holder.lock("x").unwrap();
        let waiting = spawn_waiter(&waiter, "x", 0);
        let former = cluster.owner(slot);
        cluster.fail_over(former);
        cluster.await_other_owner(slot, former);
        assert!(held.is_held());
        held.release().unwrap().unwrap_released();
        let next = completes_within(TEST_TIMEOUT, "the hand-over", || waiting.join().unwrap());
        next.release().unwrap().unwrap_released();
    }
}

/// Locks of a node that hangs must not cost those of other nodes, even if these are much shorter.
///
/// Fault: N175
#[test]
fn node_that_hangs_delays_no_renewal_of_the_others() {
    let cluster = Cluster::start_with(3, false, &partial_coverage);
    let mgr = manager(&cluster);
    let hanging = cluster.owner(slot(&cluster, "x"));
    let held = mgr.lock_with("x", &with_ttl(6 * SECOND)).unwrap();
    let elsewhere: Vec<_> = NAMES
        .iter()
        .filter(|name| cluster.owner(slot(&cluster, name)).port() != hanging.port())
        .map(|name| mgr.lock_with(name, &with_ttl(2 * SECOND)).unwrap())
        .collect();
    hanging.stop();
    let lost = held.lost().clone();
    lost.recv_timeout(TEST_TIMEOUT).expect("the lock of the hanging node is lost");
    for guard in &elsewhere {
        assert!(guard.is_held(), "{} was lost", guard.name());
    }
    hanging.cont();
}

/// The node that is receiving a slot hangs, and the lock is there already.
///
/// Fault: N235
#[test]
fn redirect_to_a_node_that_hangs_delays_no_renewal() {
    let cluster = Cluster::start_with(3, false, &partial_coverage);
    let mgr = RedisMgr::new(config(&cluster).operation_timeout(20 * SECOND)).unwrap();
    let moved = mgr.lock("x").unwrap();
    let slot = slot(&cluster, "x");
    let (from, to) = cluster.begin_move(slot);
    cluster.move_keys(slot, from, to, &["lock:x"]);
    let is_there = |name: &&&str| cluster.owner(self::slot(&cluster, name)).port() == from.port();
    let name = NAMES.iter().find(is_there).expect("the locks are on all nodes");
    let short = mgr.lock_with(name, &with_ttl(8 * SECOND)).unwrap();
    moved.renew().unwrap();
    to.stop();
    let renewed = mgr.metrics().renewals();
    std::thread::scope(|threads| {
        threads.spawn(|| moved.renew().unwrap_err());
        eventually("the other lock is renewed", TEST_TIMEOUT, || {
            !short.is_held() || mgr.metrics().renewals() >= renewed + 2
        });
        assert!(short.is_held(), "{name} was lost");
        to.cont();
        mgr.shutdown();
    });
}

/// The map may have changed, and another node is asked for it first.
///
/// Fault: N241
#[test]
fn map_that_a_node_does_not_report_delays_no_renewal() {
    let cluster = Cluster::start_with(5, false, &partial_coverage);
    let mgr = RedisMgr::new(config(&cluster).operation_timeout(60 * SECOND)).unwrap();
    let lost = mgr.lock_with("x", &with_ttl(120 * SECOND)).unwrap();
    let killed = cluster.owner(slot(&cluster, "x"));
    let mut elsewhere = NAMES.iter().filter_map(|name| {
        let owner = cluster.owner(slot(&cluster, name));
        (owner.port() != killed.port()).then_some((name, owner))
    });
    let (name, owner) = elsewhere.next().expect("the locks are on several nodes");
    let (last, hanging) = elsewhere.find(|(_, other)| other.port() != owner.port()).unwrap();
    let short = mgr.lock_with(name, &with_ttl(4 * SECOND)).unwrap();
    drop(mgr.lock(last).unwrap());
    hanging.stop();
    killed.kill();
    lost.renew().unwrap_err();
    let renewed = mgr.metrics().renewals();
    eventually("the other lock is renewed", TEST_TIMEOUT, || {
        !short.is_held() || mgr.metrics().renewals() >= renewed + 3
    });
    assert!(short.is_held(), "{name} was lost");
    hanging.cont();
    // Otherwise the release waits for it.
    killed.restart();
}

/// One thread asks for the map of the slots, and the others wait for its result.
///
/// Fault: N194
#[test]
fn no_thread_takes_an_unreachable_cluster_for_an_empty_one() {
    let cluster = Cluster::start(3);
    cluster.nodes.iter().for_each(RedisServer::stop);
    let mgr = RedisMgr::new(config_short_timeout(cluster.url())).unwrap();
    std::thread::scope(|threads| {
        for _ in 0..4 {
            threads.spawn(|| assert!(mgr.ping().unwrap_err().is_unavailable()));
            threads.spawn(|| assert!(mgr.locks("*").unwrap_err().is_unavailable()));
        }
    });
    cluster.nodes.iter().for_each(RedisServer::cont);
    eventually("it replies", TEST_TIMEOUT, || mgr.ping().is_ok());
}

/// A cluster counts as one server. The first node of the URL is dead.
///
/// Fault: N255
#[test]
fn cluster_counts_as_reachable_while_a_node_replies() {
    let cluster = Cluster::start_with(3, false, &partial_coverage);
    let (dead, others) = cluster.nodes.split_first().expect("three nodes");
    let is_elsewhere = |name: &&&str| cluster.owner(slot(&cluster, name)).port() != dead.port();
    let name = *NAMES.iter().find(is_elsewhere).expect("the locks are on all nodes");
    dead.kill();
    let mgr = manager(&cluster);
    let reachable = || mgr.metrics().nodes_reachable();
    drop(lock_eventually(&mgr, name));
    assert_eq!((mgr.metrics().nodes(), reachable()), (1, 1));
    others.iter().for_each(RedisServer::kill);
    eventually("no node replies", TEST_TIMEOUT, || mgr.try_lock(name).is_err() && reachable() == 0);
    others.iter().for_each(RedisServer::restart);
    drop(lock_eventually(&mgr, name));
    assert_eq!(reachable(), 1);
}

/// Goal: renewals at a node that hangs, of which there are always some, leave time for others.
/// Method: more locks are at that node than one request renews after a timeout, and all are due.
///
/// Fault: N175
/// Promise: P8
#[test]
fn many_locks_of_a_hung_node_delay_no_renewal_elsewhere() {
    const LOCKS: usize = 40;
    let cluster = Cluster::start_with(3, false, &partial_coverage);
    let mgr = RedisMgr::new(config(&cluster).ttl(4 * TEST_TIMEOUT)).unwrap();
    let hanging = cluster.owner(slot(&cluster, "{x}"));
    let held: Vec<_> = (0..LOCKS).map(|n| mgr.lock(&format!("{{x}}{n}")).unwrap()).collect();
    let is_elsewhere = |name: &&&str| cluster.owner(slot(&cluster, name)).port() != hanging.port();
    let name = NAMES.iter().find(is_elsewhere).expect("the locks are on all nodes");
    // Its lease ends last, so it would come after all others.
    let short = mgr.lock(name).unwrap();
    // The connection of the renewer is open, so the next request has no reply.
    held[0].renew().unwrap();
    hanging.stop();
    std::thread::scope(|threads| {
        for guard in &held {
            threads.spawn(|| guard.renew().unwrap_err());
        }
    });
    let renewed = mgr.metrics().renewals();
    eventually("the other lock is renewed", TEST_TIMEOUT, || {
        // The call may give up while the renewer still waits for the hung node.
        let _ = short.renew();
        mgr.metrics().renewals() > renewed
    });
    // Otherwise the releases would wait for it.
    hanging.cont();
}

/// Fault: N121
/// Promise: P6
#[test]
fn waiters_for_a_permit_all_report_an_unreachable_node() {
    let cluster = Cluster::start_with(3, false, &partial_coverage);
    let config = config_short_timeout(cluster.url()).ttl(CALL_LIMIT + 2 * SECOND);
    let mgr = RedisMgr::new(config).unwrap();
    let semaphore = mgr.semaphore("s", 1).unwrap();
    let permit = semaphore.try_acquire().unwrap();
    let (sender, results) = std::sync::mpsc::channel();
    std::thread::scope(|threads| {
        for _ in 0..4 {
            threads.spawn(|| sender.send(semaphore.acquire().map(drop)).unwrap());
        }
        await_waiting(&mgr, "s", 4);
        cluster.owner(slot(&cluster, "s")).kill();
        for nth in 0..4 {
            let limit = if nth == 0 { 4 * CALL_LIMIT } else { CALL_LIMIT };
            let result = results.recv_timeout(limit).expect("the calls end together");
            assert!(result.unwrap_err().is_unavailable());
        }
    });
    drop(permit);
}

/// Goal: the nodes that remain are not asked for the map with each failure. Method: thirty threads
/// try to get locks of a dead node until one lease has passed.
///
/// Fault: N263
/// Promise: P8
#[test]
fn failures_at_a_dead_node_seldom_ask_the_others_for_the_map() {
    let cluster = Cluster::start_with(3, false, &partial_coverage);
    let mgr = RedisMgr::new(config(&cluster).ttl(6 * SECOND)).unwrap();
    let dead = cluster.owner(slot(&cluster, "{x}"));
    let is_elsewhere = |name: &&&str| cluster.owner(slot(&cluster, name)).port() != dead.port();
    let name = NAMES.iter().find(is_elsewhere).expect("the locks are on all nodes");
    drop((mgr.lock("{x}").unwrap(), mgr.lock(name).unwrap()));
    dead.kill();
    let asked = || -> u64 {
        let remaining = cluster.nodes.iter().filter(|node| node.port() != dead.port());
        let stats = remaining.map(|node| node.commandstats().get("cluster|slots").copied());
        stats.map(Option::unwrap_or_default).sum()
    };
    let before = asked();
    std::thread::scope(|threads| {
        for n in 0..30 {
            let mgr = &mgr;
            threads.spawn(move || mgr.lock(&format!("{{x}}{n}")).unwrap_err());
        }
    });
    let asked = asked() - before;
    assert!((1..=30).contains(&asked), "the others were asked {asked} times");
}
