//! What an audit found, told as the promises that were broken: stray requests, borrowed
//! connections, neighbours that hold each other up, and ends that left something behind.

use std::{
    hint,
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use distlock::{Config, HandleEvent, LockError, LockLost, LockOptions, PooledConnection, RedisMgr};
use parking_lot::Mutex;

use crate::{
    bounds::threads,
    helpers::{
        CALL_LIMIT, SECOND, UnwrapReleased, await_gone, await_queued, capture_log,
        completes_within, config_long_timeouts, config_short_timeout, expect_loss, fence_key, get,
        in_own_process, in_thread, manager, pttl, queued, server_behind_proxy, spawn_queued_waiter,
        timed, with_ttl,
    },
    support::{CEILING, Fault, RedisServer, command, contains, eventually},
    worker::work,
};

const LOCK: &str = "lock:x";

/// What one operation timeout may take longer on a slow machine.
const SLACK: Duration = Duration::from_secs(3);

#[test]
fn what_a_user_does_to_a_borrowed_connection_stays_with_that_connection() {
    let server = RedisServer::start();
    server.cli(&["ACL", "SETUSER", "weak", "on", ">pw", "~none:*", "+@all"]);
    type Misuse = fn(&mut PooledConnection);
    let misuses: [(&str, Misuse); 9] = [
        ("SELECT", |c| say(c, &["SELECT", "3"])),
        ("select", |c| say(c, &["select", "3"])),
        ("SELECT in a pipeline", |c| {
            let _ = redis::pipe().cmd("PING").cmd("SELECT").arg(3).query::<redis::Value>(c);
        }),
        ("SELECT in a transaction", |c| {
            let _ = redis::pipe().atomic().cmd("SELECT").arg(3).query::<redis::Value>(c);
        }),
        ("AUTH", |c| say(c, &["AUTH", "weak", "pw"])),
        ("HELLO", |c| say(c, &["HELLO", "3", "AUTH", "weak", "pw"])),
        ("CLIENT REPLY", |c| say(c, &["CLIENT", "REPLY", "OFF"])),
        ("MULTI", |c| say(c, &["MULTI"])),
        ("SUBSCRIBE", |c| say(c, &["SUBSCRIBE", "news"])),
    ];
    for (what, misuse) in misuses {
        // One place in the pool, so that the next to ask gets it.
        let mgr = RedisMgr::new(
            config_long_timeouts(server.url()).pool_size(1).operation_timeout(2 * SECOND),
        )
        .unwrap();
        misuse(&mut mgr.connection().unwrap());
        let guard = mgr.try_lock("x").unwrap_or_else(|error| panic!("after {what}: {error}"));
        let refused = manager(&server).try_lock("x").map(drop);
        assert!(matches!(refused, Err(LockError::Held { .. })), "after {what}: {refused:?}");
        assert_eq!(get(&server, LOCK).as_deref(), Some(guard.id().as_str()), "after {what}");
        guard.release().unwrap().unwrap_released();
        assert_eq!(get(&server, LOCK), None, "after {what}");
    }
}

/// Some of these have no answer, and what they answer is of no interest.
fn say(connection: &mut PooledConnection, words: &[&str]) {
    let _ = redis::Cmd::new().arg(words).query::<redis::Value>(connection);
}

/// The first request hands the lock to the waiter; asking again must not take it away from there.
#[test]
fn a_forced_release_whose_reply_is_lost_hits_nobody_but_the_holder() {
    for fault in [Fault::DropReply, Fault::ResetAfterRequest, Fault::CloseAfterRequest] {
        let (server, proxy, operator) =
            server_behind_proxy(|url| config_long_timeouts(url).operation_timeout(8 * SECOND));
        let mgr = manager(&server);
        let guard = mgr.lock("x").unwrap();
        let (second, third) =
            (spawn_queued_waiter(&server, &mgr, "x"), spawn_queued_waiter(&server, &mgr, "x"));
        let lost = proxy.on_request(contains(guard.id().as_str()), fault.clone());
        assert!(operator.force_release("x").unwrap(), "{fault:?}");
        assert_eq!(lost.fired(), 1, "the release does not say whose lock is meant");
        let next = second.join().unwrap().unwrap();
        assert!(next.is_held(), "{fault:?}");
        assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()), "{fault:?}");
        assert_eq!(queued(&server, "x"), 1, "{fault:?}");
        next.release().unwrap().unwrap_released();
        third.join().unwrap().unwrap().release().unwrap().unwrap_released();
    }
}

