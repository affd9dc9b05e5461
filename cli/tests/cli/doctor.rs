//! `distlock doctor`: one real server for each finding.

mod commands;
mod sentinel;

use std::{process::Command, time::Duration};

use distlock::{Config, RedisMgr};
use serde_json::Value;
use tempfile::TempDir;

use super::command::{Finished, distlock, distlock_at, distlock_at_url, run_for_json, run_to_end};
use crate::{
    helpers::{CALL_LIMIT, FENCE, completes_within},
    permissions::{
        HAND_OVER_PERMISSIONS, INSPECT_PERMISSIONS, LOCK_PERMISSIONS, NODE_PERMISSIONS,
        SETTINGS_PERMISSION, SHARED_PERMISSIONS,
    },
    support::{
        Fault, FaultProxy, Nodes, RedisServer, TEST_TIMEOUT, command, eventually, eventually_some,
        garbage_server, silent_server,
    },
};

/// The report of one run.
pub(super) struct Report {
    value: Value,
    ended: Finished,
}

#[track_caller]
pub(super) fn report(command: Command) -> Report {
    let (value, ended) = run_for_json(command);
    Report { value, ended }
}

#[track_caller]
fn examine(server: &RedisServer) -> Report {
    report(distlock_at(server, &["doctor", "--json"]))
}

impl Report {
    #[track_caller]
    fn finding(&self, check: &str) -> &Value {
        let findings = self.value["findings"].as_array().unwrap();
        let found = findings.iter().find(|finding| finding["check"] == check);
        found.unwrap_or_else(|| panic!("nothing about {check}: {:#}", self.value))
    }

    /// Checks the level and a part of the text of a finding, and that it has advice if it needs
    /// some.
    #[track_caller]
    pub(super) fn says(&self, check: &str, level: &str, part: &str) -> &Report {
        let finding = self.finding(check);
        assert_eq!(finding["level"], level, "{finding:#}");
        assert!(
            finding["message"].as_str().unwrap().contains(part),
            "{part:?} is not in {finding:#}"
        );
        if level != "unknown" {
            let needs_advice = matches!(level, "warning" | "problem");
            assert_eq!(finding["advice"].is_string(), needs_advice, "{finding:#}");
        }
        self
    }

    #[track_caller]
    pub(super) fn lacks(&self, check: &str) -> &Report {
        let mut findings = self.value["findings"].as_array().unwrap().iter();
        assert!(findings.all(|finding| finding["check"] != check), "{:#}", self.value);
        self
    }

    pub(super) fn servers(&self) -> usize {
        self.value["servers"].as_array().unwrap().len()
    }

    /// Checks a part of the advice, or of a command that follows it.
    #[track_caller]
    fn advises(&self, check: &str, part: &str) -> &Report {
        let advice = self.finding(check)["advice"].as_str().unwrap_or_default().to_owned();
        let lines = [self.commands(check), vec![advice]].concat();
        assert!(lines.iter().any(|line| line.contains(part)), "{part:?} is not in {lines:?}");
        self
    }

    #[track_caller]
    fn commands(&self, check: &str) -> Vec<String> {
        let commands = self.finding(check)["commands"].as_array().unwrap().iter();
        commands.map(|command| command.as_str().unwrap().to_owned()).collect()
    }

    /// Checks that the hand-over succeeded, however slow the machine.
    #[track_caller]
    fn hands_over(&self) -> &Report {
        let says = self.finding("handover")["message"].as_str().unwrap();
        assert!(says.contains("handed to the next waiter"), "{says}");
        self
    }

    /// Checks that these are all the problems.
    #[track_caller]
    fn problems(&self, checks: &[&str]) -> &Report {
        let findings = self.value["findings"].as_array().unwrap();
        let bad = findings.iter().filter(|finding| finding["level"] == "problem");
        let bad: Vec<&str> = bad.map(|finding| finding["check"].as_str().unwrap()).collect();
        assert_eq!(bad, checks, "{:#}", self.value);
        assert_eq!(self.value["problems"], checks.len());
        let code = if checks.is_empty() { 0 } else { 1 };
        assert_eq!((self.ended.code, self.ended.err.as_str()), (Some(code), ""));
        self
    }
}

