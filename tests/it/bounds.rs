//! Bad weather: every call comes back in time, nothing panics, and nothing stays behind.

use std::{fs, thread, time::Duration};

use distlock::{LockError, LockGuard, LockOptions, RedisMgr};

use crate::{
    helpers::{
        CALL_LIMIT, SECOND, UnwrapReleased, await_queued, completes_within, config_long_timeouts,
        config_short_timeout, get, in_own_process, in_thread, manager, queued, server_behind_proxy,
        spawn_queued_waiter, timed, with_ttl,
    },
    support::{
        CEILING, DeafServer, Fault, FaultProxy, RedisServer, any_request, command, contains,
        eventually, garbage_server, silent_server,
    },
};

/// A call, by its name, and how many operation timeouts it may take.
type Call = (&'static str, u32, fn(&RedisMgr) -> Result<(), LockError>);

const CALLS: [Call; 12] = [
    ("ping", 1, |mgr| mgr.ping().map(drop)),
    ("try_lock", 1, |mgr| mgr.try_lock("x").map(drop)),
    ("lock_with", 1, |mgr| {
        mgr.lock_with("x", &LockOptions::new().wait(Duration::from_millis(200))).map(drop)
    }),
    // Reported when the server has been away for as long as the lease, or an operation timeout.
    ("lock", 2, |mgr| mgr.lock_with("x", &with_ttl(SECOND)).map(drop)),
    ("acquire_lock", 1, |mgr| mgr.acquire_lock("x", SECOND, Duration::ZERO).map(drop)),
    ("holder", 1, |mgr| mgr.holder("x").map(drop)),
    ("lock_info", 1, |mgr| mgr.lock_info("x").map(drop)),
    ("locks", 1, |mgr| mgr.locks("*").map(drop)),
    ("release_lock", 1, |mgr| mgr.release_lock("x", "id").map(drop)),
    ("force_release", 1, |mgr| mgr.force_release("x").map(drop)),
    ("force_release_if", 1, |mgr| mgr.force_release_if("x", "id").map(drop)),
    ("lock_reentrant", 1, |mgr| {
        mgr.lock_reentrant_with("x", &LockOptions::new().wait(Duration::ZERO)).map(drop)
    }),
];

/// A call to a server that does not serve: it may neither succeed, nor take long, nor panic.
fn expect_failure((name, _, call): Call, mgr: &RedisMgr, weather: &str, bound: Duration) {
    let what = format!("{name} ({weather})");
    let error = completes_within(bound, &what, || call(mgr)).expect_err(&what);
    assert!(error.is_unavailable() || error.is_refused(), "{what}: {error:?}");
    assert!(error.to_string().contains(mgr.server()), "{what}: {error}");
}

/// One operation timeout where it is what is tested: so long that a slow machine does not double
/// it.
const TIMEOUT: Duration = Duration::from_secs(5);
/// What is left to slowness.
const SLACK: Duration = Duration::from_secs(4);

/// Goal: each call takes the operation timeouts that it may, and no second one. The server is
/// silent, one way or another. Method: all calls at once, each on a manager of its own.
pub(crate) fn everything_is_in_time(weather: &str, url: &str) {
    let manager = || RedisMgr::new(config_long_timeouts(url).operation_timeout(TIMEOUT)).unwrap();
    thread::scope(|threads| {
        for call in CALLS {
            threads
                .spawn(move || expect_failure(call, &manager(), weather, call.1 * TIMEOUT + SLACK));
        }
        threads.spawn(|| {
            let mut borrowed =
                completes_within(TIMEOUT + SLACK, "connection", || manager().connection()).unwrap();
            let asked = completes_within(TIMEOUT + SLACK, "a command of one's own", || {
                redis::cmd("PING").exec(&mut borrowed)
            });
            assert!(asked.is_err(), "{weather}");
        });
        threads.spawn(|| {
            let mgr = manager();
            let waiting = in_thread(&mgr, "x", |mgr, name| mgr.lock(name).map(drop));
            eventually("it asks", CEILING, || mgr.metrics().attempted() == 1);
            let error = completes_within(TIMEOUT + SLACK, "a waiter", || {
                completes_within(TIMEOUT + SLACK, &format!("shutdown ({weather})"), || {
                    mgr.shutdown()
                });
                waiting.join().unwrap()
            });
            let error = error.unwrap_err();
            assert!(matches!(error, LockError::Shutdown) || error.is_unavailable(), "{error:?}");
            completes_within(TIMEOUT + SLACK, &format!("drop ({weather})"), || drop(mgr));
        });
    });
}

/// All calls against a server that does not serve, one after the other. None may succeed, take
/// long, or panic.
pub(crate) fn nothing_hangs(weather: &str, url: &str) {
    let mgr =
        completes_within(CALL_LIMIT, weather, || RedisMgr::new(config_short_timeout(url))).unwrap();
    for call in CALLS {
        expect_failure(call, &mgr, weather, CALL_LIMIT);
    }
    let waiting: Vec<_> =
        (0..4).map(|_| in_thread(&mgr, "x", |mgr, name| mgr.lock(name).map(drop))).collect();
    completes_within(CALL_LIMIT, &format!("shutdown ({weather})"), || mgr.shutdown());
    for waiter in waiting {
        let error =
            completes_within(CALL_LIMIT, "a waiter", || waiter.join().unwrap()).unwrap_err();
        assert!(
            matches!(error, LockError::Shutdown) || error.is_unavailable() || error.is_refused(),
            "{error:?}"
        );
    }
    completes_within(CALL_LIMIT, &format!("drop ({weather})"), || drop(mgr));
}

#[test]
fn nothing_hangs_on_a_port_that_refuses() {
    let server = RedisServer::start();
    server.kill();
    nothing_hangs("refused", &server.url());
}

#[test]
fn nothing_hangs_on_a_stopped_server() {
    let server = RedisServer::start();
    server.stop();
    everything_is_in_time("stopped", &server.url());
    server.cont();
    drop(manager(&server).lock("x").unwrap());
}

#[test]
fn nothing_hangs_where_nobody_is_let_in() {
    everything_is_in_time("deaf", &DeafServer::start().url());
}

#[test]
fn nothing_hangs_on_a_silent_server() {
    everything_is_in_time("silent", &silent_server().url());
}

#[test]
fn nothing_hangs_on_a_server_of_another_kind() {
    let answers: [&[u8]; 9] = [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"+OK\r\n",
        b"$-1\r\n",
        b":0\r\n",
        b"*2\r\n$1\r\n1\r\n$1\r\n1\r\n",
        b"*2\r\n$20\r\n99999999999999999999\r\n$1\r\n1\r\n",
        b"$9223372036854775807\r\n",
        b"*1000000000\r\n*1000000000\r\n",
        b"-ERR \x1b[31mred\xff\r\n",
    ];
    for answer in answers {
        nothing_hangs("garbage", &garbage_server(answer).url());
    }
    let nested = b"*1\r\n".repeat(100_000);
    nothing_hangs("nested", &garbage_server(nested).url());
}

#[test]
fn nothing_hangs_on_a_server_that_closes_at_once() {
    let server = RedisServer::start();
    let proxy = FaultProxy::in_front_of(server.addr());
    proxy.on_request(|_| true, Fault::CloseAfterRequest).forever();
    nothing_hangs("closing", &proxy.url());
}

#[test]
fn nothing_hangs_in_a_black_hole() {
    let server = RedisServer::start();
    let proxy = FaultProxy::in_front_of(server.addr());
    proxy.blackhole();
    everything_is_in_time("blackhole", &proxy.url());
}

#[test]
fn nothing_hangs_where_only_requests_pass() {
    let server = RedisServer::start();
    let proxy = FaultProxy::in_front_of(server.addr());
    proxy.one_way();
    everything_is_in_time("one way", &proxy.url());
}

/// The weather turns while a lock is held and waited for; once it is over, all is as if it had
/// never been.
#[test]
fn whoever_holds_or_waits_is_let_go_when_the_weather_turns() {
    for weather in ["blackhole", "one way", "refused"] {
        let (server, proxy, mgr) = server_behind_proxy(config_short_timeout);
        let (released, dropped) = (mgr.lock("released").unwrap(), mgr.lock("dropped").unwrap());
        let held = manager(&server).lock("held").unwrap();
        let waiting =
            in_thread(&mgr, "held", |mgr, name| mgr.try_lock_for(name, 5 * SECOND).map(drop));
        await_queued(&server, "held", 1);
        match weather {
            "blackhole" => proxy.blackhole(),
            "one way" => proxy.one_way(),
            _ => proxy.refuse(),
        }
        let what = |call: &str| format!("{call} ({weather})");
        let error =
            completes_within(CALL_LIMIT, &what("release"), || released.release().unwrap_err());
        assert!(error.is_unavailable(), "{error:?}");
        completes_within(CALL_LIMIT, &what("drop"), || drop(dropped));
        let error = completes_within(2 * CALL_LIMIT, &what("waiting"), || waiting.join().unwrap())
            .unwrap_err();
        assert!(error.is_timeout() || error.is_unavailable(), "{error:?}");
        proxy.heal();
        completes_within(CALL_LIMIT, &what("recovery"), || {
            eventually("the server is back", CEILING, || mgr.ping().is_ok());
            for name in ["released", "dropped"] {
                // Their leases are 30 s.
                drop(mgr.try_lock_for(name, CEILING).unwrap());
            }
        });
        eventually("nobody is left in line", 20 * SECOND, || queued(&server, "held") == 0);
        assert!(held.is_held());
        assert_eq!(get(&server, "lock:held").as_deref(), Some(held.id().as_str()));
    }
}

#[test]
fn dropping_the_last_manager_at_a_dead_server_is_bounded() {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_short_timeout(server.url())).unwrap();
    let guards: Vec<LockGuard> = (0..10).map(|n| mgr.lock(&format!("n{n}")).unwrap()).collect();
    let ids: Vec<_> = (0..10)
        .map(|n| mgr.acquire_lock(&format!("id{n}"), SECOND, SECOND).unwrap().unwrap())
        .collect();
    server.stop();
    completes_within(2 * CALL_LIMIT, "shutdown", || mgr.shutdown());
    completes_within(CALL_LIMIT, "drop", || drop((guards, mgr)));
    assert_eq!(ids.len(), 10);
}

