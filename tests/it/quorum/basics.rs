//! Everything that one server does, done by several.

use std::time::Duration;

use distlock::{LockError, RedisMgr, Vote};

use super::{
    config_long_timeouts, expect_quorum, key, manager, nodes_holding, votes,
    wait_until_free_everywhere,
};
use crate::{
    helpers::{
        self, CALL_LIMIT, SECOND, UnwrapReleased, await_queued, completes_within, expect_loss,
        fence_key, in_thread, queue_key, with_ttl,
    },
    support::{CEILING, Fault, Nodes, contains, eventually},
};

#[test]
fn a_lock_is_kept_by_a_quorum_and_released_everywhere() {
    for count in [3, 5] {
        let nodes = Nodes::start(count);
        let (mgr, other) = (manager(&nodes), manager(&nodes));
        let mut last = 0;
        for round in 0..30 {
            let guard = [&mgr, &other][round % 2].lock("x").unwrap();
            expect_quorum(&nodes, &guard);
            assert!(guard.fencing_token().as_u64() > last, "{last} {guard:?}");
            last = guard.fencing_token().as_u64();
            guard.release().unwrap().unwrap_released();
            wait_until_free_everywhere(&nodes, "x");
        }
    }
}

/// What the slower nodes answered reaches them all the same: they are not left out when the others
/// suffice.
#[test]
fn all_nodes_keep_a_lock() {
    let nodes = Nodes::start(5);
    let mgr = manager(&nodes);
    let guard = mgr.lock("x").unwrap();
    eventually("all keep it", CALL_LIMIT, || nodes_holding(&nodes, &guard).len() == 5);
    drop(guard);
    wait_until_free_everywhere(&nodes, "x");
}

/// Nobody waits for its answer that it does not know the script.
#[test]
fn a_distant_node_that_forgets_scripts_is_taught_again() {
    let nodes = Nodes::start(3).behind_proxies(&[2]);
    let mgr = manager(&nodes);
    let round = || {
        mgr.lock("x").unwrap().release().unwrap().unwrap_released();
        // All are heard: otherwise it owes so much before long that its connection is given up, and
        // the next one teaches it.
        mgr.locks("*").unwrap();
    };
    let server = nodes.server(2);
    let commands = server.monitor();
    let given =
        || commands.lines().iter().filter(|line| line.contains("lua] \"SET\" \"lock:x\"")).count();
    eventually("it is asked too", CEILING, || {
        round();
        given() > 0
    });
    nodes
        .proxy(2)
        .on_request(contains("lock:x"), Fault::DelayReply(Duration::from_millis(50)))
        .forever();
    server.cli(&["SCRIPT", "FLUSH"]);
    commands.wait_for("FLUSH");
    let before = given();
    eventually("it gives locks again", CEILING, || {
        round();
        given() > before
    });
}

#[test]
fn a_held_lock_is_told_with_what_each_node_said() {
    let nodes = Nodes::start(5);
    let (mgr, other) = (manager(&nodes), manager(&nodes));
    assert_eq!(other.holder("x").unwrap(), None);
    let guard = mgr.lock("x").unwrap();
    eventually("all keep it", CALL_LIMIT, || nodes_holding(&nodes, &guard).len() == 5);

    let holder = other.holder("x").unwrap().unwrap();
    assert_eq!(holder.id(), guard.id().as_str());
    let said = votes(&nodes, holder.nodes());
    assert!(said.iter().filter(|vote| **vote == Vote::Yes).count() >= 3, "{said:?}");
    let held =
        holder.nodes().iter().filter(|answer| answer.message.starts_with("held by ")).count();
    assert!(held >= 3, "{:?}", holder.nodes());

    let error = other.try_lock("x").unwrap_err();
    let LockError::Held { holder, .. } = &error else { panic!("{error:?}") };
    assert_eq!(holder.id(), guard.id().as_str());
    let said = votes(&nodes, holder.nodes());
    assert!(said.iter().filter(|vote| **vote == Vote::No).count() >= 3, "{said:?}");
    assert_eq!(error.nodes(), holder.nodes());
    assert!(error.is_contended() && !error.is_unavailable());

    guard.release().unwrap().unwrap_released();
    wait_until_free_everywhere(&nodes, "x");
    assert_eq!(other.holder("x").unwrap(), None);
    drop(other.try_lock("x").unwrap());
}

