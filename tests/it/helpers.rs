//! Helper functions for tests of the library on real servers.

use std::{
    env, fs,
    process::{Command, Stdio},
    sync::{Arc, mpsc},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use distlock::{Config, LockError, LockGuard, LockLost, LockOptions, RedisMgr};
use parking_lot::Mutex;
use rustix::process::{Pid, Signal, kill_process};

use crate::support::{FaultProxy, RedisServer, TEST_TIMEOUT, Watchdog, eventually};

pub(crate) const SECOND: Duration = Duration::from_secs(1);
/// Operation timeout for tests in which the server does not reply.
pub(crate) const SHORT_TIMEOUT: Duration = Duration::from_millis(500);
/// Maximum duration of a call with `SHORT_TIMEOUT` on a slow machine.
pub(crate) const CALL_LIMIT: Duration = Duration::from_secs(10);

/// A configuration whose timeouts only a defect exceeds, however slow the machine.
pub(crate) fn config_long_timeouts(url: impl Into<String>) -> Config {
    Config::new(url).ttl(30 * SECOND).operation_timeout(20 * SECOND).claim_window(20 * SECOND)
}

/// A configuration for servers that do not reply.
pub(crate) fn config_short_timeout(url: impl Into<String>) -> Config {
    config_long_timeouts(url).operation_timeout(SHORT_TIMEOUT)
}

/// A configuration in which a lost request is soon retried, and a request that arrives is in time.
pub(crate) fn config_medium_timeout(url: impl Into<String>) -> Config {
    config_long_timeouts(url).operation_timeout(4 * SECOND)
}

pub(crate) fn manager(server: &RedisServer) -> RedisMgr {
    RedisMgr::new(config_long_timeouts(server.url())).unwrap()
}

/// A server that knows the scripts, a proxy in front of it, and a manager that connects to the
/// proxy.
pub(crate) fn server_behind_proxy(
    config: impl FnOnce(String) -> Config,
) -> (RedisServer, FaultProxy, RedisMgr) {
    let server = server_with_scripts();
    let proxy = FaultProxy::in_front_of(server.addr());
    let mgr = RedisMgr::new(config(proxy.url())).unwrap();
    eventually("it replies", TEST_TIMEOUT, || mgr.ping().is_ok());
    (server, proxy, mgr)
}

/// A server that knows the scripts, so that no fault is spent on a request that only loads one.
pub(crate) fn server_with_scripts() -> RedisServer {
    let server = RedisServer::start();
    manager(&server).try_lock("warm").unwrap().release().unwrap().unwrap_released();
    server.cli(&["DEL", &fence_key("warm")]);
    server.cli(&["SCRIPT", "LOAD", include_str!("../../src/node/lua/renew.lua")]);
    server
}

pub(crate) trait UnwrapReleased {
    fn unwrap_released(self);
}

impl UnwrapReleased for distlock::Released {
    #[track_caller]
    fn unwrap_released(self) {
        assert_eq!(self, distlock::Released::Released);
    }
}

/// Options with this ttl.
pub(crate) fn with_ttl(ttl: Duration) -> LockOptions {
    LockOptions::new().ttl(ttl)
}

/// Runs a call, and fails if it takes longer than `limit`.
#[track_caller]
pub(crate) fn completes_within<T>(limit: Duration, what: &str, call: impl FnOnce() -> T) -> T {
    let (result, took) = timed(call);
    assert!(took < limit, "{what} took {took:?}");
    result
}

#[expect(clippy::disallowed_methods, reason = "no test outlives a suspended machine")]
pub(crate) fn timed<T>(call: impl FnOnce() -> T) -> (T, Duration) {
    let started = Instant::now();
    let result = call();
    (result, started.elapsed())
}

pub(crate) fn get(server: &RedisServer, key: &str) -> Option<String> {
    server.query(&["GET", key])
}

pub(crate) fn pttl(server: &RedisServer, key: &str) -> i64 {
    server.query(&["PTTL", key])
}

/// Asserts that a lease ends before its key expires. The key is read first, so that a slow machine
/// cannot make this fail.
#[track_caller]
pub(crate) fn expect_deadline_before_key_expiry(server: &RedisServer, guard: &LockGuard) {
    let key = pttl(server, &format!("lock:{}", guard.name()));
    let left = guard.remaining();
    // The server reports whole milliseconds.
    assert!(
        left <= Duration::from_millis(u64::try_from(key).expect("an expiry") + 1),
        "{left:?} of {key} ms"
    );
}

pub(crate) fn queue_key(name: &str) -> String {
    format!("distlock:queue:{{lock:{name}}}")
}

pub(crate) fn fence_key(name: &str) -> String {
    format!("distlock:fence:{{lock:{name}}}")
}

pub(crate) fn queued(server: &RedisServer, name: &str) -> usize {
    server.query(&["LLEN", &queue_key(name)])
}

#[track_caller]
pub(crate) fn await_queued(server: &RedisServer, name: &str, waiters: usize) {
    eventually("they are queued", TEST_TIMEOUT, || queued(server, name) == waiters);
}

#[track_caller]
pub(crate) fn await_gone(server: &RedisServer, key: &str) {
    eventually("the key is gone", TEST_TIMEOUT, || get(server, key).is_none());
}

/// Starts a thread that waits for a lock, and returns once the thread is in the server's queue.
#[track_caller]
pub(crate) fn spawn_queued_waiter(
    server: &RedisServer,
    mgr: &RedisMgr,
    name: &str,
) -> JoinHandle<Result<LockGuard, LockError>> {
    let before = queued(server, name);
    let waiting = in_thread(mgr, name, |mgr, name| mgr.lock(name));
    await_queued(server, name, before + 1);
    waiting
}

pub(crate) fn in_thread<T: Send + 'static>(
    mgr: &RedisMgr,
    name: &str,
    call: impl FnOnce(&RedisMgr, &str) -> T + Send + 'static,
) -> JoinHandle<T> {
    let (mgr, name) = (mgr.clone(), name.to_owned());
    thread::spawn(move || call(&mgr, &name))
}

