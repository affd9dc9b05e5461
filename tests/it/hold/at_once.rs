//! Several locks in one request: all of them, or none.

use std::{sync::Arc, thread, time::Duration};

use distlock::{
    AcquiredEvent, AttemptedEvent, CancelToken, ContendedEvent, HandleEvent, LockError,
    LockOptions, ReleasedEvent, TimedOutEvent,
};
use parking_lot::Mutex;

use crate::{
    family::spawn_waiter,
    helpers::{
        CALL_LIMIT, SECOND, UnwrapReleased, await_gone, completes_within, config_long_timeouts,
        config_short_timeout, get, manager, pttl, queue_key, server_behind_proxy,
    },
    support::{Fault, RedisServer, TEST_TIMEOUT, contains, eventually},
};

const NAMES: [&str; 3] = ["a", "b", "c"];

fn keys(server: &RedisServer) -> Vec<String> {
    let mut keys = server.keys();
    keys.retain(|key| key.starts_with("lock:"));
    keys
}

/// Promise: P1
#[test]
fn free_locks_are_acquired_by_one_request() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    drop(mgr.try_lock_all(NAMES).unwrap());
    let before = server.calls("evalsha");
    let all = mgr.try_lock_all(NAMES).unwrap();
    assert_eq!(server.calls("evalsha") - before, 1);
    for name in NAMES {
        let key = format!("lock:{name}");
        assert_eq!(get(&server, &key).as_deref(), all.id(name).map(|id| id.as_str()));
        assert!((1..=30_000).contains(&pttl(&server, &key)));
    }
    let tokens = NAMES.map(|name| all.token(name).unwrap());
    all.release().unwrap().unwrap_released();
    let again = mgr.try_lock_all(NAMES).unwrap();
    for (name, token) in NAMES.into_iter().zip(tokens) {
        assert!(again.token(name).unwrap() > token, "{name}");
    }
    let before = server.calls("evalsha");
    drop(again);
    assert_eq!(server.calls("evalsha") - before, 3, "each is released");
    let all: Vec<String> = (0..1_000).map(|n| format!("n{n}")).collect();
    assert_eq!(mgr.try_lock_all(&all).unwrap().names().count(), 1_000);
}

