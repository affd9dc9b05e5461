//! A server in memory whose replies are late, with a clock that stands.

use std::{thread, time::Duration};

use distlock::{
    LockError, LockGuard, LockLost, LockOptions, MultiGuard, RedisMgr, testing::MemoryServer,
};

use super::ends;
use crate::{
    helpers::{SECOND, UnwrapReleased, spawn_call},
    support::{TEST_TIMEOUT, eventually},
};

/// Longer than the operation timeout, which is a second.
const TOO_LATE: Duration = Duration::from_millis(1_500);

/// Several renewals, one after the other, end within the operation timeout.
const REPLY_DELAY: Duration = Duration::from_millis(100);

type Call = fn(&RedisMgr) -> distlock::Result<()>;

/// How much time passes during a call, by the server's clock.
fn time_of<T>(server: &MemoryServer, call: impl FnOnce() -> T) -> (Duration, T) {
    let clock = server.manager();
    let clock = clock.lock_with("clock", &LockOptions::new().ttl(3_600 * SECOND).renew(false));
    let clock = clock.unwrap();
    let before = clock.remaining();
    let result = call();
    (before - clock.remaining(), result)
}

#[test]
fn slow_server_is_unavailable_after_the_operation_timeout() {
    let server = MemoryServer::new();
    let mgr = server.manager();
    let calls: [(&str, Call); 6] = [
        ("ping", |mgr| mgr.ping().map(drop)),
        ("holder", |mgr| mgr.holder("x").map(drop)),
        ("try_lock", |mgr| mgr.try_lock("x").map(drop)),
        ("try_read", |mgr| mgr.rw_lock("r")?.try_read().map(drop)),
        ("try_acquire", |mgr| mgr.semaphore("s", 3)?.try_acquire().map(drop)),
        ("try_lock_all", |mgr| mgr.try_lock_all(["a", "b"]).map(drop)),
    ];
    for (name, call) in calls {
        let (took, result) = time_of(&server, || {
            server.slow(TOO_LATE);
            let result = call(&mgr);
            server.resume();
            result
        });
        let error = result.unwrap_err();
        assert!(error.is_unavailable(), "{name}: {error:?}");
        assert!(error.to_string().contains("no reply in time"), "{name}: {error}");
        assert_eq!(took, SECOND, "{name}");
    }
    // What the requests have left behind is cleaned up.
    server.advance(20 * SECOND);
    let other = server.manager();
    for name in ["x", "r", "s", "a", "b"] {
        drop(other.try_lock(name).unwrap());
    }
}

/// Half of the time is for a second request.
///
/// Fault: N221
/// Promise: P6
#[test]
fn downgrade_on_a_slow_server_ends_in_time() {
    let server = MemoryServer::new();
    let mgr = server.manager();
    let writer = mgr.rw_lock("x").unwrap().write().unwrap();
    let (took, result) = time_of(&server, || {
        server.slow(TOO_LATE);
        let result = writer.downgrade();
        server.resume();
        result
    });
    assert!(result.unwrap_err().is_unavailable());
    assert_eq!(took, SECOND);
}

/// The reply about the lock also has the members of its group.
///
/// Promise: P6
#[test]
fn group_is_described_by_one_reply() {
    let server = MemoryServer::new();
    let mgr = server.manager();
    let _permit = mgr.semaphore("s", 3).unwrap().acquire().unwrap();
    let calls: [(&str, Call); 2] = [
        ("lock_info", |mgr| mgr.lock_info("s").map(drop)),
        ("available", |mgr| mgr.semaphore("s", 3)?.available().map(drop)),
    ];
    for (name, call) in calls {
        for (delay, expected) in [(SECOND * 9 / 10, SECOND * 9 / 10), (TOO_LATE, SECOND)] {
            let (took, result) = time_of(&server, || {
                server.slow(delay);
                let result = call(&mgr);
                server.resume();
                result
            });
            assert_eq!(result.is_err_and(|error| error.is_unavailable()), delay > SECOND, "{name}");
            assert_eq!(took, expected, "{name}");
        }
    }
}

