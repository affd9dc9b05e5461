//! Waiters: their statements at the server, when they begin, give up, die, or create the row.

use std::{
    sync::{Barrier, mpsc},
    thread,
    time::{Duration, Instant},
};

use distlock::{CancelToken, LockError, LockOptions, MySqlConfig, MySqlMgr};

use super::{
    LONG_TTL_MS, await_waits, config, create_table, manager, on_each_server, spawn_locker, waits,
};
use crate::{
    helpers::{CALL_LIMIT, SECOND, UnwrapReleased, completes_within, spawn_call, timed},
    support::{
        Fault, FaultProxy, MySqlServer, TEST_TIMEOUT, contains, eventually,
        mysql::prelude::Queryable,
    },
};

/// Only counts the requests.
const NO_FAULT: Fault = Fault::DelayReply(Duration::ZERO);

/// Fault: N158
#[test]
fn timed_wait_ends_in_time_and_leaves_no_statement() {
    const WAIT: Duration = Duration::from_millis(300);
    on_each_server(|server| {
        let (holder, mgr) = (manager(server), manager(server));
        let guard = holder.lock("x").unwrap();
        for _ in 0..5 {
            let (result, took) = timed(|| mgr.try_lock_for("x", WAIT));
            assert!(waits(server).is_empty());
            match result.unwrap_err() {
                LockError::Timeout { holder: Some(by), .. } => {
                    assert_eq!(by.id(), guard.id().as_str());
                }
                other => panic!("{other:?}"),
            }
            assert!(took >= WAIT && took < CALL_LIMIT, "{took:?}");
        }
        assert!(guard.is_held());
    });
}

/// Fault: N158
#[test]
fn statement_of_an_abandoned_wait_is_ended() {
    on_each_server(|server| {
        let (holder, mgr) = (manager(server), manager(server));
        let guard = holder.lock("x").unwrap();
        let waiting = spawn_call(&mgr, "x", |mgr, name| mgr.lock(name).map(drop));
        await_waits(server, 1);
        mgr.shutdown();
        let error = waiting.join().unwrap().unwrap_err();
        assert!(matches!(error, LockError::Shutdown), "{error:?}");
        await_waits(server, 0);
        guard.release().unwrap().unwrap_released();
        drop(holder.try_lock("x").unwrap());
    });
}

/// Fault: N170
#[test]
fn cancelled_wait_leaves_no_statement() {
    on_each_server(|server| {
        let (holder, mgr) = (manager(server), manager(server));
        let guard = holder.lock("x").unwrap();
        let token = CancelToken::new();
        let options = LockOptions::new().cancel(&token);
        let waiting = spawn_call(&mgr, "x", move |mgr, name| mgr.lock_with(name, &options));
        await_waits(server, 1);
        token.cancel();
        let waiting = completes_within(CALL_LIMIT, "the wait", || waiting.join().unwrap());
        let error = waiting.unwrap_err();
        assert!(error.is_cancelled(), "{error:?}");
        await_waits(server, 0);
        guard.release().unwrap().unwrap_released();
        drop(mgr.try_lock("x").unwrap());
    });
}

/// It looks for the holder over another connection, which does not reply.
///
/// Fault: N242
#[test]
fn look_for_the_holder_costs_no_waiter_its_turn() {
    on_each_server(|server| {
        let holder = manager(server);
        let proxy = FaultProxy::in_front_of_mysql(server.addr());
        let mgr = MySqlMgr::new(config(proxy.url())).unwrap();
        let guard = holder.lock("x").unwrap();
        let look = proxy.on_request(contains("READ UNCOMMITTED"), Fault::HoldRequest);
        let waiting = spawn_call(&mgr, "x", |mgr, name| mgr.lock(name).unwrap());
        look.wait_fired();
        guard.release().unwrap().unwrap_released();
        let next = completes_within(CALL_LIMIT, "the lock", || waiting.join().unwrap());
        next.release().unwrap().unwrap_released();
    });
}

