//! Three instances of the example `orders`, while they are killed, stopped and started again.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, ExitStatus, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use distlock_test_support::process_state;
use parking_lot::Mutex;
use rusqlite::{Connection, OptionalExtension};
use rustix::process::{Pid, Signal, kill_process};

use super::{
    common::{Cleanup, Server, http, sleep},
    eventually, program,
};

const INSTANCES: usize = 3;
const CLIENTS: usize = 6;
/// Fewer than clients, so that clients meet at an order.
const ORDERS: u32 = 4;
/// The order that a stopped instance works on.
const ORDER_OF_STOPPED: u32 = 1000;
/// How often an instance is stopped until that happens while it has the lock.
const STOPS_MAX: u32 = 100;
/// Payments between two faults.
const PAYMENTS: usize = 25;

/// One process of the example. Dropping it kills the process; the process is also killed when the
/// test dies.
struct Instance<'a> {
    child: Child,
    addr: SocketAddr,
    log: PathBuf,
    cleanup: &'a Cleanup,
    _stdout: BufReader<ChildStdout>,
}

impl<'a> Instance<'a> {
    fn start(server: &Server<'_>, cleanup: &'a Cleanup) -> Instance<'a> {
        let log = tempfile::NamedTempFile::new_in(cleanup.folder()).unwrap().keep().unwrap().1;
        let mut child = Command::new(program("orders"))
            .arg("127.0.0.1:0")
            .arg(database(cleanup))
            .env("DISTLOCK_URL", server.url())
            .env_remove("RUST_LOG")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(File::create(&log).unwrap())
            .spawn()
            .expect("the example can be run");
        cleanup.register(child.id()).unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        let addr = line.trim().rsplit(' ').next().and_then(|addr| addr.parse().ok());
        let addr = addr.unwrap_or_else(|| {
            panic!("no address: {line:?}\n{}", fs::read_to_string(&log).unwrap_or_default())
        });
        Instance { child, addr, log, cleanup, _stdout: stdout }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("it runs");
    }

    fn metric(&self, name: &str) -> Option<u64> {
        let (_, text) = http::send(self.addr, "GET", "/metrics").ok()?;
        text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
    }

    /// Waits until the process has ended on its own.
    fn wait(&mut self) -> ExitStatus {
        let pid = self.child.id();
        eventually("the instance has ended", || process_state(pid) == Some('Z'));
        self.cleanup.unregister(pid).unwrap();
        self.child.wait().unwrap()
    }
}

impl Drop for Instance<'_> {
    fn drop(&mut self) {
        let _ = self.cleanup.unregister(self.child.id());
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            let log = fs::read_to_string(&self.log).unwrap_or_default();
            eprintln!("--- log of process {}\n{log}", self.child.id());
        }
    }
}

/// A payment that was answered with 200.
struct Paid {
    order: u32,
    reference: String,
    token: i64,
}

/// What the clients share with the test.
struct Clients {
    addrs: Mutex<Vec<SocketAddr>>,
    paid: Mutex<Vec<Paid>>,
    unexpected: Mutex<Vec<String>>,
    done: AtomicBool,
}

impl Clients {
    /// Pays one order after the other, each through any of the instances.
    fn pay_orders(&self, client: usize) {
        for number in 0.. {
            let reference = format!("{client}-{number}");
            if !self.pay(fastrand::u32(1..=ORDERS), &reference, || {
                self.addrs.lock()[fastrand::usize(..INSTANCES)]
            }) {
                return;
            }
        }
    }

