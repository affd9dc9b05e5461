//! Code of users' that runs on the library's own threads may end whatever it likes there: a lock,
//! or its manager.

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
    bounds::threads,
    helpers::{
        CALL_LIMIT, SECOND, completes_within, config_long_timeouts, get, in_own_process,
        is_renewal, server_behind_proxy, with_ttl,
    },
    support::{CEILING, Fault, FaultProxy, RedisServer, eventually},
};

type Act = Box<dyn FnOnce() + Send>;

/// What the renewer's thread does when it logs next.
static NEXT: Mutex<Option<Act>> = Mutex::new(None);
/// How often anything has panicked.
static PANICS: AtomicUsize = AtomicUsize::new(0);

struct Acts;

impl log::Log for Acts {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, _: &log::Record<'_>) {
        if thread::current().name() == Some("distlock-renewer") {
            let act = NEXT.lock().take();
            act.into_iter().for_each(|act| act());
        }
    }

    fn flush(&self) {}
}

/// For a test that is `alone`.
fn act_while_logging() {
    let tell = panic::take_hook();
    panic::set_hook(Box::new(move |told| {
        PANICS.fetch_add(1, Ordering::Relaxed);
        tell(told);
    }));
    log::set_logger(&Acts).unwrap();
    log::set_max_level(log::LevelFilter::Warn);
}

/// Has the renewer's thread do something, while it tells that a renewal has failed; comes back when
/// it has.
#[track_caller]
fn on_the_renewers_thread(proxy: &FaultProxy, act: impl FnOnce() + Send + 'static) {
    let (tell, told) = mpsc::channel();
    *NEXT.lock() = Some(Box::new(move || {
        act();
        tell.send(()).unwrap();
    }));
    let refused =
        proxy.on_request(is_renewal("lock:x"), Fault::ReplaceReply(b"-ERR not now\r\n".to_vec()));
    let done = told.recv_timeout(CEILING);
    assert_eq!(PANICS.load(Ordering::Relaxed), 0, "it panicked");
    done.expect("it hangs");
    assert_eq!(refused.fired(), 1);
}

#[track_caller]
fn all_is_over(server: &RedisServer) {
    eventually("the lock is released", CEILING, || get(server, "lock:x").is_none());
    eventually("its connections are closed", CALL_LIMIT, || server.clients().is_empty());
    eventually("its threads have ended", CALL_LIMIT, || threads().is_empty());
    assert_eq!(PANICS.load(Ordering::Relaxed), 0, "it panicked");
}

#[test]
fn a_logger_may_drop_the_last_manager_or_guard_on_the_renewers_thread() {
    if !in_own_process(
        "faults::own_threads::a_logger_may_drop_the_last_manager_or_guard_on_the_renewers_thread",
        &[],
    ) {
        return;
    }
    act_while_logging();
    let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    mgr.acquire_lock("x", 3 * SECOND, SECOND).unwrap().unwrap();
    on_the_renewers_thread(&proxy, move || drop(mgr));
    all_is_over(&server);

    let (server, proxy, mgr) = server_behind_proxy(config_long_timeouts);
    let guard = mgr.lock_with("x", &with_ttl(3 * SECOND)).unwrap();
    drop(mgr);
    on_the_renewers_thread(&proxy, move || drop(guard));
    all_is_over(&server);
}

#[derive(Debug)]
struct Counts(AtomicUsize);

impl HandleEvent for Counts {
    fn lost(&self, _: &LostEvent<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Also while somebody else does, who waits for the thread.
#[test]
fn a_logger_may_shut_down_on_the_renewers_thread() {
    if !in_own_process("faults::own_threads::a_logger_may_shut_down_on_the_renewers_thread", &[]) {
        return;
    }
    act_while_logging();
    for somebody_else_does in [false, true] {
        let counts = Arc::new(Counts(AtomicUsize::new(0)));
        let (server, proxy, mgr) =
            server_behind_proxy(|url| config_long_timeouts(url).event_handler(counts.clone()));
        let guard = mgr.lock_with("x", &with_ttl(3 * SECOND)).unwrap();
        let own = mgr.clone();
        let shut_down = move || {
            if somebody_else_does {
                let other = own.clone();
                thread::spawn(move || other.shutdown());
                eventually("it is closed", CEILING, || {
                    matches!(own.ping(), Err(LockError::Shutdown))
                });
            }
            completes_within(CALL_LIMIT, "shutdown", || own.shutdown());
        };
        on_the_renewers_thread(&proxy, shut_down);
        assert_eq!(guard.lost().recv_timeout(CEILING), Ok(LockLost::Shutdown));
        all_is_over(&server);
        assert_eq!(counts.0.load(Ordering::Relaxed), 1, "the loss is told");
        drop((guard, mgr));
    }
}

/// The pool has no place left, so that the renewer's thread is asked for it, which is the one that
/// asks.
#[test]
fn a_logger_may_release_a_lock_on_the_renewers_thread_without_waiting_for_itself() {
    if !in_own_process(
        "faults::own_threads::a_logger_may_release_a_lock_on_the_renewers_thread_without_waiting_for_itself",
        &[],
    ) {
        return;
    }
    act_while_logging();
    let (server, proxy, mgr) = server_behind_proxy(|url| config_long_timeouts(url).pool_size(1));
    let guard = mgr.lock_with("x", &with_ttl(3 * SECOND)).unwrap();
    let borrowed = mgr.connection().unwrap();
    on_the_renewers_thread(&proxy, move || {
        completes_within(CALL_LIMIT, "dropping", || drop(guard))
    });
    eventually("the lock is released", CEILING, || get(&server, "lock:x").is_none());
    drop(borrowed);
}

/// Drops what it was given when it is told of a renewal, on the thread for events.
#[derive(Debug, Default)]
struct Ends(Mutex<Option<RedisMgr>>);

impl HandleEvent for Ends {
    fn renewed(&self, _: &RenewedEvent<'_>) {
        drop(self.0.lock().take());
    }
}

#[test]
fn a_handler_may_drop_the_last_manager_on_the_thread_for_events() {
    if !in_own_process(
        "faults::own_threads::a_handler_may_drop_the_last_manager_on_the_thread_for_events",
        &[],
    ) {
        return;
    }
    act_while_logging();
    let server = RedisServer::start();
    let ends = Arc::new(Ends::default());
    let mgr =
        RedisMgr::new(config_long_timeouts(server.url()).event_handler(ends.clone())).unwrap();
    mgr.acquire_lock("x", Duration::from_secs(3), SECOND).unwrap().unwrap();
    *ends.0.lock() = Some(mgr);
    all_is_over(&server);
}
