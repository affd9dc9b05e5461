//! `Config::yield_to_others`: locks that are left free for clients that do not queue.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use distlock::{Config, LockError, RedisMgr};

use crate::{
    helpers::{
        Defer, SECOND, UnwrapReleased, config_long_timeouts, foreign_release, get, queue_key,
        queue_length, set_foreign_lock, spawn_queued_waiter, token_key,
    },
    support::{RedisServer, TEST_TIMEOUT, eventually},
};

/// Longer than a test waits for anything.
const LONG_PAUSE: Duration = Duration::from_secs(10);

fn yielding_manager(server: &RedisServer, pause: Duration) -> RedisMgr {
    RedisMgr::new(config_long_timeouts(server.url()).yield_to_others(pause)).unwrap()
}

#[test]
fn lock_left_free_goes_to_a_client_that_does_not_queue() {
    let server = RedisServer::start();
    let mgr = yielding_manager(&server, LONG_PAUSE);
    let first = mgr.lock("job").unwrap();
    let waiting = spawn_queued_waiter(&server, &mgr, "job");
    let last_token = first.fencing_token();
    first.release().unwrap().unwrap_released();

    match mgr.try_lock("job") {
        Err(LockError::Held { holder, .. }) => {
            assert_eq!(holder.id(), "left free for other clients");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(get(&server, "lock:job"), None);
    assert!(set_foreign_lock(&server, "lock:job", "lock_1", 30_000));
    assert_eq!(queue_length(&server, "job"), 1);
    assert_eq!(mgr.holder("job").unwrap().unwrap().id(), "lock_1");
    assert!(foreign_release(&server, "lock:job", "lock_1"));
    // The pause has not ended, so ends here.
    server.cli(&["DEL", &token_key("job")]);

    let second = waiting.join().unwrap().unwrap();
    assert!(second.fencing_token() > last_token);
}

#[test]
fn waiter_gets_a_lock_that_was_left_free_and_not_taken() {
    let server = RedisServer::start();
    let mgr = yielding_manager(&server, Duration::from_millis(20));
    let first = mgr.lock("job").unwrap();
    let waiting = spawn_queued_waiter(&server, &mgr, "job");
    first.release().unwrap().unwrap_released();
    waiting.join().unwrap().unwrap().release().unwrap().unwrap_released();
    assert!(!server.keys().contains(&token_key("job")));
}

#[test]
fn dead_waiter_is_skipped_where_the_lock_would_be_left_free() {
    let server = RedisServer::start();
    let mgr = yielding_manager(&server, LONG_PAUSE);
    let first = mgr.lock("job").unwrap();
    server.cli(&["RPUSH", &queue_key("job"), "1000 distlock:client:dead dead"]);
    let waiting = spawn_queued_waiter(&server, &mgr, "job");
    first.release().unwrap().unwrap_released();
    drop(waiting.join().unwrap().unwrap());
    assert_eq!(queue_length(&server, "job"), 0);
}

#[test]
fn client_that_does_not_queue_gets_in_beside_a_busy_queue() {
    let server = RedisServer::start();
    let mgr = yielding_manager(&server, Duration::from_millis(50));
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let _stop_at_the_end = Defer(|| stop.store(true, Ordering::Relaxed));
        for _ in 0..3 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    mgr.lock("job").unwrap().release().unwrap().unwrap_released();
                }
            });
        }
        for _ in 0..5 {
            eventually("it gets the lock", TEST_TIMEOUT, || {
                set_foreign_lock(&server, "lock:job", "lock_1", 30_000)
            });
            assert!(foreign_release(&server, "lock:job", "lock_1"));
        }
    });
}

#[test]
fn pause_is_limited() {
    let config = Config::new("redis://127.0.0.1:1").yield_to_others(11 * SECOND);
    let error = RedisMgr::new(config).unwrap_err();
    assert!(error.to_string().contains("at most 10s"), "{error}");
}