    /// Sends a payment until it is answered with 200. Returns false if the test has ended before.
    fn pay(&self, order: u32, reference: &str, addr: impl Fn() -> SocketAddr) -> bool {
        while !self.done.load(Ordering::SeqCst) {
            match http::send(addr(), "POST", &format!("/orders/{order}/pay?ref={reference}")) {
                Ok((200, body)) => {
                    let token = body.trim().rsplit(' ').next().and_then(|token| token.parse().ok());
                    let token = token.unwrap_or_else(|| panic!("no token in {body:?}"));
                    self.paid.lock().push(Paid { order, reference: reference.into(), token });
                    return true;
                }
                Ok((409, body)) if body.contains("held by") => {}
                Ok((503, _)) => {}
                // A database that stays locked is a slow machine's.
                Ok((500, body)) if body.contains("database is locked") => {}
                Ok((status, body)) => self.unexpected.lock().push(format!("{status}: {body}")),
                // The instance is down.
                Err(_) => sleep(Duration::from_millis(5)),
            }
        }
        false
    }

    /// Waits until some more payments have succeeded.
    fn go_on(&self) {
        let before = self.paid.lock().len();
        eventually("payments succeed", || self.paid.lock().len() >= before + PAYMENTS);
    }
}

/// Ends the clients, also when the test fails.
struct EndOnDrop<'a>(&'a AtomicBool);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

fn database(cleanup: &Cleanup) -> PathBuf {
    cleanup.folder().join("orders.db")
}

fn open(database: &Path) -> Connection {
    let connection = Connection::open(database).unwrap();
    connection.busy_timeout(Duration::from_secs(5)).unwrap();
    connection
}

