//! `distlock init`.

use super::command::{Finished, distlock_at, distlock_at_url, run_to_end};
use crate::support::{Nodes, RedisServer};

/// With a quarantine that outlasts any test.
fn at(nodes: &Nodes, args: &[&str]) -> Finished {
    let mut command = distlock_at_url(&nodes.urls(), args);
    command.env("DISTLOCK_QUARANTINE", "24h");
    run_to_end(command)
}

const RUN: [&str; 5] = ["run", "--no-wait", "x", "--", "true"];

/// Fault: N144
#[test]
fn fresh_nodes_vote_at_once_after_init() {
    let nodes = Nodes::start(3);
    let ended = at(&nodes, &["init"]).expect_code(0);
    assert!(
        ended.out.starts_with("the 3 nodes are declared new") && ended.err.is_empty(),
        "{ended:?}"
    );
    let doctor = at(&nodes, &["doctor"]);
    assert_eq!(doctor.out.matches("it was declared new, and votes already").count(), 3);
    at(&nodes, &RUN).expect_code(0);
    nodes.restart_empty(0);
    nodes.restart_empty(1);
    at(&nodes, &RUN).expect_code(69).expect_error("votes again in 23h");
}

#[test]
fn quarantine_names_init_and_the_setting_for_tests() {
    let nodes = Nodes::start(3);
    let remedy = "if no node has ever been used, run distlock init; for tests, set --quarantine 0";
    at(&nodes, &RUN).expect_code(69).expect_error(remedy);
    let doctor = at(&nodes, &["doctor"]);
    let advice = doctor.out.matches("run distlock init").count();
    assert_eq!(advice, 4, "of each node and of all together: {doctor:?}");
    at(&nodes, &["init"]).expect_code(64).expect_error("for the longest ttl, add --yes");
    at(&nodes, &RUN).expect_code(69);
    at(&nodes, &["init", "--yes"]).expect_code(0);
    at(&nodes, &["run", "--no-wait", "y", "--", "true"]).expect_code(0);
}

#[test]
fn single_server_needs_no_init() {
    let server = RedisServer::start();
    let ended = run_to_end(distlock_at(&server, &["init"])).expect_code(0);
    assert!(ended.out.starts_with("a single server needs no declaration"), "{ended:?}");
    assert!(server.keys().is_empty());
}

#[test]
fn init_refuses_bad_input() {
    let nodes = Nodes::start(3);
    at(&nodes, &["init", "redis://u:secret@h,redis://h2"]).expect_code(64);
    at(&nodes, &["init", "nonsense"]).expect_code(64);
    nodes.kill(2);
    at(&nodes, &["init"]).expect_code(69).expect_error("could not connect");
    assert!(nodes.server(0).keys().is_empty());
}
