//! Renewals that the holder asks for, and other ttls.

use std::time::Duration;

use distlock::{LockError, LockGuard, LockLost, LockOptions, testing::servers::Script};

use crate::{
    family::Subject,
    helpers::{
        CALL_LIMIT, SECOND, UnwrapReleased, await_gone, completes_within, config_long_timeouts,
        config_short_timeout, expect_deadline_before_key_expiry, is_renewal, manager, pttl,
        server_behind_proxy, with_ttl,
    },
    support::{Fault, RedisServer, TEST_TIMEOUT, command, contains, eventually},
};

const LOCK: &str = "lock:x";

fn ms(server: &RedisServer) -> u128 {
    u128::try_from(pttl(server, LOCK)).unwrap()
}

/// Promise: P2
#[cfg(feature = "testing")]
#[test]
fn asked_renewal_gives_a_whole_ttl() {
    let server = distlock::testing::MemoryServer::new();
    let mgr = server.manager();
    let options = LockOptions::new().ttl(10 * SECOND).renew(false);
    let (rw, permits) = (mgr.rw_lock("rw").unwrap(), mgr.semaphore("s", 3).unwrap());
    let mutex = mgr.lock_with("x", &options).unwrap();
    let read = rw.read_with(&options).unwrap();
    let permit = permits.acquire_with(2, &options).unwrap();
    let guards = [&mutex, &*read, &*permit];
    for _ in 0..5 {
        server.advance(6 * SECOND);
        for guard in guards {
            guard.renew().unwrap();
            assert!(guard.remaining() > 9 * SECOND, "{guard:?}");
        }
    }
    server.advance(11 * SECOND);
    for guard in guards {
        assert!(guard.renew().unwrap_err().is_lost());
    }
}

/// Promise: P2
#[test]
fn asked_renewal_reaches_the_server() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock_with("x", &LockOptions::new().ttl(600 * SECOND).renew(false)).unwrap();
    for _ in 0..3 {
        server.cli(&["PEXPIRE", LOCK, "60000"]);
        guard.renew().unwrap();
        assert!(ms(&server) > 60_000);
        expect_deadline_before_key_expiry(&server, &guard);
    }
}

/// Each of them may need a renewal of its own, because only one that is sent later counts.
///
/// Fault: N171
#[test]
fn threads_that_renew_one_lease_do_not_disturb_each_other() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock_with("x", &with_ttl(600 * SECOND)).unwrap();
    std::thread::scope(|threads| {
        for _ in 0..4 {
            threads.spawn(|| (0..250).for_each(|_| guard.renew().unwrap()));
        }
    });
}

#[test]
fn asked_renewal_of_a_lost_lock_returns_the_loss() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let options = LockOptions::new().ttl(600 * SECOND).renew(false);
    let guard = mgr.lock_with("x", &options).unwrap();
    server.cli(&["DEL", LOCK]);
    let error = guard.renew().unwrap_err();
    assert!(matches!(error, LockError::Lost { why: LockLost::Gone, .. }), "{error:?}");
    assert!(!guard.is_held() && guard.renew().unwrap_err().is_lost());

    let guard = mgr.lock_with("x", &options).unwrap();
    server.cli(&["SET", LOCK, "another client", "PX", "60000"]);
    let error = guard.extend(60 * SECOND).unwrap_err();
    assert_eq!(error.holder().unwrap().id(), "another client");
}

/// Fault: N171
#[test]
fn asked_renewal_does_not_wait_for_a_silent_server() {
    let (_server, proxy, mgr) = server_behind_proxy(config_short_timeout);
    let guard = mgr.lock_with("x", &with_ttl(600 * SECOND)).unwrap();
    proxy.blackhole();
    let (guard, error) = completes_within(CALL_LIMIT, "the call", move || {
        let error = guard.renew().unwrap_err();
        (guard, error)
    });
    assert!(error.is_unavailable(), "{error:?}");
    assert!(error.to_string().starts_with("could not renew lock \"x\" at "), "{error}");
    assert!(guard.is_held());
}

/// The renewer still waits for the reply to the renewal.
///
/// Fault: N171
#[test]
fn asked_renewal_ends_with_its_lease() {
    let (_server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    let options = with_ttl(600 * SECOND).max_hold(2 * SECOND);
    let guard = mgr.lock_with("x", &options).unwrap();
    let unanswered = proxy.on_request(is_renewal(LOCK), Fault::HoldRequest);
    let error = completes_within(CALL_LIMIT, "the call", move || guard.renew().unwrap_err());
    assert!(matches!(error, LockError::Lost { why: LockLost::MaxHold, .. }), "{error:?}");
    unanswered.release();
}

/// Fault: N192
/// Promise: P2
#[test]
fn extended_lease_has_its_new_ttl_on_the_server_first() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock_with("x", &with_ttl(20 * SECOND)).unwrap();
    guard.extend(600 * SECOND).unwrap();
    assert!(ms(&server) > 500_000 && guard.remaining() > 500 * SECOND);
    expect_deadline_before_key_expiry(&server, &guard);
    // A shorter ttl counts once the former one has run out.
    for shorter in [2, 20] {
        guard.extend(shorter * SECOND).unwrap();
        assert!(ms(&server) > 500_000 && guard.remaining() > 500 * SECOND);
        expect_deadline_before_key_expiry(&server, &guard);
    }
    guard.release().unwrap().unwrap_released();
}