/// The reply that a caller is in the queue comes after the end of its wait. It leaves the queue at
/// once, rather than when it would poll.
///
/// Fault: N270
/// Promise: P6
#[test]
fn wait_that_ends_before_a_late_reply_is_not_prolonged() {
    let server = MemoryServer::new();
    let mgr = server.manager();
    let holder = server.manager();
    let (x, y) = (holder.lock("x").unwrap(), holder.lock("y").unwrap());
    // Keeps the subscription open, so that the first request can join the queue.
    let other = spawn_call(&mgr, "y", |mgr, name| mgr.lock(name).map(drop));
    let in_queue = || holder.holder("y").unwrap().and_then(|holder| holder.waiters());
    eventually("it is in the queue", TEST_TIMEOUT, || in_queue() == Some(1));
    let (took, result) = time_of(&server, || {
        server.slow(REPLY_DELAY);
        let result = mgr.try_lock_for("x", REPLY_DELAY / 2);
        server.resume();
        result
    });
    assert!(result.unwrap_err().is_timeout());
    assert_eq!(took, 2 * REPLY_DELAY);
    drop((x, y));
    other.join().unwrap().unwrap();
}

/// Unlike with a server that is stopped.
#[test]
fn slow_server_carries_out_the_request() {
    let server = MemoryServer::new();
    let guard = server.manager().lock("x").unwrap();
    server.slow(TOO_LATE);
    assert!(guard.release().unwrap_err().is_unavailable());
    server.resume();
    drop(server.manager().try_lock("x").unwrap());
}

#[test]
fn reply_in_time_only_takes_longer() {
    let server = MemoryServer::new();
    let mgr = server.manager();
    server.slow(SECOND / 2);
    assert_eq!(mgr.ping().unwrap(), SECOND / 2);
    let (took, guard) = time_of(&server, || mgr.lock("x").unwrap());
    assert_eq!(took, SECOND / 2);
    server.advance(3_600 * SECOND);
    assert!(guard.is_held(), "the renewals are confirmed");
    guard.release().unwrap().unwrap_released();
}

#[test]
fn lease_expires_while_the_server_is_slow() {
    let server = MemoryServer::new();
    let mgr = server.manager();
    let guard = mgr.lock("x").unwrap();
    server.slow(TOO_LATE);
    let left = guard.remaining();
    server.advance(left - Duration::from_nanos(1));
    assert!(guard.is_held());
    server.advance(Duration::from_nanos(1));
    assert_eq!(guard.lost().try_recv(), Ok(LockLost::Expired));
}

#[test]
fn call_on_another_thread_waits_for_the_clock() {
    let server = MemoryServer::new();
    server.slow(TOO_LATE);
    let call = spawn_call(&server.manager(), "x", |mgr, name| mgr.try_lock(name).map(drop));
    while !call.is_finished() {
        server.advance(SECOND / 10);
    }
    assert!(call.join().unwrap().unwrap_err().is_unavailable());
}

/// The owner of the clock advances it while another thread waits for a renewal.
#[test]
fn renewal_on_another_thread_waits_for_the_clock() {
    let calls: [fn(&LockGuard) -> distlock::Result<()>; 2] =
        [LockGuard::renew, |guard| guard.extend(20 * SECOND)];
    for call in calls {
        ends(move || {
            let server = MemoryServer::new();
            let mgr = server.manager();
            let guard = mgr.lock("x").unwrap();
            server.slow(REPLY_DELAY);
            let calling = thread::spawn(move || call(&guard));
            while !calling.is_finished() {
                server.advance(SECOND / 10);
            }
            calling.join().unwrap().unwrap();
        });
    }
}

