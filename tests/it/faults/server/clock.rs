//! Clocks of servers that jump, run fast, or start in 1970.

use std::time::Duration;

use distlock::{LockLost, RedisMgr, testing::servers::Script};

use super::TTL;
use crate::{
    faults::LOCK,
    helpers::{
        CALL_LIMIT, FENCE, SECOND, UnwrapReleased, await_gone, completes_within,
        config_medium_timeout, expect_loss, get, manager, pttl, queue_key, server_with_scripts,
        set_foreign_lock, spawn_queued_waiter, token_key, with_ttl,
    },
    support::{FaultProxy, RedisServer, TEST_TIMEOUT, command, eventually, off_by},
};

/// Changes all expiries as a jump of the server's clock by this time would.
fn jump(server: &RedisServer, milliseconds: i64) {
    let script = "for _, key in ipairs(redis.call('KEYS', '*')) do
          local left = redis.call('PTTL', key)
          if left > 0 then redis.call('PEXPIRE', key, left - tonumber(ARGV[1])) end
        end";
    server.cli(&["EVAL", script, "0", &milliseconds.to_string()]);
}

/// Fault: F50
#[test]
fn clock_jump_ahead_ends_the_lease_at_the_next_renewal() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    // The ttl is long enough for the next holder to come before the first renewal.
    let guard = mgr.lock_with("x", &with_ttl(4 * TTL)).unwrap();
    jump(&server, 3_600_000);
    assert_eq!(get(&server, LOCK), None);
    let next = completes_within(CALL_LIMIT, "try_lock", || other.try_lock("x").unwrap());
    assert!(next.fencing_token() > guard.fencing_token());
    let why = completes_within(4 * TTL + CALL_LIMIT, "the loss", || expect_loss(&guard));
    assert!(matches!(why, LockLost::Taken { .. }), "{why:?}");
    drop(guard);
    assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()));
}

/// Fault: F50
#[test]
fn clock_jump_back_blocks_no_lock_of_a_live_holder() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    let guard = mgr.lock_with("x", &with_ttl(4 * TTL)).unwrap();
    jump(&server, -3_600_000);
    assert!(pttl(&server, LOCK) > 3_000_000);
    eventually("a renewal corrects the expiry", TEST_TIMEOUT, || pttl(&server, LOCK) <= 12_000);
    guard.release().unwrap().unwrap_released();
    // The lock of a dead holder lasts longer. Waiters see its remaining ttl, and an operator can
    // release it.
    assert!(set_foreign_lock(&server, LOCK, "dead holder", 3_000));
    jump(&server, -3_600_000);
    let error = other.try_lock_for("x", Duration::from_millis(300)).unwrap_err();
    assert!(error.holder().unwrap().ttl_left().unwrap() > 3_000 * SECOND, "{error}");
    let waiting = spawn_queued_waiter(&server, &other, "x");
    assert!(mgr.force_release("x").unwrap());
    let next = completes_within(CALL_LIMIT, "the hand-over", || waiting.join().unwrap().unwrap());
    assert!(next.is_held());
}

/// The server's clock is fast: keys expire a hundredth of their ttl early.
///
/// Fault: F51
#[test]
fn lease_ends_before_its_key_if_the_clock_is_fast() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    for _ in 0..10 {
        let guard = mgr.lock_with("x", &with_ttl(10 * SECOND)).unwrap();
        jump(&server, 100);
        // In this order, a slow reply can only make the lease look shorter.
        let left = pttl(&server, LOCK);
        assert!(guard.remaining() <= Duration::from_millis(u64::try_from(left).unwrap()), "{left}");
    }
}

/// The client has read the server's clock when it connected. The clock has changed by an hour since
/// then, or by decades.
///
/// Fault: F50
#[test]
fn clock_step_between_requests_costs_no_lock() {
    for seconds in [3_600, -3_600, 1_700_000_000, -1_700_000_000] {
        let server = server_with_scripts();
        let proxy = FaultProxy::in_front_of(server.addr());
        let wrong = proxy.on_request(command("TIME"), off_by(seconds)).forever();
        let mgr = RedisMgr::new(config_medium_timeout(proxy.url())).unwrap();
        let mut last = manager(&server).lock("x").unwrap().fencing_token();
        for _ in 0..3 {
            let guard = completes_within(CALL_LIMIT, "lock", || {
                mgr.lock("x").unwrap_or_else(|error| panic!("{seconds}: {error}"))
            });
            assert!(guard.fencing_token() > last);
            last = guard.fencing_token();
            assert_eq!(get(&server, LOCK).as_deref(), Some(guard.id().as_str()));
            let waiting = spawn_queued_waiter(&server, &mgr, "x");
            guard.release().unwrap().unwrap_released();
            let next = completes_within(TEST_TIMEOUT, "the hand-over", || {
                waiting.join().unwrap().unwrap()
            });
            next.release().unwrap().unwrap_released();
            // The next round uses new connections, which have read the wrong time.
            proxy.reset_all();
        }
        assert!(wrong.fired() >= 3);
        await_gone(&server, LOCK);
        assert_eq!(server.keys(), [FENCE]);
    }
}

