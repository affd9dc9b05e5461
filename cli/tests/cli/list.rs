//! `distlock ls`.

use serde_json::json;

use super::command::{distlock, distlock_at, distlock_at_url, run_for_json, run_to_end};
use crate::{
    helpers::{manager, queue_key, set_foreign_lock, spawn_queued_waiter},
    support::{Nodes, RedisServer, TEST_TIMEOUT, eventually},
};

#[test]
fn ls_without_locks_prints_message_or_empty_json() {
    let server = RedisServer::start();
    run_to_end(distlock_at(&server, &["ls"])).expect_code(0).expect_error("no locks are held");
    run_to_end(distlock_at(&server, &["ls", "a*"]))
        .expect_code(0)
        .expect_error("no held lock matches \"a*\"");
    run_to_end(distlock_at(&server, &["ls", "redis://other"])).expect_code(0).expect_error(
        "no held lock matches \"redis://other\", which is a pattern; name a server with --url",
    );
    let (value, ended) = run_for_json(distlock_at(&server, &["ls", "--json"]));
    assert_eq!(value, json!({ "version": 1, "locks": [] }));
    assert_eq!(ended.expect_code(0).err, "");
}

#[test]
fn pattern_that_cannot_match_is_an_error() {
    for (pattern, why) in [("[", "no closing ]"), ("a[]", "empty set"), ("", "is empty")] {
        let ended = run_to_end(distlock(&["ls", pattern])).expect_code(64);
        assert!(ended.err.contains("no name can match the pattern: "), "{ended:?}");
        assert!(ended.err.contains(why) && ended.out.is_empty(), "{ended:?}");
    }
}

/// The server's rules for patterns are those by which this command refuses some.
#[test]
fn accepted_patterns_match_on_the_server() {
    let server = RedisServer::start();
    for name in ["[", "]", "-", "x"] {
        assert!(set_foreign_lock(&server, &format!("lock:{name}"), "a stranger", 600_000));
    }
    for (pattern, name) in
        [("\\[", "["), ("[[]", "["), ("[\\]]", "]"), ("[a-]]", "]"), ("[^a-z[-]]", "-")]
    {
        let ended = run_to_end(distlock_at(&server, &["ls", pattern])).expect_code(0);
        let names: Vec<&str> =
            ended.out.lines().skip(1).filter_map(|line| line.split(' ').next()).collect();
        assert!(names.contains(&name), "{pattern} matches {names:?}");
    }
}

#[test]
fn ls_prints_table_sorted_by_name() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guards = ["b", "a:2", "a:10"].map(|name| mgr.lock(name).unwrap());
    let waiting =
        [spawn_queued_waiter(&server, &mgr, "b"), spawn_queued_waiter(&server, &mgr, "b")];
    assert!(set_foreign_lock(&server, "lock:foreign", &"x".repeat(100), 600_000));
    server.cli(&["SET", "lock:forever", "an operator"]);
    let table = run_to_end(distlock_at(&server, &["ls"])).expect_code(0);
    assert_eq!(table.err, "");
    let rows: Vec<Vec<&str>> =
        table.out.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0], ["NAME", "KIND", "HOLDER", "HELD", "LEFT", "WAITING", "TOKEN"]);
    let names: Vec<&str> = rows[1..].iter().map(|row| row[0]).collect();
    assert_eq!(names, ["a:10", "a:2", "b", "foreign", "forever"]);
    let own = format!("{}/{}", guards[0].id().host(), std::process::id());
    assert_eq!((rows[3][1], rows[3][2], rows[3][5]), ("alone", &*own, "2"));
    assert_eq!(rows[3][6], guards[0].fencing_token().to_string());
    assert!(rows[3][4].ends_with('s'), "{rows:?}");
    assert_eq!((rows[4][2], rows[4][3], rows[4][6]), (&*("x".repeat(40) + "…"), "-", "-"));
    assert!(
        table
            .out
            .lines()
            .nth(5)
            .is_some_and(|line| line.contains("an operator") && line.contains("no expiry"))
    );
    let some = run_to_end(distlock_at(&server, &["ls", "a:?"])).expect_code(0).out;
    assert!(some.contains("a:2") && !some.contains("a:10") && !some.contains('b'), "{some}");
    drop(guards);
    waiting.into_iter().for_each(|waiting| drop(waiting.join().unwrap().unwrap()));
}

#[test]
fn ls_json_has_all_fields() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    assert!(set_foreign_lock(&server, "lock:foreign", "a stranger\u{1b}[31m", 600_000));
    let (value, ended) = run_for_json(distlock_at(&server, &["ls", "--json"]));
    assert!(!ended.expect_code(0).out.contains('\u{1b}'));
    let foreign = &value["locks"][0];
    assert_eq!(
        (&foreign["name"], &foreign["holder"]["id"]),
        (&json!("foreign"), &json!("a stranger\u{1b}[31m"))
    );
    for field in ["host", "pid", "tid", "since"] {
        assert_eq!(foreign["holder"].get(field), Some(&json!(null)), "{field}");
    }
    assert_eq!(
        (foreign.get("token"), foreign.get("held_ms")),
        (Some(&json!(null)), Some(&json!(null)))
    );
    let own = &value["locks"][1];
    let id = guard.id();
    assert_eq!(own["holder"]["id"], json!(id.as_str()));
    assert_eq!(
        (&own["holder"]["pid"], &own["holder"]["tid"]),
        (&json!(id.pid()), &json!(id.tid()))
    );
    assert_eq!(own["token"], json!(guard.fencing_token().as_u64()));
    assert_eq!(
        (&own["waiting"], &own["certain"], &own["nodes"]),
        (&json!(1), &json!(true), &json!([]))
    );
    let queue: Vec<String> = server.query(&["LRANGE", &queue_key("x"), "0", "-1"]);
    assert!(queue[0].ends_with(own["waiters"][0].as_str().unwrap()));
    assert!(own["remaining_ms"].as_u64().is_some_and(|left| left > 0 && left <= 30_000), "{own}");
    assert!(own["held_ms"].is_u64());
    let since = own["holder"]["since"].as_str().unwrap();
    assert!(humantime::parse_rfc3339(since).is_ok(), "{since}");
    drop(guard);
    drop(waiting.join().unwrap().unwrap());
}

