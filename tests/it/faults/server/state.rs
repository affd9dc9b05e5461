//! States of a server in which it is there, and does not do what it is asked.

use std::{fs, path::Path, thread, time::Duration};

use distlock::{LockError, LockLost, RedisMgr};

use crate::faults::{LOCK, is_renewed};
use crate::{
    helpers::{
        CALL_LIMIT, SECOND, UnwrapReleased, await_gone, await_queued, capture_log,
        completes_within, config_long_timeouts, config_medium_timeout, config_short_timeout,
        expect_loss, get, in_own_process, in_thread, is_renewal, manager, queued,
        server_behind_proxy, spawn_queued_waiter, timed, with_ttl,
    },
    support::{CEILING, Fault, RedisServer, contains, eventually, eventually_some},
};

const LEASE: Duration = Duration::from_secs(4);

/// Writes cannot be saved, for the folder is not there any more.
fn misconf(server: &RedisServer) {
    server.config_set("save", "3600 1");
    let (_, folder): (String, String) = server.query(&["CONFIG", "GET", "dir"]);
    let folder = Path::new(&folder).join("away");
    fs::create_dir(&folder).unwrap();
    server.config_set("dir", folder.to_str().unwrap());
    fs::remove_dir(&folder).unwrap();
    server.cli(&["BGSAVE"]);
    eventually("saving has failed", CEILING, || {
        server.query::<String>(&["INFO", "persistence"]).contains("rdb_last_bgsave_status:err")
    });
}

fn saves_again(server: &RedisServer) {
    server.config_set("save", "");
    server.config_set("dir", std::env::temp_dir().to_str().unwrap());
}

fn masterdown(server: &RedisServer) {
    server.config_set("replica-serve-stale-data", "no");
    server.cli(&["REPLICAOF", "127.0.0.1", "1"]);
}

fn master_again(server: &RedisServer) {
    server.cli(&["REPLICAOF", "NO", "ONE"]);
}

type Change = fn(&RedisServer);

/// Each state in which a master, or what was one, refuses renewals.
const STATES: [(&str, Change, Change); 4] = [
    ("MISCONF", misconf, saves_again),
    ("MASTERDOWN", masterdown, master_again),
    ("READONLY", |server| drop(server.cli(&["REPLICAOF", "127.0.0.1", "1"])), master_again),
    (
        "NOREPLICAS",
        |server| server.config_set("min-replicas-to-write", "1"),
        |server| server.config_set("min-replicas-to-write", "0"),
    ),
];

#[test]
fn a_state_that_stays_is_told_by_its_code_and_ends_a_hold_at_its_deadline() {
    for (code, begin, end) in STATES {
        let server = RedisServer::start();
        let mgr = RedisMgr::new(config_medium_timeout(server.url())).unwrap();
        let guard = mgr.lock_with("x", &with_ttl(LEASE)).unwrap();
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
        assert!(span >= left, "{code}: given up after {span:?} with {left:?} left");
        assert!(span < left + CALL_LIMIT, "{code}: {span:?}");
        end(&server);
        await_gone(&server, LOCK);
        let next = completes_within(CEILING, "locking", || mgr.try_lock_for("x", CEILING).unwrap());
        assert!(next.fencing_token() > guard.fencing_token(), "{code}");
        next.release().unwrap().unwrap_released();
    }
}

#[test]
fn a_state_that_passes_within_the_lease_costs_no_lock() {
    for (code, begin, end) in STATES {
        let server = RedisServer::start();
        let mgr = manager(&server);
        let ttl = 12 * SECOND;
        let guard = mgr.lock_with("x", &with_ttl(ttl)).unwrap();
        begin(&server);
        eventually("a renewal is overdue", CEILING, || guard.remaining() < ttl * 6 / 10);
        end(&server);
        eventually("it is renewed", CEILING, || guard.remaining() > ttl * 7 / 10);
        assert!(guard.lost().is_empty(), "{code}");
        guard.release().unwrap().unwrap_released();
    }
}