/// Otherwise each hand-over would cost as much as there are waiters, and leave something for each
/// of them at the server.
///
/// Fault: N268
#[test]
fn hand_over_leaves_the_other_waiters_as_they_are() {
    const WAITERS: usize = 12;
    on_each_server(|server| {
        let mgr = manager(server);
        let guard = mgr.lock("x").unwrap();
        let (release, before_last) = mpsc::channel::<()>();
        let mut before_last = Some(before_last);
        thread::scope(|threads| {
            for number in 1..=WAITERS {
                let hold = (number == WAITERS - 1).then(|| before_last.take()).flatten();
                let mgr = &mgr;
                threads.spawn(move || {
                    let guard = mgr.lock("x").unwrap();
                    hold.map(|hold| hold.recv());
                    guard.release().unwrap().unwrap_released();
                });
                await_waits(server, number);
            }
            guard.release().unwrap().unwrap_released();
            await_waits(server, 1);
            let structs = server.execute(
                "SELECT MAX(trx_lock_structs) FROM information_schema.INNODB_TRX \
                 WHERE trx_state='LOCK WAIT'",
            );
            drop(release);
            let structs: usize = structs[0][0].parse().unwrap();
            assert!(structs < WAITERS / 2, "{structs} lock structures of the last waiter");
        });
    });
}

/// The statement of the broken connection would get the lock before the new one.
///
/// Fault: N158
#[test]
fn reconnected_waiter_leaves_no_statement_behind() {
    on_each_server(|server| {
        let holder = manager(server);
        let proxy = FaultProxy::in_front_of_mysql(server.addr());
        let mgr = MySqlMgr::new(config(proxy.url())).unwrap();
        let guard = holder.lock("x").unwrap();
        let waiting = spawn_call(&mgr, "x", |mgr, name| mgr.lock(name).unwrap());
        await_waits(server, 1);
        let (old, _) = waits(server)[0];
        proxy.reset_all();
        eventually(
            "only a new statement waits",
            TEST_TIMEOUT,
            || matches!(*waits(server), [(new, _)] if new != old),
        );
        guard.release().unwrap().unwrap_released();
        let next = completes_within(CALL_LIMIT, "the lock", || waiting.join().unwrap());
        next.release().unwrap().unwrap_released();
    });
}

/// Its statement gets its turn, and is rolled back at once.
///
/// Fault: N158
#[test]
fn killed_waiter_does_not_delay_the_next() {
    on_each_server(|server| {
        let mgr = manager(server);
        let guard = mgr.lock("x").unwrap();
        let mut killed = spawn_locker(server, LONG_TTL_MS);
        killed.send("lock x");
        await_waits(server, 1);
        let waiting = spawn_call(&manager(server), "x", |mgr, name| mgr.lock(name).unwrap());
        await_waits(server, 2);
        killed.kill();
        guard.release().unwrap().unwrap_released();
        let next = completes_within(CALL_LIMIT, "the lock", || waiting.join().unwrap());
        next.release().unwrap().unwrap_released();
    });
}

/// However often, because each time its wait had lasted for a while.
///
/// Fault: N158
#[test]
#[expect(clippy::disallowed_methods, reason = "the test measures with a clock of its own")]
fn waiter_whose_statement_is_killed_waits_again() {
    on_each_server(|server| {
        let mgr = manager(server);
        let guard = mgr.lock("x").unwrap();
        let waiting = spawn_call(&manager(server), "x", |mgr, name| mgr.lock(name).unwrap());
        await_waits(server, 1);
        let all_waits = || server.execute("SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_waits'");
        for _ in 0..8 {
            let before = all_waits();
            // A wait that ends at once counts as a failure.
            let waiting_since = Instant::now();
            eventually("it has waited", TEST_TIMEOUT, || waiting_since.elapsed() > SECOND / 20);
            server.execute(&format!("KILL QUERY {}", waits(server)[0].0));
            eventually("a new wait begins", TEST_TIMEOUT, || all_waits() != before);
            await_waits(server, 1);
        }
        guard.release().unwrap().unwrap_released();
        let next = completes_within(CALL_LIMIT, "the lock", || waiting.join().unwrap());
        next.release().unwrap().unwrap_released();
    });
}

/// The server ends transactions that have locked the same gap. Callers do not notice.
///
/// Fault: N159
#[test]
fn names_that_nobody_has_used_are_created_without_deadlocks() {
    const CLIENTS: usize = 16;
    on_each_server(|server| {
        let managers = [manager(server), manager(server)];
        let together = Barrier::new(CLIENTS);
        thread::scope(|threads| {
            for client in 0..CLIENTS {
                let (mgr, together) = (&managers[client % 2], &together);
                threads.spawn(move || {
                    for round in 0..15 {
                        together.wait();
                        let guard = mgr.lock(&format!("new{round}")).unwrap();
                        guard.release().unwrap().unwrap_released();
                    }
                });
            }
        });
        assert_eq!(managers.iter().map(|mgr| mgr.metrics().failed()).sum::<u64>(), 0);
    });
}

