//! Losing a lock: the holder is told once, with the cause, in time, and for good.

use std::time::Duration;

use distlock::{LockError, LockGuard, LockLost, RedisMgr, Released};

use crate::{
    helpers::{
        CALL_LIMIT, SECOND, SHORT_TIMEOUT, UnwrapReleased, await_queued, config_long_timeouts,
        config_medium_timeout, expect_deadline_before_key_expiry, expect_loss, get, in_thread,
        is_renewal, manager, pttl, queued, server_behind_proxy, spawn_queued_waiter, timed,
        with_ttl,
    },
    support::{CEILING, Fault, RedisServer, contains, eventually},
};

const LOCK: &str = "lock:x";
const LEASE: Duration = Duration::from_secs(3);

fn hold(server: &RedisServer) -> (RedisMgr, LockGuard) {
    let mgr = manager(server);
    let guard = mgr.lock_with("x", &with_ttl(LEASE)).unwrap();
    (mgr, guard)
}

#[test]
fn a_lock_that_vanishes_is_gone() {
    let ways: [fn(&RedisServer); 6] = [
        |server| drop(server.cli(&["DEL", LOCK])),
        |server| drop(server.cli(&["RENAME", LOCK, "elsewhere"])),
        |server| drop(server.cli(&["MOVE", LOCK, "1"])),
        |server| drop(server.cli(&["SWAPDB", "0", "1"])),
        |server| drop(server.cli(&["FLUSHALL"])),
        RedisServer::restart_empty,
    ];
    for way in ways {
        let server = RedisServer::start();
        let mgr = manager(&server);
        // The server is back before the lease is over.
        let guard = mgr.lock_with("x", &with_ttl(3 * LEASE)).unwrap();
        way(&server);
        assert_eq!(expect_loss(&guard), LockLost::Gone);
        assert_eq!(get(&server, LOCK), None, "it was made again");
        let next = mgr.lock("x").unwrap();
        assert!(next.fencing_token() > guard.fencing_token());
        drop(guard);
        assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()));
        assert!(next.is_held());
    }
}

#[test]
fn a_lock_that_another_has_is_taken_and_left_to_it() {
    let server = RedisServer::start();
    for finish in [
        |guard| assert!(matches!(LockGuard::release(guard), Ok(Released::OwnedByOther(_)))),
        drop::<LockGuard>,
    ] {
        let (_mgr, guard) = hold(&server);
        server.cli(&["SET", LOCK, "a stranger", "PX", "600000"]);
        let LockLost::Taken { by, .. } = expect_loss(&guard) else { panic!("not taken") };
        assert_eq!(by.id(), "a stranger");
        assert_eq!(guard.ensure_held().unwrap_err().holder().unwrap().id(), "a stranger");
        finish(guard);
        assert_eq!(get(&server, LOCK).as_deref(), Some("a stranger"));
        assert!(pttl(&server, LOCK) > 500_000);
        server.cli(&["DEL", LOCK]);
    }
}

