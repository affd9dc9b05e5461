//! The life cycle of managers: creation, use and shutdown in any order, and extreme numbers of
//! managers and threads.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use parking_lot::Mutex;

use distlock::{Config, HandleEvent, LockError, LockOptions, LostEvent, RedisMgr, RenewedEvent};

use crate::faults::process::SMALL_STACK;
use crate::{
    helpers::{
        CALL_LIMIT, FENCE, SECOND, UnwrapReleased, completes_within, config_long_timeouts,
        distlock_threads, get, in_own_process, manager, pttl, queue_length, spawn_queued_waiter,
        with_ttl,
    },
    support::{RedisServer, TEST_TIMEOUT, eventually, silent_server},
};

/// Fault: F90
#[test]
fn process_wide_manager_is_created_once() {
    if !in_own_process("faults::process::lifecycle::process_wide_manager_is_created_once", &[]) {
        return;
    }
    let server = RedisServer::start();
    let results: Vec<_> = thread::scope(|threads| {
        let init = || RedisMgr::init(config_long_timeouts(server.url()));
        let all: Vec<_> = (0..16).map(|_| threads.spawn(init)).collect();
        all.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(results.iter().filter(|result| result.is_ok()).count(), 1);
    assert!(
        results
            .iter()
            .flat_map(|result| result.as_ref().err())
            .all(|e| matches!(e, LockError::AlreadyInitialized))
    );
    // Threads set their names when they start. After this call, all of them have done so.
    RedisMgr::instance().unwrap().lock("x").unwrap().release().unwrap().unwrap_released();
    eventually("only one manager has threads", TEST_TIMEOUT, || distlock_threads().len() == 4);
}

/// If a user's logger requests the process-wide manager while that is being created, the logger
/// gets an error. Otherwise `init` would hang.
///
/// Fault: N53
#[test]
fn logger_may_request_the_manager_during_its_creation() {
    if !in_own_process(
        "faults::process::lifecycle::logger_may_request_the_manager_during_its_creation",
        &[],
    ) {
        return;
    }
    static RESULTS: Mutex<Vec<String>> = Mutex::new(Vec::new());

    struct RequestingLogger;

    impl log::Log for RequestingLogger {
        fn enabled(&self, _: &log::Metadata<'_>) -> bool {
            true
        }

        fn log(&self, _: &log::Record<'_>) {
            let result =
                RedisMgr::instance().map_or_else(|error| error.to_string(), |_| "created".into());
            RESULTS.lock().push(result);
        }

        fn flush(&self) {}
    }

    log::set_logger(&RequestingLogger).unwrap();
    log::set_max_level(log::LevelFilter::Warn);
    // The number of nodes is even, which the thread that creates the manager logs. Another thread
    // logs that one of them does not reply.
    let (server, silent) = (RedisServer::start(), silent_server());
    let config = Config::nodes([server.url(), silent.url()]).operation_timeout(SECOND);
    let (sender, created) = mpsc::channel();
    thread::spawn(move || sender.send(RedisMgr::init(config).map(drop)));
    created.recv_timeout(TEST_TIMEOUT).expect("init hangs").unwrap();
    let results = RESULTS.lock().clone();
    let expected = "this thread is creating the process-wide manager";
    assert!(results.iter().any(|result| result.contains(expected)), "{results:?}");
    RedisMgr::instance().unwrap();
}

/// Fault: N55
#[test]
fn failing_inits_of_many_threads_run_at_the_same_time() {
    const MANY: u32 = 8;
    if !in_own_process(
        "faults::process::lifecycle::failing_inits_of_many_threads_run_at_the_same_time",
        &[],
    ) {
        return;
    }
    let (server, silent) = (RedisServer::start(), silent_server());
    // Each `init` fails only after the third node has not replied within the timeout.
    let twice = [server.url(), format!("redis://localhost:{}", server.port()), silent.url()];
    let timeout = 3 * SECOND;
    let init = || RedisMgr::init(Config::nodes(twice.clone()).operation_timeout(timeout));
    let results = completes_within(timeout * MANY / 2, "init", || {
        thread::scope(|threads| {
            let all: Vec<_> = (0..MANY).map(|_| threads.spawn(init)).collect();
            all.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        })
    });
    for result in results {
        assert!(result.unwrap_err().to_string().contains("cannot be a node"));
    }
}

/// Each manager has four threads, and managers share nothing.
///
/// Fault: F91
#[test]
fn managers_have_four_threads_each_and_end_independently() {
    if !in_own_process(
        "faults::process::lifecycle::managers_have_four_threads_each_and_end_independently",
        &[],
    ) {
        return;
    }
    let tasks = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let server = RedisServer::start();
    let before = tasks();
    let mgrs: Vec<_> = (0..20)
        .map(|n| RedisMgr::new(config_long_timeouts(server.url()).prefix(format!("{n}:"))).unwrap())
        .collect();
    let guards: Vec<_> =
        mgrs.iter().map(|mgr| mgr.lock_with("x", &with_ttl(3 * SECOND)).unwrap()).collect();
    assert!(tasks() <= before + 80, "{} threads", tasks() - before);
    for mgr in mgrs.iter().step_by(2) {
        mgr.shutdown();
    }
    for (n, guard) in guards.iter().enumerate() {
        assert_eq!(guard.is_held(), n % 2 == 1, "{n}");
    }
    drop((mgrs, guards));
    eventually("all threads have ended", TEST_TIMEOUT, || tasks() <= before);
    assert_eq!(server.keys(), [FENCE]);
}

/// Fault: F90
#[test]
fn calls_after_a_shutdown_report_it() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    completes_within(CALL_LIMIT, "shutdown", || mgr.shutdown());
    assert!(matches!(
        completes_within(CALL_LIMIT, "the wait", || waiting.join().unwrap()),
        Err(LockError::Shutdown)
    ));
    type Call = fn(&RedisMgr) -> Result<(), LockError>;
    let calls: [Call; 10] = [
        |mgr| mgr.lock("y").map(drop),
        |mgr| mgr.try_lock("y").map(drop),
        |mgr| mgr.lock_reentrant("y").map(drop),
        |mgr| mgr.acquire_lock("y", SECOND, SECOND).map(drop),
        |mgr| mgr.release_lock("y", "id").map(drop),
        |mgr| mgr.holder("y").map(drop),
        |mgr| mgr.locks("*").map(drop),
        |mgr| mgr.force_release("y").map(drop),
        |mgr| mgr.ping().map(drop),
        |mgr| mgr.connection().map(drop),
    ];
    for call in calls {
        let error = completes_within(CALL_LIMIT, "a call", || call(&mgr)).unwrap_err();
        assert!(matches!(error, LockError::Shutdown), "{error:?}");
    }
    // A second shutdown does nothing.
    completes_within(CALL_LIMIT, "shutdown", || mgr.shutdown());
    assert!(!guard.is_held());
    completes_within(CALL_LIMIT, "drop", || drop(guard));
    assert_eq!((get(&server, "lock:x"), queue_length(&server, "x")), (None, 0));
}

/// The second acquisition times out, and its error names the thread's own id as the holder.
///
/// Fault: F94
#[test]
fn thread_that_locks_twice_sees_its_own_lock_as_holder() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock("x").unwrap();
    let error =
        completes_within(CALL_LIMIT, "the wait", || mgr.try_lock_for("x", SECOND / 2).unwrap_err());
    assert!(error.is_timeout(), "{error:?}");
    assert_eq!(error.holder().unwrap().id(), guard.id().as_str());
    guard.release().unwrap().unwrap_released();
    mgr.lock("x").unwrap().release().unwrap().unwrap_released();
}

