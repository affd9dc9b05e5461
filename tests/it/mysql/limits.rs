//! Limits and refusals: connections, privileges, and tables that are missing or of another kind.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::Duration,
};

use distlock::{CancelToken, LockError, LockOptions, MySqlMgr};

use super::{
    await_free, await_waits, config, create_table, kill_holder, manager, on_each_server, waits,
};
use crate::{
    helpers::{CALL_LIMIT, SECOND, UnwrapReleased, completes_within, spawn_call, timed},
    support::{
        Fault, FaultProxy, MySqlServer, TEST_TIMEOUT, contains, eventually,
        mysql::prelude::Queryable, mysql_servers,
    },
};

/// Only counts the requests.
const NO_FAULT: Fault = Fault::DelayReply(Duration::ZERO);

/// The code and the whole text of a refusal.
#[track_caller]
fn refusal<T>(result: distlock::Result<T>) -> (String, String) {
    match result.map(drop).unwrap_err() {
        LockError::Refused { ref code, .. } if code.is_empty() => panic!("no code"),
        error @ LockError::Refused { .. } => {
            let LockError::Refused { code, .. } = &error else { unreachable!() };
            (code.clone(), error.to_string())
        }
        other => panic!("{other:?}"),
    }
}

/// Fault: N164
#[test]
fn callers_wait_in_the_process_for_one_of_few_connections() {
    const WAIT: Duration = Duration::from_millis(200);
    on_each_server(|server| {
        let mgr = MySqlMgr::new(config(server.url()).max_connections(2)).unwrap();
        let guards = [mgr.lock("a").unwrap(), mgr.lock("b").unwrap()];
        let exhausted = |error: LockError| {
            assert!(matches!(error, LockError::PoolExhausted { pool_size: 2, .. }), "{error:?}");
        };
        exhausted(completes_within(CALL_LIMIT, "a try", || mgr.try_lock("c").unwrap_err()));
        let (result, took) = timed(|| mgr.try_lock_for("c", WAIT));
        exhausted(result.unwrap_err());
        assert!(took >= WAIT && took < CALL_LIMIT, "{took:?}");
        let failed = mgr.metrics().failed();
        let error = mgr.try_lock_all(["c", "d"]).unwrap_err();
        assert!(error.to_string().starts_with("could not acquire lock \"c\" at "), "{error}");
        assert_eq!(mgr.metrics().failed(), failed + 1);
        exhausted(error);
        // Looks and releases have connections of their own.
        assert_eq!(mgr.locks("*").unwrap().len(), 2);
        let waiting = spawn_call(&mgr, "c", |mgr, name| mgr.lock(name).unwrap());
        eventually("it waits", TEST_TIMEOUT, || mgr.metrics().waiting() == 1);
        let [one, other] = guards;
        one.release().unwrap().unwrap_released();
        drop(completes_within(CALL_LIMIT, "the lock", || waiting.join().unwrap()));
        other.release().unwrap().unwrap_released();
    });
}

/// Goal: calls that need several connections do not wait for each other's.
///
/// Fault: N199
/// Promise: P6
#[test]
fn calls_for_several_locks_share_few_connections() {
    on_each_server(|server| {
        let mgr = MySqlMgr::new(config(server.url()).max_connections(2)).unwrap();
        let names = [&["a", "b"][..], &["c", "d"], &["a"]];
        let calls = names.map(|names| {
            let mgr = mgr.clone();
            move || (0..50).for_each(|_| drop(mgr.lock_all(names).unwrap()))
        });
        completes_within(CALL_LIMIT, "all calls", || {
            std::thread::scope(|threads| {
                calls.into_iter().for_each(|call| drop(threads.spawn(call)))
            })
        });
        let error = mgr.try_lock_all(["a", "b", "c"]).unwrap_err().to_string();
        let reason = "3 names need as many connections, and there are at most 2; raise \
                      MySqlConfig::max_connections";
        assert!(error.contains(reason), "{error}");
    });
}

