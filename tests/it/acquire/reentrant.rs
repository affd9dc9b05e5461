//! Reentrant locks: a thread can acquire a lock again that it already holds.

use std::{
    cell::RefCell,
    sync::{Arc, mpsc},
    time::Duration,
};

use distlock::{HandleEvent, LockError, RedisMgr, ReentrantGuard, Released, ReleasedEvent};
use parking_lot::Mutex;

use crate::{
    helpers::{
        CALL_LIMIT, FENCE, SECOND, await_queue_length, capture_log, completes_within,
        config_long_timeouts, get, in_own_process, manager, spawn_call, with_ttl,
    },
    support::{RedisServer, TEST_TIMEOUT, eventually},
};

const LOCK: &str = "lock:x";

#[test]
fn nested_guards_are_counted_and_the_last_drop_releases() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let outer = mgr.lock_reentrant("x").unwrap();
    let inner = mgr.lock_reentrant("x").unwrap();
    let innermost = mgr.lock_reentrant_with("x", &with_ttl(SECOND).wait(Duration::ZERO)).unwrap();
    assert_eq!([outer.hold_count(), inner.hold_count(), innermost.hold_count()], [3; 3]);
    assert_eq!(inner.fencing_token(), outer.fencing_token());
    assert_eq!(inner.id(), innermost.id());
    // The order of the drops does not matter.
    drop(outer);
    drop(innermost);
    assert_eq!(inner.hold_count(), 1);
    assert_eq!(get(&server, LOCK).as_deref(), Some(inner.id().as_str()));
    drop(inner);
    assert_eq!(server.keys(), [FENCE]);
    assert_eq!(mgr.lock_reentrant("x").unwrap().hold_count(), 1);
}

#[test]
fn reentering_sends_no_request() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let outer = mgr.lock_reentrant("x").unwrap();
    let before = server.commands_processed();
    for _ in 0..1000 {
        assert!(mgr.lock_reentrant("x").unwrap().is_held());
    }
    assert_eq!(server.commands_processed(), before);
    assert!(outer.is_held());
}

#[test]
fn only_the_last_release_reports_an_outcome() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let (outer, inner) = (mgr.lock_reentrant("x").unwrap(), mgr.lock_reentrant("x").unwrap());
    assert_eq!(inner.release().unwrap(), None);
    assert!(get(&server, LOCK).is_some());
    assert_eq!(outer.release().unwrap(), Some(Released::Released));
    assert_eq!(get(&server, LOCK), None);
}

#[test]
fn other_threads_and_managers_are_excluded() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    let outer = mgr.lock_reentrant("x").unwrap();
    let now = with_ttl(SECOND).wait(Duration::ZERO);
    assert!(other.lock_reentrant_with("x", &now).unwrap_err().is_contended());
    let refused =
        spawn_call(&mgr, "x", move |mgr, name| mgr.lock_reentrant_with(name, &now).map(drop))
            .join()
            .unwrap();
    assert!(refused.unwrap_err().is_contended());

    let waiting =
        spawn_call(&mgr, "x", |mgr, name| mgr.lock_reentrant(name).map(|guard| guard.hold_count()));
    await_queue_length(&server, "x", 1);
    drop(outer);
    assert_eq!(waiting.join().unwrap().unwrap(), 1);
}

#[test]
fn guards_are_counted_for_each_name() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let (x, y) = (mgr.lock_reentrant("x").unwrap(), mgr.lock_reentrant("y").unwrap());
    assert_eq!((x.hold_count(), y.hold_count()), (1, 1));
    drop(x);
    assert!(get(&server, LOCK).is_none() && get(&server, "lock:y").is_some());
}

#[test]
fn lost_lock_is_not_reentered_until_all_guards_are_gone() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let outer = mgr.lock_reentrant_with("x", &with_ttl(3 * SECOND)).unwrap();
    let inner = mgr.lock_reentrant("x").unwrap();
    server.cli(&["DEL", LOCK]);
    eventually("the loss is noticed", TEST_TIMEOUT, || !outer.is_held());
    assert!(matches!(mgr.lock_reentrant("x"), Err(LockError::Lost { .. })));
    assert!(matches!(inner.release(), Err(LockError::Lost { .. })));
    drop(outer);
    let again = mgr.lock_reentrant("x").unwrap();
    assert!(again.is_held());
    assert_eq!(again.hold_count(), 1);
}

