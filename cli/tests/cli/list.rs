//! `distlock ls`.

use serde_json::json;

use super::command::{at, at_url, json, run};
use crate::{
    kit::{foreign_take, manager, queue_key, waiter},
    support::{CEILING, Nodes, RedisServer, eventually},
};

#[test]
fn nothing_held_is_a_sentence_for_people_and_an_empty_list_for_programs() {
    let server = RedisServer::start();
    run(at(&server, &["ls"])).with(0).only_says("no lock is held");
    run(at(&server, &["ls", "a*"])).with(0).only_says("no lock that matches \"a*\" is held");
    let (value, ended) = json(at(&server, &["ls", "--json"]));
    assert_eq!(value, json!([]));
    assert_eq!(ended.with(0).err, "");
}

#[test]
fn people_read_a_table_sorted_by_name() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guards = ["b", "a:2", "a:10"].map(|name| mgr.lock(name).unwrap());
    let waiting = [waiter(&server, &mgr, "b"), waiter(&server, &mgr, "b")];
    assert!(foreign_take(&server, "lock:foreign", &"x".repeat(100), 600_000));
    server.cli(&["SET", "lock:forever", "an operator"]);
    let table = run(at(&server, &["ls"])).with(0);
    assert_eq!(table.err, "");
    let rows: Vec<Vec<&str>> = table.out.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0], ["NAME", "HOLDER", "HELD", "LEFT", "WAITING", "TOKEN"]);
    let names: Vec<&str> = rows[1..].iter().map(|row| row[0]).collect();
    assert_eq!(names, ["a:10", "a:2", "b", "foreign", "forever"]);
    let us = format!("{}/{}", guards[0].id().host(), std::process::id());
    assert_eq!((rows[3][1], rows[3][4]), (&*us, "2"));
    assert_eq!(rows[3][5], guards[0].fencing_token().to_string());
    assert!(rows[3][3].ends_with('s'), "{rows:?}");
    assert_eq!((rows[4][1], rows[4][2], rows[4][5]), (&*("x".repeat(40) + "…"), "-", "-"));
    assert!(table.out.lines().nth(5).is_some_and(|line| line.contains("an operator") && line.contains("no expiry")));
    let some = run(at(&server, &["ls", "a:?"])).with(0).out;
    assert!(some.contains("a:2") && !some.contains("a:10") && !some.contains('b'), "{some}");
    drop(guards);
    waiting.into_iter().for_each(|waiting| drop(waiting.join().unwrap().unwrap()));
}

#[test]
fn programs_read_all_of_it() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock("x").unwrap();
    let waiting = waiter(&server, &mgr, "x");
    assert!(foreign_take(&server, "lock:foreign", "a stranger\u{1b}[31m", 600_000));
    let (value, ended) = json(at(&server, &["ls", "--json"]));
    assert!(!ended.with(0).out.contains('\u{1b}'));
    let foreign = &value[0];
    assert_eq!((&foreign["name"], &foreign["holder"]["id"]), (&json!("foreign"), &json!("a stranger\u{1b}[31m")));
    for field in ["host", "pid", "tid", "since"] {
        assert_eq!(foreign["holder"].get(field), Some(&json!(null)), "{field}");
    }
    assert_eq!((foreign.get("token"), foreign.get("held_ms")), (Some(&json!(null)), Some(&json!(null))));
    let ours = &value[1];
    let id = guard.id();
    assert_eq!(ours["holder"]["id"], json!(id.as_str()));
    assert_eq!((&ours["holder"]["pid"], &ours["holder"]["tid"]), (&json!(id.pid()), &json!(id.tid())));
    assert_eq!(ours["token"], json!(guard.fencing_token().as_u64()));
    assert_eq!((&ours["waiting"], &ours["certain"], ours.get("nodes")), (&json!(1), &json!(true), None));
    let line: Vec<String> = server.query(&["LRANGE", &queue_key("x"), "0", "-1"]);
    assert!(line[0].ends_with(ours["waiters"][0].as_str().unwrap()));
    assert!(ours["ttl_ms"].as_u64().is_some_and(|left| left > 0 && left <= 30_000), "{ours}");
    assert!(ours["held_ms"].is_u64());
    let since = ours["holder"]["since"].as_str().unwrap();
    assert!(humantime::parse_rfc3339(since).is_ok(), "{since}");
    drop(guard);
    drop(waiting.join().unwrap().unwrap());
}

