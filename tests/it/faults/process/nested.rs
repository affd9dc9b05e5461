//! A logger that acquires a lock, or blocks, while a thread opens the manager's subscription.

use std::{sync::mpsc, thread};

use distlock::RedisMgr;
use parking_lot::Mutex;

use crate::{
    helpers::{UnwrapReleased, await_queue_length, config_long_timeouts, in_own_process, manager},
    support::{RedisServer, TEST_TIMEOUT},
};

type Action = Box<dyn FnOnce() + Send>;

/// Run when the next connection is logged.
static NEXT: Mutex<Option<Action>> = Mutex::new(None);

struct ActingLogger;

impl log::Log for ActingLogger {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        if record.args().to_string().starts_with("connected to ") {
            let action = NEXT.lock().take();
            action.into_iter().for_each(|action| action());
        }
    }

    fn flush(&self) {}
}

/// The logger waits for another lock than the thread whose connection it logs, or for the same one.
/// With this operation timeout, any wait for a timeout would fail the test.
///
/// Fault: N99
#[test]
fn logger_that_waits_for_a_lock_delays_no_waiter() {
    let name = "faults::process::nested::logger_that_waits_for_a_lock_delays_no_waiter";
    if !in_own_process(name, &[]) {
        return;
    }
    log::set_logger(&ActingLogger).unwrap();
    log::set_max_level(log::LevelFilter::Debug);
    for nested in ["log", "x"] {
        let server = RedisServer::start();
        let holder = manager(&server);
        let held = ["x", "other", "log"].map(|name| holder.lock(name).unwrap());
        let mgr = RedisMgr::new(config_long_timeouts(server.url()).operation_timeout(TEST_TIMEOUT))
            .unwrap();
        // From here on, only the subscription is a new connection.
        mgr.lock("warm").unwrap().release().unwrap().unwrap_released();
        let (sender, acquired) = mpsc::channel();
        let acquire = |name: &'static str, label: &'static str| {
            let (mgr, sender) = (mgr.clone(), sender.clone());
            move || {
                drop(mgr.lock(name).unwrap());
                sender.send(label).unwrap();
            }
        };
        *NEXT.lock() = Some(Box::new(acquire(nested, "in the logger")));
        let expect = |labels: &[&str]| {
            let next = || acquired.recv_timeout(TEST_TIMEOUT / 2).expect("a waiter hangs");
            let mut found: Vec<_> = labels.iter().map(|_| next()).collect();
            found.sort_unstable();
            assert_eq!(found, labels);
        };
        thread::spawn(acquire("x", "outside"));
        thread::spawn(acquire("other", "meanwhile"));
        // The threads and the logger wait.
        let [x, meanwhile, log] = held;
        let waiters = if nested == "x" { 2 } else { 1 };
        await_queue_length(&server, "x", waiters);
        await_queue_length(&server, "other", 1);
        await_queue_length(&server, nested, waiters);
        meanwhile.release().unwrap().unwrap_released();
        expect(&["meanwhile"]);
        x.release().unwrap().unwrap_released();
        if nested == "x" {
            expect(&["in the logger", "outside"]);
        } else {
            expect(&["outside"]);
            log.release().unwrap().unwrap_released();
            expect(&["in the logger"]);
        }
    }
}