/// Fault: F7
#[test]
fn panic_releases_every_guard() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let panicked = spawn_call(&mgr, "x", |mgr, name| {
        let _outer = mgr.lock_reentrant(name).unwrap();
        let _inner = mgr.lock_reentrant(name).unwrap();
        std::panic::resume_unwind(Box::new("the work failed"));
    });
    assert!(panicked.join().is_err());
    assert_eq!(get(&server, LOCK), None);
}

/// Fault: N15
#[test]
fn guard_in_thread_storage_is_released_with_the_thread() {
    thread_local!(static KEPT: RefCell<Option<ReentrantGuard>> = const { RefCell::new(None) });
    let server = RedisServer::start();
    let mgr = manager(&server);
    let kept = spawn_call(&mgr, "x", |mgr, name| {
        let guard = mgr.lock_reentrant(name).unwrap();
        KEPT.with(|kept| kept.replace(Some(guard)));
    });
    kept.join().unwrap();
    eventually("it is released", TEST_TIMEOUT, || get(&server, LOCK).is_none());
}

/// Fault: F94
#[test]
fn plain_lock_is_not_reentrant_and_names_its_holder() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock("x").unwrap();
    let error = completes_within(CALL_LIMIT, "the wait", || {
        mgr.try_lock_for("x", Duration::from_millis(100)).unwrap_err()
    });
    assert!(error.is_timeout());
    assert_eq!(error.holder().unwrap().lock_id().as_ref(), Some(guard.id()));
    assert_eq!(error.holder().unwrap().pid(), Some(std::process::id()));
    // A reentrant lock does not enter a plain one either.
    let now = with_ttl(SECOND).wait(Duration::ZERO);
    assert!(mgr.lock_reentrant_with("x", &now).unwrap_err().is_contended());
}

thread_local!(static TAKEN: RefCell<Option<ReentrantGuard>> = const { RefCell::new(None) });

/// Acquires the lock again, once, when it is notified of a release.
#[derive(Debug, Default)]
struct RelockOnRelease(Mutex<Option<RedisMgr>>);

impl HandleEvent for RelockOnRelease {
    fn released(&self, event: &ReleasedEvent<'_>) {
        let mgr = self.0.lock().take();
        if let Some(mgr) = mgr {
            TAKEN.set(Some(mgr.lock_reentrant(event.lock()).unwrap()));
        }
    }
}

#[test]
fn lock_taken_by_a_release_handler_can_be_reentered() {
    let server = RedisServer::start();
    let handler = Arc::new(RelockOnRelease::default());
    let mgr =
        RedisMgr::new(config_long_timeouts(server.url()).event_handler(handler.clone())).unwrap();
    for is_explicit in [true, false] {
        let guard = mgr.lock_reentrant("x").unwrap();
        *handler.0.lock() = Some(mgr.clone());
        if is_explicit {
            assert_eq!(guard.release().unwrap(), Some(Released::Released));
        } else {
            drop(guard);
        }
        let again = mgr.lock_reentrant_with("x", &with_ttl(SECOND).wait(Duration::ZERO)).unwrap();
        assert_eq!(again.hold_count(), 2);
        TAKEN.take();
        assert_eq!(again.release().unwrap(), Some(Released::Released));
        assert_eq!(get(&server, LOCK), None);
    }
}

/// Acquires a lock when its thread ends, and sends the results.
struct LockOnThreadExit(RedisMgr, mpsc::Sender<Result<(), LockError>>);

impl Drop for LockOnThreadExit {
    fn drop(&mut self) {
        let _ = self.1.send(self.0.lock_reentrant("x").map(drop));
        let _ = self.1.send(self.0.lock("x").map(drop));
    }
}

