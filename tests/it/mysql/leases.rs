//! Leases: of waiters, which have the lock for a claim window first, and of holders whose network
//! is broken, or whose server has unusual settings.

use std::{fs, net::SocketAddr, os::fd::OwnedFd, thread, time::Duration};

use distlock::{LockError, LockGuard, MySqlMgr, MySqlTableState};
use rustix::{
    net::{getpeername, sockopt::tcp_user_timeout},
    process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open},
};

use super::{
    LONG_TTL_MS, await_waits, config, create_table, manager, on_each_server, spawn_locker,
};
use crate::{
    helpers::{CALL_LIMIT, SECOND, UnwrapReleased, spawn_call, timed},
    support::{Fault, FaultProxy, MySqlServer, TEST_TIMEOUT, contains, eventually},
};

/// Its lease is longer than the test.
///
/// Fault: N225
/// Promise: P4
#[test]
fn frozen_waiter_delays_the_next_by_one_claim_window() {
    on_each_server(|server| {
        let mgr = manager(server);
        let guard = mgr.lock("x").unwrap();
        let mut frozen = spawn_locker(server, LONG_TTL_MS);
        frozen.send("lock x");
        await_waits(server, 1);
        let waiting = spawn_call(&manager(server), "x", |mgr, name| mgr.lock(name).unwrap());
        await_waits(server, 2);
        frozen.stop();
        guard.release().unwrap().unwrap_released();
        eventually("the next has the lock", TEST_TIMEOUT, || waiting.is_finished());
        let next = waiting.join().unwrap();
        frozen.cont();
        // It finds that it does not have the lock, and waits again.
        await_waits(server, 1);
        assert!(next.is_held());
        next.release().unwrap().unwrap_released();
        frozen.expect("locked x");
    });
}

/// The connection outlives the claim window, while it holds the lock, and in the pool.
///
/// Fault: N225
/// Promise: P8
#[test]
fn lock_that_was_waited_for_gets_a_whole_lease_soon() {
    on_each_server(|server| {
        let (holder, mgr) = (manager(server), manager(server));
        for long_wait in [false, true] {
            let guard = holder.lock("x").unwrap();
            let waiting = spawn_call(&mgr, "x", |mgr, name| mgr.lock(name).unwrap());
            await_waits(server, 1);
            if long_wait {
                await_idle(server, &connection_of(server, "x"), 1);
            }
            guard.release().unwrap().unwrap_released();
            let guard = waiting.join().unwrap();
            let connection = connection_of(server, "x");
            eventually("it is confirmed", CALL_LIMIT, || guard.remaining() > 500 * SECOND);
            await_idle(server, &connection, 3);
            guard.ensure_held().unwrap();
            guard.release().unwrap().unwrap_released();
            await_idle(server, &connection, 3);
        }
    });
}

/// The releaser and the waiter restore what a wait has set.
///
/// Fault: N225
#[test]
fn connection_that_has_waited_stays_open_in_the_pool() {
    on_each_server(|server| {
        let (holder, mgr) = (manager(server), manager(server));
        let guard = holder.lock("x").unwrap();
        let waiting = spawn_call(&mgr, "x", |mgr, name| {
            mgr.try_lock_for(name, Duration::from_millis(300)).map(drop)
        });
        await_waits(server, 1);
        let (connection, _) = super::waits(server)[0];
        let error = waiting.join().unwrap().unwrap_err();
        assert!(matches!(error, LockError::Timeout { .. }), "{error:?}");
        await_idle(server, &connection.to_string(), 3);
        drop(guard);
    });
}

/// Waits until a connection has been idle for this many seconds.
#[track_caller]
fn await_idle(server: &MySqlServer, connection: &str, seconds: u64) {
    let time = format!("SELECT TIME FROM information_schema.PROCESSLIST WHERE ID = {connection}");
    eventually("it is idle", TEST_TIMEOUT, || {
        let rows = server.execute(&time);
        assert!(!rows.is_empty(), "the server has closed the connection");
        rows[0][0].parse::<u64>().unwrap() >= seconds
    });
}

fn connection_of(server: &MySqlServer, name: &str) -> String {
    let mut rows = server.execute(&format!(
        "SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED;
         SELECT conn FROM distlock WHERE name = '{name}'"
    ));
    rows.remove(0).remove(0)
}