/// The first request to take the lock is held up on its way, and its connection cut. The second one
/// succeeds and the lock is released again; only then does the first one arrive, still in time for
/// the server to carry it out.
#[test]
fn a_request_that_arrives_after_the_release_leaves_no_lock_behind() {
    let timeout = 6 * SECOND;
    let (server, proxy, mgr) = server_behind_proxy(|url| {
        config_long_timeouts(url).ttl(60 * SECOND).operation_timeout(timeout)
    });
    let late = proxy.on_request(contains(LOCK), Fault::HoldRequest);
    let taking = in_thread(&mgr, "x", |mgr, name| mgr.lock(name).unwrap());
    late.wait_fired();
    proxy.reset_all();
    taking.join().unwrap().release().unwrap().unwrap_released();
    let commands = server.monitor();
    late.let_go();
    commands.wait_for("lua] \"SET\" \"lock:x\"");
    eventually("the key is gone again, long before it expires", CALL_LIMIT, || {
        get(&server, LOCK).is_none()
    });
    // Taking it back must not have hit a later holder, nor may there be something left that will.
    let next = manager(&server).lock("x").unwrap();
    drop(mgr);
    assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()));
}

/// The same for a request that, when it arrives, finds the lock in other hands and takes a place in
/// the line.
#[test]
fn a_request_that_arrives_after_the_release_leaves_no_place_in_line_behind() {
    let (server, proxy, mgr) = server_behind_proxy(|url| {
        config_long_timeouts(url).ttl(60 * SECOND).operation_timeout(6 * SECOND)
    });
    let other = manager(&server);
    // Who has waited before has a line, and asks for a place at once.
    let guard = other.lock("warm").unwrap();
    assert!(mgr.try_lock_for("warm", SECOND).unwrap_err().is_timeout());
    guard.release().unwrap().unwrap_released();
    let late = proxy.on_request(contains(LOCK), Fault::HoldRequest);
    let taking = in_thread(&mgr, "x", |mgr, name| mgr.lock(name).unwrap());
    late.wait_fired();
    proxy.reset_all();
    taking.join().unwrap().release().unwrap().unwrap_released();
    let guard = other.lock("x").unwrap();
    let commands = server.monitor();
    late.let_go();
    commands.wait_for("lua] \"RPUSH\"");
    eventually("the place in line is given up", CALL_LIMIT, || queued(&server, "x") == 0);
    assert_eq!(get(&server, LOCK).as_deref(), Some(guard.id().as_str()));
    guard.release().unwrap().unwrap_released();
    assert_eq!(get(&server, LOCK), None);
}

/// The same where the lock has ended by itself meanwhile.
#[test]
fn a_request_that_arrives_after_the_end_leaves_no_place_in_line_behind() {
    let (server, proxy, mgr) =
        server_behind_proxy(|url| config_long_timeouts(url).operation_timeout(6 * SECOND));
    let other = manager(&server);
    let warm = other.lock("warm").unwrap();
    assert!(mgr.try_lock_for("warm", SECOND).unwrap_err().is_timeout());
    warm.release().unwrap().unwrap_released();
    let late = proxy.on_request(contains(LOCK), Fault::HoldRequest);
    let options = with_ttl(60 * SECOND).max_hold(SECOND / 2);
    let taking = in_thread(&mgr, "x", move |mgr, name| mgr.lock_with(name, &options).unwrap());
    late.wait_fired();
    proxy.reset_all();
    let guard = taking.join().unwrap();
    assert_eq!(expect_loss(&guard), LockLost::MaxHold);
    drop(guard);
    let next = other.lock("x").unwrap();
    let commands = server.monitor();
    late.let_go();
    commands.wait_for("lua] \"RPUSH\"");
    eventually("the place in line is given up", 30 * SECOND, || queued(&server, "x") == 0);
    assert!(next.is_held());
}

