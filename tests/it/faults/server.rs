//! Servers that fail over, and clocks of servers that jump.

mod failover;
mod state;

use std::time::Duration;

use distlock::{LockLost, RedisMgr, Released};

use super::{LOCK, is_renewed};
use crate::{
    helpers::{
        CALL_LIMIT, SECOND, UnwrapReleased, await_gone, completes_within, config_long_timeouts,
        config_medium_timeout, config_short_timeout, expect_loss, fence_key, foreign_take, get,
        is_renewal, manager, pttl, queue_key, server_with_scripts, spawn_queued_waiter, with_ttl,
    },
    support::{CEILING, Fault, FaultProxy, RedisServer, command, eventually, off_by},
};

const LEASE: Duration = Duration::from_secs(3);

/// Makes one server the replica of another, and waits until it has everything.
pub(super) fn follow(replica: &RedisServer, master: &RedisServer) {
    replica.cli(&["REPLICAOF", "127.0.0.1", &master.port().to_string()]);
    let is_up =
        || replica.query::<String>(&["INFO", "replication"]).contains("master_link_status:up");
    eventually("the replica is up", CEILING, is_up);
}

pub(super) fn promote(replica: &RedisServer) {
    replica.cli(&["REPLICAOF", "NO", "ONE"]);
}

/// Goal: a failover in which nothing is lost costs no lock, although the former master keeps the
/// connections open. Only whoever connects anew is led to the new one.
#[test]
fn a_demoted_master_is_left_for_the_one_to_which_its_name_leads() {
    let (old, new) = (RedisServer::start(), RedisServer::start());
    let proxy = FaultProxy::in_front_of(old.addr());
    let mgr = RedisMgr::new(config_medium_timeout(proxy.url())).unwrap();
    let guard = mgr.lock_with("x", &with_ttl(4 * LEASE)).unwrap();
    is_renewed(&old, &guard, 1);
    follow(&new, &old);
    assert_eq!(get(&new, LOCK).as_deref(), Some(guard.id().as_str()));
    proxy.lead_to(new.addr());
    promote(&new);
    follow(&old, &new);
    eventually("it is led to the new one", CEILING, || match mgr.try_lock("y") {
        Ok(guard) => get(&new, "lock:y").as_deref() == Some(guard.id().as_str()),
        Err(error) => {
            assert!(error.code() == Some("READONLY") || error.is_unavailable(), "{error}");
            false
        }
    });
    is_renewed(&new, &guard, 1);
    guard.release().unwrap().unwrap_released();
    assert_eq!(get(&new, LOCK), None);
}

/// As operators do it: the master stops writes, waits until the replica has all, and they change
/// places. The former master keeps its connections, and what it says over one is no answer where
/// the name leads elsewhere by now.
#[test]
fn a_failover_by_command_fails_no_call() {
    let (old, new) = (RedisServer::start(), RedisServer::start());
    let proxy = FaultProxy::in_front_of(old.addr());
    let [releases, tries, waits] = [(); 3].map(|()| {
        let mgr = RedisMgr::new(config_medium_timeout(proxy.url())).unwrap();
        mgr.lock("warm").unwrap().release().unwrap().unwrap_released();
        mgr
    });
    let guard = releases.lock_with("x", &with_ttl(10 * LEASE)).unwrap();
    follow(&new, &old);
    let told = |server: &RedisServer, what| {
        server.query::<String>(&["INFO", "replication"]).contains(what)
    };
    eventually("the master knows it", CEILING, || told(&old, "state=online"));
    old.cli(&["FAILOVER"]);
    eventually("they have changed places", CEILING, || {
        told(&new, "role:master") && told(&old, "role:slave")
    });
    proxy.lead_to(new.addr());
    guard.release().unwrap().unwrap_released();
    assert_eq!(get(&new, LOCK), None);
    for next in [tries.try_lock("x").unwrap(), waits.lock("y").unwrap()] {
        assert_eq!(
            get(&new, &format!("lock:{}", next.name())).as_deref(),
            Some(next.id().as_str())
        );
        next.release().unwrap().unwrap_released();
    }
}

/// While the server is away, its socket file may be there without anybody behind it, or not at all;
/// then there is another.
#[test]
fn a_socket_file_that_is_made_anew_costs_no_lock() {
    let server = RedisServer::builder().unix_socket().append_only(true).start();
    let mgr = RedisMgr::new(config_medium_timeout(server.unix_url())).unwrap();
    let guard = mgr.lock_with("x", &with_ttl(10 * LEASE)).unwrap();
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    server.kill();
    for _ in 0..2 {
        let error = completes_within(CALL_LIMIT, "trying", || mgr.try_lock("y").unwrap_err());
        assert!(error.is_unavailable(), "{error}");
        let _ = std::fs::remove_file(server.socket_path());
    }
    server.restart();
    is_renewed(&server, &guard, 1);
    guard.release().unwrap().unwrap_released();
    completes_within(CEILING, "the next", || waiting.join().unwrap().unwrap())
        .release()
        .unwrap()
        .unwrap_released();
}