/// The names of the library's threads in this process, one for each thread, in order.
pub(crate) fn threads() -> Vec<String> {
    let name = |task: std::io::Result<fs::DirEntry>| {
        fs::read_to_string(task.ok()?.path().join("comm")).ok()
    };
    let names = fs::read_dir("/proc/self/task").unwrap().filter_map(name);
    let mut ours: Vec<_> = names.filter(|name| name.starts_with("distlock")).collect();
    ours.sort();
    ours
}

pub(crate) fn files() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn nothing_stays_after_the_last_manager_is_gone() {
    if !in_own_process("bounds::nothing_stays_after_the_last_manager_is_gone", &[]) {
        return;
    }
    let server = RedisServer::start();
    let mut files_before = None;
    for round in 0..5 {
        let mgr = RedisMgr::new(config_long_timeouts(server.url()).pool_size(4)).unwrap();
        let guard = mgr.lock("x").unwrap();
        assert!(!threads().is_empty());
        let waiting = spawn_queued_waiter(&server, &mgr.clone(), "x");
        let gave_up = mgr.try_lock_for("x", Duration::from_millis(50)).unwrap_err();
        assert!(gave_up.is_timeout());
        guard.release().unwrap().unwrap_released();
        let next = waiting.join().unwrap().unwrap();
        thread::scope(|threads| {
            for n in 0..8 {
                let mgr = &mgr;
                threads.spawn(move || drop(mgr.lock(&format!("n{n}")).unwrap()));
            }
        });
        if round % 2 == 0 {
            mgr.shutdown();
        }
        drop(mgr);
        drop(next);
        eventually("its threads have ended", CEILING, || threads().is_empty());
        eventually("its connections are closed", CEILING, || server.clients().is_empty());
        let now = files();
        assert_eq!(*files_before.get_or_insert(now), now, "files of round {round}");
    }
    for key in server.keys() {
        assert!(key.starts_with("distlock:fence:"), "{key} was left");
        assert!(server.query::<i64>(&["PTTL", &key]) > 0, "{key} stays for ever");
    }
}