#[test]
fn healthy_server_passes_and_stays_unchanged() {
    let server = RedisServer::builder().durable().start();
    // On a busy machine, round trips are slow, which is a warning.
    let ended = eventually_some("all checks pass", TEST_TIMEOUT, || {
        let ended = run_to_end(distlock_at(&server, &["doctor"])).expect_code(0);
        ended.out.ends_with("\nno problems, no warnings\n").then_some(ended)
    });
    assert_eq!(ended.err, "");
    assert!(!ended.out.contains("->") && !ended.out.contains("unknown"), "{ended:?}");
    let report = eventually_some("round trips are fast", TEST_TIMEOUT, || {
        let report = examine(&server);
        (report.finding("latency")["level"] == "ok").then_some(report)
    });
    report.problems(&[]).hands_over();
    for check in [
        "reach",
        "permissions",
        "version",
        "kind",
        "replicas",
        "eviction",
        "persistence",
        "timeout",
        "latency",
        "clock",
    ] {
        assert_eq!(report.finding(check)["level"], "ok");
        assert_eq!(report.finding(check)["server"], server.addr().to_string());
    }
    assert_eq!(report.finding("handover")["server"], Value::Null);
    assert_eq!(server.keys(), [FENCE], "of the lock that is handed over");
    assert_eq!(server.query::<Vec<String>>(&["PUBSUB", "CHANNELS"]), [""; 0]);
    assert_eq!(server.query::<Vec<redis::Value>>(&["ACL", "LOG"]).len(), 0);
}

#[test]
fn prefix_that_begins_ours_is_a_warning() {
    let server = RedisServer::start();
    let other = RedisMgr::new(Config::new(server.url()).prefix("app:")).unwrap();
    let _guard = other.try_lock("job").unwrap();
    let at = |prefix| report(distlock_at(&server, &["doctor", "--json", "--prefix", prefix]));
    at("app:lock:").says("prefix", "warning", "\"app:job\" seems to have \"app:\"").problems(&[]);
    for prefix in ["app:", "other:lock:"] {
        let report = at(prefix);
        let findings = report.value["findings"].as_array().unwrap();
        assert!(findings.iter().all(|finding| finding["check"] != "prefix"), "{prefix}");
    }
}