/// The process that wrote the last report, and its token.
fn last_report(db: &Connection) -> Option<(u32, i64)> {
    db.query_row("SELECT pid, fence FROM report", [], |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()
        .unwrap()
}

fn is_paid(db: &Connection, reference: &str) -> bool {
    db.prepare("SELECT 1 FROM payments WHERE reference = ?").unwrap().exists([reference]).unwrap()
}

fn holder(server: &Server<'_>, lock: &str) -> Option<u32> {
    server.mgr().holder(lock).unwrap()?.pid()
}

/// Stops an instance between claiming an order and writing the payment, lets another instance pay
/// the order, and continues the first one. Returns the reference of the payment that was too late.
fn stop_past_the_lease(
    clients: &Clients,
    stopped: &Instance<'_>,
    other: &Instance<'_>,
    server: &Server<'_>,
    db: &Connection,
) -> String {
    let lock = format!("orders:{ORDER_OF_STOPPED}");
    let pid = stopped.child.id();
    for attempt in 1..=STOPS_MAX {
        let reference = format!("stopped-{attempt}");
        let path = format!("/orders/{ORDER_OF_STOPPED}/pay?ref={reference}");
        let addr = stopped.addr;
        let request = thread::spawn(move || http::send(addr, "POST", &path));
        eventually("the instance has the lock, or had it", || {
            holder(server, &lock) == Some(pid) || request.is_finished()
        });
        stopped.signal(Signal::STOP);
        eventually("the instance is stopped", || process_state(pid) == Some('T'));
        // An instance that is stopped while it writes keeps the database locked.
        let is_writable = db.execute_batch("BEGIN IMMEDIATE; ROLLBACK").is_ok();
        if is_writable && holder(server, &lock) == Some(pid) && !is_paid(db, &reference) {
            let after = format!("after-{reference}");
            assert!(clients.pay(ORDER_OF_STOPPED, &after, || other.addr));
            stopped.signal(Signal::CONT);
            match request.join().unwrap() {
                // It was stopped before it read that it has the lock.
                Ok((503, body)) if body.contains("could not acquire") => continue,
                Ok((status, body)) => {
                    assert_eq!(status, 503, "{body}");
                    assert!(body.contains("was taken over"), "{body}");
                }
                // A request that takes longer than 20 s is given up, on a slow machine.
                Err(_) => {}
            }
            eventually("the database has rejected the late write", || {
                stopped.metric("orders_stale_writes_total").is_some_and(|count| count > 0)
            });
            return reference;
        }
        stopped.signal(Signal::CONT);
        let _ = request.join().unwrap();
    }
    panic!("no instance was stopped while it had the lock");
}

fn check_database(db: &Connection, paid: &[Paid]) {
    let mut statement =
        db.prepare("SELECT fence FROM payments WHERE order_id = ? ORDER BY number").unwrap();
    for order in (1..=ORDERS).chain([ORDER_OF_STOPPED]) {
        let fences: Vec<i64> =
            statement.query_map([order], |row| row.get(0)).unwrap().map(Result::unwrap).collect();
        assert!(
            fences.is_sorted_by(|earlier, later| earlier < later),
            "each payment of order {order} has a larger token than the one before: {fences:?}"
        );
        let stored: (u32, i64) = db
            .query_row("SELECT payments, fence FROM orders WHERE id = ?", [order], |row| {
                Ok((row.get(0)?, row.get(1)?))
            })
            .unwrap();
        assert_eq!(stored.0 as usize, fences.len(), "no update of order {order} is lost");
        assert!(Some(&stored.1) >= fences.last(), "order {order}: {stored:?}, {fences:?}");
    }
    for Paid { order, reference, token } in paid {
        let stored: Option<(u32, i64)> = db
            .query_row(
                "SELECT order_id, fence FROM payments WHERE reference = ?",
                [reference],
                |row| Ok((row.get(0)?, row.get(1)?)),
            )
            .optional()
            .unwrap();
        assert_eq!(stored, Some((*order, *token)), "payment {reference} is as it was answered");
    }
}

#[test]
fn orders_are_right_while_instances_are_killed_and_stopped() {
    let cleanup = Cleanup::start().expect("sh can be run");
    let server = Server::start(&cleanup).expect("a server can be started");
    let mut instances: Vec<_> =
        (0..INSTANCES).map(|_| Instance::start(&server, &cleanup)).collect();
    let db = open(&database(&cleanup));
    let clients = Clients {
        addrs: Mutex::new(instances.iter().map(|instance| instance.addr).collect()),
        paid: Mutex::default(),
        unexpected: Mutex::default(),
        done: AtomicBool::new(false),
    };
    let replace = |instances: &mut Vec<_>, at: usize| {
        // The old process is killed here.
        instances[at] = Instance::start(&server, &cleanup);
        clients.addrs.lock()[at] = instances[at].addr;
    };

    let late = thread::scope(|threads| {
        let _end = EndOnDrop(&clients.done);
        for client in 0..CLIENTS {
            let clients = &clients;
            threads.spawn(move || clients.pay_orders(client));
        }
        clients.go_on();

        eventually("a leader has written", || last_report(&db).is_some());
        let (leader, token) = last_report(&db).unwrap();
        let at = instances.iter().position(|instance| instance.child.id() == leader).unwrap();
        instances[at].signal(Signal::KILL);
        eventually("another instance is the leader", || {
            last_report(&db).is_some_and(|(pid, later)| pid != leader && later > token)
        });
        let (leader, _) = last_report(&db).unwrap();
        let leads = |instance: &Instance<'_>| instance.metric("orders_is_leader") == Some(1);
        let at_new = instances.iter().position(|instance| instance.child.id() == leader).unwrap();
        eventually("it says so", || leads(&instances[at_new]));
        replace(&mut instances, at);
        clients.go_on();

        for at in 0..INSTANCES {
            instances[at].signal(Signal::KILL);
            clients.go_on();
            replace(&mut instances, at);
        }

        let late = stop_past_the_lease(&clients, &instances[0], &instances[1], &server, &db);
        clients.go_on();
        eventually("there is a leader again", || instances.iter().any(leads));
        late
    });

    for instance in &mut instances {
        instance.signal(Signal::TERM);
        assert_eq!(instance.wait().code(), Some(0), "a clean shutdown");
    }
    let pids: Vec<_> = instances.iter().map(|instance| Some(instance.child.id())).collect();
    let left = server.mgr().locks("orders:*").unwrap();
    assert!(!left.iter().any(|lock| pids.contains(&lock.holder().pid())), "{left:#?}");
    assert!(!is_paid(&db, &late), "the late write was rejected");
    let unexpected = clients.unexpected.into_inner();
    assert!(unexpected.is_empty(), "{unexpected:#?}");
    check_database(&db, &clients.paid.into_inner());
}