/// Its release is repeated for as long as the server may keep the lock. Ten tries take longer than
/// the first ttl.
///
/// Fault: N192
/// Promise: P6
#[test]
fn failed_release_of_an_extended_lock_is_repeated() {
    let (server, proxy, mgr) = server_behind_proxy(config_short_timeout);
    let guard = mgr.lock_with("x", &with_ttl(SECOND)).unwrap();
    guard.extend(600 * SECOND).unwrap();
    guard.extend(SECOND).unwrap();
    let resets = proxy.on_request(contains(LOCK), Fault::ResetBeforeRequest).forever();
    assert!(guard.release().unwrap_err().is_unavailable());
    let before = resets.fired();
    eventually("it is tried again", TEST_TIMEOUT, || resets.fired() >= before + 10);
    resets.disarm();
    await_gone(&server, LOCK);
}

/// The renewer uses the new ttl from then on.
#[test]
fn later_renewals_use_the_extended_ttl() {
    let server = RedisServer::start();
    let guard = manager(&server).lock_with("x", &with_ttl(30 * SECOND)).unwrap();
    guard.extend(60 * SECOND).unwrap();
    let commands = server.monitor();
    guard.renew().unwrap();
    let is_renewal = |line: &String| line.contains("lua] \"PEXPIRE\" \"lock:x\" \"60000\"");
    eventually("it is renewed", TEST_TIMEOUT, || commands.lines().iter().any(is_renewal));
}

/// A renewal from before the extension arrives after it.
///
/// Fault: N171
#[test]
fn delayed_renewal_does_not_shorten_an_extended_lease() {
    let renew = Script::Renew.text();
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock_with("x", &with_ttl(20 * SECOND)).unwrap();
    guard.extend(600 * SECOND).unwrap();
    let request = ["EVAL", renew, "1", LOCK, "7", "1", guard.id().as_str(), "20000", "1"];
    let delayed: Vec<redis::Value> = server.query(&request);
    assert_eq!(delayed[1], redis::Value::Int(1));
    expect_deadline_before_key_expiry(&server, &guard);
    drop(guard);

    let reader = mgr.rw_lock("x").unwrap().read_with(&with_ttl(20 * SECOND)).unwrap();
    reader.extend(600 * SECOND).unwrap();
    let request = ["EVAL", renew, "2", LOCK, "distlock:members:{lock:x}", "7", "1"];
    let args = [reader.id().as_str(), "+20000 1 0", "1"];
    let delayed: Vec<redis::Value> = server.query(&[&request[..], &args].concat());
    assert_eq!(delayed[1], redis::Value::Int(1));
    expect_deadline_before_key_expiry(&server, &reader);
    let members: Vec<redis::Value> =
        server.query(&["ZRANGE", "distlock:members:{lock:x}", "0", "-1", "WITHSCORES"]);
    let expires: u128 = redis::from_redis_value(members[1].clone()).unwrap();
    let (now_s, _): (u128, u128) = server.query(&["TIME"]);
    let expected = now_s * 1000 + ms(&server);
    assert!(expires.abs_diff(expected) < CALL_LIMIT.as_millis(), "{expires} {expected}");
}

/// Whether the thread with this name waits.
fn is_asleep(name: &str) -> bool {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().filter_map(Result::ok);
    let mut stats = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("stat")).ok());
    stats.any(|stat| stat.contains(&format!("({name}) S ")))
}

/// The renewer connects for a renewal. Meanwhile the holder extends the lease, and the renewal is
/// sent with the former ttl.
///
/// Fault: N171
/// Promise: P2
#[test]
fn renewal_that_is_sent_late_does_not_confirm_an_extension() {
    let (_server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    let guard = mgr.lock_with("x", &LockOptions::new().ttl(60 * SECOND).renew(false)).unwrap();
    let connects = proxy.on_request(command("TIME"), Fault::HoldReply);
    std::thread::scope(|threads| {
        threads.spawn(|| guard.renew().unwrap());
        connects.wait_fired();
        let extending = std::thread::Builder::new().name("extends-x".into());
        let extended = extending.spawn_scoped(threads, || guard.extend(600 * SECOND)).unwrap();
        eventually("it waits for a renewal", TEST_TIMEOUT, || is_asleep("extends-x"));
        connects.release();
        extended.join().unwrap().unwrap();
        assert!(guard.remaining() > 500 * SECOND, "{guard:?}");
    });
}

/// The proxy holds a renewal back and cuts its connection. It reaches the server after the lease
/// was extended, and still in its time.
///
/// Fault: N171
#[test]
fn lease_does_not_count_on_what_a_lost_renewal_may_shorten() {
    let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    let guard = mgr.lock_with("x", &with_ttl(60 * SECOND)).unwrap();
    // From here on, the server knows the script.
    guard.renew().unwrap();
    let late = proxy.on_request(is_renewal("lock:x"), Fault::HoldRequest);
    std::thread::scope(|threads| {
        threads.spawn(|| guard.renew());
        late.wait_fired();
        proxy.reset_all();
    });
    guard.extend(600 * SECOND).unwrap();
    assert!(ms(&server) > 500_000 && guard.remaining() < 61 * SECOND, "{guard:?}");
    late.release();
    eventually("the late renewal shortens its time", TEST_TIMEOUT, || ms(&server) <= 60_000);
    expect_deadline_before_key_expiry(&server, &guard);
}

#[test]
fn impossible_ttl_is_refused_and_changes_nothing() {
    for subject in Subject::all() {
        let guard = subject.manager().lock("x").unwrap();
        for ttl in [Duration::ZERO, Duration::MAX] {
            let error = guard.extend(ttl).unwrap_err();
            assert!(error.is_invalid() && error.to_string().contains("must be 10ms to"), "{error}");
        }
        assert!(LockGuard::is_held(&guard));
        guard.renew().unwrap();
    }
}
