//! Which servers are valid nodes: errors at the start, and nodes that become ineligible later.

use std::time::Duration;

use distlock::{Config, LockError, RedisMgr, Vote};

use super::{
    config_short_timeout, expect_no_quorum, expect_quorum, key, manager, nodes_holding, votes,
    wait_until_free_everywhere, warm_up,
};
use crate::{
    helpers::{
        self, CALL_LIMIT, SHORT_TIMEOUT, capture_log, completes_within, get, in_own_process,
    },
    support::{
        Fault, FaultProxy, Nodes, RedisServer, TEST_TIMEOUT, contains, eventually, eventually_some,
    },
};

/// The reason for which this configuration is invalid.
#[track_caller]
fn refused(config: Config) -> String {
    let error = completes_within(CALL_LIMIT, "new", || RedisMgr::new(config).unwrap_err());
    assert!(matches!(error, LockError::InvalidConfig { .. }) && error.is_invalid(), "{error:?}");
    error.to_string()
}

#[test]
fn empty_node_list_is_invalid() {
    let reason = refused(Config::nodes(Vec::<String>::new()));
    assert!(reason.contains("no nodes"), "{reason}");
}

#[test]
fn duplicate_url_is_invalid() {
    let nodes = Nodes::start(2);
    for urls in [[0, 1, 0], [1, 0, 0], [0, 0, 1]] {
        let reason = refused(Config::nodes(urls.map(|node| nodes.url(node))));
        assert!(reason.contains("listed twice"), "{reason}");
    }
}

fn other_url(server: &RedisServer) -> String {
    format!("redis://localhost:{}", server.port())
}

/// Promise: P9
#[test]
fn same_server_under_two_names_is_invalid() {
    let nodes = Nodes::start(2);
    let urls = [nodes.url(0), other_url(nodes.server(0)), nodes.url(1)];
    let reason = refused(Config::nodes(urls).quarantine(Duration::ZERO));
    assert!(reason.contains("the same server as") && reason.contains("vote twice"), "{reason}");
    assert!(reason.contains(&format!(":{}", nodes.server(0).port())), "{reason}");
}

/// Both databases fail together with their server.
#[test]
fn two_databases_of_one_server_are_invalid() {
    let nodes = Nodes::start(2);
    let urls = [nodes.url(0), format!("{}/1", nodes.url(0)), nodes.url(1)];
    refused(Config::nodes(urls).quarantine(Duration::ZERO));
}

#[test]
fn replica_is_an_invalid_node() {
    let nodes = Nodes::start(3);
    let master = nodes.server(0).port().to_string();
    nodes.server(2).cli(&["REPLICAOF", "127.0.0.1", &master]);
    let reason = refused(Config::nodes((0..3).map(|node| nodes.url(node))));
    assert!(reason.contains("replica"), "{reason}");
    assert!(reason.contains(&format!("127.0.0.1:{}", nodes.server(2).port())), "{reason}");
}

/// Unreachable nodes are no error, because their state can be checked when they are back.
#[test]
fn manager_starts_without_reachable_nodes() {
    let nodes = Nodes::start(3);
    (0..3).for_each(|node| nodes.kill(node));
    let mgr = completes_within(CALL_LIMIT, "new", || {
        RedisMgr::new(config_short_timeout(&nodes)).unwrap()
    });
    assert_eq!(expect_no_quorum(&nodes, &mgr.try_lock("x").unwrap_err()), [Vote::Unknown; 3]);
    nodes.restart_empty(1);
    expect_no_quorum(&nodes, &mgr.try_lock("x").unwrap_err());
    nodes.restart_empty(2);
    let guard = completes_within(TEST_TIMEOUT, "lock", || mgr.lock("x").unwrap());
    expect_quorum(&nodes, &guard);
}