#[test]
fn names_whose_keys_would_be_our_own_are_refused() {
    let server = RedisServer::start();
    type Asked = fn(&RedisMgr, &str) -> Result<(), LockError>;
    let calls: [Asked; 7] = [
        |mgr, name| mgr.lock(name).map(drop),
        |mgr, name| mgr.try_lock(name).map(drop),
        |mgr, name| mgr.lock_reentrant(name).map(drop),
        |mgr, name| mgr.acquire_lock(name, SECOND, SECOND).map(drop),
        |mgr, name| mgr.holder(name).map(drop),
        |mgr, name| mgr.release_lock(name, "id").map(drop),
        |mgr, name| mgr.force_release(name).map(drop),
    ];
    for (prefix, name) in [
        ("", "distlock:x"),
        ("", "distlock:"),
        ("", "distlock:fence:{a}"),
        ("", "distlock:queue:{a}"),
        ("distlock:", "x"),
        ("distlock:", "fence:{a}"),
        ("dist", "lock:fence:{a}"),
    ] {
        let mgr = RedisMgr::new(config_long_timeouts(server.url()).prefix(prefix)).unwrap();
        for call in calls {
            let error = call(&mgr, name).unwrap_err();
            assert!(
                matches!(error, LockError::InvalidName { .. }),
                "{prefix:?} {name:?}: {error:?}"
            );
            assert!(error.is_invalid());
        }
    }
    assert!(server.keys().is_empty(), "{:?}", server.keys());
    for (prefix, name) in
        [("", "distlock"), ("", "xdistlock:x"), ("", "Distlock:x"), ("lock:", "distlock:fence:{a}")]
    {
        let mgr = RedisMgr::new(config_long_timeouts(server.url()).prefix(prefix)).unwrap();
        mgr.try_lock(name).unwrap().release().unwrap().unwrap_released();
    }
}

/// Without the right to publish, waiters find the lock by looking. Those who did must not be
/// granted it again later.
#[test]
fn a_right_that_was_missing_for_a_while_leaves_nobody_in_line() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    for back_after in [2, 5] {
        let guard = mgr.lock("x").unwrap();
        let (served, serving) = crossbeam_channel::unbounded();
        let waiting: Vec<_> = (0..5)
            .map(|number| {
                let served = served.clone();
                let waiting = in_thread(&mgr, "x", move |mgr, name| {
                    let guard = mgr.lock(name).unwrap();
                    served.send(()).unwrap();
                    guard.release().unwrap().unwrap_released();
                });
                await_queued(&server, "x", number + 1);
                waiting
            })
            .collect();
        server.cli(&["ACL", "SETUSER", "default", "-publish"]);
        guard.release().unwrap().unwrap_released();
        for _ in 0..back_after {
            serving.recv_timeout(CEILING).expect("they find it by looking");
        }
        if back_after == 5 {
            waiting.into_iter().for_each(|waiter| waiter.join().unwrap());
            assert_eq!(queued(&server, "x"), 0, "before the right is back");
            server.cli(&["ACL", "SETUSER", "default", "+publish"]);
        } else {
            server.cli(&["ACL", "SETUSER", "default", "+publish"]);
            waiting.into_iter().for_each(|waiter| waiter.join().unwrap());
        }
        assert_eq!(queued(&server, "x"), 0, "the right was back after {back_after}");
        // A grant to somebody who is not there any more would last for the claim window of 20 s.
        let next = completes_within(CALL_LIMIT, "the next", || mgr.lock("x").unwrap());
        next.release().unwrap().unwrap_released();
        assert_eq!(server.keys(), [fence_key("x")]);
    }
}

