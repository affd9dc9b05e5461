//! `acquire_lock` and `release_lock`, which identify a lock by its id instead of a guard.

use std::{sync::Arc, time::Duration};

use distlock::{HandleEvent, LockOptions, LostEvent, ReleasedEvent};
use parking_lot::Mutex;

use super::LOCK;
use crate::{
    helpers::{
        CALL_LIMIT, SECOND, UnwrapReleased, await_queue_length, completes_within,
        config_long_timeouts, get, manager, queue_length, server_behind_proxy, spawn_call,
        spawn_queued_waiter,
    },
    support::{Fault, Monitor, RedisServer, TEST_TIMEOUT, contains, eventually},
};

fn renewals(commands: &Monitor) -> usize {
    commands.lines().iter().filter(|line| line.contains("lua] \"PEXPIRE\" \"lock:x\"")).count()
}

#[test]
fn release_lock_requires_the_id_of_the_holder() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    let ttl = 3 * SECOND;
    let id = mgr.acquire_lock("x", ttl, Duration::ZERO).unwrap().expect("the lock is free");
    assert_eq!(get(&server, LOCK).as_deref(), Some(id.as_str()));
    assert_eq!(other.acquire_lock("x", ttl, Duration::from_millis(50)).unwrap(), None);
    assert_eq!(queue_length(&server, "x"), 0);

    for wrong in ["", "wrong", distlock::generate_lock_id().as_str()] {
        assert!(!mgr.release_lock("x", wrong).unwrap(), "{wrong:?}");
        assert!(!other.release_lock("x", wrong).unwrap(), "{wrong:?}");
    }
    assert!(!mgr.release_lock("y", &id).unwrap(), "the id belongs to another lock");
    // The wrong ids have not stopped the renewal.
    let commands = server.monitor();
    eventually("the lock is renewed", TEST_TIMEOUT, || renewals(&commands) >= 4);
    assert_eq!(get(&server, LOCK).as_deref(), Some(id.as_str()));

    assert!(mgr.release_lock("x", &id).unwrap());
    assert!(!mgr.release_lock("x", &id).unwrap());
    assert_eq!(get(&server, LOCK), None);
}

#[test]
fn release_lock_accepts_ids_of_other_managers() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    let id = mgr.acquire_lock("x", 30 * SECOND, SECOND).unwrap().unwrap();
    let waiting =
        spawn_call(&mgr, "x", |mgr, name| mgr.acquire_lock(name, 30 * SECOND, Duration::MAX));
    await_queue_length(&server, "x", 1);
    assert!(other.release_lock("x", &id).unwrap());
    let next = waiting.join().unwrap().unwrap().expect("the lock was released");
    assert_ne!(next, id);
    assert!(other.release_lock("x", &next).unwrap());
    assert_eq!(get(&server, LOCK), None);
}

/// Records how locks end.
#[derive(Debug, Default)]
struct EndRecorder(Mutex<Vec<&'static str>>);

impl HandleEvent for EndRecorder {
    fn released(&self, _: &ReleasedEvent<'_>) {
        self.0.lock().push("released");
    }
    fn lost(&self, _: &LostEvent<'_>) {
        self.0.lock().push("lost");
    }
}

/// If the second call overtook the first, the first one would report the lock as lost.
#[test]
fn concurrent_release_lock_with_one_id_succeeds_once() {
    let recorder = Arc::new(EndRecorder::default());
    let handler = recorder.clone();
    let (server, proxy, mgr) = server_behind_proxy(|url| {
        config_long_timeouts(url).operation_timeout(8 * SECOND).event_handler(handler)
    });
    let id = mgr.acquire_lock("x", 30 * SECOND, SECOND).unwrap().unwrap();
    let release = proxy.on_request(contains(LOCK), Fault::HoldRequest);
    let same_id = id.clone();
    let first = spawn_call(&mgr, "x", move |mgr, name| mgr.release_lock(name, &same_id));
    release.wait_fired();
    assert!(!completes_within(CALL_LIMIT, "release_lock", || mgr.release_lock("x", &id)).unwrap());
    assert_eq!(get(&server, LOCK).as_deref(), Some(id.as_str()));
    release.release();
    assert!(first.join().unwrap().unwrap());
    assert_eq!((get(&server, LOCK), mgr.metrics().lost()), (None, 0));
    assert!(!mgr.release_lock("x", &id).unwrap());
    mgr.shutdown();
    assert_eq!(*recorder.0.lock(), ["released"]);
}

#[test]
fn failed_release_lock_can_be_called_again() {
    let (server, proxy, mgr) =
        server_behind_proxy(|url| config_long_timeouts(url).operation_timeout(SECOND));
    let id = mgr.acquire_lock("x", 30 * SECOND, SECOND).unwrap().unwrap();
    let release =
        proxy.on_request(contains(LOCK), Fault::ReplaceReply(b"-ERR not now\r\n".to_vec()));
    assert!(mgr.release_lock("x", &id).is_err());
    assert_eq!(release.fired(), 1);
    // A clean-up in the background may delete the key first, so set it again for each try.
    eventually("the lock can be released", TEST_TIMEOUT, || {
        server.cli(&["SET", LOCK, &id, "PX", "60000"]);
        mgr.release_lock("x", &id).unwrap()
    });
}

#[test]
fn empty_id_releases_only_a_lock_whose_id_is_empty() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    assert!(!mgr.release_lock("x", "").unwrap());
    assert!(server.keys().is_empty());

    let guard = mgr.lock("x").unwrap();
    let by_id = mgr.acquire_lock("y", 30 * SECOND, SECOND).unwrap().unwrap();
    let waiting = spawn_queued_waiter(&server, &other, "x");
    for mgr in [&mgr, &other] {
        assert!(!mgr.release_lock("x", "").unwrap());
        assert!(!mgr.release_lock("y", "").unwrap());
    }
    assert_eq!(get(&server, LOCK).as_deref(), Some(guard.id().as_str()));
    assert_eq!(get(&server, "lock:y").as_deref(), Some(by_id.as_str()));
    assert_eq!(queue_length(&server, "x"), 1);
    assert!(guard.is_held());
    guard.release().unwrap().unwrap_released();
    drop(waiting.join().unwrap().unwrap());

    server.cli(&["SET", "lock:z", "a stranger"]);
    assert!(!mgr.release_lock("z", "").unwrap());
    assert_eq!(get(&server, "lock:z").as_deref(), Some("a stranger"));
    server.cli(&["RPUSH", "lock:list", "precious"]);
    assert!(!mgr.release_lock("list", "").unwrap());
    assert_eq!(server.query::<i64>(&["LLEN", "lock:list"]), 1);
    server.cli(&["SET", "lock:z", ""]);
    assert!(mgr.release_lock("z", "").unwrap());
    assert_eq!(get(&server, "lock:z"), None);

    let refused = other.lock_with("y", &LockOptions::new().wait(Duration::ZERO)).unwrap_err();
    assert!(refused.is_contended());
    assert!(mgr.release_lock("y", &by_id).unwrap());
}