/// Goal: a node has no vote if its name leads to the server of another node, even if this is
/// discovered only when the node becomes reachable. Method: the third node is a proxy for the
/// second node's server, which refuses connections at first.
#[test]
fn duplicate_node_that_appears_later_does_not_vote() {
    let nodes = Nodes::start(2);
    let twin = FaultProxy::in_front_of(nodes.server(1).addr());
    twin.refuse();
    let urls = [nodes.url(0), nodes.url(1), twin.url()];
    let mgr = RedisMgr::new(
        helpers::config_long_timeouts(urls.join(","))
            .operation_timeout(SHORT_TIMEOUT)
            .quarantine(Duration::ZERO),
    )
    .unwrap();
    drop(mgr.lock("x").unwrap());
    twin.heal();
    // Without the first node, both remaining votes would come from one server.
    nodes.kill(0);
    eventually("the duplicate is discovered", TEST_TIMEOUT, || {
        let error = mgr.try_lock("x").unwrap_err();
        let LockError::NoQuorum { needed: 2, replies, .. } = &error else { panic!("{error:?}") };
        assert_ne!(replies[2].vote, Vote::Yes, "{error}");
        replies[2].message.contains("the same server as")
    });
    nodes.restart_empty(0);
    drop(completes_within(TEST_TIMEOUT, "lock", || mgr.lock("x").unwrap()));
}

#[test]
fn replica_that_appears_later_does_not_vote() {
    let nodes = Nodes::start(3);
    let master = nodes.server(0).port().to_string();
    nodes.kill(2);
    let mgr = RedisMgr::new(config_short_timeout(&nodes)).unwrap();
    drop(mgr.lock("x").unwrap());
    nodes.restart_empty(2);
    nodes.server(2).cli(&["REPLICAOF", "127.0.0.1", &master]);
    nodes.kill(1);
    eventually("the replica is discovered", TEST_TIMEOUT, || {
        let error = mgr.try_lock("x").unwrap_err();
        let votes = expect_no_quorum(&nodes, &error);
        assert_ne!(votes[2], Vote::Yes, "{error}");
        error.nodes()[2].message.contains("it is a replica")
    });
    nodes.server(2).cli(&["REPLICAOF", "NO", "ONE"]);
    drop(completes_within(TEST_TIMEOUT, "lock", || mgr.lock("x").unwrap()));
}

/// Goal: two nodes whose names are swapped vote again; neither is excluded because of the server
/// behind the other name before. Method: proxies that change their targets and close their old
/// connections.
///
/// Fault: N77
#[test]
fn nodes_with_swapped_names_vote_again() {
    let nodes = Nodes::start(3).behind_proxies(&[0, 1]);
    let mgr = manager(&nodes);
    let all_nodes_grant =
        || mgr.try_lock("x").is_ok_and(|guard| nodes_holding(&nodes, &guard).len() == 3);
    eventually("all nodes hold it", TEST_TIMEOUT, all_nodes_grant);
    // A release in flight would be lost with its connection.
    wait_until_free_everywhere(&nodes, "x");
    for (name, server) in [(0, 1), (1, 0)] {
        nodes.proxy(name).lead_to(nodes.server(server).addr());
    }
    (0..2).for_each(|name| nodes.proxy(name).reset_all());
    eventually("all nodes hold it again", TEST_TIMEOUT, all_nodes_grant);
}

/// A node that is turned into a replica during use rejects requests, and loses its vote.
#[test]
fn node_that_becomes_a_replica_loses_its_vote() {
    let nodes = Nodes::start(3);
    let mgr = manager(&nodes);
    drop(mgr.lock("x").unwrap());
    let master = nodes.server(0).port().to_string();
    nodes.server(1).cli(&["REPLICAOF", "127.0.0.1", &master]);
    let replica_votes = || {
        let guard = mgr.lock("x").unwrap();
        assert!(guard.is_held());
        let holder = mgr.holder("x").unwrap().unwrap();
        votes(&nodes, holder.nodes())[1] == Vote::Yes
    };
    // If its last reply was slow, it is not asked for the lock, and so has not rejected it yet.
    eventually("the replica is discovered", TEST_TIMEOUT, || !replica_votes());
    assert!((0..5).all(|_| !replica_votes()), "it repeats its master's data as a vote");
    // Each attempt to use it connects, which is not the end of an outage.
    let handshakes = || nodes.server(1).calls("time");
    let before = handshakes();
    eventually("it is connected to again", TEST_TIMEOUT, || {
        !replica_votes() && handshakes() >= before + 6
    });
    assert_eq!(mgr.metrics().reconnected(), 0);
}

