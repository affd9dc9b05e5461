//! Ways to the server that are slow, forgotten, or lead elsewhere.

mod replies;
mod resolver;
mod streams;

use std::thread;

use distlock::{Config, RedisMgr};

use super::{LOCK, is_renewed};
use crate::{
    helpers::{
        CALL_LIMIT, SECOND, SHORT_TIMEOUT, UnwrapReleased, await_gone, completes_within,
        config_long_timeouts, config_short_timeout, get, in_thread, manager, server_behind_proxy,
        server_with_scripts, spawn_queued_waiter, with_ttl,
    },
    support::{CEILING, Fault, FaultProxy, RedisServer, any_request, contains, eventually},
};

/// Each answer takes most of what an exchange may take: too much for connecting and asking in one,
/// or for a release that has to be able to ask twice. What is held is kept as long as its
/// connection is, and nothing is told that is not so.
#[test]
fn a_way_that_takes_most_of_the_time_keeps_locks_and_tells_no_lies() {
    let (server, proxy, mgr) = server_behind_proxy(config_short_timeout);
    // The renewer connects on its own.
    let held = mgr.lock_with("held", &with_ttl(6 * SECOND)).unwrap();
    is_renewed(&server, &held, 1);
    let delayed = proxy.on_request(any_request, Fault::DelayReply(SHORT_TIMEOUT * 4 / 5)).forever();
    let commands = server.monitor();
    let renewed = || super::renewals(&commands, "lock:held") >= 2;
    // On a slow machine an answer is late, and then there is no time for another connection.
    eventually("it is renewed, or lost", CEILING, || renewed() || !held.is_held());
    for _ in 0..3 {
        match completes_within(CALL_LIMIT, "locking", || mgr.try_lock("x")) {
            Ok(guard) => {
                assert_eq!(get(&server, LOCK).as_deref(), Some(guard.id().as_str()));
                let released = completes_within(CALL_LIMIT, "releasing", || guard.release());
                assert!(
                    released.as_ref().err().is_none_or(|error| error.is_unavailable()),
                    "{released:?}"
                );
            }
            Err(error) => assert!(error.is_unavailable(), "{error:?}"),
        }
        // The lease is 30 s.
        completes_within(CALL_LIMIT, "cleaning up", || await_gone(&server, LOCK));
    }
    assert!(delayed.fired() >= 3);
    let believes = held.is_held();
    let kept = get(&server, "lock:held").as_deref() == Some(held.id().as_str());
    assert!(kept || !believes || !held.is_held());
}

/// A fifth, so that connecting fits into half of the time as well.
#[test]
fn a_way_that_takes_a_fifth_of_the_time_is_good_enough_for_everything() {
    let timeout = 5 * SECOND;
    let server = server_with_scripts();
    let proxy = FaultProxy::in_front_of(server.addr());
    proxy.on_request(any_request, Fault::DelayReply(timeout / 5)).forever();
    let mgr = RedisMgr::new(config_long_timeouts(proxy.url()).operation_timeout(timeout)).unwrap();
    let guard = completes_within(CALL_LIMIT, "locking", || mgr.lock("x").unwrap());
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    completes_within(CALL_LIMIT, "releasing", || guard.release().unwrap()).unwrap_released();
    let next = completes_within(CALL_LIMIT, "the next", || waiting.join().unwrap().unwrap());
    assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()));
}

#[test]
fn a_way_that_takes_longer_than_an_exchange_may_leaves_nothing_behind() {
    let (server, proxy, mgr) = server_behind_proxy(config_short_timeout);
    let delayed = proxy.on_request(any_request, Fault::DelayReply(SHORT_TIMEOUT * 6 / 5)).forever();
    for _ in 0..3 {
        let error = completes_within(CALL_LIMIT, "locking", || mgr.try_lock("x").unwrap_err());
        assert!(error.is_unavailable(), "{error:?}");
    }
    delayed.disarm();
    delayed.let_go();
    await_gone(&server, LOCK);
    let guard = completes_within(CALL_LIMIT, "locking", || mgr.lock("x").unwrap());
    assert_eq!(get(&server, LOCK).as_deref(), Some(guard.id().as_str()));
}

