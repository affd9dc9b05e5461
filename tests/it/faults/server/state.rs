//! States in which a server runs, but refuses or delays requests.

use std::{fs, path::Path, thread, time::Duration};

use distlock::{LockError, LockLost, RedisMgr};

use crate::faults::{LOCK, expect_renewals};
use crate::{
    helpers::{
        CALL_LIMIT, SECOND, UnwrapReleased, await_gone, await_queue_length, capture_log,
        completes_within, config_long_timeouts, config_medium_timeout, config_short_timeout,
        expect_loss, get, in_own_process, is_renewal, manager, queue_length, server_behind_proxy,
        spawn_call, spawn_queued_waiter, timed, with_ttl,
    },
    support::{Fault, RedisServer, TEST_TIMEOUT, contains, eventually, eventually_some},
};

const TTL: Duration = Duration::from_secs(4);

/// The server cannot save its data, because its folder does not exist.
fn misconf(server: &RedisServer) {
    server.config_set("save", "3600 1");
    let (_, folder): (String, String) = server.query(&["CONFIG", "GET", "dir"]);
    let folder = Path::new(&folder).join("away");
    fs::create_dir(&folder).unwrap();
    server.config_set("dir", folder.to_str().unwrap());
    fs::remove_dir(&folder).unwrap();
    server.cli(&["BGSAVE"]);
    eventually("saving has failed", TEST_TIMEOUT, || {
        server.query::<String>(&["INFO", "persistence"]).contains("rdb_last_bgsave_status:err")
    });
}

fn end_misconf(server: &RedisServer) {
    server.config_set("save", "");
    server.config_set("dir", std::env::temp_dir().to_str().unwrap());
}

fn masterdown(server: &RedisServer) {
    server.config_set("replica-serve-stale-data", "no");
    server.cli(&["REPLICAOF", "127.0.0.1", "1"]);
}

fn promote(server: &RedisServer) {
    server.cli(&["REPLICAOF", "NO", "ONE"]);
}

type Change = fn(&RedisServer);

/// States in which a server refuses renewals: the error code, and how the state begins and ends.
const STATES: [(&str, Change, Change); 4] = [
    ("MISCONF", misconf, end_misconf),
    ("MASTERDOWN", masterdown, promote),
    ("READONLY", |server| drop(server.cli(&["REPLICAOF", "127.0.0.1", "1"])), promote),
    (
        "NOREPLICAS",
        |server| server.config_set("min-replicas-to-write", "1"),
        |server| server.config_set("min-replicas-to-write", "0"),
    ),
];

/// Fault: F34, F38, F39
#[test]
fn lasting_state_is_reported_and_ends_the_lease() {
    for (code, begin, end) in STATES {
        let server = RedisServer::start();
        let mgr = RedisMgr::new(config_medium_timeout(server.url())).unwrap();
        let guard = mgr.lock_with("x", &with_ttl(TTL)).unwrap();
        begin(&server);
        let ((left, refused, why), span) = timed(|| {
            let left = guard.remaining();
            (
                left,
                completes_within(CALL_LIMIT, code, || mgr.try_lock("y").unwrap_err()),
                expect_loss(&guard),
            )
        });
        assert!(refused.to_string().contains(code), "{code}: {refused}");
        assert_eq!(refused.is_unavailable(), code == "MASTERDOWN", "{refused:?}");
        assert_eq!(why, LockLost::Expired, "{code}");
        assert!(span >= left, "{code}: lost after {span:?} with {left:?} left");
        assert!(span < left + CALL_LIMIT, "{code}: {span:?}");
        end(&server);
        await_gone(&server, LOCK);
        let next =
            completes_within(TEST_TIMEOUT, "lock", || mgr.try_lock_for("x", TEST_TIMEOUT).unwrap());
        assert!(next.fencing_token() > guard.fencing_token(), "{code}");
        next.release().unwrap().unwrap_released();
    }
}

