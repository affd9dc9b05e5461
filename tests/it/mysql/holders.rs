//! Holders: processes that die or are paused, connections that are ended, and long holds.

use std::{thread, time::Duration};

use distlock::{LockError, LockGuard, LockLost, LockOptions, MySqlConfig, MySqlMgr, Released};

use super::{
    LONG_TTL_MS, await_end_of, await_free, await_waits, config, create_table, is_mariadb,
    kill_holder, lock, manager, on_each_server, spawn_locker,
};
use crate::{
    helpers::{CALL_LIMIT, SECOND, UnwrapReleased, completes_within, expect_loss, spawn_call},
    support::{
        Fault, FaultProxy, MySqlServer, MySqlServerBuilder, TEST_TIMEOUT, Worker, contains,
        eventually, mysql::prelude::Queryable,
    },
};

/// The limits that MariaDB has for transactions without a request.
const IDLE_LIMITS: [&str; 3] = [
    "--idle-transaction-timeout",
    "--idle-write-transaction-timeout",
    "--idle-readonly-transaction-timeout",
];

/// A MariaDB that limits the time of transactions without a request.
fn server_with_idle_limits(seconds: u32) -> MySqlServer {
    let builder = MySqlServer::builder();
    let with_limit = |builder: MySqlServerBuilder, limit| builder.arg(format!("{limit}={seconds}"));
    let server = IDLE_LIMITS.into_iter().fold(builder, with_limit).start();
    create_table(&server);
    server
}

/// Fault: N157
/// Promise: P5
#[test]
fn lock_of_a_killed_process_is_free_at_once() {
    on_each_server(|server| {
        let mgr = manager(server);
        let mut holder = spawn_locker(server, LONG_TTL_MS);
        let token = lock(&mut holder, "x");
        let waiting = spawn_call(&mgr, "x", |mgr, name| mgr.lock(name).unwrap());
        await_waits(server, 1);
        holder.kill();
        let next = completes_within(CALL_LIMIT, "the lock", || waiting.join().unwrap());
        assert!(next.fencing_token().as_u64() > token);
    });
}

/// Fault: N157
/// Promise: P2, P5
#[test]
fn stopped_process_knows_that_its_lock_is_lost() {
    on_each_server(|server| {
        let mgr = manager(server);
        let mut holder = spawn_locker(server, "3000");
        let token = lock(&mut holder, "x");
        holder.stop();
        let next = mgr.lock("x").unwrap();
        assert!(next.fencing_token().as_u64() > token);
        // It reads this line first.
        holder.send("held x");
        holder.cont();
        holder.expect("held x false");
        holder.send("lost x");
        let why = holder.expect("lost x");
        let reasons = ["Expired", "ConnectionLost", "Taken"];
        assert!(reasons.iter().any(|reason| why.contains(reason)), "{why}");
        holder.send("release x");
        holder.expect("released x OwnedByOther");
        assert!(next.is_held());
        next.release().unwrap().unwrap_released();
    });
}

/// Only the end of the connection can show the loss, because the next renewal is due in 200 s.
///
/// Fault: N157
/// Promise: P7
#[test]
fn end_of_the_connection_is_noticed_without_a_renewal() {
    on_each_server(|server| {
        let mgr = manager(server);
        let (guard, other) = (mgr.lock("x").unwrap(), mgr.lock("y").unwrap());
        kill_holder(server, "x");
        assert_eq!(expect_loss(&guard), LockLost::ConnectionLost);
        assert_eq!(guard.release().unwrap(), Released::Gone);
        assert!(other.is_held());
        other.release().unwrap().unwrap_released();
        assert!(mgr.lock("x").unwrap().is_held());
    });
}

/// The statements that look for a holder get no reply.
///
/// Fault: N229
/// Promise: P7
#[test]
fn lost_lock_is_reported_without_a_look_for_the_next_holder() {
    on_each_server(|server| {
        let proxy = FaultProxy::in_front_of_mysql(server.addr());
        let mgr = MySqlMgr::new(config(proxy.url())).unwrap();
        let guard = mgr.lock("x").unwrap();
        proxy.on_request(contains("READ UNCOMMITTED"), Fault::SwallowRequest).forever();
        kill_holder(server, "x");
        let why = completes_within(CALL_LIMIT, "the notice", || expect_loss(&guard));
        assert_eq!(why, LockLost::ConnectionLost);
    });
}