#[test]
fn a_server_that_loads_its_data_is_waited_for() {
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
        let error = completes_within(CEILING, "try_lock", || {
            loop {
                // Until it has begun.
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
        let waited =
            completes_within(CEILING, "waiting", || mgr.try_lock_for("y", CEILING).unwrap());
        reloading.join().unwrap();
        waited.release().unwrap().unwrap_released();
    });
    server.config_set("key-load-delay", "0");
    assert!(guard.is_held());
    guard.release().unwrap().unwrap_released();
}

/// Of the keys with an expiry, the one that expires first is a lock.
#[test]
fn an_evicted_lock_is_gone_at_the_next_renewal() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock_with("x", &with_ttl(LEASE)).unwrap();
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
    assert!(span < LEASE + CALL_LIMIT, "{span:?}");
    server.config_set("maxmemory", "0");
    let next = mgr.lock("x").unwrap();
    assert!(next.fencing_token() > guard.fencing_token());
}

/// Everything that was asked while the server was paused is carried out in one go when the pause is
/// over.
#[test]
fn a_pause_longer_than_the_lease_ends_the_hold_and_leaves_nothing() {
    for kind in ["ALL", "WRITE"] {
        let server = RedisServer::start();
        let mgr = RedisMgr::new(config_short_timeout(server.url())).unwrap();
        let guard = mgr.lock_with("x", &with_ttl(2 * SECOND)).unwrap();
        server.cli(&["CLIENT", "PAUSE", "5000", kind]);
        let left = guard.remaining();
        let waiting = in_thread(&mgr, "x", |mgr, name| {
            mgr.lock_with(name, &with_ttl(30 * SECOND).wait(SECOND)).map(drop)
        });
        let (why, span) = timed(|| expect_loss(&guard));
        assert_eq!(why, LockLost::Expired, "{kind}");
        assert!(span + SECOND >= left, "{kind}: {span:?} of {left:?}");
        assert!(completes_within(CALL_LIMIT, "waiting", || waiting.join().unwrap()).is_err());
        // The leases that were asked for are 30 s, and nobody has them.
        let next = completes_within(CEILING, "locking", || manager(&server).lock("x").unwrap());
        assert!(next.fencing_token() > guard.fencing_token());
        drop(guard);
        next.ensure_held().unwrap();
        assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()));
    }
}

/// Again and again the server does nothing else for a while.
#[test]
fn spikes_shorter_than_the_lease_cost_nothing() {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_long_timeouts(server.url()).operation_timeout(SECOND)).unwrap();
    let guard = mgr.lock_with("x", &with_ttl(12 * SECOND)).unwrap();
    for _ in 0..3 {
        server.cli(&["DEBUG", "SLEEP", "1.5"]);
        assert!(guard.is_held());
    }
    is_renewed(&server, &guard, 1);
    guard.release().unwrap().unwrap_released();
}

/// Goal: whatever comes over the channel on which grants are heard, waiters are woken, and nobody
/// logs it all.
#[test]
fn a_flood_on_the_channel_of_grants_drowns_nobody() {
    if !in_own_process("faults::state::a_flood_on_the_channel_of_grants_drowns_nobody", &[]) {
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
        // In the second round the server may just have ended the connection of the first.
        let channels = || server.query::<Vec<String>>(&["PUBSUB", "CHANNELS", "distlock:*"]);
        let channel = &eventually_some("somebody listens", CEILING, || channels().pop());
        // Garbage, grants for others, and one message that is longer than anything of ours.
        let flood = "for i = 1, 20000 do
               redis.call('PUBLISH', ARGV[1], string.rep('x', 100))
               redis.call('PUBLISH', ARGV[1], '1 2 3 somebody')
             end
             redis.call('PUBLISH', ARGV[1], string.rep('x', 8 * 1024 * 1024))";
        server.cli(&["EVAL", flood, "0", channel]);
        guard.release().unwrap().unwrap_released();
        let next = completes_within(CEILING, "the next", || waiting.join().unwrap().unwrap());
        assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()));
        next.release().unwrap().unwrap_released();
    }
    let told = logged.lock().iter().filter(|line| line.contains("not grants")).count();
    assert!((1..10).contains(&told), "told {told} times");
}