/// Fault: F34, F39
#[test]
fn state_shorter_than_the_lease_costs_no_lock() {
    for (code, begin, end) in STATES {
        let server = RedisServer::start();
        let mgr = manager(&server);
        let ttl = 12 * SECOND;
        let guard = mgr.lock_with("x", &with_ttl(ttl)).unwrap();
        begin(&server);
        eventually("a renewal is overdue", TEST_TIMEOUT, || guard.remaining() < ttl * 6 / 10);
        end(&server);
        eventually("it is renewed", TEST_TIMEOUT, || guard.remaining() > ttl * 7 / 10);
        assert!(guard.lost().is_empty(), "{code}");
        guard.release().unwrap().unwrap_released();
    }
}

/// Fault: F37
#[test]
fn server_that_loads_its_data_is_awaited() {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_short_timeout(server.url())).unwrap();
    let guard = mgr.lock_with("x", &with_ttl(30 * SECOND)).unwrap();
    server.cli(&[
        "EVAL",
        "for i = 1, 3000 do redis.call('SET', 'filler' .. i, string.rep('x', 100)) end",
        "0",
    ]);
    server.config_set("loading-process-events-interval-bytes", "1024");
    server.config_set("key-load-delay", "1000");
    thread::scope(|threads| {
        let reloading = threads.spawn(|| {
            let mut connection =
                redis::Client::open(server.url()).unwrap().get_connection().unwrap();
            redis::cmd("DEBUG").arg("RELOAD").query::<()>(&mut connection).unwrap();
        });
        let error = completes_within(TEST_TIMEOUT, "try_lock", || {
            loop {
                // Until the reload has begun.
                match mgr.try_lock("y") {
                    Err(error) if error.to_string().contains("LOADING") => break error,
                    Err(error) => {
                        assert!(error.is_unavailable() && !reloading.is_finished(), "{error}")
                    }
                    Ok(guard) => drop(guard),
                }
            }
        });
        assert!(error.is_unavailable(), "{error}");
        let waited = completes_within(TEST_TIMEOUT, "the wait", || {
            mgr.try_lock_for("y", TEST_TIMEOUT).unwrap()
        });
        reloading.join().unwrap();
        waited.release().unwrap().unwrap_released();
    });
    server.config_set("key-load-delay", "0");
    assert!(guard.is_held());
    guard.release().unwrap().unwrap_released();
}

/// Of all keys with an expiry, the lock expires first, so the server evicts it.
///
/// Fault: F32
#[test]
fn evicted_lock_is_lost_at_the_next_renewal() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock_with("x", &with_ttl(TTL)).unwrap();
    server.config_set("maxmemory-policy", "volatile-ttl");
    let used: String = server.query(&["INFO", "memory"]);
    let used = used.lines().find_map(|line| line.strip_prefix("used_memory:")).unwrap();
    server.config_set("maxmemory", &(used.parse::<u64>().unwrap() + (1 << 20)).to_string());
    let filler = "x".repeat(10_000);
    for n in 0.. {
        if get(&server, LOCK).is_none() {
            break;
        }
        assert!(n < 10_000, "nothing was evicted");
        server.cli(&["SET", &format!("cache{n}"), &filler, "EX", "3600"]);
    }
    let (why, span) = timed(|| expect_loss(&guard));
    assert_eq!(why, LockLost::Gone);
    assert!(span < TTL + CALL_LIMIT, "{span:?}");
    server.config_set("maxmemory", "0");
    let next = mgr.lock("x").unwrap();
    assert!(next.fencing_token() > guard.fencing_token());
}