/// Goal: a call for several locks keeps the connections that it has reserved. Method: the one that
/// waits for the first lock is ended, and another caller waits for any connection. If that caller
/// got its place, none would be left for the second lock.
///
/// Fault: N223
/// Promise: P6
#[test]
fn broken_connection_costs_a_call_no_reserved_place() {
    on_each_server(|server| {
        let mgr = MySqlMgr::new(config(server.url()).max_connections(2)).unwrap();
        let guard = manager(server).lock("a").unwrap();
        let both = spawn_call(&mgr, "a", |mgr, name| mgr.lock_all([name, "b"]).unwrap());
        await_waits(server, 1);
        let other = spawn_call(&mgr, "c", |mgr, name| mgr.lock(name).unwrap());
        eventually("both wait", TEST_TIMEOUT, || mgr.metrics().waiting() == 2);
        let (waiter, _) = waits(server)[0];
        server.execute(&format!("KILL {waiter}"));
        eventually("a new statement waits", TEST_TIMEOUT, || {
            assert!(!other.is_finished(), "it has got the place of the other call");
            matches!(*waits(server), [(new, _)] if new != waiter)
        });
        guard.release().unwrap().unwrap_released();
        eventually("the call has both locks", TEST_TIMEOUT, || both.is_finished());
        both.join().unwrap().release().unwrap().unwrap_released();
        other.join().unwrap().release().unwrap().unwrap_released();
    });
}

/// The timeout of operations is longer than the test lasts.
///
/// Fault: N224
/// Promise: P6
#[test]
fn cancelled_call_does_not_wait_for_a_connection() {
    on_each_server(|server| {
        let mgr = MySqlMgr::new(config(server.url()).max_connections(2)).unwrap();
        let guard = mgr.lock("a").unwrap();
        let token = CancelToken::new();
        let options = LockOptions::new().cancel(&token);
        let (mgr2, with_token) = (mgr.clone(), options.clone());
        let several = thread::spawn(move || mgr2.lock_all_with(["b", "c"], &with_token).map(drop));
        // It has one place, and waits for the other one.
        eventually("no place is left", TEST_TIMEOUT, || mgr.try_lock("d").is_err());
        let one = spawn_call(&mgr, "d", move |mgr, name| mgr.lock_with(name, &options).map(drop));
        eventually("one waits", TEST_TIMEOUT, || mgr.metrics().waiting() == 1);
        token.cancel();
        for call in [several, one] {
            eventually("the call has ended", CALL_LIMIT, || call.is_finished());
            let error = call.join().unwrap().unwrap_err();
            assert!(error.is_cancelled(), "{error:?}");
        }
        guard.release().unwrap().unwrap_released();
        mgr.lock("d").unwrap().release().unwrap().unwrap_released();
    });
}

/// Goal: a long wait for a place leaves time to connect. Method: the place comes without a
/// connection, because the server has ended it. If the first caller could not use the place, the
/// second one would get it.
///
/// Fault: N197
/// Promise: P4
#[test]
fn caller_that_waited_long_for_a_place_can_connect() {
    const TIMEOUT: Duration = SECOND.saturating_mul(5);
    on_each_server(|server| {
        let config = config(server.url()).operation_timeout(TIMEOUT).max_connections(1);
        let mgr = MySqlMgr::new(config).unwrap();
        let guard = mgr.lock("a").unwrap();
        let first = spawn_call(&mgr, "b", |mgr, name| mgr.lock(name).unwrap());
        eventually("it waits", TEST_TIMEOUT, || mgr.metrics().waiting() == 1);
        // For longer than the time to connect.
        let error = mgr.try_lock_for("c", TIMEOUT + SECOND).unwrap_err();
        assert!(matches!(error, LockError::PoolExhausted { .. }), "{error:?}");
        let second = spawn_call(&mgr, "c", |mgr, name| mgr.lock(name).unwrap());
        eventually("both wait", TEST_TIMEOUT, || mgr.metrics().waiting() == 2);
        kill_holder(server, "a");
        eventually("the first one has its lock", TEST_TIMEOUT, || first.is_finished());
        assert!(!second.is_finished());
        first.join().unwrap().release().unwrap().unwrap_released();
        second.join().unwrap().release().unwrap().unwrap_released();
        drop(guard);
    });
}

