//! Clocks of servers that jump, run fast, or start in 1970.

use std::time::Duration;

use distlock::{LockLost, RedisMgr, testing::servers::Script};

use super::TTL;
use crate::{
    faults::LOCK,
    helpers::{
        CALL_LIMIT, FENCE, SECOND, UnwrapReleased, await_gone, completes_within,
        config_medium_timeout, expect_loss, get, manager, pttl, server_with_scripts,
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

/// Replaces the server's clock, which a test cannot set, by the last two arguments of the script.
fn with_clock_arguments(script: &str) -> String {
    const CLOCK: &str = "
local server = redis
local redis = {pcall = server.pcall, call = function(command, ...)
  if command == 'TIME' then return {ARGV[#ARGV - 1], ARGV[#ARGV]} end
  return server.call(command, ...)
end}
";
    [CLOCK, script].concat()
}

/// Microseconds since 1970 have 16 digits only since September 2001. A board without a battery
/// starts in 1970.
///
/// Fault: F50
#[test]
fn times_with_fewer_digits_are_compared_as_numbers() {
    let [acquire, release] =
        [Script::Acquire, Script::Release].map(|script| with_clock_arguments(script.text()));
    let server = RedisServer::start();
    let (lock, queue, token) = ("lock:x", "distlock:queue:{lock:x}", token_key("x"));
    let run = |script: &str, args: &[&str], micros: u64| -> String {
        let [seconds, rest] = [micros / 1_000_000, micros % 1_000_000].map(|part| part.to_string());
        let mut request = vec!["EVAL", script, "4", lock, queue, &token, FENCE];
        request.extend(args.iter().copied().chain([&*seconds, &*rest]));
        server.query(&request)
    };
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
        let padded = |micros: u64| format!("{micros:016}");
        let id = format!("holder {round}");
        let lock = |not_after: u64, token_min: u64, at: u64| {
            let [not_after, token_min] = [padded(not_after), padded(token_min)];
            run(
                &acquire,
                &["n", &id, "60000", "try", "", &not_after, "1", &token_min, "3660000"],
                at,
            )
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
        let release = |not_after: u64| run(&release, &["n", &id, "", &padded(not_after)], now + 2);
        assert_eq!(release(now + 1), format!("n late {:016}", now + 2));
        assert_eq!(release(now + 2), "n released");
        // Tokens increase even if the clock does not advance.
        let again = number(&lock(now + 3, 0, now), 3).unwrap();
        assert!(again > number(&raised, 3).unwrap());
        assert_eq!(release(now + 2), "n released");
        last = again;
    }
}
