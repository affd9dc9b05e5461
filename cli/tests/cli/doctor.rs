//! `distlock doctor`: one real server for each finding.

use std::{process::Command, time::Duration};

use serde_json::Value;
use tempfile::TempDir;

use super::command::{Ended, at, at_url, distlock, json, run};
use crate::{
    kit::{BOUNDED, within},
    rights::{LOCKS, LOOKING, NODES},
    support::{
        CEILING, Fault, FaultProxy, Nodes, RedisServer, command, eventually, eventually_some, garbage_server,
        silent_server,
    },
};

/// What it found, by check, of one server or of all together.
struct Report {
    value: Value,
    ended: Ended,
}

#[track_caller]
fn report(command: Command) -> Report {
    let (value, ended) = json(command);
    Report { value, ended }
}

#[track_caller]
fn examine(server: &RedisServer) -> Report {
    report(at(server, &["doctor", "--json"]))
}

impl Report {
    #[track_caller]
    fn finding(&self, check: &str) -> &Value {
        let findings = self.value["findings"].as_array().unwrap();
        let found = findings.iter().find(|finding| finding["check"] == check);
        found.unwrap_or_else(|| panic!("nothing about {check}: {:#}", self.value))
    }

    /// It must say this about that, at this level; and what to do, if it is not good.
    #[track_caller]
    fn says(&self, check: &str, level: &str, part: &str) -> &Report {
        let finding = self.finding(check);
        assert_eq!(finding["level"], level, "{finding:#}");
        assert!(finding["says"].as_str().unwrap().contains(part), "{part:?} is not in {finding:#}");
        let needs_advice = matches!(level, "warning" | "problem");
        assert_eq!(finding["advice"].is_string(), needs_advice, "{finding:#}");
        self
    }

    #[track_caller]
    fn advises(&self, check: &str, part: &str) -> &Report {
        let advice = &self.finding(check)["advice"];
        assert!(advice.as_str().is_some_and(|advice| advice.contains(part)), "{part:?} is not in {advice}");
        self
    }

    /// The trial went through, however slow the machine.
    #[track_caller]
    fn hands_over(&self) -> &Report {
        let says = self.finding("handover")["says"].as_str().unwrap();
        assert!(says.contains("handed to the next in line"), "{says}");
        self
    }

