//! Faults of the process: no threads, no files, no processor time, signals, children, and every way
//! to exit.

mod callbacks;
mod fork;
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

use super::{LOCK, expect_renewals, renewals};
use crate::{
    contention::owner,
    helpers::{
        CALL_LIMIT, Defer, SECOND, UnwrapReleased, await_gone, completes_within,
        config_long_timeouts, config_medium_timeout, distlock_threads, get, in_own_process,
        manager, spawn_call, spawn_queued_waiter, timed, with_ttl,
    },
    support::{Nodes, RedisServer, TEST_TIMEOUT, Worker, eventually, eventually_some},
    worker::work,
};

/// A lowered resource limit of this process.
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

/// Limits the address space to what this process uses now and this many bytes more.
fn address_space_left(bytes: u64) -> Limited {
    let pages = fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = pages.split(' ').next().unwrap().parse().unwrap();
    Limited::to(|| Resource::As, pages * rustix::param::page_size() as u64 + bytes)
}

#[derive(Debug)]
struct IgnoresEvents;

impl HandleEvent for IgnoresEvents {}

/// Large enough that the stack of an ended thread is not kept for the next one.
const STACK: u64 = 64 << 20;

/// Fault: F11
#[test]
fn manager_is_refused_without_threads_and_possible_later() {
    let stack = STACK.to_string();
    let name = "faults::process::manager_is_refused_without_threads_and_possible_later";
    if !in_own_process(name, &[("RUST_MIN_STACK", &stack)]) {
        return;
    }
    let server = RedisServer::start();
    let mut purposes = Vec::new();
    // A manager starts four threads. Each of them may be the first that cannot be
    // started.
    let mgr = (1..).find_map(|halves| {
        eventually("earlier threads have ended", TEST_TIMEOUT, || distlock_threads().is_empty());
        let limit = address_space_left(halves * (STACK / 2));
        let created = RedisMgr::new(
            config_long_timeouts(server.url()).event_handler(std::sync::Arc::new(IgnoresEvents)),
        );
        limit.lift();
        match created {
            Ok(mgr) => Some(mgr),
            Err(LockError::NoThread { purpose, .. }) => {
                purposes.push(purpose);
                None
            }
            Err(error) => panic!("{error:?}"),
        }
    });
    purposes.dedup();
    let all = ["loggers and event handlers", "connection pool", "lock renewer"];
    let index = |purpose: &&str| all.iter().position(|known| known == purpose).expect(purpose);
    assert!(purposes.first() == all.first() && purposes.is_sorted_by_key(index), "{purposes:?}");
    let mgr = mgr.unwrap();
    mgr.lock("x").unwrap().release().unwrap().unwrap_released();
    drop(mgr);
    eventually("all threads have ended", TEST_TIMEOUT, || distlock_threads().is_empty());
}

/// Fault: F11
#[test]
fn nodes_are_unavailable_without_threads_and_usable_later() {
    let stack = STACK.to_string();
    let name = "faults::process::nodes_are_unavailable_without_threads_and_usable_later";
    if !in_own_process(name, &[("RUST_MIN_STACK", &stack)]) {
        return;
    }
    let nodes = Nodes::start(3);
    let mgr =
        RedisMgr::new(config_medium_timeout(nodes.urls()).quarantine(Duration::ZERO)).unwrap();
    let guard = mgr.lock("x").unwrap();
    (0..3).for_each(|node| assert!(nodes.server(node).kill_clients(&[]) > 0));
    // The threads that connected leave their stacks to new threads, until an ending thread finds
    // too many of them.
    eventually("the connecting threads have ended", TEST_TIMEOUT, || {
        !distlock_threads().iter().any(|name| name.starts_with("distlock-conn"))
    });
    thread::spawn(|| {}).join().unwrap();
    let limit = address_space_left(STACK / 2);
    let error = completes_within(CALL_LIMIT, "try_lock", || mgr.try_lock("y").unwrap_err());
    limit.lift();
    assert!(error.is_unavailable(), "{error:?}");
    completes_within(CALL_LIMIT, "lock", || mgr.lock("y").unwrap())
        .release()
        .unwrap()
        .unwrap_released();
    guard.release().unwrap().unwrap_released();
}