/// Looking for a name that does not exist must not keep others from creating theirs.
///
/// Fault: N159
#[test]
fn absent_name_does_not_block_the_creation_of_others() {
    on_each_server(|server| {
        let proxy = FaultProxy::in_front_of_mysql(server.addr());
        let mgr = MySqlMgr::new(config(proxy.url())).unwrap();
        let held = proxy.on_request(contains("INSERT IGNORE"), Fault::HoldRequest);
        // It has found no row, and its transaction is open.
        let waiting = spawn_call(&mgr, "m", |mgr, name| mgr.lock(name).unwrap());
        held.wait_fired();
        let others_proxy = FaultProxy::in_front_of_mysql(server.addr());
        let insertions = others_proxy.on_request(contains("INSERT IGNORE"), NO_FAULT).forever();
        let others = MySqlMgr::new(config(others_proxy.url())).unwrap();
        for name in ["a", "z"] {
            // An insertion that is blocked fails after a second, and is repeated.
            let expected = insertions.fired() + 1;
            let result = others.try_lock_for(name, CALL_LIMIT).map(drop);
            assert!(
                result.is_ok() && insertions.fired() == expected,
                "m blocked the creation of another name, {name}: {result:?}"
            );
        }
        held.release();
        waiting.join().unwrap().release().unwrap().unwrap_released();
    });
}

/// An insertion would wait for the holder.
///
/// Fault: N159
#[test]
fn row_that_exists_is_not_inserted_again() {
    on_each_server(|server| {
        let holder = manager(server);
        let guard = holder.lock("x").unwrap();
        let proxy = FaultProxy::in_front_of_mysql(server.addr());
        let insertions = proxy.on_request(contains("INSERT IGNORE"), NO_FAULT).forever();
        let mgr = MySqlMgr::new(config(proxy.url())).unwrap();
        let error = mgr.try_lock("x").unwrap_err();
        assert!(matches!(error, LockError::Held { .. }), "{error:?}");
        guard.release().unwrap().unwrap_released();
        mgr.try_lock_for("x", CALL_LIMIT).unwrap().release().unwrap().unwrap_released();
        assert_eq!(insertions.fired(), 0, "insertions of a row that exists");
        // The proxy does see them.
        drop(mgr.try_lock_for("new", CALL_LIMIT).unwrap());
        assert_eq!(insertions.fired(), 1);
    });
}

/// The client finds no row. Before it creates one, another client does so and holds the lock.
///
/// Fault: N159
#[test]
fn client_that_loses_the_creation_of_the_row_keeps_its_place() {
    let server = MySqlServer::start();
    create_table(&server);
    let holder = manager(&server);
    let proxy = FaultProxy::in_front_of_mysql(server.addr());
    let mgr = MySqlMgr::new(config(proxy.url())).unwrap();
    let held = proxy.on_request(contains("INSERT IGNORE"), Fault::HoldRequest);
    let waiting = spawn_call(&mgr, "x", |mgr, name| mgr.lock(name).unwrap());
    held.wait_fired();
    let guard = holder.lock("x").unwrap();
    held.release();
    // Its statement waits for longer than the creation may take.
    eventually(
        "it waits for longer than a creation",
        TEST_TIMEOUT,
        || matches!(*waits(&server), [(_, seconds)] if seconds >= 3),
    );
    guard.release().unwrap().unwrap_released();
    drop(completes_within(CALL_LIMIT, "the lock", || waiting.join().unwrap()));
}

