//! A small service as one would deploy it: several instances take payments for orders over HTTP,
//! and share a SQLite file. A lock lets one instance at a time work on an order, and fencing tokens
//! keep the rows right even if an instance is paused and continues too late.
//!
//! ```text
//! redis-server &                                            # or set DISTLOCK_URL
//! cargo run --example orders -- 127.0.0.1:8080 orders.db    # as many as you like, on other ports
//! curl -X POST '127.0.0.1:8080/orders/42/pay?ref=A1'        # the client chooses `ref`
//! curl 127.0.0.1:8080/orders/42
//! curl 127.0.0.1:8080/metrics
//! ```
//!
//! A payment is answered with 200 if it is in the database, with 409 if another client holds the
//! order, and with 503 if the lock server is unreachable or the lock was lost. It may be sent again
//! after any other answer than 200, and after none: a payment with the same `ref` is made once.
//!
//! One of the instances is the leader, which writes a report. SIGTERM ends an instance cleanly.
//!
//! The tests at the end need no lock server: `cargo test --features testing --example orders`.

use std::{
    env,
    error::Error,
    fmt::Write as _,
    process::{self, ExitCode},
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::Duration,
};

use crossbeam_channel::{after, select, tick};
use distlock::{Config, FencingToken, LockError, LockGuard, RedisMgr};
use nix::sys::signal::{SigSet, Signal};
use rusqlite::{Connection, OptionalExtension, TransactionBehavior, params};
use tiny_http::{Method, Request, Response, Server};

/// Threads that handle requests.
const THREADS: usize = 8;
/// How long orders stay locked if the instance that holds them is killed.
const TTL: Duration = Duration::from_secs(3);
/// How long a request waits for an order that another request holds.
const WAIT: Duration = Duration::from_secs(1);
/// How long the payment provider takes.
const CHARGE_DURATION: Duration = Duration::from_millis(50);
const REPORT_INTERVAL: Duration = Duration::from_millis(500);

