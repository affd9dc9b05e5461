//! A lock that its thread can take again.

use std::{
    cell::RefCell,
    sync::{Arc, mpsc},
    time::Duration,
};

use distlock::{HandleEvent, LockError, RedisMgr, ReentrantGuard, Released, ReleasedEvent};
use parking_lot::Mutex;

use crate::{
    helpers::{
        CALL_LIMIT, SECOND, await_queued, completes_within, config_long_timeouts, fence_key, get,
        in_thread, manager, with_ttl,
    },
    support::{CEILING, RedisServer, eventually},
};

const LOCK: &str = "lock:x";

#[test]
fn nested_calls_count_and_the_last_drop_releases() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let outer = mgr.lock_reentrant("x").unwrap();
    let inner = mgr.lock_reentrant("x").unwrap();
    let innermost = mgr.lock_reentrant_with("x", &with_ttl(SECOND).wait(Duration::ZERO)).unwrap();
    assert_eq!([outer.hold_count(), inner.hold_count(), innermost.hold_count()], [3; 3]);
    assert_eq!(inner.fencing_token(), outer.fencing_token());
    assert_eq!(inner.id(), innermost.id());
    // In any order.
    drop(outer);
    drop(innermost);
    assert_eq!(inner.hold_count(), 1);
    assert_eq!(get(&server, LOCK).as_deref(), Some(inner.id().as_str()));
    drop(inner);
    assert_eq!(server.keys(), [fence_key("x")]);
    assert_eq!(mgr.lock_reentrant("x").unwrap().hold_count(), 1);
}

#[test]
fn taking_it_again_costs_no_round_trip() {
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
fn each_hold_says_how_its_release_went() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let (outer, inner) = (mgr.lock_reentrant("x").unwrap(), mgr.lock_reentrant("x").unwrap());
    assert_eq!(inner.release().unwrap(), None);
    assert!(get(&server, LOCK).is_some());
    assert_eq!(outer.release().unwrap(), Some(Released::Released));
    assert_eq!(get(&server, LOCK), None);
}

#[test]
fn other_threads_and_other_managers_are_kept_out() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    let outer = mgr.lock_reentrant("x").unwrap();
    let now = with_ttl(SECOND).wait(Duration::ZERO);
    assert!(other.lock_reentrant_with("x", &now).unwrap_err().is_contended());
    let refused =
        in_thread(&mgr, "x", move |mgr, name| mgr.lock_reentrant_with(name, &now).map(drop))
            .join()
            .unwrap();
    assert!(refused.unwrap_err().is_contended());

    let waiting =
        in_thread(&mgr, "x", |mgr, name| mgr.lock_reentrant(name).map(|guard| guard.hold_count()));
    await_queued(&server, "x", 1);
    drop(outer);
    assert_eq!(waiting.join().unwrap().unwrap(), 1);
}

#[test]
fn names_are_counted_apart() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let (x, y) = (mgr.lock_reentrant("x").unwrap(), mgr.lock_reentrant("y").unwrap());
    assert_eq!((x.hold_count(), y.hold_count()), (1, 1));
    drop(x);
    assert!(get(&server, LOCK).is_none() && get(&server, "lock:y").is_some());
}

#[test]
fn a_lost_lock_is_not_entered_again_until_all_holds_are_gone() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let outer = mgr.lock_reentrant_with("x", &with_ttl(3 * SECOND)).unwrap();
    let inner = mgr.lock_reentrant("x").unwrap();
    server.cli(&["DEL", LOCK]);
    eventually("the loss is known", CEILING, || !outer.is_held());
    assert!(matches!(mgr.lock_reentrant("x"), Err(LockError::Lost { .. })));
    assert!(matches!(inner.release(), Err(LockError::Lost { .. })));
    drop(outer);
    let again = mgr.lock_reentrant("x").unwrap();
    assert!(again.is_held());
    assert_eq!(again.hold_count(), 1);
}

