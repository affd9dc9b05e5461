//! Waiting for a lock: order, waking, giving up, and servers and neighbours that go away meanwhile.

mod frozen;
mod killed;
mod subscription;

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use distlock::{LockError, LockGuard, LockOptions, RedisMgr};
use parking_lot::Mutex;

use crate::{
    helpers::{
        CALL_LIMIT, SECOND, UnwrapReleased, await_queued, completes_within, config_long_timeouts,
        config_medium_timeout, config_short_timeout, get, in_thread, manager, pttl, queue_key,
        queued, server_behind_proxy, spawn_queued_waiter, timed, with_ttl,
    },
    support::{CEILING, Fault, FaultProxy, Monitor, RedisServer, command, eventually},
    worker::work,
};

const LOCK: &str = "lock:x";

fn waiting_for(wait: Duration) -> LockOptions {
    LockOptions::new().wait(wait)
}

/// Releases a lock. Whether the next one, who waits for it, has it without a look, which would be
/// due half a second after the last; on a slow machine it may have looked all the same.
fn is_told(
    server: &RedisServer,
    commands: &Monitor,
    guard: LockGuard,
    next: JoinHandle<Result<LockGuard, LockError>>,
) -> bool {
    let looks = |mark: String| {
        server.cli(&["ECHO", &mark]);
        commands.wait_for(&mark);
        count(commands, "\"look\"")
    };
    let before = looks(format!("before {}", guard.fencing_token()));
    guard.release().unwrap().unwrap_released();
    let next = next.join().unwrap().unwrap();
    let after = looks(format!("after {}", next.fencing_token()));
    next.release().unwrap().unwrap_released();
    before == after
}

#[test]
fn a_release_wakes_the_next_waiter_long_before_it_would_look() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    let commands = server.monitor();
    let told = (0..21).filter(|_| {
        let guard = mgr.lock("x").unwrap();
        let waiting = spawn_queued_waiter(&server, &other, "x");
        is_told(&server, &commands, guard, waiting)
    });
    let told = told.count();
    assert!(told > 10, "{told} of 21 were told");
}

/// Of the threads of one manager, one hears for all. It gives up, and the news must go on coming at
/// once.
#[test]
fn when_the_one_who_listens_gives_up_another_hears() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    let commands = server.monitor();
    let told = (0..15).filter(|_| {
        let guard = mgr.lock("x").unwrap();
        let listening = in_thread(&other, "x", |mgr, name| {
            mgr.try_lock_for(name, Duration::from_millis(300)).map(drop)
        });
        eventually("it listens", CEILING, || queued(&server, "x") == 1 || listening.is_finished());
        let waiting = in_thread(&other, "x", |mgr, name| mgr.lock(name));
        assert!(listening.join().unwrap().unwrap_err().is_timeout());
        await_queued(&server, "x", 1);
        is_told(&server, &commands, guard, waiting)
    });
    let told = told.count();
    assert!(told > 7, "{told} of 15 were told");
}

#[test]
fn nobody_is_woken_in_vain() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock("x").unwrap();
    let waiting: Vec<_> = (0..10).map(|_| spawn_queued_waiter(&server, &mgr, "x")).collect();
    let commands = server.monitor();
    let ((), span) = timed(|| {
        guard.release().unwrap().unwrap_released();
        for waiter in waiting {
            waiter.join().unwrap().unwrap().release().unwrap().unwrap_released();
        }
    });
    assert_eq!(server.calls("publish"), 10);
    server.cli(&["ECHO", "over"]);
    commands.wait_for("\"over\"");
    // Who is woken and has not been given the lock looks: a herd of ten would do so 45 times.
    let looks = count(&commands, "\"look\"");
    assert!(looks as f64 <= 5.0 + 10.0 * span.as_secs_f64(), "{looks} looks in {span:?}");
}

