//! Faults of the process itself: no threads, no files, no time on a core, signals, children, and
//! every way to end.

mod callbacks;
mod lifecycle;
mod logger;
mod nested;
mod resources;
mod signals;

use std::{
    fs::{self, File},
    process::{Command, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use distlock::{HandleEvent, LockError, LockGuard, LockLost, RedisMgr};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::{LOCK, is_renewed, renewals};
use crate::{
    bounds::threads,
    contention::owner,
    helpers::{
        CALL_LIMIT, Defer, SECOND, UnwrapReleased, await_gone, completes_within,
        config_long_timeouts, config_medium_timeout, get, in_own_process, in_thread, manager,
        spawn_queued_waiter, timed, with_ttl,
    },
    support::{CEILING, Nodes, RedisServer, Worker, eventually, eventually_some},
    worker::work,
};

/// A limit of this process that is lifted again.
struct Limited(Resource, Rlimit);

impl Limited {
    fn to(resource: fn() -> Resource, limit: u64) -> Limited {
        let before = getrlimit(resource());
        setrlimit(resource(), Rlimit { current: Some(limit), maximum: before.maximum }).unwrap();
        Limited(resource(), before)
    }

    fn lift(self) {
        setrlimit(self.0, self.1).unwrap();
    }
}

/// What this process may have besides what it has.
fn address_space_left(bytes: u64) -> Limited {
    let pages = fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = pages.split(' ').next().unwrap().parse().unwrap();
    Limited::to(|| Resource::As, pages * rustix::param::page_size() as u64 + bytes)
}

#[derive(Debug)]
struct Deaf;

impl HandleEvent for Deaf {}

/// So large that an ended thread's stack is not kept for the next one.
const STACK: u64 = 64 << 20;

#[test]
fn where_there_is_no_thread_a_manager_is_refused_and_can_be_had_later() {
    let stack = STACK.to_string();
    let name =
        "faults::process::where_there_is_no_thread_a_manager_is_refused_and_can_be_had_later";
    if !in_own_process(name, &[("RUST_MIN_STACK", &stack)]) {
        return;
    }
    let server = RedisServer::start();
    let mut purposes = Vec::new();
    // With handlers a manager has three threads, and each of them may be the first that is not to
    // be had.
    let mgr = (1..).find_map(|halves| {
        eventually("the former ones have ended", CEILING, || threads().is_empty());
        let limit = address_space_left(halves * (STACK / 2));
        let made = RedisMgr::new(
            config_long_timeouts(server.url()).event_handler(std::sync::Arc::new(Deaf)),
        );
        limit.lift();
        match made {
            Ok(mgr) => Some(mgr),
            Err(LockError::NoThread { purpose, .. }) => {
                purposes.push(purpose);
                None
            }
            Err(error) => panic!("{error:?}"),
        }
    });
    purposes.dedup();
    let all = ["event handlers", "connection pool", "lock renewer"];
    let place = |purpose: &&str| all.iter().position(|known| known == purpose).expect(purpose);
    assert!(purposes.first() == all.first() && purposes.is_sorted_by_key(place), "{purposes:?}");
    let mgr = mgr.unwrap();
    mgr.lock("x").unwrap().release().unwrap().unwrap_released();
    drop(mgr);
    eventually("no thread of the others stays either", CEILING, || threads().is_empty());
}

#[test]
fn where_there_is_no_thread_nodes_cannot_be_reached_for_as_long() {
    let stack = STACK.to_string();
    let name = "faults::process::where_there_is_no_thread_nodes_cannot_be_reached_for_as_long";
    if !in_own_process(name, &[("RUST_MIN_STACK", &stack)]) {
        return;
    }
    let nodes = Nodes::start(3);
    let mgr =
        RedisMgr::new(config_medium_timeout(nodes.urls()).quarantine(Duration::ZERO)).unwrap();
    let guard = mgr.lock("x").unwrap();
    (0..3).for_each(|node| assert!(nodes.server(node).kill_clients(&[]) > 0));
    // The threads that connected leave their stacks to others, until one that ends finds too many
    // of them.
    eventually("they have ended", CEILING, || {
        !threads().iter().any(|name| name.starts_with("distlock-conn"))
    });
    thread::spawn(|| {}).join().unwrap();
    let limit = address_space_left(STACK / 2);
    let error = completes_within(CALL_LIMIT, "try_lock", || mgr.try_lock("y").unwrap_err());
    limit.lift();
    assert!(error.is_unavailable(), "{error:?}");
    completes_within(CALL_LIMIT, "locking", || mgr.lock("y").unwrap())
        .release()
        .unwrap()
        .unwrap_released();
    guard.release().unwrap().unwrap_released();
}

#[test]
fn where_there_is_no_file_left_locks_are_kept_and_new_connections_say_why() {
    if !in_own_process(
        "faults::process::where_there_is_no_file_left_locks_are_kept_and_new_connections_say_why",
        &[],
    ) {
        return;
    }
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_medium_timeout(server.url())).unwrap();
    let guard = mgr.lock_with("x", &with_ttl(9 * SECOND)).unwrap();
    is_renewed(&server, &guard, 1);
    let commands = server.monitor();
    let limit = Limited::to(|| Resource::Nofile, 256);
    let mut files = Vec::new();
    // Somebody who was there before may close one yet.
    let (fresh, error) = eventually_some("no file is left", CEILING, || {
        files.extend(std::iter::from_fn(|| File::open("/dev/null").ok()));
        let fresh = RedisMgr::new(config_medium_timeout(server.url())).unwrap();
        let error = completes_within(CALL_LIMIT, "try_lock", || fresh.try_lock("y").err());
        error.map(|error| (fresh, error))
    });
    assert!(!files.is_empty());
    // What is open serves on.
    mgr.try_lock("y").unwrap().release().unwrap().unwrap_released();
    assert!(matches!(error, LockError::Unavailable { .. }), "{error:?}");
    assert!(error.to_string().contains("Too many open files"), "{error}");
    // Who cannot subscribe looks.
    let gave_up = completes_within(CALL_LIMIT, "waiting", || {
        mgr.try_lock_for("x", Duration::from_millis(300)).unwrap_err()
    });
    assert!(gave_up.is_timeout(), "{gave_up:?}");
    eventually("it is renewed", CEILING, || {
        assert!(guard.is_held(), "{:?}", guard.lost().try_recv());
        renewals(&commands, LOCK) >= 2
    });
    drop(files);
    fresh.try_lock("y").unwrap().release().unwrap().unwrap_released();
    let waiting = in_thread(&fresh, "x", |mgr, name| mgr.lock(name).unwrap());
    limit.lift();
    eventually("it waits", CEILING, || fresh.holder("x").unwrap().unwrap().waiters() == Some(1));
    guard.release().unwrap().unwrap_released();
    drop(completes_within(CALL_LIMIT, "the next", || waiting.join().unwrap()));
}

/// Whether it is renewed in time is the machine's business; that nobody believes in a lock which is
/// over is ours.
#[test]
fn a_process_that_gets_no_time_on_a_core_believes_in_nothing_that_is_over() {
    if !in_own_process(
        "faults::process::a_process_that_gets_no_time_on_a_core_believes_in_nothing_that_is_over",
        &[],
    ) {
        return;
    }
    let server = RedisServer::start();
    rustix::process::nice(19).unwrap();
    let mgr = manager(&server);
    let over = AtomicBool::new(false);
    thread::scope(|threads| {
        let _over = Defer(|| over.store(true, Ordering::Relaxed));
        for _ in 0..8 {
            threads.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        // Some of them are too short to be kept, or even taken, by such a process.
        let ttl = |n: usize| if n.is_multiple_of(2) { SECOND } else { SECOND / 25 };
        let take = |n: usize| mgr.lock_with(&format!("n{n}"), &with_ttl(ttl(n)).wait(SECOND)).ok();
        let mut guards: Vec<_> = (0..20).filter_map(take).collect();
        assert!(!guards.is_empty());
        for _ in 0..20 {
            for guard in &guards {
                let before = guard.is_held();
                let kept = get(&server, &format!("lock:{}", guard.name()));
                // Held after the answer was on its way, so it was held when the server gave it.
                if before && guard.is_held() {
                    assert_eq!(kept.as_deref(), Some(guard.id().as_str()));
                }
            }
        }
        let lost = guards.extract_if(.., |guard| !guard.is_held()).collect::<Vec<_>>();
        for guard in lost {
            let why = guard.lost().recv_timeout(CEILING);
            assert!(matches!(why, Ok(LockLost::Expired | LockLost::Gone)), "{why:?}");
        }
    });
}

unsafe extern "C" {
    pub(super) fn signal(number: i32, handler: Option<extern "C" fn(i32)>) -> usize;
    fn tgkill(process: i32, thread: i32, number: i32) -> i32;
}

extern "C" fn nothing(_: i32) {}

/// Interrupts whatever any thread of this process is waiting for, again and again, until it is told
/// to stop.
fn storm_of_signals(over: &AtomicBool) {
    const SIGALRM: i32 = 14;
    // SAFETY: the handler does nothing.
    unsafe { signal(SIGALRM, Some(nothing)) };
    let process = i32::try_from(std::process::id()).unwrap();
    while !over.load(Ordering::Relaxed) {
        for task in fs::read_dir("/proc/self/task").unwrap().filter_map(Result::ok) {
            let thread = task.file_name().into_string().unwrap().parse().unwrap();
            // SAFETY: a signal that has a handler; to a thread that has ended meanwhile it is an
            // error.
            unsafe { tgkill(process, thread, SIGALRM) };
        }
        work(Duration::from_micros(500));
    }
}

#[test]
fn a_storm_of_signals_fails_no_call_and_costs_no_lock() {
    if !in_own_process("faults::process::a_storm_of_signals_fails_no_call_and_costs_no_lock", &[]) {
        return;
    }
    let server = RedisServer::builder().unix_socket().start();
    for url in [server.url(), server.unix_url()] {
        let mgr = RedisMgr::new(config_long_timeouts(url).pool_size(2)).unwrap();
        let held = mgr.lock_with("held", &with_ttl(3 * SECOND)).unwrap();
        let over = AtomicBool::new(false);
        thread::scope(|threads| {
            let _over = Defer(|| over.store(true, Ordering::Relaxed));
            threads.spawn(|| storm_of_signals(&over));
            let working = |n: usize| {
                let mgr = &mgr;
                move || {
                    for round in 0..100 {
                        if round % 20 == n {
                            // Connecting is interrupted too.
                            drop(mgr.connection().map(|mut link| {
                                redis::cmd("PING").query::<()>(&mut link).unwrap()
                            }));
                        }
                        mgr.lock("x").unwrap().release().unwrap().unwrap_released();
                    }
                }
            };
            let all: Vec<_> = (0..3).map(|n| threads.spawn(working(n))).collect();
            let all: Vec<_> = all.into_iter().map(|thread| thread.join()).collect();
            let before = held.remaining();
            eventually("it is renewed", CEILING, || held.remaining() > before || !held.is_held());
            all.into_iter().for_each(|outcome| outcome.unwrap());
        });
        held.release().unwrap().unwrap_released();
    }
}

#[test]
fn a_program_that_is_started_inherits_no_connection() {
    if !in_own_process("faults::process::a_program_that_is_started_inherits_no_connection", &[]) {
        return;
    }
    let server = RedisServer::builder().unix_socket().start();
    let nodes = Nodes::start(3);
    let sockets = || {
        let mut list = Command::new("ls");
        list.args(["-l", "/proc/self/fd"]).stdin(Stdio::null()).stderr(Stdio::null());
        let listed = list.output().unwrap().stdout;
        String::from_utf8_lossy(&listed).matches("socket:").count()
    };
    let before = sockets();
    let urls = [server.url(), server.unix_url(), nodes.urls()];
    let mgrs = urls
        .map(|url| RedisMgr::new(config_long_timeouts(url).quarantine(Duration::ZERO)).unwrap());
    let guards =
        mgrs.each_ref().map(|mgr| mgr.lock_with(mgr.server(), &with_ttl(3 * SECOND)).unwrap());
    let waiting = spawn_queued_waiter(&server, &mgrs[0], mgrs[0].server());
    let mine = || fs::read_dir("/proc/self/fd").unwrap().count();
    assert!(mine() > 10);
    assert_eq!(sockets(), before);
    guards.into_iter().for_each(|guard| guard.release().unwrap().unwrap_released());
    drop(waiting.join().unwrap().unwrap());
}

/// What a thread needs that locks and releases, with some room to spare. (A reply that is nested as
/// deeply as the parser goes can make a debug build need more than a megabyte, which the usual
/// stacks have.)
pub(super) const SMALL_STACK: usize = 192 << 10;

#[test]
fn a_small_stack_is_enough() {
    if !in_own_process("faults::process::a_small_stack_is_enough", &[]) {
        return;
    }
    let server = RedisServer::start();
    let mgr = manager(&server);
    let work = move || {
        for _ in 0..3 {
            mgr.lock("x").unwrap().release().unwrap().unwrap_released();
            assert!(mgr.holder("x").unwrap().is_none());
        }
    };
    thread::Builder::new().stack_size(SMALL_STACK).spawn(work).unwrap().join().unwrap();
}

fn leave(how: &str) -> (RedisServer, Worker) {
    let server = RedisServer::start();
    let (worker, took) = timed(|| {
        let mut worker = Worker::spawn("leaver", &[("url", &server.url()), ("how", how)]);
        assert!(worker.wait().success(), "{}", worker.transcript());
        worker
    });
    // It has leases of a minute.
    assert!(took < CALL_LIMIT * 2, "{how} took {took:?}");
    (server, worker)
}

#[test]
fn a_guard_in_a_thread_s_storage_is_released_with_the_thread() {
    let (server, _worker) = leave("thread storage");
    assert_eq!(owner(&server, "x"), None);
}

#[test]
fn a_guard_that_is_dropped_while_the_process_exits_is_released() {
    for how in ["at exit", "main storage"] {
        let (server, _worker) = leave(how);
        assert_eq!(owner(&server, "x"), None, "{how}");
    }
}

/// Nothing drops a static.
#[test]
fn a_guard_in_a_static_is_left_to_expire() {
    let (server, _worker) = leave("static");
    let left: i64 = server.query(&["PTTL", LOCK]);
    assert!(left > 0 && left <= 60_000, "{left}");
}

#[test]
fn a_process_can_exit_while_its_threads_wait() {
    let (server, _worker) = leave("while others wait");
    let guard = manager(&server);
    assert!(server.query::<bool>(&["DEL", LOCK]));
    // Its place in the line is nobody's.
    completes_within(CALL_LIMIT, "the next", || guard.lock("x").unwrap())
        .release()
        .unwrap()
        .unwrap_released();
    await_gone(&server, LOCK);
}

/// A guard that nobody ever drops is ended by the longest hold, where there is one.
#[test]
fn a_guard_that_is_forgotten_ends_with_the_longest_hold() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard: LockGuard = mgr.lock_with("x", &with_ttl(30 * SECOND).max_hold(SECOND)).unwrap();
    let channel = guard.lost().clone();
    std::mem::forget(guard);
    assert_eq!(channel.recv_timeout(CEILING), Ok(LockLost::MaxHold));
    await_gone(&server, LOCK);
    // And shutting down releases those that have none.
    let forgotten = mgr.lock("x").unwrap();
    std::mem::forget(forgotten);
    mgr.shutdown();
    assert_eq!(get(&server, LOCK), None);
}
