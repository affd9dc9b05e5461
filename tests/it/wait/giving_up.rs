//! Waiters that give up: what they report, what they leave, and that others are still served.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use distlock::{LockError, LockOptions};
use parking_lot::Mutex;

use super::{LOCK, is_woken_without_polling};
use crate::{
    helpers::{
        CALL_LIMIT, FENCE, SECOND, UnwrapReleased, await_queue_length, completes_within,
        config_long_timeouts, config_medium_timeout, get, manager, queue_key, queue_length,
        server_behind_proxy, spawn_call, spawn_queued_waiter, timed,
    },
    support::{Fault, RedisServer, TEST_TIMEOUT, command, eventually},
    worker::work,
};

/// Fault: F61
/// Promise: P4
#[test]
fn timeout_names_the_holder_and_leaves_no_queue_entry() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    let guard = mgr.lock("x").unwrap();
    let wait = Duration::from_millis(200);
    let error =
        completes_within(60 * SECOND, "the wait", || other.try_lock_for("x", wait).unwrap_err());
    let LockError::Timeout { name, holder, waited, .. } = &error else { panic!("{error:?}") };
    assert_eq!((name.as_str(), holder.as_ref().unwrap().id()), ("x", guard.id().as_str()));
    assert!(*waited >= wait, "{waited:?}");
    assert!(error.is_timeout() && error.is_contended());
    eventually("it has left the queue", 20 * SECOND, || {
        !server.query::<bool>(&["EXISTS", &queue_key("x")])
    });
    assert_eq!(get(&server, LOCK).as_deref(), Some(guard.id().as_str()));
    guard.release().unwrap().unwrap_released();
    assert_eq!(get(&server, LOCK), None);
}

/// The lock changes hands just before the last request.
#[test]
fn timeout_names_the_latest_holder() {
    let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    let guard = manager(&server).lock("x").unwrap();
    let leaving =
        proxy.on_request(|words| words.iter().any(|word| word == b"leave"), Fault::HoldRequest);
    let waiting = spawn_call(&mgr, "x", |mgr, name| mgr.try_lock_for(name, SECOND).map(drop));
    leaving.wait_fired();
    server.cli(&["SET", LOCK, "a stranger", "PX", "600000"]);
    leaving.release();
    let error = waiting.join().unwrap().unwrap_err();
    assert!(error.is_timeout(), "{error:?}");
    assert_eq!(error.holder().unwrap().id(), "a stranger");
    drop(guard);
}

/// Fault: F61
#[test]
fn wait_time_may_be_of_any_length() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    for wait in [Duration::ZERO, Duration::from_nanos(1), Duration::from_micros(1), Duration::MAX] {
        drop(mgr.lock_with("x", &LockOptions::new().wait(wait)).unwrap());
    }
    let guard = mgr.lock("x").unwrap();
    assert!(matches!(other.try_lock_for("x", Duration::ZERO), Err(LockError::Held { .. })));
    assert!(matches!(
        other.try_lock_for("x", Duration::from_nanos(1)),
        Err(LockError::Timeout { .. })
    ));
    let waiting = spawn_call(&other, "x", |mgr, name| mgr.try_lock_for(name, Duration::MAX));
    await_queue_length(&server, "x", 1);
    guard.release().unwrap().unwrap_released();
    assert!(waiting.join().unwrap().unwrap().is_held());
}

#[test]
fn waiters_that_give_up_do_not_delay_the_others() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    let guard = mgr.lock("x").unwrap();
    let served = Mutex::new(Vec::new());
    let queue = || server.query::<Vec<String>>(&["LRANGE", &queue_key("x"), "0", "-1"]);
    thread::scope(|threads| {
        for number in 0..6 {
            let before = queue();
            let served = &served;
            let mgr = if number % 2 == 0 { &mgr } else { &other };
            let waiting = threads.spawn(move || match number {
                // The first, and two in the middle.
                0 | 2 | 3 => assert!(mgr.try_lock_for("x", 2 * SECOND).unwrap_err().is_timeout()),
                _ => {
                    let guard = mgr.lock("x").unwrap();
                    served.lock().push(number);
                    drop(guard);
                }
            });
            eventually("it is queue_length, or has timed out", TEST_TIMEOUT, || {
                waiting.is_finished() || queue().iter().any(|entry| !before.contains(entry))
            });
        }
        await_queue_length(&server, "x", 3);
        guard.release().unwrap().unwrap_released();
    });
    assert_eq!(*served.lock(), [1, 4, 5]);
}