/// Runs a script for lock `x`, with this time in place of the server's clock, which a test cannot
/// set.
fn run_at(server: &RedisServer, script: Script, args: &[&str], micros: u64) -> String {
    const CLOCK: &str = "
local server = redis
local redis = {pcall = server.pcall, call = function(command, ...)
  if command == 'TIME' then return {KEYS[5], KEYS[6]} end
  return server.call(command, ...)
end}
";
    let script = [CLOCK, script.text()].concat();
    let [seconds, rest] = [micros / 1_000_000, micros % 1_000_000].map(|part| part.to_string());
    let (queue, token) = (queue_key("x"), token_key("x"));
    let mut request = vec!["EVAL", &script, "6", LOCK, &queue, &token, FENCE, &seconds, &rest];
    request.extend(args);
    server.query(&request)
}

fn padded(micros: u64) -> String {
    format!("{micros:016}")
}

/// Goal: the release need not raise the fence, and tokens rise nevertheless if the clock steps back
/// afterwards.
///
/// Fault: F50
/// Promise: P3
#[test]
fn fence_of_a_lone_server_rises_with_the_grant() {
    let server = RedisServer::start();
    let never = "9999999999999999";
    let lock = |at: u64| {
        run_at(&server, Script::Acquire, &["n", "me", "60000", never, "1", "3660000", "1"], at)
    };
    let release = |token: &str| run_at(&server, Script::Release, &["n", "me", token, "1"], 1);
    let [first, later] = [1_700_000_000_000_000, 1_700_000_000_000_009];
    assert_eq!(lock(first), format!("n fenced {first}"));
    assert_eq!(get(&server, FENCE), Some(first.to_string()));
    assert_eq!(release(""), "n released");
    assert_eq!(server.keys(), [FENCE]);
    // The clock has not advanced, or has stepped back.
    for (round, at) in [(1, first), (2, first - 3_600_000_000)] {
        let token = (first + round).to_string();
        assert_eq!(lock(at), format!("n held {at} {token}"));
        assert_eq!(get(&server, FENCE), Some((first + round - 1).to_string()));
        assert_eq!(release(&token), "n released");
    }
    assert_eq!(lock(later), format!("n fenced {later}"));
    // The reply was lost. The request that finds the lock gets the same token.
    assert_eq!(lock(later + 1), format!("n held {} {later}", later + 1));
    assert_eq!(release(&later.to_string()), "n released");
    assert_eq!((get(&server, FENCE), server.keys().len()), (Some(later.to_string()), 1));
}

/// Microseconds since 1970 have 16 digits only since September 2001. A board without a battery
/// starts in 1970.
///
/// Fault: F50
#[test]
fn times_with_fewer_digits_are_compared_as_numbers() {
    let server = RedisServer::start();
    let hour = 3_600_000_000;
    let times = [
        7,
        1_000_003,
        42 * hour,
        999_999_999_999_990,
        1_000_000_000_000_005,
        1_700_000_000_000_000,
    ];
    let mut last = 0;
    for (round, now) in times.into_iter().enumerate() {
        let id = format!("holder {round}");
        let lock = |not_after: u64, token_min: u64, at: u64| {
            let [not_after, token_min] = [padded(not_after), padded(token_min)];
            let args = ["n", &id, "60000", &not_after, "1", "try", "", &token_min, "3660000", "1"];
            run_at(&server, Script::Acquire, &args, at)
        };
        let number = |reply: &str, at: usize| {
            reply.split(' ').nth(at).and_then(|word| word.parse::<u64>().ok())
        };
        let late = lock(now - 1, 0, now);
        assert_eq!((late.split(' ').nth(1), number(&late, 2)), (Some("late"), Some(now)));
        let held = lock(now, 0, now);
        assert_eq!((held.split(' ').nth(1), number(&held, 2)), (Some("held"), Some(now)), "{held}");
        let token = number(&held, 3).unwrap();
        assert!(token > last && token >= now, "{token} after {last} at {now}");
        let raised = lock(now + 1, now + 9, now + 1);
        assert!(number(&raised, 3).unwrap() >= now + 9, "{raised}");
        let release = |not_after: u64| {
            let args = ["n", &id, "", &padded(not_after), "1"];
            run_at(&server, Script::Release, &args, now + 2)
        };
        assert_eq!(release(now + 1), format!("n late {:016}", now + 2));
        assert_eq!(release(now + 2), "n released");
        // Tokens increase even if the clock does not advance.
        let again = number(&lock(now + 3, 0, now), 3).unwrap();
        assert!(again > number(&raised, 3).unwrap());
        assert_eq!(release(now + 2), "n released");
        last = again;
    }
}