/// Fault: N157
#[test]
fn force_release_succeeds_if_the_holder_ends_meanwhile() {
    on_each_server(|server| {
        let proxy = FaultProxy::in_front_of_mysql(server.addr());
        let (mgr, operator) = (manager(server), MySqlMgr::new(config(proxy.url())).unwrap());
        for by_id in [false, true] {
            let guard = mgr.lock("x").unwrap();
            let id = guard.id().to_string();
            let kill = proxy.on_request(contains("KILL "), Fault::HoldRequest);
            let forced = spawn_call(&operator, "x", move |operator, name| {
                if by_id {
                    operator.force_release_if(name, &id).unwrap() == Released::Released
                } else {
                    operator.force_release(name).unwrap()
                }
            });
            kill.wait_fired();
            await_end_of(server, &kill_holder(server, "x"));
            kill.release();
            assert!(forced.join().unwrap());
            assert_eq!(expect_loss(&guard), LockLost::ConnectionLost);
        }
    });
}

/// A transaction that is rolled back takes its token with it.
///
/// Fault: N157
/// Promise: P3
#[test]
fn tokens_rise_although_transactions_are_rolled_back() {
    on_each_server(|server| {
        let (here, there) = (manager(server), manager(server));
        let mut last = 0;
        for round in 0..12 {
            let mgr = if round % 2 == 0 { &here } else { &there };
            let guard = await_free(mgr, "x");
            let token = guard.fencing_token().as_u64();
            assert!(token > last, "the token does not rise in round {round}: {token} after {last}");
            last = token;
            if round % 3 != 0 {
                kill_holder(server, "x");
                expect_loss(&guard);
            }
        }
    });
}

/// Two waiters can begin in another order than they are served in. If the first of them is lost,
/// its transaction is rolled back, and only the time keeps the token of the second one larger.
///
/// Fault: N157
/// Promise: P3
#[test]
fn token_has_the_time_after_the_wait() {
    on_each_server(|server| {
        let (here, there) = (manager(server), manager(server));
        let held = here.lock("x").unwrap();
        let waiting = spawn_call(&there, "x", |mgr, name| mgr.lock(name).unwrap());
        await_waits(server, 1);
        let now = "SELECT CAST(UNIX_TIMESTAMP(NOW(6))*1000000 AS UNSIGNED)";
        let released_at: u64 = server.connect().query_first(now).unwrap().unwrap();
        held.release().unwrap().unwrap_released();
        assert!(waiting.join().unwrap().fencing_token().as_u64() > released_at);
    });
}

/// Another transaction shows that the server ends those that are idle. The user has no privileges
/// outside of its database.
///
/// Fault: N198
/// Promise: P8
#[test]
fn server_that_ends_idle_transactions_ends_no_lock() {
    let server = server_with_idle_limits(1);
    let mgr = MySqlMgr::new(config(server.create_user("app", "secret"))).unwrap();
    let guard = mgr.lock("x").unwrap();
    let mut idle = server.connect();
    idle.query_drop("BEGIN; INSERT INTO distlock (name) VALUES ('y')").unwrap();
    await_end_of(&server, &idle.connection_id().to_string());
    assert!(guard.is_held());
    guard.release().unwrap().unwrap_released();
}

/// Fault: N198
/// Promise: P5
#[test]
fn server_that_keeps_idle_transactions_ends_a_lock_in_time() {
    let server = server_with_idle_limits(600);
    let proxy = FaultProxy::in_front_of_mysql(server.addr());
    let cut_off = MySqlMgr::new(config(proxy.url()).ttl(3 * SECOND)).unwrap();
    let guard = cut_off.lock("x").unwrap();
    proxy.blackhole();
    drop(await_free(&manager(&server), "x"));
    assert_eq!(expect_loss(&guard), LockLost::Expired);
}

/// Promise: P8
#[test]
fn many_locks_of_one_manager_are_renewed() {
    const LOCKS: u64 = 60;
    on_each_server(|server| {
        let config = config(server.url()).ttl(9 * SECOND).max_connections(64);
        let mgr = MySqlMgr::new(config).unwrap();
        let guards: Vec<_> =
            (0..LOCKS).map(|number| mgr.lock(&format!("x{number}")).unwrap()).collect();
        // They are renewed every three seconds.
        let renewed = mgr.metrics().renewals() + 4 * LOCKS;
        eventually("all are renewed", TEST_TIMEOUT, || mgr.metrics().renewals() >= renewed);
        for guard in guards {
            guard.release().unwrap().unwrap_released();
        }
    });
}