#[test]
fn a_lock_taken_by_another_of_ours_names_it() {
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

#[test]
fn another_type_at_the_key_is_a_loss_and_left_alone() {
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

#[test]
fn a_lock_whose_expiry_was_taken_off_gets_it_back() {
    let server = RedisServer::start();
    let (_mgr, guard) = hold(&server);
    assert!(server.query::<bool>(&["PERSIST", LOCK]));
    eventually("the renewal mends it", CEILING, || pttl(&server, LOCK) > 0);
    assert!(guard.is_held());
}

/// The holder does not renew its lock now, as most of the time; the other one wants it for a moment
/// only.
#[test]
fn who_puts_an_expiry_back_does_not_cut_a_lease_short() {
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

#[test]
fn a_lock_whose_server_is_silent_ends_at_its_deadline() {
    let server = RedisServer::start();
    let mgr =
        RedisMgr::new(config_long_timeouts(server.url()).operation_timeout(SHORT_TIMEOUT)).unwrap();
    let guard = mgr.lock_with("x", &with_ttl(LEASE)).unwrap();
    server.stop();
    assert!(guard.is_held());
    let ((left, why), span) = timed(|| (guard.remaining(), expect_loss(&guard)));
    assert_eq!(why, LockLost::Expired);
    assert!(span >= left, "lost after {span:?} with {left:?} left");
    // One lease and the time of a slow machine, not the minutes that a dead connection can take.
    assert!(span < left + CALL_LIMIT, "{span:?}");
    server.cont();
    assert!(!guard.is_held());
    eventually("nothing of it is left", CEILING, || get(&server, LOCK).is_none());
    assert!(!guard.is_held());
    assert_eq!(lost_name(&guard), "x");
}

/// The renewals are carried out and their replies come after the deadline: they change nothing, and
/// what they have extended is given back instead of being left to expire.
#[test]
fn a_renewal_confirmed_too_late_does_not_bring_the_lock_back() {
    let (server, proxy, mgr) =
        server_behind_proxy(|url| config_long_timeouts(url).operation_timeout(5 * SECOND));
    // Long enough for the last of them to be given back in time.
    let guard = mgr.lock_with("x", &with_ttl(2 * LEASE)).unwrap();
    let commands = server.monitor();
    let held_back = proxy.on_request(is_renewal(LOCK), Fault::HoldReply).forever();
    assert_eq!(expect_loss(&guard), LockLost::Expired);
    assert!(held_back.fired() > 0);
    commands.wait_for("lua] \"PEXPIRE\" \"lock:x\"");
    held_back.disarm();
    held_back.let_go();
    commands.wait_for("lua] \"DEL\" \"lock:x\"");
    assert_eq!(get(&server, LOCK), None);
    assert!(!guard.is_held());
    let next = mgr.try_lock("x").unwrap();
    drop(guard);
    assert!(next.is_held());
    assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()));
}

#[test]
fn a_cut_off_holder_stops_believing_before_the_next_one_begins() {
    let (server, proxy, mgr) =
        server_behind_proxy(|url| config_long_timeouts(url).operation_timeout(SHORT_TIMEOUT));
    let guard = mgr.lock_with("x", &with_ttl(LEASE)).unwrap();
    let other = manager(&server);
    proxy.blackhole();
    let next = other.lock("x").unwrap();
    // The very first look, with no time for any thread to have told.
    assert!(!guard.is_held());
    assert!(next.fencing_token() > guard.fencing_token());
    assert_eq!(expect_loss(&guard), LockLost::Expired);
    proxy.heal();
    drop(guard);
    assert_eq!(get(&server, LOCK).as_deref(), Some(next.id().as_str()));
}

#[test]
fn the_loss_can_be_selected_on() {
    let server = RedisServer::start();
    let (_mgr, guard) = hold(&server);
    let (_sender, jobs) = crossbeam_channel::unbounded::<u32>();
    server.cli(&["DEL", LOCK]);
    crossbeam_channel::select! {
        recv(guard.lost()) -> why => assert_eq!(why, Ok(LockLost::Gone)),
        recv(jobs) -> job => panic!("no jobs were sent: {job:?}"),
        default(CEILING) => panic!("nobody said anything"),
    }
}

#[test]
fn a_release_closes_the_channel_without_a_word() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    for finish in [|guard| LockGuard::release(guard).unwrap().unwrap_released(), drop::<LockGuard>]
    {
        let guard = mgr.lock("x").unwrap();
        let channel = guard.lost().clone();
        assert_eq!(channel.try_recv(), Err(crossbeam_channel::TryRecvError::Empty));
        finish(guard);
        assert_eq!(
            channel.recv_timeout(CEILING),
            Err(crossbeam_channel::RecvTimeoutError::Disconnected)
        );
    }
}

#[test]
fn the_loss_of_one_lock_is_no_other_locks_trouble() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guards: Vec<_> =
        (0..50).map(|n| mgr.lock_with(&format!("n{n}"), &with_ttl(LEASE)).unwrap()).collect();
    server.cli(&["DEL", "lock:n7"]);
    server.cli(&["SET", "lock:n8", "a stranger"]);
    server.cli(&["DEL", "lock:n9"]);
    server.cli(&["RPUSH", "lock:n9", "a list"]);
    assert_eq!(expect_loss(&guards[7]), LockLost::Gone);
    assert!(matches!(expect_loss(&guards[8]), LockLost::Taken { .. }));
    assert_eq!(expect_loss(&guards[9]), LockLost::Gone);
    let commands = server.monitor();
    let renewed =
        || commands.lines().iter().filter(|line| line.contains("lua] \"PEXPIRE\"")).count();
    eventually("the others are renewed", CEILING, || renewed() >= 2 * 47);
    let held = guards.iter().filter(|guard| guard.is_held()).count();
    assert_eq!(held, 47);
}

