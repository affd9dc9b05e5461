//! Locks in a Redis Cluster: each on the node of its slot, while slots move and nodes fail.

mod failures;
mod membership;
mod moves;
mod permissions;
mod storm;

use std::{thread::JoinHandle, time::Duration};

use distlock::{Config, LockError, LockGuard, LockKind, RedisMgr};

use crate::{
    helpers::{CALL_LIMIT, SECOND, UnwrapReleased, completes_within, spawn_call, with_ttl},
    support::{
        Cluster, RedisServer, RedisServerBuilder, TEST_TIMEOUT, eventually, eventually_some,
    },
};

/// Names whose locks are on all three nodes.
const NAMES: [&str; 6] = ["a", "b", "c", "d", "e", "{user:1}:cart"];

/// All threads queue at the servers.
fn config(cluster: &Cluster) -> Config {
    Config::new(cluster.url()).ttl(30 * SECOND).local_handover(Duration::ZERO)
}

fn manager(cluster: &Cluster) -> RedisMgr {
    RedisMgr::new(config(cluster)).unwrap()
}

fn slot(cluster: &Cluster, name: &str) -> u16 {
    cluster.slot(&format!("lock:{name}"))
}

/// Locks until that succeeds: while a node is unreachable, calls fail.
fn lock_eventually(mgr: &RedisMgr, name: &str) -> LockGuard {
    eventually_some("the lock is granted", TEST_TIMEOUT, || mgr.try_lock(name).ok())
}

/// Starts a thread that waits for a lock, and waits until it is queued.
fn spawn_waiter(mgr: &RedisMgr, name: &'static str, waiting_before: u64) -> JoinHandle<LockGuard> {
    let waiting = spawn_call(mgr, name, |mgr, name| mgr.lock(name).unwrap());
    await_waiting(mgr, name, waiting_before + 1);
    waiting
}

fn await_waiting(mgr: &RedisMgr, name: &str, waiting: u64) {
    eventually("it waits", TEST_TIMEOUT, || {
        let holder = mgr.holder(name).ok().flatten();
        holder.is_some_and(|holder| holder.waiters() == Some(waiting))
    });
}

#[test]
fn locks_of_all_nodes_are_acquired_and_handed_over() {
    let cluster = Cluster::start(3);
    let (one, other) = (manager(&cluster), manager(&cluster));
    for name in NAMES {
        let first = one.lock(name).unwrap();
        assert!(matches!(other.try_lock(name), Err(LockError::Held { .. })));
        let waiting = spawn_waiter(&other, name, 0);
        let token = first.fencing_token();
        first.release().unwrap().unwrap_released();
        let next = completes_within(CALL_LIMIT, "the hand-over", || waiting.join().unwrap());
        assert!(next.fencing_token() > token);
        assert!(one.force_release(name).unwrap());
        drop(next);
        assert_eq!(one.holder(name).unwrap(), None);
    }
    // Each slot in use keeps its fence.
    let mut left: Vec<_> = cluster.nodes.iter().flat_map(RedisServer::keys).collect();
    left.retain(|key| !key.starts_with("distlock:fence:{"));
    assert_eq!(left, Vec::<String>::new());
    assert!(cluster.nodes.iter().all(|node| node.calls("evalsha") > 0), "a node was not used");
}

#[test]
fn locks_of_all_nodes_are_listed_and_described() {
    let cluster = Cluster::start(3);
    let mgr = manager(&cluster);
    let held: Vec<_> = NAMES.iter().map(|name| mgr.lock(name).unwrap()).collect();
    let _waiting = spawn_waiter(&manager(&cluster), "a", 0);
    let names = |pattern: &str| -> Vec<String> {
        mgr.locks(pattern).unwrap().iter().map(|lock| lock.name().to_owned()).collect()
    };
    let mut sorted = NAMES.to_vec();
    sorted.sort_unstable();
    assert_eq!(names("*"), sorted);
    assert_eq!(names("{user*"), ["{user:1}:cart"]);
    let lock = mgr.lock_info("a").unwrap().unwrap();
    assert_eq!((lock.holder().id(), lock.waiters().len()), (held[0].id().as_str(), 1));
    assert!(mgr.ping().unwrap() < CALL_LIMIT);
    drop(held);
}