#[test]
fn connections_are_few_however_many_threads_there_are() {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_long_timeouts(server.url()).pool_size(3)).unwrap();
    thread::scope(|threads| {
        for n in 0..16 {
            let mgr = &mgr;
            threads.spawn(move || {
                for _ in 0..20 {
                    drop(mgr.lock(&format!("n{}", n % 4)).unwrap());
                }
            });
        }
    });
    // The pool's, the renewer's and the subscriber's.
    server.await_clients(0..=5);
}

#[test]
fn a_dead_server_is_not_asked_in_a_frenzy() {
    // Who fails at once can be asked far more often than who lets the time pass.
    for server in [silent_server(), garbage_server("what?\r\n")] {
        let mgr = RedisMgr::new(
            config_short_timeout(server.url()).operation_timeout(Duration::from_millis(100)),
        )
        .unwrap();
        let error = completes_within(6 * CALL_LIMIT, "lock", || {
            mgr.lock_with("x", &with_ttl(3 * SECOND)).unwrap_err()
        });
        assert!(error.is_unavailable(), "{error:?}");
        assert!(server.accepted() < 60, "{} connections in three seconds", server.accepted());
    }
}

/// What the call has left behind is for the background, and there is none any more.
#[test]
fn a_shutdown_meanwhile_gives_a_call_no_second_operation_timeout() {
    let (_server, proxy, mgr) =
        server_behind_proxy(|url| config_long_timeouts(url).operation_timeout(TIMEOUT));
    let held = proxy.on_request(any_request, Fault::HoldReply).forever();
    let asking = in_thread(&mgr, "x", |mgr, name| timed(|| mgr.try_lock(name).map(drop)));
    held.wait_fired();
    let ending = in_thread(&mgr, "x", |mgr, _| mgr.shutdown());
    let (outcome, took) = asking.join().unwrap();
    assert!(outcome.is_err());
    assert!(took < TIMEOUT + SLACK, "{took:?}");
    held.let_go();
    ending.join().unwrap();
}