/// Fault: N12
#[test]
fn lease_of_a_day_lasts_for_a_day() {
    let server = RedisServer::start();
    let day = Duration::from_secs(24 * 60 * 60);
    let mgr = RedisMgr::new(Config::new(server.url()).ttl(day)).unwrap();
    for options in
        [LockOptions::new(), LockOptions::new().max_hold(Duration::MAX).wait(Duration::MAX)]
    {
        let guard = mgr.lock_with("x", &options).unwrap();
        let (left, key) = (
            guard.remaining(),
            Duration::from_millis(u64::try_from(pttl(&server, "lock:x")).unwrap()),
        );
        assert!(left > day * 98 / 100 && left <= key && key <= day, "{left:?} of {key:?}");
        // The waiter polls long before such a lease ends, and keeps its queue entry between polls.
        let waiting = spawn_queued_waiter(&server, &mgr, "x");
        guard.release().unwrap().unwrap_released();
        waiting.join().unwrap().unwrap().release().unwrap().unwrap_released();
    }
    // The next lock has the shortest ttl. A slow machine may fail to acquire it in time.
    let short = mgr.lock_with("x", &with_ttl(Duration::from_millis(10)));
    assert!(short.is_ok() || short.is_err_and(|error| error.is_unavailable()));
}

/// Acquires a lock when `x` is renewed, and shuts its manager down when a lock is lost.
#[derive(Debug, Default)]
struct LockingHandler {
    mgr: OnceLock<RedisMgr>,
    locked: AtomicUsize,
}