#[test]
fn reentrant_lock_belongs_to_its_thread() {
    on_each_server(|server| {
        let mgr = manager(server);
        let outer = mgr.lock_reentrant("x").unwrap();
        let inner = mgr.lock_reentrant("x").unwrap();
        let now = LockOptions::new().wait(Duration::ZERO);
        let refused = thread::scope(|threads| {
            let other = threads.spawn(|| mgr.lock_reentrant_with("x", &now).map(drop));
            other.join().unwrap().unwrap_err()
        });
        assert!(matches!(refused, LockError::Held { .. }), "{refused:?}");
        drop((outer, inner));
        drop(mgr.try_lock("x").unwrap());
    });
}

/// The child has copies of the sockets, and must neither use nor end them.
///
/// Fault: F10, N157
#[test]
fn forked_child_cannot_use_or_release_its_parents_lock() {
    on_each_server(|server| {
        let mgr = manager(server);
        let args = [("url", &*server.url()), ("ttl_ms", LONG_TTL_MS)];
        let mut worker = Worker::spawn("forker", &args);
        worker.expect("child ended Some(0)");
        for line in ["held false", "ensure true", "lock true", "ping true", "dropped all"] {
            worker.expect(&format!("child {line}"));
        }
        worker.expect("parent held true");
        assert!(mgr.is_locked("forked").unwrap());
        worker.send("go on");
        worker.expect("parent released Ok(Released)");
        drop(mgr.try_lock("forked").unwrap());
    });
}

/// The settings are the defaults, because the timeout must be longer than the server's limits.
///
/// Fault: N161
#[test]
fn alter_table_leaves_no_waiting_statements_behind() {
    on_each_server(|server| {
        let mgr = manager(server);
        let guard = mgr.lock("x").unwrap();
        let impatient = MySqlMgr::new(MySqlConfig::new(server.url())).unwrap();
        let blocked = || {
            let rows = server.execute(
                "SELECT ID FROM information_schema.PROCESSLIST \
                 WHERE STATE = 'Waiting for table metadata lock'",
            );
            rows.len()
        };
        thread::scope(|threads| {
            threads.spawn(|| {
                server.execute("SET lock_wait_timeout=1000; ALTER TABLE distlock ADD note INT")
            });
            eventually("it waits", TEST_TIMEOUT, || blocked() == 1);
            await_timeouts(&impatient, "y");
            eventually("only ALTER TABLE waits", CALL_LIMIT, || blocked() == 1);
            assert!(guard.is_held());
            guard.release().unwrap().unwrap_released();
        });
        drop(await_free(&impatient, "y"));
    });
}

/// Waits until both kinds of calls end with a timeout, without a holder. A slow machine can use up
/// the time of an exchange, so another call may succeed in reporting that.
#[track_caller]
fn await_timeouts(mgr: &MySqlMgr, name: &str) {
    for wait in [Duration::ZERO, Duration::from_millis(1_500)] {
        eventually("a call ends with a timeout", TEST_TIMEOUT, || {
            match mgr.try_lock_for(name, wait).map(drop).unwrap_err() {
                error @ LockError::Timeout { holder: None, .. } => {
                    let text = error.to_string();
                    assert!(text.contains("did not report a holder"), "{text}");
                    true
                }
                LockError::Unavailable { .. } => false,
                other => panic!("{other:?}"),
            }
        });
    }
}

/// The settings are the defaults, because the timeout must be longer than the server's limits.
///
/// Fault: N161
#[test]
fn tables_that_are_locked_for_reading_cost_no_lock() {
    const LOCKS: usize = 5;
    on_each_server(|server| {
        if !is_mariadb(server) {
            println!("NOT SHOWN on MySQL: MariaDB alone does not wait for the holder");
            return;
        }
        let mgr = manager(server);
        drop(mgr.lock("y").unwrap());
        let kept = mgr.lock("kept").unwrap();
        let impatient = MySqlMgr::new(MySqlConfig::new(server.url())).unwrap();
        let names: Vec<_> = (0..LOCKS).map(|number| format!("x{number}")).collect();
        let mut held: Vec<_> = names.iter().map(|name| impatient.lock(name).unwrap()).collect();
        let mut backup = server.connect();
        backup.query_drop("FLUSH TABLES WITH READ LOCK").unwrap();
        await_timeouts(&impatient, "y");
        // A slow machine can use up the time of some of them.
        let released = |guard: LockGuard| matches!(guard.release(), Ok(Released::Released));
        assert!(held.drain(..).any(released), "no release was confirmed");
        kept.renew().unwrap();
        backup.query_drop("UNLOCK TABLES").unwrap();
        kept.release().unwrap().unwrap_released();
        for name in names.iter().map(String::as_str).chain(["kept", "y"]) {
            drop(await_free(&impatient, name));
        }
    });
}
