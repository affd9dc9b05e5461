//! Releases of several locks in one exchange.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use distlock::RedisMgr;

use crate::{
    helpers::{
        CALL_LIMIT, SECOND, UnwrapReleased, await_gone, completes_within, config_long_timeouts,
        config_short_timeout, get, manager, server_behind_proxy,
    },
    support::{Fault, FaultProxy, RedisServer, TEST_TIMEOUT, contains, eventually},
};

const NAMES: [&str; 10] = ["n0", "n1", "n2", "n3", "n4", "n5", "n6", "n7", "n8", "n9"];

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
