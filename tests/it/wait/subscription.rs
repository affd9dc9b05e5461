//! Subscriptions that break, lead to the wrong server or carry nothing: no waiter depends on one,
//! and they are retried with a back-off.

use std::collections::HashMap;

use distlock::{LockLost, RedisMgr};

use super::LOCK;
use crate::{
    helpers::{
        CALL_LIMIT, SECOND, UnwrapReleased, await_gone, await_queue_length, capture_log,
        completes_within, config_long_timeouts, expect_loss, in_own_process, manager, queue_key,
        server_behind_proxy, spawn_call, spawn_queued_waiter, timed, tries, with_ttl,
    },
    support::{
        ArmedFault, Fault, FaultProxy, Monitor, RedisServer, TEST_TIMEOUT, command, contains,
        eventually, rewrite,
    },
};

/// The ids of the connections that are subscriptions.
fn subscriptions(server: &RedisServer) -> Vec<String> {
    let clients = server.clients().into_iter().filter(|client| client["sub"] == "1");
    clients.map(|client| client["id"].clone()).collect()
}

/// Fault: F44
#[test]
fn waiter_survives_the_loss_of_its_subscription() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    for round in 0..3 {
        let guard = mgr.lock("x").unwrap();
        let waiting = spawn_queued_waiter(&server, &other, "x");
        assert_eq!(server.kill_clients(&["TYPE", "pubsub"]), 1);
        if round > 0 {
            eventually("it has subscribed again", TEST_TIMEOUT, || {
                subscriptions(&server).len() == 1
            });
        }
        guard.release().unwrap().unwrap_released();
        let next = completes_within(CALL_LIMIT, "the wait", || waiting.join().unwrap().unwrap());
        next.release().unwrap().unwrap_released();
    }
}

/// Goal: grants may have been missed while there was no subscription, so all waiters of a process
/// poll once there is one again, not only the thread that polls for all. Method: the subscription
/// is cut after it has lasted for a while, so that it is opened again without a back-off.
///
/// Fault: F44
#[test]
fn all_waiters_poll_after_a_new_subscription() {
    let server = RedisServer::start();
    let (mgr, other) = (manager(&server), manager(&server));
    let guard = mgr.lock("x").unwrap();
    let waiting: Vec<_> = (0..3).map(|_| spawn_queued_waiter(&server, &other, "x")).collect();
    let entries: Vec<String> = server.query(&["LRANGE", &queue_key("x"), "0", "-1"]);
    let lasts = |client: &HashMap<String, String>| {
        client["sub"] == "1" && client["age"].parse::<u32>().unwrap() >= 3
    };
    eventually("the subscription has lasted", TEST_TIMEOUT, || server.clients().iter().any(lasts));
    let commands = server.monitor();
    assert_eq!(server.kill_clients(&["TYPE", "pubsub"]), 1);
    eventually("all have polled", TEST_TIMEOUT, || {
        let lines = commands.lines();
        let has_polled = |entry: &String| {
            lines.iter().any(|line| line.contains("\"look\"") && line.contains(entry.as_str()))
        };
        entries.iter().all(has_polled)
    });
    other.shutdown();
    waiting.into_iter().for_each(|waiter| drop(waiter.join().unwrap()));
    guard.release().unwrap().unwrap_released();
}

/// The reply to a ping arrives while no thread reads the subscription. The next thread to read it,
/// long after the reply was due, finds the reply there.
#[test]
fn reply_read_late_does_not_cost_the_subscription() {
    let timeout = 3 * SECOND;
    let (server, proxy, mgr) =
        server_behind_proxy(|url| config_long_timeouts(url).operation_timeout(timeout));
    let holder = manager(&server);
    let guard = holder.lock("x").unwrap();
    let unanswered = proxy.on_request(command("PING"), Fault::HoldReply);
    // The thread stops reading because it gets the lock, whose lease lasts until the reply is
    // overdue.
    let options = with_ttl(timeout + SECOND).renew(false);
    let leaving = spawn_call(&mgr, "x", move |mgr, name| mgr.lock_with(name, &options).unwrap());
    await_queue_length(&server, "x", 1);
    let before = subscriptions(&server);
    assert_eq!(before.len(), 1);
    unanswered.wait_fired();
    guard.release().unwrap().unwrap_released();
    let left = leaving.join().unwrap();
    unanswered.release();
    assert_eq!(subscriptions(&server), before, "the waiter got the lock too late for this test");
    assert_eq!(expect_loss(&left), LockLost::Expired);
    // Otherwise the holder would wait too, and have a subscription of its own.
    await_gone(&server, LOCK);

    let guard = holder.lock("x").unwrap();
    let next = spawn_queued_waiter(&server, &mgr, "x");
    guard.release().unwrap().unwrap_released();
    next.join().unwrap().unwrap().release().unwrap().unwrap_released();
    assert_eq!(subscriptions(&server), before, "a healthy subscription was closed");
}