impl HandleEvent for LockingHandler {
    fn renewed(&self, event: &RenewedEvent<'_>) {
        if let (Some(mgr), "x") = (self.mgr.get(), event.lock()) {
            mgr.lock("from a handler").unwrap().release().unwrap().unwrap_released();
            self.locked.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn lost(&self, _: &LostEvent<'_>) {
        self.mgr.get().unwrap().shutdown();
    }
}

/// Fault: N19
#[test]
fn event_handler_may_use_its_manager_and_shut_it_down() {
    let server = RedisServer::start();
    let handler = Arc::new(LockingHandler::default());
    let mgr =
        RedisMgr::new(config_long_timeouts(server.url()).event_handler(handler.clone())).unwrap();
    handler.mgr.set(mgr.clone()).unwrap();
    let guard = mgr.lock_with("x", &with_ttl(3 * SECOND)).unwrap();
    let deleted = mgr.lock_with("y", &with_ttl(3 * SECOND)).unwrap();
    eventually("the handler has locked", TEST_TIMEOUT, || {
        handler.locked.load(Ordering::SeqCst) >= 2
    });
    server.cli(&["DEL", "lock:y"]);
    eventually("the handler has shut the manager down", TEST_TIMEOUT, || {
        matches!(mgr.ping(), Err(LockError::Shutdown))
    });
    eventually("the other lock is released", TEST_TIMEOUT, || get(&server, "lock:x").is_none());
    assert!(!guard.is_held() && !deleted.is_held());
}

/// Over ten connections, a thousand threads acquire one lock each, and then contend for a common
/// one.
///
/// Fault: F18
#[test]
fn a_thousand_threads_get_their_locks() {
    const THREADS: usize = 1_000;
    let server = RedisServer::start();
    let mgr = manager(&server);
    let inside = AtomicUsize::new(0);
    thread::scope(|threads| {
        for n in 0..THREADS {
            let (mgr, inside) = (&mgr, &inside);
            let work = move || {
                let own = mgr.lock(&format!("n{n}")).unwrap();
                let guard = mgr.lock("x").unwrap();
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two holders at once");
                inside.fetch_sub(1, Ordering::SeqCst);
                drop(guard);
                own.release().unwrap().unwrap_released();
            };
            thread::Builder::new().stack_size(SMALL_STACK).spawn_scoped(threads, work).unwrap();
        }
    });
    server.await_clients(0..=14);
    assert_eq!(server.keys(), [FENCE]);
}
