//! Calls while too few servers are available to get the lock.

use std::{
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread,
    time::Duration,
};

use distlock::{Config, LockError, RedisMgr};

use super::{expect_no_quorum, quarantine::IN_QUARANTINE, quorum};
use crate::{
    helpers::{
        CALL_LIMIT, Defer, SECOND, completes_within, config_long_timeouts, config_short_timeout,
        spawn_call, timed, tries_mutex,
    },
    support::{
        Fault, FaultProxy, Nodes, RedisServer, TEST_TIMEOUT, any_request, contains, eventually,
    },
};

/// Long enough that a call that ends before half of it has not waited for it.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(20);

const HOUR: Duration = Duration::from_secs(3600);

fn config(urls: impl Into<String>) -> Config {
    config_long_timeouts(urls).operation_timeout(OPERATION_TIMEOUT)
}

/// The error of a call that must end soon after its wait of `wait_ms`.
fn error_after(mgr: &RedisMgr, wait_ms: u64) -> LockError {
    let (error, took) =
        timed(|| mgr.try_lock_for("x", Duration::from_millis(wait_ms)).unwrap_err());
    assert!(took < OPERATION_TIMEOUT / 2, "{took:?}: {error}");
    error
}

/// Fault: N145
#[test]
fn bounded_wait_names_why_each_node_does_not_vote() {
    let nodes = Nodes::start(3);
    let mgr = RedisMgr::new(config(nodes.urls()).quarantine(600 * SECOND)).unwrap();
    let error = error_after(&mgr, 500);
    expect_no_quorum(&nodes, &error);
    let in_quarantine =
        error.nodes().iter().filter(|answer| answer.message.starts_with(IN_QUARANTINE)).count();
    assert!(in_quarantine >= quorum(&nodes), "{error}");
    assert!(!error.to_string().contains("no reply in time"), "{error}");

    let mgr = RedisMgr::new(config(nodes.urls()).quarantine(Duration::ZERO)).unwrap();
    nodes.kill(1);
    nodes.kill(2);
    let error = error_after(&mgr, 500);
    assert!(!error.nodes()[0].message.contains("no reply in time"), "{error}");
    for answer in &error.nodes()[1..] {
        assert!(answer.message.contains("refused"), "{error}");
    }
}

/// Fault: N146
#[test]
fn call_to_a_dead_server_ends_at_its_wait() {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config(server.url())).unwrap();
    drop(mgr.lock("x").unwrap());
    server.kill();
    let error = error_after(&mgr, 100);
    assert!(error.is_unavailable() && error.to_string().contains("refused"), "{error}");
}

/// Calls fail in microseconds while the server is unreachable, so a thousand of them fit into a few
/// probes. `breaks` makes the server go away, `mends` brings it back.
fn expect_to_fail_fast(why: &str, breaks: fn(&RedisServer), mends: fn(&RedisServer)) {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_short_timeout(server.url()).fail_fast(true)).unwrap();
    drop(mgr.lock("x").unwrap());
    breaks(&server);
    let fails = || {
        let error = mgr.try_lock_for("x", HOUR).unwrap_err();
        assert!(error.is_unavailable() && error.to_string().contains(why), "{error}");
    };
    completes_within(TEST_TIMEOUT, "a thousand calls", || (0..1000).for_each(|_| fails()));
    mends(&server);
    eventually("calls succeed again", TEST_TIMEOUT, || mgr.try_lock("x").is_ok());
    assert!(mgr.try_lock("y").is_ok());
}

/// Fault: N147
#[test]
fn calls_fail_fast_while_the_server_is_away() {
    expect_to_fail_fast("refused", RedisServer::kill, RedisServer::restart);
    expect_to_fail_fast("no reply in time", RedisServer::stop, RedisServer::cont);
}

/// Fault: N147
#[test]
fn server_that_returns_and_refuses_is_no_longer_away() {
    let server = RedisServer::start();
    let proxy = FaultProxy::in_front_of(server.addr());
    // Longer than the test: each call after the first refusal must ask the server as well.
    let mgr = RedisMgr::new(config(proxy.url()).fail_fast(true)).unwrap();
    drop(mgr.lock("x").unwrap());
    let calls: [fn(&RedisMgr) -> LockError; 2] =
        [|mgr| mgr.try_lock("x").unwrap_err(), |mgr| mgr.try_lock_all(["x", "y"]).unwrap_err()];
    for call in calls {
        let resets = proxy.on_request(any_request, Fault::ResetBeforeRequest).forever();
        assert!(mgr.try_lock_for("x", HOUR).unwrap_err().is_unavailable());
        server.config_set("maxmemory", "1");
        resets.disarm();
        eventually("the server is asked", TEST_TIMEOUT, || call(&mgr).code() == Some("OOM"));
        for call in calls {
            assert_eq!(call(&mgr).code(), Some("OOM"));
        }
        server.config_set("maxmemory", "0");
    }
    drop(mgr.try_lock("x").unwrap());
}