/// Settings of the server; and the check, level, text and advice of the finding.
type Case =
    (&'static [&'static [&'static str]], &'static str, &'static str, &'static str, &'static str);

#[test]
fn unfit_settings_are_reported_with_advice() {
    const CASES: &[Case] = &[
        (&[], "persistence", "warning", "a restart loses all locks", "appendonly yes"),
        (
            &[&["appendonly", "yes"]],
            "persistence",
            "warning",
            "last second or two",
            "appendfsync always",
        ),
        (
            &[&["appendonly", "yes"], &["appendfsync", "no"]],
            "persistence",
            "warning",
            "30 seconds",
            "appendfsync always",
        ),
        (
            &[&["maxmemory-policy", "allkeys-lru"]],
            "eviction",
            "warning",
            "allkeys-lru",
            "noeviction",
        ),
        (
            &[&["maxmemory-policy", "volatile-ttl"]],
            "eviction",
            "warning",
            "volatile-ttl",
            "noeviction",
        ),
        (
            &[&["maxmemory-policy", "allkeys-lru"], &["maxmemory", "1gb"]],
            "eviction",
            "problem",
            "held locks are evicted",
            "noeviction",
        ),
        (
            &[&["maxmemory-policy", "volatile-lru"], &["maxmemory", "1gb"]],
            "eviction",
            "problem",
            "held locks are evicted",
            "noeviction",
        ),
        (&[&["timeout", "2"]], "timeout", "warning", "idle for 2s", "CONFIG SET timeout 0"),
    ];
    for (settings, check, level, says, advice) in CASES {
        let server = RedisServer::start();
        for setting in *settings {
            server.config_set(setting[0], setting[1]);
        }
        let report = examine(&server);
        report.says(check, level, says).advises(check, advice);
        let problems: Vec<&str> = [*check].into_iter().filter(|_| *level == "problem").collect();
        report.problems(&problems);
    }
}

#[test]
fn memory_shortage_is_reported() {
    let server = RedisServer::start();
    let used = |server: &RedisServer| {
        let info: String = server.query(&["INFO", "memory"]);
        let field = info.lines().find_map(|line| line.strip_prefix("used_memory:")).unwrap();
        field.trim().parse::<u64>().unwrap()
    };
    server.config_set("maxmemory", &(used(&server) * 1000 / 945).to_string());
    examine(&server).says("memory", "warning", "% of maxmemory in use");
    server.config_set("maxmemory", "1");
    let report = examine(&server);
    report.says("memory", "problem", "% of maxmemory").says("handover", "problem", "OOM");
    report.problems(&["memory", "handover"]);
}

#[test]
fn replica_and_its_master_are_reported() {
    let (master, replica) = (RedisServer::start(), RedisServer::start());
    replica.cli(&["REPLICAOF", "127.0.0.1", &master.port().to_string()]);
    eventually("the replica is connected", TEST_TIMEOUT, || {
        let info: String = master.query(&["INFO", "replication"]);
        info.contains("state=online")
    });
    let report = examine(&replica);
    report.says("role", "problem", "a replica of 127.0.0.1").advises("role", "master");
    report.says("kind", "ok", "neither Sentinel nor cluster");
    assert!(!report.ended.out.contains("alone"), "a replica has a master");
    report.says("handover", "problem", "READONLY").problems(&["role", "handover"]);
    let report = examine(&master);
    report
        .says("replicas", "warning", "1 connected")
        .advises("replicas", "Config::replicas")
        .says("cut-off", "warning", "goes on granting locks")
        .problems(&[]);
    let command = &report.finding("cut-off")["commands"][0];
    assert_eq!(command, "CONFIG SET min-replicas-to-write 1");
    master.cli(&command.as_str().unwrap().split(' ').collect::<Vec<_>>());
    examine(&master).says("cut-off", "ok", "grants no locks").problems(&[]);
}

#[test]
fn cluster_mode_and_sentinel_are_problems() {
    let server = RedisServer::builder().arg("--cluster-enabled").arg("yes").start();
    let report = examine(&server);
    report.says("kind", "problem", "a node of a Redis Cluster").advises("kind", "redis+cluster://");
    report.problems(&["kind", "handover"]);
    let sentinel = garbage_server("-ERR unknown command `TIME`, with args beginning with: \r\n");
    let report = report_at(&sentinel.url());
    report
        .says("kind", "problem", "unknown command")
        .advises("kind", "redis+sentinel://")
        .problems(&["kind"]);
}

#[track_caller]
fn report_at(url: &str) -> Report {
    report(distlock_at_url(url, &["doctor", "--json"]))
}

fn acl_user(server: &RedisServer, permissions: &[&str]) -> String {
    let words =
        ["ACL", "SETUSER", "app", "reset", "on", ">pw", "resetkeys", "resetchannels", "-@all"];
    server.cli(&[&words, permissions].concat());
    format!("redis://app:pw@{}", server.addr())
}

fn all_but(missing: &str) -> Vec<&'static str> {
    let is_known = |_: &&str| RedisServer::has_sharded_channels();
    LOCK_PERMISSIONS
        .into_iter()
        .chain(HAND_OVER_PERMISSIONS.into_iter().filter(is_known))
        .chain(INSPECT_PERMISSIONS)
        .chain(NODE_PERMISSIONS)
        .chain(SHARED_PERMISSIONS)
        .filter(|right| *right != missing)
        .collect()
}

/// Servers before Redis 7 do not know these commands.
#[test]
fn permissions_for_cheaper_hand_overs_are_named() {
    let server = RedisServer::start();
    let permissions = [
        &LOCK_PERMISSIONS[..],
        &INSPECT_PERMISSIONS,
        &SHARED_PERMISSIONS,
        &NODE_PERMISSIONS,
        &[SETTINGS_PERMISSION],
    ];
    let report = report_at(&acl_user(&server, &permissions.concat()));
    let says = match RedisServer::has_sharded_channels() {
        true => "; hand-overs cost the server less with +spublish +ssubscribe",
        false => "all permissions that locks need",
    };
    report.says("permissions", "ok", says).problems(&[]);
}

#[test]
fn denied_queries_are_unknown_not_problems() {
    let server = RedisServer::start();
    let permissions = [&LOCK_PERMISSIONS[..], &INSPECT_PERMISSIONS, &SHARED_PERMISSIONS].concat();
    let report = report_at(&acl_user(&server, &permissions));
    report.says("info", "unknown", "+info is missing").says(
        "timeout",
        "unknown",
        "+config|get is missing",
    );
    report.says("permissions", "ok", "all").problems(&[]).hands_over();
    assert_eq!(report.value["unknown"], 2);
    let url = acl_user(&server, &permissions);
    let text = run_to_end(distlock_at_url(&url, &["doctor"])).expect_code(0).out;
    let last = text.lines().last().unwrap();
    assert!(last.starts_with("no problems, "), "{text}");
    assert!(last.ends_with("; 2 checks could not be made"), "{text}");
    server.config_set("appendonly", "yes");
    let report = report_at(&acl_user(&server, &all_but("")));
    report.says("persistence", "unknown", "+config|get is missing").problems(&[]);
    let nodes = Nodes::start(3);
    let urls: Vec<String> =
        (0..3).map(|node| acl_user(nodes.server(node), &all_but("+info"))).collect();
    let report = report_at(&urls.join(","));
    report.says("permissions", "problem", "+info").problems(&[
        "permissions",
        "permissions",
        "permissions",
        "handover",
    ]);
}

/// If the user may not publish, or a proxy drops messages, the waiter must poll.
///
/// Fault: N126
#[test]
fn handover_without_grant_message_is_a_warning() {
    let server = RedisServer::start();
    let mut permissions = all_but("+publish");
    permissions.retain(|permission| *permission != "+spublish");
    let report = report_at(&acl_user(&server, &permissions));
    report
        .says("handover", "warning", "without a grant message")
        .advises("handover", "+publish")
        .problems(&["permissions"]);
}

#[test]
fn refused_login_is_reported_with_reason() {
    let server = RedisServer::builder().password("hunter2hunter2").start();
    let bare = format!("redis://{}", server.addr());
    let report = report_at(&bare);
    report
        .says("login", "problem", "NOAUTH")
        .advises("login", "--password-file")
        .problems(&["login"]);
    let wrong = report_at(&format!("redis://:tr0ub4dor@{}", server.addr()));
    wrong
        .says("login", "problem", "WRONGPASS")
        .advises("login", "check the user")
        .problems(&["login"]);
    assert!(!wrong.ended.out.contains("tr0ub4dor"));
    let folder = TempDir::with_prefix("distlock-").unwrap();
    let file = folder.path().join("password");
    std::fs::write(&file, "hunter2hunter2\n").unwrap();
    let ended = run_to_end(distlock(&[
        "doctor",
        &bare,
        "--timeout",
        "20s",
        "--password-file",
        file.to_str().unwrap(),
    ]))
    .expect_code(0);
    assert!(!ended.out.contains("hunter2"));
}

/// A hostile server may reply anything, including the password it received.
///
/// Fault: N52
#[test]
fn doctor_cuts_and_redacts_server_texts() {
    const SECRET: &str = "hunter2hunter2";
    let server = RedisServer::builder().password(SECRET).start();
    server.config_set("appendonly", "yes");
    let folder = TempDir::with_prefix("distlock-").unwrap();
    let file = folder.path().join("password");
    std::fs::write(&file, SECRET).unwrap();
    let noise = format!("{SECRET} \x1b[31m\u{202e}{}{SECRET}", "é".repeat(100_000));
    let [refusal, code] = [format!("-ERR {noise}\r\n"), format!("-{SECRET} {noise}\r\n")];
    let info = |fields: &str| {
        let fields = fields.replace("NOISE", &noise);
        format!("${}\r\n{fields}\r\n", fields.len())
    };
    for (asked, spared, reply, check) in [
        ("INFO", 2, refusal.clone(), "info"),
        ("INFO", 2, code.clone(), "info"),
        ("CONFIG", 0, refusal.clone(), "persistence"),
        // The first TIME and two INFO belong to connecting.
        ("TIME", 1, refusal, "reach"),
        ("TIME", 1, code, "reach"),
        ("INFO", 2, info("redis_version:NOISE"), "version"),
        ("INFO", 2, info("redis_version:7.0.NOISE"), "version"),
        ("INFO", 2, info("redis_version:5.0.NOISE"), "version"),
        ("INFO", 2, info("valkey_version:NOISE"), "version"),
        ("INFO", 2, info("role:slave\r\nmaster_host:NOISE"), "role"),
        ("INFO", 2, info("maxmemory_policy:NOISE"), "eviction"),
        ("INFO", 2, info("maxmemory_policy:NOISE\r\nmaxmemory:1"), "eviction"),
    ] {
        let of_environment = |url: String| {
            distlock_at_url(&url.replace("://", &format!("://:{SECRET}@")), &["doctor"])
        };
        let of_file = |url: String| {
            distlock_at_url(&url, &["doctor", "--password-file", file.to_str().unwrap()])
        };
        for json in [false, true] {
            for from in [&of_environment as &dyn Fn(String) -> Command, &of_file] {
                let proxy = FaultProxy::in_front_of(server.addr());
                let hostile = proxy
                    .on_request(command(asked), Fault::ReplaceReply(reply.clone().into_bytes()));
                let hostile = hostile.after(spared).forever();
                let mut command = from(proxy.url());
                if json {
                    command.arg("--json");
                }
                let Finished { out, err, .. } = run_to_end(command);
                let head: String = out.chars().take(2_000).collect();
                assert!(hostile.fired() > 0 && out.contains(check), "{asked} {check}: {head}");
                assert!(
                    out.contains("<password> \\"),
                    "{asked} {check}: the text is missing: {head}"
                );
                assert!(!out.contains(SECRET) && !err.contains(SECRET), "{asked} {check}: {head}");
                assert!(out.len() < 10_000 && err.is_empty(), "{} bytes: {head}", out.len());
                let plain = |c: char| c == '\n' || (!c.is_control() && c != '\u{202e}');
                assert!(out.chars().all(plain), "{head:?}");
            }
        }
    }
}

#[test]
fn doctor_names_unreachable_server_without_waiting() {
    let server = RedisServer::start();
    server.kill();
    let silent = silent_server();
    for (url, why) in [(server.url(), "refused"), (silent.url(), "no reply in time")] {
        let mut command = distlock(&["doctor", &url, "--json"]);
        command.args(["--timeout", "300ms"]);
        let report = completes_within(CALL_LIMIT, "the failure", || report(command));
        report.says("reach", "problem", why);
        assert_eq!((report.ended.code, &report.value["problems"]), (Some(69), &Value::from(1)));
    }
}

/// The other checks do not wait for it.
#[test]
fn server_that_stops_during_check_is_reported() {
    let server = RedisServer::start();
    let proxy = FaultProxy::in_front_of(server.addr());
    let held = proxy.on_request(command("INFO"), Fault::DropReply);
    // Two belong to connecting.
    let held = held.after(2).forever();
    let mut command = distlock(&["doctor", &proxy.url(), "--json"]);
    command.args(["--timeout", "2s"]);
    let report = completes_within(CALL_LIMIT, "the failure", || report(command));
    assert_eq!(held.fired(), 1);
    report.says("reach", "problem", "timed out");
    assert_eq!(report.ended.code, Some(69));
}

#[test]
fn doctor_reports_each_node_and_all_together() {
    let nodes = Nodes::start(3).long_running();
    let report = report_at(&nodes.urls());
    report
        .says("nodes", "ok", "survive the loss of 1")
        .says("hosts", "warning", "127.0.0.1")
        .says("clocks", "ok", "differ");
    report.says("persistence", "ok", "does not vote").problems(&[]).hands_over();
    assert_eq!(report.value["servers"].as_array().unwrap().len(), 3);
    for node in 0..3 {
        assert_eq!(nodes.server(node).keys(), [FENCE]);
    }
    nodes.kill(1);
    let ended = run_to_end(distlock_at_url(&nodes.urls(), &["doctor"])).expect_code(1);
    assert!(
        ended.out.contains("PROBLEM  reach") && ended.out.contains("handed to the next"),
        "{ended:?}"
    );
    let away = "warning  nodes        1 of 3 nodes is unreachable: none of the others may fail\n";
    assert!(ended.out.contains(away), "{ended:?}");
    nodes.kill(0);
    let report = report_at(&nodes.urls());
    report
        .says("nodes", "problem", "2 of 3 nodes are unreachable")
        .says("handover", "unknown", "too few");
    report.problems(&["reach", "reach", "nodes"]);
}

/// Real clients are refused then.
#[test]
fn nodes_in_quarantine_are_reported() {
    let nodes = Nodes::start(3);
    let at = |quarantine: &'static str| {
        let mut command = distlock_at_url(&nodes.urls(), &["doctor", "--json"]);
        command.env("DISTLOCK_QUARANTINE", quarantine);
        report(command)
    };
    let says = "0 of 3 nodes vote; a quorum votes again in 2";
    let report = at("24h");
    report.says("nodes", "problem", says).advises("nodes", "distlock init").problems(&["nodes"]);
    let handover = report.finding("handover")["message"].as_str().unwrap();
    assert!(handover.ends_with("; this test ignores the quarantine"), "{handover}");
    let report = at("0");
    report.says("nodes", "ok", "survive the loss of 1").problems(&[]);
    let handover = report.finding("handover")["message"].as_str().unwrap();
    assert!(!handover.contains("quarantine"), "{handover}");
}