#[test]
fn who_gives_up_learns_who_had_it_and_leaves_nothing() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    let guard = mgr.lock("x").unwrap();
    let wait = Duration::from_millis(200);
    let error =
        completes_within(60 * SECOND, "the wait", || other.try_lock_for("x", wait).unwrap_err());
    let LockError::Timeout { name, holder, waited, .. } = &error else { panic!("{error:?}") };
    assert_eq!((name.as_str(), holder.as_ref().unwrap().id()), ("x", guard.id().as_str()));
    assert!(*waited >= wait, "{waited:?}");
    assert!(error.is_timeout() && error.is_contended());
    eventually("it is out of the line", 20 * SECOND, || {
        !server.query::<bool>(&["EXISTS", &queue_key("x")])
    });
    assert_eq!(get(&server, LOCK).as_deref(), Some(guard.id().as_str()));
    guard.release().unwrap().unwrap_released();
    assert_eq!(get(&server, LOCK), None);
}

/// The lock changes hands just before the last look.
#[test]
fn who_gives_up_learns_who_had_it_at_the_end() {
    let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    let guard = manager(&server).lock("x").unwrap();
    let leaving =
        proxy.on_request(|words| words.iter().any(|word| word == b"leave"), Fault::HoldRequest);
    let waiting = in_thread(&mgr, "x", |mgr, name| mgr.try_lock_for(name, SECOND).map(drop));
    leaving.wait_fired();
    server.cli(&["SET", LOCK, "a stranger", "PX", "600000"]);
    leaving.let_go();
    let error = waiting.join().unwrap().unwrap_err();
    assert!(error.is_timeout(), "{error:?}");
    assert_eq!(error.holder().unwrap().id(), "a stranger");
    drop(guard);
}

#[test]
fn waits_of_any_length() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    for wait in [Duration::ZERO, Duration::from_nanos(1), Duration::from_micros(1), Duration::MAX] {
        drop(mgr.lock_with("x", &waiting_for(wait)).unwrap());
    }
    let guard = mgr.lock("x").unwrap();
    assert!(matches!(other.try_lock_for("x", Duration::ZERO), Err(LockError::Held { .. })));
    assert!(matches!(
        other.try_lock_for("x", Duration::from_nanos(1)),
        Err(LockError::Timeout { .. })
    ));
    let waiting = in_thread(&other, "x", |mgr, name| mgr.try_lock_for(name, Duration::MAX));
    await_queued(&server, "x", 1);
    guard.release().unwrap().unwrap_released();
    assert!(waiting.join().unwrap().unwrap().is_held());
}

#[test]
fn waiters_that_give_up_cost_the_others_nothing() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    let guard = mgr.lock("x").unwrap();
    let served = Mutex::new(Vec::new());
    let line = || server.query::<Vec<String>>(&["LRANGE", &queue_key("x"), "0", "-1"]);
    thread::scope(|threads| {
        for number in 0..6 {
            let before = line();
            let served = &served;
            let mgr = if number % 2 == 0 { &mgr } else { &other };
            let waiting = threads.spawn(move || match number {
                // The head, and two in the middle.
                0 | 2 | 3 => assert!(mgr.try_lock_for("x", 2 * SECOND).unwrap_err().is_timeout()),
                _ => {
                    let guard = mgr.lock("x").unwrap();
                    served.lock().push(number);
                    drop(guard);
                }
            });
            eventually("it stands in line, or its patience is over", CEILING, || {
                waiting.is_finished() || line().iter().any(|entry| !before.contains(entry))
            });
        }
        await_queued(&server, "x", 3);
        guard.release().unwrap().unwrap_released();
    });
    assert_eq!(*served.lock(), [1, 4, 5]);
}

