//! Releases of several locks in one exchange.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
};

use distlock::{HandleEvent, LostEvent, RedisMgr, ReleasedEvent};
use parking_lot::Mutex;

use crate::{
    helpers::{
        CALL_LIMIT, SECOND, UnwrapReleased, await_gone, completes_within, config_long_timeouts,
        config_short_timeout, get, manager, server_behind_proxy,
    },
    support::{Fault, FaultProxy, RedisServer, TEST_TIMEOUT, contains, eventually, instead},
};

const NAMES: [&str; 10] = ["n0", "n1", "n2", "n3", "n4", "n5", "n6", "n7", "n8", "n9"];

/// Records which locks are lost.
#[derive(Debug, Default)]
struct LostNames(Mutex<Vec<String>>);

impl HandleEvent for LostNames {
    fn lost(&self, event: &LostEvent<'_>) {
        self.0.lock().push(event.lock().to_owned());
    }
}

/// Locks `b` once, after `a` has been released.
#[derive(Debug, Default)]
struct Relocks {
    mgr: Mutex<Option<RedisMgr>>,
    has_locked: AtomicBool,
}

impl HandleEvent for Relocks {
    fn released(&self, event: &ReleasedEvent<'_>) {
        let mgr = if event.lock() == "a" { self.mgr.lock().take() } else { None };
        if let Some(mgr) = mgr {
            drop(mgr.try_lock_for("b", CALL_LIMIT).unwrap());
            self.has_locked.store(true, Ordering::Release);
        }
    }
}

/// Counts the requests about each of the locks.
fn count_requests(proxy: &FaultProxy) -> Arc<AtomicUsize> {
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    let counts = move |words: &[Vec<u8>]| {
        let is_lock = |word: &Vec<u8>| word.starts_with(b"lock:n");
        counted.fetch_add(words.iter().filter(|word| is_lock(word)).count(), Ordering::AcqRel);
        false
    };
    proxy.on_request(counts, Fault::DropReply);
    count
}

/// Goal: ten releases take one exchange. Method: the first reply is held back until there is a
/// request for each of the locks.
///
/// Promise: P10
#[test]
fn ten_locks_are_released_in_one_exchange() {
    let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    // The first release sends the script.
    drop(mgr.lock_all(NAMES).unwrap());
    let all = mgr.lock_all(NAMES).unwrap();
    let count = count_requests(&proxy);
    let held_back = proxy.on_request(contains("lock:n9"), Fault::HoldReply);
    let releasing = thread::spawn(move || all.release());
    held_back.wait_fired();
    eventually("all releases are sent", TEST_TIMEOUT, || count.load(Ordering::Acquire) == 10);
    assert!(!releasing.is_finished(), "no reply has arrived");
    held_back.release();
    releasing.join().unwrap().unwrap().unwrap_released();
    assert!(NAMES.iter().all(|name| get(&server, &format!("lock:{name}")).is_none()));
    assert_eq!(count.load(Ordering::Acquire), 10, "each once");
}

/// Promise: P10
/// Fault: N183
#[test]
fn joint_release_with_lost_replies_counts_as_released() {
    for fault in [Fault::ResetAfterRequest, Fault::ResetBeforeRequest] {
        for lost in ["lock:n9", "lock:n5", "lock:n0"] {
            let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
            drop(mgr.lock_all(NAMES).unwrap());
            let all = mgr.lock_all(NAMES).unwrap();
            let reset = proxy.on_request(contains(lost), fault.clone());
            all.release().unwrap().unwrap_released();
            assert_eq!(reset.fired(), 1);
            assert!(NAMES.iter().all(|name| get(&server, &format!("lock:{name}")).is_none()));
        }
    }
}

/// Promise: P6
/// Fault: N183
#[test]
fn failed_joint_release_is_completed_in_the_background() {
    let config = |url| config_short_timeout(url).ttl(600 * SECOND);
    let (server, proxy, mgr) = server_behind_proxy(config);
    let all = mgr.lock_all(NAMES).unwrap();
    proxy.blackhole();
    let error = completes_within(CALL_LIMIT, "the release", || all.release().unwrap_err());
    assert!(error.is_unavailable(), "{error:?}");
    proxy.heal();
    NAMES.iter().for_each(|name| await_gone(&server, &format!("lock:{name}")));
}