/// Nobody reads the channels; the renewer must not mind.
#[test]
fn a_loss_that_nobody_listens_to_holds_nobody_up() {
    let server = RedisServer::start();
    let (mgr, guard) = hold(&server);
    let other = mgr.lock_with("y", &with_ttl(LEASE)).unwrap();
    let (_unread, _cloned) = (guard.lost().clone(), guard.lost().clone());
    server.cli(&["DEL", LOCK]);
    eventually("the loss is known", CEILING, || !guard.is_held());
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

/// Goal: a request that is still on its way when the lock is lost takes it for nobody. Method: a
/// look of a waiter is held back, and its connection breaks; the waiter is handed the lock, which
/// somebody deletes. Then the look is carried out.
#[test]
fn a_request_that_is_carried_out_after_the_loss_leaves_nothing() {
    for drop_first in [true, false] {
        let (server, proxy, mgr) = server_behind_proxy(config_medium_timeout);
        let first = manager(&server).lock("x").unwrap();
        let waiting = in_thread(&mgr, "x", |mgr, name| mgr.lock_with(name, &with_ttl(60 * SECOND)));
        await_queued(&server, "x", 1);
        let look = proxy.on_request(contains("look"), Fault::HoldRequest);
        look.wait_fired();
        proxy.reset_all();
        let commands = server.monitor();
        commands.wait_for("\"look\"");
        eventually("it hears again", CEILING, || {
            !server.query::<Vec<String>>(&["PUBSUB", "CHANNELS"]).is_empty()
        });
        first.release().unwrap().unwrap_released();
        let guard = waiting.join().unwrap().unwrap();
        assert!(server.query::<bool>(&["DEL", LOCK]));
        assert_eq!(expect_loss(&guard), LockLost::Gone);
        // Its holder goes now, or is at work still.
        let guard = if drop_first {
            drop(guard);
            None
        } else {
            Some(guard)
        };
        let asked = || commands.lines().iter().filter(|line| line.contains("\"look\"")).count();
        let before = asked();
        look.let_go();
        eventually("it has arrived", CEILING, || asked() > before);
        eventually("nothing is left, long before a lease is over", 20 * SECOND, || {
            get(&server, LOCK).is_none()
        });
        drop(guard);
    }
}

/// The same with a request for a place in line, which arrives when somebody else has the lock.
#[test]
fn a_place_in_line_that_is_taken_after_the_end_is_given_up() {
    for is_lost in [true, false] {
        let (server, proxy, mgr) = server_behind_proxy(config_medium_timeout);
        let other = manager(&server);
        let first = other.lock("x").unwrap();
        let join = proxy.on_request(contains("join"), Fault::HoldRequest);
        let waiting = in_thread(&mgr, "x", |mgr, name| mgr.lock_with(name, &with_ttl(60 * SECOND)));
        join.wait_fired();
        proxy.reset_all();
        let commands = server.monitor();
        // It hears again, and has not looked in vain: the lock is handed over, and soon confirmed.
        commands.wait_for("\"look\"");
        eventually("it hears again", CEILING, || {
            !server.query::<Vec<String>>(&["PUBSUB", "CHANNELS"]).is_empty()
        });
        await_queued(&server, "x", 1);
        first.release().unwrap().unwrap_released();
        let guard = waiting.join().unwrap().unwrap();
        if is_lost {
            assert!(server.query::<bool>(&["DEL", LOCK]));
            assert_eq!(expect_loss(&guard), LockLost::Gone);
        } else {
            guard.release().unwrap().unwrap_released();
        }
        let next = other.lock("x").unwrap();
        join.let_go();
        commands.wait_for("\"join\"");
        eventually("nobody stands in line, long before it expires", 40 * SECOND, || {
            queued(&server, "x") == 0
        });
        assert!(next.is_held());
    }
}