/// The thread's table of held locks has been destroyed by then. A panic in a destructor of thread
/// storage would abort the process.
#[test]
fn reentrant_lock_in_a_late_destructor_is_refused() {
    thread_local!(static LATE: RefCell<Option<LockOnThreadExit>> = const { RefCell::new(None) });
    let server = RedisServer::start();
    let mgr = manager(&server);
    let (sender, results) = mpsc::channel();
    // Thread storage is destroyed in reverse order of first use, so the table of held locks is
    // destroyed before LATE.
    let thread = spawn_call(&mgr, "y", move |mgr, name| {
        LATE.set(Some(LockOnThreadExit(mgr.clone(), sender)));
        drop(mgr.lock_reentrant(name).unwrap());
    });
    thread.join().unwrap();
    let refused = results.recv().unwrap().unwrap_err();
    assert!(
        matches!(&refused, LockError::InvalidOptions { .. })
            && refused.to_string().contains("thread"),
        "{refused}"
    );
    results.recv().unwrap().unwrap();
    assert_eq!(get(&server, LOCK), None);
}

/// Promise: P6
#[test]
fn thread_does_not_wait_for_its_own_reentrant_lock() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock_reentrant("x").unwrap();
    let (rw, permits) = (mgr.rw_lock("x").unwrap(), mgr.semaphore("x", 2).unwrap());
    for error in [
        mgr.lock("x").map(drop),
        mgr.try_lock_for("x", 600 * SECOND).map(drop),
        mgr.lock_all(["a", "x"]).map(drop),
        rw.read().map(drop),
        rw.write().map(drop),
        permits.acquire().map(drop),
    ] {
        let error = error.unwrap_err();
        assert!(matches!(error, LockError::WouldDeadlock { .. }), "{error:?}");
        assert!(error.to_string().contains("lock \"x\": this thread holds it"), "{error}");
    }
    assert!(
        mgr.try_lock("x").unwrap_err().is_contended(),
        "a call that does not wait names the holder"
    );
    assert!(guard.is_held() && !mgr.is_locked("a").unwrap());
    // Another thread can wait.
    let waiting = spawn_call(&mgr, "x", |mgr, name| mgr.lock(name).map(drop));
    await_queue_length(&server, "x", 1);
    drop(guard);
    completes_within(CALL_LIMIT, "the lock", || waiting.join().unwrap()).unwrap();
    // What ends without a release can be waited for.
    let options = with_ttl(SECOND).max_hold(SECOND / 5);
    let _guard = mgr.lock_reentrant_with("x", &options).unwrap();
    drop(mgr.lock("x").unwrap());
}

#[test]
fn wait_for_a_lock_of_the_same_thread_is_logged() {
    let test = "acquire::reentrant::wait_for_a_lock_of_the_same_thread_is_logged";
    if !in_own_process(test, &[]) {
        return;
    }
    let logged = capture_log(log::LevelFilter::Warn);
    let server = RedisServer::start();
    let mgr = manager(&server);
    let own = mgr.lock("x").unwrap();
    let (sender, receiver) = mpsc::channel();
    // The guard goes to another thread, so the wait is not a deadlock.
    let other = spawn_call(&server.url(), "x", move |_, _| {
        let guard: distlock::LockGuard = receiver.recv().unwrap();
        eventually("the waiter is warned", TEST_TIMEOUT, || {
            logged.lock().iter().any(|line| line.contains("\"x\", which it has acquired itself"))
        });
        drop(guard);
    });
    sender.send(own).unwrap();
    drop(mgr.lock("x").unwrap());
    other.join().unwrap();
}

#[test]
fn error_says_that_the_thread_has_the_lock_itself() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    let _guard = mgr.lock("x").unwrap();
    let says_so = |error: LockError| error.to_string().contains("this thread has acquired it");
    assert!(says_so(mgr.try_lock("x").unwrap_err()));
    assert!(says_so(mgr.try_lock_for("x", Duration::from_millis(50)).unwrap_err()));
    assert!(!says_so(other.try_lock("x").unwrap_err()), "another manager cannot know");
    let on_other_thread = spawn_call(&mgr, "x", |mgr, name| mgr.try_lock(name).unwrap_err());
    assert!(!says_so(on_other_thread.join().unwrap()));
}