/// Fault: N164
#[test]
fn server_without_free_connections_is_named_with_the_limit() {
    for builder in mysql_servers() {
        let server = builder.arg("--max-connections=10").start();
        create_table(&server);
        // A user without privileges, because the server keeps a connection for administrators.
        let url = server.create_user("app", "secret");
        let mgr = MySqlMgr::new(config(url.clone()).operation_timeout(SECOND)).unwrap();
        let mut guards = Vec::new();
        let error = loop {
            match mgr.try_lock(&format!("x{}", guards.len())) {
                Ok(guard) => guards.push(guard),
                Err(error) => break error,
            }
            assert!(guards.len() <= 10);
        };
        assert!(matches!(error, LockError::Unavailable { .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.contains("1040") && text.contains("lower max_connections"), "{text}");
        // A caller with time left waits until there is a connection.
        let other = MySqlMgr::new(config(url)).unwrap();
        let waiting = spawn_call(&other, "y", |mgr, name| mgr.lock(name).unwrap());
        eventually("it waits", TEST_TIMEOUT, || other.metrics().waiting() == 1);
        for guard in guards {
            guard.release().unwrap().unwrap_released();
        }
        mgr.shutdown();
        eventually("it has the lock", TEST_TIMEOUT, || waiting.is_finished());
        waiting.join().unwrap().release().unwrap().unwrap_released();
    }
}

/// Fault: N165
#[test]
fn table_that_does_not_fit_is_refused_with_what_to_do() {
    on_each_server(|server| {
        let mgr = manager(server);
        server.execute("DROP TABLE distlock");
        let (code, text) = refusal(mgr.lock("x"));
        assert_eq!(code, "1146");
        for part in ["MySqlMgr::create_table", "distlock mysql-schema", "CREATE TABLE IF NOT"] {
            assert!(text.contains(part), "{text}");
        }
        mgr.create_table().unwrap();
        mgr.lock("x").unwrap().release().unwrap().unwrap_released();

        server.execute(
            "DROP TABLE distlock; CREATE TABLE distlock (name VARBINARY(1024) PRIMARY KEY)",
        );
        let (code, text) = refusal(mgr.lock("x"));
        assert_eq!(code, "1054");
        assert!(text.contains("has other columns"), "{text}");
    });
}

/// Without row locks, every client would get every lock.
///
/// Fault: N165
/// Promise: P1
#[test]
fn table_without_row_locks_is_refused() {
    on_each_server(|server| {
        server.execute(
            "DROP TABLE distlock; CREATE TABLE distlock (name VARBINARY(200) PRIMARY KEY, \
             token BIGINT UNSIGNED, holder VARBINARY(512), conn BIGINT UNSIGNED) ENGINE=MyISAM",
        );
        let error = MySqlMgr::new(config(server.url())).unwrap_err();
        assert!(matches!(error, LockError::InvalidConfig { .. }), "{error:?}");
        assert!(error.to_string().contains("MyISAM, which does not lock rows"), "{error}");
    });
}

/// Open connections do not look at the engine again. But the holder is in the row.
///
/// Fault: N181
/// Promise: P1
#[test]
fn table_that_loses_its_row_locks_has_one_holder_at_most() {
    on_each_server(|server| {
        let (here, there) = (manager(server), manager(server));
        for mgr in [&here, &there] {
            mgr.lock("x").unwrap().release().unwrap().unwrap_released();
        }
        server.execute(
            "DROP TABLE distlock; CREATE TABLE distlock (name VARBINARY(200) PRIMARY KEY, \
             token BIGINT UNSIGNED NOT NULL DEFAULT 0, holder VARBINARY(512) NOT NULL DEFAULT '', \
             conn BIGINT UNSIGNED NOT NULL DEFAULT 0) ENGINE=MyISAM",
        );
        let guard = here.lock("x").unwrap();
        for result in [there.try_lock("x"), there.lock("x")] {
            let error = result.unwrap_err().to_string();
            assert!(error.contains("does not lock rows"), "{error}");
        }
        guard.release().unwrap().unwrap_released();
    });
}

/// Fault: N165
#[test]
fn wrong_password_is_refused_and_not_shown() {
    on_each_server(|server| {
        let url = server.create_user("app", "s3cret");
        let error = MySqlMgr::new(config(url.replace("s3cret", "wr0ng"))).unwrap_err();
        let shown = format!("{error} {error:?}");
        assert!(matches!(&error, LockError::Refused { code, .. } if code == "1045"), "{error:?}");
        assert!(shown.contains("check the user, its password"), "{shown}");
        assert!(!shown.contains("wr0ng"), "{shown}");
        let mgr = MySqlMgr::new(config(url)).unwrap();
        assert!(!format!("{mgr:?}").contains("s3cret"));
        mgr.lock("x").unwrap().release().unwrap().unwrap_released();
    });
}

/// Fault: N165
#[test]
fn binary_log_of_statements_is_refused_with_what_to_do() {
    let log = ["--log-bin=binlog", "--server-id=1", "--binlog-format=STATEMENT"];
    let server = log.into_iter().fold(MySqlServer::builder(), |server, arg| server.arg(arg));
    let server = server.start();
    create_table(&server);
    let (code, text) = refusal(manager(&server).lock("x"));
    assert_eq!(code, "1665");
    assert!(text.contains("binlog_format to MIXED or ROW"), "{text}");
}

/// Fault: N158
#[test]
fn prune_spares_locks_that_are_held_or_waited_for() {
    on_each_server(|server| {
        let mgr = manager(server);
        for name in ["old1", "old2"] {
            mgr.lock(name).unwrap().release().unwrap().unwrap_released();
        }
        let guard = mgr.lock("x").unwrap();
        let waiting = spawn_call(&mgr, "x", |mgr, name| mgr.lock(name).unwrap());
        await_waits(server, 1);
        assert_eq!(mgr.prune(600 * SECOND).unwrap(), 0);
        assert_eq!(mgr.prune(Duration::ZERO).unwrap(), 2);
        assert_eq!(server.execute("SELECT name FROM distlock"), [["x"]]);
        let token = guard.fencing_token();
        guard.release().unwrap().unwrap_released();
        let next = waiting.join().unwrap();
        assert!(next.fencing_token() > token);
        let token = next.fencing_token();
        next.release().unwrap().unwrap_released();
        let url = server.create_user("visitor", "secret");
        server.execute("REVOKE DELETE ON distlock_test.* FROM visitor@127.0.0.1");
        let visitor = MySqlMgr::new(config(url)).unwrap();
        let text = visitor.prune(Duration::ZERO).unwrap_err().to_string();
        assert!(text.starts_with("could not delete unused rows at the server: "), "{text}");
        assert!(text.contains("refused with 1142"), "{text}");
        // The server may not have noticed the end of that transaction yet.
        eventually("it is deleted", TEST_TIMEOUT, || mgr.prune(Duration::ZERO).unwrap() == 1);
        assert!(mgr.lock("x").unwrap().fencing_token() > token);
    });
}

/// For a list of names, the server reads all rows of a table as small as this one.
///
/// Fault: N269
/// Promise: P6
#[test]
fn prune_of_a_small_table_waits_for_no_holder() {
    on_each_server(|server| {
        let mgr = manager(server);
        let guard = mgr.lock("x").unwrap();
        for name in ["old1", "old2", "old3"] {
            mgr.lock(name).unwrap().release().unwrap().unwrap_released();
        }
        assert_eq!(mgr.prune(Duration::ZERO).unwrap(), 3);
        assert_eq!(server.row_waits(), 0);
        guard.release().unwrap().unwrap_released();
    });
}

/// Goal: no exchange takes long, however large the table is. Method: the only unused row is behind
/// more rows than one exchange reads.
///
/// Fault: N231
/// Promise: P6
#[test]
fn prune_reads_a_large_table_in_parts() {
    const ROWS: u64 = 2_500;
    on_each_server(|server| {
        let rows: Vec<_> = (0..ROWS).map(|number| format!("('new{number}', 1 << 62)")).collect();
        server.execute(&format!("INSERT INTO distlock (name, token) VALUES {}", rows.join(",")));
        server.execute("INSERT INTO distlock (name) VALUES ('old')");
        let proxy = FaultProxy::in_front_of_mysql(server.addr());
        let parts = proxy.on_request(contains("ORDER BY name"), NO_FAULT).forever();
        let locking = proxy.on_request(contains("SKIP LOCKED"), NO_FAULT).forever();
        let mgr = MySqlMgr::new(config(proxy.url())).unwrap();
        assert_eq!(mgr.prune(Duration::ZERO).unwrap(), 1);
        assert_eq!((parts.fired(), locking.fired()), (3, 1));
    });
}

/// A caller that does not wait finds the rows that `prune` has locked busy. And the names of more
/// rows can be longer than what the server accepts at once.
///
/// Fault: N273
/// Promise: P6
#[test]
fn prune_locks_few_rows_at_once() {
    on_each_server(|server| {
        for number in 0..40 {
            let name = format!("{number:01000}");
            server.execute(&format!("INSERT INTO distlock (name) VALUES ('{name}')"));
        }
        server.execute("SET GLOBAL max_allowed_packet = 65536");
        let proxy = FaultProxy::in_front_of_mysql(server.addr());
        let locking = proxy.on_request(contains("SKIP LOCKED"), NO_FAULT).forever();
        let mgr = MySqlMgr::new(config(proxy.url())).unwrap();
        assert_eq!(mgr.prune(Duration::ZERO).unwrap(), 40);
        assert_eq!(locking.fired(), 3);
    });
}

/// A foreign key stands for whatever makes the update of a call wait at the server after it has
/// timed out. It would get the lock later, and nobody would use it.
///
/// Fault: N232
/// Promise: P5
#[test]
fn timed_out_try_leaves_no_statement() {
    on_each_server(|server| {
        server.execute(
            "CREATE TABLE connections (id BIGINT UNSIGNED PRIMARY KEY) ENGINE=InnoDB;
             INSERT INTO connections VALUES (0);
             INSERT INTO distlock (name) VALUES ('x');
             ALTER TABLE distlock ADD FOREIGN KEY (conn) REFERENCES connections (id)",
        );
        let ids: Vec<_> = (1..1_000).map(|id| format!("({id})")).collect();
        let mut uncommitted = server.connect();
        let insert = format!("BEGIN; INSERT INTO connections VALUES {}", ids.join(","));
        uncommitted.query_drop(insert).unwrap();
        let mgr = MySqlMgr::new(config(server.url()).operation_timeout(3 * SECOND)).unwrap();
        let trying = spawn_call(&mgr, "x", |mgr, name| mgr.try_lock(name).map(drop));
        eventually("its update waits", TEST_TIMEOUT, || server.row_waits() == 1);
        assert!(trying.join().unwrap().is_err());
        eventually("it is ended", TEST_TIMEOUT, || server.row_waits() == 0);
        uncommitted.query_drop("COMMIT").unwrap();
        await_free(&mgr, "x").release().unwrap().unwrap_released();
    });
}

/// Each use of a lock leaves an unused row.
///
/// Fault: N158
/// Promise: P6
#[test]
fn prune_ends_although_locks_are_used_meanwhile() {
    const ROWS: u64 = 1_500;
    on_each_server(|server| {
        let rows: Vec<_> = (0..ROWS).map(|number| format!("('old{number}')")).collect();
        server.execute(&format!("INSERT INTO distlock (name) VALUES {}", rows.join(",")));
        let proxy = FaultProxy::in_front_of_mysql(server.addr());
        let (mgr, other) = (MySqlMgr::new(config(proxy.url())).unwrap(), manager(server));
        let looks = Arc::new(AtomicU32::new(0));
        let counted = looks.clone();
        let is_look = contains("ORDER BY name");
        let uses_a_lock = move |words: &[Vec<u8>]| {
            // Not forever, so that a defect ends too.
            if is_look(words) && counted.fetch_add(1, Ordering::AcqRel) < 10 {
                other.lock("used").unwrap().release().unwrap().unwrap_released();
            }
            false
        };
        proxy.on_request(uses_a_lock, Fault::DropReply);
        assert!(mgr.prune(Duration::ZERO).unwrap() >= ROWS);
        assert_eq!(looks.load(Ordering::Acquire), 2, "a full batch, and the rest");
        assert!(server.execute("SELECT name FROM distlock WHERE name LIKE 'old%'").is_empty());
    });
}