#[test]
fn a_panic_lets_go_of_every_hold() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let panicked = in_thread(&mgr, "x", |mgr, name| {
        let _outer = mgr.lock_reentrant(name).unwrap();
        let _inner = mgr.lock_reentrant(name).unwrap();
        std::panic::resume_unwind(Box::new("work went wrong"));
    });
    assert!(panicked.join().is_err());
    assert_eq!(get(&server, LOCK), None);
}

#[test]
fn a_thread_that_ends_with_a_hold_in_its_storage_releases_it() {
    thread_local!(static KEPT: RefCell<Option<ReentrantGuard>> = const { RefCell::new(None) });
    let server = RedisServer::start();
    let mgr = manager(&server);
    let kept = in_thread(&mgr, "x", |mgr, name| {
        let guard = mgr.lock_reentrant(name).unwrap();
        KEPT.with(|kept| kept.replace(Some(guard)));
    });
    kept.join().unwrap();
    eventually("it is released", CEILING, || get(&server, LOCK).is_none());
}

#[test]
fn an_ordinary_lock_is_not_reentrant_and_says_who_has_it() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock("x").unwrap();
    let error = completes_within(CALL_LIMIT, "the wait", || {
        mgr.try_lock_for("x", Duration::from_millis(100)).unwrap_err()
    });
    assert!(error.is_timeout());
    assert_eq!(error.holder().unwrap().lock_id().as_ref(), Some(guard.id()));
    assert_eq!(error.holder().unwrap().pid(), Some(std::process::id()));
    // Nor are the two kinds one.
    let now = with_ttl(SECOND).wait(Duration::ZERO);
    assert!(mgr.lock_reentrant_with("x", &now).unwrap_err().is_contended());
}

thread_local!(static TAKEN: RefCell<Option<ReentrantGuard>> = const { RefCell::new(None) });

/// Takes the lock again, once, when it is told of a release.
#[derive(Debug, Default)]
struct Again(Mutex<Option<RedisMgr>>);

impl HandleEvent for Again {
    fn released(&self, event: &ReleasedEvent<'_>) {
        let mgr = self.0.lock().take();
        if let Some(mgr) = mgr {
            TAKEN.set(Some(mgr.lock_reentrant(event.lock()).unwrap()));
        }
    }
}

#[test]
fn what_is_taken_again_while_it_is_released_can_be_entered() {
    let server = RedisServer::start();
    let handler = Arc::new(Again::default());
    let mgr =
        RedisMgr::new(config_long_timeouts(server.url()).event_handler(handler.clone())).unwrap();
    for asks in [true, false] {
        let guard = mgr.lock_reentrant("x").unwrap();
        *handler.0.lock() = Some(mgr.clone());
        if asks {
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

/// Locks when its thread ends, and says how that went.
struct Late(RedisMgr, mpsc::Sender<Result<(), LockError>>);

impl Drop for Late {
    fn drop(&mut self) {
        let _ = self.1.send(self.0.lock_reentrant("x").map(drop));
        let _ = self.1.send(self.0.lock("x").map(drop));
    }
}

/// A panic in there would end the process.
#[test]
fn a_thread_that_has_forgotten_what_it_holds_is_refused() {
    thread_local!(static LATE: RefCell<Option<Late>> = const { RefCell::new(None) });
    let server = RedisServer::start();
    let mgr = manager(&server);
    let (sender, said) = mpsc::channel();
    // What is used first goes last: the table of what is held is gone by then.
    let ends = in_thread(&mgr, "y", move |mgr, name| {
        LATE.set(Some(Late(mgr.clone(), sender)));
        drop(mgr.lock_reentrant(name).unwrap());
    });
    ends.join().unwrap();
    let refused = said.recv().unwrap().unwrap_err();
    assert!(
        matches!(&refused, LockError::InvalidOptions { .. })
            && refused.to_string().contains("thread"),
        "{refused}"
    );
    said.recv().unwrap().unwrap();
    assert_eq!(get(&server, LOCK), None);
}
