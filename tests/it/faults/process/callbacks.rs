//! A user's logger or event handler that releases locks or ends managers on the library's threads.

use std::{
    panic,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use distlock::{HandleEvent, LockError, LockLost, LostEvent, RedisMgr, RenewedEvent};
use parking_lot::Mutex;

use crate::{
    helpers::{
        CALL_LIMIT, SECOND, completes_within, config_long_timeouts, distlock_threads, get,
        in_own_process, is_renewal, server_behind_proxy, with_ttl,
    },
    support::{Fault, FaultProxy, RedisServer, TEST_TIMEOUT, eventually},
};

type Action = Box<dyn FnOnce() + Send>;

/// Run when the outbox calls the logger next.
static NEXT: Mutex<Option<Action>> = Mutex::new(None);
/// Number of panics.
static PANICS: AtomicUsize = AtomicUsize::new(0);

struct ActingLogger;

impl log::Log for ActingLogger {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, _: &log::Record<'_>) {
        if thread::current().name() == Some("distlock-outbox") {
            let action = NEXT.lock().take();
            action.into_iter().for_each(|action| action());
        }
    }

    fn flush(&self) {}
}

/// Only for a test in its own process.
fn install_logger() {
    let print = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        PANICS.fetch_add(1, Ordering::Relaxed);
        print(info);
    }));
    log::set_logger(&ActingLogger).unwrap();
    log::set_max_level(log::LevelFilter::Warn);
}

/// Runs the action in the logger, when a renewal has failed. Returns when
/// the action has ended.
#[track_caller]
fn on_outbox_thread(proxy: &FaultProxy, action: impl FnOnce() + Send + 'static) {
    let (sender, ended) = mpsc::channel();
    *NEXT.lock() = Some(Box::new(move || {
        action();
        sender.send(()).unwrap();
    }));
    let refused =
        proxy.on_request(is_renewal("lock:x"), Fault::ReplaceReply(b"-ERR not now\r\n".to_vec()));
    let ended = ended.recv_timeout(TEST_TIMEOUT);
    assert_eq!(PANICS.load(Ordering::Relaxed), 0, "it panicked");
    ended.expect("the action hangs");
    assert_eq!(refused.fired(), 1);
}

#[track_caller]
fn expect_clean_end(server: &RedisServer) {
    eventually("the lock is released", TEST_TIMEOUT, || get(server, "lock:x").is_none());
    eventually("its connections are closed", CALL_LIMIT, || server.clients().is_empty());
    eventually("its threads have ended", CALL_LIMIT, || distlock_threads().is_empty());
    assert_eq!(PANICS.load(Ordering::Relaxed), 0, "it panicked");
}

/// Fault: N73
#[test]
fn logger_may_drop_the_last_manager_or_guard() {
    if !in_own_process("faults::process::callbacks::logger_may_drop_the_last_manager_or_guard", &[])
    {
        return;
    }
    install_logger();
    let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    mgr.acquire_lock("x", 3 * SECOND, SECOND).unwrap().unwrap();
    on_outbox_thread(&proxy, move || drop(mgr));
    expect_clean_end(&server);

    let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    let guard = mgr.lock_with("x", &with_ttl(3 * SECOND)).unwrap();
    drop(mgr);
    on_outbox_thread(&proxy, move || drop(guard));
    expect_clean_end(&server);
}

#[derive(Debug)]
struct LossCounter(AtomicUsize);

impl HandleEvent for LossCounter {
    fn lost(&self, _: &LostEvent<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Another thread may be in `shutdown` at the same time.
///
/// Fault: N73
#[test]
fn logger_may_shut_the_manager_down() {
    if !in_own_process("faults::process::callbacks::logger_may_shut_the_manager_down", &[]) {
        return;
    }
    install_logger();
    for during_another_shutdown in [false, true] {
        let losses = Arc::new(LossCounter(AtomicUsize::new(0)));
        let (server, proxy, mgr) =
            server_behind_proxy(|url| config_long_timeouts(url).event_handler(losses.clone()));
        let guard = mgr.lock_with("x", &with_ttl(3 * SECOND)).unwrap();
        let own = mgr.clone();
        let shut_down = move || {
            if during_another_shutdown {
                let other = own.clone();
                thread::spawn(move || other.shutdown());
                eventually("the other shutdown has begun", TEST_TIMEOUT, || {
                    matches!(own.ping(), Err(LockError::Shutdown))
                });
            }
            completes_within(CALL_LIMIT, "shutdown", || own.shutdown());
        };
        on_outbox_thread(&proxy, shut_down);
        assert_eq!(guard.lost().recv_timeout(TEST_TIMEOUT), Ok(LockLost::Shutdown));
        expect_clean_end(&server);
        assert_eq!(losses.0.load(Ordering::Relaxed), 1, "the loss is reported once");
        drop((guard, mgr));
    }
}

/// The pool has no connection left, so the release uses a reserved one.
///
/// Fault: N73
#[test]
fn logger_may_release_a_lock_without_a_deadlock() {
    if !in_own_process(
        "faults::process::callbacks::logger_may_release_a_lock_without_a_deadlock",
        &[],
    ) {
        return;
    }
    install_logger();
    let (server, proxy, mgr) = server_behind_proxy(|url| config_long_timeouts(url).pool_size(1));
    let guard = mgr.lock_with("x", &with_ttl(3 * SECOND)).unwrap();
    let borrowed = mgr.connection().unwrap();
    on_outbox_thread(&proxy, move || completes_within(CALL_LIMIT, "drop", || drop(guard)));
    eventually("the lock is released", TEST_TIMEOUT, || get(&server, "lock:x").is_none());
    drop(borrowed);
}

/// Drops the manager on the thread of the event handlers, at the next renewal.
#[derive(Debug, Default)]
struct DropsManager(Mutex<Option<RedisMgr>>);

impl HandleEvent for DropsManager {
    fn renewed(&self, _: &RenewedEvent<'_>) {
        drop(self.0.lock().take());
    }
}

/// Fault: N73
#[test]
fn event_handler_may_drop_the_last_manager() {
    if !in_own_process("faults::process::callbacks::event_handler_may_drop_the_last_manager", &[]) {
        return;
    }
    install_logger();
    let server = RedisServer::start();
    let handler = Arc::new(DropsManager::default());
    let mgr =
        RedisMgr::new(config_long_timeouts(server.url()).event_handler(handler.clone())).unwrap();
    mgr.acquire_lock("x", Duration::from_secs(3), SECOND).unwrap().unwrap();
    *handler.0.lock() = Some(mgr);
    expect_clean_end(&server);
}