/// The insertion of the row waits for the other client's transaction until the server refuses it.
/// The settings are the defaults, because the timeout must be longer than that.
///
/// Fault: N159
#[test]
fn client_that_loses_the_creation_of_the_row_finds_it_held() {
    on_each_server(|server| {
        let holder = manager(server);
        let proxy = FaultProxy::in_front_of_mysql(server.addr());
        let mgr = MySqlMgr::new(MySqlConfig::new(proxy.url())).unwrap();
        let mut number = 0;
        // A slow machine can use up the time of a call.
        eventually("a call finds the lock held", TEST_TIMEOUT, || {
            number += 1;
            let name = format!("x{number}");
            let held = proxy.on_request(contains("INSERT IGNORE"), Fault::HoldRequest);
            let call = spawn_call(&mgr, &name, |mgr, name| mgr.try_lock(name).map(drop));
            held.wait_fired();
            let guard = holder.lock(&name).unwrap();
            held.release();
            let error = call.join().unwrap().unwrap_err();
            drop(guard);
            match error {
                LockError::Held { .. } => true,
                LockError::Unavailable { .. } => false,
                other => panic!("{other:?}"),
            }
        });
    });
}

/// As while a holder commits its release: the row is locked, and has no holder. A repeat that came
/// at once would find the same.
#[test]
fn try_lock_waits_a_moment_for_a_holder_that_commits() {
    const PAUSES: Duration = Duration::from_millis(1 + 2 + 3 + 4 + 5);
    on_each_server(|server| {
        let mgr = manager(server);
        mgr.lock("x").unwrap().release().unwrap().unwrap_released();
        let mut other = server.connect();
        other.query_drop("BEGIN; SELECT * FROM distlock FOR UPDATE").unwrap();
        let (result, took) = timed(|| mgr.try_lock("x").map(drop));
        let error = result.unwrap_err();
        assert!(matches!(error, LockError::Timeout { holder: None, .. }), "{error:?}");
        assert!(took >= PAUSES, "repeated without pauses, within {took:?}");
        other.query_drop("ROLLBACK").unwrap();
        drop(mgr.try_lock("x").unwrap());
    });
}

/// Its first request is long past when it gets the lock.
///
/// Fault: N158
/// Promise: P4
#[test]
fn waiter_whose_ttl_has_passed_meanwhile_gets_a_whole_lease() {
    const TTL: Duration = Duration::from_secs(4);
    on_each_server(|server| {
        let holder = manager(server);
        let guard = holder.lock("x").unwrap();
        let mgr = MySqlMgr::new(config(server.url()).ttl(TTL)).unwrap();
        let first = spawn_call(&mgr, "x", |mgr, name| mgr.lock(name).unwrap());
        await_waits(server, 1);
        eventually(
            "it waits for longer than the ttl",
            TEST_TIMEOUT,
            || matches!(*waits(server), [(_, seconds)] if seconds > TTL.as_secs()),
        );
        // It has just begun to wait, so only the first can be too late.
        let second = spawn_call(&holder, "x", |mgr, name| mgr.lock(name).unwrap());
        await_waits(server, 2);
        guard.release().unwrap().unwrap_released();
        eventually("the first has the lock", TEST_TIMEOUT, || first.is_finished());
        assert!(!second.is_finished());
        first.join().unwrap().release().unwrap().unwrap_released();
        second.join().unwrap().release().unwrap().unwrap_released();
    });
}

/// The server has ended its connection by then, and another waiter has the lock.
///
/// Fault: N158
/// Promise: P1, P2
#[test]
fn grant_that_arrives_after_the_ttl_is_not_a_lock() {
    const TTL: Duration = Duration::from_secs(2);
    on_each_server(|server| {
        let holder = manager(server);
        let guard = holder.lock("x").unwrap();
        let proxy = FaultProxy::in_front_of_mysql(server.addr());
        let mgr = MySqlMgr::new(config(proxy.url()).ttl(TTL)).unwrap();
        let grant = proxy.on_request(contains("distlock wait"), Fault::HoldReply);
        let first = spawn_call(&mgr, "x", |mgr, name| mgr.lock(name).unwrap());
        await_waits(server, 1);
        let second = spawn_call(&holder, "x", |mgr, name| mgr.lock(name).unwrap());
        await_waits(server, 2);
        guard.release().unwrap().unwrap_released();
        let second = completes_within(CALL_LIMIT, "the lock", || second.join().unwrap());
        grant.release();
        eventually("the first waits again", TEST_TIMEOUT, || {
            assert!(!first.is_finished(), "both have the lock");
            waits(server).len() == 1
        });
        second.release().unwrap().unwrap_released();
        first.join().unwrap().release().unwrap().unwrap_released();
    });
}