/// Promise: P5
/// Fault: N178
#[test]
fn refused_request_takes_nothing() {
    for held in NAMES {
        let server = RedisServer::start();
        let mgr = manager(&server);
        let reader = mgr.rw_lock(held).unwrap().read().unwrap();
        match mgr.try_lock_all(NAMES).unwrap_err() {
            LockError::Held { name, holder, .. } => {
                assert_eq!((&*name, holder.id()), (held, "distlock:read"));
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(keys(&server), [format!("lock:{held}")], "at once");
        drop(reader);
        server.cli(&["RPUSH", &format!("lock:{held}"), "not a lock"]);
        match mgr.try_lock_all(NAMES).unwrap_err() {
            LockError::WrongType { name, .. } => assert_eq!(name, held),
            other => panic!("{other:?}"),
        }
        assert_eq!(keys(&server), [format!("lock:{held}")]);
        server.cli(&["DEL", &format!("lock:{held}")]);
        server.cli(&["HSET", &format!("distlock:token:{{lock:{held}}}"), "not", "a token"]);
        assert!(mgr.try_lock_all(NAMES).is_err());
        assert_eq!(keys(&server), [""; 0]);
    }
}

/// A lock that is free but has waiters is its first waiter's.
///
/// Promise: P4
#[test]
fn request_passes_no_waiter() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    let guard = other.lock("b").unwrap();
    let here = mgr.clone();
    let waiting = spawn_waiter(&mgr, "b", 1, move || here.lock("b").unwrap());
    server.cli(&["DEL", "lock:b"]);
    assert!(other.try_lock_all(NAMES).unwrap_err().is_contended());
    let waiter = completes_within(CALL_LIMIT, "the grant", || waiting.join().unwrap());
    assert!(waiter.is_held() && !mgr.is_locked("a").unwrap());
    drop((guard, waiter));
}

#[test]
fn dead_waiters_are_passed() {
    let server = RedisServer::start();
    server.cli(&["RPUSH", &queue_key("b"), "30000 distlock:client:gone somebody"]);
    let all = manager(&server).try_lock_all(NAMES).unwrap();
    assert!(all.is_held() && !server.keys().contains(&queue_key("b")));
}

/// Fault: N183
#[test]
fn lost_reply_is_asked_for_again() {
    for fault in [Fault::DropReply, Fault::ResetAfterRequest, Fault::ResetBeforeRequest] {
        // On a busy machine, no timeout comes in between.
        let config = |url| config_long_timeouts(url).ttl(600 * SECOND);
        let (server, proxy, mgr) = server_behind_proxy(config);
        drop(mgr.try_lock_all(NAMES).unwrap());
        let lost = proxy.on_request(contains("lock:a"), fault);
        let all = mgr.try_lock_all(NAMES).unwrap();
        assert_eq!(lost.fired(), 1);
        for name in NAMES {
            let holder = get(&server, &format!("lock:{name}"));
            assert_eq!(holder.as_deref(), all.id(name).map(|id| id.as_str()));
        }
        all.release().unwrap().unwrap_released();
    }
}

/// Promise: P5
/// Fault: N183
#[test]
fn request_without_a_reply_leaves_nothing() {
    let (server, proxy, mgr) = server_behind_proxy(config_short_timeout);
    let options = LockOptions::new().ttl(600 * SECOND).wait(Duration::ZERO);
    drop(mgr.lock_all_with(NAMES, &options).unwrap());
    proxy.one_way();
    let error = completes_within(CALL_LIMIT, "the call", || {
        mgr.lock_all_with(NAMES, &options).unwrap_err()
    });
    assert!(error.is_unavailable(), "{error:?}");
    assert_eq!(keys(&server).len(), 3, "the server has granted the locks");
    proxy.heal();
    NAMES.iter().for_each(|name| await_gone(&server, &format!("lock:{name}")));
}

#[derive(Debug, Default)]
struct Record(Mutex<Vec<String>>);

impl Record {
    fn take(&self) -> String {
        std::mem::take(&mut *self.0.lock()).join(", ")
    }

    fn add(&self, what: &str, lock: &str) {
        self.0.lock().push(format!("{what} {lock}"));
    }
}

impl HandleEvent for Record {
    fn attempted(&self, event: &AttemptedEvent<'_>) {
        self.add("attempted", event.lock());
    }

    fn contended(&self, event: &ContendedEvent<'_>) {
        self.add("contended", event.lock());
    }

    fn acquired(&self, event: &AcquiredEvent<'_>) {
        self.add("acquired", event.lock());
    }

    fn timed_out(&self, event: &TimedOutEvent<'_>) {
        self.add("timed out", event.lock());
    }

    fn released(&self, event: &ReleasedEvent<'_>) {
        self.add("released", event.lock());
    }
}

#[test]
fn each_lock_has_its_own_events() {
    let server = RedisServer::start();
    let record = Arc::new(Record::default());
    let config = config_long_timeouts(server.url()).event_handler(record.clone());
    let mgr = distlock::RedisMgr::new(config).unwrap();
    drop(mgr.try_lock_all(["b", "a"]).unwrap());
    let expected = "attempted a, attempted b, acquired a, acquired b, released b, released a";
    assert_eq!(record.take(), expected);
    let guard = manager(&server).lock("b").unwrap();
    assert!(mgr.try_lock_all(["a", "b"]).unwrap_err().is_contended());
    let expected = "attempted a, attempted b, timed out a, timed out b";
    eventually("the contention is reported", TEST_TIMEOUT, || {
        record.0.lock().iter().any(|line| line == "contended b")
    });
    assert_eq!(record.take().replace("contended b, ", "").replace(", contended b", ""), expected);
    drop(guard);
    let cancel = CancelToken::new();
    cancel.cancel();
    let options = LockOptions::new().wait(Duration::ZERO).cancel(&cancel);
    assert!(mgr.lock_all_with(["a", "b"], &options).unwrap_err().is_cancelled());
    assert_eq!(keys(&server), [""; 0]);
}

/// What is released in the background is released first.
#[test]
fn own_releases_in_the_background_do_not_refuse() {
    let (_server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    let all = mgr.try_lock_all(NAMES).unwrap();
    let slow = proxy.on_request(contains("lock:c"), Fault::DelayReply(SECOND / 10));
    all.release_later();
    assert!(mgr.try_lock_all(NAMES).is_ok());
    drop(slow);
    assert!(thread::spawn(move || mgr.try_lock_all(NAMES).is_ok()).join().unwrap());
}