/// An operator's terminal does not obey whoever chose a name.
#[test]
fn names_and_identifiers_of_others_do_nothing_to_a_terminal() {
    let server = RedisServer::start();
    assert!(foreign_take(&server, "lock:red\u{1b}[31m\nx\u{202e}\u{61c}", "id\u{9b}2J\r", 600_000));
    let table = run(at(&server, &["ls"])).with(0).out;
    assert_eq!(table.lines().count(), 2);
    assert!(table.chars().all(|c| c == '\n' || !(c.is_control() || ['\u{61c}', '\u{202e}'].contains(&c))), "{table:?}");
    assert!(table.contains("red\\u{1b}[31m\\nx\\u{202e}\\u{61c}"), "{table}");
    let (value, ended) = json(at(&server, &["ls", "--json"]));
    assert!(
        ended.out.chars().all(|c| c == '\n' || !(c.is_control() || ['\u{61c}', '\u{202e}'].contains(&c))),
        "{}",
        ended.out
    );
    assert_eq!(value[0]["name"], json!("red\u{1b}[31m\nx\u{202e}\u{61c}"));
}

#[test]
fn of_several_nodes_it_is_told_what_each_said_and_what_is_not_certain() {
    let nodes = Nodes::start(3);
    for node in 0..3 {
        assert!(foreign_take(nodes.server(node), "lock:all", "everywhere", 600_000));
    }
    assert!(foreign_take(nodes.server(1), "lock:one", "somewhere", 600_000));
    let (value, _) = json(at_url(&nodes.urls(), &["ls", "--json"]));
    assert_eq!((&value[0]["name"], &value[0]["certain"]), (&json!("all"), &json!(true)));
    assert_eq!((&value[1]["name"], &value[1]["certain"]), (&json!("one"), &json!(false)));
    let said = value[1]["nodes"].as_array().unwrap();
    assert_eq!(said.len(), 3);
    assert!(said[0]["node"].as_str().unwrap().ends_with(&nodes.server(0).port().to_string()));
    assert_eq!((&said[0]["vote"], &said[0]["says"]), (&json!("yes"), &json!("free")));
    let table = run(at_url(&nodes.urls(), &["ls"])).with(0).out;
    assert!(table.lines().nth(2).is_some_and(|line| line.contains("somewhere (not certain)")), "{table}");
    nodes.kill(0);
    assert_eq!(run(at_url(&nodes.urls(), &["ls", "one"])).with(0).out.lines().count(), 2);
    nodes.kill(1);
    let away = run(at_url(&nodes.urls(), &["ls"])).with(69);
    assert!(away.err.contains("2 of 3 nodes"), "{away:?}");
}

/// Each command keeps the server from all else while it runs, so none may be about all locks at once.
#[test]
fn many_locks_are_listed_in_small_steps() {
    const LOCKS: usize = 5_000;
    let server = RedisServer::start();
    let fill = "for i = 1, ARGV[1] do redis.call('SET', 'lock:n' .. i, 'x', 'PX', 600000) end";
    server.cli(&["EVAL", fill, "0", &LOCKS.to_string()]);
    let commands = server.monitor();
    let table = run(at(&server, &["ls", "n*"])).with(0).out;
    assert_eq!(table.lines().count(), 1 + LOCKS);
    server.cli(&["PING", "the end"]);
    commands.wait_for("the end");
    let (mut scans, mut locks) = (0, 0);
    for line in commands.lines().iter().filter(|line| !line.contains(" lua]")) {
        let words: Vec<&str> = line.split(" \"").skip(1).map(|word| word.trim_end_matches('"')).collect();
        match words.as_slice() {
            ["SCAN", _, "MATCH", _, "COUNT", count, "TYPE", "string"] => {
                assert!(count.parse::<usize>().unwrap() <= 1_000, "{line}");
                scans += 1;
            }
            ["EVALSHA" | "EVAL", _, keys, ..] => {
                let keys: usize = keys.parse().unwrap();
                assert!(keys <= 3 * 200, "{keys} keys at once");
                locks += keys / 3;
            }
            ["TIME" | "PING" | "ECHO", ..] => {}
            other => panic!("it sends {other:?}"),
        }
    }
    assert!(scans >= LOCKS / 1_000, "{scans} scans");
    assert!(locks >= LOCKS, "asked about {locks} locks");
}

#[test]
fn a_reader_who_leaves_early_is_no_error() {
    let server = RedisServer::start();
    let fill = "for i = 1, 5000 do redis.call('SET', 'lock:n' .. i, 'x', 'PX', 600000) end";
    server.cli(&["EVAL", fill, "0"]);
    for args in [&["ls"][..], &["ls", "--json"], &["man"], &["completions", "bash"], &["--help"]] {
        let mut command = at(&server, args);
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut child = command.stdout(writer).stderr(std::process::Stdio::piped()).spawn().unwrap();
        drop(command);
        let mut status = None;
        eventually("it ends", CEILING, || {
            status = child.try_wait().unwrap();
            status.is_some()
        });
        let said = child.wait_with_output().unwrap().stderr;
        assert_eq!((status.and_then(|status| status.code()), String::from_utf8_lossy(&said).as_ref()), (Some(0), ""));
    }
}
