//! The command with locks in a Redis Cluster.

use super::command::{distlock_at_url, run_for_json, run_to_end};
use crate::{
    helpers::config_long_timeouts,
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
