//! Which servers can be nodes: what is refused at once, and what is found out later.

use std::time::Duration;

use distlock::{Config, LockError, RedisMgr, Vote};

use super::{
    config_short_timeout, expect_no_quorum, expect_quorum, key, manager, nodes_holding, votes,
    wait_until_free_everywhere, warm_up,
};
use crate::{
    helpers::{
        self, CALL_LIMIT, SHORT_TIMEOUT, capture_log, completes_within, fence_key, in_own_process,
    },
    support::{
        CEILING, Fault, FaultProxy, Nodes, RedisServer, contains, eventually, eventually_some,
    },
};

/// Why a configuration is refused.
#[track_caller]
fn refused(config: Config) -> String {
    let error = completes_within(CALL_LIMIT, "refusing", || RedisMgr::new(config).unwrap_err());
    assert!(matches!(error, LockError::InvalidConfig { .. }) && error.is_invalid(), "{error:?}");
    error.to_string()
}

#[test]
fn no_nodes_at_all_are_refused() {
    let reason = refused(Config::nodes(Vec::<String>::new()));
    assert!(reason.contains("no nodes"), "{reason}");
}

#[test]
fn the_same_url_twice_is_refused() {
    let nodes = Nodes::start(2);
    for urls in [[0, 1, 0], [1, 0, 0], [0, 0, 1]] {
        let reason = refused(Config::nodes(urls.map(|node| nodes.url(node))));
        assert!(reason.contains("named twice"), "{reason}");
    }
}

fn named_otherwise(server: &RedisServer) -> String {
    format!("redis://localhost:{}", server.port())
}

#[test]
fn the_same_server_under_two_names_is_refused() {
    let nodes = Nodes::start(2);
    let urls = [nodes.url(0), named_otherwise(nodes.server(0)), nodes.url(1)];
    let reason = refused(Config::nodes(urls).quarantine(Duration::ZERO));
    assert!(reason.contains("the same server as") && reason.contains("vote twice"), "{reason}");
    assert!(reason.contains(&format!(":{}", nodes.server(0).port())), "{reason}");
}

/// Two databases of one server die together.
#[test]
fn two_databases_of_one_server_are_refused() {
    let nodes = Nodes::start(2);
    let urls = [nodes.url(0), format!("{}/1", nodes.url(0)), nodes.url(1)];
    refused(Config::nodes(urls).quarantine(Duration::ZERO));
}

#[test]
fn a_replica_is_refused() {
    let nodes = Nodes::start(3);
    let master = nodes.server(0).port().to_string();
    nodes.server(2).cli(&["REPLICAOF", "127.0.0.1", &master]);
    let reason = refused(Config::nodes((0..3).map(|node| nodes.url(node))));
    assert!(reason.contains("replica"), "{reason}");
    assert!(reason.contains(&format!("127.0.0.1:{}", nodes.server(2).port())), "{reason}");
}

/// Nodes that are away are not a reason to refuse: which they are is seen when they are back.
#[test]
fn a_manager_begins_without_its_nodes() {
    let nodes = Nodes::start(3);
    (0..3).for_each(|node| nodes.kill(node));
    let mgr = completes_within(CALL_LIMIT, "beginning", || {
        RedisMgr::new(config_short_timeout(&nodes)).unwrap()
    });
    assert_eq!(expect_no_quorum(&nodes, &mgr.try_lock("x").unwrap_err()), [Vote::Unknown; 3]);
    nodes.restart_empty(1);
    expect_no_quorum(&nodes, &mgr.try_lock("x").unwrap_err());
    nodes.restart_empty(2);
    let guard = completes_within(CEILING, "locking", || mgr.lock("x").unwrap());
    expect_quorum(&nodes, &guard);
}

/// Goal: a name that leads to another node's server, as is found out when it comes up, has no vote.
/// Method: a proxy that refuses at first stands in for the third node, and leads to the second; the
/// real third does not exist.
#[test]
fn a_duplicate_that_comes_up_later_does_not_vote() {
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
    // With the first node away, two votes would be the second's.
    nodes.kill(0);
    eventually("it is found out", CEILING, || {
        let error = mgr.try_lock("x").unwrap_err();
        let LockError::NoQuorum { needed: 2, answers, .. } = &error else { panic!("{error:?}") };
        assert_ne!(answers[2].vote, Vote::Yes, "{error}");
        answers[2].message.contains("the same server as")
    });
    nodes.restart_empty(0);
    drop(completes_within(CEILING, "locking", || mgr.lock("x").unwrap()));
}

#[test]
fn a_replica_that_comes_up_later_does_not_vote() {
    let nodes = Nodes::start(3);
    let master = nodes.server(0).port().to_string();
    nodes.kill(2);
    let mgr = RedisMgr::new(config_short_timeout(&nodes)).unwrap();
    drop(mgr.lock("x").unwrap());
    nodes.restart_empty(2);
    nodes.server(2).cli(&["REPLICAOF", "127.0.0.1", &master]);
    nodes.kill(1);
    eventually("it is found out", CEILING, || {
        let error = mgr.try_lock("x").unwrap_err();
        let votes = expect_no_quorum(&nodes, &error);
        assert_ne!(votes[2], Vote::Yes, "{error}");
        error.nodes()[2].message.contains("it is a replica")
    });
    nodes.server(2).cli(&["REPLICAOF", "NO", "ONE"]);
    drop(completes_within(CEILING, "locking", || mgr.lock("x").unwrap()));
}

