//! `distlock doctor` for MySQL.

use serde_json::Value;

use super::{
    super::{command::distlock_at_url, command::run_for_json, command::run_to_end, json::Schema},
    SECRET, at, server_with_table,
};
use crate::support::MySqlServer;

/// Runs the doctor, and checks its exit code and the schema.
#[track_caller]
fn examine(url: &str, code: i32) -> Value {
    let (value, ended) = run_for_json(distlock_at_url(url, &["doctor", "--json"]));
    assert_eq!((ended.code, ended.err.as_str()), (Some(code), ""), "{value:#}");
    Schema::read().check("doctor", &value);
    value
}

/// Checks the level and a part of the message of a finding, and that it has advice if it needs
/// some.
#[track_caller]
fn says(report: &Value, check: &str, level: &str, part: &str) {
    let findings = report["findings"].as_array().unwrap();
    let finding = findings.iter().find(|finding| finding["check"] == check);
    let finding = finding.unwrap_or_else(|| panic!("nothing about {check}: {report:#}"));
    assert_eq!(finding["level"], level, "{finding:#}");
    assert!(finding["message"].as_str().unwrap().contains(part), "{part:?}: {finding:#}");
    if level == "problem" || level == "warning" {
        assert!(finding["advice"].is_string(), "{finding:#}");
    }
}

#[test]
fn fit_mysql_server_passes_all_checks() {
    let server = server_with_table();
    let report = examine(&server.url(), 0);
    assert_eq!((&report["problems"], &report["unknown"]), (&0.into(), &0.into()), "{report:#}");
    assert_eq!(report["servers"][0], server.addr().to_string());
    for (check, part) in [
        ("reach", "reachable"),
        ("version", "MariaDB 1"),
        ("proxy", "none"),
        ("cluster", "no members"),
        ("role", "accepts writes"),
        ("table", "exists"),
        ("connections", " of 151 connections in use"),
        ("durability", "innodb_flush_log_at_trx_commit is 1"),
        ("permissions", "PROCESS"),
        ("handover", "handed to the next waiter"),
    ] {
        says(&report, check, "ok", part);
    }
    // Its lock is released, and the next run uses the same row.
    examine(&server.url(), 0);
    let rows = "SELECT name FROM distlock";
    assert_eq!(server.execute(rows), [["distlock-doctor"]]);
    let page = run_to_end(at(&server, &["doctor"])).expect_code(0).out;
    assert!(page.lines().last().unwrap().starts_with("no problems, "), "{page}");
}

#[test]
fn unfit_mysql_table_is_a_problem() {
    let server = MySqlServer::start();
    let report = examine(&server.url(), 1);
    says(&report, "table", "problem", "is missing");
    says(&report, "handover", "unknown", "not tried");
    let findings = report["findings"].as_array().unwrap();
    let command = findings.iter().find_map(|finding| finding["commands"][0].as_str()).unwrap();
    server.execute(command);
    examine(&server.url(), 0);
    server.execute("ALTER TABLE distlock ENGINE=Aria ROW_FORMAT=DEFAULT");
    says(&examine(&server.url(), 1), "table", "problem", "only InnoDB locks rows");
    server.execute("DROP TABLE distlock; CREATE TABLE distlock (name TEXT, token INT)");
    says(&examine(&server.url(), 1), "table", "problem", "its column name is text");
}

#[test]
fn each_fault_of_mysql_set_up_is_found() {
    let server = server_with_table();
    let url = server.create_user("app", SECRET);
    says(&examine(&url, 0), "permissions", "warning", "do not see waiters of other users");
    says(&examine(&url.replace(SECRET, "wrong"), 1), "login", "problem", "1045");
    server.execute("SET GLOBAL innodb_flush_log_at_trx_commit=2, max_connections=10");
    let connections: Vec<_> = (0..8).map(|_| server.connect()).collect();
    let report = examine(&server.url(), 0);
    says(&report, "connections", "warning", " of 10 connections in use");
    says(&report, "durability", "ok", "releases do not wait for the disk");
    drop(connections);
    server.execute("CREATE USER reader@127.0.0.1; GRANT SELECT ON *.* TO reader@127.0.0.1");
    let reader = server.url().replace("root", "reader");
    says(&examine(&reader, 1), "handover", "problem", "1142");
    server.execute("SET GLOBAL read_only=1");
    let report = examine(&server.url(), 1);
    says(&report, "role", "problem", "read-only");
    says(&report, "handover", "unknown", "not tried");
    let with_tls = format!("{url}?ssl-mode=REQUIRED");
    says(&examine(&with_tls, 69), "reach", "problem", "TLS");
    server.kill();
    says(&examine(&url, 69), "reach", "problem", "Connection refused");
}
