//! A logger that acquires a lock, while its thread opens the manager's subscription.

use std::{
    collections::HashMap,
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use distlock::{ContendedEvent, HandleEvent, LockGuard, RedisMgr};
use parking_lot::Mutex;

use crate::{
    helpers::{SECOND, UnwrapReleased, config_long_timeouts, in_own_process, manager},
    support::{RedisServer, TEST_TIMEOUT},
};

type Action = Box<dyn FnOnce() + Send>;

/// Run by the waiter's thread when it logs the next connection.
static NEXT: Mutex<Option<Action>> = Mutex::new(None);
const WAITER: &str = "waiter";

struct ActingLogger;

impl log::Log for ActingLogger {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        if thread::current().name() == Some(WAITER)
            && record.args().to_string().starts_with("connected to ")
        {
            let action = NEXT.lock().take();
            action.into_iter().for_each(|action| action());
        }
    }

    fn flush(&self) {}
}

#[derive(Debug)]
struct SendsContended(Mutex<mpsc::Sender<String>>);

impl HandleEvent for SendsContended {
    fn contended(&self, event: &ContendedEvent<'_>) {
        self.0.lock().send(event.lock().to_owned()).unwrap();
    }
}

/// A manager, and locks that another manager holds.
struct Fixture {
    mgr: RedisMgr,
    contended: mpsc::Receiver<String>,
    acquired: mpsc::Receiver<&'static str>,
    acquired_sender: mpsc::Sender<&'static str>,
    held: HashMap<&'static str, LockGuard>,
    _server: RedisServer,
}

impl Fixture {
    fn new(operation_timeout: Duration) -> Fixture {
        let server = RedisServer::start();
        let holder = manager(&server);
        let held = ["x", "log", "other"].map(|name| (name, holder.lock(name).unwrap())).into();
        let (contended_sender, contended) = mpsc::channel();
        let events = Arc::new(SendsContended(Mutex::new(contended_sender)));
        let mgr = RedisMgr::new(
            config_long_timeouts(server.url())
                .operation_timeout(operation_timeout)
                .event_handler(events),
        )
        .unwrap();
        // From here on, only the subscription is a new connection.
        mgr.lock("warm").unwrap().release().unwrap().unwrap_released();
        let (acquired_sender, acquired) = mpsc::channel();
        Fixture { mgr, contended, acquired, acquired_sender, held, _server: server }
    }

    /// Returns a function that acquires a lock, and then sends `label`.
    fn acquire(&self, name: &'static str, label: &'static str) -> impl FnOnce() + Send + 'static {
        let (mgr, sender) = (self.mgr.clone(), self.acquired_sender.clone());
        move || {
            drop(mgr.lock(name).unwrap());
            sender.send(label).unwrap();
        }
    }

    /// Starts a thread that waits for `x`, and whose logger waits for the nested lock.
    #[track_caller]
    fn nest(&self, nested: &'static str) {
        *NEXT.lock() = Some(Box::new(self.acquire(nested, "in the logger")));
        thread::Builder::new().name(WAITER.into()).spawn(self.acquire("x", "outside")).unwrap();
        self.expect_contended("x");
        self.expect_contended(nested);
    }

    #[track_caller]
    fn expect_contended(&self, name: &str) {
        assert_eq!(self.contended.recv_timeout(TEST_TIMEOUT).expect("it waits for the lock"), name);
    }

    #[track_caller]
    fn release(&mut self, name: &str, next: &str) {
        self.held
            .remove(name)
            .into_iter()
            .for_each(|guard| guard.release().unwrap().unwrap_released());
        let acquired = self.acquired.recv_timeout(TEST_TIMEOUT / 2);
        assert_eq!(acquired.expect("the next waiter hangs"), next);
    }
}

fn install_logger() {
    log::set_logger(&ActingLogger).unwrap();
    log::set_max_level(log::LevelFilter::Debug);
}

/// The logger waits for another lock than its thread, or for the same one.
///
/// Fault: N99
#[test]
fn logger_may_wait_for_a_lock_before_its_thread_waits() {
    if !in_own_process(
        "faults::process::nested::logger_may_wait_for_a_lock_before_its_thread_waits",
        &[],
    ) {
        return;
    }
    install_logger();
    for nested in ["log", "x"] {
        // With this timeout, any wait for a timeout would fail the test.
        let mut fixture = Fixture::new(TEST_TIMEOUT);
        fixture.nest(nested);
        fixture.release(nested, "in the logger");
        fixture.release("x", "outside");
    }
}

/// Fault: N99
#[test]
fn logger_that_waits_blocks_no_other_thread() {
    if !in_own_process("faults::process::nested::logger_that_waits_blocks_no_other_thread", &[]) {
        return;
    }
    install_logger();
    let mut fixture = Fixture::new(2 * SECOND);
    fixture.nest("log");
    thread::spawn(fixture.acquire("other", "meanwhile"));
    fixture.expect_contended("other");
    fixture.release("other", "meanwhile");
    fixture.release("log", "in the logger");
    fixture.release("x", "outside");
}
