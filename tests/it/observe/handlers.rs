//! Event handlers that panic or block do not affect locks.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use distlock::{
    AcquiredEvent, AttemptedEvent, ContendedEvent, HandleEvent, LockLost, LostEvent, RedisMgr,
    ReleasedEvent, RenewedEvent, TimedOutEvent,
};
use parking_lot::{Condvar, Mutex};

use super::recorder::{Recorder, recorded};
use crate::{
    helpers::{
        UnwrapReleased, await_queue_length, capture_log, config_long_timeouts, expect_loss, get,
        in_own_process, manager, spawn_call, spawn_queued_waiter, with_ttl,
    },
    support::{Monitor, RedisServer, TEST_TIMEOUT, eventually},
};

const TTL: Duration = Duration::from_secs(3);

fn renewals(commands: &Monitor) -> usize {
    commands.lines().iter().filter(|line| line.contains("lua] \"PEXPIRE\" \"lock:x\"")).count()
}

/// Blocks in one kind of event until it is released, or panics in every event. Counts the events.
#[derive(Debug, Default)]
struct BadHandler {
    calls: AtomicUsize,
    /// The event in which it blocks; `None` if it panics.
    blocks_in: Option<&'static str>,
    released: (Mutex<bool>, Condvar),
}

impl BadHandler {
    fn act(&self, event: &str) {
        self.calls.fetch_add(1, Ordering::SeqCst);
        match self.blocks_in {
            None => panic!("the handler panics in {event}"),
            Some(blocks_in) if blocks_in == event => {
                let mut released = self.released.0.lock();
                self.released.1.wait_while(&mut released, |released| !*released);
            }
            Some(_) => {}
        }
    }

    fn release(&self) {
        *self.released.0.lock() = true;
        self.released.1.notify_all();
    }
}

impl HandleEvent for BadHandler {
    fn attempted(&self, _: &AttemptedEvent<'_>) {
        self.act("attempted");
    }
    fn contended(&self, _: &ContendedEvent<'_>) {
        self.act("contended");
    }
    fn acquired(&self, _: &AcquiredEvent<'_>) {
        self.act("acquired");
    }
    fn renewed(&self, _: &RenewedEvent<'_>) {
        self.act("renewed");
    }
    fn lost(&self, _: &LostEvent<'_>) {
        self.act("lost");
    }
    fn released(&self, _: &ReleasedEvent<'_>) {
        self.act("released");
    }
    fn timed_out(&self, _: &TimedOutEvent<'_>) {
        self.act("timed out");
    }
}

/// Fault: F13
#[test]
fn panicking_handler_is_logged_once_and_harms_no_lock() {
    let name = "observe::handlers::panicking_handler_is_logged_once_and_harms_no_lock";
    if !in_own_process(name, &[]) {
        return;
    }
    let logged = capture_log(log::LevelFilter::Warn);
    let server = RedisServer::start();
    let (handler, events) = (Arc::new(BadHandler::default()), Arc::new(Recorder::default()));
    // The handler after it still receives all events.
    let mgr = RedisMgr::new(
        config_long_timeouts(server.url())
            .event_handler(handler.clone())
            .event_handler(events.clone()),
    )
    .unwrap();
    let guard = mgr.lock_with("x", &with_ttl(TTL)).unwrap();
    mgr.try_lock("x").unwrap_err();
    eventually("the lock is renewed twice", TEST_TIMEOUT, || events.count("renewed x ") >= 2);
    assert!(guard.is_held());
    guard.release().unwrap().unwrap_released();
    let guard = mgr.lock_with("x", &with_ttl(TTL)).unwrap();
    server.cli(&["DEL", "lock:x"]);
    assert_eq!(expect_loss(&guard), LockLost::Gone);
    events.expect("lost x ");
    assert!(handler.calls.load(Ordering::SeqCst) >= 10);
    assert_eq!(logged.lock().iter().filter(|line| line.contains("handler panicked")).count(), 1);
}

/// Fault: N19
#[test]
fn blocking_handler_harms_no_lock() {
    let server = RedisServer::start();
    for blocks_in in ["renewed", "lost", "contended"] {
        let handler = Arc::new(BadHandler { blocks_in: Some(blocks_in), ..BadHandler::default() });
        let mgr = RedisMgr::new(config_long_timeouts(server.url()).event_handler(handler.clone()))
            .unwrap();
        let guard = mgr.lock_with("x", &with_ttl(TTL)).unwrap();
        let vanishing = mgr.lock_with("y", &with_ttl(TTL)).unwrap();
        server.cli(&["DEL", "lock:y"]);
        mgr.try_lock("x").unwrap_err();
        assert_eq!(expect_loss(&vanishing), LockLost::Gone);
        let commands = server.monitor();
        eventually("the lock is renewed", TEST_TIMEOUT, || renewals(&commands) >= 3);
        assert!(guard.is_held(), "{blocks_in}");
        // Waiters get the lock.
        let waiting = spawn_queued_waiter(&server, &mgr, "x");
        let behind = spawn_queued_waiter(&server, &mgr, "x");
        guard.release().unwrap().unwrap_released();
        drop(waiting.join().unwrap().unwrap());
        drop(behind.join().unwrap().unwrap());
        mgr.shutdown();
        handler.release();
    }
}