/// A manager whose pool has two open connections through the proxy, and no room for more.
fn connected_twice(proxy: &FaultProxy) -> RedisMgr {
    let mgr = RedisMgr::new(config_long_timeouts(proxy.url()).pool_size(2)).unwrap();
    let held = proxy.on_request(contains("lock:one"), Fault::HoldReply);
    let one = spawn_call(&mgr, "one", RedisMgr::try_lock);
    held.wait_fired();
    drop(mgr.try_lock("two").unwrap());
    held.release();
    drop(one.join().unwrap().unwrap());
    mgr
}

fn is_join_request(lock: &'static str) -> impl Fn(&[Vec<u8>]) -> bool + Send + 'static {
    move |words| {
        [lock, "join"].iter().all(|word| words.iter().any(|other| other == word.as_bytes()))
    }
}

fn polls(commands: &Monitor, lock: &str) -> usize {
    let lock = format!("{lock:?}");
    commands.lines().iter().filter(|line| line.contains("\"look\"") && line.contains(&lock)).count()
}

/// Goal: a reply of "no subscriber" is about the subscription at the time of the request, not about
/// the next one. Method: two waiters send requests while the subscription leads to another server.
/// The reply to one of them is held back until the other has opened a new subscription.
///
/// Fault: N54
/// Promise: P4
#[test]
fn stale_reply_about_a_subscription_spares_the_next_one() {
    let (server, elsewhere) = (RedisServer::start(), RedisServer::start());
    // The pooled connections would follow the subscription to another master.
    elsewhere.cli(&["REPLICAOF", "127.0.0.1", "1"]);
    let proxy = FaultProxy::in_front_of(server.addr());
    let mgr = connected_twice(&proxy);
    let other = manager(&server);
    let guards = ["x", "y"].map(|name| other.lock(name).unwrap());
    let joins: [ArmedFault; 2] =
        ["lock:x", "lock:y"].map(|lock| proxy.on_request(is_join_request(lock), Fault::HoldReply));
    proxy.lead_to(elsewhere.addr());
    let waiting = ["x", "y"].map(|name| spawn_call(&mgr, name, RedisMgr::lock));
    joins.iter().for_each(ArmedFault::wait_fired);
    proxy.lead_to(server.addr());
    joins[0].release();
    let is_subscribed = || !server.query::<Vec<String>>(&["PUBSUB", "CHANNELS"]).is_empty();
    eventually("the subscription leads here", TEST_TIMEOUT, is_subscribed);
    let commands = server.monitor();
    joins[1].release();
    eventually("the other waiter relies on its queue entry", TEST_TIMEOUT, || {
        polls(&commands, "lock:y") >= 4
    });
    assert_eq!(server.calls("subscribe"), 1, "the subscription was closed");
    for (guard, waiting) in guards.into_iter().zip(waiting) {
        guard.release().unwrap().unwrap_released();
        drop(waiting.join().unwrap().unwrap());
    }
}

/// Goal: if the server never reports a subscriber, as behind a proxy that sends subscriptions
/// elsewhere, waiters poll, the subscription is retried with growing delays, and one message is
/// logged. Method: replies are changed on their way.
///
/// Fault: N56
/// Promise: P4
#[test]
fn useless_subscription_is_retried_with_growing_delay() {
    if !in_own_process(
        "wait::subscription::useless_subscription_is_retried_with_growing_delay",
        &[],
    ) {
        return;
    }
    let logged = capture_log(log::LevelFilter::Info);
    let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    let without_subscriber = |line: &str| {
        let mut words: Vec<&str> = line.split(' ').collect();
        if let [_, "queued", _, _, _, state, ..] = words.as_mut_slice() {
            *state = if matches!(*state, "1" | "3") { "3" } else { "2" };
        }
        words.join(" ")
    };
    for mode in ["join", "look"] {
        let is_request = move |words: &[Vec<u8>]| words.iter().any(|word| word == mode.as_bytes());
        proxy.on_request(is_request, rewrite(without_subscriber)).forever();
    }
    let guard = manager(&server).lock("x").unwrap();
    let commands = server.monitor();
    let ((waiting, subscribed), span) = timed(|| {
        let waiting = spawn_call(&mgr, "x", RedisMgr::lock);
        eventually("it polls", TEST_TIMEOUT, || tries(&commands) >= 80);
        (waiting, server.calls("subscribe"))
    });
    // Delays begin at 20 ms and double up to 10 s.
    let bound = 10 + span.as_secs() / 10;
    assert!((3..=bound).contains(&subscribed), "{subscribed} times in {span:?}");
    guard.release().unwrap().unwrap_released();
    let next = completes_within(CALL_LIMIT, "the wait", || waiting.join().unwrap().unwrap());
    next.release().unwrap().unwrap_released();
    let lines: Vec<_> =
        logged.lock().iter().filter(|line| line.contains("grants")).cloned().collect();
    assert!(matches!(lines.as_slice(), [line] if line.contains("no subscriber")), "{lines:#?}");
}
