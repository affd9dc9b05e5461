//! Outages: servers that end, hang or become read-only, and replies that are lost.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use distlock::{
    CancelToken, HandleEvent, LockError, LockLost, LockOptions, MultiGuard, MySqlMgr,
    ReconnectedEvent, Released, UnreachableEvent,
};

use super::{await_free, await_waits, config, is_mariadb, manager, on_each_server, waits};
use crate::{
    helpers::{
        CALL_LIMIT, SECOND, UnwrapReleased, capture_log, completes_within, expect_loss,
        in_own_process, spawn_call,
    },
    support::{Fault, FaultProxy, TEST_TIMEOUT, contains, eventually},
};

const RELEASE: &str = "SET conn=0";

/// Fault: N162
/// Promise: P3, P7
#[test]
fn restart_of_the_server_loses_locks_with_a_notice() {
    on_each_server(|server| {
        let mgr = manager(server);
        let ends: [fn(&crate::support::MySqlServer); 2] =
            [|server| server.kill(), |server| server.shut_down()];
        let mut last = 0;
        for end in ends {
            let guard = await_free(&mgr, "x");
            assert!(guard.fencing_token().as_u64() > last);
            last = guard.fencing_token().as_u64();
            // A waiter goes on waiting until the server is back.
            let waiting = spawn_call(&mgr, "x", |mgr, name| mgr.lock(name).unwrap());
            await_waits(server, 1);
            end(server);
            expect_loss(&guard);
            server.restart();
            let next = waiting.join().unwrap();
            assert!(next.fencing_token().as_u64() > last);
            last = next.fencing_token().as_u64();
            next.release().unwrap().unwrap_released();
        }
    });
}

/// Fault: N162
/// Promise: P1, P2
#[test]
fn holder_that_is_cut_off_loses_its_lock_in_time() {
    on_each_server(|server| {
        let proxy = FaultProxy::in_front_of_mysql(server.addr());
        let (cut_off, other) =
            (MySqlMgr::new(config(proxy.url()).ttl(3 * SECOND)).unwrap(), manager(server));
        let guard = cut_off.lock("x").unwrap();
        let waiting = spawn_call(&other, "x", |mgr, name| mgr.lock(name).unwrap());
        await_waits(server, 1);
        proxy.blackhole();
        let next = waiting.join().unwrap();
        assert!(!guard.is_held(), "{guard:?}");
        assert_eq!(expect_loss(&guard), LockLost::Expired);
        assert!(next.fencing_token() > guard.fencing_token());
        proxy.heal();
        assert!(next.is_held());
        next.release().unwrap().unwrap_released();
    });
}

/// Fault: N162
/// Promise: P7
#[test]
fn server_that_becomes_read_only_ends_its_locks() {
    on_each_server(|server| {
        let url = server.create_user("app", "secret");
        let mgr = MySqlMgr::new(config(url).ttl(6 * SECOND)).unwrap();
        let guard = mgr.lock("x").unwrap();
        let read_only = if is_mariadb(server) { "read_only" } else { "super_read_only" };
        server.execute(&format!("SET GLOBAL {read_only} = 1"));
        assert_eq!(expect_loss(&guard), LockLost::ConnectionLost);
        let error = mgr.try_lock("y").unwrap_err();
        assert!(matches!(&error, LockError::Refused { code, .. } if code == "READONLY"), "{error}");
        server.execute("SET GLOBAL read_only = 0");
        await_free(&mgr, "x").release().unwrap().unwrap_released();
    });
}

/// Fault: N162
/// Promise: P7
#[test]
fn loss_on_a_read_only_server_is_logged_with_the_reason() {
    let test = "mysql::outages::loss_on_a_read_only_server_is_logged_with_the_reason";
    if !in_own_process(test, &[]) {
        return;
    }
    let logged = capture_log(log::LevelFilter::Warn);
    on_each_server(|server| {
        let mgr = MySqlMgr::new(config(server.url()).ttl(6 * SECOND)).unwrap();
        let guard = mgr.lock("x").unwrap();
        logged.lock().clear();
        server.execute("SET GLOBAL read_only = 1");
        assert_eq!(expect_loss(&guard), LockLost::ConnectionLost);
        let count = || logged.lock().iter().filter(|line| line.contains("could not renew")).count();
        eventually("the reason is logged", TEST_TIMEOUT, || count() == 1);
        let lines = logged.lock().join("\n");
        assert!(lines.contains("READONLY the server is read-only"), "{lines}");
    });
}

