//! Losing a lock: the loss is reported once, with its reason, by the deadline, and is final.

use std::{thread, time::Duration};

use distlock::{LockError, LockGuard, LockLost, RedisMgr, Released};

use crate::{
    helpers::{
        CALL_LIMIT, SECOND, SHORT_TIMEOUT, UnwrapReleased, await_queue_length,
        config_long_timeouts, config_medium_timeout, expect_deadline_before_key_expiry,
        expect_loss, get, is_renewal, manager, pttl, queue_length, server_behind_proxy, spawn_call,
        spawn_queued_waiter, timed, with_ttl,
    },
    support::{Fault, RedisServer, TEST_TIMEOUT, contains, eventually},
};

const LOCK: &str = "lock:x";
const TTL: Duration = Duration::from_secs(3);

fn hold(server: &RedisServer) -> (RedisMgr, LockGuard) {
    let mgr = manager(server);
    let guard = mgr.lock_with("x", &with_ttl(TTL)).unwrap();
    (mgr, guard)
}

/// Fault: F25, F30, F75
/// Promise: P7
#[test]
fn removed_lock_is_lost_as_gone() {
    let removals: [fn(&RedisServer); 6] = [
        |server| drop(server.cli(&["DEL", LOCK])),
        |server| drop(server.cli(&["RENAME", LOCK, "elsewhere"])),
        |server| drop(server.cli(&["MOVE", LOCK, "1"])),
        |server| drop(server.cli(&["SWAPDB", "0", "1"])),
        |server| drop(server.cli(&["FLUSHALL"])),
        RedisServer::restart_empty,
    ];
    thread::scope(|threads| {
        for remove in removals {
            threads.spawn(move || {
                let server = RedisServer::start();
                let mgr = manager(&server);
                // The ttl is longer than the restart of a server takes.
                let guard = mgr.lock_with("x", &with_ttl(3 * TTL)).unwrap();
                remove(&server);
                assert_eq!(expect_loss(&guard), LockLost::Gone);
                assert_eq!(get(&server, LOCK), None, "the renewal set the key again");
                let next = mgr.lock("x").unwrap();
                assert!(next.fencing_token() > guard.fencing_token());
                drop(guard);
                assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()));
                assert!(next.is_held());
            });
        }
    });
}

/// Fault: F25
#[test]
fn lock_of_another_client_is_lost_as_taken_and_kept() {
    let server = RedisServer::start();
    for finish in [
        |guard| assert!(matches!(LockGuard::release(guard), Ok(Released::OwnedByOther(_)))),
        drop::<LockGuard>,
    ] {
        let (_mgr, guard) = hold(&server);
        server.cli(&["SET", LOCK, "another client", "PX", "600000"]);
        let LockLost::Taken { by, .. } = expect_loss(&guard) else { panic!("not taken") };
        assert_eq!(by.id(), "another client");
        assert_eq!(guard.ensure_held().unwrap_err().holder().unwrap().id(), "another client");
        finish(guard);
        assert_eq!(get(&server, LOCK).as_deref(), Some("another client"));
        assert!(pttl(&server, LOCK) > 500_000);
        server.cli(&["DEL", LOCK]);
    }
}

#[test]
fn loss_to_another_manager_names_its_holder() {
    let server = RedisServer::start();
    let (_mgr, guard) = hold(&server);
    let operator = manager(&server);
    let waiting = spawn_queued_waiter(&server, &operator, "x");
    assert!(operator.force_release("x").unwrap());
    let next = waiting.join().unwrap().unwrap();
    let LockLost::Taken { by, .. } = expect_loss(&guard) else { panic!("not taken") };
    assert_eq!(by.id(), next.id().as_str());
    assert_eq!(by.pid(), Some(std::process::id()));
    drop(guard);
    assert!(next.is_held());
    next.release().unwrap().unwrap_released();
}

/// Fault: N11
#[test]
fn key_of_another_type_is_a_loss_and_left_alone() {
    let server = RedisServer::start();
    for finish in [
        |guard| assert!(matches!(LockGuard::release(guard), Ok(Released::Gone))),
        drop::<LockGuard>,
    ] {
        let (_mgr, guard) = hold(&server);
        server.cli(&["DEL", LOCK]);
        server.cli(&["RPUSH", LOCK, "precious"]);
        assert_eq!(expect_loss(&guard), LockLost::Gone);
        finish(guard);
        assert_eq!(server.query::<Vec<String>>(&["LRANGE", LOCK, "0", "-1"]), ["precious"]);
        assert_eq!(pttl(&server, LOCK), -1);
        server.cli(&["DEL", LOCK]);
    }
}