/// Fault: F12
#[test]
fn locks_survive_a_lack_of_files_that_new_connections_report() {
    if !in_own_process(
        "faults::process::locks_survive_a_lack_of_files_that_new_connections_report",
        &[],
    ) {
        return;
    }
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_medium_timeout(server.url())).unwrap();
    let guard = mgr.lock_with("x", &with_ttl(9 * SECOND)).unwrap();
    expect_renewals(&server, &guard, 1);
    let commands = server.monitor();
    let limit = Limited::to(|| Resource::Nofile, 256);
    let mut files = Vec::new();
    // A thread from before the limit may still close a file.
    let (fresh, error) = eventually_some("no file is left", TEST_TIMEOUT, || {
        files.extend(std::iter::from_fn(|| File::open("/dev/null").ok()));
        let fresh = RedisMgr::new(config_medium_timeout(server.url())).unwrap();
        let error = completes_within(CALL_LIMIT, "try_lock", || fresh.try_lock("y").err());
        error.map(|error| (fresh, error))
    });
    assert!(!files.is_empty());
    // Open connections still work.
    mgr.try_lock("y").unwrap().release().unwrap().unwrap_released();
    assert!(matches!(error, LockError::Unavailable { .. }), "{error:?}");
    assert!(error.to_string().contains("Too many open files"), "{error}");
    // A waiter that cannot subscribe polls.
    let timed_out = completes_within(CALL_LIMIT, "the wait", || {
        mgr.try_lock_for("x", Duration::from_millis(300)).unwrap_err()
    });
    assert!(timed_out.is_timeout(), "{timed_out:?}");
    eventually("it is renewed", TEST_TIMEOUT, || {
        assert!(guard.is_held(), "{:?}", guard.lost().try_recv());
        renewals(&commands, LOCK) >= 2
    });
    drop(files);
    fresh.try_lock("y").unwrap().release().unwrap().unwrap_released();
    let waiting = spawn_call(&fresh, "x", |mgr, name| mgr.lock(name).unwrap());
    limit.lift();
    eventually("it waits", TEST_TIMEOUT, || {
        fresh.holder("x").unwrap().unwrap().waiters() == Some(1)
    });
    guard.release().unwrap().unwrap_released();
    drop(completes_within(CALL_LIMIT, "the hand-over", || waiting.join().unwrap()));
}

