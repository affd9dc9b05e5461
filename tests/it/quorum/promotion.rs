//! Replicas that become masters: they may not have received every lock, and do not vote at first.

use distlock::RedisMgr;

use super::{
    TTL,
    durability::DURABILITY_KEY,
    nodes_holding,
    quarantine::{long_quarantine, uptime},
};
use crate::{
    helpers::{self, CALL_LIMIT, SECOND, UnwrapReleased, completes_within, get, with_ttl},
    support::{Nodes, RedisServer, TEST_TIMEOUT, eventually},
};

const IN_QUARANTINE: &str = "it may have lost its data in a restart";

/// Makes a server a replica, and waits until it has its master's data.
fn follow(replica: &RedisServer, master: &RedisServer) {
    master.config_set("repl-diskless-sync-delay", "0");
    replica.cli(&["REPLICAOF", "127.0.0.1", &master.port().to_string()]);
    eventually("it is in sync", TEST_TIMEOUT, || {
        let info: String = replica.query(&["INFO", "replication"]);
        info.contains("master_link_status:up")
    });
}

/// The promoted replica has only what its master had sent, whatever the record says.
///
/// Fault: F84
#[test]
fn promoted_replica_does_not_vote_at_first() {
    let nodes = Nodes::durable(4);
    let server = nodes.server(3);
    follow(server, nodes.server(0));
    server.cli(&["REPLICAOF", "NO", "ONE"]);
    nodes.kill(1);
    let urls = [1, 2, 3].map(|node| nodes.url(node)).join(",");
    let mgr = long_quarantine(urls);
    let error = mgr.try_lock("x").unwrap_err();
    assert!(error.to_string().contains(IN_QUARANTINE), "{error}");
    eventually("it has no record", TEST_TIMEOUT, || nodes.values(DURABILITY_KEY)[3].is_none());
}

/// Goal: a replica that restarts as a master, without a promotion, does not count as durable.
/// Method: such a server looks as if it had never been a replica. So its master must have no record
/// while it has a replica, because the record would be copied.
///
/// Fault: N47
#[test]
fn replica_restarted_as_a_master_does_not_vote_at_first() {
    let nodes = Nodes::durable(4);
    follow(nodes.server(3), nodes.server(0));
    eventually("it writes its data to disk", TEST_TIMEOUT, || {
        let info: String = nodes.server(3).query(&["INFO", "persistence"]);
        info.contains("aof_rewrite_in_progress:0") && info.contains("aof_rewrite_scheduled:0")
    });
    assert!(nodes.values(DURABILITY_KEY)[3].is_some(), "the record of its master is copied");
    let manager = |of: [usize; 3]| long_quarantine(of.map(|node| nodes.url(node)).join(","));
    drop(manager([0, 1, 2]).try_lock_for("x", CALL_LIMIT).unwrap());
    eventually("the record of its master is deleted", TEST_TIMEOUT, || {
        nodes.values(DURABILITY_KEY).iter().map(Option::is_some).eq([false, true, true, false])
    });
    nodes.restart(3);
    let info: String = nodes.server(3).query(&["INFO", "replication"]);
    assert!(info.contains("role:master") && info.contains("master_replid2:0000"), "{info}");
    nodes.kill(1);
    let error = manager([1, 2, 3]).try_lock("x").unwrap_err();
    assert!(error.nodes()[2].message.contains(IN_QUARANTINE), "{error}");
}