/// Goal: a grant that meets a waiter who is just leaving goes to the next. Method: the release
/// comes later for whoever was still there, and sooner for whoever had gone, so that it soon comes
/// at the moment of leaving; a grant that got lost would keep the lock for the claim window of 20
/// s. Somebody else keeps the process of those who leave listening, for the server passes over whom
/// nobody hears.
#[test]
fn a_grant_to_somebody_who_is_leaving_is_passed_on() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    let theirs = mgr.lock("theirs").unwrap();
    let listening = spawn_queued_waiter(&server, &other, "theirs");
    let (mut delay, mut served, mut gone) = (Duration::from_millis(5), 0, 0);
    eventually("many were there, and many had gone", CEILING, || {
        let guard = mgr.lock("x").unwrap();
        let leaving = in_thread(&other, "x", |mgr, name| {
            mgr.try_lock_for(name, Duration::from_millis(5)).map(drop)
        });
        work(delay);
        guard.release().unwrap().unwrap_released();
        if leaving.join().unwrap().is_ok() {
            served += 1;
            delay += Duration::from_micros(100);
        } else {
            gone += 1;
            delay = delay.saturating_sub(Duration::from_micros(100));
        }
        completes_within(CALL_LIMIT, "the next", || {
            mgr.try_lock_for("x", 60 * SECOND).unwrap().release().unwrap().unwrap_released()
        });
        served >= 40 && gone >= 40
    });
    eventually("nobody is left in line", CEILING, || queued(&server, "x") == 0);
    theirs.release().unwrap().unwrap_released();
    drop(listening.join().unwrap().unwrap());
}

#[test]
fn a_dead_waiter_in_front_is_passed_over() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock("x").unwrap();
    for entry in [
        "20000 distlock:client:nobody dead|pid1|tid1|ts1|67e55044-10b1-426f-9247-bb680e5fe0c8",
        "what is this",
        "",
    ] {
        server.cli(&["RPUSH", &queue_key("x"), entry]);
    }
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    guard.release().unwrap().unwrap_released();
    let next = completes_within(CALL_LIMIT, "the handover", || waiting.join().unwrap().unwrap());
    assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()));
}

/// Its connection is alive for the server, and nothing arrives: the grant is void after the claim
/// window.
#[test]
fn a_waiter_that_cannot_hear_holds_up_the_line_for_one_claim_window() {
    let server = RedisServer::start();
    let proxy = FaultProxy::in_front_of(server.addr());
    let deaf = RedisMgr::new(config_short_timeout(proxy.url()).claim_window(3 * SECOND)).unwrap();
    let (mgr, next) = (manager(&server), manager(&server));
    let guard = mgr.lock("x").unwrap();
    let first = spawn_queued_waiter(&server, &deaf, "x");
    let second = spawn_queued_waiter(&server, &next, "x");
    proxy.blackhole();
    guard.release().unwrap().unwrap_released();
    let granted = get(&server, LOCK).expect("it was handed over");
    let served = completes_within(CALL_LIMIT, "the second", || second.join().unwrap().unwrap());
    assert_ne!(served.id().as_str(), granted);
    proxy.heal();
    let token = served.fencing_token();
    served.release().unwrap().unwrap_released();
    let first = first.join().unwrap().unwrap();
    assert!(first.fencing_token() > token);
    assert_eq!(get(&server, LOCK).as_deref(), Some(first.id().as_str()));
}

#[test]
fn a_server_that_forgets_everything_lets_a_waiter_in() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    let guard = mgr.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &other, "x");
    server.restart_empty();
    let next = waiting.join().unwrap().unwrap();
    assert!(next.fencing_token() > guard.fencing_token());
    assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()));
}

/// Of those who wait in one process one looks. It finds that the server has lost the line, and all
/// are in it again.
#[test]
fn a_line_that_was_lost_is_joined_again_by_all_who_stood_in_it() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    let guard = mgr.lock("x").unwrap();
    let waiting: Vec<_> = (0..3).map(|_| spawn_queued_waiter(&server, &other, "x")).collect();
    server.cli(&["DEL", &queue_key("x")]);
    await_queued(&server, "x", 3);
    other.shutdown();
    waiting.into_iter().for_each(|waiter| drop(waiter.join().unwrap()));
    guard.release().unwrap().unwrap_released();
}

#[test]
fn a_deleted_key_lets_a_waiter_in() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    server.cli(&["DEL", LOCK]);
    // The lease is 30 s.
    let next = completes_within(CALL_LIMIT, "the wait", || waiting.join().unwrap().unwrap());
    assert!(next.fencing_token() > guard.fencing_token());
}