/// The probe has the only request for the lock in this process, and waits for a reply.
///
/// Fault: N147
#[test]
fn calls_do_not_wait_behind_the_probe_for_their_lock() {
    let server = RedisServer::start();
    let proxy = FaultProxy::in_front_of(server.addr());
    let config = config(proxy.url()).operation_timeout(3 * OPERATION_TIMEOUT).fail_fast(true);
    let config = config.local_handover(Duration::from_millis(5));
    let mgr = RedisMgr::new(config).unwrap();
    drop(mgr.lock("x").unwrap());
    let _resets = proxy.on_request(contains("lock:x"), Fault::ResetBeforeRequest).times(2);
    assert!(mgr.try_lock_for("x", HOUR).unwrap_err().is_unavailable());
    let held_back = proxy.on_request(tries_mutex, Fault::HoldRequest);
    let mut calls = Vec::new();
    eventually("a call is the probe", TEST_TIMEOUT, || {
        calls.push(spawn_call(&mgr, "x", |mgr, name| mgr.try_lock_for(name, HOUR).map(drop)));
        held_back.fired() > 0
    });
    for call in [RedisMgr::try_lock, RedisMgr::lock] {
        let mgr = mgr.clone();
        let error = completes_within(CALL_LIMIT, "the call", move || call(&mgr, "x").unwrap_err());
        assert!(error.is_unavailable(), "{error}");
    }
    assert!(calls.iter().any(|call| !call.is_finished()), "the calls have waited for the probe");
    held_back.release();
    calls.into_iter().for_each(|call| drop(call.join().unwrap()));
}

/// Fault: N147
#[test]
fn calls_fail_fast_while_too_few_nodes_vote() {
    let nodes = Nodes::start(3);
    let config = config_short_timeout(nodes.urls()).quarantine(Duration::ZERO).fail_fast(true);
    let mgr = RedisMgr::new(config).unwrap();
    drop(mgr.lock("x").unwrap());
    nodes.kill(0);
    nodes.kill(1);
    let fails = || {
        let error = mgr.try_lock_for("x", HOUR).unwrap_err();
        expect_no_quorum(&nodes, &error);
    };
    completes_within(TEST_TIMEOUT, "a thousand calls", || (0..1000).for_each(|_| fails()));
    nodes.restart(0);
    eventually("calls succeed again", TEST_TIMEOUT, || mgr.try_lock("x").is_ok());
}

/// Threads of a small backend. Each serves one request after another, and every request needs a
/// lock, if it can have it.
#[derive(Default)]
struct Backend {
    granted: [AtomicUsize; 8],
    failed: AtomicUsize,
    has_ended: AtomicBool,
}

impl Backend {
    /// Serves requests on one of the threads.
    fn serve(&self, thread: usize, mgr: &RedisMgr) {
        while !self.has_ended.load(Ordering::SeqCst) {
            match mgr.try_lock_for(&format!("order {thread}"), HOUR) {
                Ok(_guard) => self.granted[thread].fetch_add(1, Ordering::SeqCst),
                Err(error) => {
                    assert!(error.is_unavailable(), "{error}");
                    self.failed.fetch_add(1, Ordering::SeqCst)
                }
            };
        }
    }

    /// Waits until this many more requests have been served without a lock.
    fn go_on_without_locks(&self, requests: usize) {
        let before = self.failed.load(Ordering::SeqCst);
        eventually("requests are served without a lock", TEST_TIMEOUT, || {
            self.failed.load(Ordering::SeqCst) - before >= requests
        });
    }

    fn each_thread_gets_locks(&self) {
        let before = self.granted.each_ref().map(|granted| granted.load(Ordering::SeqCst));
        eventually("each thread gets locks", TEST_TIMEOUT, || {
            self.granted.iter().zip(before).all(|(now, before)| now.load(Ordering::SeqCst) > before)
        });
    }
}

/// Goal: while the nodes are unreachable, the threads of a backend stay free for what needs no
/// lock, and the nodes are hardly asked. Method: proxies reset each request to the nodes, and count
/// them.
///
/// Fault: N147
/// Promise: P6
#[test]
fn backend_goes_on_while_the_nodes_are_away() {
    let nodes = Nodes::start(3).behind_proxies(&[0, 1, 2]);
    let config = config(nodes.urls()).quarantine(Duration::ZERO).fail_fast(true);
    let (mgr, backend) = (RedisMgr::new(config).unwrap(), Backend::default());
    thread::scope(|threads| {
        let _end = Defer(|| backend.has_ended.store(true, Ordering::SeqCst));
        for thread in 0..8 {
            let (mgr, backend) = (&mgr, &backend);
            threads.spawn(move || backend.serve(thread, mgr));
        }
        backend.each_thread_gets_locks();

        let resets = [0, 1, 2].map(|node| {
            nodes.proxy(node).on_request(any_request, Fault::ResetBeforeRequest).forever()
        });
        backend.go_on_without_locks(2000);
        let asked = resets.each_ref().map(|resets| resets.fired());
        assert!(asked.iter().all(|asked| *asked < 500), "{asked:?} for 2000 requests");

        resets.iter().for_each(|resets| resets.disarm());
        (0..3).for_each(|node| nodes.proxy(node).reset_all());
        backend.each_thread_gets_locks();
    });
}