/// Fault: N107
#[test]
fn ls_escapes_names_and_ids() {
    let server = RedisServer::start();
    assert!(set_foreign_lock(
        &server,
        "lock:red\u{1b}[31m\nx\u{202e}\u{61c}",
        "id\u{9b}2J\r",
        600_000
    ));
    let table = run_to_end(distlock_at(&server, &["ls"])).expect_code(0).out;
    assert_eq!(table.lines().count(), 2);
    assert!(
        table
            .chars()
            .all(|c| c == '\n' || !(c.is_control() || ['\u{61c}', '\u{202e}'].contains(&c))),
        "{table:?}"
    );
    assert!(table.contains("red\\u{1b}[31m\\nx\\u{202e}\\u{61c}"), "{table}");
    let (value, ended) = run_for_json(distlock_at(&server, &["ls", "--json"]));
    assert!(
        ended
            .out
            .chars()
            .all(|c| c == '\n' || !(c.is_control() || ['\u{61c}', '\u{202e}'].contains(&c))),
        "{}",
        ended.out
    );
    assert_eq!(value["locks"][0]["name"], json!("red\u{1b}[31m\nx\u{202e}\u{61c}"));
}

#[test]
fn ls_shows_replies_of_nodes_and_uncertain_holders() {
    let nodes = Nodes::start(3);
    for node in 0..3 {
        assert!(set_foreign_lock(nodes.server(node), "lock:all", "everywhere", 600_000));
    }
    assert!(set_foreign_lock(nodes.server(1), "lock:one", "somewhere", 600_000));
    let (value, _) = run_for_json(distlock_at_url(&nodes.urls(), &["ls", "--json"]));
    assert_eq!(
        (&value["locks"][0]["name"], &value["locks"][0]["certain"]),
        (&json!("all"), &json!(true))
    );
    assert_eq!(
        (&value["locks"][1]["name"], &value["locks"][1]["certain"]),
        (&json!("one"), &json!(false))
    );
    let replies = value["locks"][1]["nodes"].as_array().unwrap();
    assert_eq!(replies.len(), 3);
    assert!(replies[0]["server"].as_str().unwrap().ends_with(&nodes.server(0).port().to_string()));
    assert_eq!((&replies[0]["vote"], &replies[0]["message"]), (&json!("yes"), &json!("free")));
    let table = run_to_end(distlock_at_url(&nodes.urls(), &["ls"])).expect_code(0).out;
    assert!(
        table.lines().nth(2).is_some_and(|line| line.contains("somewhere (not certain)")),
        "{table}"
    );
    nodes.kill(0);
    assert_eq!(
        run_to_end(distlock_at_url(&nodes.urls(), &["ls", "one"]))
            .expect_code(0)
            .out
            .lines()
            .count(),
        2
    );
    nodes.kill(1);
    let failed = run_to_end(distlock_at_url(&nodes.urls(), &["ls"])).expect_code(69);
    assert!(failed.err.contains("2 of 3 nodes"), "{failed:?}");
}

/// A request blocks the server while it runs, so none may be about all locks at once.
#[test]
fn ls_reads_many_locks_in_small_requests() {
    const LOCKS: usize = 5_000;
    let server = RedisServer::start();
    let fill = "for i = 1, ARGV[1] do redis.call('SET', 'lock:n' .. i, 'x', 'PX', 600000) end";
    server.cli(&["EVAL", fill, "0", &LOCKS.to_string()]);
    let commands = server.monitor();
    let table = run_to_end(distlock_at(&server, &["ls", "n*"])).expect_code(0).out;
    assert_eq!(table.lines().count(), 1 + LOCKS);
    server.cli(&["PING", "the end"]);
    commands.wait_for("the end");
    let (mut scans, mut locks) = (0, 0);
    for line in commands.lines().iter().filter(|line| !line.contains(" lua]")) {
        let words: Vec<&str> =
            line.split(" \"").skip(1).map(|word| word.trim_end_matches('"')).collect();
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
            ["INFO" | "TIME" | "PING" | "ECHO", ..] => {}
            other => panic!("it sends {other:?}"),
        }
    }
    assert!(scans >= LOCKS / 1_000, "{scans} scans");
    assert!(locks >= LOCKS, "asked about {locks} locks");
}

#[test]
fn closed_pipe_is_not_an_error() {
    let server = RedisServer::start();
    let fill = "for i = 1, 5000 do redis.call('SET', 'lock:n' .. i, 'x', 'PX', 600000) end";
    server.cli(&["EVAL", fill, "0"]);
    for args in [&["ls"][..], &["ls", "--json"], &["man"], &["completions", "bash"], &["--help"]] {
        let mut command = distlock_at(&server, args);
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut child =
            command.stdout(writer).stderr(std::process::Stdio::piped()).spawn().unwrap();
        drop(command);
        let mut status = None;
        eventually("the command ends", TEST_TIMEOUT, || {
            status = child.try_wait().unwrap();
            status.is_some()
        });
        let stderr = child.wait_with_output().unwrap().stderr;
        assert_eq!(
            (status.and_then(|status| status.code()), String::from_utf8_lossy(&stderr).as_ref()),
            (Some(0), "")
        );
    }
}
