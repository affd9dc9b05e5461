//! Short words for what many tests do with the library and its server.

use std::{
    env,
    process::{Command, Stdio},
    sync::{Arc, mpsc},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use distlock::{Config, LockError, LockGuard, LockLost, LockOptions, RedisMgr};
use parking_lot::Mutex;
use rustix::process::{Pid, Signal, kill_process};

use crate::support::{CEILING, FaultProxy, RedisServer, Watchdog, eventually};

pub(crate) const SECOND: Duration = Duration::from_secs(1);
/// One operation timeout in tests where the server does not answer, and what such calls may take on
/// a slow machine.
pub(crate) const SHORT_TIMEOUT: Duration = Duration::from_millis(500);
pub(crate) const CALL_LIMIT: Duration = Duration::from_secs(10);

/// A configuration in which nothing but a defect runs into a timeout, however slow the machine.
pub(crate) fn config_long_timeouts(url: impl Into<String>) -> Config {
    Config::new(url).ttl(30 * SECOND).operation_timeout(20 * SECOND).claim_window(20 * SECOND)
}

/// A configuration for servers that do not answer.
pub(crate) fn config_short_timeout(url: impl Into<String>) -> Config {
    config_long_timeouts(url).operation_timeout(SHORT_TIMEOUT)
}

/// A configuration in which a request that is lost is soon made up for, and one that is carried out
/// is in time.
pub(crate) fn config_medium_timeout(url: impl Into<String>) -> Config {
    config_long_timeouts(url).operation_timeout(4 * SECOND)
}

pub(crate) fn manager(server: &RedisServer) -> RedisMgr {
    RedisMgr::new(config_long_timeouts(server.url())).unwrap()
}

/// A server, a proxy in front of it, and a manager behind that whose scripts the server knows
/// already.
pub(crate) fn server_behind_proxy(
    config: impl FnOnce(String) -> Config,
) -> (RedisServer, FaultProxy, RedisMgr) {
    let server = server_with_scripts();
    let proxy = FaultProxy::in_front_of(server.addr());
    let mgr = RedisMgr::new(config(proxy.url())).unwrap();
    eventually("it answers", CEILING, || mgr.ping().is_ok());
    (server, proxy, mgr)
}

/// A server that knows the scripts, so that the first answer that a fault meets is none to a
/// question about those.
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

/// The options of a lock with this lease.
pub(crate) fn with_ttl(ttl: Duration) -> LockOptions {
    LockOptions::new().ttl(ttl)
}

/// What a call of the library returned, which must have been within `bound`.
#[track_caller]
pub(crate) fn completes_within<T>(bound: Duration, what: &str, call: impl FnOnce() -> T) -> T {
    let (result, took) = timed(call);
    assert!(took < bound, "{what} took {took:?}");
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

/// Whoever believes in a lock believes no longer than its key lives; read in the order in which a
/// slow machine does no harm.
#[track_caller]
pub(crate) fn expect_deadline_before_key_expiry(server: &RedisServer, guard: &LockGuard) {
    let key = pttl(server, &format!("lock:{}", guard.name()));
    let left = guard.remaining();
    // The server tells whole milliseconds.
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
    eventually("they stand in line", CEILING, || queued(server, name) == waiters);
}

#[track_caller]
pub(crate) fn await_gone(server: &RedisServer, key: &str) {
    eventually("the key is gone", CEILING, || get(server, key).is_none());
}

/// A thread that waits for a lock; it is in the server's queue when this returns.
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

/// Why the lock was lost, as the channel says; it must say it exactly once.
#[track_caller]
pub(crate) fn expect_loss(guard: &LockGuard) -> LockLost {
    let channel = guard.lost().clone();
    let why = channel.recv_timeout(CEILING).expect("the loss is told");
    assert!(!guard.is_held());
    assert_eq!(guard.remaining(), Duration::ZERO);
    match guard.ensure_held() {
        Err(LockError::Lost { why: told, .. }) => assert_eq!(told, why),
        other => panic!("expected the loss, got {other:?}"),
    }
    let again = channel.recv_timeout(CEILING);
    assert_eq!(
        again,
        Err(crossbeam_channel::RecvTimeoutError::Disconnected),
        "told twice, or never closed"
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
    const SCRIPT: &str = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) else return 0 end";
    server.query::<i64>(&["EVAL", SCRIPT, "1", key, id]) == 1
}

/// Matches the renewal of one lock: the one request that names the lock and not its line.
pub(crate) fn is_renewal(lock: &'static str) -> impl Fn(&[Vec<u8>]) -> bool + Send + 'static {
    move |words| {
        let text = |word: &Vec<u8>| String::from_utf8_lossy(word).into_owned();
        words.iter().any(|word| text(word) == lock)
            && !words.iter().any(|word| text(word).contains("distlock:queue"))
    }
}

/// Does this when it is dropped, also by an assertion that fails: a scope waits for its threads,
/// however it is left.
pub(crate) struct Defer<F: FnMut()>(pub(crate) F);

impl<F: FnMut()> Drop for Defer<F> {
    fn drop(&mut self) {
        self.0();
    }
}

/// Longer than all that a test waits for, one after the other.
const ALONE_MAX: Duration = Duration::from_secs(15 * 60);

/// Runs the named test again in a process of its own, where alone this is true; for tests of what a
/// process has once.
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
    let (tell, told) = mpsc::channel();
    thread::spawn(move || tell.send(child.wait_with_output()));
    let ended = told.recv_timeout(ALONE_MAX).or_else(|_| {
        let _ = kill_process(pid, Signal::KILL);
        told.recv_timeout(CEILING)
    });
    let output = ended.unwrap().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{}: {said}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(said.contains("1 passed"), "no test has the name {test}: {said}");
    false
}

/// The name of the server as errors tell it.
pub(crate) fn label(server: &RedisServer) -> Arc<str> {
    format!("127.0.0.1:{}", server.port()).into()
}

/// Keeps what is logged from here on, up to `level`; only for a test that is `alone`, since there
/// is one logger.
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