#[test]
fn every_other_way_to_lock_works_too() {
    let nodes = Nodes::start(3);
    let (mgr, other) = (manager(&nodes), manager(&nodes));
    assert!(mgr.ping().unwrap() < CALL_LIMIT);

    let outer = mgr.lock_reentrant("x").unwrap();
    let inner = mgr.lock_reentrant("x").unwrap();
    drop(outer);
    assert!(other.is_locked("x").unwrap());
    drop(inner);
    wait_until_free_everywhere(&nodes, "x");

    let id = mgr.acquire_lock("x", 10 * SECOND, SECOND).unwrap().unwrap();
    assert!(nodes.keeping(&key("x"), &id).len() >= 2);
    assert_eq!(other.acquire_lock("x", 10 * SECOND, SECOND / 10).unwrap(), None);
    assert!(!other.release_lock("x", "somebody else").unwrap());
    // Whoever knows the identifier may release it.
    assert!(other.release_lock("x", &id).unwrap());
    wait_until_free_everywhere(&nodes, "x");
    assert!(!mgr.release_lock("x", &id).unwrap());

    let guard = mgr.lock_with("x", &with_ttl(3 * SECOND)).unwrap();
    assert!(other.force_release("x").unwrap());
    wait_until_free_everywhere(&nodes, "x");
    expect_loss(&guard);
    assert!(!other.is_locked("x").unwrap());
    assert!(!other.force_release("x").unwrap());
}

/// Each has one node: the votes were split, and the askers have died.
#[test]
fn a_forced_release_takes_it_from_all_who_have_a_part_of_it() {
    let nodes = Nodes::start(3);
    let mgr = manager(&nodes);
    for (node, asker) in ["a", "b", "c"].into_iter().enumerate() {
        nodes.server(node).query::<()>(&["SET", &key("x"), asker, "PX", "600000"]);
    }
    assert!(mgr.force_release("x").unwrap());
    wait_until_free_everywhere(&nodes, "x");
    drop(mgr.try_lock("x").unwrap());
}

/// Each of them has a part of it; that it is not known how it went with the second does not give it
/// back to the first.
#[test]
fn a_forced_release_that_fails_for_the_second_is_one_of_the_first() {
    let nodes = Nodes::start(3).behind_proxies(&[1, 2]);
    let mgr = RedisMgr::new(config_long_timeouts(&nodes)).unwrap();
    for (node, asker) in ["asker 1", "asker 2"].into_iter().enumerate() {
        nodes.server(node).query::<()>(&["SET", &key("x"), asker, "PX", "600000"]);
    }
    for node in [1, 2] {
        nodes.proxy(node).on_request(contains("asker 2"), Fault::ResetBeforeRequest).forever();
    }
    assert!(mgr.force_release("x").unwrap());
    assert_eq!(nodes.values(&key("x")), [None, Some("asker 2".into()), None]);
}

#[test]
fn shutting_down_releases_on_all_nodes() {
    let nodes = Nodes::start(5);
    let (mgr, other) = (manager(&nodes), manager(&nodes));
    let guards: Vec<_> = (0..20).map(|number| mgr.lock(&format!("x{number}")).unwrap()).collect();
    let waiting = in_thread(&other, "x0", |mgr, name| mgr.lock(name).unwrap());
    await_queued(nodes.server(0), "x0", 1);
    completes_within(CALL_LIMIT, "shutdown", || mgr.shutdown());
    assert!(guards.iter().all(|guard| !guard.is_held()));
    let next = completes_within(CALL_LIMIT, "the hand-over", || waiting.join().unwrap());
    (1..20).for_each(|number| wait_until_free_everywhere(&nodes, &format!("x{number}")));
    next.release().unwrap().unwrap_released();
    for node in 0..5 {
        assert!(!nodes.server(node).query::<bool>(&["EXISTS", &queue_key("x0")]));
    }
}

/// Nodes in a list with commas, each with a password and a database.
#[test]
fn urls_are_as_rich_as_that_of_one_server() {
    let nodes = Nodes::built(3, |_, builder| builder.password("correct horse, battery"));
    let urls: Vec<_> = (0..3).map(|node| format!("{}/2", nodes.url(node))).collect();
    let config = helpers::config_long_timeouts(urls.join(",")).quarantine(Duration::ZERO);
    assert!(!format!("{config:?}").contains("horse"));
    let (mgr, elsewhere) = (RedisMgr::new(config).unwrap(), manager(&nodes));
    let guard = mgr.lock("x").unwrap();
    assert_eq!(nodes_holding(&nodes, &guard), [0; 0], "it is in another database");
    assert_eq!(mgr.holder("x").unwrap().unwrap().id(), guard.id().as_str());
    drop(elsewhere.try_lock("x").unwrap());
    assert!(guard.is_held());
}

