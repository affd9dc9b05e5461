//! Locks that pass from thread to thread of a process without the server.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use distlock::{
    CancelToken, Config, FencingToken, LockError, LockGuard, LockLost, LockOptions, RedisMgr,
};
use parking_lot::Mutex;

use crate::{
    helpers::{
        Defer, FENCE, SECOND, UnwrapReleased, await_queue_length, completes_within,
        config_long_timeouts, expect_loss, get, manager, pttl, queue_key, queue_length, spawn_call,
        spawn_queued_waiter, token_key, with_ttl,
    },
    support::{RedisServer, TEST_TIMEOUT, eventually},
};

const LOCK: &str = "lock:x";
const MILLISECOND: Duration = Duration::from_millis(1);

/// A configuration whose window is as long as possible.
fn config_long_window(server: &RedisServer) -> Config {
    config_long_timeouts(server.url()).local_handover(SECOND)
}

/// Number of calls of scripts so far.
fn script_calls(server: &RedisServer) -> u64 {
    server.calls("evalsha") + server.calls("eval")
}

/// Lets threads acquire and release a lock, each for this number of rounds. Returns the tokens,
/// which rise.
#[track_caller]
pub(crate) fn lock_in_turn(mgr: &RedisMgr, threads: usize, rounds: usize) -> Vec<FencingToken> {
    let (tokens, inside) = (Mutex::new(Vec::new()), AtomicBool::new(false));
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                for _ in 0..rounds {
                    let guard = mgr.lock("x").unwrap();
                    assert!(!inside.swap(true, Ordering::SeqCst), "two holders");
                    tokens.lock().push(guard.fencing_token());
                    assert!(guard.is_held());
                    assert!(inside.swap(false, Ordering::SeqCst));
                    guard.release().unwrap().unwrap_released();
                }
            });
        }
    });
    let tokens = tokens.into_inner();
    assert!(tokens.is_sorted_by(|one, next| one < next), "tokens do not rise");
    tokens
}

/// Promise: P3
#[test]
fn threads_pass_a_lock_on_without_the_server() {
    const THREADS: usize = 4;
    const ROUNDS: usize = 200;
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_long_window(&server)).unwrap();
    let before = script_calls(&server);
    let tokens = lock_in_turn(&mgr, THREADS, ROUNDS);
    assert_eq!((get(&server, LOCK), get(&server, &token_key("x"))), (None, None));
    // The next grant of the server has a larger token.
    let next = manager(&server).try_lock("x").unwrap();
    assert!(next.fencing_token() > *tokens.last().unwrap());
    let calls = script_calls(&server) - before;
    assert!(calls < (THREADS * ROUNDS) as u64, "{calls} calls for {} locks", THREADS * ROUNDS);
}

/// Promise: P4
#[test]
fn process_keeps_a_lock_for_its_window_only() {
    let server = RedisServer::start();
    // The window is long enough to be seen, and short enough to end soon.
    let window = Duration::from_millis(20);
    let mgr = RedisMgr::new(config_long_timeouts(server.url()).local_handover(window)).unwrap();
    let (other, stop) = (manager(&server), AtomicBool::new(false));
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    drop(mgr.lock("x").unwrap());
                }
            });
        }
        let _stop = Defer(|| stop.store(true, Ordering::Relaxed));
        // The threads go on for as long as it waits.
        for _ in 0..20 {
            drop(other.lock("x").unwrap());
        }
    });
}

/// A hold that outlasts the window: the first thread joins the server's queue, and no other.
///
/// Promise: P4
#[test]
fn one_thread_of_a_process_is_in_the_server_queue() {
    let server = RedisServer::start();
    let mgr =
        RedisMgr::new(config_long_timeouts(server.url()).local_handover(MILLISECOND)).unwrap();
    let other = manager(&server);
    let held = mgr.lock("x").unwrap();
    let served = Arc::new(Mutex::new(Vec::new()));
    let spawn = |mgr: &RedisMgr, label: &'static str| {
        let served = served.clone();
        spawn_call(mgr, "x", move |mgr, name| {
            let guard = mgr.lock(name).unwrap();
            served.lock().push((label, guard.fencing_token()));
            guard.release().unwrap().unwrap_released();
        })
    };
    let first = spawn(&mgr, "first");
    await_queue_length(&server, "x", 1);
    let elsewhere = spawn(&other, "elsewhere");
    await_queue_length(&server, "x", 2);
    let second = spawn(&mgr, "second");
    // It is behind the first thread, and not at the server.
    eventually("it waits", TEST_TIMEOUT, || mgr.try_lock("x").is_err_and(|e| e.is_contended()));
    assert_eq!(queue_length(&server, "x"), 2);
    held.release().unwrap().unwrap_released();
    for thread in [first, elsewhere, second] {
        thread.join().unwrap();
    }
    let served = served.lock();
    assert_eq!(served[0].0, "first");
    assert!(served.is_sorted_by_key(|(_, token)| *token), "{served:?}");
    assert_eq!(get(&server, LOCK), None);
}