#[test]
fn readers_writers_and_permits_share_locks_on_all_nodes() {
    let cluster = Cluster::start(3);
    let (one, other) = (manager(&cluster), manager(&cluster));
    for name in NAMES {
        let (mine, theirs) = (one.rw_lock(name).unwrap(), other.rw_lock(name).unwrap());
        let readers = (mine.read().unwrap(), theirs.read().unwrap());
        assert!(theirs.try_write().unwrap_err().is_contended());
        assert_eq!(readers.0.kind(), LockKind::Read);
        let waiting = std::thread::spawn(move || theirs.write().unwrap());
        await_waiting(&one, name, 1);
        drop(readers);
        let writer = completes_within(CALL_LIMIT, "the hand-over", || waiting.join().unwrap());
        let reader = writer.downgrade().unwrap();
        assert_eq!(one.lock_info(name).unwrap().unwrap().members().len(), 1);
        drop((reader, mine.read().unwrap()));
        let permits = (one.semaphore(name, 3).unwrap(), other.semaphore(name, 3).unwrap());
        let two = permits.0.acquire_many(2).unwrap();
        let third = permits.1.acquire().unwrap();
        assert_eq!(permits.0.available().unwrap(), 0);
        drop((two, third));
    }
}

/// Fault: N176
#[test]
fn name_that_no_slot_can_keep_is_refused() {
    let cluster = Cluster::start(2);
    let mgr = manager(&cluster);
    for name in ["a}b", "{}x"] {
        let error = mgr.lock(name).unwrap_err();
        assert!(matches!(error, LockError::InvalidName { .. }), "{error:?}");
        assert!(error.to_string().contains("write a hash tag"), "{error}");
    }
    // Known only to clients that are not ours.
    cluster.owner(slot(&cluster, "a}b")).cli(&["SET", "lock:a}b", "me", "PX", "60000"]);
    assert_eq!(mgr.locks("*").unwrap(), []);
}

/// Fault: N176
#[test]
fn wrong_url_says_what_to_write() {
    let cluster = Cluster::start(2);
    for node in &cluster.nodes {
        let single = RedisMgr::new(Config::new(node.url())).unwrap();
        let error = single.try_lock("x").unwrap_err().to_string();
        assert!(error.contains("write redis+cluster://host,host as the URL"), "{error}");
    }
    let server = RedisServer::start();
    let url = server.url().replace("redis://", "redis+cluster://");
    let single = RedisMgr::new(Config::new(url)).unwrap();
    let error = single.lock("x").unwrap_err().to_string();
    assert!(error.contains("it is a single server"), "{error}");
    let several = RedisMgr::new(Config::nodes([cluster.url(), server.url()])).unwrap_err();
    assert!(several.to_string().contains("list all its nodes in one URL"), "{several}");
    let error = manager(&cluster).connection().map(drop).unwrap_err().to_string();
    assert!(error.contains("a client for clusters"), "{error}");
}

#[test]
fn password_of_the_url_is_used_for_all_nodes() {
    let login =
        |server: RedisServerBuilder| server.password("secret").arg("--masterauth").arg("secret");
    let cluster = Cluster::start_with(3, false, &login);
    let url = cluster.url().replace("://", "://:secret@");
    let mgr = RedisMgr::new(Config::new(url)).unwrap();
    for name in NAMES {
        drop(mgr.lock(name).unwrap());
    }
    let error = manager(&cluster).lock("x").unwrap_err();
    assert!(error.to_string().contains("NOAUTH"), "{error}");
}

/// Grant messages are for the node of the lock only.
#[test]
fn subscriber_of_another_node_hears_nothing() {
    if !RedisServer::has_sharded_channels() {
        // Such servers send each message to all nodes.
        return;
    }
    let cluster = Cluster::start(2);
    let (mgr, other) = (manager(&cluster), manager(&cluster));
    let elsewhere = cluster.other_master(slot(&cluster, "x"));
    let mut stranger = redis::Client::open(elsewhere.url()).unwrap().get_connection().unwrap();
    stranger.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    let mut stranger = stranger.as_pubsub();
    stranger.psubscribe("*").unwrap();
    let first = mgr.lock("x").unwrap();
    let waiting = spawn_waiter(&other, "x", 0);
    first.release().unwrap().unwrap_released();
    drop(waiting.join().unwrap());
    elsewhere.cli(&["PUBLISH", "end", "of the test"]);
    assert_eq!(stranger.get_message().unwrap().get_channel_name(), "end");
}

#[test]
fn locks_of_one_slot_are_acquired_by_one_request() {
    let cluster = Cluster::start(3);
    let mgr = manager(&cluster);
    let calls = || cluster.nodes.iter().map(|node| node.calls("evalsha")).sum::<u64>();
    for (names, requests) in [(["{t}a", "{t}b", "{t}c"], 1), (["a", "b", "c"], 3)] {
        drop(mgr.try_lock_all(names).unwrap());
        let before = calls();
        let all = mgr.try_lock_all(names).unwrap();
        assert_eq!(calls() - before, requests, "{names:?}");
        assert!(all.is_held());
        let other = manager(&cluster);
        assert!(other.try_lock_all(names).unwrap_err().is_contended());
        drop(all);
        eventually("they are released", TEST_TIMEOUT, || other.try_lock_all(names).is_ok());
    }
}