/// A lock that is handed over is the claim window's at first. It has to become the lease's, once,
/// and no more than once.
#[test]
fn without_renewal_a_lock_that_was_waited_for_lasts_for_its_lease() {
    let (window, ttl) = (4 * SECOND, 9 * SECOND);
    let server = RedisServer::start();
    let holder = manager(&server);
    let mgr = RedisMgr::new(config_long_timeouts(server.url()).claim_window(window)).unwrap();
    // The same thread renews this one, and so shows that a renewal would have been due.
    let renewed = mgr.lock_with("y", &with_ttl(ttl)).unwrap();
    let guard = holder.lock("x").unwrap();
    let waiting = in_thread(&mgr, "x", move |mgr, name| {
        mgr.lock_with(name, &with_ttl(ttl).renew(false)).unwrap()
    });
    await_queued(&server, "x", 1);
    let commands = server.monitor();
    guard.release().unwrap().unwrap_released();
    let next = waiting.join().unwrap();
    commands.wait_for("lua] \"PUBLISH\"");
    eventually("it is more than a claim", CEILING, || next.remaining() > window + SECOND);
    assert!(next.is_held());
    let left = pttl(&server, LOCK);
    let count = |parts: &[&str]| {
        let lines = commands.lines();
        let told = |line: &&String| {
            !line.contains("distlock:queue") && parts.iter().all(|part| line.contains(part))
        };
        lines.iter().filter(told).count()
    };
    let before = count(&["lua] \"PEXPIRE\" \"lock:y\""]);
    eventually("the other lock is renewed twice", CEILING, || {
        count(&["lua] \"PEXPIRE\" \"lock:y\""]) >= before + 2 || !renewed.is_held()
    });
    let now_left = pttl(&server, LOCK);
    assert_eq!(count(&["\"EVALSHA\"", next.id().as_str()]), 1, "{:#?}", commands.lines());
    assert!(now_left < left - 1000, "{now_left} ms of {left} ms are left");
    assert_eq!(expect_loss(&next), LockLost::Expired);
    assert!(renewed.is_held());
}

/// Locks that are released just when their renewal falls due must not disturb the renewal of all
/// the others.
#[test]
fn coming_and_going_disturbs_no_renewal() {
    if !in_own_process("audit::coming_and_going_disturbs_no_renewal", &[]) {
        return;
    }
    const THREADS: usize = 40;
    const ROUNDS: usize = 10;
    let logged = capture_log(log::LevelFilter::Warn);
    let server = RedisServer::start();
    // The operation timeout is no help: what a renewal may take is a matter of the leases.
    let mgr = RedisMgr::new(config_long_timeouts(server.url()).claim_window(SECOND)).unwrap();
    let kept: Vec<_> = (0..300)
        .map(|n| mgr.lock_with(&format!("kept{n}"), &with_ttl(3 * SECOND)).unwrap())
        .collect();
    let ttl = 3 * SECOND;
    let lost = AtomicUsize::new(0);
    thread::scope(|threads| {
        for n in 0..THREADS {
            let (mgr, lost) = (&mgr, &lost);
            threads.spawn(move || {
                for _ in 0..ROUNDS {
                    let guard = mgr.lock_with(&format!("comes{n}"), &with_ttl(ttl)).unwrap();
                    work(ttl / 3);
                    lost.fetch_add(usize::from(!guard.is_held()), Ordering::Relaxed);
                }
            });
        }
    });
    let held = kept.iter().filter(|guard| guard.is_held()).count();
    assert_eq!((held, lost.into_inner()), (300, 0));
    // A short lease on a slow machine has a right to some.
    let logged = logged.lock();
    let warnings: Vec<_> = logged.iter().filter(|text| text.contains("could not renew")).collect();
    println!("{} warnings in {} releases", warnings.len(), THREADS * ROUNDS);
    assert!(warnings.len() < THREADS * ROUNDS / 40, "{} warnings: {warnings:#?}", warnings.len());
}