#[test]
fn a_cluster_is_told_from_a_server() {
    let port = crate::support::RedisServer::start().port();
    let cluster = RedisServer::builder()
        .arg("--cluster-enabled")
        .arg("yes")
        .arg("--cluster-port")
        .arg(port.to_string());
    let cluster = cluster.start();
    let error =
        completes_within(CALL_LIMIT, "try_lock", || manager(&cluster).try_lock("x").unwrap_err());
    assert_eq!(error.code(), Some("CLUSTERDOWN"), "{error:?}");
    assert!(error.to_string().contains("Redis Cluster is not supported"), "{error}");
    for (answer, code) in [
        ("MOVED 3999 127.0.0.1:6381", "MOVED"),
        ("ASK 3999 127.0.0.1:6381", "ASK"),
        ("CROSSSLOT Keys in request don't hash to the same slot", "CROSSSLOT"),
        ("CLUSTERDOWN The cluster is down", "CLUSTERDOWN"),
        ("TRYAGAIN Multiple keys request during rehashing of slot", "TRYAGAIN"),
    ] {
        let (server, proxy, mgr) = server_behind_proxy(config_medium_timeout);
        let held = mgr.lock_with("x", &with_ttl(6 * SECOND)).unwrap();
        let answer = Fault::ReplaceReply(format!("-{answer}\r\n").into_bytes());
        let refused = proxy.on_request(contains("lock:y"), answer.clone()).forever();
        let not_renewed = proxy.on_request(is_renewal(LOCK), answer);
        let error = completes_within(CALL_LIMIT, "try_lock", || mgr.try_lock("y").unwrap_err());
        refused.disarm();
        not_renewed.wait_fired();
        assert!(error.to_string().contains(code), "{error}");
        assert_eq!(error.is_unavailable(), code == "TRYAGAIN", "{error:?}");
        is_renewed(&server, &held, 1);
    }
}

/// An error that stands for a reply, whoever says it: it is no lock, and what may have been taken
/// is taken back.
#[test]
fn a_script_that_is_killed_has_taken_nothing() {
    let killed =
        b"-ERR Error running script (call to f_0): @user_script:1: Script killed by user with SCRIPT KILL...\r\n";
    let (server, proxy, mgr) = server_behind_proxy(config_medium_timeout);
    proxy.on_request(contains(LOCK), Fault::ReplaceReply(killed.to_vec()));
    let error = completes_within(CALL_LIMIT, "try_lock", || mgr.try_lock("x").unwrap_err());
    assert!(matches!(error, LockError::Refused { .. }), "{error:?}");
    assert!(error.to_string().contains("killed by user"), "{error}");
    // The request was carried out all the same, and the lease is 30 s.
    completes_within(CALL_LIMIT, "taking it back", || await_gone(&server, LOCK));
    mgr.lock("x").unwrap().release().unwrap().unwrap_released();
}

#[test]
fn commands_that_are_not_there_are_told_with_what_it_takes() {
    for command in ["EVAL", "TIME", "LPOP", "PTTL"] {
        let server = RedisServer::builder().arg("--rename-command").arg(command).arg("").start();
        let (mgr, other) = (RedisMgr::new(config_short_timeout(server.url())).unwrap(), "somebody");
        if command == "LPOP" {
            server.cli(&["RPUSH", &crate::helpers::queue_key("x"), other]);
        } else {
            server.cli(&["SET", LOCK, other, "PX", "600000"]);
        }
        let error = completes_within(CALL_LIMIT, "try_lock", || mgr.try_lock("x").unwrap_err());
        assert!(error.is_refused(), "{command}: {error:?}");
        assert!(error.to_string().contains("Redis 6.2 or newer"), "{command}: {error}");
    }
}