/// Goal: what a call has waited for a connection is not added to what it may take. Method: the only
/// connection comes back just before the call gives up, and leads to a server that answers nothing.
#[test]
fn a_call_that_waited_for_its_connection_has_no_second_operation_timeout() {
    let calls =
        CALLS.iter().filter(|(name, ..)| name.starts_with("release") || name.starts_with("force"));
    thread::scope(|threads| {
        for call in calls {
            threads.spawn(|| {
                let (_server, proxy, mgr) = server_behind_proxy(|url| {
                    config_long_timeouts(url).operation_timeout(TIMEOUT).pool_size(1)
                });
                proxy.on_request(any_request, Fault::DropReply).forever();
                let borrowed = mgr.connection().unwrap();
                threads.spawn(move || {
                    crate::worker::work(TIMEOUT.mul_f64(0.95));
                    drop(borrowed);
                });
                let (outcome, took) = timed(|| call.2(&mgr));
                assert!(outcome.is_err() && took < TIMEOUT + SLACK, "{} took {took:?}", call.0);
            });
        }
    });
}

/// Finding out who holds it takes most of the time, and then there is no answer.
#[test]
fn a_forced_release_takes_one_operation_timeout_for_all_that_it_does() {
    let (_server, proxy, mgr) =
        server_behind_proxy(|url| config_long_timeouts(url).operation_timeout(TIMEOUT));
    let guard = mgr.lock_with("x", &with_ttl(600 * SECOND).renew(false)).unwrap();
    assert!(mgr.is_locked("x").unwrap());
    proxy.on_request(contains("lock:x"), Fault::DelayReply(TIMEOUT.mul_f64(0.9)));
    let silent = proxy.on_request(contains("lock:x"), Fault::DropReply).forever();
    let (outcome, took) = timed(|| mgr.force_release("x"));
    assert!(outcome.is_err() && took < TIMEOUT + SLACK, "{took:?}");
    silent.disarm();
    drop(guard);
}

/// Each answer comes in time, and all of them together do not.
#[test]
fn commands_of_users_that_go_together_take_one_operation_timeout() {
    let (_server, proxy, mgr) =
        server_behind_proxy(|url| config_long_timeouts(url).operation_timeout(TIMEOUT));
    proxy.on_request(command("GET"), Fault::DelayReply(TIMEOUT / 2)).forever();
    let mut connection = mgr.connection().unwrap();
    let mut commands = redis::pipe();
    for _ in 0..4 {
        commands.cmd("GET").arg("x");
    }
    let error = commands.query::<Vec<Option<String>>>(&mut connection).unwrap_err();
    assert!(error.is_timeout(), "{error}");
}

/// A server that always has one more step to go, each of which takes no time.
#[test]
fn a_list_takes_sixty_operation_timeouts_at_most() {
    let server = RedisServer::start();
    let proxy = FaultProxy::in_front_of(server.addr());
    let step = b"*2\r\n$1\r\n7\r\n*0\r\n".to_vec();
    proxy.on_request(command("SCAN"), Fault::ReplaceReply(step)).forever();
    let mgr = RedisMgr::new(
        config_short_timeout(proxy.url()).operation_timeout(Duration::from_millis(50)),
    )
    .unwrap();
    let error =
        completes_within(2 * CALL_LIMIT, "a list without an end", || mgr.locks("*").unwrap_err());
    assert!(error.is_unavailable() && !error.to_string().contains("ever more keys"), "{error}");
}