/// When the pause ends, the server executes all requests that it has received meanwhile.
///
/// Fault: F41
#[test]
fn pause_longer_than_the_lease_leaves_nothing() {
    for kind in ["ALL", "WRITE"] {
        let server = RedisServer::start();
        let mgr = RedisMgr::new(config_short_timeout(server.url())).unwrap();
        let guard = mgr.lock_with("x", &with_ttl(2 * SECOND)).unwrap();
        server.cli(&["CLIENT", "PAUSE", "5000", kind]);
        let left = guard.remaining();
        let waiting = spawn_call(&mgr, "x", |mgr, name| {
            mgr.lock_with(name, &with_ttl(30 * SECOND).wait(SECOND)).map(drop)
        });
        let (why, span) = timed(|| expect_loss(&guard));
        assert_eq!(why, LockLost::Expired, "{kind}");
        assert!(span + SECOND >= left, "{kind}: {span:?} of {left:?}");
        assert!(completes_within(CALL_LIMIT, "the wait", || waiting.join().unwrap()).is_err());
        // The paused requests asked for 30 s; what they acquired must be cleaned up.
        let next = completes_within(TEST_TIMEOUT, "lock", || manager(&server).lock("x").unwrap());
        assert!(next.fencing_token() > guard.fencing_token());
        drop(guard);
        next.ensure_held().unwrap();
        assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()));
    }
}

/// The server is blocked several times, for a while each.
///
/// Fault: F48
#[test]
fn stalls_shorter_than_the_lease_cost_no_lock() {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_long_timeouts(server.url()).operation_timeout(SECOND)).unwrap();
    let guard = mgr.lock_with("x", &with_ttl(12 * SECOND)).unwrap();
    for _ in 0..3 {
        server.cli(&["DEBUG", "SLEEP", "1.5"]);
        assert!(guard.is_held());
    }
    expect_renewals(&server, &guard, 1);
    guard.release().unwrap().unwrap_released();
}

/// Waiters receive their grants, and warnings are few, whatever is published to a manager's
/// channel.
///
/// Fault: F45
#[test]
fn flood_on_a_manager_channel_hides_no_grant() {
    if !in_own_process("faults::server::state::flood_on_a_manager_channel_hides_no_grant", &[]) {
        return;
    }
    let logged = capture_log(log::LevelFilter::Warn);
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    for limit in ["", "pubsub 65536 0 0"] {
        if !limit.is_empty() {
            server.config_set("client-output-buffer-limit", limit);
        }
        let guard = other.lock("x").unwrap();
        let waiting = spawn_queued_waiter(&server, &mgr, "x");
        // In the second round the server may have closed the connection of the first round.
        let channels = || server.query::<Vec<String>>(&["PUBSUB", "CHANNELS", "distlock:*"]);
        let channel = &eventually_some("a client is subscribed", TEST_TIMEOUT, || channels().pop());
        // Garbage, grants of other ids, and a message that is longer than any grant.
        let flood = "for i = 1, 20000 do
               redis.call('PUBLISH', ARGV[1], string.rep('x', 100))
               redis.call('PUBLISH', ARGV[1], '1 2 3 unknown')
             end
             redis.call('PUBLISH', ARGV[1], string.rep('x', 8 * 1024 * 1024))";
        server.cli(&["EVAL", flood, "0", channel]);
        guard.release().unwrap().unwrap_released();
        let next =
            completes_within(TEST_TIMEOUT, "the hand-over", || waiting.join().unwrap().unwrap());
        assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()));
        next.release().unwrap().unwrap_released();
    }
    let warnings = logged.lock().iter().filter(|line| line.contains("not grants")).count();
    assert!((1..10).contains(&warnings), "{warnings} warnings");
}