/// Who waits goes on over a state that is over by itself sooner or later, and while there is no
/// master; of any other it is told at its next look.
#[test]
fn who_waits_is_told_of_a_state_that_somebody_has_to_end() {
    for (code, begin, end) in STATES {
        let server = RedisServer::start();
        let mgr = manager(&server);
        let guard = mgr.lock_with("x", &with_ttl(30 * SECOND)).unwrap();
        let waiting = in_thread(&mgr, "x", |mgr, name| mgr.try_lock_for(name, CEILING));
        await_queued(&server, "x", 1);
        begin(&server);
        let replica = ["MASTERDOWN", "READONLY"].contains(&code);
        // The first refusal may be a stale connection's, which is replaced.
        let looks = if replica { 2 } else { 1 };
        eventually("it has looked", CEILING, || server.refusals(code) >= looks);
        if replica {
            end(&server);
            guard.release().unwrap().unwrap_released();
            let next = completes_within(CEILING, code, || waiting.join().unwrap().unwrap());
            next.release().unwrap().unwrap_released();
        } else {
            let told = completes_within(CEILING, code, || waiting.join().unwrap().unwrap_err());
            assert_eq!(told.code(), Some(code), "{told:?}");
            end(&server);
            eventually("it has left the line", CEILING, || queued(&server, "x") == 0);
            guard.release().unwrap().unwrap_released();
        }
    }
}

/// Without a channel to be heard or to be told on, waiters find out by looking.
#[test]
fn a_server_without_messages_is_good_enough_for_waiting() {
    for command in ["SUBSCRIBE", "PUBLISH"] {
        let server = RedisServer::builder().arg("--rename-command").arg(command).arg("").start();
        let mgr = manager(&server);
        let guard = mgr.lock("x").unwrap();
        let waiting = in_thread(&mgr, "x", |mgr, name| mgr.lock(name).unwrap());
        let gave_up = completes_within(CALL_LIMIT, command, || {
            mgr.try_lock_for("x", SECOND / 2).unwrap_err()
        });
        assert!(gave_up.is_timeout(), "{command}: {gave_up:?}");
        guard.release().unwrap().unwrap_released();
        let next = completes_within(CALL_LIMIT, command, || waiting.join().unwrap());
        next.release().unwrap().unwrap_released();
    }
}

/// The password is changed, and then all connections are cut: nothing can be renewed, and the
/// server is not stormed.
#[test]
fn a_password_that_does_not_fit_any_more_is_not_tried_in_a_frenzy() {
    let server = RedisServer::start();
    server.cli(&["ACL", "SETUSER", "app", "on", ">old", "~*", "&*", "+@all"]);
    let mgr =
        RedisMgr::new(config_long_timeouts(format!("redis://app:old@{}", server.addr()))).unwrap();
    let guard = mgr.lock_with("x", &with_ttl(LEASE)).unwrap();
    let theirs = manager(&server).lock("y").unwrap();
    let waiting = in_thread(&mgr, "y", |mgr, name| mgr.lock(name).map(drop));
    await_queued(&server, "y", 1);
    server.cli(&["ACL", "SETUSER", "app", "<old", ">new"]);
    assert!(server.kill_clients(&["USER", "app"]) > 0);
    assert_eq!(expect_loss(&guard), LockLost::Expired);
    let error = completes_within(CALL_LIMIT, "waiting", || waiting.join().unwrap().unwrap_err());
    assert_eq!(error.code(), Some("WRONGPASS"), "{error:?}");
    let refused = server.refusals("WRONGPASS");
    assert!((1..60).contains(&refused), "{refused} attempts in {LEASE:?}");
    drop(theirs);
}
