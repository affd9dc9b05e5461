//! Threads of one manager that wait for the same lock behind one of them, which asks the server.

use std::{
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    thread,
    time::Duration,
};

use distlock::{CancelToken, Config, HandleEvent, LockOptions, RedisMgr};
use parking_lot::Mutex;

use crate::{
    helpers::{
        SECOND, UnwrapReleased, await_queue_length, capture_log, config_long_timeouts,
        config_short_timeout, in_own_process, manager, spawn_call,
    },
    support::{RedisServer, TEST_TIMEOUT, eventually},
};

const HOUR: Duration = Duration::from_secs(3600);

/// Says when a call has found the servers unreachable, or has timed out. Blocks in a report of a
/// timeout until `opened` disconnects.
#[derive(Debug)]
struct Reports {
    sender: Sender<()>,
    opened: Mutex<Receiver<()>>,
}

impl Reports {
    /// Adds a handler, and returns what it reports and what keeps it blocked.
    fn of(config: Config) -> (RedisMgr, Receiver<()>, Sender<()>) {
        let (sender, reports) = channel();
        let (blocks, opened) = channel();
        let handler = Reports { sender, opened: Mutex::new(opened) };
        (RedisMgr::new(config.event_handler(Arc::new(handler))).unwrap(), reports, blocks)
    }
}

impl HandleEvent for Reports {
    fn retrying(&self, _: &distlock::RetryingEvent<'_>) {
        let _ = self.sender.send(());
    }

    fn timed_out(&self, _: &distlock::TimedOutEvent<'_>) {
        let _ = self.sender.send(());
        let _ = self.opened.lock().recv();
    }
}

/// A thread that asks the server goes on for an hour. A thread that comes later, and waits behind
/// it, must not notice the outage only then.
///
/// Promise: P6
/// Fault: N251
#[test]
fn thread_that_comes_during_an_outage_asks_the_server_too() {
    let server = RedisServer::start();
    let config = config_short_timeout(server.url()).local_handover(SECOND);
    let (mgr, reports, _blocks) = Reports::of(config);
    drop(mgr.lock("x").unwrap());
    server.kill();
    let token = CancelToken::new();
    let options = LockOptions::new().wait(HOUR).cancel(&token);
    let first = spawn_call(&mgr, "x", move |mgr, name| mgr.lock_with(name, &options).map(drop));
    reports.recv_timeout(TEST_TIMEOUT).unwrap();
    let options = LockOptions::new().ttl(SECOND);
    let later = spawn_call(&mgr, "x", move |mgr, name| mgr.lock_with(name, &options).map(drop));
    eventually("the later call fails", TEST_TIMEOUT, || later.is_finished());
    assert!(later.join().unwrap().unwrap_err().is_unavailable());
    token.cancel();
    assert!(first.join().unwrap().unwrap_err().is_cancelled());
}

/// The thread that asks the server for all of its process gives up, and its handler blocks.
///
/// Promise: P4
/// Fault: N252
#[test]
fn handler_that_blocks_after_a_timeout_delays_no_other_thread() {
    let server = RedisServer::start();
    let (mgr, reports, blocks) =
        Reports::of(config_long_timeouts(server.url()).local_handover(SECOND));
    let held = manager(&server).lock("x").unwrap();
    let first = spawn_call(&mgr, "x", |mgr, name| {
        mgr.try_lock_for(name, Duration::from_millis(50)).map(drop)
    });
    reports.recv_timeout(TEST_TIMEOUT).unwrap();
    let next = spawn_call(&mgr, "x", |mgr, name| mgr.lock(name).map(drop));
    await_queue_length(&server, "x", 1);
    held.release().unwrap().unwrap_released();
    eventually("the next thread has had the lock", TEST_TIMEOUT, || next.is_finished());
    next.join().unwrap().unwrap();
    drop(blocks);
    assert!(first.join().unwrap().unwrap_err().is_timeout());
}

/// The id on the server is that of the thread to which the server granted the lock. It has passed
/// the lock on, and now waits for it again.
#[test]
fn thread_that_passed_a_lock_on_is_not_said_to_hold_it() {
    let test = "wait::in_process::thread_that_passed_a_lock_on_is_not_said_to_hold_it";
    if !in_own_process(test, &[]) {
        return;
    }
    let logged = capture_log(log::LevelFilter::Warn);
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_long_timeouts(server.url()).local_handover(SECOND)).unwrap();
    let pass_on = |_| {
        let own = mgr.lock("x").unwrap();
        let id = own.id().clone();
        let next = spawn_call(&mgr, "x", |mgr, name| mgr.lock(name).unwrap());
        eventually("another thread calls", TEST_TIMEOUT, || mgr.metrics().waiting() > 0);
        own.release().unwrap().unwrap_released();
        let guard = next.join().unwrap();
        // If the thread came too late, the server has granted it the lock.
        (*guard.id() == id).then_some(guard)
    };
    let passed = (0..100).find_map(pass_on).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            await_queue_length(&server, "x", 1);
            passed.release().unwrap().unwrap_released();
        });
        drop(mgr.lock("x").unwrap());
    });
    assert!(!logged.lock().iter().any(|line| line.contains("acquired itself")), "{logged:?}");
}
