//! `distlock bench`.

use serde_json::{Value, json};

use super::command::{at, at_url, distlock, json, run, start};
use crate::{
    kit::{BOUNDED, SECOND, within},
    support::{CEILING, Nodes, RedisServer, eventually},
};

const ROWS: [&str; 4] = ["round trip", "lock and release", "hand-over", "renewal"];

/// The rows of a run long enough for each of them to have been measured.
#[track_caller]
fn rows(url: &str) -> Value {
    let mut millis = 400;
    loop {
        let time = format!("{millis}ms");
        let (value, ended) = json(at_url(url, &["bench", "--json", "--time", &time]));
        assert_eq!(ended.with(0).err, "");
        let rows = value["rows"].as_array().unwrap();
        assert_eq!(rows.iter().map(|row| &row["what"]).collect::<Vec<_>>(), ROWS);
        if rows.iter().all(|row| row["count"].as_u64() > Some(0)) {
            return value;
        }
        millis *= 2;
        assert!(millis < 60_000, "not even in a minute: {value:#}");
    }
}

#[test]
fn everything_is_measured_and_nothing_is_left() {
    let server = RedisServer::start();
    let value = rows(&server.url());
    assert_eq!(value["servers"], json!([server.addr().to_string()]));
    for row in value["rows"].as_array().unwrap() {
        let (p50, p99) = (row["p50_us"].as_u64().unwrap(), row["p99_us"].as_u64().unwrap());
        assert!(p50 > 0 && p50 <= p99, "{row}");
        assert!(row["round_trips"].as_f64().unwrap() > 0.0, "{row}");
    }
    assert_eq!(value["rows"][0]["round_trips"], json!(1.0));
    assert!(value["rows"][1]["per_second"].as_f64().unwrap() > 0.0);
    assert_eq!(server.keys(), [""; 0]);

    let table = run(at(&server, &["bench", "--time", "200ms", "--prefix", "mine:"])).with(0).out;
    assert!(table.starts_with(&format!("at {}\n", server.addr())), "{table}");
    for row in ROWS {
        assert!(table.lines().any(|line| line.starts_with(row)), "{table}");
    }
    assert_eq!(server.keys(), [""; 0]);
}

#[test]
fn several_nodes_are_measured_together() {
    let nodes = Nodes::start(3);
    let value = rows(&nodes.urls());
    assert_eq!(value["servers"].as_array().unwrap().len(), 3);
    for node in 0..3 {
        let server = nodes.server(node);
        // A lock that a node heard of last may be given back there a little later.
        eventually("nothing is left", CEILING, || server.keys().is_empty());
    }
    let urls: Vec<String> = (0..3).map(|node| nodes.url(node)).collect();
    let args = ["bench", "--time", "100ms", "--timeout", "20s", &urls[0], &urls[1], &urls[2]];
    let table = run(distlock(&args)).with(0).out;
    assert!(table.contains("3 nodes; a round trip is over when 2 have answered"), "{table}");
}

#[test]
fn it_ends_when_the_server_stops_answering() {
    let server = RedisServer::start();
    for what in ["PING", "EVALSHA"] {
        let commands = server.monitor();
        let running = start({
            let mut command = distlock(&["bench", "--time", "4s", "--timeout", "2s"]);
            command.env("DISTLOCK_URL", server.url());
            command
        });
        commands.wait_for(&format!("\"{what}\""));
        server.stop();
        let ended = within(4 * SECOND + 3 * BOUNDED, "giving up", || running.wait()).with(69);
        assert!(ended.only_says("cannot measure").err.contains(&server.addr().to_string()));
        server.cont();
    }
}

#[test]
fn what_cannot_work_is_said_at_once() {
    let server = RedisServer::start();
    server.kill();
    let args = ["bench", "--timeout", "1s", &server.url()];
    within(BOUNDED, "giving up", || run(distlock(&args))).with(69).only_says(&server.addr().to_string());
    run(distlock(&["bench", "--time", "0"])).with(64).only_says("--time");
    run(distlock(&["bench", "--time", "1h"])).with(64).only_says("--time");
    run(distlock(&["bench", "redis://"])).with(64);
}