/// The user may write nevertheless, and the manager has open connections. Only what the server says
/// about itself shows that locks belong to another one.
///
/// Fault: N250
/// Promise: P1
#[test]
fn read_only_server_grants_nothing_to_a_privileged_user() {
    const WAIT: Duration = SECOND.saturating_mul(5);
    on_each_server(|server| {
        let url = server.create_user("app", "secret");
        server.execute("GRANT ALL ON *.* TO app@127.0.0.1");
        let proxy = FaultProxy::in_front_of_mysql(server.addr());
        let direct = MySqlMgr::new(config(url.clone())).unwrap();
        let proxied = url.replace(&server.port().to_string(), &proxy.addr().port().to_string());
        let mgr = MySqlMgr::new(config(proxied)).unwrap();
        // These connections are idle then.
        drop(["a", "b", "c"].map(|name| mgr.lock(name).unwrap()));
        let creator = MySqlMgr::new(config(url)).unwrap();
        drop(creator.lock("d").unwrap());
        let guard = direct.lock("x").unwrap();
        // This one waits for its turn, which comes after the change.
        let wait = proxy.on_request(contains("distlock wait"), Fault::HoldRequest);
        let waiting = spawn_call(&mgr, "x", |mgr, name| mgr.try_lock_for(name, WAIT).map(drop));
        wait.wait_fired();
        server.execute("SET GLOBAL read_only = 1");
        let error = mgr.try_lock("a").map(drop).unwrap_err();
        assert!(matches!(&error, LockError::Refused { code, .. } if code == "READONLY"), "{error}");
        let error = creator.try_lock("new").map(drop).unwrap_err();
        assert!(matches!(&error, LockError::Refused { code, .. } if code == "READONLY"), "{error}");
        let rows = server.execute("SELECT 1 FROM distlock WHERE name = 'new'");
        assert!(rows.is_empty(), "a row on a read-only server");
        wait.release();
        // While another client still holds the lock, too.
        match waiting.join().unwrap() {
            Err(LockError::Refused { code, .. }) if code == "READONLY" => {}
            waited => panic!("a wait on a read-only server: {waited:?}"),
        }
        guard.release().unwrap().unwrap_released();
        drop((direct, creator));
        eventually("no connection is left", TEST_TIMEOUT, || {
            let listed = "SELECT ID FROM information_schema.PROCESSLIST WHERE USER = 'app'";
            server.execute(listed).is_empty()
        });
        server.execute("SET GLOBAL read_only = 0");
        drop(await_free(&mgr, "a"));
    });
}

/// Fault: N163
#[test]
fn lost_reply_to_an_acquisition_leaves_the_lock_free() {
    on_each_server(|server| {
        let other = manager(server);
        other.lock("x").unwrap().release().unwrap().unwrap_released();
        let proxy = FaultProxy::in_front_of_mysql(server.addr());
        let mgr = MySqlMgr::new(config(proxy.url()).operation_timeout(SECOND)).unwrap();
        for fault in [Fault::DropReply, Fault::ResetAfterRequest, Fault::CutReply(9)] {
            let lost = proxy.on_request(contains("NOWAIT"), fault).forever();
            let error = completes_within(CALL_LIMIT, "a try", || mgr.try_lock("x").unwrap_err());
            assert!(error.is_unavailable(), "{error:?}");
            assert!(lost.fired() > 0);
            lost.disarm();
            await_free(&other, "x").release().unwrap().unwrap_released();
            assert!(waits(server).is_empty());
        }
    });
}

/// Fault: N163
#[test]
fn lost_reply_to_a_release_leaves_the_lock_free() {
    on_each_server(|server| {
        let other = manager(server);
        let proxy = FaultProxy::in_front_of_mysql(server.addr());
        let mgr = MySqlMgr::new(config(proxy.url()).operation_timeout(SECOND)).unwrap();
        for fault in [Fault::ResetBeforeRequest, Fault::ResetAfterRequest, Fault::CutReply(9)] {
            let is_cut = matches!(fault, Fault::CutReply(_));
            let guard = mgr.lock("x").unwrap();
            let lost = proxy.on_request(contains(RELEASE), fault);
            let result = completes_within(CALL_LIMIT, "a release", || guard.release());
            assert_eq!(lost.fired(), 1);
            match result {
                Ok(Released::Released) if !is_cut => {}
                Err(LockError::Unavailable { .. }) if is_cut => {}
                other => panic!("{other:?}"),
            }
            await_free(&other, "x").release().unwrap().unwrap_released();
        }
        assert_eq!(mgr.metrics().lost(), 0);
    });
}

/// As when the server shuts down: afterwards, nothing answers a look for the next holder.
///
/// Fault: N163
#[test]
fn release_that_ends_the_connection_needs_no_look() {
    on_each_server(|server| {
        let proxy = FaultProxy::in_front_of_mysql(server.addr());
        let mgr = MySqlMgr::new(config(proxy.url())).unwrap();
        let guard = mgr.lock("x").unwrap();
        proxy.on_request(contains(RELEASE), Fault::ResetAfterRequest);
        let looks =
            proxy.on_request(contains("READ UNCOMMITTED"), Fault::ResetAfterRequest).forever();
        guard.release().unwrap().unwrap_released();
        assert_eq!(looks.fired(), 0, "looks for the next holder");
    });
}