/// Goal: a replica does not repeat its master's data as its own vote, even if the call did not wait
/// for the rejection. Method: delay the rejection of an acquire until the others have granted the
/// lock, then kill one of them. With the replica's vote there would be a quorum.
///
/// Fault: F38
#[test]
fn replica_has_no_vote_if_its_rejection_was_not_awaited() {
    let nodes = Nodes::start(3).behind_proxies(&[1]);
    let mgr = manager(&nodes);
    // A release in flight would be rejected too, and that rejection would be read.
    warm_up(&nodes, &mgr);
    let master = nodes.server(0).port().to_string();
    nodes.config_set(0, "repl-diskless-sync-delay", "0");
    nodes.server(1).cli(&["REPLICAOF", "127.0.0.1", &master]);
    let held = nodes.proxy(1).on_request(contains("lock:x"), Fault::HoldReply);
    let guard = eventually_some("its rejection is delayed", TEST_TIMEOUT, || {
        let guard = mgr.lock("x").unwrap();
        (held.fired() > 0).then_some(guard)
    });
    eventually("it has the master's data", TEST_TIMEOUT, || {
        nodes.server(1).query::<Option<String>>(&["GET", &key("x")]).as_deref()
            == Some(guard.id().as_str())
    });
    nodes.kill(2);
    held.release();
    eventually("the replica is discovered", TEST_TIMEOUT, || {
        let error = mgr.holder("x").unwrap_err();
        assert_ne!(expect_no_quorum(&nodes, &error)[1], Vote::Yes, "{error}");
        error.nodes()[1].message.contains("replica")
    });
}

#[test]
fn even_number_of_nodes_is_allowed_with_a_warning() {
    if !in_own_process("quorum::membership::even_number_of_nodes_is_allowed_with_a_warning", &[]) {
        return;
    }
    let logged = capture_log(log::LevelFilter::Warn);
    for count in [1, 2, 3, 4] {
        let nodes = Nodes::start(count);
        let guard = manager(&nodes).lock("x").unwrap();
        expect_quorum(&nodes, &guard);
        let lines = std::mem::take(&mut *logged.lock());
        let warning = format!("{count} nodes survive the loss of {}", (count - 1) / 2);
        let warned = lines.iter().any(|line| {
            line.starts_with("WARN ") && line.contains(&warning) && line.contains("odd")
        });
        assert_eq!(warned, count % 2 == 0, "{lines:?}");
    }
}

/// Goal: if a node's name leads to a new server, the old server has no vote, although it is still
/// running. Method: of two pooled connections, one is idle while the other finds the new server.
///
/// Fault: N59
/// Promise: P9
#[test]
fn connection_to_a_replaced_server_is_not_used() {
    let nodes = Nodes::start(3).behind_proxies(&[0]);
    let (old, new) = (nodes.server(0), RedisServer::start());
    let mgr = manager(&nodes);
    let is_asked = |server: &RedisServer, name: &str| {
        let _guard = mgr.lock(name).unwrap();
        get(server, &key(name)).is_some()
    };
    eventually("the old server is asked", TEST_TIMEOUT, || is_asked(old, "early"));
    let one = mgr.connection().unwrap();
    nodes.proxy(0).lead_to(new.addr());
    eventually("the new server is asked", TEST_TIMEOUT, || is_asked(&new, "met"));
    let other = mgr.connection().unwrap();
    drop(one);
    eventually("all connections lead to the new server", TEST_TIMEOUT, || {
        let _guard = mgr.lock("x").unwrap();
        assert!(get(old, &key("x")).is_none(), "the old server was asked");
        get(&new, &key("x")).is_some()
    });
    drop(other);
}
