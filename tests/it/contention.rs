//! Several processes and one lock.

pub(crate) mod history;

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use redis::Value;
use tempfile::TempDir;

use crate::support::{CEILING, RedisServer, Worker, eventually, silent_server};

/// So long that a machine would have to stand still for minutes to spoil a test.
pub(crate) const FOREVER_MS: &str = "600000";

/// A folder for what the processes of one test write.
pub(crate) struct Desk {
    pub(crate) folder: TempDir,
}

impl Desk {
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

/// What a hand says once it has a lock.
pub(crate) struct Locked {
    pub(crate) token: u64,
    /// When it had it.
    pub(crate) at: u64,
    pub(crate) id: String,
}

/// A process that locks, looks and releases as it is told. Its leases and claims last until it is
/// gone, unless `args` say otherwise.
pub(crate) fn spawn_worker(server: &RedisServer, args: &[(&str, &str)]) -> Worker {
    let url = server.url();
    let defaults = [
        ("url", url.as_str()),
        ("ttl_ms", FOREVER_MS),
        ("window_ms", FOREVER_MS),
        ("timeout_ms", "20000"),
    ];
    let worker = Worker::spawn("hand", &[&defaults, args].concat());
    worker.expect("ready");
    worker
}

/// The lock that a hand was told to wait for.
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

/// Puts a hand into the line for a lock, behind `before` others.
#[track_caller]
pub(crate) fn lock_in_background(
    server: &RedisServer,
    worker: &mut Worker,
    name: &str,
    before: i64,
) {
    worker.send(&format!("lock {name}"));
    eventually("another one is in line", CEILING, || waiting(server, name) == before + 1);
}

#[track_caller]
pub(crate) fn release(worker: &mut Worker, name: &str) -> String {
    worker.send(&format!("release {name}"));
    worker.expect(&format!("released {name}"))
}

pub(crate) fn waiting(server: &RedisServer, name: &str) -> i64 {
    server.query(&["LLEN", &format!("distlock:queue:{{lock:{name}}}")])
}

pub(crate) fn owner(server: &RedisServer, name: &str) -> Option<String> {
    server.query(&["GET", &format!("lock:{name}")])
}

#[track_caller]
pub(crate) fn expect_only_keys_that_expire(server: &RedisServer) {
    for key in server.keys() {
        let left: i64 = server.query(&["PTTL", &key]);
        assert_ne!(left, -1, "{key} has no expiry");
    }
}

/// How many processes, of which role, with which arguments.
type Crew<'a> = (usize, &'a str, &'a [(&'a str, &'a str)]);

/// Starts processes, and lets them go once all of them are there.
#[track_caller]
pub(crate) fn spawn_workers(server: &RedisServer, crews: &[Crew<'_>]) -> Vec<Worker> {
    let url = server.url();
    let mut workers = Vec::new();
    for (count, role, args) in crews {
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

pub(crate) fn text(path: &Path) -> &str {
    path.to_str().expect("a path in plain letters")
}

pub(crate) fn count(path: &Path) -> u64 {
    fs::read_to_string(path).expect("no counter").parse().expect("a number")
}

#[test]
fn eight_processes_never_lose_an_update() {
    let (server, desk) = (RedisServer::start(), Desk::new());
    let (file, history) = (desk.path("count"), desk.history());
    let args = [
        ("lock", "counter"),
        ("rounds", "500"),
        ("ttl_ms", FOREVER_MS),
        ("window_ms", FOREVER_MS),
        ("timeout_ms", "20000"),
        ("file", text(&file)),
        ("history", text(&history)),
    ];
    expect_done(&mut spawn_workers(&server, &[(8, "counter", &args)]));
    assert_eq!(count(&file), 4000);
    assert_eq!(history::expect_order(&history).len(), 4000);
    assert_eq!((owner(&server, "counter"), waiting(&server, "counter")), (None, 0));
    expect_only_keys_that_expire(&server);
}

#[test]
fn clients_that_only_know_set_nx_compete_correctly() {
    let (server, desk) = (RedisServer::start(), Desk::new());
    let (file, history) = (desk.path("count"), desk.history());
    let common = [
        ("lock", "shared"),
        ("file", text(&file)),
        ("history", text(&history)),
        ("ttl_ms", FOREVER_MS),
    ];
    let ours = [&common[..], &[("rounds", "100"), ("window_ms", FOREVER_MS)]].concat();
    let theirs = [&common[..], &[("rounds", "60")]].concat();
    expect_done(&mut spawn_workers(&server, &[(4, "counter", &ours), (3, "foreign", &theirs)]));
    assert_eq!(count(&file), 4 * 100 + 3 * 60);
    assert_eq!(history::expect_order(&history).len(), 4 * 100 + 3 * 60);
    assert_eq!((owner(&server, "shared"), waiting(&server, "shared")), (None, 0));
    expect_only_keys_that_expire(&server);
}

#[test]
fn eight_processes_that_always_want_it_have_equal_shares() {
    let (server, desk) = (RedisServer::start(), Desk::new());
    let (file, history) = (desk.path("count"), desk.history());
    let args = [
        ("lock", "fair"),
        ("rounds", "400"),
        ("others", "7"),
        ("ttl_ms", FOREVER_MS),
        ("window_ms", FOREVER_MS),
        ("timeout_ms", "20000"),
        ("file", text(&file)),
        ("history", text(&history)),
    ];
    let mut workers = spawn_workers(&server, &[(8, "sharer", &args)]);
    let shares =
        workers.iter_mut().map(|worker| worker.expect("had").parse::<u64>().expect("a number"));
    let shares: Vec<_> = shares.collect();
    let (fewest, most) =
        (*shares.iter().min().expect("eight"), *shares.iter().max().expect("eight"));
    assert!(fewest * 10 >= most * 9, "shares differ: {shares:?}");
    assert_eq!(shares.iter().sum::<u64>(), 400);
    history::expect_order(&history);
}

/// The server's own record decides: who joined the line before another was handed the lock before
/// it.
#[test]
fn nobody_in_line_is_overtaken() {
    let (server, desk) = (RedisServer::start(), Desk::new());
    let mut holder = spawn_worker(&server, &[]);
    lock(&mut holder, "line");
    let monitor = server.monitor();
    let (file, history) = (desk.path("count"), desk.history());
    let args = [
        ("lock", "line"),
        ("rounds", "60"),
        ("ttl_ms", FOREVER_MS),
        ("window_ms", FOREVER_MS),
        ("timeout_ms", "20000"),
        ("file", text(&file)),
        ("history", text(&history)),
    ];
    let mut workers = spawn_workers(&server, &[(8, "counter", &args)]);
    eventually("all are in line", CEILING, || waiting(&server, "line") == 8);
    release(&mut holder, "line");
    expect_done(&mut workers);
    server.query::<Value>(&["ECHO", "the end of the record"]);
    monitor.wait_for("the end of the record");
    let lines = monitor.lines();
    let ids = |command: &str| -> Vec<String> {
        let lines = lines.iter().filter(|line| line.contains(&format!("lua] \"{command}\"")));
        lines
            .map(|line| line.trim_end_matches('"').rsplit(' ').next().expect("an id").to_owned())
            .collect()
    };
    let (joined, granted) = (ids("RPUSH"), ids("PUBLISH"));
    assert!(joined.len() >= 8, "the record is not complete");
    assert_eq!(joined, granted);
}

#[test]
fn a_forked_child_can_neither_use_nor_release_what_its_parent_holds() {
    let server = RedisServer::start();
    let mut worker = Worker::spawn("forker", &[("url", &server.url()), ("ttl_ms", FOREVER_MS)]);
    worker.expect("child ended Some(0)");
    for line in [
        "child held false",
        "child ensure true",
        "child lost true",
        "child lock true",
        "child ping true",
        "child dropped all",
    ] {
        worker.expect(line);
    }
    worker.expect("parent held true");
    assert!(owner(&server, "forked").is_some());
    worker.send("go on");
    worker.expect("parent released Ok(Released)");
    assert_eq!(owner(&server, "forked"), None);
}

/// The thread that makes it is not in the child, and will never be done. A manager of its own it
/// cannot have either: its threads would have the places of threads that are not there, for which
/// some of what they use still waits.
#[test]
fn a_forked_child_gets_no_manager_even_while_its_parent_makes_one() {
    let (server, silent, silent_too) = (RedisServer::start(), silent_server(), silent_server());
    let args =
        [("url", &*server.url()), ("silent", &*silent.url()), ("silent_too", &*silent_too.url())];
    let mut worker = Worker::spawn("making_forker", &args);
    eventually("the manager is being made", CEILING, || {
        silent.accepted() + silent_too.accepted() > 0
    });
    worker.send("fork");
    for line in ["init true", "instance true", "new true", "id true", "ended Some(0)"] {
        worker.expect(&format!("child {line}"));
    }
    worker.expect("parent released Ok(Released)");
}

#[test]
fn a_child_that_is_forked_before_the_first_manager_has_its_own() {
    let server = RedisServer::start();
    let worker = Worker::spawn("early_forker", &[("url", &server.url())]);
    for line in
        ["parent held true, Ok(Released)", "child held true, Ok(Released)", "child ended Some(0)"]
    {
        worker.expect(line);
    }
}

/// A pause that is no test's condition.
pub(crate) fn pause(milliseconds: u64) {
    crate::worker::work(Duration::from_millis(milliseconds));
}