#[test]
fn events_beyond_the_queue_limit_are_dropped_and_counted() {
    let server = RedisServer::start();
    let handler = Arc::new(BadHandler { blocks_in: Some("contended"), ..BadHandler::default() });
    let mgr =
        RedisMgr::new(config_long_timeouts(server.url()).event_handler(handler.clone())).unwrap();
    let guard = mgr.lock("x").unwrap();
    for _ in 0..1_100 {
        mgr.try_lock("x").unwrap_err();
    }
    let metrics = mgr.metrics();
    assert_eq!((metrics.contended(), metrics.timed_out()), (1_100, 1_100));
    // The handler has one, and 1,024 are in the queue.
    assert_eq!(metrics.reports_dropped(), 1_100 - 1_024 - 1);
    handler.release();
    guard.release().unwrap().unwrap_released();
}

/// `acquired` is called on the thread that acquires the lock. A handler that blocks there delays
/// only that thread.
#[test]
fn lock_is_renewed_while_acquired_handler_blocks() {
    let server = RedisServer::start();
    let handler = Arc::new(BadHandler { blocks_in: Some("acquired"), ..BadHandler::default() });
    let mgr =
        RedisMgr::new(config_long_timeouts(server.url()).event_handler(handler.clone())).unwrap();
    let commands = server.monitor();
    let blocked = spawn_call(&mgr, "x", |mgr, name| mgr.lock_with(name, &with_ttl(TTL)));
    eventually("the lock is renewed before lock_with returns", TEST_TIMEOUT, || {
        renewals(&commands) >= 3
    });
    let other = manager(&server);
    let waiting = spawn_call(&other, "x", |mgr, name| mgr.lock(name));
    await_queue_length(&server, "x", 1);
    handler.release();
    let guard = blocked.join().unwrap().unwrap();
    assert!(guard.is_held());
    guard.release().unwrap().unwrap_released();
    drop(waiting.join().unwrap().unwrap());
}

#[test]
fn outbox_thread_lives_as_long_as_its_manager() {
    let name = "observe::handlers::outbox_thread_lives_as_long_as_its_manager";
    if !in_own_process(name, &[]) {
        return;
    }
    let threads = || {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().filter_map(Result::ok);
        let name = |task: std::fs::DirEntry| {
            std::fs::read_to_string(task.path().join("comm")).unwrap_or_default()
        };
        tasks.map(name).filter(|name| name.trim() == "distlock-outbox").count()
    };
    let server = RedisServer::start();
    let (events, mgr) = recorded(config_long_timeouts(server.url()));
    // The thread sets its name once it runs.
    eventually("the thread runs", TEST_TIMEOUT, || threads() == 1);
    let guard = mgr.lock("x").unwrap();
    drop(mgr);
    assert_eq!(threads(), 1, "a guard keeps its manager alive");
    drop(guard);
    eventually("the thread ends", TEST_TIMEOUT, || threads() == 0);
    eventually("the handler is dropped", TEST_TIMEOUT, || Arc::strong_count(&events) == 1);
    assert_eq!(get(&server, "lock:x"), None);
}

/// Waits in the first `acquired` until as many locks have been renewed.
#[derive(Debug)]
struct SlowHandler {
    renewed: Mutex<BTreeSet<String>>,
    wanted: usize,
}

impl HandleEvent for SlowHandler {
    fn acquired(&self, _: &AcquiredEvent<'_>) {
        let are_renewed = || self.renewed.lock().len() == self.wanted;
        eventually("all locks are renewed", TEST_TIMEOUT, are_renewed);
    }

    fn renewed(&self, event: &RenewedEvent<'_>) {
        self.renewed.lock().insert(event.lock().to_owned());
    }
}

/// Promise: P2
#[test]
fn slow_handler_of_one_lock_does_not_cost_the_others() {
    let server = RedisServer::start();
    let names = ["x", "y", "z"];
    let handler = Arc::new(SlowHandler { renewed: Mutex::default(), wanted: names.len() });
    let config = config_long_timeouts(server.url()).ttl(TTL).event_handler(handler);
    let guard = RedisMgr::new(config).unwrap().try_lock_all(names).unwrap();
    assert!(guard.is_held());
}
