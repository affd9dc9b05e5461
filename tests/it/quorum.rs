//! One lock over several servers.

mod basics;
mod contenders;
mod fencing;
mod late_replies;
mod leases;
mod membership;
mod node_faults;
mod quarantine;
mod queue;
mod slow_node;
mod votes;

use std::time::Duration;

use distlock::{Config, LockError, LockGuard, NodeAnswer, RedisMgr, Vote};

use crate::{
    helpers,
    support::{CEILING, Nodes, Worker, eventually, eventually_some},
};

/// A lease that is renewed often enough to see it, and lasts long enough for a slow machine.
const TTL: Duration = Duration::from_secs(3);

/// In which nothing but a defect runs into a timeout. These nodes have just started, and vote all
/// the same.
fn config_long_timeouts(nodes: &Nodes) -> Config {
    helpers::config_long_timeouts(nodes.urls()).quarantine(Duration::ZERO)
}

/// For nodes that do not answer.
fn config_short_timeout(nodes: &Nodes) -> Config {
    config_long_timeouts(nodes).operation_timeout(helpers::SHORT_TIMEOUT)
}

/// For nodes of which enough answer.
fn config_medium_timeout(nodes: &Nodes) -> Config {
    helpers::config_medium_timeout(nodes.urls()).quarantine(Duration::ZERO)
}

fn manager(nodes: &Nodes) -> RedisMgr {
    RedisMgr::new(config_long_timeouts(nodes)).unwrap()
}

fn quorum(nodes: &Nodes) -> usize {
    nodes.len() / 2 + 1
}

fn key(name: &str) -> String {
    format!("lock:{name}")
}

/// The nodes that keep this lock.
fn nodes_holding(nodes: &Nodes, guard: &LockGuard) -> Vec<usize> {
    nodes.keeping(&key(guard.name()), guard.id().as_str())
}

#[track_caller]
fn expect_quorum(nodes: &Nodes, guard: &LockGuard) {
    let kept = nodes_holding(nodes, guard);
    assert!(guard.is_held() && kept.len() >= quorum(nodes), "kept on {kept:?}");
}

/// Waits until no node that runs keeps a lock of this name.
#[track_caller]
fn wait_until_free_everywhere(nodes: &Nodes, name: &str) {
    eventually("no node keeps it", CEILING, || {
        nodes.values(&key(name)).iter().all(Option::is_none)
    });
}

/// Each node is connected to and knows the scripts, and nothing is under way to it any more.
#[track_caller]
fn warm_up(nodes: &Nodes, mgr: &RedisMgr) {
    eventually("all keep it", CEILING, || {
        nodes_holding(nodes, &mgr.lock("warm").unwrap()).len() == nodes.len()
    });
    wait_until_free_everywhere(nodes, "warm");
}

/// Waits until the lease was renewed so often, and was held all the time.
#[track_caller]
fn await_renewals(guard: &LockGuard, times: usize) {
    let (mut last, mut seen) = (guard.remaining(), 0);
    eventually("it is renewed", CEILING, || {
        guard.ensure_held().unwrap();
        let left = guard.remaining();
        // Time left only grows by a renewal.
        seen += usize::from(left > last);
        last = left;
        seen >= times
    });
}

/// How the nodes voted, after making sure that every node is named, in order, and says something.
#[track_caller]
fn votes(nodes: &Nodes, answers: &[NodeAnswer]) -> Vec<Vote> {
    let named: Vec<_> = answers.iter().map(|answer| format!("redis://{}", answer.node)).collect();
    let urls = nodes.urls();
    assert_eq!(named.join(","), urls, "{answers:?}");
    assert!(answers.iter().all(|answer| !answer.message.is_empty()), "{answers:?}");
    answers.iter().map(|answer| answer.vote).collect()
}

/// Makes sure that this says that there is no quorum, and returns what the nodes said.
#[track_caller]
fn expect_no_quorum(nodes: &Nodes, error: &LockError) -> Vec<Vote> {
    let LockError::NoQuorum { needed, answers, .. } = error else { panic!("{error:?}") };
    assert_eq!(*needed, quorum(nodes));
    assert!(error.is_unavailable() && !error.is_contended() && !error.is_timeout(), "{error:?}");
    let text = error.to_string();
    for answer in answers {
        assert!(text.contains(&format!("{}: {}", answer.node, answer.message)), "{text}");
    }
    assert_eq!(error.nodes(), answers);
    votes(nodes, answers)
}

/// A process that locks and releases as it is told; its leases outlive any test.
fn spawn_worker(nodes: &Nodes, args: &[(&str, &str)]) -> Worker {
    let urls = nodes.urls();
    let defaults = [
        ("url", urls.as_str()),
        ("ttl_ms", "600000"),
        ("window_ms", "20000"),
        ("quarantine_ms", "0"),
    ];
    let worker = Worker::spawn("hand", &[&defaults, args].concat());
    worker.expect("ready");
    worker
}

/// Waits until a process has the lock for which it was told to wait; returns its token and its
/// identifier.
#[track_caller]
fn expect_locked(worker: &Worker, name: &str) -> (u64, String) {
    token_and_id(&worker.expect_any(&["locked ", "failed "]), name)
}

/// The same for whichever of several processes has it next, as they themselves say.
#[track_caller]
fn next_locked<'a>(
    workers: impl Iterator<Item = &'a Worker> + Clone,
    name: &str,
) -> (usize, u64, String) {
    let (next, line) = eventually_some("one of them has it", CEILING, || {
        workers
            .clone()
            .enumerate()
            .find_map(|(number, worker)| Some((number, worker.try_line(Duration::ZERO)?)))
    });
    let (token, id) = token_and_id(&line, name);
    (next, token, id)
}

#[track_caller]
fn token_and_id(line: &str, name: &str) -> (u64, String) {
    let fields: Vec<_> = line.splitn(5, ' ').collect();
    assert_eq!(fields[..2], ["locked", name], "{line}");
    (fields[2].parse().unwrap(), fields[4].to_owned())
}

#[track_caller]
fn release(worker: &mut Worker, name: &str) {
    worker.send(&format!("release {name}"));
    assert_eq!(worker.expect(&format!("released {name}")), "Ok(Released)");
}