/// How the renewer is kept busy with a server that does not answer, for much longer than the lease
/// in question.
#[derive(Clone, Copy, Debug)]
enum Busy {
    /// It takes back what another lease has left.
    TakingBack,
    /// It releases for somebody who found the pool exhausted.
    Releasing,
}

#[test]
fn a_loss_is_told_in_time_whatever_else_the_server_owes_an_answer_for() {
    let timeout = 60 * SECOND;
    for busy in [Busy::TakingBack, Busy::Releasing] {
        let server = RedisServer::start();
        let mgr = RedisMgr::new(
            config_long_timeouts(server.url()).operation_timeout(timeout).pool_size(1),
        )
        .unwrap();
        // The renewer has its connection, over which the answer is then owed.
        let renewed = mgr.lock_with("renewed", &with_ttl(SECOND)).unwrap();
        let renewals = || server.calls("pexpire");
        eventually("it is renewed", CEILING, || renewals() > 0);
        drop(renewed);
        let released = mgr.lock("released").unwrap();
        let _short = mgr.lock_with("short", &with_ttl(SECOND).renew(false)).unwrap();
        let guard = mgr.lock_with("x", &with_ttl(2 * SECOND)).unwrap();
        let borrowed = matches!(busy, Busy::Releasing).then(|| mgr.connection().unwrap());
        server.stop();
        let releasing = thread::spawn(move || matches!(busy, Busy::TakingBack).then_some(released));
        let channel = guard.lost().clone();
        let ((left, why), span) = timed(|| (guard.remaining(), channel.recv_timeout(CEILING)));
        assert!(!guard.is_held());
        server.cont();
        drop((borrowed, releasing.join()));
        assert_eq!(why, Ok(LockLost::Expired), "{busy:?}");
        assert!(span >= left, "{busy:?}: told after {span:?} of which {left:?} were left");
        assert!(
            span < left + CALL_LIMIT,
            "{busy:?}: told after {span:?} of which {left:?} were left"
        );
    }
}

fn punctual(server: &RedisServer) -> RedisMgr {
    RedisMgr::new(Config::new(server.url()).ttl(30 * SECOND).operation_timeout(5 * SECOND)).unwrap()
}

#[test]
fn the_last_guard_goes_within_one_operation_timeout() {
    let server = RedisServer::start();
    let mgr = punctual(&server);
    let guard = mgr.lock("x").unwrap();
    drop(mgr);
    server.stop();
    completes_within(5 * SECOND + SLACK, "the drop", || drop(guard));
}

/// Neither knows beforehand that it is the last.
#[test]
fn the_last_guards_go_within_one_operation_timeout_though_they_go_at_once() {
    const TIMEOUT: Duration = Duration::from_secs(10);
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_long_timeouts(server.url()).operation_timeout(TIMEOUT)).unwrap();
    let guards = [mgr.lock("x").unwrap(), mgr.lock("y").unwrap()];
    drop(mgr);
    server.stop();
    let drops = guards.map(|guard| thread::spawn(move || timed(|| drop(guard)).1));
    for took in drops.map(|dropped| dropped.join().unwrap()) {
        assert!(took < TIMEOUT + SLACK, "{took:?}");
    }
}

#[test]
fn a_shutdown_takes_one_operation_timeout_whatever_went_before() {
    let server = RedisServer::start();
    let mgr = punctual(&server);
    let (dropped, held) = (mgr.lock("x").unwrap(), mgr.lock("y").unwrap());
    server.stop();
    completes_within(5 * SECOND + SLACK, "the drop", || drop(dropped));
    // Now something is to be taken back in the background, which has its own timeout.
    completes_within(5 * SECOND + SLACK, "the shutdown", || mgr.shutdown());
    completes_within(5 * SECOND + SLACK, "the drop after it", || drop(held));
    completes_within(SLACK, "the manager's drop", || drop(mgr));
}