/// The first reply shows a failover, which ends the connection. Those behind it still count.
///
/// Fault: N183
/// Promise: P7
#[test]
fn joint_release_in_a_failover_reports_each_lost_lock() {
    let lost = Arc::new(LostNames::default());
    let handler = lost.clone();
    let config = move |url| config_long_timeouts(url).event_handler(handler);
    let (server, proxy, mgr) = server_behind_proxy(config);
    drop(mgr.lock_all(NAMES).unwrap());
    let all = mgr.lock_all(NAMES).unwrap();
    server.cli(&["SET", "lock:n4", "another holder"]);
    let read_only = b"-READONLY You can't write against a read only replica.\r\n";
    let failover = proxy.on_request(contains("lock:n9"), instead(|| read_only.to_vec()));
    let _ = all.release().unwrap();
    assert_eq!(failover.fired(), 1);
    // The server has run the request whose reply was replaced.
    eventually("the losses are reported", TEST_TIMEOUT, || {
        ["n4", "n9"].iter().all(|name| lost.0.lock().iter().any(|lost| lost == name))
    });
}

/// A handler that uses one of the locks is called once they are released.
///
/// Promise: P3
#[test]
fn handler_can_lock_what_a_joint_release_ends() {
    let server = RedisServer::start();
    let relocks = Arc::new(Relocks::default());
    let config = config_long_timeouts(server.url()).ttl(600 * SECOND).local_handover(SECOND);
    let mgr = RedisMgr::new(config.event_handler(relocks.clone())).unwrap();
    *relocks.mgr.lock() = Some(mgr.clone());
    let both = mgr.lock_all(["a", "b"]).unwrap();
    let waiter = {
        let mgr = mgr.clone();
        thread::spawn(move || mgr.lock("a").unwrap().release())
    };
    eventually("it waits", TEST_TIMEOUT, || mgr.metrics().waiting() == 1);
    both.release().unwrap().unwrap_released();
    waiter.join().unwrap().unwrap().unwrap_released();
    assert!(relocks.has_locked.load(Ordering::Acquire), "the handler has locked b");
}

#[test]
fn joint_release_goes_on_if_scripts_are_flushed() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    drop(mgr.lock_all(NAMES).unwrap());
    let all = mgr.lock_all(NAMES).unwrap();
    server.cli(&["SCRIPT", "FLUSH"]);
    all.release().unwrap().unwrap_released();
    assert!(NAMES.iter().all(|name| !mgr.is_locked(name).unwrap()));
}

/// Each reply is that of its lock.
///
/// Promise: P7
#[test]
fn joint_release_reports_the_lock_that_was_lost() {
    let (server, other) = (RedisServer::start(), "another holder");
    let mgr = RedisMgr::new(config_long_timeouts(server.url())).unwrap();
    let all = mgr.lock_all(NAMES).unwrap();
    server.cli(&["SET", "lock:n4", other]);
    let released = all.release().unwrap();
    assert!(format!("{released:?}").contains(other), "{released:?}");
    for name in NAMES {
        let expected = (name == "n4").then_some(other);
        assert_eq!(get(&server, &format!("lock:{name}")).as_deref(), expected, "{name}");
    }
}

/// What another thread of the process waits for is handed over.
///
/// Promise: P3
#[test]
fn joint_release_hands_locks_over_inside_the_process() {
    const THREADS: usize = 4;
    const ROUNDS: usize = 100;
    let server = RedisServer::start();
    let config = config_long_timeouts(server.url()).local_handover(SECOND);
    let mgr = RedisMgr::new(config).unwrap();
    let calls = || server.calls("evalsha") + server.calls("eval");
    let before = calls();
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                for _ in 0..ROUNDS {
                    let both = mgr.lock_all(["a", "b"]).unwrap();
                    both.release().unwrap().unwrap_released();
                }
            });
        }
    });
    let calls = calls() - before;
    assert!(calls < (3 * THREADS * ROUNDS) as u64, "{calls} of {}", 4 * THREADS * ROUNDS);
}