/// Without a prefix `{a}` is a name beside `a`; with one line for both, a release of one would hand
/// the other on.
#[test]
fn a_name_in_braces_has_a_line_of_its_own() {
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_long_timeouts(server.url()).prefix("")).unwrap();
    let (bare, braced) = (mgr.lock("a").unwrap(), mgr.lock("{a}").unwrap());
    let waiting = in_thread(&mgr, "{a}", |mgr, name| mgr.lock(name).unwrap());
    let waiters = || mgr.holder("{a}").unwrap().and_then(|holder| holder.waiters());
    eventually("it stands in line", CEILING, || waiters() == Some(1));
    assert_eq!(mgr.holder("a").unwrap().unwrap().waiters(), Some(0));
    bare.release().unwrap().unwrap_released();
    drop(mgr.try_lock("a").unwrap());
    assert_eq!(mgr.holder("{a}").unwrap().unwrap().id(), braced.id().as_str());
    braced.release().unwrap().unwrap_released();
    assert!(waiting.join().unwrap().is_held());
}

/// The lock is free for a moment, and somebody stands in line who has not noticed yet.
#[test]
fn a_newcomer_does_not_pass_the_line() {
    let server = RedisServer::start();
    let (mgr, other, newcomer) = (manager(&server), manager(&server), manager(&server));
    let guard = mgr.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &other, "x");
    server.cli(&["DEL", LOCK]);
    let error = newcomer.try_lock("x").unwrap_err();
    let next = waiting.join().unwrap().unwrap();
    assert_eq!(error.holder().map(|holder| holder.id()), Some(next.id().as_str()), "{error:?}");
    drop(guard);
}

#[test]
fn a_lease_that_runs_out_lets_a_waiter_in() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock_with("x", &with_ttl(SECOND).renew(false)).unwrap();
    let next = completes_within(CALL_LIMIT, "the wait", || mgr.lock("x").unwrap());
    assert!(!guard.is_held());
    assert!(next.is_held());
}

#[test]
fn a_waiter_survives_the_loss_of_its_subscription() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    for round in 0..3 {
        let guard = mgr.lock("x").unwrap();
        let waiting = spawn_queued_waiter(&server, &other, "x");
        assert_eq!(server.kill_clients(&["TYPE", "pubsub"]), 1);
        if round > 0 {
            eventually("it is back", CEILING, || subscribers(&server) == 1);
        }
        guard.release().unwrap().unwrap_released();
        let next = completes_within(CALL_LIMIT, "the wait", || waiting.join().unwrap().unwrap());
        next.release().unwrap().unwrap_released();
    }
}

/// Goal: who may have been passed over while nobody heard looks as soon as somebody hears again,
/// and not only the one thread of the process that looks for all. Method: the line is cut after it
/// has lasted, so that it is opened again at once.
#[test]
fn all_look_when_the_line_is_open_again() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    let guard = mgr.lock("x").unwrap();
    let waiting: Vec<_> = (0..3).map(|_| spawn_queued_waiter(&server, &other, "x")).collect();
    let entries: Vec<String> = server.query(&["LRANGE", &queue_key("x"), "0", "-1"]);
    let lasts = |client: &HashMap<String, String>| {
        client["sub"] == "1" && client["age"].parse::<u32>().unwrap() >= 3
    };
    eventually("the line has lasted", CEILING, || server.clients().iter().any(lasts));
    let commands = server.monitor();
    assert_eq!(server.kill_clients(&["TYPE", "pubsub"]), 1);
    eventually("all look", CEILING, || {
        let lines = commands.lines();
        let looks = |entry: &String| {
            lines.iter().any(|line| line.contains("\"look\"") && line.contains(entry.as_str()))
        };
        entries.iter().all(looks)
    });
    other.shutdown();
    waiting.into_iter().for_each(|waiter| drop(waiter.join().unwrap()));
    guard.release().unwrap().unwrap_released();
}