#[test]
fn duplicate_server_is_a_problem_and_even_number_a_warning() {
    let server = RedisServer::start();
    let other = format!("redis://localhost:{}", server.port());
    let report = report(distlock(&["doctor", "--timeout", "20s", "--json", &server.url(), &other]));
    report.says("duplicates", "problem", "same server").says(
        "nodes",
        "warning",
        "2 nodes survive the loss of 0",
    );
    report.problems(&["duplicates", "handover"]);
    let twice = format!("{},{}", server.url(), server.url());
    report_at(&twice).says("duplicates", "problem", "same server");
}

#[test]
fn slow_round_trip_is_judged_by_ttl() {
    let server = RedisServer::start();
    let proxy = FaultProxy::in_front_of(server.addr());
    let slow =
        proxy.on_request(command("TIME"), Fault::DelayReply(Duration::from_millis(40))).forever();
    let report = report(distlock_at_url(&proxy.url(), &["doctor", "--json", "--ttl", "60ms"]));
    report.says("latency", "problem", "locks expire").advises("latency", "use a ttl of");
    assert!(slow.fired() > 1);
}

#[test]
fn doctor_exits_with_64_on_invalid_arguments() {
    run_to_end(distlock(&["doctor", "--ttl", "1ms"])).expect_code(64).expect_error("--ttl");
    run_to_end(distlock(&["doctor", "--ttl", "25h"])).expect_code(64).expect_error("--ttl");
    run_to_end(distlock(&["doctor", "nonsense"])).expect_code(64).expect_error("not a server URL");
}