#[test]
fn a_shutdown_with_many_locks_far_away_takes_about_one_operation_timeout() {
    let (server, proxy, mgr) =
        server_behind_proxy(|url| config_long_timeouts(url).operation_timeout(SECOND));
    let guards: Vec<_> = (0..100).map(|n| mgr.lock(&format!("n{n}")).unwrap()).collect();
    proxy.on_request(|_| true, Fault::DelayReply(Duration::from_millis(50))).forever();
    completes_within(CALL_LIMIT, "the shutdown", || mgr.shutdown());
    assert!(guards.iter().all(|guard| !guard.is_held()));
    assert!(guards.iter().all(|guard| guard.lost().recv() == Ok(LockLost::Shutdown)));
    drop(server);
}

#[test]
fn whoever_has_patience_waits_longer_than_a_lease_for_a_server_that_is_away() {
    let server = RedisServer::start();
    server.kill();
    let mgr = RedisMgr::new(Config::new(server.url()).ttl(SECOND)).unwrap();
    let (outcome, span) = timed(|| mgr.try_lock_for("x", 4 * SECOND));
    let error = outcome.unwrap_err();
    assert!(span >= Duration::from_millis(3_900), "gave up after {span:?}: {error}");
    assert!(span < CALL_LIMIT, "{span:?}");
    assert!(matches!(error, LockError::Unavailable { .. }), "{error:?}");
    assert!(error.to_string().contains("refused"), "{error}");
}

/// Who is in line needs no connection to learn that it is its turn, nor to keep the lock or give it
/// back.
#[test]
fn a_waiter_outlasts_users_who_keep_the_pool_to_themselves() {
    let server = RedisServer::start();
    let ttl = 3 * SECOND;
    let mgr = RedisMgr::new(config_short_timeout(server.url()).ttl(ttl).pool_size(1)).unwrap();
    let other = manager(&server);
    let guard = other.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    let borrowed = mgr.connection().unwrap();
    // A lease that lasts longer says when this has gone on for longer than one.
    let longer = other.lock_with("clock", &with_ttl(ttl + 2 * SECOND).renew(false)).unwrap();
    assert_eq!(expect_loss(&longer), LockLost::Expired);
    assert!(!waiting.is_finished(), "{:?}", waiting.join().unwrap());
    guard.release().unwrap().unwrap_released();
    let next = completes_within(CALL_LIMIT, "the handover", || waiting.join().unwrap().unwrap());
    assert!(next.is_held());
    assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()));
    next.release().unwrap().unwrap_released();
    drop(borrowed);
}

/// Goal: among threads of one manager, who listens for all passes that on whenever it leaves,
/// however it leaves.
#[test]
fn nobody_sleeps_through_its_turn_where_many_come_and_give_up() {
    const NAMES: [&str; 3] = ["a", "b", "c"];
    let server = RedisServer::start();
    let mgr = manager(&server);
    let taken = [const { AtomicBool::new(false) }; 3];
    let longest = Mutex::new(Duration::ZERO);
    thread::scope(|threads| {
        for _ in 0..30 {
            let (mgr, taken, longest) = (&mgr, &taken, &longest);
            threads.spawn(move || {
                for _ in 0..100 {
                    let which = fastrand::usize(..NAMES.len());
                    let (outcome, span) = timed(|| match fastrand::bool() {
                        true => mgr.lock(NAMES[which]),
                        false => mgr.try_lock_for(
                            NAMES[which],
                            Duration::from_micros(fastrand::u64(..6_000)),
                        ),
                    });
                    {
                        let mut longest = longest.lock();
                        *longest = longest.max(span);
                    }
                    match outcome {
                        Ok(guard) => {
                            assert!(!taken[which].swap(true, Ordering::SeqCst), "two at a time");
                            taken[which].store(false, Ordering::SeqCst);
                            guard.release().unwrap().unwrap_released();
                        }
                        Err(error) => assert!(error.is_contended(), "{error}"),
                    }
                }
            });
        }
    });
    let longest = longest.into_inner();
    println!("the longest wait took {longest:?}");
    assert!(longest < CALL_LIMIT, "somebody waited for {longest:?}");
    eventually("nobody is left in line", CEILING, || {
        NAMES.iter().all(|name| queued(&server, name) == 0)
    });
    eventually("all locks are free", CEILING, || {
        server.keys().iter().all(|key| key.starts_with("distlock:fence:"))
    });
}

