//! `distlock bench`.

use serde_json::{Value, json};

use super::command::{distlock, distlock_at, distlock_at_url, run_for_json, run_to_end, start};
use crate::{
    helpers::{CALL_LIMIT, FENCE, SECOND, completes_within},
    support::{Nodes, RedisServer, TEST_TIMEOUT, eventually},
};

const ROWS: [&str; 4] = ["round trip", "lock and release", "hand-over", "renewal"];

/// The rows of a run that is long enough for at least one sample of each.
#[track_caller]
fn rows(url: &str) -> Value {
    let mut millis = 400;
    loop {
        let time = format!("{millis}ms");
        let (value, ended) =
            run_for_json(distlock_at_url(url, &["bench", "--json", "--time", &time]));
        assert_eq!(ended.expect_code(0).err, "");
        let rows = value["rows"].as_array().unwrap();
        assert_eq!(rows.iter().map(|row| &row["name"]).collect::<Vec<_>>(), ROWS);
        if rows.iter().all(|row| row["samples"].as_u64() > Some(0)) {
            return value;
        }
        millis *= 2;
        assert!(millis < 60_000, "not even in a minute: {value:#}");
    }
}

#[test]
fn bench_measures_all_rows_and_leaves_no_keys() {
    let server = RedisServer::start();
    let value = rows(&server.url());
    assert_eq!(value["servers"], json!([server.addr().to_string()]));
    for row in value["rows"].as_array().unwrap() {
        let (p50, p99) = (row["p50_us"].as_u64().unwrap(), row["p99_us"].as_u64().unwrap());
        assert!(p50 > 0 && p50 <= p99, "{row}");
        assert!(row["latency_ratio"].as_f64().unwrap() > 0.0, "{row}");
    }
    assert_eq!(value["rows"][0]["latency_ratio"], json!(1.0));
    assert!(value["rows"][1]["per_second"].as_f64().unwrap() > 0.0);
    assert_eq!(server.keys(), [FENCE]);

    let table =
        run_to_end(distlock_at(&server, &["bench", "--time", "200ms", "--prefix", "mine:"]))
            .expect_code(0)
            .out;
    assert!(table.starts_with(&format!("at {}\n", server.addr())), "{table}");
    assert!(!table.contains("ROUND TRIP") && table.contains("LATENCY RATIO is"), "{table}");
    for row in ROWS {
        assert!(table.lines().any(|line| line.starts_with(row)), "{table}");
    }
    assert_eq!(server.keys(), [FENCE]);
}

#[test]
fn bench_measures_several_nodes_together() {
    let nodes = Nodes::start(3);
    let value = rows(&nodes.urls());
    assert_eq!(value["servers"].as_array().unwrap().len(), 3);
    for node in 0..3 {
        let server = nodes.server(node);
        // The node that was asked last may receive its release a little later.
        eventually("only the fence is left", TEST_TIMEOUT, || server.keys() == [FENCE]);
    }
    let urls: Vec<String> = (0..3).map(|node| nodes.url(node)).collect();
    let args = ["bench", "--time", "100ms", "--timeout", "20s", &urls[0], &urls[1], &urls[2]];
    let table = run_to_end(distlock(&args)).expect_code(0).out;
    assert!(table.contains("3 nodes; a round trip takes until 2 have replied"), "{table}");
}

#[test]
fn bench_ends_if_server_stops_replying() {
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
        let ended = completes_within(4 * SECOND + 3 * CALL_LIMIT, "the failure", || running.wait())
            .expect_code(69);
        assert!(ended.expect_error("cannot measure").err.contains(&server.addr().to_string()));
        server.cont();
    }
}

#[test]
fn bench_reports_invalid_input_at_once() {
    let server = RedisServer::start();
    server.kill();
    let args = ["bench", "--timeout", "1s", &server.url()];
    completes_within(CALL_LIMIT, "the failure", || run_to_end(distlock(&args)))
        .expect_code(69)
        .expect_error(&server.addr().to_string());
    run_to_end(distlock(&["bench", "--time", "0"])).expect_code(64).expect_error("--time");
    run_to_end(distlock(&["bench", "--time", "1h"])).expect_code(64).expect_error("--time");
    run_to_end(distlock(&["bench", "redis://"])).expect_code(64);
}
