//! A logger is code of the user's: one that panics, as `eprintln!` does when nobody reads any more,
//! costs no lock.

use std::{panic, thread};

use distlock::{LockLost, RedisMgr};

use crate::faults::{LOCK, is_renewed};
use crate::{
    helpers::{
        CALL_LIMIT, SECOND, UnwrapReleased, completes_within, config_short_timeout, expect_loss,
        get, in_own_process, manager, spawn_queued_waiter, with_ttl,
    },
    support::{CEILING, RedisServer, eventually},
};

struct Wild;

impl log::Log for Wild {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        if record.target().starts_with("distlock") {
            panic::panic_any(Nothing);
        }
    }

    fn flush(&self) {}
}

/// What the panics bring along, which panics again when it is dropped.
struct Nothing;

impl Drop for Nothing {
    fn drop(&mut self) {
        panic::panic_any("dropped");
    }
}

#[test]
fn a_logger_that_panics_costs_no_lock() {
    if !in_own_process("faults::logger::a_logger_that_panics_costs_no_lock", &[]) {
        return;
    }
    let server = RedisServer::start();
    let tell = panic::take_hook();
    // Only what is not on purpose.
    panic::set_hook(Box::new(move |told| {
        if !told.payload().is::<Nothing>() {
            tell(told);
        }
    }));
    log::set_logger(&Wild).unwrap();
    log::set_max_level(log::LevelFilter::Trace);

    let mgr = RedisMgr::new(config_short_timeout(server.url())).unwrap();
    let guards =
        ["a", "b", "c", "x"].map(|name| mgr.lock_with(name, &with_ttl(3 * SECOND)).unwrap());
    let [a, b, c, x] = guards;
    // The renewer tells of losses.
    server.cli(&["DEL", "lock:a"]);
    server.cli(&["SET", "lock:b", "a stranger"]);
    assert_eq!(expect_loss(&a), LockLost::Gone);
    assert!(matches!(expect_loss(&b), LockLost::Taken { .. }));
    is_renewed(&server, &c, 3);
    is_renewed(&server, &x, 3);
    // Whoever listens tells that the line broke.
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    assert!(server.kill_clients(&["TYPE", "pubsub"]) > 0);
    eventually("it is back", CEILING, || {
        server.clients().iter().any(|client| client["sub"] == "1")
    });
    x.release().unwrap().unwrap_released();
    let x = waiting.join().unwrap().unwrap();
    // A guard that is dropped on the way out of a panic tells that it could not be released.
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
    eventually("it was taken back, or is left to expire", CEILING, || {
        get(&server, "lock:c").is_none()
    });
    drop(manager(&server).lock("c").unwrap());
    assert_ne!(get(&server, LOCK).as_deref(), Some("a stranger"));
}