#[test]
fn where_subscribing_is_forbidden_waiters_look_by_themselves() {
    let server = RedisServer::start();
    server.cli(&["ACL", "SETUSER", "app", "on", ">pw", "~*", "resetchannels", "+@all"]);
    let mgr =
        RedisMgr::new(config_long_timeouts(format!("redis://app:pw@{}", server.addr()))).unwrap();
    let guard = mgr.lock("x").unwrap();
    let commands = server.monitor();
    let waiting = in_thread(&mgr, "x", |mgr, name| mgr.lock(name).unwrap());
    eventually("it has looked three times", CEILING, || count(&commands, "\"try\"") >= 3);
    assert_eq!(queued(&server, "x"), 0);
    guard.release().unwrap().unwrap_released();
    completes_within(CALL_LIMIT, "the wait", || waiting.join().unwrap())
        .release()
        .unwrap()
        .unwrap_released();
    assert!(mgr.try_lock_for("x", SECOND).unwrap().is_held());
}

/// Goal: each is told after a lease, not after those of all before it. Method: the first error that
/// comes is followed by the others before another lease can have passed.
#[test]
fn where_subscribing_is_forbidden_all_hear_of_a_server_that_went_away() {
    let server = RedisServer::start();
    server.cli(&["ACL", "SETUSER", "app", "on", ">pw", "~*", "resetchannels", "+@all"]);
    let config = config_short_timeout(format!("redis://app:pw@{}", server.addr()))
        .ttl(CALL_LIMIT + 2 * SECOND);
    let mgr = RedisMgr::new(config).unwrap();
    let guard = mgr.lock("x").unwrap();
    let (tell, told) = mpsc::channel();
    let waiting: Vec<_> = (0..4)
        .map(|_| {
            let tell = tell.clone();
            in_thread(&mgr, "x", move |mgr, name| tell.send(mgr.lock(name).map(drop)).unwrap())
        })
        .collect();
    let commands = server.monitor();
    eventually("one looks for all", CEILING, || count(&commands, "\"try\"") >= 12);
    drop(commands);
    server.kill();
    for nth in 0..waiting.len() {
        let result = told.recv_timeout(if nth == 0 { 4 * CALL_LIMIT } else { CALL_LIMIT }).unwrap();
        assert!(result.unwrap_err().is_unavailable());
    }
    waiting.into_iter().for_each(|waiter| waiter.join().unwrap());
    drop(guard);
}

/// Goal: nothing is asked while nothing happens. Method: five renewals of the holder give the time;
/// fifty waiters of one manager together ask a few times in it.
#[test]
fn fifty_waiters_ask_next_to_nothing() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    let guard = mgr.lock_with("x", &with_ttl(3 * SECOND)).unwrap();
    let waiting: Vec<_> = (0..50).map(|_| spawn_queued_waiter(&server, &other, "x")).collect();
    let commands = server.monitor();
    let ((), span) = timed(|| {
        eventually("five renewals", CEILING, || {
            count(&commands, "lua] \"PEXPIRE\" \"lock:x\"") >= 5
        })
    });
    let asked = count(&commands, "\"EVALSHA\"");
    assert!(asked as f64 <= 5.0 + 10.0 * span.as_secs_f64(), "{asked} commands in {span:?}");
    guard.release().unwrap().unwrap_released();
    waiting.into_iter().for_each(|waiter| drop(waiter.join().unwrap().unwrap()));
}

#[test]
fn the_line_itself_expires() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    let left = pttl(&server, &queue_key("x"));
    assert!(left > 0 && left <= 60_000, "{left}");
    drop(guard);
    drop(waiting.join().unwrap().unwrap());
    assert!(!server.query::<bool>(&["EXISTS", &queue_key("x")]));
}

#[test]
fn shutting_down_wakes_everybody() {
    let server = RedisServer::start();
    let (mgr, holder) = (manager(&server), manager(&server));
    let guard = holder.lock("x").unwrap();
    let waiting: Vec<_> = (0..5).map(|_| spawn_queued_waiter(&server, &mgr, "x")).collect();
    completes_within(CALL_LIMIT, "shutdown", || mgr.shutdown());
    for waiter in waiting {
        assert!(matches!(
            completes_within(CALL_LIMIT, "waking", || waiter.join().unwrap()),
            Err(LockError::Shutdown)
        ));
    }
    assert!(matches!(mgr.lock("x"), Err(LockError::Shutdown)));
    assert!(guard.is_held());
}

