//! Locks that stay taken for a period, also if they are released earlier.

use std::time::{Duration, SystemTime};

use distlock::{Config, HeldBy, Holder, LockError, LockOptions, RedisMgr, Released};

use crate::{
    family::{LONG, Subject, spawn_waiter},
    helpers::{
        CALL_LIMIT, SECOND, UnwrapReleased, config_long_timeouts, get, manager, pttl,
        server_behind_proxy,
    },
    support::{Fault, RedisServer, TEST_TIMEOUT, contains, eventually},
};

const LOCK: &str = "lock:x";
const PERIOD: Duration = Duration::from_secs(300);

fn once_per_period() -> LockOptions {
    LockOptions::new().wait(Duration::ZERO).ttl(20 * SECOND).hold_at_least(PERIOD)
}

#[track_caller]
fn expect_kept(holder: &Holder, id: &str) {
    assert!(holder.is_kept(), "{holder}");
    assert_eq!(holder.id(), id);
    let left = holder.ttl_left().unwrap();
    assert!(left > PERIOD - CALL_LIMIT && left <= PERIOD, "{left:?}");
    assert!(holder.kept_until().unwrap() > SystemTime::now());
    let until = match holder.held_by() {
        HeldBy::Permits { .. } => "; permits that it has released stay taken until ",
        _ => ", which has released it; it is kept until ",
    };
    assert!(holder.to_string().contains(until), "{holder}");
}

/// Promise: P1
#[test]
fn released_lock_stays_taken_until_its_period_ends() {
    for subject in Subject::all() {
        let (mgr, other) = (subject.manager(), subject.manager());
        let guard = mgr.lock_with("x", &once_per_period()).unwrap();
        let id = guard.id().to_string();
        assert!(guard.remaining() > PERIOD - CALL_LIMIT);
        assert!(!mgr.holder("x").unwrap().unwrap().is_kept());
        guard.renew().unwrap();
        guard.release().unwrap().unwrap_released();

        expect_kept(&mgr.holder("x").unwrap().unwrap(), &id);
        expect_kept(mgr.lock_info("x").unwrap().unwrap().holder(), &id);
        for manager in [&mgr, &other] {
            match manager.lock_with("x", &once_per_period()).unwrap_err() {
                LockError::Held { holder, .. } => expect_kept(&holder, &id),
                other => panic!("{other:?}"),
            }
        }
        // Operators can end the period.
        assert_eq!(mgr.force_release_if("x", &id).unwrap(), Released::Released);
        assert!(other.lock_with("x", &once_per_period()).is_ok());
        assert!(mgr.force_release("x").unwrap());
        assert!(!mgr.is_locked("x").unwrap());
    }
}

/// Promise: P1
#[cfg(feature = "testing")]
#[test]
fn waiter_gets_the_kept_lock_when_the_period_ends() {
    let server = distlock::testing::MemoryServer::new();
    let mgr = server.manager();
    let guard = mgr.lock_with("x", &once_per_period()).unwrap();
    server.advance(100 * SECOND);
    assert!(guard.is_held());
    drop(guard);
    let here = mgr.clone();
    let waiting = spawn_waiter(&mgr, "x", 1, move || here.lock("x"));
    server.advance(199 * SECOND);
    assert!(!waiting.is_finished() && mgr.holder("x").unwrap().unwrap().is_kept());
    eventually("the waiter polls", TEST_TIMEOUT, || {
        server.advance(SECOND);
        waiting.is_finished()
    });
    assert!(waiting.join().unwrap().unwrap().is_held());
}

/// A period that is shorter than the hold changes nothing.
#[cfg(feature = "testing")]
#[test]
fn lock_held_for_longer_than_its_period_is_free_after_it() {
    let server = distlock::testing::MemoryServer::new();
    let mgr = server.manager();
    let guard = mgr.lock_with("x", &once_per_period()).unwrap();
    for _ in 0..100 {
        server.advance(5 * SECOND);
        assert!(guard.is_held(), "it is renewed after the period too");
    }
    assert!(guard.remaining() <= 20 * SECOND);
    drop(guard);
    assert!(mgr.lock_with("x", &once_per_period()).is_ok());
}

/// The grant message reserves only the claim window, so the job must not begin on it.
///
/// Promise: P1
#[test]
fn handed_over_period_is_reserved_before_the_call_returns() {
    for subject in Subject::all() {
        let mgr = subject.manager_with(|config| config.claim_window(SECOND * 20));
        let guard = mgr.lock("x").unwrap();
        let (here, options) = (mgr.clone(), once_per_period().wait(LONG));
        let waiting = spawn_waiter(&mgr, "x", 1, move || {
            let guard = here.lock_with("x", &options).unwrap();
            let left = here.holder("x").unwrap().unwrap().ttl_left().unwrap();
            assert!(left > PERIOD - CALL_LIMIT, "only {left:?} are reserved");
            guard
        });
        guard.release().unwrap().unwrap_released();
        waiting.join().unwrap().release().unwrap().unwrap_released();
        assert!(mgr.holder("x").unwrap().unwrap().is_kept());
    }
}

