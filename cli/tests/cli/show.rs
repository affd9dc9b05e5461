//! `distlock show`.

use serde_json::json;

use super::command::{at, at_url, json, run};
use crate::{
    kit::{foreign_take, manager, queue_key, waiter},
    support::{Nodes, RedisServer},
};

#[test]
fn a_lock_that_nobody_holds_is_a_no() {
    let server = RedisServer::start();
    run(at(&server, &["show", "x"])).with(1).only_says("nobody holds lock \"x\"");
    let (value, ended) = json(at(&server, &["show", "x", "--json"]));
    assert_eq!(value, json!(null));
    ended.with(1);
}

#[test]
fn everything_about_a_lock_is_told_with_its_line_in_order() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock("x").unwrap();
    let waiting: Vec<_> = (0..3).map(|_| waiter(&server, &mgr, "x")).collect();
    let line: Vec<String> = server.query(&["LRANGE", &queue_key("x"), "0", "-1"]);
    let ids: Vec<&str> = line.iter().map(|entry| entry.splitn(3, ' ').last().unwrap()).collect();

    let page = run(at(&server, &["show", "x"])).with(0).out;
    let fact = |what: &str| {
        let line = page.lines().find(|line| line.starts_with(what)).unwrap_or_else(|| panic!("no {what} in {page}"));
        line[what.len()..].trim().to_owned()
    };
    assert_eq!(fact("lock"), "x");
    assert_eq!(fact("holder"), format!("{}/{}", guard.id().host(), guard.id().pid()));
    assert_eq!(fact("thread"), guard.id().tid().to_string());
    assert_eq!(fact("id"), guard.id().as_str());
    assert_eq!(fact("token"), guard.fencing_token().to_string());
    assert_eq!(fact("waiting"), "3");
    assert!(fact("held").contains(", since 20") && fact("left").ends_with("unless renewed"), "{page}");
    for (place, id) in ids.iter().enumerate() {
        let row = fact(&(place + 1).to_string());
        assert!(row.ends_with(id) && row.starts_with(guard.id().host()), "{row}");
    }

    let (value, ended) = json(at(&server, &["show", "--json", "x"]));
    assert_eq!(ended.with(0).err, "");
    assert_eq!((&value["name"], &value["holder"]["id"]), (&json!("x"), &json!(guard.id().as_str())));
    assert_eq!((&value["waiters"], &value["waiting"]), (&json!(ids), &json!(3)));
    drop(guard);
    waiting.into_iter().for_each(|waiting| drop(waiting.join().unwrap().unwrap()));
}

#[test]
fn a_long_line_is_cut_and_counted() {
    let server = RedisServer::start();
    assert!(foreign_take(&server, "lock:x", "a stranger", 600_000));
    let fill = "for i = 1, 1500 do redis.call('RPUSH', KEYS[1], '1000 channel waiter-' .. i) end";
    server.cli(&["EVAL", fill, "1", &queue_key("x")]);
    let page = run(at(&server, &["show", "x"])).with(0).out;
    assert!(page.contains("waiter-1000") && !page.contains("waiter-1001"));
    assert!(page.ends_with("and 500 more\n"), "{}", &page[page.len() - 60..]);
}

#[test]
fn what_each_node_says_is_told() {
    let nodes = Nodes::start(3);
    assert!(foreign_take(nodes.server(0), "lock:x", "one", 600_000));
    assert!(foreign_take(nodes.server(1), "lock:x", "two", 600_000));
    nodes.kill(2);
    let page = run(at_url(&nodes.urls(), &["show", "x"])).with(0).out;
    assert!(page.contains("not certain"), "{page}");
    for (node, says) in [(0, "calls itself \"one\""), (1, "calls itself \"two\""), (2, "refused")] {
        let address = format!("127.0.0.1:{}", nodes.server(node).port());
        let told = page.lines().any(|line| line.starts_with(&address) && line.contains(says));
        assert!(told, "{address} {says:?}: {page}");
    }
}

#[test]
fn something_else_under_the_name_is_said() {
    let server = RedisServer::start();
    server.cli(&["RPUSH", "lock:x", "precious"]);
    run(at(&server, &["show", "x"])).with(69).only_says("holds something else than a lock");
    run(at(&server, &["show", ""])).with(64).only_says("not a lock name");
}