/// A master that has become a replica keeps its subscribers. Waiters of the new one must not go on
/// listening there.
#[test]
fn waiters_take_their_line_to_the_new_master() {
    let (old, new) = (RedisServer::start(), RedisServer::start());
    let proxy = FaultProxy::in_front_of(old.addr());
    let mgr = RedisMgr::new(config_medium_timeout(proxy.url())).unwrap();
    // So that there is a line.
    let first = manager(&old).lock("warm").unwrap();
    let waiting = spawn_queued_waiter(&old, &mgr, "warm");
    first.release().unwrap().unwrap_released();
    waiting.join().unwrap().unwrap().release().unwrap().unwrap_released();
    follow(&new, &old);
    proxy.lead_to(new.addr());
    promote(&new);
    follow(&old, &new);
    eventually("it is led to the new one", CEILING, || mgr.try_lock("y").is_ok());
    let other = manager(&new);
    let held = other.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&new, &mgr, "x");
    eventually("it listens there", CEILING, || {
        !new.query::<Vec<String>>(&["PUBSUB", "CHANNELS"]).is_empty()
    });
    held.release().unwrap().unwrap_released();
    assert!(other.try_lock("x").is_err(), "it was handed over");
    let next = waiting.join().unwrap().unwrap();
    assert!(next.is_held());
    assert_eq!(get(&new, LOCK).as_deref(), Some(next.id().as_str()));
}

/// Otherwise a waiter would believe a replica whose master gave the lock to somebody else.
#[test]
fn a_replica_does_not_repeat_whom_its_master_gave_the_lock() {
    const CHANNEL: &str = "distlock:client:somebody";
    let (master, replica) = (RedisServer::start(), RedisServer::start());
    follow(&replica, &master);
    let held = manager(&master).lock("x").unwrap();
    let listen = |server: &RedisServer| {
        let mut connection = redis::Client::open(server.url()).unwrap().get_connection().unwrap();
        connection.set_read_timeout(Some(CEILING)).unwrap();
        connection
            .send_packed_command(&redis::cmd("SUBSCRIBE").arg(CHANNEL).get_packed_command())
            .unwrap();
        connection.recv_response().unwrap();
        connection
    };
    let (mut at_master, mut at_replica) = (listen(&master), listen(&replica));
    master.cli(&["RPUSH", &queue_key("x"), &format!("20000 {CHANNEL} me")]);
    held.release().unwrap().unwrap_released();
    assert_eq!(get(&master, LOCK).as_deref(), Some("me"));
    master.cli(&["PUBLISH", CHANNEL, "the end"]);
    let hear = |connection: &mut redis::Connection| match connection.recv_response().unwrap() {
        redis::Value::Array(parts) => redis::from_redis_value::<String>(parts[2].clone()).unwrap(),
        other => panic!("{other:?}"),
    };
    assert!(hear(&mut at_master).ends_with(" 20000 me"));
    assert_eq!(hear(&mut at_master), "the end");
    assert_eq!(hear(&mut at_replica), "the end");
    eventually("it has the lock itself", CEILING, || get(&replica, LOCK).as_deref() == Some("me"));
}

/// The same where the former master is told to answer nobody while it has nobody to follow.
#[test]
fn a_replica_that_answers_nobody_is_left_for_the_one_to_which_its_name_leads() {
    let (old, new) = (RedisServer::start(), RedisServer::start());
    let proxy = FaultProxy::in_front_of(old.addr());
    let mgr = RedisMgr::new(config_medium_timeout(proxy.url())).unwrap();
    drop(mgr.lock("x").unwrap());
    old.config_set("replica-serve-stale-data", "no");
    old.cli(&["REPLICAOF", "127.0.0.1", "1"]);
    proxy.lead_to(new.addr());
    eventually("it is led to the new one", CEILING, || match mgr.try_lock("x") {
        Ok(guard) => get(&new, LOCK).as_deref() == Some(guard.id().as_str()),
        Err(error) => {
            assert!(error.code() == Some("MASTERDOWN") || error.is_unavailable(), "{error}");
            false
        }
    });
}