/// Fault: N173
#[test]
fn period_outlives_max_hold_shutdown_and_background_release() {
    let server = RedisServer::start();
    let check = |end: &dyn Fn(RedisMgr)| {
        let mgr = manager(&server);
        end(mgr);
        let look = manager(&server);
        eventually("it is kept", TEST_TIMEOUT, || look.holder("x").unwrap().unwrap().is_kept());
        assert!(pttl(&server, LOCK) > 200_000);
        assert!(look.force_release("x").unwrap());
    };
    check(&|mgr| mgr.lock_with("x", &once_per_period()).unwrap().release_later());
    check(&|mgr| {
        let guard = mgr.lock_with("x", &once_per_period()).unwrap();
        mgr.shutdown();
        assert!(!guard.is_held());
    });
    check(&|mgr| {
        let options = once_per_period().max_hold(SECOND / 10);
        let guard = mgr.lock_with("x", &options).unwrap();
        eventually("it ends", TEST_TIMEOUT, || !guard.is_held());
        eventually("it is kept", TEST_TIMEOUT, || mgr.holder("x").unwrap().unwrap().is_kept());
    });
}

/// Fault: N173
#[test]
fn period_outlives_the_process_of_the_holder() {
    let server = RedisServer::start();
    let guard = std::mem::ManuallyDrop::new(
        manager(&server).lock_with("x", &once_per_period().renew(false)).unwrap(),
    );
    // As if its process had died: nothing renews or releases it.
    assert!(pttl(&server, LOCK) > 200_000, "{guard:?}");
}

/// Fault: N173
#[test]
fn lost_reply_to_a_release_keeps_the_lock() {
    for fault in [Fault::DropReply, Fault::ResetAfterRequest, Fault::ResetBeforeRequest] {
        let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
        let guard = mgr.lock_with("x", &once_per_period()).unwrap();
        let id = guard.id().to_string();
        let lost = proxy.on_request(contains("distlock:members:{lock:x}"), fault);
        guard.release().unwrap().unwrap_released();
        assert_eq!(lost.fired(), 1);
        assert_eq!(get(&server, LOCK), Some(format!("distlock:kept {id}")));
        assert!(pttl(&server, LOCK) > 200_000);
    }
}

/// A semaphore becomes a limit of a rate.
///
/// Promise: P12
#[test]
fn permits_stay_taken_until_their_periods_end() {
    for subject in Subject::all() {
        let mgr = subject.manager();
        let permits = mgr.semaphore("s", 3).unwrap();
        let pair = permits.acquire_with(2, &once_per_period()).unwrap();
        let id = pair.id().to_string();
        pair.renew().unwrap();
        pair.release().unwrap().unwrap_released();
        assert_eq!(permits.available().unwrap(), 1);
        let [kept] = &permits.holders().unwrap()[..] else { panic!("one holder") };
        expect_kept(kept, &id);
        let last = permits.acquire_with(1, &once_per_period()).unwrap();
        last.release_later();
        let error = permits.try_acquire().unwrap_err();
        assert!(
            error.is_contended()
                && error.to_string().contains("permits that it has released stay taken until"),
            "{error}"
        );
        // Operators can end the period.
        assert_eq!(mgr.force_release_if("s", &id).unwrap(), Released::Released);
        assert_eq!(permits.available().unwrap(), 2);
        assert_eq!(mgr.force_release_if("s", &id).unwrap(), Released::Gone);
    }
}

/// Promise: P12
#[cfg(feature = "testing")]
#[test]
fn permits_become_free_when_their_periods_end() {
    let server = distlock::testing::MemoryServer::new();
    let mgr = server.manager();
    let permits = mgr.semaphore("s", 2).unwrap();
    let begin = || permits.acquire_with(1, &once_per_period());
    drop(begin().unwrap());
    server.advance(100 * SECOND);
    drop(begin().unwrap());
    assert!(begin().unwrap_err().is_contended());
    server.advance(201 * SECOND);
    drop(begin().unwrap());
    assert!(begin().unwrap_err().is_contended());
    server.advance(100 * SECOND);
    assert_eq!(permits.available().unwrap(), 1);
}

#[test]
fn impossible_period_is_refused_with_a_reason() {
    for subject in Subject::all() {
        let mgr = subject.manager();
        let reason = |error: LockError| match error {
            LockError::InvalidOptions { reason, .. } => reason,
            other => panic!("{other:?}"),
        };
        let longest = 24 * 3600 * SECOND;
        assert!(mgr.lock_with("x", &LockOptions::new().hold_at_least(longest)).is_ok());
        let long = LockOptions::new().hold_at_least(longest + SECOND);
        let long = reason(mgr.lock_with("y", &long).unwrap_err());
        assert!(
            long.contains("hold_at_least is more than 24h") && long.contains("at most 24h"),
            "{long}"
        );
        let rw = mgr.rw_lock("y").unwrap();
        for error in [
            rw.read_with(&once_per_period()).map(drop).unwrap_err(),
            rw.write_with(&once_per_period()).map(drop).unwrap_err(),
        ] {
            assert!(reason(error).contains("works with mutexes and permits only"));
        }
        assert!(!mgr.is_locked("y").unwrap());
    }
}

/// A new master may lack the lock, and grants it again once the quarantine has ended.
///
/// Fault: N169
#[test]
fn period_is_not_longer_than_the_quarantine() {
    let server = RedisServer::start();
    let config = Config::new(server.url()).ttl(10 * SECOND).quarantine(30 * SECOND);
    let mgr = RedisMgr::new(config).unwrap();
    let error = mgr.lock_with("x", &LockOptions::new().hold_at_least(31 * SECOND)).unwrap_err();
    assert!(error.to_string().contains("longer than Config::quarantine (30s)"), "{error}");
    assert_eq!(get(&server, "lock:x"), None);
}