/// `fence` is the largest token that has written to a row: a 64-bit number, and never `NULL`.
const TABLES: &str = "\
CREATE TABLE IF NOT EXISTS orders (
    id       INTEGER PRIMARY KEY,
    payments INTEGER NOT NULL,
    fence    INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS payments (
    number    INTEGER PRIMARY KEY,
    reference TEXT    NOT NULL UNIQUE,
    order_id  INTEGER NOT NULL,
    fence     INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS report (
    id       INTEGER PRIMARY KEY,
    payments INTEGER NOT NULL,
    pid      INTEGER NOT NULL,
    fence    INTEGER NOT NULL
);";

/// Claims a row and reads it, in one statement. From now on, the row rejects earlier holders of the
/// lock. So what was read stays true until the next holder claims the row, which rejects us.
const CLAIM_ORDER: &str = "\
INSERT INTO orders (id, payments, fence) VALUES (:id, 0, :token)
ON CONFLICT (id) DO UPDATE SET fence = excluded.fence WHERE orders.fence <= excluded.fence
RETURNING payments";

const UPDATE_ORDER: &str = "\
UPDATE orders SET payments = :payments, fence = :token WHERE id = :id AND fence <= :token";

const WRITE_REPORT: &str = "\
INSERT INTO report (id, payments, pid, fence)
VALUES (1, (SELECT count(*) FROM payments), :pid, :token)
ON CONFLICT (id) DO UPDATE
   SET payments = excluded.payments, pid = excluded.pid, fence = excluded.fence
 WHERE report.fence <= excluded.fence";

type Result<T = ()> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Status and body.
type Answer = (u16, String);

fn main() -> ExitCode {
    // The library logs lost locks, unreachable servers and the like.
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("info")).init();
    let args: Vec<String> = env::args().skip(1).collect();
    let outcome = match &args[..] {
        [address, database] => run(address, database),
        _ => Err("usage: orders ADDRESS:PORT DATABASE".into()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(address: &str, database: &str) -> Result {
    // All threads inherit the mask, so that the signals wait for `SigSet::wait`.
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTERM);
    signals.add(Signal::SIGINT);
    signals.thread_block()?;

    // A single manager serves all threads.
    let mgr = RedisMgr::new(Config::from_env().ttl(TTL))?;
    // One instance at a time sets up the database.
    mgr.with_lock("orders:tables", |_| -> Result {
        open(database)?.execute_batch(&format!("PRAGMA journal_mode = WAL; {TABLES}"))?;
        Ok(())
    })??;
    let http = Server::http(address)?;
    println!("listening on {}", http.server_addr());

    let service = Service {
        mgr,
        http,
        charge: Box::new(charge),
        is_leader: AtomicBool::new(false),
        stale_writes: AtomicU64::new(0),
    };
    let mut connections =
        (0..=THREADS).map(|_| open(database)).collect::<Result<Vec<Connection>>>()?;
    let leader_connection = connections.remove(0);
    thread::scope(|threads| -> Result {
        let service = &service;
        threads.spawn(move || service.stand_for_leader(&leader_connection));
        let handlers: Vec<_> = connections
            .into_iter()
            .map(|connection| threads.spawn(move || service.handle_requests(connection)))
            .collect();
        let signal = signals.wait()?;
        log::info!("{signal}: finishing the requests that have begun");
        // Each call ends one thread, once it has handled its request.
        handlers.iter().for_each(|_| service.http.unblock());
        let panics = handlers.into_iter().filter_map(|handler| handler.join().err()).count();
        // Ends the leader thread, whether it has the lock or waits for it.
        service.mgr.shutdown();
        if panics == 0 { Ok(()) } else { Err(format!("{panics} threads panicked").into()) }
    })
}

fn open(database: &str) -> Result<Connection> {
    let connection = Connection::open(database)?;
    connection.busy_timeout(Duration::from_secs(5))?;
    Ok(connection)
}

struct Service {
    mgr: RedisMgr,
    http: Server,
    /// Requests the money from the payment provider. A test replaces it.
    charge: Box<dyn Fn() + Send + Sync>,
    is_leader: AtomicBool,
    /// Writes that the database rejected because a later holder of the lock had written.
    stale_writes: AtomicU64,
}

impl Service {
    fn handle_requests(&self, mut connection: Connection) {
        while let Ok(request) = self.http.recv() {
            let (status, body) = self.answer(&request, &mut connection).unwrap_or_else(|error| {
                log::error!("{} {}: {error}", request.method(), request.url());
                (500, error.to_string())
            });
            let response = Response::from_string(body + "\n").with_status_code(status);
            // The client may have gone away.
            let _ = request.respond(response);
        }
    }

    fn answer(&self, request: &Request, connection: &mut Connection) -> Result<Answer> {
        let (path, reference) = request.url().split_once("?ref=").unwrap_or((request.url(), ""));
        let parts: Vec<&str> = path.split('/').skip(1).collect();
        let order = parts.get(1).and_then(|order| order.parse().ok());
        match (request.method(), &parts[..], order) {
            (Method::Get, ["metrics"], _) => Ok((200, self.metrics())),
            (Method::Get, ["orders", _], Some(order)) => self.show(order, connection),
            (Method::Post, ["orders", _, "pay"], Some(order)) if !reference.is_empty() => {
                self.pay(order, reference, connection)
            }
            _ => Ok((404, "try POST /orders/42/pay?ref=A1".into())),
        }
    }

    fn pay(&self, order: u32, reference: &str, connection: &mut Connection) -> Result<Answer> {
        let guard = match self.mgr.try_lock_for(&lock_name(order), WAIT) {
            Ok(guard) => guard,
            // The message names the holder.
            Err(error) if error.is_contended() => return Ok((409, error.to_string())),
            Err(error) if error.is_unavailable() => return Ok((503, error.to_string())),
            Err(error) => return Err(error.into()),
        };
        let token = guard.fencing_token();
        let claimed = connection
            .query_row(CLAIM_ORDER, params![order, token.as_i64()], |row| row.get(0))
            .optional()?;
        let Some(payments): Option<i64> = claimed else { return Ok(self.stale(order, token)) };
        let known: Option<i64> = connection
            .query_row("SELECT fence FROM payments WHERE reference = ?", [reference], |row| {
                row.get(0)
            })
            .optional()?;
        if let Some(fence) = known {
            return Ok((200, format!("{reference} was paid before, token {fence}")));
        }
        (self.charge)();
        // Nothing is gained by a look at `guard.is_held()` here: this thread could be paused right
        // after it. The row compares the tokens.
        let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        if transaction.execute(UPDATE_ORDER, params![payments + 1, token.as_i64(), order])? == 0 {
            return Ok(self.stale(order, token));
        }
        transaction.execute(
            "INSERT INTO payments (reference, order_id, fence) VALUES (?, ?, ?)",
            params![reference, order, token.as_i64()],
        )?;
        transaction.commit()?;
        Ok((200, format!("{reference} is paid, token {token}")))
        // Dropping the guard releases the lock.
    }

    /// The answer to a payment whose lock was lost to another holder.
    fn stale(&self, order: u32, token: FencingToken) -> Answer {
        self.stale_writes.fetch_add(1, Ordering::Relaxed);
        (503, format!("order {order} was taken over while it had token {token}; try again"))
    }

    fn show(&self, order: u32, connection: &Connection) -> Result<Answer> {
        let payments: Option<i64> = connection
            .query_row("SELECT payments FROM orders WHERE id = ?", [order], |row| row.get(0))
            .optional()?;
        // The order can be shown even if the lock server is unreachable.
        let holder = match self.mgr.holder(&lock_name(order)) {
            Ok(Some(holder)) => format!("held by {holder}"),
            Ok(None) => "not held".into(),
            Err(error) => error.to_string(),
        };
        Ok((200, format!("order {order}: {} payments; {holder}", payments.unwrap_or(0))))
    }

    /// The text format of Prometheus. The names are those of docs/metrics.md. With the feature
    /// `metrics` and an exporter, one gets all of them, with the histograms.
    fn metrics(&self) -> String {
        let metrics = self.mgr.metrics();
        let rows = [
            ("distlock_lock_acquired_total", "counter", metrics.acquired()),
            ("distlock_lock_contended_total", "counter", metrics.contended()),
            ("distlock_lock_timed_out_total", "counter", metrics.timed_out()),
            ("distlock_lock_failed_total", "counter", metrics.failed()),
            ("distlock_lock_lost_total", "counter", metrics.lost()),
            ("distlock_renewal_failed_total", "counter", metrics.renewals_failed()),
            ("distlock_locks_held", "gauge", metrics.held()),
            ("distlock_locks_waiting", "gauge", metrics.waiting()),
            ("distlock_nodes_reachable", "gauge", metrics.nodes_reachable()),
            ("orders_is_leader", "gauge", self.is_leader.load(Ordering::Relaxed).into()),
            ("orders_stale_writes_total", "counter", self.stale_writes.load(Ordering::Relaxed)),
        ];
        rows.iter().fold(String::new(), |mut text, (name, kind, value)| {
            let _ = writeln!(text, "# TYPE {name} {kind}\n{name} {value}");
            text
        })
    }

    /// Waits to become the leader, and leads; until the manager is shut down.
    fn stand_for_leader(&self, connection: &Connection) {
        loop {
            match self.mgr.lock("orders:leader") {
                Ok(guard) => {
                    self.is_leader.store(true, Ordering::Relaxed);
                    log::info!("leads, token {}", guard.fencing_token());
                    let reason = self.lead(&guard, connection);
                    self.is_leader.store(false, Ordering::Relaxed);
                    log::info!("leads no longer: {reason}");
                }
                Err(LockError::Shutdown) => return,
                Err(error) => {
                    log::warn!("cannot become the leader: {error}");
                    let _ = after(Duration::from_secs(1)).recv();
                }
            }
        }
    }

    /// Writes a report now and then. Returns why that ended.
    fn lead(&self, guard: &LockGuard, connection: &Connection) -> String {
        let token = guard.fencing_token();
        let timer = tick(REPORT_INTERVAL);
        loop {
            select! {
                recv(guard.lost()) -> reason => {
                    return reason.map_or_else(|error| error.to_string(), |why| why.to_string());
                }
                recv(timer) -> _ => {
                    match connection.execute(WRITE_REPORT, params![process::id(), token.as_i64()]) {
                        Ok(0) => {
                            self.stale_writes.fetch_add(1, Ordering::Relaxed);
                            return "a later leader has written".into();
                        }
                        Ok(_) => {}
                        Err(error) => log::warn!("no report: {error}"),
                    }
                }
            }
        }
    }
}

fn lock_name(order: u32) -> String {
    format!("orders:{order}")
}

/// Takes the place of the request to the payment provider. The provider knows nothing of tokens: a
/// real request carries the payment's reference, by which the provider recognises a repetition.
fn charge() {
    let _ = after(CHARGE_DURATION).recv();
}

/// docs/testing.md explains these tests.
#[cfg(all(test, feature = "testing"))]
mod tests {
    use std::path::Path;

    use distlock::testing::MemoryServer;
    use tempfile::TempDir;

    use super::*;

    const OTHER: &str = "otherhost|pid7|tid7|ts1";
    const MINUTE: Duration = Duration::from_secs(60);

    /// A service whose lock server is in memory, and its database.
    struct Setup {
        locks: MemoryServer,
        service: Service,
        connection: Connection,
        folder: TempDir,
    }

    impl Setup {
        fn new() -> Setup {
            let (locks, folder) = (MemoryServer::new(), TempDir::new().unwrap());
            let service = Service {
                mgr: locks.manager_with(|config| config.ttl(TTL)),
                http: Server::http("127.0.0.1:0").unwrap(),
                charge: Box::new(|| {}),
                is_leader: AtomicBool::new(false),
                stale_writes: AtomicU64::new(0),
            };
            let connection = open_database(folder.path());
            connection.execute_batch(TABLES).unwrap();
            Setup { locks, service, connection, folder }
        }

        fn pay(&mut self) -> Answer {
            self.service.pay(42, "A1", &mut self.connection).unwrap()
        }

        fn payments(&self) -> i64 {
            let count = "SELECT count(*) FROM payments";
            self.connection.query_row(count, [], |row| row.get(0)).unwrap()
        }
    }

    fn open_database(folder: &Path) -> Connection {
        open(folder.join("orders.db").to_str().unwrap()).unwrap()
    }

    #[test]
    fn payment_sent_twice_is_made_once() {
        let mut setup = Setup::new();
        assert_eq!(setup.pay().0, 200);
        assert_eq!(setup.pay().0, 200);
        assert_eq!(setup.payments(), 1);
    }

    #[test]
    fn payment_of_a_held_order_is_answered_with_409() {
        let mut setup = Setup::new();
        setup.locks.hold("orders:42", OTHER, MINUTE);
        let (status, body) = setup.pay(); // waits for `WAIT`, which takes no time
        assert_eq!(status, 409, "{body}");
        assert!(body.contains("otherhost"), "{body}");
        setup.locks.advance(MINUTE);
        assert_eq!(setup.pay().0, 200, "the other holder has died");
    }

    #[test]
    fn payment_without_a_lock_server_is_answered_with_503() {
        let mut setup = Setup::new();
        setup.locks.stop();
        assert_eq!(setup.pay().0, 503);
        setup.locks.resume();
        assert_eq!(setup.pay().0, 200);
    }

    /// The lock server may have carried out the request whose reply is late.
    #[test]
    fn payment_with_a_slow_lock_server_is_answered_with_503() {
        let mut setup = Setup::new();
        setup.locks.slow(MINUTE);
        assert_eq!(setup.pay().0, 503);
        setup.locks.resume();
        setup.locks.advance(TTL); // the manager cleans up, or the lock expires
        assert_eq!(setup.pay().0, 200);
        assert_eq!(setup.payments(), 1);
    }

    #[test]
    fn payment_is_rejected_if_the_lock_is_lost_meanwhile() {
        let mut setup = Setup::new();
        let (locks, other) = (setup.locks.clone(), setup.locks.manager());
        let path = setup.folder.path().to_owned();
        // While we pay, another instance gets the lock and claims the row.
        setup.service.charge = Box::new(move || {
            assert!(locks.take_away("orders:42"));
            let token = other.try_lock("orders:42").unwrap().fencing_token();
            let claimed =
                open_database(&path).query_row(CLAIM_ORDER, params![42, token.as_i64()], |row| {
                    row.get::<_, i64>(0)
                });
            assert_eq!(claimed, Ok(0));
        });
        let (status, body) = setup.pay();
        assert_eq!(status, 503, "{body}");
        assert_eq!(setup.payments(), 0);
        assert_eq!(setup.service.stale_writes.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn leader_stops_leading_if_it_loses_the_lock() {
        let setup = Setup::new();
        let guard = setup.service.mgr.try_lock("orders:leader").unwrap();
        setup.locks.hold("orders:leader", OTHER, MINUTE);
        setup.locks.advance(TTL); // the next renewal reports the loss
        let reason = setup.service.lead(&guard, &setup.connection);
        assert!(reason.contains("otherhost"), "{reason}");
    }
}