/// Whether leases are renewed in time depends on the machine. A lease must never count as held
/// after its end.
///
/// Fault: F15
#[test]
fn process_without_processor_time_holds_no_expired_lease() {
    if !in_own_process(
        "faults::process::process_without_processor_time_holds_no_expired_lease",
        &[],
    ) {
        return;
    }
    let server = RedisServer::start();
    rustix::process::nice(19).unwrap();
    let mgr = manager(&server);
    let done = AtomicBool::new(false);
    thread::scope(|threads| {
        let _done = Defer(|| done.store(true, Ordering::Relaxed));
        for _ in 0..8 {
            threads.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        // Some leases are too short to be renewed, or even granted, in such a process.
        let ttl = |n: usize| if n.is_multiple_of(2) { SECOND } else { SECOND / 25 };
        let lock = |n: usize| mgr.lock_with(&format!("n{n}"), &with_ttl(ttl(n)).wait(SECOND)).ok();
        let mut guards: Vec<_> = (0..20).filter_map(lock).collect();
        assert!(!guards.is_empty());
        for _ in 0..20 {
            for guard in &guards {
                let before = guard.is_held();
                let kept = get(&server, &format!("lock:{}", guard.name()));
                // A lease that is held after the reply was held when the server sent it.
                if before && guard.is_held() {
                    assert_eq!(kept.as_deref(), Some(guard.id().as_str()));
                }
            }
        }
        let lost = guards.extract_if(.., |guard| !guard.is_held()).collect::<Vec<_>>();
        for guard in lost {
            let why = guard.lost().recv_timeout(TEST_TIMEOUT);
            assert!(matches!(why, Ok(LockLost::Expired | LockLost::Gone)), "{why:?}");
        }
    });
}

unsafe extern "C" {
    pub(super) fn signal(number: i32, handler: Option<extern "C" fn(i32)>) -> usize;
    fn tgkill(process: i32, thread: i32, number: i32) -> i32;
}

extern "C" fn ignore(_: i32) {}

/// Interrupts every thread of this process repeatedly, until `done`.
fn storm_of_signals(done: &AtomicBool) {
    const SIGALRM: i32 = 14;
    // SAFETY: the handler does nothing.
    unsafe { signal(SIGALRM, Some(ignore)) };
    let process = i32::try_from(std::process::id()).unwrap();
    while !done.load(Ordering::Relaxed) {
        for task in fs::read_dir("/proc/self/task").unwrap().filter_map(Result::ok) {
            let thread = task.file_name().into_string().unwrap().parse().unwrap();
            // SAFETY: the signal has a handler. If the thread has ended meanwhile, this is an
            // error.
            unsafe { tgkill(process, thread, SIGALRM) };
        }
        work(Duration::from_micros(500));
    }
}

/// Fault: N13
#[test]
fn storm_of_signals_fails_no_call_and_loses_no_lock() {
    if !in_own_process("faults::process::storm_of_signals_fails_no_call_and_loses_no_lock", &[]) {
        return;
    }
    let server = RedisServer::builder().unix_socket().start();
    for url in [server.url(), server.unix_url()] {
        let mgr = RedisMgr::new(config_long_timeouts(url).pool_size(2)).unwrap();
        let held = mgr.lock_with("held", &with_ttl(3 * SECOND)).unwrap();
        let done = AtomicBool::new(false);
        thread::scope(|threads| {
            let _done = Defer(|| done.store(true, Ordering::Relaxed));
            threads.spawn(|| storm_of_signals(&done));
            let lock_repeatedly = |n: usize| {
                let mgr = &mgr;
                move || {
                    for round in 0..100 {
                        if round % 20 == n {
                            // This interrupts connecting too.
                            drop(mgr.connection().map(|mut connection| {
                                redis::cmd("PING").query::<()>(&mut connection).unwrap()
                            }));
                        }
                        mgr.lock("x").unwrap().release().unwrap().unwrap_released();
                    }
                }
            };
            let all: Vec<_> = (0..3).map(|n| threads.spawn(lock_repeatedly(n))).collect();
            let all: Vec<_> = all.into_iter().map(|thread| thread.join()).collect();
            let before = held.remaining();
            eventually("it is renewed", TEST_TIMEOUT, || {
                held.remaining() > before || !held.is_held()
            });
            all.into_iter().for_each(|outcome| outcome.unwrap());
        });
        held.release().unwrap().unwrap_released();
    }
}

/// Fault: N14
#[test]
fn child_program_inherits_no_connection() {
    if !in_own_process("faults::process::child_program_inherits_no_connection", &[]) {
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
    let open_here = || fs::read_dir("/proc/self/fd").unwrap().count();
    assert!(open_here() > 10);
    assert_eq!(sockets(), before);
    guards.into_iter().for_each(|guard| guard.release().unwrap().unwrap_released());
    drop(waiting.join().unwrap().unwrap());
}

/// The stack that a thread needs to lock and release, and some more. (For a reply with the deepest
/// nesting that the parser allows, a debug build can need more than a megabyte, which default
/// stacks have.)
pub(super) const SMALL_STACK: usize = 192 << 10;

/// Fault: N18
#[test]
fn small_stack_is_sufficient() {
    if !in_own_process("faults::process::small_stack_is_sufficient", &[]) {
        return;
    }
    let server = RedisServer::start();
    let mgr = manager(&server);
    let lock_repeatedly = move || {
        for _ in 0..3 {
            mgr.lock("x").unwrap().release().unwrap().unwrap_released();
            assert!(mgr.holder("x").unwrap().is_none());
        }
    };
    thread::Builder::new().stack_size(SMALL_STACK).spawn(lock_repeatedly).unwrap().join().unwrap();
}

/// Runs a process that exits in this way with guards that have a ttl of a minute.
fn run_to_exit(how: &str) -> (RedisServer, Worker) {
    let server = RedisServer::start();
    let (worker, took) = timed(|| {
        let mut worker = Worker::spawn("exiting", &[("url", &server.url()), ("how", how)]);
        assert!(worker.wait().success(), "{}", worker.transcript());
        worker
    });
    // Waiting for its leases would take a minute.
    assert!(took < CALL_LIMIT * 2, "{how} took {took:?}");
    (server, worker)
}

/// Fault: N15
#[test]
fn guard_in_thread_storage_is_released_with_the_thread() {
    let (server, _worker) = run_to_exit("thread storage");
    assert_eq!(owner(&server, "x"), None);
}

/// Fault: N15
#[test]
fn guard_dropped_during_exit_is_released() {
    for how in ["at exit", "main storage"] {
        let (server, _worker) = run_to_exit(how);
        assert_eq!(owner(&server, "x"), None, "{how}");
    }
}

/// Statics are never dropped.
///
/// Fault: F8
#[test]
fn guard_in_a_static_is_left_to_expire() {
    let (server, _worker) = run_to_exit("static");
    let left: i64 = server.query(&["PTTL", LOCK]);
    assert!(left > 0 && left <= 60_000, "{left}");
}

/// Fault: F9
#[test]
fn process_can_exit_while_its_threads_wait() {
    let (server, _worker) = run_to_exit("while others wait");
    let mgr = manager(&server);
    assert!(server.query::<bool>(&["DEL", LOCK]));
    // The queue entry belongs to no process any more.
    completes_within(CALL_LIMIT, "lock", || mgr.lock("x").unwrap())
        .release()
        .unwrap()
        .unwrap_released();
    await_gone(&server, LOCK);
}

/// A guard that is never dropped ends at its maximum hold time, or at the shutdown.
///
/// Fault: F8
#[test]
fn forgotten_guard_ends_at_max_hold() {
    let server = RedisServer::start();
    let mgr = manager(&server);
    let guard: LockGuard = mgr.lock_with("x", &with_ttl(30 * SECOND).max_hold(SECOND)).unwrap();
    let channel = guard.lost().clone();
    std::mem::forget(guard);
    assert_eq!(channel.recv_timeout(TEST_TIMEOUT), Ok(LockLost::MaxHold));
    await_gone(&server, LOCK);
    // Without a maximum hold time, the shutdown releases it.
    let forgotten = mgr.lock("x").unwrap();
    std::mem::forget(forgotten);
    mgr.shutdown();
    assert_eq!(get(&server, LOCK), None);
}