#[test]
fn renewals_by_the_owner_of_the_clock_and_another_thread_end() {
    ends(|| {
        let server = MemoryServer::new();
        let mgr = server.manager();
        let (own, others) = (mgr.lock("x").unwrap(), mgr.lock("y").unwrap());
        server.slow(REPLY_DELAY);
        let call = thread::spawn(move || others.renew());
        while !call.is_finished() {
            own.renew().unwrap();
        }
        call.join().unwrap().unwrap();
    });
}

/// The shutdown joins threads that wait for replies.
#[test]
fn manager_of_a_slow_server_shuts_down() {
    for delay in [SECOND / 5, TOO_LATE] {
        ends(move || {
            let server = MemoryServer::new();
            let (mgr, other) = (server.manager(), server.manager());
            let (guard, kept) = (mgr.lock("x").unwrap(), mgr.lock("y").unwrap());
            server.slow(delay);
            let _ = guard.release();
            mgr.shutdown();
            assert!(!kept.is_held());
            assert!(matches!(mgr.lock("x"), Err(LockError::Shutdown)));
            server.resume();
            // Some may be left to expire.
            server.advance(11 * SECOND);
            assert!(!other.is_locked("x").unwrap() && !other.is_locked("y").unwrap());
        });
    }
}

/// The first one releases the lock, and the reply to that needs time.
#[test]
fn two_shutdowns_on_other_threads_end_as_time_passes() {
    ends(|| {
        let server = MemoryServer::new();
        let mgr = server.manager();
        let kept = mgr.lock("x").unwrap();
        server.slow(SECOND / 5);
        let shut_down = || spawn_call(&mgr, "", |mgr, _| mgr.shutdown());
        let first = shut_down();
        eventually("the shutdown has begun", TEST_TIMEOUT, || !kept.is_held());
        let second = shut_down();
        while !(first.is_finished() && second.is_finished()) {
            server.advance(SECOND / 1_000);
        }
        server.resume();
        assert!(!server.manager().is_locked("x").unwrap());
    });
}

/// The locks are released one by one, and each reply takes less than the timeout.
///
/// Fault: N261
/// Promise: P6
#[test]
fn guard_of_many_locks_is_dropped_within_one_timeout() {
    let server = MemoryServer::new();
    let mgr = server.manager();
    let names: Vec<_> = (0..10).map(|n| format!("n{n}")).collect();
    let ends: [(u32, fn(MultiGuard)); 2] =
        [(1, drop), (3, |all| all.release().unwrap().unwrap_released())];
    for (seconds, end) in ends {
        let all = mgr.lock_all(&names).unwrap();
        server.slow(3 * REPLY_DELAY);
        let (took, ()) = time_of(&server, || end(all));
        server.resume();
        assert_eq!(took, seconds * SECOND, "{seconds}");
        // The rest is released in the background.
        server.advance(5 * SECOND);
        let other = server.manager();
        names.iter().for_each(|name| drop(other.try_lock(name).unwrap()));
    }
}

/// It must not overtake the others, so it does not complete a release for itself.
///
/// Fault: N172
/// Promise: P6
#[test]
fn try_lock_behind_others_takes_one_timeout() {
    let server = MemoryServer::new();
    let window = Duration::from_millis(1);
    let mgr = server.manager_with(|config| config.local_handover(window));
    let guard = mgr.lock("x").unwrap();
    server.advance(SECOND); // the window is closed
    let waiting: Vec<_> = (1..=2)
        .map(|waiters| {
            let waiting = spawn_call(&mgr, "x", |mgr, name| mgr.lock(name).unwrap());
            eventually("it waits", TEST_TIMEOUT, || mgr.metrics().waiting() == waiters);
            waiting
        })
        .collect();
    let (took, error) = time_of(&server, || {
        server.slow(TOO_LATE);
        guard.release_later();
        let error = mgr.try_lock("x").unwrap_err();
        server.resume();
        error
    });
    assert_eq!(took, SECOND, "{error}");
    server.advance(60 * SECOND);
    waiting.into_iter().for_each(|waiting| drop(waiting.join().unwrap()));
}
