//! Sentinels, and the end of certificates.

use super::{Report, report, report_at};
use crate::{
    command::distlock_at_url,
    support::{
        Certificates, RedisServer, SentinelGroup, TEST_TIMEOUT, eventually, eventually_some,
        rcgen::{self, CertificateParams},
    },
};

/// The finding about one server.
#[track_caller]
fn at<'a>(report: &'a Report, check: &str, server: &str) -> &'a serde_json::Value {
    let findings = report.value["findings"].as_array().unwrap();
    let found =
        findings.iter().find(|finding| finding["check"] == check && finding["server"] == server);
    found.unwrap_or_else(|| panic!("nothing about {check} of {server}: {:#}", report.value))
}

/// Fault: N182
#[test]
fn sentinels_and_replicas_are_judged() {
    let group = SentinelGroup::start(1);
    let replica = group.servers[1].addr().to_string();
    let healthy = eventually_some("no sentinel gets no reply", TEST_TIMEOUT, || {
        let report = report_at(&group.url());
        (report.finding("master")["level"] == "ok").then_some(report)
    });
    healthy
        .says("sentinels", "ok", "3 of 3 sentinels answer, and a failover needs 2 of them: 1 may")
        .says("master", "ok", &format!("all name {}", group.servers[0].addr()))
        .says("failover", "ok", "takes about 3s, of which down-after-milliseconds is 1s")
        .says("promotion", "ok", "1 of 1 replica can become the master")
        .says("replicas", "warning", "1 connected")
        .problems(&[])
        .hands_over();
    for check in ["reach", "version", "eviction"] {
        assert_eq!(at(&healthy, check, &replica)["level"], "ok");
    }
    assert_eq!(at(&healthy, "cut-off", &replica)["level"], "warning");
    let shorter = report(distlock_at_url(&group.url(), &["doctor", "--json", "--ttl", "3s"]));
    shorter.says("failover", "warning", "locks with a ttl of 3s are lost");

    let url = group.url();
    let (first, _) = url.split_once(',').unwrap();
    let one = report_at(&format!("{first}/main"));
    one.says("sentinels", "ok", "3 of 3 sentinels answer").problems(&[]);
    let findings = one.value["findings"].as_array().unwrap().iter();
    let not_named = findings.filter(|finding| {
        finding["check"] == "sentinel" && finding["advice"] == "add it to the URL"
    });
    assert_eq!(not_named.count(), 2, "{:#}", one.value);

    group.kill_sentinel(2);
    group.servers[1].config_set("maxmemory-policy", "allkeys-lru");
    group.servers[1].kill();
    eventually("the replica is down", TEST_TIMEOUT, || {
        let replicas: Vec<std::collections::HashMap<String, String>> =
            group.query(0, &["SENTINEL", "REPLICAS", "main"]);
        replicas[0]["flags"].contains("s_down")
    });
    let report = report_at(&group.url());
    report
        .says("sentinels", "warning", "2 of 3 sentinels answer")
        .says("promotion", "warning", "1 of 1 replica are down")
        .problems(&[]);
    assert_eq!(at(&report, "reach", &replica)["level"], "warning");
}

/// Fault: N182
#[test]
fn sentinels_that_know_no_master_are_a_problem() {
    let group = SentinelGroup::start(0);
    let url = group.url();
    report_at(&url).says("promotion", "warning", "none of 0 replicas").problems(&[]);
    let unknown = report(distlock_at_url(&url.replace("/main", "/other"), &["doctor", "--json"]));
    unknown.says("sentinels", "problem", "none of 3 answers").says(
        "sentinel",
        "warning",
        "it does not know this name",
    );
    assert_eq!(unknown.ended.code, Some(69));
}

fn ends_in(days: i64) -> impl Fn(&mut CertificateParams) {
    move |params| {
        let now = std::time::SystemTime::now();
        let span = std::time::Duration::from_secs(days.unsigned_abs() * 24 * 60 * 60 + 3_600);
        let end = if days < 0 { now - span } else { now + span };
        params.not_before = rcgen::date_time_ymd(2020, 1, 1);
        params.not_after = end.into();
    }
}

fn examine_tls(server: &RedisServer, certificates: &Certificates) -> Report {
    let files = ["ca.crt", "client.crt", "client.key"].map(|file| certificates.path(file));
    let [ca, cert, key] = files.each_ref().map(|file| file.to_str().unwrap());
    let url = format!("rediss://{}", server.tls_addr());
    let args = ["doctor", "--json", "--cacert", ca, "--cert", cert, "--key", key];
    report(distlock_at_url(&url, &args))
}

/// Fault: F62
#[test]
fn end_of_certificates_is_reported() {
    let certificates = Certificates::new();
    certificates.sign("client", &["me"], ends_in(12));
    let server = RedisServer::builder().tls(certificates.folder(), true).start();
    let report = examine_tls(&server, &certificates);
    let name = server.tls_addr().to_string();
    assert_eq!(at(&report, "certificate", &name)["level"], "ok");
    let findings = report.value["findings"].as_array().unwrap();
    let of_client = findings.iter().find(|finding| {
        finding["level"] == "warning"
            && finding["message"]
                .as_str()
                .unwrap()
                .contains("client.crt) expires in 12 days, on 20")
    });
    assert!(of_client.is_some(), "{:#}", report.value);
    report.problems(&[]);

    let expired = Certificates::of_an_authority();
    expired.sign("server", &["127.0.0.1"], ends_in(-3));
    expired.sign("client", &["me"], ends_in(90));
    let server = RedisServer::builder().tls(expired.folder(), false).start();
    let report = examine_tls(&server, &expired);
    let finding = at(&report, "certificate", &server.tls_addr().to_string());
    assert_eq!(finding["level"], "problem");
    let says = finding["message"].as_str().unwrap();
    assert!(says.contains("the server's certificate expired 3 days ago, on 20"), "{says}");
    assert_eq!(report.ended.code, Some(69));
    report.says("reach", "problem", "its certificate has expired");
}

#[test]
fn certificates_of_sentinels_and_master_are_seen() {
    let certificates = Certificates::of_an_authority();
    certificates.sign("server", &["127.0.0.1"], ends_in(20));
    certificates.sign("client", &["me"], ends_in(90));
    let group = SentinelGroup::start_with_tls(0, certificates.folder());
    let ca = certificates.path("ca.crt");
    let args = ["doctor", "--json", "--cacert", ca.to_str().unwrap()];
    let report = report(distlock_at_url(&group.url(), &args));
    let findings = report.value["findings"].as_array().unwrap().iter();
    let servers = findings
        .filter(|finding| finding["check"] == "certificate" && finding["level"] == "warning");
    assert_eq!(servers.count(), 4, "{:#}", report.value);
    report.problems(&[]).hands_over();
}