/// Some answers come at once and some too late, in any order.
#[test]
fn now_fast_and_now_slow_confuses_nothing() {
    let (server, proxy, mgr) =
        server_behind_proxy(|url| config_short_timeout(url).operation_timeout(SHORT_TIMEOUT / 2));
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let dice = parking_lot::Mutex::new(fastrand::Rng::with_seed(seed));
    proxy
        .on_request(move |_| dice.lock().u8(..8) == 0, Fault::DelayReply(SHORT_TIMEOUT * 3 / 5))
        .forever();
    let outcomes: Vec<(u32, u32)> = thread::scope(|threads| {
        let working = |thread: usize| {
            let (mgr, server) = (&mgr, &server);
            move || {
                let (mut got, mut failed) = (0, 0);
                let name = format!("n{thread}");
                let key = format!("lock:{name}");
                for _ in 0..25 {
                    match mgr.lock_with(&name, &with_ttl(30 * SECOND).wait(2 * SECOND)) {
                        Ok(guard) => {
                            got += 1;
                            assert_eq!(get(server, &key).as_deref(), Some(guard.id().as_str()));
                        }
                        Err(error) => {
                            assert!(error.is_unavailable() || error.is_contended(), "{error:?}");
                            failed += 1;
                        }
                    }
                }
                (got, failed)
            }
        };
        let all: Vec<_> = (0..4).map(|thread| threads.spawn(working(thread))).collect();
        all.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(outcomes.iter().all(|(got, failed)| got > failed), "{outcomes:?}");
    for thread in 0..4 {
        await_gone(&server, &format!("lock:n{thread}"));
    }
}

/// Goal: a lock that is handed over can be kept although the way takes a good part of the claim
/// window. Method: each answer takes a quarter of it, as in all that a renewal takes over a new
/// connection: too much.
#[test]
fn a_lock_that_is_handed_over_a_slow_way_is_kept() {
    let server = server_with_scripts();
    let proxy = FaultProxy::in_front_of(server.addr());
    proxy.on_request(any_request, Fault::DelayReply(SECOND / 4)).forever();
    // The claim window and all timeouts are what they are by default.
    let mgr = RedisMgr::new(Config::new(proxy.url())).unwrap();
    let first = manager(&server).lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    first.release().unwrap().unwrap_released();
    let next = completes_within(CEILING, "the hand-over", || waiting.join().unwrap().unwrap());
    eventually("it is kept for longer than the claim window", CEILING, || {
        next.ensure_held().unwrap();
        next.remaining() > 2 * SECOND
    });
    is_renewed(&server, &next, 1);
}

/// The connections are there for both ends, and nothing goes over them any more; new ones are well.
#[test]
fn a_nat_that_forgets_connections_costs_one_timeout_and_no_lock() {
    let (server, proxy, mgr) = server_behind_proxy(config_short_timeout);
    let other = manager(&server);
    let held = mgr.lock_with("held", &with_ttl(9 * SECOND)).unwrap();
    is_renewed(&server, &held, 1);
    let theirs = other.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    proxy.forget();
    // Whoever meets a dead connection may say so, in time; the next one has a new one.
    let first = completes_within(CALL_LIMIT, "try_lock", || mgr.try_lock("y").map(drop));
    assert!(first.as_ref().err().is_none_or(|error| error.is_unavailable()), "{first:?}");
    drop(completes_within(CALL_LIMIT, "locking", || mgr.lock("z").unwrap()));
    is_renewed(&server, &held, 2);
    theirs.release().unwrap().unwrap_released();
    // Its grant is published into the dead connection; the claim window of that is 20 s.
    let next = completes_within(CEILING, "the wait", || waiting.join().unwrap().unwrap());
    assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()));
    assert!(held.is_held());
}

/// Another server has taken the place of the first one, which is gone: everything on it is another
/// server's.
#[test]
fn a_server_that_is_replaced_on_its_port_is_another_one() {
    let (server, other) = (RedisServer::start(), RedisServer::start());
    let proxy = FaultProxy::in_front_of(server.addr());
    let mgr = RedisMgr::new(config_long_timeouts(proxy.url()).operation_timeout(SECOND)).unwrap();
    let guard = mgr.lock_with("x", &with_ttl(3 * SECOND)).unwrap();
    let behind = in_thread(&mgr, "x", |mgr, name| mgr.lock(name));
    eventually("it waits", CEILING, || mgr.holder("x").unwrap().unwrap().waiters() == Some(1));
    // The new one knows neither scripts nor locks, and holds a lock of somebody else.
    other.cli(&["SET", LOCK, "a stranger", "PX", "4000"]);
    proxy.lead_to(other.addr());
    proxy.reset_all();
    server.kill();
    let why = crate::helpers::expect_loss(&guard);
    assert!(matches!(why, distlock::LockLost::Taken { .. }), "{why:?}");
    let next = completes_within(CEILING, "the wait", || behind.join().unwrap().unwrap());
    assert!(next.fencing_token() > guard.fencing_token());
    assert_eq!(get(&other, LOCK).as_deref(), Some(next.id().as_str()));
    drop(guard);
    next.release().unwrap().unwrap_released();
}

/// Goal: however often renewing fails, it goes on, and works as soon as it can. Method: short
/// leases that nobody can renew, as many as it takes.
#[test]
fn the_renewer_survives_a_thousand_failures() {
    let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    for fault in [
        Fault::ResetBeforeRequest,
        Fault::CloseAfterRequest,
        Fault::ReplaceReply(b"-ERR no\r\n".to_vec()),
    ] {
        let failing = proxy
            .on_request(|words| !contains("distlock:")(words) && contains("lock:n")(words), fault);
        let failing = failing.forever();
        let before = mgr.metrics().renewals_failed();
        eventually("it has failed often enough", CEILING, || {
            let take =
                |n: usize| mgr.lock_with(&format!("n{n}"), &with_ttl(SECOND / 3).wait(SECOND));
            let guards: Vec<_> = (0..20).filter_map(|n| take(n).ok()).collect();
            guards.iter().for_each(|guard| drop(guard.lost().recv_timeout(CEILING)));
            mgr.metrics().renewals_failed() >= before + 350
        });
        failing.disarm();
        let guard = mgr.lock_with("x", &with_ttl(3 * SECOND)).unwrap();
        is_renewed(&server, &guard, 2);
    }
}