#[test]
fn shutting_down_wakes_who_waits_for_a_server_that_is_away() {
    let server = RedisServer::start();
    let proxy = FaultProxy::in_front_of(server.addr());
    let mgr = RedisMgr::new(config_short_timeout(proxy.url())).unwrap();
    proxy.refuse();
    let waiting = in_thread(&mgr, "x", |mgr, name| mgr.lock(name));
    eventually("it waits", CEILING, || mgr.metrics().waiting() == 1);
    completes_within(CALL_LIMIT, "shutdown", || mgr.shutdown());
    assert!(matches!(
        completes_within(CALL_LIMIT, "waking", || waiting.join().unwrap()),
        Err(LockError::Shutdown)
    ));
}

fn subscribers(server: &RedisServer) -> usize {
    server.clients().iter().filter(|client| client["sub"] == "1").count()
}

fn count(commands: &Monitor, part: &str) -> usize {
    commands.lines().iter().filter(|line| line.contains(part)).count()
}

/// Whose time is over before a line can be had has not found out anything about the server.
#[test]
fn who_cannot_wait_keeps_nobody_out_of_the_line() {
    let (server, proxy, mgr) = server_behind_proxy(config_medium_timeout);
    let holder = manager(&server).lock("x").unwrap();
    proxy.on_request(command("subscribe"), Fault::DelayReply(Duration::from_millis(30))).forever();
    let (stop, calls) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let hasty = [(); 4].map(|()| {
        let (stop, calls) = (stop.clone(), calls.clone());
        in_thread(&mgr, "x", move |mgr, name| {
            while !stop.load(Ordering::Relaxed) {
                assert!(mgr.try_lock_for(name, Duration::from_millis(10)).is_err());
                calls.fetch_add(1, Ordering::Relaxed);
            }
        })
    });
    let tried = || server.commandstats().get("subscribe").copied().unwrap_or(0);
    // Where that takes longer than they have, they do not even get to try.
    eventually("they have tried to get a line", CEILING, || {
        tried() > 9 || calls.load(Ordering::Relaxed) > 500
    });
    let waiting = in_thread(&mgr, "x", |mgr, name| mgr.lock(name));
    eventually("it stands in line", CALL_LIMIT, || queued(&server, "x") > 0);
    stop.store(true, Ordering::Relaxed);
    hasty.into_iter().for_each(|thread| thread.join().unwrap());
    holder.release().unwrap().unwrap_released();
    drop(waiting.join().unwrap().unwrap());
}

/// A thread takes its place here before others of its process, and its place in line long after
/// them.
#[test]
fn the_foremost_thread_looks_for_all_whichever_came_first() {
    const HOLDER: &str = "gone|pid1|tid1|ts1763712345678|67e55044-10b1-426f-9247-bb680e5fe0c8";
    let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    server.cli(&["SET", "lock:elsewhere", HOLDER, "PX", "600000"]);
    let elsewhere = spawn_queued_waiter(&server, &mgr, "elsewhere");
    // Where a subscription is up, the first ask is for a place in line.
    server.cli(&["SET", LOCK, HOLDER, "PX", "600000"]);
    let join =
        proxy.on_request(|words| words.iter().any(|word| word == b"join"), Fault::HoldRequest);
    let late = in_thread(&mgr, "x", |mgr, name| mgr.lock(name));
    join.wait_fired();
    let foremost = in_thread(&mgr, "x", |mgr, name| mgr.lock(name));
    await_queued(&server, "x", 1);
    for other in 1..=400 {
        server.cli(&[
            "RPUSH",
            &queue_key("x"),
            &format!("1000 distlock:client:nobody other{other}"),
        ]);
    }
    join.let_go();
    await_queued(&server, "x", 402);

    // Its holder has died.
    server.cli(&["PEXPIRE", LOCK, "1"]);
    let guard = completes_within(5 * SECOND, "the lock", || foremost.join().unwrap().unwrap());
    assert!(guard.is_held() && !late.is_finished());
    mgr.shutdown();
    assert!(late.join().unwrap().is_err() && elsewhere.join().unwrap().is_err());
}
