//! Replicas that become masters: they may not have received every lock, and do not vote at first.

use distlock::RedisMgr;

use super::{
    nodes_holding,
    quarantine::{IN_QUARANTINE, long_quarantine, uptime},
};
use crate::{
    helpers::{self, CALL_LIMIT, SECOND, UnwrapReleased, completes_within, with_ttl},
    support::{Fault, Nodes, RedisServer, TEST_TIMEOUT, eventually},
};

/// Makes a server a replica, and waits until it has its master's data.
fn follow(replica: &RedisServer, master: &RedisServer) {
    master.config_set("repl-diskless-sync-delay", "0");
    replica.cli(&["REPLICAOF", "127.0.0.1", &master.port().to_string()]);
    eventually("it is in sync", TEST_TIMEOUT, || {
        let info: String = replica.query(&["INFO", "replication"]);
        info.contains("master_link_status:up")
    });
}

/// The promoted replica has only what its master had sent, however long it has been up.
///
/// Fault: F84, N37
#[test]
fn promoted_replica_does_not_vote_at_first() {
    let nodes = Nodes::start(4).long_running();
    let server = nodes.server(3);
    follow(server, nodes.server(0));
    server.cli(&["REPLICAOF", "NO", "ONE"]);
    nodes.kill(1);
    let urls = [1, 2, 3].map(|node| nodes.url(node)).join(",");
    let error = long_quarantine(urls).try_lock("x").unwrap_err();
    assert!(error.nodes()[2].message.contains(IN_QUARANTINE), "{error}");
}

/// Goal: a server that becomes a replica stops voting although it accepts writes. Otherwise it
/// could vote for one client while its master, which is another node, votes for a second one.
/// Method: the lock needs the vote of that server. All connections to it were opened before, and no
/// handshake can find the replica, because each new connection is reset at its first question.
///
/// Fault: N139
/// Promise: P9
#[test]
fn writable_replica_stops_to_vote() {
    let nodes = Nodes::start(3).behind_proxies(&[1]);
    let config = helpers::config_medium_timeout(nodes.urls()).ttl(SECOND).pool_size(1);
    let is_probe = |words: &[Vec<u8>]| words == [b"INFO"];
    let is_handshake = |words: &[Vec<u8>]| words == [&b"INFO"[..], b"server"];
    let probes = nodes.proxy(1).on_request(is_probe, Fault::SliceReply).forever();
    let mgr = RedisMgr::new(config).unwrap();
    mgr.lock("x").unwrap().release().unwrap().unwrap_released();
    probes.wait_fired();
    assert_eq!(nodes.proxy(1).connections(), 2, "one of the pool and one of the renewer");
    let handshakes = nodes.proxy(1).on_request(is_handshake, Fault::ResetBeforeRequest).forever();
    nodes.config_set(1, "replica-read-only", "no");
    // Its master does not exist, so no synchronisation closes the connections.
    nodes.server(1).cli(&["REPLICAOF", "127.0.0.1", "1"]);
    nodes.kill(2);
    // The release may be the first that finds out.
    let try_lock = || mgr.try_lock("x").and_then(|guard| guard.release());
    eventually("the replica does not vote", TEST_TIMEOUT, || try_lock().is_err());
    handshakes.disarm();
    eventually("the error says why", TEST_TIMEOUT, || {
        try_lock().unwrap_err().nodes()[1].message.contains("it is a replica")
    });
}

/// Such a server looks as if it had never been a replica, but its run is young.
///
/// Fault: N47
#[test]
fn replica_restarted_as_a_master_does_not_vote_at_first() {
    let nodes = Nodes::built(4, |_, builder| builder.durable()).long_running();
    follow(nodes.server(3), nodes.server(0));
    eventually("it writes its data to disk", TEST_TIMEOUT, || {
        let info: String = nodes.server(3).query(&["INFO", "persistence"]);
        info.contains("aof_rewrite_in_progress:0") && info.contains("aof_rewrite_scheduled:0")
    });
    nodes.restart(3);
    let info: String = nodes.server(3).query(&["INFO", "replication"]);
    assert!(info.contains("role:master") && info.contains("master_replid2:0000"), "{info}");
    nodes.kill(1);
    let urls = [1, 2, 3].map(|node| nodes.url(node)).join(",");
    let error = long_quarantine(urls).try_lock("x").unwrap_err();
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

/// The node keeps running, and has the data of another master afterwards.
///
/// Fault: N37
#[test]
fn former_replica_does_not_vote_at_first() {
    let (nodes, other_master) = (Nodes::start(3).long_running(), RedisServer::start());
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