/// Goal: if a waiter is granted the lock while it gives up, the grant goes to the next waiter.
/// Method: the release comes later after each waiter that was still there, and earlier after each
/// that had gone, so that it soon comes at the moment of leaving. A lost grant would block the lock
/// for the claim window of 20 s. Another waiter keeps the subscription open, because the server
/// skips waiters without a subscriber.
///
/// Fault: F61
#[test]
fn grant_to_a_leaving_waiter_is_passed_on() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    let other_guard = mgr.lock("other").unwrap();
    let listening = spawn_queued_waiter(&server, &other, "other");
    let (mut delay, mut served, mut gone) = (Duration::from_millis(5), 0, 0);
    eventually("many were served, and many had gone", TEST_TIMEOUT, || {
        let guard = mgr.lock("x").unwrap();
        let leaving = spawn_call(&other, "x", |mgr, name| {
            mgr.try_lock_for(name, Duration::from_millis(5)).map(drop)
        });
        work(delay);
        guard.release().unwrap().unwrap_released();
        if leaving.join().unwrap().is_ok() {
            served += 1;
            delay += Duration::from_micros(100);
        } else {
            gone += 1;
            delay = delay.saturating_sub(Duration::from_micros(100));
        }
        completes_within(CALL_LIMIT, "the next", || {
            mgr.try_lock_for("x", 60 * SECOND).unwrap().release().unwrap().unwrap_released()
        });
        served >= 40 && gone >= 40
    });
    eventually("the queue is empty", TEST_TIMEOUT, || queue_length(&server, "x") == 0);
    other_guard.release().unwrap().unwrap_released();
    drop(listening.join().unwrap().unwrap());
}

/// One thread of a manager reads the subscription for all. When it gives up, grants must still wake
/// the others at once.
///
/// Promise: P4
#[test]
fn another_thread_listens_if_the_leader_gives_up() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    let commands = server.monitor();
    let woken = (0..15).filter(|_| {
        let guard = mgr.lock("x").unwrap();
        let listening = spawn_call(&other, "x", |mgr, name| {
            mgr.try_lock_for(name, Duration::from_millis(300)).map(drop)
        });
        eventually("it is queued", TEST_TIMEOUT, || {
            queue_length(&server, "x") == 1 || listening.is_finished()
        });
        let waiting = spawn_call(&other, "x", |mgr, name| mgr.lock(name));
        assert!(listening.join().unwrap().unwrap_err().is_timeout());
        await_queue_length(&server, "x", 1);
        is_woken_without_polling(&server, &commands, guard, waiting)
    });
    let woken = woken.count();
    assert!(woken > 7, "{woken} of 15 were woken");
}

/// A call whose time ends before the subscription is open has learned nothing about the server.
///
/// Fault: N44
#[test]
fn short_waits_do_not_keep_others_from_subscribing() {
    let (server, proxy, mgr) = server_behind_proxy(config_medium_timeout);
    let holder = manager(&server).lock("x").unwrap();
    proxy.on_request(command("subscribe"), Fault::DelayReply(Duration::from_millis(30))).forever();
    let (stop, calls) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let short_waits = [(); 4].map(|()| {
        let (stop, calls) = (stop.clone(), calls.clone());
        spawn_call(&mgr, "x", move |mgr, name| {
            while !stop.load(Ordering::Relaxed) {
                assert!(mgr.try_lock_for(name, Duration::from_millis(10)).is_err());
                calls.fetch_add(1, Ordering::Relaxed);
            }
        })
    });
    let attempts = || server.commandstats().get("subscribe").copied().unwrap_or(0);
    // If starting to subscribe takes longer than their wait, they do not even try.
    eventually("they have tried to subscribe", TEST_TIMEOUT, || {
        attempts() > 9 || calls.load(Ordering::Relaxed) > 500
    });
    let waiting = spawn_call(&mgr, "x", |mgr, name| mgr.lock(name));
    eventually("it is queued", CALL_LIMIT, || queue_length(&server, "x") > 0);
    stop.store(true, Ordering::Relaxed);
    short_waits.into_iter().for_each(|thread| thread.join().unwrap());
    holder.release().unwrap().unwrap_released();
    drop(waiting.join().unwrap().unwrap());
}

/// Goal: no waiter misses its turn. The thread that listens for all threads of its manager must
/// pass that duty on whenever it leaves, whether with the lock or without it.
#[test]
fn no_waiter_misses_its_turn_while_others_give_up() {
    const NAMES: [&str; 3] = ["a", "b", "c"];
    let server = RedisServer::start();
    let mgr = manager(&server);
    let taken = [const { AtomicBool::new(false) }; 3];
    let longest = Mutex::new(Duration::ZERO);
    thread::scope(|threads| {
        for _ in 0..30 {
            let (mgr, taken, longest) = (&mgr, &taken, &longest);
            threads.spawn(move || {
                for _ in 0..100 {
                    let index = fastrand::usize(..NAMES.len());
                    let (outcome, span) = timed(|| match fastrand::bool() {
                        true => mgr.lock(NAMES[index]),
                        false => mgr.try_lock_for(
                            NAMES[index],
                            Duration::from_micros(fastrand::u64(..6_000)),
                        ),
                    });
                    {
                        let mut longest = longest.lock();
                        *longest = longest.max(span);
                    }
                    match outcome {
                        Ok(guard) => {
                            assert!(
                                !taken[index].swap(true, Ordering::SeqCst),
                                "two holders at a time"
                            );
                            taken[index].store(false, Ordering::SeqCst);
                            guard.release().unwrap().unwrap_released();
                        }
                        Err(error) => assert!(error.is_contended(), "{error}"),
                    }
                }
            });
        }
    });
    let longest = longest.into_inner();
    println!("the longest wait took {longest:?}");
    assert!(longest < CALL_LIMIT, "a call waited for {longest:?}");
    eventually("the queue is empty", TEST_TIMEOUT, || {
        NAMES.iter().all(|name| queue_length(&server, name) == 0)
    });
    eventually("all locks are free", TEST_TIMEOUT, || server.keys() == [FENCE]);
}