/// Promise: P4
/// Fault: N187
#[test]
fn next_thread_replaces_a_representative_that_gives_up() {
    let server = RedisServer::start();
    let (mgr, other) = (RedisMgr::new(config_long_window(&server)).unwrap(), manager(&server));
    let held = other.lock("x").unwrap();
    let cancel = CancelToken::new();
    let options = LockOptions::new().cancel(&cancel);
    let cancelled = spawn_call(&mgr, "x", move |mgr, name| mgr.lock_with(name, &options));
    await_queue_length(&server, "x", 1);
    let late = spawn_call(&mgr, "x", |mgr, name| mgr.try_lock_for(name, SECOND / 10));
    let next = spawn_call(&mgr, "x", |mgr, name| mgr.lock(name));
    let error = late.join().unwrap().unwrap_err();
    assert!(matches!(error, LockError::Timeout { holder: Some(_), .. }), "{error:?}");
    cancel.cancel();
    assert!(cancelled.join().unwrap().unwrap_err().is_cancelled());
    // Another thread is in the queue now, also if the entry of the first is still to be removed.
    eventually("the next one is queued", TEST_TIMEOUT, || {
        mgr.lock_info("x").unwrap().is_some_and(|lock| lock.waiting() == 1)
    });
    held.release().unwrap().unwrap_released();
    drop(next.join().unwrap().unwrap());
}

/// Promise: P2
/// Fault: N187
#[test]
fn lost_lock_is_not_handed_over() {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_long_window(&server)).unwrap();
    let held = mgr.lock("x").unwrap();
    let next = spawn_call(&mgr, "x", |mgr, name| mgr.lock(name));
    eventually("it waits", TEST_TIMEOUT, || mgr.try_lock("x").is_err());
    server.cli(&["DEL", LOCK]);
    assert!(matches!(held.renew().unwrap_err(), LockError::Lost { .. }));
    assert_eq!(get(&server, LOCK), None);
    let _ = held.release();
    let next = next.join().unwrap().unwrap();
    assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()));
    assert!(next.is_held());
}

/// The options and the guard of the next holder are its own.
///
/// Promise: P2
#[test]
fn next_holder_has_a_guard_of_its_own() {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_long_window(&server)).unwrap();
    let held = mgr.lock("x").unwrap();
    let (id, token, lost) = (held.id().clone(), held.fencing_token(), held.lost().clone());
    let limited = LockOptions::new().max_hold(2 * SECOND);
    let next = spawn_call(&mgr, "x", move |mgr, name| mgr.lock_with(name, &limited));
    eventually("it waits", TEST_TIMEOUT, || is_waiting(&mgr));
    held.release().unwrap().unwrap_released();
    assert!(lost.recv().is_err(), "a release is no loss");
    let next = next.join().unwrap().unwrap();
    if next.id() == &id {
        assert_eq!(next.fencing_token().as_u64(), token.as_u64() + 1);
    }
    assert!(next.fencing_token() > token && next.remaining() > 10 * SECOND);
    assert_eq!(expect_loss(&next), LockLost::MaxHold);
    drop(next);
    assert!(manager(&server).lock("x").unwrap().fencing_token().as_u64() > token.as_u64() + 1);
}

/// Those that cannot have the lock as it is held get one from the server.
#[test]
fn other_terms_end_the_chain() {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_long_window(&server)).unwrap();
    let terms = [with_ttl(5 * SECOND), LockOptions::new().renew(false)];
    for options in terms.into_iter().chain([LockOptions::new().hold_at_least(MILLISECOND)]) {
        let held = mgr.lock("x").unwrap();
        let id = held.id().clone();
        let next = spawn_call(&mgr, "x", move |mgr, name| mgr.lock_with(name, &options));
        eventually("it waits", TEST_TIMEOUT, || is_waiting(&mgr));
        held.release().unwrap().unwrap_released();
        assert_ne!(next.join().unwrap().unwrap().id(), &id);
    }
    // An id of `acquire_lock` names one lock only.
    let held = mgr.lock("x").unwrap();
    let next = spawn_call(&mgr, "x", |mgr, name| mgr.acquire_lock(name, 30 * SECOND, TEST_TIMEOUT));
    eventually("it waits", TEST_TIMEOUT, || is_waiting(&mgr));
    let id = held.id().to_string();
    drop(held);
    let next = next.join().unwrap().unwrap().unwrap();
    assert_ne!(next, id);
    assert!(mgr.release_lock("x", &next).unwrap());
}

/// Whatever ends a hold, the next thread gets the lock.
///
/// Fault: N187
#[test]
fn every_end_of_a_hold_lets_the_next_thread_in() {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_long_window(&server)).unwrap();
    let ends: [fn(LockGuard); 4] = [
        drop,
        |guard| {
            let panicked = thread::spawn(move || {
                let _guard = guard;
                panic!("as the test wants");
            });
            assert!(panicked.join().is_err());
        },
        |guard| drop(guard.detach().unwrap()),
        LockGuard::release_later,
    ];
    for (number, end) in ends.into_iter().enumerate() {
        let held = mgr.lock_with("x", &with_ttl(SECOND)).unwrap();
        let next = spawn_call(&mgr, "x", |mgr, name| mgr.lock_with(name, &with_ttl(SECOND)));
        eventually("it waits", TEST_TIMEOUT, || is_waiting(&mgr));
        end(held);
        let next = next.join().unwrap().unwrap();
        assert!(next.is_held(), "{number}");
    }
    let held = mgr.lock("x").unwrap();
    let next = spawn_call(&mgr, "x", |mgr, name| mgr.lock(name));
    eventually("it waits", TEST_TIMEOUT, || is_waiting(&mgr));
    mgr.shutdown();
    assert!(matches!(next.join().unwrap().unwrap_err(), LockError::Shutdown));
    drop(held);
}

