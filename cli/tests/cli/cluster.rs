//! The command with locks in a Redis Cluster.

use super::{
    command::{distlock_at_url, run_for_json, run_to_end},
    doctor::{Report, report},
};
use crate::{
    helpers::config_long_timeouts,
    pty::Pty,
    support::{Cluster, TEST_TIMEOUT, eventually},
};
use distlock::RedisMgr;

#[test]
fn cluster_locks_are_listed_shown_and_released() {
    let cluster = Cluster::start(3);
    let mgr = RedisMgr::new(config_long_timeouts(cluster.url())).unwrap();
    let guards = ["a", "b", "c"].map(|name| mgr.lock(name).unwrap());
    let at = |args: &[&str]| distlock_at_url(&cluster.url(), args);
    let list = run_to_end(at(&["ls"])).expect_code(0).out;
    assert_eq!(list.lines().count(), 1 + 3, "{list}");
    let page = run_to_end(at(&["show", "b"])).expect_code(0).out;
    assert!(page.contains(guards[1].id().as_str()), "{page}");
    run_to_end(at(&["release", "--force", "b"])).expect_code(0);
    assert!(!mgr.is_locked("b").unwrap());
    run_to_end(at(&["run", "d", "--", "true"])).expect_code(0);
    run_to_end(at(&["run", "--wait", "0s", "a", "--", "true"])).expect_error("held");
    eventually("nothing else is left", TEST_TIMEOUT, || {
        mgr.locks("*").unwrap().iter().map(|lock| lock.name()).eq(["a", "c"])
    });
}

#[test]
fn doctor_and_bench_use_a_cluster_as_a_whole() {
    let cluster = Cluster::start(2);
    let at = |args: &[&str]| distlock_at_url(&cluster.url(), args);
    let page = run_to_end(at(&["doctor"])).expect_code(0).out;
    assert!(page.contains("handed to the next waiter"), "{page}");
    assert!(page.contains("cluster-require-full-coverage"), "{page}");
    let (report, ended) = run_for_json(at(&["bench", "--time", "1s", "--json"]));
    ended.expect_code(0);
    assert!(report["rows"][1]["samples"].as_u64() > Some(0), "{report}");
    cluster.nodes.iter().for_each(|node| node.kill());
    let page = run_to_end(at(&["doctor"])).out;
    assert!(page.contains("PROBLEM"), "{page}");
}

#[test]
fn top_shows_the_locks_of_all_nodes() {
    let cluster = Cluster::start(3);
    let mgr = RedisMgr::new(config_long_timeouts(cluster.url())).unwrap();
    let _guards = ["a", "b", "c"].map(|name| mgr.lock(name).unwrap());
    let mut top = Pty::start(140, 30, &["top", "--url", &cluster.url(), "--interval", "100ms"]);
    top.wait_until("all are shown", |screen| {
        ["a ", "b ", "c "].iter().all(|name| screen.lines().any(|line| line.starts_with(name)))
    });
    top.press("q");
    assert_eq!(top.exit_code(), 0);
}

fn examine(cluster: &Cluster) -> Report {
    report(distlock_at_url(&cluster.url(), &["doctor", "--json"]))
}

#[test]
fn doctor_reports_masters_replicas_and_moves() {
    let cluster = Cluster::start_with(2, true, &|server| {
        server.arg("--cluster-require-full-coverage").arg("no")
    });
    let found = examine(&cluster);
    found.says("slots", "ok", "all 16384 are served by 2 masters");
    found.says("replicas", "ok", "each master has one").says("coverage", "ok", "");
    found.says("versions", "ok", "at all nodes").says("handover", "ok", "handed to");
    found.says("cut-off", "warning", "goes on granting");
    found.says("eviction", "ok", "noeviction").lacks("state").lacks("nodes").lacks("moves");
    assert_eq!(found.servers(), 1 + 4);
    let (from, to) = cluster.begin_move(17);
    for node in [from, to] {
        examine(&cluster).says("moves", "warning", &format!("{} (1)", node.addr()));
    }
    let killed = cluster.replica_of(from);
    let address = killed.addr();
    killed.kill();
    eventually("others notice it", TEST_TIMEOUT, || {
        to.query::<String>(&["CLUSTER", "NODES"]).contains("slave,fail ")
    });
    let found = examine(&cluster);
    found.says("nodes", "warning", &format!("down, as most masters say: {address}"));
    found.says("replicas", "warning", &from.addr().to_string());
    found.says("slots", "ok", "2 masters");
}

#[test]
fn doctor_reports_slots_that_no_node_serves() {
    let cluster = Cluster::start(3);
    let (all, gone) = (examine(&cluster), &cluster.nodes[2]);
    all.says("coverage", "warning", "all nodes refuse all requests");
    all.says("replicas", "warning", "nothing takes over").lacks("nodes");
    gone.kill();
    eventually("the cluster is down", TEST_TIMEOUT, || {
        cluster.nodes[..2]
            .iter()
            .all(|node| node.query::<String>(&["CLUSTER", "INFO"]).contains("cluster_state:fail"))
    });
    let found = examine(&cluster);
    found.says("slots", "problem", "of 16384 are served, so all nodes refuse");
    found.says("state", "problem", &cluster.nodes[0].addr().to_string());
    found.says("nodes", "warning", &gone.addr().to_string());
}
