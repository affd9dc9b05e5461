//! `distlock show`.

use serde_json::json;

use super::command::{distlock_at, distlock_at_url, run_for_json, run_to_end};
use crate::{
    helpers::{manager, queue_key, set_foreign_lock, spawn_queued_waiter},
    support::{Nodes, RedisServer},
};

#[test]
fn show_of_free_lock_exits_with_1() {
    let server = RedisServer::start();
    run_to_end(distlock_at(&server, &["show", "x"]))
        .expect_code(1)
        .expect_error("lock \"x\" is not held");
    let (value, ended) = run_for_json(distlock_at(&server, &["show", "x", "--json"]));
    assert_eq!(value, json!({ "version": 1, "lock": null }));
    ended.expect_code(1);
}

#[test]
fn show_prints_all_fields_and_queue_in_order() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock("x").unwrap();
    let waiting: Vec<_> = (0..3).map(|_| spawn_queued_waiter(&server, &mgr, "x")).collect();
    let queue: Vec<String> = server.query(&["LRANGE", &queue_key("x"), "0", "-1"]);
    let ids: Vec<&str> = queue.iter().map(|entry| entry.splitn(3, ' ').last().unwrap()).collect();

    let page = run_to_end(distlock_at(&server, &["show", "x"])).expect_code(0).out;
    let fact = |what: &str| {
        let line = page
            .lines()
            .find(|line| line.starts_with(what))
            .unwrap_or_else(|| panic!("no {what} in {page}"));
        line[what.len()..].trim().to_owned()
    };
    assert_eq!(fact("lock"), "x");
    assert_eq!(fact("holder"), format!("{}/{}", guard.id().host(), guard.id().pid()));
    assert_eq!(fact("thread"), guard.id().tid().to_string());
    assert_eq!(fact("id"), guard.id().as_str());
    assert_eq!(fact("token"), guard.fencing_token().to_string());
    assert_eq!(fact("waiting"), "3");
    assert!(
        fact("held").contains(", since 20") && fact("left").ends_with("unless renewed"),
        "{page}"
    );
    for (position, id) in ids.iter().enumerate() {
        let row = fact(&(position + 1).to_string());
        assert!(row.ends_with(id) && row.starts_with(guard.id().host()), "{row}");
    }

    let (value, ended) = run_for_json(distlock_at(&server, &["show", "--json", "x"]));
    let value = &value["lock"];
    assert_eq!(ended.expect_code(0).err, "");
    assert_eq!(
        (&value["name"], &value["holder"]["id"]),
        (&json!("x"), &json!(guard.id().as_str()))
    );
    assert_eq!((&value["waiters"], &value["waiting"]), (&json!(ids), &json!(3)));
    drop(guard);
    waiting.into_iter().for_each(|waiting| drop(waiting.join().unwrap().unwrap()));
}

#[test]
fn show_truncates_long_queue() {
    let server = RedisServer::start();
    assert!(set_foreign_lock(&server, "lock:x", "a stranger", 600_000));
    let fill = "for i = 1, 1500 do redis.call('RPUSH', KEYS[1], '1000 channel waiter-' .. i) end";
    server.cli(&["EVAL", fill, "1", &queue_key("x")]);
    let page = run_to_end(distlock_at(&server, &["show", "x"])).expect_code(0).out;
    assert!(page.contains("waiter-1000") && !page.contains("waiter-1001"));
    assert!(page.ends_with("and 500 more\n"), "{}", &page[page.len() - 60..]);
}

#[test]
fn show_prints_reply_of_each_node() {
    let nodes = Nodes::start(3);
    assert!(set_foreign_lock(nodes.server(0), "lock:x", "one", 600_000));
    assert!(set_foreign_lock(nodes.server(1), "lock:x", "two", 600_000));
    nodes.kill(2);
    let page = run_to_end(distlock_at_url(&nodes.urls(), &["show", "x"])).expect_code(0).out;
    assert!(page.contains("not certain"), "{page}");
    for (node, says) in [(0, "calls itself \"one\""), (1, "calls itself \"two\""), (2, "refused")] {
        let address = format!("127.0.0.1:{}", nodes.server(node).port());
        let is_shown = page.lines().any(|line| line.starts_with(&address) && line.contains(says));
        assert!(is_shown, "{address} {says:?}: {page}");
    }
}

#[test]
fn show_reports_key_of_another_type() {
    let server = RedisServer::start();
    server.cli(&["RPUSH", "lock:x", "precious"]);
    run_to_end(distlock_at(&server, &["show", "x"])).expect_code(69).expect_error("not a lock");
    run_to_end(distlock_at(&server, &["show", ""]))
        .expect_code(64)
        .expect_error("invalid lock name");
}
