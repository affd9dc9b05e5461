//! Ends of waits that the caller sets: a token that is cancelled, and a deadline.

use std::{thread::JoinHandle, time::Instant};

use distlock::{CancelToken, Config, LockError, LockGuard, LockOptions, RedisMgr};

use super::timed;
use crate::{
    family::{LONG, Subject, await_waiters, spawn_waiter},
    helpers::{
        CALL_LIMIT, Defer, SECOND, UnwrapReleased, await_queue_length, manager, spawn_queued_waiter,
    },
    support::{RedisServer, TEST_TIMEOUT, eventually},
};

fn spawn_cancellable(
    mgr: &RedisMgr,
    waiters: u64,
    token: &CancelToken,
) -> JoinHandle<Result<LockGuard, LockError>> {
    let (here, options) = (mgr.clone(), LockOptions::new().cancel(token));
    spawn_waiter(mgr, "x", waiters, move || here.lock_with("x", &options))
}

#[track_caller]
fn expect_cancelled<T: std::fmt::Debug + Send + 'static>(
    waiting: JoinHandle<Result<T, LockError>>,
) {
    eventually("the wait ends", CALL_LIMIT, || waiting.is_finished());
    let error = waiting.join().unwrap().unwrap_err();
    assert!(error.is_cancelled() && !error.is_contended(), "{error:?}");
    assert!(error.to_string().contains("lock \"x\": the wait was cancelled after"), "{error}");
}

/// Fault: N170
#[test]
fn cancelled_waiters_leave_and_others_are_served() {
    for subject in Subject::all() {
        let mgr = subject.manager();
        let guard = mgr.lock("x").unwrap();
        // The first waiter reads the subscription for all.
        let token = CancelToken::new();
        let first = spawn_cancellable(&mgr, 1, &token);
        let here = mgr.clone();
        let other = spawn_waiter(&mgr, "x", 2, move || here.try_lock_for("x", LONG));
        let third = spawn_cancellable(&mgr, 3, &token);
        token.cancel();
        expect_cancelled(first);
        expect_cancelled(third);
        await_waiters(&mgr, "x", 1);
        assert!(guard.is_held() && !other.is_finished());
        guard.release().unwrap().unwrap_released();
        assert!(other.join().unwrap().unwrap().is_held());
    }
}

/// Fault: N170
#[test]
fn cancelled_leader_leaves_the_subscription_open() {
    let server = RedisServer::start();
    let (mgr, holder) = (manager(&server), manager(&server));
    let guard = holder.lock("x").unwrap();
    let token = CancelToken::new();
    let leader = spawn_cancellable(&mgr, 1, &token);
    let other = spawn_queued_waiter(&server, &mgr, "x");
    let subscriptions = || -> String { server.query(&["CLIENT", "LIST", "TYPE", "pubsub"]) };
    let id = |list: String| list.split(' ').next().unwrap().to_owned();
    let before = id(subscriptions());
    token.cancel();
    expect_cancelled(leader);
    await_queue_length(&server, "x", 1);
    assert_eq!(id(subscriptions()), before);
    guard.release().unwrap().unwrap_released();
    other.join().unwrap().unwrap().release().unwrap().unwrap_released();
}

/// Fault: N170
#[test]
fn waits_for_all_kinds_of_locks_can_be_cancelled() {
    for subject in Subject::all() {
        let mgr = subject.manager();
        let guard = mgr.lock("x").unwrap();
        let (token, other) = (CancelToken::new(), CancelToken::new());
        let options = LockOptions::new().cancel(&token);
        let (rw, permits) = (mgr.rw_lock("x").unwrap(), mgr.semaphore("x", 3).unwrap());
        let (here, to) = (rw.clone(), options.clone());
        let read = spawn_waiter(&mgr, "x", 1, move || here.read_with(&to).map(drop));
        let (here, to) = (rw.clone(), options.clone());
        let write = spawn_waiter(&mgr, "x", 2, move || here.write_with(&to).map(drop));
        let permit =
            spawn_waiter(&mgr, "x", 3, move || permits.acquire_with(2, &options).map(drop));
        other.cancel();
        assert!(!(read.is_finished() || write.is_finished() || permit.is_finished()));
        token.clone().cancel();
        [read, write, permit].into_iter().for_each(expect_cancelled);
        await_waiters(&mgr, "x", 0);
        drop(guard);
        assert!(rw.try_write().is_ok(), "nothing is left in the queue");
    }
}

/// Only the cancellation can wake it: no poll becomes due.
///
/// Fault: N170
#[test]
fn cancelled_waiter_returns_while_time_stands_still() {
    let mgr = distlock::testing::MemoryServer::new().manager();
    // A waiter that is not woken would wait forever.
    let _end = Defer(|| mgr.shutdown());
    let _guard = mgr.lock("x").unwrap();
    let tokens = [CancelToken::new(), CancelToken::new()];
    let [leader, follower] = [1, 2].map(|n| spawn_cancellable(&mgr, n, &tokens[n as usize - 1]));
    tokens[1].cancel();
    expect_cancelled(follower);
    assert!(!leader.is_finished());
    tokens[0].cancel();
    expect_cancelled(leader);
}

#[test]
fn cancelled_token_prevents_the_acquisition() {
    for subject in Subject::all() {
        let mgr = subject.manager();
        let token = CancelToken::new();
        let options = LockOptions::new().cancel(&token);
        let guard = mgr.lock_with("x", &options).unwrap();
        token.cancel();
        assert!(guard.is_held(), "only waits are cancelled");
        guard.release().unwrap().unwrap_released();
        assert!(mgr.lock_with("x", &options).unwrap_err().is_cancelled());
        assert!(!mgr.is_locked("x").unwrap());
    }
}

/// Fault: N170
#[test]
fn cancelled_waiter_does_not_wait_for_a_dead_server() {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(Config::new(server.url()).ttl(600 * SECOND)).unwrap();
    server.kill();
    let token = CancelToken::new();
    let options = LockOptions::new().cancel(&token);
    let here = mgr.clone();
    let waiting = std::thread::spawn(move || here.lock_with("x", &options).map(drop));
    eventually("it tries", TEST_TIMEOUT, || mgr.metrics().attempted() > 0);
    token.cancel();
    expect_cancelled(waiting);
}

#[expect(clippy::disallowed_methods, reason = "a deadline is a time of this clock")]
#[test]
fn earlier_of_wait_and_deadline_ends_the_wait() {
    for subject in Subject::all() {
        let mgr = subject.manager();
        let _guard = mgr.lock("x").unwrap();
        let (now, soon) = (Instant::now(), SECOND / 5);
        for options in [
            LockOptions::new().deadline(now + soon),
            LockOptions::new().deadline(now + soon).wait(LONG),
            LockOptions::new().deadline(now + LONG).wait(soon),
        ] {
            let (ended, took) = timed(|| mgr.lock_with("x", &options));
            let error = ended.unwrap_err();
            assert!(error.is_contended() && took < CALL_LIMIT, "{error} after {took:?}");
        }
        let passed = LockOptions::new().deadline(now);
        assert!(matches!(mgr.lock_with("x", &passed).unwrap_err(), LockError::Held { .. }));
        assert!(mgr.lock_with("free", &passed).unwrap().is_held(), "it tries once");
    }
}