/// Goal: nodes whose names change places vote again, neither being kept out by what the other's
/// name led to before. Method: proxies that lead to each other's servers from some moment on, and
/// whose former connections end.
#[test]
fn nodes_whose_names_change_places_vote_again() {
    let nodes = Nodes::start(3).behind_proxies(&[0, 1]);
    let mgr = manager(&nodes);
    let everywhere =
        || mgr.try_lock("x").is_ok_and(|guard| nodes_holding(&nodes, &guard).len() == 3);
    eventually("all keep it", CEILING, everywhere);
    // A release that is still under way would be lost with its connection.
    wait_until_free_everywhere(&nodes, "x");
    for (name, server) in [(0, 1), (1, 0)] {
        nodes.proxy(name).lead_to(nodes.server(server).addr());
    }
    (0..2).for_each(|name| nodes.proxy(name).reset_all());
    eventually("all keep it again", CEILING, everywhere);
}

/// A node that becomes another one's replica while it is in use refuses what it is asked, and is
/// left out.
#[test]
fn a_node_that_becomes_a_replica_is_left_out() {
    let nodes = Nodes::start(3);
    let mgr = manager(&nodes);
    drop(mgr.lock("x").unwrap());
    let master = nodes.server(0).port().to_string();
    nodes.server(1).cli(&["REPLICAOF", "127.0.0.1", &master]);
    let repeats = || {
        let guard = mgr.lock("x").unwrap();
        assert!(guard.is_held());
        let holder = mgr.holder("x").unwrap().unwrap();
        votes(&nodes, holder.nodes())[1] == Vote::Yes
    };
    // It is not asked for the lock where it was slow the last time, and so has nothing to refuse.
    eventually("it is found out", CEILING, || !repeats());
    assert!((0..5).all(|_| !repeats()), "it repeats what its master says");
}

/// Goal: a replica does not repeat its master's word as one of its own, also where nobody waited
/// for its refusal. Method: the refusal of an acquire is held back until the lock is won by the
/// others; then one of these is killed, so that with the replica's word there would be a quorum.
#[test]
fn a_node_whose_refusal_nobody_waited_for_is_left_out_as_a_replica() {
    let nodes = Nodes::start(3).behind_proxies(&[1]);
    let mgr = manager(&nodes);
    // A release that is still under way would be refused, and its refusal heard.
    warm_up(&nodes, &mgr);
    let master = nodes.server(0).port().to_string();
    nodes.config_set(0, "repl-diskless-sync-delay", "0");
    nodes.server(1).cli(&["REPLICAOF", "127.0.0.1", &master]);
    let held = nodes.proxy(1).on_request(contains("lock:x"), Fault::HoldReply);
    let guard = eventually_some("its refusal is held back", CEILING, || {
        let guard = mgr.lock("x").unwrap();
        (held.fired() > 0).then_some(guard)
    });
    eventually("its data are the master's", CEILING, || {
        nodes.server(1).query::<Option<String>>(&["GET", &key("x")]).as_deref()
            == Some(guard.id().as_str())
    });
    nodes.kill(2);
    held.let_go();
    eventually("it is found out", CEILING, || {
        let error = mgr.holder("x").unwrap_err();
        assert_ne!(expect_no_quorum(&nodes, &error)[1], Vote::Yes, "{error}");
        error.nodes()[1].message.contains("replica")
    });
}

#[test]
fn an_even_number_is_allowed_with_a_warning() {
    if !in_own_process("redlock::roster::an_even_number_is_allowed_with_a_warning", &[]) {
        return;
    }
    let logged = capture_log(log::LevelFilter::Warn);
    for count in [1, 2, 3, 4] {
        let nodes = Nodes::start(count);
        let guard = manager(&nodes).lock("x").unwrap();
        expect_quorum(&nodes, &guard);
        let said = std::mem::take(&mut *logged.lock());
        let warning = format!("{count} nodes survive the loss of {}", (count - 1) / 2);
        let warned = said.iter().any(|line| {
            line.starts_with("WARN ") && line.contains(&warning) && line.contains("odd")
        });
        assert_eq!(warned, count % 2 == 0, "{said:?}");
    }
}

/// Goal: a node's former server, which goes on, has no vote beside the one to which the name leads
/// by now. Method: two places for connections, of which one is kept from use while the other finds
/// out.
#[test]
fn who_has_met_another_server_asks_the_former_no_more() {
    let nodes = Nodes::start(3).behind_proxies(&[0]);
    let (former, successor) = (nodes.server(0), RedisServer::start());
    let mgr = manager(&nodes);
    let is_asked = |server: &RedisServer, name: &str| {
        drop(mgr.lock(name).unwrap());
        server.query::<Option<u64>>(&["GET", &fence_key(name)]).is_some()
    };
    eventually("it is the first server", CEILING, || is_asked(former, "early"));
    let one = mgr.connection().unwrap();
    nodes.proxy(0).lead_to(successor.addr());
    eventually("the next one is met", CEILING, || is_asked(&successor, "met"));
    let other = mgr.connection().unwrap();
    drop(one);
    eventually("all ask the next one", CEILING, || is_asked(&successor, "x"));
    assert!(!former.keys().contains(&fence_key("x")), "the former server is asked");
    drop(other);
}
