//! Managers that are made, used and ended in every order, and limits of what can be asked for.

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
    bounds::threads,
    helpers::{
        CALL_LIMIT, SECOND, UnwrapReleased, completes_within, config_long_timeouts, get,
        in_own_process, manager, pttl, queued, spawn_queued_waiter, with_ttl,
    },
    support::{CEILING, RedisServer, eventually, silent_server},
};

#[test]
fn of_many_who_make_the_process_wide_manager_at_once_one_does() {
    if !in_own_process(
        "faults::lifecycle::of_many_who_make_the_process_wide_manager_at_once_one_does",
        &[],
    ) {
        return;
    }
    let server = RedisServer::start();
    let made: Vec<_> = thread::scope(|threads| {
        let init = || RedisMgr::init(config_long_timeouts(server.url()));
        let all: Vec<_> = (0..16).map(|_| threads.spawn(init)).collect();
        all.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(made.iter().filter(|made| made.is_ok()).count(), 1);
    assert!(
        made.iter()
            .flat_map(|made| made.as_ref().err())
            .all(|e| matches!(e, LockError::AlreadyInitialized))
    );
    // Meanwhile those that are about to start have got their names.
    RedisMgr::instance().unwrap().lock("x").unwrap().release().unwrap().unwrap_released();
    eventually("one manager has threads", CEILING, || threads().len() == 2);
}

/// A logger is code of users', who may lock while they log.
#[test]
fn a_logger_may_ask_for_the_process_wide_manager_while_it_is_made() {
    if !in_own_process(
        "faults::lifecycle::a_logger_may_ask_for_the_process_wide_manager_while_it_is_made",
        &[],
    ) {
        return;
    }
    static ASKED: Mutex<Vec<String>> = Mutex::new(Vec::new());

    struct Locks;

    impl log::Log for Locks {
        fn enabled(&self, _: &log::Metadata<'_>) -> bool {
            true
        }

        fn log(&self, _: &log::Record<'_>) {
            let said = RedisMgr::instance()
                .map_or_else(|error| error.to_string(), |_| "there it is".into());
            ASKED.lock().push(said);
        }

        fn flush(&self) {}
    }

    log::set_logger(&Locks).unwrap();
    log::set_max_level(log::LevelFilter::Warn);
    let (one, two, deaf) = (RedisServer::start(), RedisServer::start(), silent_server());
    let config = Config::nodes([one.url(), two.url(), deaf.url()]).operation_timeout(SECOND);
    let (tell, told) = mpsc::channel();
    thread::spawn(move || tell.send(RedisMgr::init(config).map(drop)));
    told.recv_timeout(CEILING).expect("it hangs").unwrap();
    assert!(
        ASKED.lock().iter().any(|said| said.contains("this thread is making it just now")),
        "{:?}",
        ASKED.lock()
    );
    RedisMgr::instance().unwrap();
}

#[test]
fn many_who_cannot_make_the_process_wide_manager_do_not_wait_for_each_other() {
    const MANY: u32 = 8;
    if !in_own_process(
        "faults::lifecycle::many_who_cannot_make_the_process_wide_manager_do_not_wait_for_each_other",
        &[],
    ) {
        return;
    }
    let (server, deaf) = (RedisServer::start(), silent_server());
    // Until the third has not answered either, it is not over.
    let twice = [server.url(), format!("redis://localhost:{}", server.port()), deaf.url()];
    let patience = 3 * SECOND;
    let init = || RedisMgr::init(Config::nodes(twice.clone()).operation_timeout(patience));
    let failed = completes_within(patience * MANY / 2, "failing", || {
        thread::scope(|threads| {
            let all: Vec<_> = (0..MANY).map(|_| threads.spawn(init)).collect();
            all.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        })
    });
    for failed in failed {
        assert!(failed.unwrap_err().to_string().contains("cannot be a node"));
    }
}

/// Each has two threads; what they share is nothing.
#[test]
fn many_managers_have_two_threads_each_and_end_on_their_own() {
    if !in_own_process(
        "faults::lifecycle::many_managers_have_two_threads_each_and_end_on_their_own",
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
    assert!(tasks() <= before + 40, "{} threads", tasks() - before);
    for mgr in mgrs.iter().step_by(2) {
        mgr.shutdown();
    }
    for (n, guard) in guards.iter().enumerate() {
        assert_eq!(guard.is_held(), n % 2 == 1, "{n}");
    }
    drop((mgrs, guards));
    eventually("all threads have ended", CEILING, || tasks() <= before);
    assert!(
        server.keys().iter().all(|key| key.starts_with("distlock:fence:")),
        "{:?}",
        server.keys()
    );
}

#[test]
fn whatever_is_done_after_a_shutdown_says_so() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock("x").unwrap();
    let waiting = spawn_queued_waiter(&server, &mgr, "x");
    completes_within(CALL_LIMIT, "shutdown", || mgr.shutdown());
    assert!(matches!(
        completes_within(CALL_LIMIT, "waiting", || waiting.join().unwrap()),
        Err(LockError::Shutdown)
    ));
    type Asked = fn(&RedisMgr) -> Result<(), LockError>;
    let calls: [Asked; 10] = [
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
    // Twice is once.
    completes_within(CALL_LIMIT, "shutdown", || mgr.shutdown());
    assert!(!guard.is_held());
    completes_within(CALL_LIMIT, "drop", || drop(guard));
    assert_eq!((get(&server, "lock:x"), queued(&server, "x")), (None, 0));
}

/// The second one does not wait for itself for ever, and is told who has it.
#[test]
fn a_thread_that_locks_twice_is_told_that_it_waits_for_itself() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard = mgr.lock("x").unwrap();
    let error =
        completes_within(CALL_LIMIT, "waiting", || mgr.try_lock_for("x", SECOND / 2).unwrap_err());
    assert!(error.is_timeout(), "{error:?}");
    assert_eq!(error.holder().unwrap().id(), guard.id().as_str());
    guard.release().unwrap().unwrap_released();
    mgr.lock("x").unwrap().release().unwrap().unwrap_released();
}

#[test]
fn a_lease_of_a_day_lasts_for_a_day() {
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
        // Whoever waits looks much sooner, and keeps its place in the meantime.
        let waiting = spawn_queued_waiter(&server, &mgr, "x");
        guard.release().unwrap().unwrap_released();
        waiting.join().unwrap().unwrap().release().unwrap().unwrap_released();
    }
    // The next one may have as short a lease as there is.
    let short = mgr.lock_with("x", &with_ttl(Duration::from_millis(10)));
    assert!(short.is_ok() || short.is_err_and(|error| error.is_unavailable()));
}

/// Takes locks and ends things from inside of what it is told.
#[derive(Debug, Default)]
struct Busybody {
    mgr: OnceLock<RedisMgr>,
    own: AtomicUsize,
}

impl HandleEvent for Busybody {
    fn renewed(&self, event: &RenewedEvent<'_>) {
        if let (Some(mgr), "x") = (self.mgr.get(), event.lock()) {
            mgr.lock("from a handler").unwrap().release().unwrap().unwrap_released();
            self.own.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn lost(&self, _: &LostEvent<'_>) {
        self.mgr.get().unwrap().shutdown();
    }
}

#[test]
fn a_handler_may_use_its_manager_and_end_it() {
    let server = RedisServer::start();
    let busybody = Arc::new(Busybody::default());
    let mgr =
        RedisMgr::new(config_long_timeouts(server.url()).event_handler(busybody.clone())).unwrap();
    busybody.mgr.set(mgr.clone()).unwrap();
    let guard = mgr.lock_with("x", &with_ttl(3 * SECOND)).unwrap();
    let vanishing = mgr.lock_with("y", &with_ttl(3 * SECOND)).unwrap();
    eventually("it has locked", CEILING, || busybody.own.load(Ordering::SeqCst) >= 2);
    server.cli(&["DEL", "lock:y"]);
    eventually("it has shut the manager down", CEILING, || {
        matches!(mgr.ping(), Err(LockError::Shutdown))
    });
    eventually("the other lock is released", CEILING, || get(&server, "lock:x").is_none());
    assert!(!guard.is_held() && !vanishing.is_held());
}

/// A thousand threads that want one lock, and each a lock of its own, over ten connections.
#[test]
fn a_thousand_threads_get_what_they_want() {
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
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two at a time");
                inside.fetch_sub(1, Ordering::SeqCst);
                drop(guard);
                own.release().unwrap().unwrap_released();
            };
            thread::Builder::new().stack_size(SMALL_STACK).spawn_scoped(threads, work).unwrap();
        }
    });
    server.await_clients(0..=12);
    assert!(server.keys().iter().all(|key| key.starts_with("distlock:fence:")));
}