/// Fault: F73
#[test]
fn removed_key_expiry_is_restored_by_renewal() {
    let server = RedisServer::start();
    let (_mgr, guard) = hold(&server);
    assert!(server.query::<bool>(&["PERSIST", LOCK]));
    eventually("the renewal restores the expiry", TEST_TIMEOUT, || pttl(&server, LOCK) > 0);
    assert!(guard.is_held());
}

/// A contender restores the expiry of a key that has none. Its own ttl is much shorter than the
/// remaining lease, which must not be shortened by that.
///
/// Fault: N98
/// Promise: P2
#[test]
fn contender_that_restores_expiry_does_not_shorten_lease() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock_with("x", &with_ttl(30 * SECOND).renew(false)).unwrap();
    assert!(server.query::<bool>(&["PERSIST", LOCK]));
    let brief = with_ttl(Duration::from_millis(50)).wait(Duration::ZERO);
    let error = manager(&server).lock_with("x", &brief).unwrap_err();
    assert!(error.is_contended(), "{error:?}");
    expect_deadline_before_key_expiry(&server, &guard);
    assert!(guard.is_held());
}

/// Promise: P7, P2
#[test]
fn unresponsive_server_ends_the_lock_at_its_deadline() {
    let server = RedisServer::start();
    let mgr =
        RedisMgr::new(config_long_timeouts(server.url()).operation_timeout(SHORT_TIMEOUT)).unwrap();
    let guard = mgr.lock_with("x", &with_ttl(TTL)).unwrap();
    server.stop();
    assert!(guard.is_held());
    let ((left, why), took) = timed(|| (guard.remaining(), expect_loss(&guard)));
    assert_eq!(why, LockLost::Expired);
    assert!(took >= left, "lost after {took:?} with {left:?} left");
    // The limit allows for a slow machine. A dead connection could take minutes.
    assert!(took < left + CALL_LIMIT, "{took:?}");
    server.cont();
    assert!(!guard.is_held());
    eventually("the key expires", TEST_TIMEOUT, || get(&server, LOCK).is_none());
    assert!(!guard.is_held());
    assert_eq!(lost_name(&guard), "x");
}

/// The server executes renewals, but their replies come after the deadline. They must not revive
/// the lease, and the key that they extended is cleaned up before it expires.
///
/// Fault: F23
#[test]
fn renewal_confirmed_after_deadline_does_not_revive_lock() {
    let (server, proxy, mgr) =
        server_behind_proxy(|url| config_long_timeouts(url).operation_timeout(5 * SECOND));
    // Long enough for a clean-up before the key expires.
    let guard = mgr.lock_with("x", &with_ttl(2 * TTL)).unwrap();
    let commands = server.monitor();
    let held_back = proxy.on_request(is_renewal(LOCK), Fault::HoldReply).forever();
    assert_eq!(expect_loss(&guard), LockLost::Expired);
    assert!(held_back.fired() > 0);
    commands.wait_for("lua] \"PEXPIRE\" \"lock:x\"");
    held_back.disarm();
    held_back.release();
    commands.wait_for("lua] \"DEL\" \"lock:x\"");
    assert_eq!(get(&server, LOCK), None);
    assert!(!guard.is_held());
    let next = mgr.try_lock("x").unwrap();
    drop(guard);
    assert!(next.is_held());
    assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()));
}

/// Fault: F59
/// Promise: P1, P2
#[test]
fn disconnected_holder_expires_before_the_next_one_begins() {
    let (server, proxy, mgr) =
        server_behind_proxy(|url| config_long_timeouts(url).operation_timeout(SHORT_TIMEOUT));
    let guard = mgr.lock_with("x", &with_ttl(TTL)).unwrap();
    let other = manager(&server);
    proxy.blackhole();
    let next = other.lock("x").unwrap();
    // The first call must already return false, even before any thread has reported the loss.
    assert!(!guard.is_held());
    assert!(next.fencing_token() > guard.fencing_token());
    assert_eq!(expect_loss(&guard), LockLost::Expired);
    proxy.heal();
    drop(guard);
    assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()));
}

#[test]
fn loss_channel_works_with_select() {
    let server = RedisServer::start();
    let (_mgr, guard) = hold(&server);
    let (_sender, jobs) = crossbeam_channel::unbounded::<u32>();
    server.cli(&["DEL", LOCK]);
    crossbeam_channel::select! {
        recv(guard.lost()) -> why => assert_eq!(why, Ok(LockLost::Gone)),
        recv(jobs) -> job => panic!("no jobs were sent: {job:?}"),
        default(TEST_TIMEOUT) => panic!("no loss was reported"),
    }
}