    /// These are all the problems that there are.
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
fn a_server_that_has_all_it_needs_is_well_and_is_left_as_it_was() {
    let server = RedisServer::builder().durable().start();
    // On a machine that is busy just now the way to the server is slow, which is a warning.
    let ended = eventually_some("it is well", CEILING, || {
        let ended = run(at(&server, &["doctor"])).with(0);
        ended.out.ends_with("\nno problem, no warning\n").then_some(ended)
    });
    assert_eq!(ended.err, "");
    assert!(!ended.out.contains("->") && !ended.out.contains("unknown"), "{ended:?}");
    let report = eventually_some("the way is fast", CEILING, || {
        let report = examine(&server);
        (report.finding("latency")["level"] == "ok").then_some(report)
    });
    report.problems(&[]).hands_over();
    for check in
        ["reach", "rights", "version", "kind", "replicas", "eviction", "persistence", "timeout", "latency", "clock"]
    {
        assert_eq!(report.finding(check)["level"], "ok");
        assert_eq!(report.finding(check)["server"], server.addr().to_string());
    }
    assert_eq!(report.finding("handover")["server"], Value::Null);
    assert_eq!(server.keys(), [""; 0]);
    assert_eq!(server.query::<Vec<String>>(&["PUBSUB", "CHANNELS"]), [""; 0]);
    assert_eq!(server.query::<Vec<redis::Value>>(&["ACL", "LOG"]).len(), 0);
}

/// What the server is told after its start, and what is then found.
type Case = (&'static [&'static [&'static str]], &'static str, &'static str, &'static str, &'static str);

#[test]
fn settings_are_found_and_what_to_do_is_said() {
    const CASES: &[Case] = &[
        (&[], "persistence", "warning", "a restart forgets all locks", "appendonly yes"),
        (&[&["appendonly", "yes"]], "persistence", "warning", "last second or two", "appendfsync always"),
        (
            &[&["appendonly", "yes"], &["appendfsync", "no"]],
            "persistence",
            "warning",
            "half minute",
            "appendfsync always",
        ),
        (&[&["maxmemory-policy", "allkeys-lru"]], "eviction", "warning", "allkeys-lru", "noeviction"),
        (&[&["maxmemory-policy", "volatile-ttl"]], "eviction", "warning", "volatile-ttl", "noeviction"),
        (
            &[&["maxmemory-policy", "allkeys-lru"], &["maxmemory", "1gb"]],
            "eviction",
            "problem",
            "while they are held",
            "noeviction",
        ),
        (
            &[&["maxmemory-policy", "volatile-lru"], &["maxmemory", "1gb"]],
            "eviction",
            "problem",
            "while they are held",
            "noeviction",
        ),
        (&[&["timeout", "2"]], "timeout", "warning", "idle for 2 s", "CONFIG SET timeout 0"),
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
fn memory_that_runs_out_is_told_before_and_when_it_has() {
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
fn replicas_are_told_on_both_sides() {
    let (master, replica) = (RedisServer::start(), RedisServer::start());
    replica.cli(&["REPLICAOF", "127.0.0.1", &master.port().to_string()]);
    eventually("it is connected", CEILING, || {
        let info: String = master.query(&["INFO", "replication"]);
        info.contains("state=online")
    });
    let report = examine(&replica);
    report.says("role", "problem", "is a replica of 127.0.0.1").advises("role", "master");
    report.says("handover", "problem", "READONLY").problems(&["role", "handover"]);
    let report = examine(&master);
    report.says("replicas", "warning", "1 connected").advises("replicas", "fencing tokens").problems(&[]);
}

#[test]
fn cluster_mode_and_what_looks_like_a_sentinel_are_problems() {
    let server = RedisServer::builder().arg("--cluster-enabled").arg("yes").start();
    let report = examine(&server);
    report.says("kind", "problem", "cluster mode").advises("kind", "stands alone");
    report.problems(&["kind", "handover"]);
    let sentinel = garbage_server("-ERR unknown command `TIME`, with args beginning with: \r\n");
    let report = report_at(&sentinel.url());
    report.says("kind", "problem", "unknown command").advises("kind", "Sentinel").problems(&["kind"]);
}

#[track_caller]
fn report_at(url: &str) -> Report {
    report(at_url(url, &["doctor", "--json"]))
}

fn acl_user(server: &RedisServer, rights: &[&str]) -> String {
    let words = ["ACL", "SETUSER", "app", "reset", "on", ">pw", "resetkeys", "resetchannels", "-@all"];
    server.cli(&[&words, rights].concat());
    format!("redis://app:pw@{}", server.addr())
}

fn all_but(missing: &str) -> Vec<&'static str> {
    LOCKS.into_iter().chain(LOOKING).chain(NODES).filter(|right| *right != missing).collect()
}

#[test]
fn each_missing_right_is_named_with_the_line_that_grants_it() {
    let server = RedisServer::start();
    let report = report_at(&acl_user(&server, &all_but("")));
    report.says("rights", "ok", "all").problems(&[]);
    for missing in LOCKS {
        let report = report_at(&acl_user(&server, &all_but(missing)));
        report.says("rights", "problem", missing).advises("rights", missing);
        let says = report.finding("rights")["says"].as_str().unwrap();
        for right in LOCKS.iter().chain(&LOOKING).filter(|right| **right != missing) {
            assert!(!says.split([' ', ',']).any(|word| word == *right), "{missing}: also {right}: {says}");
        }
        assert_eq!(report.ended.code, Some(1));
    }
    for missing in LOOKING {
        let report = report_at(&acl_user(&server, &all_but(missing)));
        report.says("rights", "warning", missing).advises("rights", missing).problems(&[]);
    }
    eventually("nothing is left", CEILING, || server.keys().is_empty());
}

#[test]
fn several_missing_rights_are_all_named_at_once() {
    let server = RedisServer::start();
    let rights: Vec<&str> =
        all_but("").into_iter().filter(|right| !["+lpos", "+pttl", "+set"].contains(right)).collect();
    let report = report_at(&acl_user(&server, &rights));
    report.says("rights", "problem", "+set +pttl +lpos").advises("rights", "+rpush and +lpush could not be tried");
    let bare = report_at(&acl_user(&server, &["+time", "~*", "&*"]));
    for right in
        LOCKS.into_iter().filter(|right| right.starts_with('+') && !["+time", "+rpush", "+lpush"].contains(right))
    {
        bare.advises("rights", right);
    }
    assert_eq!(server.keys(), [""; 0]);
}

#[test]
fn the_prefix_is_in_the_right_that_is_missing() {
    let server = RedisServer::start();
    let url = acl_user(&server, &all_but(""));
    let report = report(at_url(&url, &["doctor", "--json", "--prefix", "mine:"]));
    report.says("rights", "problem", "~mine:*").advises("rights", "~mine:*");
}

#[test]
fn what_may_not_be_asked_cannot_be_told_and_is_no_failure() {
    let server = RedisServer::start();
    let report = report_at(&acl_user(&server, &[&LOCKS[..], &LOOKING].concat()));
    report.says("info", "unknown", "needs +info").says("timeout", "unknown", "needs +config|get");
    report.says("rights", "ok", "all").problems(&[]).hands_over();
    server.config_set("appendonly", "yes");
    let report = report_at(&acl_user(&server, &all_but("+config|get")));
    report.says("persistence", "unknown", "needs +config|get").problems(&[]);
    let nodes = Nodes::start(3);
    let urls: Vec<String> = (0..3).map(|node| acl_user(nodes.server(node), &all_but("+info"))).collect();
    let report = report_at(&urls.join(","));
    report.says("rights", "problem", "+info").problems(&["rights", "rights", "rights", "handover"]);
}

/// A user who may not hear messages, or a proxy that does not pass them: the next in line finds out by looking.
#[test]
fn waiters_that_are_not_told_are_noticed() {
    let server = RedisServer::start();
    let report = report_at(&acl_user(&server, &all_but("+publish")));
    report.says("handover", "warning", "nobody told it").advises("handover", "+publish").problems(&["rights"]);
}

#[test]
fn who_is_not_let_in_is_told_why() {
    let server = RedisServer::builder().password("hunter2hunter2").start();
    let bare = format!("redis://{}", server.addr());
    let report = report_at(&bare);
    report.says("login", "problem", "NOAUTH").advises("login", "--password-file").problems(&["login"]);
    let wrong = report_at(&format!("redis://:tr0ub4dor@{}", server.addr()));
    wrong.says("login", "problem", "WRONGPASS").advises("login", "check the user").problems(&["login"]);
    assert!(!wrong.ended.out.contains("tr0ub4dor"));
    let folder = TempDir::with_prefix("distlock-").unwrap();
    let file = folder.path().join("password");
    std::fs::write(&file, "hunter2hunter2\n").unwrap();
    let ended =
        run(distlock(&["doctor", &bare, "--timeout", "20s", "--password-file", file.to_str().unwrap()])).with(0);
    assert!(!ended.out.contains("hunter2"));
}

/// A server may say anything of itself, also what it was told to let us in.
#[test]
fn what_a_server_says_is_told_cut_and_without_the_password() {
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
        ("INFO", 0, refusal.clone(), "info"),
        ("INFO", 0, code.clone(), "info"),
        ("CONFIG", 0, refusal.clone(), "persistence"),
        // The first one belongs to connecting.
        ("TIME", 1, refusal, "reach"),
        ("TIME", 1, code, "reach"),
        ("INFO", 0, info("redis_version:NOISE"), "version"),
        ("INFO", 0, info("redis_version:7.0.NOISE"), "version"),
        ("INFO", 0, info("redis_version:5.0.NOISE"), "version"),
        ("INFO", 0, info("valkey_version:NOISE"), "version"),
        ("INFO", 0, info("role:slave\r\nmaster_host:NOISE"), "role"),
        ("INFO", 0, info("maxmemory_policy:NOISE"), "eviction"),
        ("INFO", 0, info("maxmemory_policy:NOISE\r\nmaxmemory:1"), "eviction"),
    ] {
        let of_environment = |url: String| at_url(&url.replace("://", &format!("://:{SECRET}@")), &["doctor"]);
        let of_file = |url: String| at_url(&url, &["doctor", "--password-file", file.to_str().unwrap()]);
        for json in [false, true] {
            for from in [&of_environment as &dyn Fn(String) -> Command, &of_file] {
                let proxy = FaultProxy::in_front_of(server.addr());
                let hostile = proxy.on_request(command(asked), Fault::ReplaceReply(reply.clone().into_bytes()));
                let hostile = hostile.after(spared).forever();
                let mut command = from(proxy.url());
                if json {
                    command.arg("--json");
                }
                let Ended { out, err, .. } = run(command);
                let head: String = out.chars().take(2_000).collect();
                assert!(hostile.fired() > 0 && out.contains(check), "{asked} {check}: {head}");
                assert!(out.contains("<password> \\"), "{asked} {check}: it is not told: {head}");
                assert!(!out.contains(SECRET) && !err.contains(SECRET), "{asked} {check}: {head}");
                assert!(out.len() < 10_000 && err.is_empty(), "{} bytes: {head}", out.len());
                let plain = |c: char| c == '\n' || (!c.is_control() && c != '\u{202e}');
                assert!(out.chars().all(plain), "{head:?}");
            }
        }
    }
}

#[test]
fn a_server_that_is_away_is_named_and_not_waited_for() {
    let server = RedisServer::start();
    server.kill();
    let silent = silent_server();
    for (url, why) in [(server.url(), "refused"), (silent.url(), "no answer in time")] {
        let mut command = distlock(&["doctor", &url, "--json"]);
        command.args(["--timeout", "300ms"]);
        let report = within(BOUNDED, "giving up", || report(command));
        report.says("reach", "problem", why);
        assert_eq!((report.ended.code, &report.value["problems"]), (Some(69), &Value::from(1)));
    }
}

/// One that goes away while it is looked at does not hold up the rest.
#[test]
fn a_server_that_stops_in_the_middle_is_told() {
    let server = RedisServer::start();
    let proxy = FaultProxy::in_front_of(server.addr());
    let held = proxy.on_request(command("INFO"), Fault::DropReply).forever();
    let mut command = distlock(&["doctor", &proxy.url(), "--json"]);
    command.args(["--timeout", "2s"]);
    let report = within(BOUNDED, "giving up", || report(command));
    assert_eq!(held.fired(), 1);
    report.says("reach", "problem", "timed out");
    assert_eq!(report.ended.code, Some(69));
}

#[test]
fn of_several_nodes_each_is_told_and_all_together() {
    let nodes = Nodes::start(3);
    let report = report_at(&nodes.urls());
    report.says("nodes", "ok", "1 may be away").says("hosts", "warning", "127.0.0.1").says("clocks", "ok", "apart");
    report.says("persistence", "ok", "does not vote").problems(&[]).hands_over();
    assert_eq!(report.value["servers"].as_array().unwrap().len(), 3);
    for node in 0..3 {
        assert_eq!(nodes.server(node).keys(), [""; 0]);
    }
    nodes.kill(1);
    let ended = run(at_url(&nodes.urls(), &["doctor"])).with(1);
    assert!(ended.out.contains("PROBLEM  reach") && ended.out.contains("handed to the next"), "{ended:?}");
    nodes.kill(0);
    let report = report_at(&nodes.urls());
    report.problems(&["reach", "reach"]);
}

#[test]
fn two_nodes_that_are_one_server_are_a_problem_and_even_numbers_a_waste() {
    let server = RedisServer::start();
    let other = format!("redis://localhost:{}", server.port());
    let report = report(distlock(&["doctor", "--timeout", "20s", "--json", &server.url(), &other]));
    report.says("duplicates", "problem", "one server").says("nodes", "warning", "2 nodes survive the loss of 0");
    report.problems(&["duplicates", "handover"]);
    let twice = format!("{},{}", server.url(), server.url());
    report_at(&twice).says("duplicates", "problem", "one server");
}

#[test]
fn a_slow_way_is_held_against_the_time_to_live() {
    let server = RedisServer::start();
    let proxy = FaultProxy::in_front_of(server.addr());
    let slow = proxy.on_request(command("TIME"), Fault::DelayReply(Duration::from_millis(40))).forever();
    let report = report(at_url(&proxy.url(), &["doctor", "--json", "--ttl", "60ms"]));
    report.says("latency", "problem", "locks are lost").advises("latency", "use a ttl of");
    assert!(slow.fired() > 1);
}

#[test]
fn arguments_that_cannot_work_are_a_matter_of_usage() {
    run(distlock(&["doctor", "--ttl", "1ms"])).with(64).only_says("--ttl");
    run(distlock(&["doctor", "--ttl", "25h"])).with(64).only_says("--ttl");
    run(distlock(&["doctor", "nonsense"])).with(64).only_says("not a server URL");
}