/// Linux closes a connection when the other side has acknowledged nothing for this time. This test
/// has no network that it could break.
///
/// Fault: N226
/// Promise: P8
#[test]
fn broken_network_ends_no_lock_before_its_lease() {
    let server = MySqlServer::start();
    create_table(&server);
    let (mgr, short) = (manager(&server), MySqlMgr::new(config(server.url()).ttl(SECOND)).unwrap());
    let held = |mgr: &MySqlMgr| -> LockGuard { mgr.lock("x").unwrap() };
    let guard = held(&mgr);
    assert_eq!(silences_ms(server.addr()).last(), Some(&600_000));
    // A wait without a limit notices a broken path sooner.
    let waiting = spawn_call(&short, "x", |mgr, name| mgr.lock(name).unwrap());
    await_waits(&server, 1);
    assert_eq!(silences_ms(server.addr()).first(), Some(&15_000));
    guard.release().unwrap().unwrap_released();
    let guard = waiting.join().unwrap();
    let waiting = spawn_call(&mgr, "x", |mgr, name| mgr.lock(name).unwrap());
    await_waits(&server, 1);
    assert!(silences_ms(server.addr()).iter().all(|silence| *silence == 15_000));
    guard.release().unwrap().unwrap_released();
    let guard = waiting.join().unwrap();
    assert_eq!(silences_ms(server.addr()).last(), Some(&600_000));
    drop(guard);
}

/// These times of all connections of this process to a server, in ascending order.
fn silences_ms(server: SocketAddr) -> Vec<u32> {
    let process = pidfd_open(getpid(), PidfdFlags::empty()).unwrap();
    let descriptors = fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| {
        let number = entry.ok()?.file_name().to_str()?.parse().ok()?;
        pidfd_getfd(&process, number, PidfdGetfdFlags::empty()).ok()
    });
    let leads_to_it = |socket: &OwnedFd| {
        let peer = getpeername(socket).ok().flatten();
        peer.and_then(|peer| SocketAddr::try_from(peer).ok()) == Some(server)
    };
    let sockets: Vec<_> = descriptors.filter(leads_to_it).collect();
    let mut silences: Vec<_> = sockets.iter().map(|one| tcp_user_timeout(one).unwrap()).collect();
    silences.sort_unstable();
    silences
}

/// The reply to the wait comes late, and that to the look for the holder never.
///
/// Fault: N227
/// Promise: P6
#[test]
fn call_ends_one_timeout_after_its_wait_at_the_latest() {
    const TIMEOUT: Duration = SECOND.saturating_mul(6);
    on_each_server(|server| {
        let guard = manager(server).lock("x").unwrap();
        let proxy = FaultProxy::in_front_of_mysql(server.addr());
        let mgr = MySqlMgr::new(config(proxy.url()).operation_timeout(TIMEOUT)).unwrap();
        let late = Fault::DelayReply(5 * SECOND);
        proxy.on_request(contains("distlock wait"), late);
        let looks = proxy.on_request(contains("READ UNCOMMITTED"), Fault::SwallowRequest).forever();
        let (result, took) = timed(|| mgr.try_lock_for("x", SECOND));
        assert!(result.is_err() && looks.fired() > 0, "{result:?}");
        assert!(took < SECOND + TIMEOUT + 3 * SECOND, "{took:?}");
        guard.release().unwrap().unwrap_released();
    });
}

/// Settings that a server may have, each of which changes what statements mean.
///
/// Fault: N228
#[test]
fn unusual_settings_of_the_server_change_nothing() {
    let settings = [
        "--completion-type=CHAIN",
        "--completion-type=RELEASE",
        "--sql-mode=ORACLE",
        "--sql-mode=EMPTY_STRING_IS_NULL",
        "--sql-mode=ANSI",
        "SET GLOBAL tx_read_only=1",
        "SET GLOBAL sql_select_limit=0",
    ];
    for setting in settings {
        let is_argument = setting.starts_with("--");
        let server = MySqlServer::builder();
        let server = if is_argument { server.arg(setting) } else { server }.start();
        create_table(&server);
        if !is_argument {
            server.execute(setting);
        }
        let info = config(server.url()).examine_server().unwrap();
        assert_eq!(info.table, MySqlTableState::Usable, "{setting}");
        let mgr = manager(&server);
        thread::scope(|threads| {
            for _ in 0..2 {
                threads.spawn(|| {
                    for _ in 0..3 {
                        let guard = mgr.lock("x").unwrap();
                        guard.release().unwrap().unwrap_released();
                    }
                });
            }
        });
        mgr.prune(Duration::ZERO).unwrap();
        assert_eq!((mgr.metrics().lost(), mgr.metrics().failed()), (0, 0), "{setting}");
    }
}
