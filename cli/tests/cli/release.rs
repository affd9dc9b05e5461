//! `distlock release`.

use distlock::LockLost;
use serde_json::json;

use super::command::{at, at_url, json, run, start};
use crate::{
    kit::{SECOND, UnwrapReleased, foreign_take, get, lease, lost, manager, waiter},
    support::{Fault, FaultProxy, Nodes, RedisServer, contains},
};

#[test]
fn whoever_holds_it_loses_it_and_is_named() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock_with("x", &lease(3 * SECOND)).unwrap();
    let ended = run(at(&server, &["release", "x", "--force"])).with(0);
    let who = format!("released lock \"x\", was held by {} (pid {}", guard.id().host(), guard.id().pid());
    assert!(ended.out.starts_with(&who) && ended.out.lines().count() == 1 && ended.err.is_empty(), "{ended:?}");
    assert_eq!(get(&server, "lock:x"), None);
    assert_eq!(lost(&guard), LockLost::Gone);
}

#[test]
fn the_next_in_line_gets_it_and_keeps_it() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock_with("x", &lease(3 * SECOND)).unwrap();
    let former = guard.id().to_string();
    let waiting = waiter(&server, &mgr, "x");
    let (value, ended) = json(at(&server, &["release", "x", "--if-id", &former, "--json"]));
    ended.with(0);
    assert_eq!((&value["name"], &value["released"], &value["held_by"]), (&json!("x"), &json!(true), &json!(null)));
    let was = &value["was_held_by"];
    assert_eq!((&was["id"], &was["pid"]), (&json!(former), &json!(guard.id().pid())));
    let next = waiting.join().unwrap().unwrap();
    assert!(matches!(lost(&guard), LockLost::Taken { by, .. } if by.id() == next.id().as_str()));
    // It has changed hands: the identifier of the former holder takes nothing away.
    let late = run(at(&server, &["release", "x", "--if-id", &former])).with(1).only_says("nothing was released");
    assert!(late.err.contains(&format!("is held by {}", next.id().host())), "{late:?}");
    let (value, ended) = json(at(&server, &["release", "x", "--if-id", &former, "--json"]));
    ended.with(1);
    assert_eq!((&value["released"], &value["was_held_by"]), (&json!(false), &json!(null)));
    assert_eq!(value["held_by"]["id"], json!(next.id().as_str()));
    assert!(next.is_held());
    next.release().unwrap().unwrap_released();
}

#[test]
fn a_lock_that_nobody_holds_is_a_no() {
    let server = RedisServer::start();
    for how in [&["--force"][..], &["--if-id", "anybody"]] {
        let args = [&["release", "x"], how].concat();
        run(at(&server, &args)).with(1).only_says("nobody holds lock \"x\"; nothing was released");
        let (value, ended) = json(at(&server, &[&args[..], &["--json"]].concat()));
        ended.with(1);
        assert_eq!(value, json!({ "name": "x", "released": false, "was_held_by": null, "held_by": null }));
    }
}

/// Between looking and releasing the holder lets go, and the next one takes it: that one keeps it.
#[test]
fn a_lock_that_changes_hands_in_between_is_left_alone() {
    let server = RedisServer::start();
    let proxy = FaultProxy::in_front_of(server.addr());
    assert!(foreign_take(&server, "lock:x", "holder-1", 600_000));
    // The release is the one request that names its holder.
    let held_back = proxy.on_request(contains("holder-1"), Fault::HoldRequest);
    let running = start(at_url(&proxy.url(), &["release", "x", "--force"]));
    held_back.wait_fired();
    server.cli(&["SET", "lock:x", "holder-2", "PX", "600000"]);
    held_back.let_go();
    let ended = running.wait().with(1).only_says("it changed hands just now");
    assert!(ended.err.contains("\"holder-2\""), "{ended:?}");
    assert_eq!(get(&server, "lock:x").as_deref(), Some("holder-2"));
}

#[test]
fn strangers_whatever_they_call_themselves() {
    let server = RedisServer::start();
    assert!(foreign_take(&server, "lock:x", "a stranger\n", 600_000));
    let ended = run(at(&server, &["release", "x", "--if-id", "a stranger\n"])).with(0);
    assert!(ended.out.contains("a client that calls itself \"a stranger\\n\""), "{ended:?}");
    let long = "i".repeat(600);
    assert!(foreign_take(&server, "lock:x", &long, 600_000));
    run(at(&server, &["release", "x", "--force"])).with(0);
    assert_eq!(get(&server, "lock:x"), None);
    let binary = "return redis.call('SET', 'lock:x', string.char(255, 1, 254, 0, 10), 'PX', 600000)";
    server.cli(&["EVAL", binary, "0"]);
    let ended = run(at(&server, &["release", "x", "--force"])).with(0);
    assert!(ended.out.contains("a client that calls itself \"\u{fffd}\\u{1}"), "{ended:?}");
    assert!(!server.query::<bool>(&["EXISTS", "lock:x"]));
}

#[test]
fn it_has_to_be_said_from_whom() {
    let server = RedisServer::start();
    assert!(foreign_take(&server, "lock:x", "a", 600_000));
    for args in [&["release", "x"][..], &["release", "--force"], &["release", "x", "--force", "--if-id", "a"]] {
        let ended = run(at(&server, args)).with(64);
        assert!(ended.err.contains("Usage"), "{ended:?}");
    }
    assert_eq!(get(&server, "lock:x").as_deref(), Some("a"));
}

#[test]
fn all_nodes_forget_it() {
    let nodes = Nodes::start(3);
    for node in 0..3 {
        assert!(foreign_take(nodes.server(node), "lock:x", "me", 600_000));
    }
    run(at_url(&nodes.urls(), &["release", "x", "--force"])).with(0);
    assert_eq!(nodes.values("lock:x"), [None, None, None]);
    assert!(foreign_take(nodes.server(1), "lock:x", "left over", 600_000));
    run(at_url(&nodes.urls(), &["release", "x", "--force"])).with(0);
    assert_eq!(nodes.values("lock:x"), [None, None, None]);
}