/// The replica that takes over has not heard of the last lock. Two believe in it for up to a
/// renewal, and the tokens tell.
#[test]
fn a_failover_that_forgets_the_lock_is_noticed_and_the_tokens_rise() {
    let (old, new) = (RedisServer::start(), RedisServer::start());
    let proxy = FaultProxy::in_front_of(old.addr());
    let mgr = RedisMgr::new(config_long_timeouts(proxy.url())).unwrap();
    mgr.lock("x").unwrap().release().unwrap().unwrap_released();
    follow(&new, &old);
    promote(&new);
    // The next one has it before the first renewal asks.
    let guard = mgr.lock_with("x", &with_ttl(4 * LEASE)).unwrap();
    proxy.lead_to(new.addr());
    old.kill();
    proxy.reset_all();
    let other = RedisMgr::new(config_long_timeouts(proxy.url())).unwrap();
    let next = completes_within(CALL_LIMIT, "locking", || other.try_lock("x").unwrap());
    assert!(next.fencing_token() > guard.fencing_token());
    let why = expect_loss(&guard);
    assert!(matches!(&why, LockLost::Taken { by, .. } if by.id() == next.id().as_str()), "{why:?}");
    let released = guard.release();
    assert!(matches!(released, Ok(Released::OwnedByOther(_))), "{released:?}");
    assert!(next.is_held());
    assert_eq!(get(&new, LOCK).as_deref(), Some(next.id().as_str()));
}

/// What a jump of the server's clock by so much does to everything that has an expiry.
fn jump(server: &RedisServer, milliseconds: i64) {
    let script = "for _, key in ipairs(redis.call('KEYS', '*')) do
          local left = redis.call('PTTL', key)
          if left > 0 then redis.call('PEXPIRE', key, left - tonumber(ARGV[1])) end
        end";
    server.cli(&["EVAL", script, "0", &milliseconds.to_string()]);
}

#[test]
fn a_server_clock_that_jumps_ahead_ends_the_hold_at_the_next_renewal() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    // The next one has it before the first renewal asks.
    let guard = mgr.lock_with("x", &with_ttl(4 * LEASE)).unwrap();
    jump(&server, 3_600_000);
    assert_eq!(get(&server, LOCK), None);
    let next = completes_within(CALL_LIMIT, "locking", || other.try_lock("x").unwrap());
    assert!(next.fencing_token() > guard.fencing_token());
    let why = completes_within(4 * LEASE + CALL_LIMIT, "the loss", || expect_loss(&guard));
    assert!(matches!(why, LockLost::Taken { .. }), "{why:?}");
    drop(guard);
    assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()));
}

#[test]
fn a_server_clock_that_jumps_back_blocks_nobody_whose_holder_lives() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    let guard = mgr.lock_with("x", &with_ttl(4 * LEASE)).unwrap();
    jump(&server, -3_600_000);
    assert!(pttl(&server, LOCK) > 3_000_000);
    eventually("the renewal sets it right", CEILING, || pttl(&server, LOCK) <= 12_000);
    guard.release().unwrap().unwrap_released();
    // A holder that has died is in the way for so much longer, which waiters are told, and
    // operators can end.
    assert!(foreign_take(&server, LOCK, "somebody who died", 3_000));
    jump(&server, -3_600_000);
    let error = other.try_lock_for("x", Duration::from_millis(300)).unwrap_err();
    assert!(error.holder().unwrap().ttl_left().unwrap() > 3_000 * SECOND, "{error}");
    let waiting = spawn_queued_waiter(&server, &other, "x");
    assert!(mgr.force_release("x").unwrap());
    let next = completes_within(CALL_LIMIT, "the next", || waiting.join().unwrap().unwrap());
    assert!(next.is_held());
}

/// The clock runs faster than ours: keys live for a hundredth less than they should.
#[test]
fn a_server_clock_that_runs_fast_within_the_margin_ends_no_key_before_the_belief() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    for _ in 0..10 {
        let guard = mgr.lock_with("x", &with_ttl(10 * SECOND)).unwrap();
        jump(&server, 100);
        // Read in this order, the belief can only seem shorter than it is by what the answer took.
        let left = pttl(&server, LOCK);
        assert!(guard.remaining() <= Duration::from_millis(u64::try_from(left).unwrap()), "{left}");
    }
}