/// Fault: F93
#[test]
fn release_closes_the_loss_channel_without_a_message() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    for finish in [|guard| LockGuard::release(guard).unwrap().unwrap_released(), drop::<LockGuard>]
    {
        let guard = mgr.lock("x").unwrap();
        let channel = guard.lost().clone();
        assert_eq!(channel.try_recv(), Err(crossbeam_channel::TryRecvError::Empty));
        finish(guard);
        assert_eq!(
            channel.recv_timeout(TEST_TIMEOUT),
            Err(crossbeam_channel::RecvTimeoutError::Disconnected)
        );
    }
}

/// Fault: F13
#[test]
fn loss_of_one_lock_does_not_affect_the_others() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guards: Vec<_> =
        (0..50).map(|n| mgr.lock_with(&format!("n{n}"), &with_ttl(TTL)).unwrap()).collect();
    server.cli(&["DEL", "lock:n7"]);
    server.cli(&["SET", "lock:n8", "another client"]);
    server.cli(&["DEL", "lock:n9"]);
    server.cli(&["RPUSH", "lock:n9", "a list"]);
    assert_eq!(expect_loss(&guards[7]), LockLost::Gone);
    assert!(matches!(expect_loss(&guards[8]), LockLost::Taken { .. }));
    assert_eq!(expect_loss(&guards[9]), LockLost::Gone);
    let commands = server.monitor();
    let renewed =
        || commands.lines().iter().filter(|line| line.contains("lua] \"PEXPIRE\"")).count();
    eventually("the other locks are renewed", TEST_TIMEOUT, || renewed() >= 2 * 47);
    let held = guards.iter().filter(|guard| guard.is_held()).count();
    assert_eq!(held, 47);
}

/// Fault: F93
#[test]
fn unread_loss_channel_does_not_block_the_renewer() {
    let server = RedisServer::start();
    let (mgr, guard) = hold(&server);
    let other = mgr.lock_with("y", &with_ttl(TTL)).unwrap();
    let (_unread, _cloned) = (guard.lost().clone(), guard.lost().clone());
    server.cli(&["DEL", LOCK]);
    eventually("the lock is lost", TEST_TIMEOUT, || !guard.is_held());
    let commands = server.monitor();
    commands.wait_for("lua] \"PEXPIRE\" \"lock:y\"");
    assert!(other.is_held());
}

fn lost_name(guard: &LockGuard) -> String {
    match guard.ensure_held() {
        Err(LockError::Lost { name, .. }) => name,
        other => panic!("{other:?}"),
    }
}

/// Goal: an acquire request that the server executes after the loss does not leave the lock held.
/// Method: a poll of a waiter is held back and its connection is reset. The waiter then gets the
/// lock by a hand-over, and the key is deleted. Only then does the server execute the poll.
///
/// Fault: N57
#[test]
fn acquire_executed_after_the_loss_leaves_nothing() {
    for drop_first in [true, false] {
        let (server, proxy, mgr) = server_behind_proxy(config_medium_timeout);
        let first = manager(&server).lock("x").unwrap();
        let waiting =
            spawn_call(&mgr, "x", |mgr, name| mgr.lock_with(name, &with_ttl(60 * SECOND)));
        await_queue_length(&server, "x", 1);
        let poll = proxy.on_request(contains("look"), Fault::HoldRequest);
        poll.wait_fired();
        proxy.reset_all();
        let commands = server.monitor();
        commands.wait_for("\"look\"");
        eventually("the waiter is subscribed again", TEST_TIMEOUT, || {
            !server.query::<Vec<String>>(&["PUBSUB", "CHANNELS"]).is_empty()
        });
        first.release().unwrap().unwrap_released();
        let guard = waiting.join().unwrap().unwrap();
        assert!(server.query::<bool>(&["DEL", LOCK]));
        assert_eq!(expect_loss(&guard), LockLost::Gone);
        // The holder may have dropped its guard by then or not.
        let guard = if drop_first {
            drop(guard);
            None
        } else {
            Some(guard)
        };
        let polls = || commands.lines().iter().filter(|line| line.contains("\"look\"")).count();
        let before = polls();
        poll.release();
        eventually("the server executes the poll", TEST_TIMEOUT, || polls() > before);
        eventually("the key is removed, long before the ttl of 60 s ends", 20 * SECOND, || {
            get(&server, LOCK).is_none()
        });
        drop(guard);
    }
}