/// Fault: N162
/// Promise: P6
#[test]
fn shutdown_does_not_wait_for_a_server_that_hangs() {
    on_each_server(|server| {
        let mgr = MySqlMgr::new(config(server.url()).operation_timeout(SECOND)).unwrap();
        let guards: Vec<_> =
            (0..6).map(|number| mgr.lock(&format!("x{number}")).unwrap()).collect();
        let waiting = spawn_call(&mgr, "x0", |mgr, name| mgr.lock(name).map(drop));
        await_waits(server, 1);
        server.stop();
        completes_within(2 * CALL_LIMIT, "shutdown", || mgr.shutdown());
        assert!(guards.iter().all(|guard| !guard.is_held()));
        let error = waiting.join().unwrap().unwrap_err();
        assert!(matches!(error, LockError::Shutdown), "{error:?}");
        drop(guards);
        server.cont();
        let other = manager(server);
        for number in 0..6 {
            drop(await_free(&other, &format!("x{number}")));
        }
    });
}

/// A release in a database waits for its reply, so each lock could cost an operation timeout.
///
/// Fault: N196
/// Promise: P6
#[test]
fn failed_call_for_many_locks_waits_for_one_timeout_at_most() {
    on_each_server(|server| {
        let other = manager(server);
        let mgr = MySqlMgr::new(config(server.url()).operation_timeout(3 * SECOND)).unwrap();
        let guard = other.lock("z").unwrap();
        let token = CancelToken::new();
        let options = LockOptions::new().cancel(&token);
        let waiting = thread::spawn(move || mgr.lock_all_with(many_names_and("z"), &options));
        await_waits(server, 1);
        server.stop();
        token.cancel();
        let waiting = completes_within(2 * CALL_LIMIT, "the call", || waiting.join().unwrap());
        let error = waiting.unwrap_err();
        assert!(error.is_cancelled(), "{error:?}");
        server.cont();
        guard.release().unwrap().unwrap_released();
        many_names_and("z").iter().for_each(|name| drop(await_free(&other, name)));
    });
}

/// Fault: N196
/// Promise: P6
#[test]
fn background_release_of_many_locks_waits_for_one_timeout() {
    on_each_server(|server| {
        let other = manager(server);
        let mgr = MySqlMgr::new(config(server.url()).operation_timeout(3 * SECOND)).unwrap();
        let options = LockOptions::new().release_in_background(true);
        for end in [MultiGuard::release_later, drop] {
            let all = mgr.lock_all_with(many_names_and("z"), &options).unwrap();
            server.stop();
            completes_within(2 * CALL_LIMIT, "the release", || end(all));
            server.cont();
            many_names_and("z").iter().for_each(|name| drop(await_free(&other, name)));
        }
    });
}

/// 20 names, of which this is the last one.
fn many_names_and(last: &str) -> Vec<String> {
    (0..19).map(|number| format!("x{number:02}")).chain([last.to_owned()]).collect()
}

/// A server that hangs for less than the lease costs no lock.
///
/// Fault: N162
/// Promise: P8
#[test]
fn lock_survives_a_server_that_hangs_for_a_while() {
    on_each_server(|server| {
        let config = config(server.url()).ttl(30 * SECOND).operation_timeout(SECOND);
        let mgr = MySqlMgr::new(config).unwrap();
        let guard = mgr.lock("x").unwrap();
        // Until a renewal has had no reply in time.
        let failures = mgr.metrics().renewals_failed();
        server.stop();
        thread::scope(|threads| {
            threads.spawn(|| {
                eventually("a renewal is late", TEST_TIMEOUT, || {
                    mgr.metrics().renewals_failed() > failures
                });
                server.cont();
            });
        });
        let renewed = mgr.metrics().renewals();
        eventually("it is renewed", TEST_TIMEOUT, || mgr.metrics().renewals() > renewed);
        assert!(guard.remaining() > Duration::ZERO);
        guard.release().unwrap().unwrap_released();
    });
}

/// Counts the outages that are reported.
#[derive(Debug, Default)]
struct Outages {
    begun: AtomicUsize,
    ended: AtomicUsize,
}

impl HandleEvent for Outages {
    fn unreachable(&self, _: &UnreachableEvent<'_>) {
        self.begun.fetch_add(1, Ordering::SeqCst);
    }

    fn reconnected(&self, _: &ReconnectedEvent<'_>) {
        self.ended.fetch_add(1, Ordering::SeqCst);
    }
}

/// Fault: N262
#[test]
fn outage_of_the_server_and_its_end_are_reported_once() {
    on_each_server(|server| {
        let outages = Arc::new(Outages::default());
        let mgr = MySqlMgr::new(config(server.url()).event_handler(outages.clone())).unwrap();
        drop(mgr.lock("x").unwrap());
        assert_eq!(mgr.metrics().nodes_reachable(), 1);
        server.kill();
        for _ in 0..5 {
            assert!(mgr.try_lock("x").unwrap_err().is_unavailable());
        }
        assert_eq!(mgr.metrics().nodes_reachable(), 0);
        let late = MySqlMgr::new(config(server.url())).unwrap();
        assert_eq!(late.metrics().nodes_reachable(), 0);
        let counts =
            || (outages.begun.load(Ordering::SeqCst), outages.ended.load(Ordering::SeqCst));
        eventually("it is reported", TEST_TIMEOUT, || counts() == (1, 0));
        server.restart();
        drop(await_free(&mgr, "x"));
        assert_eq!(mgr.metrics().nodes_reachable(), 1);
        eventually("its end is reported", TEST_TIMEOUT, || counts() == (1, 1));
    });
}