fn subscriptions(server: &RedisServer) -> Vec<String> {
    let clients = server.clients().into_iter().filter(|client| client["sub"] == "1");
    clients.map(|client| client["id"].clone()).collect()
}

/// The answer comes when nobody listens any more. The next one to listen, long after it was due,
/// finds it in the mail.
#[test]
fn an_answer_that_came_while_nobody_listened_is_no_silence() {
    let timeout = 3 * SECOND;
    let (server, proxy, mgr) =
        server_behind_proxy(|url| config_long_timeouts(url).operation_timeout(timeout));
    let holder = manager(&server);
    let guard = holder.lock("x").unwrap();
    let unanswered = proxy.on_request(command("PING"), Fault::HoldReply);
    // It leaves because the lock is its own, and its lease lasts until the answer is overdue.
    let options = with_ttl(timeout + SECOND).renew(false);
    let leaving = in_thread(&mgr, "x", move |mgr, name| mgr.lock_with(name, &options).unwrap());
    await_queued(&server, "x", 1);
    let line = subscriptions(&server);
    assert_eq!(line.len(), 1);
    unanswered.wait_fired();
    guard.release().unwrap().unwrap_released();
    let left = leaving.join().unwrap();
    unanswered.let_go();
    assert_eq!(subscriptions(&server), line, "it did not leave in time for this test");
    assert_eq!(expect_loss(&left), LockLost::Expired);
    // Else the holder would wait too, and have a line of its own.
    await_gone(&server, LOCK);

    let guard = holder.lock("x").unwrap();
    let next = spawn_queued_waiter(&server, &mgr, "x");
    guard.release().unwrap().unwrap_released();
    next.join().unwrap().unwrap().release().unwrap().unwrap_released();
    assert_eq!(subscriptions(&server), line, "a healthy line was given up");
}

/// Is told, and does not care.
#[derive(Debug)]
struct Deaf;

impl HandleEvent for Deaf {}

#[test]
fn a_shutdown_leaves_neither_connections_nor_threads_to_a_clone_that_lives_on() {
    if !in_own_process(
        "audit::a_shutdown_leaves_neither_connections_nor_threads_to_a_clone_that_lives_on",
        &[],
    ) {
        return;
    }
    let server = RedisServer::start();
    let mgr = RedisMgr::new(
        config_long_timeouts(server.url()).pool_size(4).event_handler(Arc::new(Deaf)),
    )
    .unwrap();
    let clone = mgr.clone();
    // A thread gives itself its name.
    eventually("there is one for events", CEILING, || {
        threads().iter().any(|name| name.contains("events"))
    });
    let guard = mgr.lock("x").unwrap();
    // So that there is a line.
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    guard.release().unwrap().unwrap_released();
    let guard = waiting.join().unwrap().unwrap();
    drop([mgr.connection().unwrap(), mgr.connection().unwrap()].map(|mut borrowed| {
        redis::cmd("PING").query::<()>(&mut borrowed).unwrap();
        borrowed
    }));
    let mut borrowed = mgr.connection().unwrap();
    redis::cmd("PING").query::<()>(&mut borrowed).unwrap();
    // The one that was borrowed, and the line.
    assert!(server.clients().len() >= 2 && !threads().is_empty());
    mgr.shutdown();
    drop(borrowed);
    eventually("its connections are closed", CALL_LIMIT, || server.clients().is_empty());
    eventually("its threads have ended", CALL_LIMIT, || threads().is_empty());
    assert!(matches!(clone.try_lock("x"), Err(LockError::Shutdown)));
    assert!(matches!(clone.connection(), Err(LockError::Shutdown)));
    assert_eq!(guard.lost().recv(), Ok(LockLost::Shutdown));
    drop(guard);
    server.await_clients(0..=0);
    assert!(threads().is_empty());
}