/// Waits for the loss of a lock, and returns its reason, which must be reported exactly once.
#[track_caller]
pub(crate) fn expect_loss(guard: &LockGuard) -> LockLost {
    let channel = guard.lost().clone();
    let why = channel.recv_timeout(TEST_TIMEOUT).expect("the loss is reported");
    assert!(!guard.is_held());
    assert_eq!(guard.remaining(), Duration::ZERO);
    match guard.ensure_held() {
        Err(LockError::Lost { why: reported, .. }) => assert_eq!(reported, why),
        other => panic!("expected the loss, got {other:?}"),
    }
    let again = channel.recv_timeout(TEST_TIMEOUT);
    assert_eq!(
        again,
        Err(crossbeam_channel::RecvTimeoutError::Disconnected),
        "reported twice, or never closed"
    );
    why
}

/// A client in another language: `SET key id NX PX ttl`.
pub(crate) fn foreign_take(server: &RedisServer, key: &str, id: &str, ttl_ms: u32) -> bool {
    let reply: Option<String> = server.query(&["SET", key, id, "NX", "PX", &ttl_ms.to_string()]);
    reply.is_some()
}

/// A client in another language: compare and delete.
pub(crate) fn foreign_release(server: &RedisServer, key: &str, id: &str) -> bool {
    const SCRIPT: &str = "if redis.call('GET', KEYS[1]) == ARGV[1] \
                          then return redis.call('DEL', KEYS[1]) else return 0 end";
    server.query::<i64>(&["EVAL", SCRIPT, "1", key, id]) == 1
}

/// Matches the renewal of one lock: the one request that names the lock and not its queue.
pub(crate) fn is_renewal(lock: &'static str) -> impl Fn(&[Vec<u8>]) -> bool + Send + 'static {
    move |words| {
        let text = |word: &Vec<u8>| String::from_utf8_lossy(word).into_owned();
        words.iter().any(|word| text(word) == lock)
            && !words.iter().any(|word| text(word).contains("distlock:queue"))
    }
}

/// Calls a function when it is dropped, also if an assertion fails. A thread scope needs this,
/// because it waits for its threads however it is left.
pub(crate) struct Defer<F: FnMut()>(pub(crate) F);

impl<F: FnMut()> Drop for Defer<F> {
    fn drop(&mut self) {
        self.0();
    }
}

/// Maximum duration of a test in its own process; longer than all its waits together.
const OWN_PROCESS_MAX: Duration = Duration::from_secs(15 * 60);

/// Runs the named test again in its own process. Returns true only there. For tests of what exists
/// once in a process, such as the logger.
#[track_caller]
pub(crate) fn in_own_process(test: &str, env: &[(&str, &str)]) -> bool {
    const MARK: &str = "DISTLOCK_TEST_ALONE";
    if env::var_os(MARK).is_some() {
        return true;
    }
    let program = env::current_exe().unwrap();
    let watchdog = Watchdog::start();
    let mut command = Command::new(program);
    command.args([test, "--exact", "--nocapture"]).env(MARK, "1").envs(env.iter().copied());
    let child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    watchdog.guard(child.id());
    let pid = Pid::from_child(&child);
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || sender.send(child.wait_with_output()));
    let ended = receiver.recv_timeout(OWN_PROCESS_MAX).or_else(|_| {
        let _ = kill_process(pid, Signal::KILL);
        receiver.recv_timeout(TEST_TIMEOUT)
    });
    let output = ended.unwrap().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{}: {stdout}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(stdout.contains("1 passed"), "no test has the name {test}: {stdout}");
    false
}

/// The names of the library's threads in this process, one for each thread, sorted.
pub(crate) fn distlock_threads() -> Vec<String> {
    let name = |task: std::io::Result<fs::DirEntry>| {
        fs::read_to_string(task.ok()?.path().join("comm")).ok()
    };
    let names = fs::read_dir("/proc/self/task").unwrap().filter_map(name);
    let mut ours: Vec<_> = names.filter(|name| name.starts_with("distlock")).collect();
    ours.sort();
    ours
}

/// Number of open files of this process.
pub(crate) fn open_files() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// The address of the server as errors show it.
pub(crate) fn label(server: &RedisServer) -> Arc<str> {
    format!("127.0.0.1:{}", server.port()).into()
}

/// Records log messages from here on, up to `level`. Only for tests that run `in_own_process`,
/// because a process has one logger.
pub(crate) fn capture_log(level: log::LevelFilter) -> &'static Mutex<Vec<String>> {
    static LOGGED: Mutex<Vec<String>> = Mutex::new(Vec::new());

    struct Capture;

    impl log::Log for Capture {
        fn enabled(&self, _: &log::Metadata<'_>) -> bool {
            true
        }

        fn log(&self, record: &log::Record<'_>) {
            LOGGED.lock().push(format!("{} {} {}", record.level(), record.target(), record.args()));
        }

        fn flush(&self) {}
    }

    log::set_logger(&Capture).unwrap();
    log::set_max_level(level);
    &LOGGED
}