/// The client has read the server's clock when it signed in, and an hour lies between that and what
/// it shows now.
#[test]
fn a_server_clock_that_steps_between_two_requests_costs_neither_lock_nor_cleanliness() {
    for seconds in [3_600, -3_600, 1_700_000_000, -1_700_000_000] {
        let server = server_with_scripts();
        let proxy = FaultProxy::in_front_of(server.addr());
        let wrong = proxy.on_request(command("TIME"), off_by(seconds)).forever();
        let mgr = RedisMgr::new(config_medium_timeout(proxy.url())).unwrap();
        let mut last = manager(&server).lock("x").unwrap().fencing_token();
        for _ in 0..3 {
            let guard = completes_within(CALL_LIMIT, "locking", || {
                mgr.lock("x").unwrap_or_else(|error| panic!("{seconds}: {error}"))
            });
            assert!(guard.fencing_token() > last);
            last = guard.fencing_token();
            assert_eq!(get(&server, LOCK).as_deref(), Some(guard.id().as_str()));
            let waiting = spawn_queued_waiter(&server, &mgr, "x");
            guard.release().unwrap().unwrap_released();
            let next = completes_within(CEILING, "the next", || waiting.join().unwrap().unwrap());
            next.release().unwrap().unwrap_released();
            // The next one is asked over new connections, with the wrong time in mind.
            proxy.reset_all();
        }
        assert!(wrong.fired() >= 3);
        await_gone(&server, LOCK);
        assert_eq!(server.keys(), [fence_key("x")]);
    }
}

/// The scripts with another clock in place of the server's, which a test cannot set: its last two
/// arguments.
fn at_a_time(script: &str) -> String {
    const CLOCK: &str = "
local server = redis
local redis = {pcall = server.pcall, call = function(command, ...)
  if command == 'TIME' then return {ARGV[#ARGV - 1], ARGV[#ARGV]} end
  return server.call(command, ...)
end}
";
    format!("{CLOCK}{}{script}", include_str!("../../../src/node/lua/shared.lua"))
}

/// Microseconds since 1970 have 16 digits from September 2001 on. A board without a battery begins
/// in 1970.
#[test]
fn a_server_clock_with_fewer_digits_compares_like_the_number_that_it_is() {
    let acquire = at_a_time(include_str!("../../../src/node/lua/acquire.lua"));
    let release = at_a_time(include_str!("../../../src/node/lua/release.lua"));
    let server = RedisServer::start();
    let (lock, queue, fence) = ("lock:x", "distlock:queue:{lock:x}", fence_key("x"));
    let ask = |script: &str, args: &[&str], micros: u64| -> String {
        let [seconds, rest] = [micros / 1_000_000, micros % 1_000_000].map(|part| part.to_string());
        let mut request = vec!["EVAL", script, "3", lock, queue, &fence];
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
        let by = |limit: u64| format!("{limit:016}");
        let id = format!("holder {round}");
        let lock_by = |not_after: u64, token_min: u64, at: u64| {
            ask(&acquire, &["n", &id, "60000", "try", "", &by(not_after), "1", &by(token_min)], at)
        };
        let number = |reply: &str, at: usize| {
            reply.split(' ').nth(at).and_then(|word| word.parse::<u64>().ok())
        };
        let late = lock_by(now - 1, 0, now);
        assert_eq!((late.split(' ').nth(1), number(&late, 2)), (Some("late"), Some(now)));
        let held = lock_by(now, 0, now);
        assert_eq!((held.split(' ').nth(1), number(&held, 2)), (Some("held"), Some(now)), "{held}");
        let token = number(&held, 3).unwrap();
        assert!(token > last && token >= now, "{token} after {last} at {now}");
        let raised = lock_by(now + 1, now + 9, now + 1);
        assert!(number(&raised, 3).unwrap() >= now + 9, "{raised}");
        let free = |not_after: u64| ask(&release, &["n", &id, "", &by(not_after)], now + 2);
        assert_eq!(free(now + 1), format!("n late {:016}", now + 2));
        assert_eq!(free(now + 2), "n released");
        // The clock stands still, and tokens do not.
        let again = number(&lock_by(now + 3, 0, now), 3).unwrap();
        assert!(again > number(&raised, 3).unwrap());
        assert_eq!(free(now + 2), "n released");
        last = again;
    }
}

/// The catalogue's worst case of a lost answer: what was given up arrives, and nobody is there to
/// give it back.
#[test]
fn a_renewal_that_arrives_after_its_holder_has_died_extends_it_once() {
    let server = server_with_scripts();
    let proxy = FaultProxy::in_front_of(server.addr());
    let mgr = RedisMgr::new(config_short_timeout(proxy.url())).unwrap();
    let guard = mgr.lock_with("x", &with_ttl(4 * LEASE)).unwrap();
    let late = proxy.on_request(is_renewal(LOCK), Fault::HoldRequest);
    late.wait_fired();
    proxy.blackhole();
    std::mem::forget(guard);
    let commands = server.monitor();
    late.let_go();
    commands.wait_for("lua] \"PEXPIRE\" \"lock:x\"");
    // It is one lease away at the most, whatever has been sent.
    assert!(pttl(&server, LOCK) <= 12_000);
    completes_within(LEASE * 8 + CALL_LIMIT, "the end", || await_gone(&server, LOCK));
    assert_eq!(super::renewals(&commands, LOCK), 1);
}