/// Goal: a lock whose taking is overtaken by a shutdown is not forgotten. Its lease would be 30 s.
#[test]
fn a_lock_taken_during_a_shutdown_is_given_back() {
    const TAKERS: usize = 3;
    let server = RedisServer::start();
    let mut taken = 0;
    for round in 0..60 {
        let mgr = manager(&server);
        let start = Arc::new(Barrier::new(TAKERS + 1));
        let takers: Vec<_> = (0..TAKERS)
            .map(|taker| {
                let start = start.clone();
                in_thread(&mgr, &format!("r{round}t{taker}"), move |mgr, name| {
                    start.wait();
                    let mut taken = 0;
                    loop {
                        match mgr.acquire_lock(&format!("{name}n{taken}"), 30 * SECOND, SECOND) {
                            Ok(id) => assert!(id.is_some(), "nobody else wants it"),
                            Err(LockError::Shutdown) => return taken,
                            Err(error) => panic!("{error:?}"),
                        }
                        taken += 1;
                    }
                })
            })
            .collect();
        start.wait();
        // Whatever they are at by then.
        for _ in 0..fastrand::u32(..200_000) {
            hint::spin_loop();
        }
        mgr.shutdown();
        taken += takers.into_iter().map(|taker| taker.join().unwrap()).sum::<u32>();
        eventually("all locks are given back", CALL_LIMIT, || {
            !server.keys().iter().any(|key| key.starts_with("lock:"))
        });
    }
    println!("{taken} locks were taken");
}

#[test]
fn an_empty_identifier_is_nobodys_unless_somebody_calls_himself_so() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    assert!(!mgr.release_lock("x", "").unwrap());
    assert!(server.keys().is_empty());

    let guard = mgr.lock("x").unwrap();
    let by_id = mgr.acquire_lock("y", 30 * SECOND, SECOND).unwrap().unwrap();
    let waiting = spawn_queued_waiter(&server, &other, "x");
    for mgr in [&mgr, &other] {
        assert!(!mgr.release_lock("x", "").unwrap());
        assert!(!mgr.release_lock("y", "").unwrap());
    }
    assert_eq!(get(&server, LOCK).as_deref(), Some(guard.id().as_str()));
    assert_eq!(get(&server, "lock:y").as_deref(), Some(by_id.as_str()));
    assert_eq!(queued(&server, "x"), 1);
    assert!(guard.is_held());
    guard.release().unwrap().unwrap_released();
    drop(waiting.join().unwrap().unwrap());

    server.cli(&["SET", "lock:z", "a stranger"]);
    assert!(!mgr.release_lock("z", "").unwrap());
    assert_eq!(get(&server, "lock:z").as_deref(), Some("a stranger"));
    server.cli(&["RPUSH", "lock:list", "precious"]);
    assert!(!mgr.release_lock("list", "").unwrap());
    assert_eq!(server.query::<i64>(&["LLEN", "lock:list"]), 1);
    server.cli(&["SET", "lock:z", ""]);
    assert!(mgr.release_lock("z", "").unwrap());
    assert_eq!(get(&server, "lock:z"), None);

    let waited = other.lock_with("y", &LockOptions::new().wait(Duration::ZERO)).unwrap_err();
    assert!(waited.is_contended());
    assert!(mgr.release_lock("y", &by_id).unwrap());
}
