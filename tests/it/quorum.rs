//! One lock over several servers.

mod contenders;
mod fencing;
mod handover;
mod late_replies;
mod leases;
mod lost_votes;
mod membership;
mod minority;
mod node_faults;
mod outages;
mod promotion;
mod quarantine;
mod queue;
mod readers;
mod slow_node;
mod votes;
mod wrong_type;

use std::time::Duration;

use distlock::{Config, LockError, LockGuard, NodeReply, RedisMgr, Vote};

use crate::{
    helpers,
    support::{Nodes, TEST_TIMEOUT, Worker, eventually, eventually_some},
};

/// Short enough to observe renewals, long enough for a slow machine.
const TTL: Duration = Duration::from_secs(3);

/// For tests in which only a defect causes a timeout. There is no quarantine, so that nodes vote
/// although they have just started.
fn config_long_timeouts(nodes: &Nodes) -> Config {
    helpers::config_long_timeouts(nodes.urls()).quarantine(Duration::ZERO)
}

/// For tests without a quorum of nodes that reply.
fn config_short_timeout(nodes: &Nodes) -> Config {
    config_long_timeouts(nodes).operation_timeout(helpers::SHORT_TIMEOUT)
}

/// For tests in which a quorum of the nodes replies.
pub(crate) fn config_medium_timeout(nodes: &Nodes) -> Config {
    helpers::config_medium_timeout(nodes.urls()).quarantine(Duration::ZERO)
}

pub(crate) fn manager(nodes: &Nodes) -> RedisMgr {
    RedisMgr::new(config_long_timeouts(nodes)).unwrap()
}

pub(crate) fn quorum(nodes: &Nodes) -> usize {
    nodes.len() / 2 + 1
}

pub(crate) fn key(name: &str) -> String {
    format!("lock:{name}")
}

/// The nodes on which this guard's id is the value of the key.
pub(crate) fn nodes_holding(nodes: &Nodes, guard: &LockGuard) -> Vec<usize> {
    nodes.keeping(&key(guard.name()), guard.id().as_str())
}

#[track_caller]
pub(crate) fn expect_quorum(nodes: &Nodes, guard: &LockGuard) {
    let holding = nodes_holding(nodes, guard);
    assert!(guard.is_held() && holding.len() >= quorum(nodes), "held on {holding:?}");
}

/// Waits until no running node has this lock.
#[track_caller]
pub(crate) fn wait_until_free_everywhere(nodes: &Nodes, name: &str) {
    eventually("it is free on all nodes", TEST_TIMEOUT, || {
        nodes.values(&key(name)).iter().all(Option::is_none)
    });
}

/// Connects to each node and loads the scripts; returns when no request is in flight.
#[track_caller]
fn warm_up(nodes: &Nodes, mgr: &RedisMgr) {
    eventually("all nodes hold it", TEST_TIMEOUT, || {
        nodes_holding(nodes, &mgr.lock("warm").unwrap()).len() == nodes.len()
    });
    wait_until_free_everywhere(nodes, "warm");
}

/// Waits for this number of renewals; the lock must be held all the time.
#[track_caller]
fn await_renewals(guard: &LockGuard, times: usize) {
    let (mut last, mut seen) = (guard.remaining(), 0);
    eventually("it is renewed", TEST_TIMEOUT, || {
        guard.ensure_held().unwrap();
        let left = guard.remaining();
        // Only a renewal increases the time left.
        seen += usize::from(left > last);
        last = left;
        seen >= times
    });
}

/// The votes of the nodes. Every node must be listed, in order, with a message.
#[track_caller]
fn votes(nodes: &Nodes, replies: &[NodeReply]) -> Vec<Vote> {
    let named: Vec<_> = replies.iter().map(|reply| format!("redis://{}", reply.node)).collect();
    let urls = nodes.urls();
    assert_eq!(named.join(","), urls, "{replies:?}");
    assert!(replies.iter().all(|reply| !reply.message.is_empty()), "{replies:?}");
    replies.iter().map(|reply| reply.vote).collect()
}

/// The error must be `NoQuorum`, with one message for each node; returns the votes.
#[track_caller]
fn expect_no_quorum(nodes: &Nodes, error: &LockError) -> Vec<Vote> {
    let LockError::NoQuorum { needed, replies, .. } = error else { panic!("{error:?}") };
    assert_eq!(*needed, quorum(nodes));
    assert!(error.is_unavailable() && !error.is_contended() && !error.is_timeout(), "{error:?}");
    let text = error.to_string();
    for reply in replies {
        assert!(text.contains(&format!("{}: {}", reply.node, reply.message)), "{text}");
    }
    assert_eq!(error.nodes(), replies);
    votes(nodes, replies)
}

/// Number of waiters on a node: its queue, and the head of the queue, which has this node's vote
/// alone while another client is the holder.
fn waiting_on(nodes: &Nodes, node: usize, holder: &str) -> usize {
    let server = nodes.server(node);
    let head: Option<String> = server.query(&["GET", &key("x")]);
    helpers::queue_length(server, "x") + usize::from(head.is_some_and(|id| id != holder))
}

/// Waits until a node has this number of waiters for lock `x`. If they never come, the output says
/// where they wait instead.
#[track_caller]
pub(crate) fn await_waiting(nodes: &Nodes, node: usize, waiters: usize, holder: &str) {
    let mut last = Vec::new();
    eventually("they wait on this node", TEST_TIMEOUT, || {
        let waiting = nodes
            .running()
            .into_iter()
            .map(|node| (node, waiting_on(nodes, node, holder)))
            .collect();
        if last != waiting {
            eprintln!("waiters by node: {waiting:?}");
            last = waiting;
        }
        last.contains(&(node, waiters))
    });
}

/// Starts a process that locks and releases on command; its leases outlast any test.
pub(crate) fn spawn_worker(nodes: &Nodes, args: &[(&str, &str)]) -> Worker {
    let urls = nodes.urls();
    let defaults = [
        ("url", urls.as_str()),
        ("ttl_ms", "600000"),
        ("window_ms", "20000"),
        ("quarantine_ms", "0"),
    ];
    let worker = Worker::spawn("locker", &[&defaults, args].concat());
    worker.expect("ready");
    worker
}

/// Waits until the process has the lock that it was sent to wait for; returns the token and the id.
#[track_caller]
pub(crate) fn expect_locked(worker: &Worker, name: &str) -> (u64, String) {
    token_and_id(&worker.expect_any(&["locked ", "failed "]), name)
}

/// Like `expect_locked`, for the first of several processes that reports the lock; also returns the
/// index of that process.
#[track_caller]
pub(crate) fn next_locked<'a>(
    workers: impl Iterator<Item = &'a Worker> + Clone,
    name: &str,
) -> (usize, u64, String) {
    let (next, line) = eventually_some("one process has the lock", TEST_TIMEOUT, || {
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
pub(crate) fn release(worker: &mut Worker, name: &str) {
    worker.send(&format!("release {name}"));
    assert_eq!(worker.expect(&format!("released {name}")), "Ok(Released)");
}