/// Nobody can stand in line there, so that there is nobody to pass either.
#[test]
fn a_key_of_another_type_on_one_node_keeps_nobody_from_the_lock() {
    for odd in [0, 2] {
        let nodes = Nodes::start(3);
        nodes.server(odd).cli(&["RPUSH", &key("x"), "precious"]);
        let mgr = manager(&nodes);
        for wait in [Duration::ZERO, SECOND] {
            let guard = completes_within(CALL_LIMIT, "lock", || mgr.try_lock_for("x", wait));
            drop(guard.unwrap_or_else(|error| panic!("node {odd}, {wait:?}: {error}")));
        }
        assert_eq!(
            nodes.server(odd).query::<Vec<String>>(&["LRANGE", &key("x"), "0", "-1"]),
            ["precious"]
        );
    }
}

/// What is wrong with one lock on a node says nothing about the others: it is not left out, and the
/// line does not move.
#[test]
fn another_type_for_one_lock_costs_no_other_its_node() {
    for odd_key in [queue_key("x"), fence_key("x")] {
        let nodes = Nodes::start(3);
        nodes.server(0).cli(&["HSET", &odd_key, "field", "precious"]);
        let mgr = manager(&nodes);
        drop(mgr.lock("warm").unwrap());
        for _ in 0..6 {
            drop(completes_within(CALL_LIMIT, "lock", || mgr.lock("x").unwrap()));
        }
        // Who waits for that one asks now and then.
        let guard = mgr.lock("x").unwrap();
        let asked = || nodes.server(1).calls("evalsha") + nodes.server(1).calls("eval");
        let before = asked();
        let error =
            completes_within(CALL_LIMIT, "lock", || mgr.try_lock_for("x", SECOND).unwrap_err());
        let asked = asked() - before;
        assert!(error.is_contended() && asked < 60, "asked {asked} times within a second: {error}");
        let waiting = in_thread(&mgr, "x", |mgr, name| mgr.try_lock_for(name, 30 * SECOND));
        eventually("it waits", CALL_LIMIT, || mgr.metrics().contended() >= 2);
        guard.release().unwrap().unwrap_released();
        drop(waiting.join().unwrap().unwrap());

        let guard = mgr.lock("y").unwrap();
        let waiting = in_thread(&mgr, "y", |mgr, name| mgr.lock(name));
        await_queued(nodes.server(0), "y", 1);
        guard.release().unwrap().unwrap_released();
        drop(waiting.join().unwrap().unwrap());
    }
}

/// A key of another type comes where the line is, while the lock is held.
#[test]
fn who_waits_where_there_can_be_no_line_asks_now_and_then_and_gets_it() {
    let nodes = Nodes::start(3);
    let (mgr, other) = (manager(&nodes), manager(&nodes));
    let guard = mgr.lock("x").unwrap();
    eventually("all keep it", CALL_LIMIT, || nodes_holding(&nodes, &guard).len() == 3);
    let first = nodes.server(0);
    first.cli(&["DEL", &key("x")]);
    first.cli(&["RPUSH", &key("x"), "precious"]);

    let asked = || first.calls("evalsha") + first.calls("eval");
    let before = asked();
    let error =
        completes_within(CALL_LIMIT, "lock", || other.try_lock_for("x", SECOND).unwrap_err());
    let asked = asked() - before;
    assert_eq!(error.holder().map(|holder| holder.id()), Some(guard.id().as_str()), "{error}");
    assert!(asked < 60, "asked {asked} times within a second");

    let waiting = in_thread(&other, "x", |mgr, name| mgr.try_lock_for(name, 30 * SECOND));
    eventually("it waits", CALL_LIMIT, || other.metrics().contended() == 2);
    guard.release().unwrap().unwrap_released();
    drop(waiting.join().unwrap().unwrap());
    assert_eq!(first.query::<Vec<String>>(&["LRANGE", &key("x"), "0", "-1"]), ["precious"]);
}