/// Nobody can say how many tokens were used in a process whose lock ends without its release.
///
/// Promise: P3
#[test]
fn tokens_reserved_for_a_lost_lock_are_exceeded() {
    for end in ["DEL", "a forced release"] {
        let server = RedisServer::start();
        let held = manager(&server).lock("x").unwrap();
        // As if the server's clock had been set back: no token comes from the clock.
        let ahead = held.fencing_token().as_u64() + 3_600_000_000;
        server.cli(&["SET", &token_key("x"), &ahead.to_string()]);
        if end == "DEL" {
            server.cli(&["DEL", LOCK]);
        } else {
            assert!(manager(&server).force_release("x").unwrap());
        }
        let next = manager(&server).lock("x").unwrap();
        assert_eq!(next.fencing_token().as_u64(), ahead + 10_000, "{end}");
    }
}

/// The tokens of local hand-overs are larger than that of the grant, also if its clock stands. What
/// comes later is larger than them.
///
/// Promise: P3
#[test]
fn tokens_used_inside_a_process_are_exceeded() {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_long_window(&server)).unwrap();
    let ahead = mgr.lock("x").unwrap().fencing_token().as_u64() + 3_600_000_000;
    server.cli(&["SET", FENCE, &ahead.to_string()]);
    let last = AtomicU64::new(0);
    thread::scope(|scope| {
        for number in 0..4 {
            // Every release goes to the server if another process waits for its window.
            let mgr = if number == 0 { manager(&server) } else { mgr.clone() };
            let last = &last;
            scope.spawn(move || {
                for _ in 0..100 {
                    let guard = mgr.lock("x").unwrap();
                    let token = guard.fencing_token().as_u64();
                    assert!(token > last.swap(token, Ordering::SeqCst), "tokens do not rise");
                    drop(guard);
                }
            });
        }
    });
    let last = last.into_inner();
    assert!(last < ahead + 10_000, "more tokens are used than there were locks: {}", last - ahead);
}

/// Only the token of the grant is in the fence when a lock is released.
///
/// Fault: F50
/// Promise: P3
#[test]
fn last_token_of_a_process_is_in_the_fence() {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_long_window(&server)).unwrap();
    let guard = mgr.lock("x").unwrap();
    assert_eq!(get(&server, FENCE), Some(guard.fencing_token().to_string()));
    let waiting = spawn_call(&mgr, "x", |mgr, name| mgr.lock(name).unwrap());
    eventually("the thread waits", TEST_TIMEOUT, || is_waiting(&mgr));
    drop(guard);
    let next = completes_within(TEST_TIMEOUT, "the hand-over", || waiting.join().unwrap());
    let token = next.fencing_token();
    next.release().unwrap().unwrap_released();
    assert_eq!(get(&server, FENCE), Some(token.to_string()));

    let guard = mgr.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &manager(&server), "x");
    guard.release().unwrap().unwrap_released();
    let next = completes_within(TEST_TIMEOUT, "the hand-over", || waiting.join().unwrap().unwrap());
    let token = next.fencing_token();
    next.release().unwrap().unwrap_released();
    assert_eq!(get(&server, FENCE), Some(token.to_string()));
}

/// Whether another thread waits in this process. It need not be at the server.
fn is_waiting(mgr: &RedisMgr) -> bool {
    mgr.metrics().waiting() > 0
}

/// A waiter that joins behind others does not extend the TTL of the queue.
///
/// Fault: N188
/// Promise: P4
#[test]
fn queue_that_never_empties_does_not_expire() {
    let server = RedisServer::start();
    // A token that is ahead of the clock, as if the lock had been held for a while.
    let micros = server.query::<(u64, u64)>(&["TIME"]).0 * 1_000_000;
    server.cli(&["SET", FENCE, &(micros + 1_000_000_000).to_string()]);
    let managers: Vec<RedisMgr> = (0..3).map(|_| manager(&server)).collect();
    let guard = managers[0].lock("x").unwrap();
    let next = spawn_queued_waiter(&server, &managers[1], "x");
    let last = spawn_queued_waiter(&server, &managers[2], "x");
    server.cli(&["PEXPIRE", &queue_key("x"), "30000"]);
    guard.release().unwrap().unwrap_released();
    let left = pttl(&server, &queue_key("x"));
    assert!(left > 30_000, "the queue expires in {left} ms");
    drop(next.join().unwrap().unwrap());
    drop(last.join().unwrap().unwrap());
}
