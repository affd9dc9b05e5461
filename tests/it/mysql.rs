//! Locks in MySQL and MariaDB, where they differ from those in Redis: what happens to the row, to
//! the connections and to the server's queue. `contract` has what all kinds of locks promise.

mod holders;
mod leases;
mod limits;
mod outages;
mod tls;
mod unfit;
mod waiters;

use distlock::{LockGuard, MySqlConfig, MySqlMgr};

use crate::{
    helpers::{CALL_LIMIT, SECOND},
    support::{MySqlKind, MySqlServer, TEST_TIMEOUT, Worker, eventually, mysql_servers},
};

/// A lease that does not expire during a test, so that only something else can end a lock.
const LONG_TTL_MS: &str = "600000";

/// Runs a test on MariaDB, and on the MySQL server that `MYSQLD` names.
fn on_each_server(test: impl Fn(&MySqlServer)) {
    let servers = mysql_servers();
    if servers.len() == 1 {
        println!("NOT SHOWN on MySQL: MYSQLD names no server");
    }
    for builder in servers {
        println!("on another server");
        let server = builder.start();
        create_table(&server);
        test(&server);
    }
}

fn create_table(server: &MySqlServer) {
    manager(server).create_table().unwrap();
}

/// Leases of 600 s, and timeouts that only a defect exceeds.
fn config(url: impl Into<String>) -> MySqlConfig {
    MySqlConfig::new(url).ttl(600 * SECOND).operation_timeout(2 * CALL_LIMIT)
}

fn manager(server: &MySqlServer) -> MySqlMgr {
    MySqlMgr::new(config(server.url())).unwrap()
}

/// A process that holds locks and waits for them.
fn spawn_locker(server: &MySqlServer, ttl_ms: &str) -> Worker {
    let worker = Worker::spawn("locker", &[("url", &server.url()), ("ttl_ms", ttl_ms)]);
    worker.expect("ready");
    worker
}

/// Has a process acquire a lock, and returns its token.
#[track_caller]
fn lock(worker: &mut Worker, name: &str) -> u64 {
    worker.send(&format!("lock {name}"));
    let line = worker.expect(&format!("locked {name}"));
    line.split(' ').next().unwrap().parse().unwrap()
}

/// The connections whose statements wait for locks, and for how many seconds, those that began
/// first at the front.
fn waits(server: &MySqlServer) -> Vec<(u64, u64)> {
    let rows = server.execute(
        "SELECT ID, TIME FROM information_schema.PROCESSLIST \
         WHERE INFO LIKE CONCAT('%/* distlock ', 'wait %') ORDER BY TIME DESC, ID",
    );
    let number = |text: &String| text.parse().unwrap();
    rows.iter().map(|row| (number(&row[0]), number(&row[1]))).collect()
}

#[track_caller]
fn await_waits(server: &MySqlServer, count: usize) {
    eventually(&format!("{count} statements wait for locks"), TEST_TIMEOUT, || {
        waits(server).len() == count && server.row_waits() == count
    });
}

/// Ends the connection that holds a lock, and returns its number.
fn kill_holder(server: &MySqlServer, name: &str) -> String {
    let mut rows = server.execute(&format!(
        "SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED;
         SELECT conn FROM distlock WHERE name = '{name}'"
    ));
    let number = rows.remove(0).remove(0);
    server.execute(&format!("KILL {number}"));
    number
}

/// Waits until the server has forgotten a connection.
#[track_caller]
fn await_end_of(server: &MySqlServer, number: &str) {
    let listed = format!("SELECT ID FROM information_schema.PROCESSLIST WHERE ID = {number}");
    eventually("it is ended", TEST_TIMEOUT, || server.execute(&listed).is_empty());
}

/// Checks that a lock is free, or soon will be, although its lease is long.
#[track_caller]
fn await_free(mgr: &MySqlMgr, name: &str) -> LockGuard {
    let mut guard = None;
    eventually("it is free", TEST_TIMEOUT, || {
        guard = mgr.try_lock(name).ok();
        guard.is_some()
    });
    guard.unwrap()
}

fn is_mariadb(server: &MySqlServer) -> bool {
    server.kind() == MySqlKind::MariaDb
}