/// Fault: F49
#[test]
fn node_of_a_cluster_is_reported_with_the_url_to_use() {
    let cluster = RedisServer::builder().cluster("1000").start();
    let error =
        completes_within(CALL_LIMIT, "try_lock", || manager(&cluster).try_lock("x").unwrap_err());
    assert_eq!(error.code(), Some("CLUSTERDOWN"), "{error:?}");
    assert!(error.to_string().contains("write redis+cluster://host,host"), "{error}");
    for (reply, code) in [
        ("MOVED 3999 127.0.0.1:6381", "MOVED"),
        ("ASK 3999 127.0.0.1:6381", "ASK"),
        ("CROSSSLOT Keys in request don't hash to the same slot", "CROSSSLOT"),
        ("CLUSTERDOWN The cluster is down", "CLUSTERDOWN"),
        ("TRYAGAIN Multiple keys request during rehashing of slot", "TRYAGAIN"),
    ] {
        let (server, proxy, mgr) = server_behind_proxy(config_medium_timeout);
        let held = mgr.lock_with("x", &with_ttl(6 * SECOND)).unwrap();
        let reply = Fault::ReplaceReply(format!("-{reply}\r\n").into_bytes());
        let refused = proxy.on_request(contains("lock:y"), reply.clone()).forever();
        let not_renewed = proxy.on_request(is_renewal(LOCK), reply);
        let error = completes_within(CALL_LIMIT, "try_lock", || mgr.try_lock("y").unwrap_err());
        refused.disarm();
        not_renewed.wait_fired();
        assert!(error.to_string().contains(code), "{error}");
        assert_eq!(error.is_unavailable(), code == "TRYAGAIN", "{error:?}");
        expect_renewals(&server, &held, 1);
    }
}

/// The reply is an error, so the call fails. The script may have been executed, so the manager
/// releases the lock.
///
/// Fault: N7
#[test]
fn killed_script_leaves_no_lock() {
    let killed = b"-ERR Error running script (call to f_0): @user_script:1: Script killed by user \
          with SCRIPT KILL...\r\n";
    let (server, proxy, mgr) = server_behind_proxy(config_medium_timeout);
    proxy.on_request(contains(LOCK), Fault::ReplaceReply(killed.to_vec()));
    let error = completes_within(CALL_LIMIT, "try_lock", || mgr.try_lock("x").unwrap_err());
    assert!(matches!(error, LockError::Refused { .. }), "{error:?}");
    assert!(error.to_string().contains("killed by user"), "{error}");
    // In this test the request was executed; the key itself expires after 30 s.
    completes_within(CALL_LIMIT, "the clean-up", || await_gone(&server, LOCK));
    mgr.lock("x").unwrap().release().unwrap().unwrap_released();
}

/// Fault: F52, N21
#[test]
fn missing_command_is_reported_with_the_needed_version() {
    for command in ["EVAL", "TIME", "LPOP", "PTTL"] {
        let server = RedisServer::builder().arg("--rename-command").arg(command).arg("").start();
        let (mgr, id) =
            (RedisMgr::new(config_short_timeout(server.url())).unwrap(), "other client");
        if command == "LPOP" {
            server.cli(&["RPUSH", &crate::helpers::queue_key("x"), id]);
        } else {
            server.cli(&["SET", LOCK, id, "PX", "600000"]);
        }
        let error = completes_within(CALL_LIMIT, "try_lock", || mgr.try_lock("x").unwrap_err());
        assert!(error.is_refused(), "{command}: {error:?}");
        let advice = if command == "TIME" { "do not rename TIME" } else { "Redis 6.2 or newer" };
        assert!(error.to_string().contains(advice), "{command}: {error}");
    }
}