/// The same with a request that enters the queue, which the server executes while another client
/// holds the lock.
///
/// Fault: N57
#[test]
fn queue_entry_created_after_the_end_is_removed() {
    for is_lost in [true, false] {
        let (server, proxy, mgr) = server_behind_proxy(config_medium_timeout);
        let other = manager(&server);
        let first = other.lock("x").unwrap();
        let join = proxy.on_request(contains("join"), Fault::HoldRequest);
        let waiting =
            spawn_call(&mgr, "x", |mgr, name| mgr.lock_with(name, &with_ttl(60 * SECOND)));
        join.wait_fired();
        proxy.reset_all();
        let commands = server.monitor();
        // The waiter polls and subscribes again, so the lock is handed over to it and confirmed.
        commands.wait_for("\"look\"");
        eventually("the waiter is subscribed again", TEST_TIMEOUT, || {
            !server.query::<Vec<String>>(&["PUBSUB", "CHANNELS"]).is_empty()
        });
        await_queue_length(&server, "x", 1);
        first.release().unwrap().unwrap_released();
        let guard = waiting.join().unwrap().unwrap();
        if is_lost {
            assert!(server.query::<bool>(&["DEL", LOCK]));
            assert_eq!(expect_loss(&guard), LockLost::Gone);
        } else {
            guard.release().unwrap().unwrap_released();
        }
        let next = other.lock("x").unwrap();
        join.release();
        commands.wait_for("\"join\"");
        eventually("the queue is empty, long before it expires", 40 * SECOND, || {
            queue_length(&server, "x") == 0
        });
        assert!(next.is_held());
    }
}

/// What the manager is waiting for at a server that does not reply, much longer than the lease.
#[derive(Clone, Copy, Debug)]
enum Pending {
    /// The clean-up of another lock.
    CleanUp,
    /// A release for a thread that found the pool exhausted.
    Release,
}

/// Promise: P7
#[test]
fn loss_is_reported_in_time_while_other_replies_are_pending() {
    let timeout = 60 * SECOND;
    for pending in [Pending::CleanUp, Pending::Release] {
        let server = RedisServer::start();
        let mgr = RedisMgr::new(
            config_long_timeouts(server.url()).operation_timeout(timeout).pool_size(1),
        )
        .unwrap();
        // The renewer now has a connection, on which the reply will be pending.
        let renewed = mgr.lock_with("renewed", &with_ttl(SECOND)).unwrap();
        let renewals = || server.calls("pexpire");
        eventually("it is renewed", TEST_TIMEOUT, || renewals() > 0);
        drop(renewed);
        let released = mgr.lock("released").unwrap();
        let _short = mgr.lock_with("short", &with_ttl(SECOND).renew(false)).unwrap();
        let guard = mgr.lock_with("x", &with_ttl(2 * SECOND)).unwrap();
        let borrowed = matches!(pending, Pending::Release).then(|| mgr.connection().unwrap());
        server.stop();
        let releasing =
            thread::spawn(move || matches!(pending, Pending::CleanUp).then_some(released));
        let channel = guard.lost().clone();
        let ((left, why), span) = timed(|| (guard.remaining(), channel.recv_timeout(TEST_TIMEOUT)));
        assert!(!guard.is_held());
        server.cont();
        drop((borrowed, releasing.join()));
        assert_eq!(why, Ok(LockLost::Expired), "{pending:?}");
        assert!(span >= left, "{pending:?}: reported after {span:?} of which {left:?} were left");
        assert!(
            span < left + CALL_LIMIT,
            "{pending:?}: reported after {span:?} of which {left:?} were left"
        );
    }
}

/// The server keeps a lock until the clean-up after its loss. A release that comes before it
/// removes the lock, but does not release a held one.
///
/// Fault: N239
#[test]
fn release_of_a_lost_lock_does_not_count() {
    let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    let options = with_ttl(600 * SECOND).max_hold(SECOND / 5);
    let guard = mgr.lock_with("x", &options).unwrap();
    let clean_up = proxy.on_request(contains(guard.id().as_str()), Fault::HoldRequest);
    assert_eq!(expect_loss(&guard), LockLost::MaxHold);
    eventually("the clean-up is sent", TEST_TIMEOUT, || clean_up.fired() > 0);
    assert!(get(&server, LOCK).is_some());
    assert_eq!(guard.release().unwrap(), Released::Gone);
    assert_eq!(get(&server, LOCK), None);
}
