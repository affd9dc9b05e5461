//! A logger of the user that panics, as `eprintln!` does if its output cannot be written, must not
//! cost a lock.

use std::{panic, thread};

use distlock::{LockLost, RedisMgr};

use crate::faults::{LOCK, expect_renewals};
use crate::{
    helpers::{
        CALL_LIMIT, SECOND, UnwrapReleased, completes_within, config_short_timeout, expect_loss,
        get, in_own_process, manager, spawn_queued_waiter, with_ttl,
    },
    support::{RedisServer, TEST_TIMEOUT, eventually},
};

struct PanickingLogger;

impl log::Log for PanickingLogger {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        if record.target().starts_with("distlock") {
            panic::panic_any(PanicsOnDrop);
        }
    }

    fn flush(&self) {}
}

/// The payload of the panics, which panics again when it is dropped.
struct PanicsOnDrop;

impl Drop for PanicsOnDrop {
    fn drop(&mut self) {
        panic::panic_any("dropped");
    }
}

/// Fault: F13, N16, N17
#[test]
fn panicking_logger_costs_no_lock() {
    if !in_own_process("faults::process::logger::panicking_logger_costs_no_lock", &[]) {
        return;
    }
    let server = RedisServer::start();
    let print = panic::take_hook();
    // Print only the panics that are not on purpose.
    panic::set_hook(Box::new(move |info| {
        if !info.payload().is::<PanicsOnDrop>() {
            print(info);
        }
    }));
    log::set_logger(&PanickingLogger).unwrap();
    log::set_max_level(log::LevelFilter::Trace);

    let mgr = RedisMgr::new(config_short_timeout(server.url())).unwrap();
    let guards =
        ["a", "b", "c", "x"].map(|name| mgr.lock_with(name, &with_ttl(3 * SECOND)).unwrap());
    let [a, b, c, x] = guards;
    // The renewer logs losses.
    server.cli(&["DEL", "lock:a"]);
    server.cli(&["SET", "lock:b", "other client"]);
    assert_eq!(expect_loss(&a), LockLost::Gone);
    assert!(matches!(expect_loss(&b), LockLost::Taken { .. }));
    expect_renewals(&server, &c, 3);
    expect_renewals(&server, &x, 3);
    // A waiter logs that it has lost the subscription.
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    assert!(server.kill_clients(&["TYPE", "pubsub"]) > 0);
    eventually("it is subscribed again", TEST_TIMEOUT, || {
        server.clients().iter().any(|client| client["sub"] == "1")
    });
    x.release().unwrap().unwrap_released();
    let x = waiting.join().unwrap().unwrap();
    // A guard that is dropped during a panic logs that it could not be released.
    server.stop();
    let panicked = thread::spawn(move || {
        let _guard = x;
        panic::resume_unwind(Box::new("work went wrong"));
    });
    assert!(panicked.join().is_err_and(|panic| panic.is::<&str>()), "another panic came first");
    completes_within(2 * CALL_LIMIT, "shutdown", || mgr.shutdown());
    drop((a, b, c));
    server.cont();
    drop(mgr);
    eventually("it is cleaned up or has expired", TEST_TIMEOUT, || {
        get(&server, "lock:c").is_none()
    });
    drop(manager(&server).lock("c").unwrap());
    assert_ne!(get(&server, LOCK).as_deref(), Some("other client"));
}
