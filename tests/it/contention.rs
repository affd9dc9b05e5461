//! Several processes compete for one lock.

pub(crate) mod history;

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use redis::Value;
use tempfile::TempDir;

use crate::{
    helpers::{FENCE, queue_length},
    support::{RedisServer, TEST_TIMEOUT, Worker, eventually},
};

/// A ttl that only a machine that stalls for minutes could exceed.
pub(crate) const FOREVER_MS: &str = "600000";

/// A folder for the files that the processes of one test write.
pub(crate) struct TestFolder {
    pub(crate) folder: TempDir,
}

impl TestFolder {
    pub(crate) fn new() -> Self {
        Self { folder: TempDir::with_prefix("distlock-").expect("no temporary folder") }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn history(&self) -> PathBuf {
        self.path("history")
    }
}

/// What a locker reports once it holds a lock.
pub(crate) struct Locked {
    pub(crate) token: u64,
    /// The time at which it got the lock.
    pub(crate) at: u64,
    pub(crate) id: String,
}

/// Starts a process that executes commands about locks. Its leases and claim windows outlast the
/// test, unless `args` say otherwise.
pub(crate) fn spawn_worker(server: &RedisServer, args: &[(&str, &str)]) -> Worker {
    let url = server.url();
    let defaults = [
        ("url", url.as_str()),
        ("ttl_ms", FOREVER_MS),
        ("window_ms", FOREVER_MS),
        ("timeout_ms", "20000"),
    ];
    let worker = Worker::spawn("locker", &[&defaults, args].concat());
    worker.expect("ready");
    worker
}

/// Waits until a locker holds a lock that it was told to acquire.
#[track_caller]
pub(crate) fn expect_locked(worker: &Worker, name: &str) -> Locked {
    let line = worker.expect_any(&[&format!("locked {name} "), &format!("failed {name} ")]);
    let fields: Vec<_> = line.splitn(5, ' ').collect();
    assert_eq!(fields[0], "locked", "{line}");
    let number = |at: usize| fields[at].parse().expect("a number");
    Locked { token: number(2), at: number(3), id: fields[4].to_owned() }
}

#[track_caller]
pub(crate) fn lock(worker: &mut Worker, name: &str) -> Locked {
    worker.send(&format!("lock {name}"));
    expect_locked(worker, name)
}

/// Makes a locker join the queue of a lock, behind `before` others.
#[track_caller]
pub(crate) fn lock_in_background(
    server: &RedisServer,
    worker: &mut Worker,
    name: &str,
    before: usize,
) {
    worker.send(&format!("lock {name}"));
    eventually("it is queued", TEST_TIMEOUT, || queue_length(server, name) == before + 1);
}

#[track_caller]
pub(crate) fn release(worker: &mut Worker, name: &str) -> String {
    worker.send(&format!("release {name}"));
    worker.expect(&format!("released {name}"))
}

pub(crate) fn owner(server: &RedisServer, name: &str) -> Option<String> {
    server.query(&["GET", &format!("lock:{name}")])
}

#[track_caller]
pub(crate) fn expect_only_keys_that_expire(server: &RedisServer) {
    // The fence is one key, and must outlive all locks.
    for key in server.keys().into_iter().filter(|key| key != FENCE) {
        let left: i64 = server.query(&["PTTL", &key]);
        assert_ne!(left, -1, "{key} has no expiry");
    }
}

/// Number of processes, their role, and their arguments.
type Group<'a> = (usize, &'a str, &'a [(&'a str, &'a str)]);

/// Starts processes, and lets them begin once all are ready.
#[track_caller]
pub(crate) fn spawn_workers(server: &RedisServer, groups: &[Group<'_>]) -> Vec<Worker> {
    let url = server.url();
    let mut workers = Vec::new();
    for (count, role, args) in groups {
        let args = [&[("url", url.as_str())], *args].concat();
        workers.extend((0..*count).map(|_| Worker::spawn(role, &args)));
    }
    workers.iter().for_each(|worker| drop(worker.expect("ready")));
    workers.iter_mut().for_each(|worker| worker.send("go"));
    workers
}

#[track_caller]
pub(crate) fn expect_done(workers: &mut [Worker]) {
    for worker in workers {
        worker.expect("done");
        assert!(worker.wait().success(), "{}", worker.transcript());
    }
}

pub(crate) fn path_str(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

pub(crate) fn read_counter(path: &Path) -> u64 {
    fs::read_to_string(path).expect("no counter").parse().expect("a number")
}

/// Pauses; no test depends on how long.
pub(crate) fn pause(milliseconds: u64) {
    crate::worker::work(Duration::from_millis(milliseconds));
}

/// Promise: P1
#[test]
fn eight_processes_lose_no_update() {
    let (server, folder) = (RedisServer::start(), TestFolder::new());
    let (file, history) = (folder.path("count"), folder.history());
    let args = [
        ("lock", "counter"),
        ("rounds", "500"),
        ("ttl_ms", FOREVER_MS),
        ("window_ms", FOREVER_MS),
        ("timeout_ms", "20000"),
        ("file", path_str(&file)),
        ("history", path_str(&history)),
    ];
    expect_done(&mut spawn_workers(&server, &[(8, "counter", &args)]));
    assert_eq!(read_counter(&file), 4000);
    assert_eq!(history::expect_no_violation(&history).len(), 4000);
    assert_eq!((owner(&server, "counter"), queue_length(&server, "counter")), (None, 0));
    expect_only_keys_that_expire(&server);
}

#[test]
fn set_nx_clients_and_ours_exclude_each_other() {
    let (server, folder) = (RedisServer::start(), TestFolder::new());
    let (file, history) = (folder.path("count"), folder.history());
    let common = [
        ("lock", "shared"),
        ("file", path_str(&file)),
        ("history", path_str(&history)),
        ("ttl_ms", FOREVER_MS),
    ];
    let ours = [&common[..], &[("rounds", "100"), ("window_ms", FOREVER_MS)]].concat();
    let theirs = [&common[..], &[("rounds", "60")]].concat();
    expect_done(&mut spawn_workers(&server, &[(4, "counter", &ours), (3, "foreign", &theirs)]));
    assert_eq!(read_counter(&file), 4 * 100 + 3 * 60);
    assert_eq!(history::expect_no_violation(&history).len(), 4 * 100 + 3 * 60);
    assert_eq!((owner(&server, "shared"), queue_length(&server, "shared")), (None, 0));
    expect_only_keys_that_expire(&server);
}

#[test]
fn eight_competing_processes_get_equal_shares() {
    let (server, folder) = (RedisServer::start(), TestFolder::new());
    let (file, history) = (folder.path("count"), folder.history());
    let args = [
        ("lock", "fair"),
        ("rounds", "400"),
        ("others", "7"),
        ("ttl_ms", FOREVER_MS),
        ("window_ms", FOREVER_MS),
        ("timeout_ms", "20000"),
        ("file", path_str(&file)),
        ("history", path_str(&history)),
    ];
    let mut workers = spawn_workers(&server, &[(8, "sharer", &args)]);
    let shares =
        workers.iter_mut().map(|worker| worker.expect("had").parse::<u64>().expect("a number"));
    let shares: Vec<_> = shares.collect();
    let (fewest, most) =
        (*shares.iter().min().expect("eight"), *shares.iter().max().expect("eight"));
    assert!(fewest * 10 >= most * 9, "shares differ: {shares:?}");
    assert_eq!(shares.iter().sum::<u64>(), 400);
    history::expect_no_violation(&history);
}

/// The server's own record decides: processes that joined the queue first are granted the lock
/// first.
///
/// Promise: P4
#[test]
fn no_queued_process_is_overtaken() {
    let (server, folder) = (RedisServer::start(), TestFolder::new());
    let mut holder = spawn_worker(&server, &[]);
    lock(&mut holder, "x");
    let monitor = server.monitor();
    let (file, history) = (folder.path("count"), folder.history());
    let args = [
        ("lock", "x"),
        ("rounds", "60"),
        ("ttl_ms", FOREVER_MS),
        ("window_ms", FOREVER_MS),
        ("timeout_ms", "20000"),
        ("file", path_str(&file)),
        ("history", path_str(&history)),
    ];
    let mut workers = spawn_workers(&server, &[(8, "counter", &args)]);
    eventually("all are queued", TEST_TIMEOUT, || queue_length(&server, "x") == 8);
    release(&mut holder, "x");
    expect_done(&mut workers);
    server.query::<Value>(&["ECHO", "the end of the record"]);
    monitor.wait_for("the end of the record");
    let lines = monitor.lines();
    let ids = |command: &str| -> Vec<String> {
        let lines = lines.iter().filter(|line| line.contains(&format!("{command}\" \"distlock:")));
        lines
            .map(|line| line.trim_end_matches('"').rsplit(' ').next().expect("an id").to_owned())
            .collect()
    };
    let (joined, granted) = (ids("RPUSH"), ids("PUBLISH"));
    assert!(joined.len() >= 8, "the record is not complete");
    assert_eq!(joined, granted);
}