/// Goal: a promoted replica does not grant a lock that it never received, even to a new manager.
/// Method: client A has its lock from {1, 2}, because 0 is unreachable for it. The replica that
/// replaces 2 has not received that lock, and has run for longer than any lease.
///
/// Fault: N37
/// Promise: P9
#[test]
fn promoted_replica_does_not_grant_a_lock_it_missed() {
    let ttl = 5 * SECOND;
    let (nodes, replica) = (Nodes::start(3), RedisServer::start());
    follow(&replica, nodes.server(2));
    let nodes = nodes.behind_proxies(&[0]);
    let config = |urls: &[String]| {
        helpers::config_long_timeouts(urls.join(",")).ttl(ttl).operation_timeout(SECOND)
    };
    let mgr = RedisMgr::new(config(&[0, 1, 2].map(|node| nodes.url(node)))).unwrap();
    completes_within(TEST_TIMEOUT, "lock", || mgr.lock("early").unwrap())
        .release()
        .unwrap()
        .unwrap_released();
    eventually("it has run for as long as nodes that vote", TEST_TIMEOUT, || {
        uptime(&replica) > ttl
    });
    // It is still a replica, but receives no more data.
    replica.cli(&["REPLICAOF", "127.0.0.1", "1"]);
    nodes.proxy(0).blackhole();
    let guard = mgr.lock_with("x", &with_ttl(ttl).renew(false)).unwrap();
    assert_eq!(nodes_holding(&nodes, &guard), [1, 2]);
    nodes.kill(2);
    replica.cli(&["REPLICAOF", "NO", "ONE"]);
    let other =
        RedisMgr::new(config(&[nodes.server(0).url(), nodes.url(1), replica.url()])).unwrap();
    let next = completes_within(TEST_TIMEOUT, "lock", || other.lock("x").unwrap());
    // A's lease is read after B's has begun and before it has ended.
    let both = guard.is_held() && next.is_held();
    assert!(!both, "two clients hold the lock");
    assert!(next.fencing_token() > guard.fencing_token());
}

/// Otherwise every new manager would treat the server as just promoted while it has replicas.
///
/// Fault: N37
#[test]
fn promoted_replica_gets_a_record_after_a_quarantine() {
    let (nodes, replica) = (Nodes::durable(3), RedisServer::start());
    follow(&replica, nodes.server(2));
    replica.cli(&["REPLICAOF", "NO", "ONE"]);
    let info: String = replica.query(&["INFO", "replication"]);
    let promotion = info.lines().find_map(|line| line.strip_prefix("master_replid:")).unwrap();
    let urls = [nodes.url(0), nodes.url(1), replica.url()].join(",");
    let mgr = RedisMgr::new(helpers::config_long_timeouts(&urls).ttl(TTL)).unwrap();
    eventually("the record is written", TEST_TIMEOUT, || {
        drop(mgr.try_lock_for("x", SECOND));
        get(&replica, DURABILITY_KEY) == Some(format!("3000 {promotion}"))
    });
    // A new manager needs the vote of this server, and its record decides.
    nodes.kill(1);
    let with_record = |record: String| {
        replica.cli(&["SET", DURABILITY_KEY, &record]);
        long_quarantine(&urls)
    };
    drop(with_record(format!("86400000 {promotion}")).try_lock_for("y", CALL_LIMIT).unwrap());
    let mgr = with_record("86400000 another".into());
    eventually("it does not vote", TEST_TIMEOUT, || {
        let error = mgr.try_lock("y").expect_err("it votes at once");
        error.nodes()[2].message.contains(IN_QUARANTINE)
    });
}

/// The node keeps running, and has the data of another master afterwards.
///
/// Fault: N37
#[test]
fn former_replica_does_not_vote_at_first() {
    let (nodes, other_master) = (Nodes::durable(3), RedisServer::start());
    let mgr = long_quarantine(nodes.urls());
    drop(mgr.try_lock_for("x", CALL_LIMIT).unwrap());
    let run_id = nodes.server(2).run_id();
    follow(nodes.server(2), &other_master);
    nodes.kill(1);
    eventually("the replica is discovered", TEST_TIMEOUT, || {
        mgr.try_lock("x").unwrap_err().nodes()[2].message.contains("replica")
    });
    nodes.server(2).cli(&["REPLICAOF", "NO", "ONE"]);
    eventually("it is in quarantine", TEST_TIMEOUT, || {
        let error = mgr.try_lock("x").expect_err("it votes at once");
        error.nodes()[2].message.contains(IN_QUARANTINE)
    });
    assert_eq!(nodes.server(2).run_id(), run_id);
}