/// A waiter continues in a state that ends on its own, and during a failover. Any other state is an
/// error at its next poll.
///
/// Fault: F34, N80, N277
/// Promise: P5
#[test]
fn waiter_fails_in_a_state_that_an_operator_must_end() {
    for (code, begin, end) in STATES {
        let server = RedisServer::start();
        let mgr = manager(&server);
        let guard = mgr.lock_with("x", &with_ttl(30 * SECOND)).unwrap();
        let waiting = spawn_call(&mgr, "x", |mgr, name| mgr.try_lock_for(name, TEST_TIMEOUT));
        await_queue_length(&server, "x", 1);
        begin(&server);
        let may_pass = ["MASTERDOWN", "READONLY", "NOREPLICAS"].contains(&code);
        // The first refusal may come over a stale connection, which is replaced.
        let polls = if may_pass { 2 } else { 1 };
        eventually("it has polled", TEST_TIMEOUT, || server.refusals(code) >= polls);
        if may_pass {
            end(&server);
            guard.release().unwrap().unwrap_released();
            let next = completes_within(TEST_TIMEOUT, code, || waiting.join().unwrap().unwrap());
            next.release().unwrap().unwrap_released();
        } else {
            let error =
                completes_within(TEST_TIMEOUT, code, || waiting.join().unwrap().unwrap_err());
            assert_eq!(error.code(), Some(code), "{error:?}");
            end(&server);
            eventually("it has left the queue", TEST_TIMEOUT, || queue_length(&server, "x") == 0);
            guard.release().unwrap().unwrap_released();
        }
    }
}

/// Fault: N277
#[test]
fn release_waits_for_the_replicas_of_a_new_master() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock_with("x", &with_ttl(30 * SECOND)).unwrap();
    server.config_set("min-replicas-to-write", "1");
    thread::scope(|threads| {
        let releasing = threads.spawn(|| guard.release().unwrap().unwrap_released());
        // A release that is not tried again has two requests at most.
        eventually("it has tried again", TEST_TIMEOUT, || server.refusals("NOREPLICAS") >= 3);
        server.config_set("min-replicas-to-write", "0");
        releasing.join().unwrap();
    });
    assert_eq!(get(&server, LOCK), None);
}

/// Waiters poll if they cannot subscribe, or if nothing can be published.
///
/// Fault: F47, N21
#[test]
fn waiters_poll_at_a_server_without_pubsub() {
    for command in ["SUBSCRIBE", "PUBLISH"] {
        let server = RedisServer::builder().arg("--rename-command").arg(command).arg("").start();
        let mgr = manager(&server);
        let guard = mgr.lock("x").unwrap();
        let waiting = spawn_call(&mgr, "x", |mgr, name| mgr.lock(name).unwrap());
        let timed_out = completes_within(CALL_LIMIT, command, || {
            mgr.try_lock_for("x", SECOND / 2).unwrap_err()
        });
        assert!(timed_out.is_timeout(), "{command}: {timed_out:?}");
        guard.release().unwrap().unwrap_released();
        let next = completes_within(CALL_LIMIT, command, || waiting.join().unwrap());
        next.release().unwrap().unwrap_released();
    }
}

/// The password is changed and all connections are closed. No lock can be renewed, and the server
/// must not be flooded with connection attempts.
///
/// Fault: F77
#[test]
fn changed_password_causes_few_connection_attempts() {
    let server = RedisServer::start();
    server.cli(&["ACL", "SETUSER", "app", "on", ">old", "~*", "&*", "+@all"]);
    let mgr =
        RedisMgr::new(config_long_timeouts(format!("redis://app:old@{}", server.addr()))).unwrap();
    let guard = mgr.lock_with("x", &with_ttl(TTL)).unwrap();
    let other_guard = manager(&server).lock("y").unwrap();
    let waiting = spawn_call(&mgr, "y", |mgr, name| mgr.lock(name).map(drop));
    await_queue_length(&server, "y", 1);
    server.cli(&["ACL", "SETUSER", "app", "<old", ">new"]);
    assert!(server.kill_clients(&["USER", "app"]) > 0);
    assert_eq!(expect_loss(&guard), LockLost::Expired);
    let error = completes_within(CALL_LIMIT, "the wait", || waiting.join().unwrap().unwrap_err());
    assert_eq!(error.code(), Some("WRONGPASS"), "{error:?}");
    let refused = server.refusals("WRONGPASS");
    assert!((1..60).contains(&refused), "{refused} attempts in {TTL:?}");
    drop(other_guard);
}
