//! What the tests of the library and those of the command both do with locks on a real server.

use std::{
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use distlock::{Config, LockError, LockGuard, LockLost, LockOptions, RedisMgr};

use crate::support::{RedisServer, TEST_TIMEOUT, eventually};

pub(crate) const SECOND: Duration = Duration::from_secs(1);
/// Maximum duration of a call that must not block, generous for a slow machine.
pub(crate) const CALL_LIMIT: Duration = Duration::from_secs(10);

/// A configuration whose timeouts only a defect exceeds, however slow the machine. All threads
/// queue at the server, as those of different processes do.
pub(crate) fn config_long_timeouts(url: impl Into<String>) -> Config {
    long_timeouts(Config::new(url).local_handover(Duration::ZERO))
}

pub(crate) fn long_timeouts(config: Config) -> Config {
    config.ttl(30 * SECOND).operation_timeout(20 * SECOND).claim_window(20 * SECOND)
}

pub(crate) fn manager(server: &RedisServer) -> RedisMgr {
    RedisMgr::new(config_long_timeouts(server.url())).unwrap()
}

/// A server that knows the scripts, so that no fault is spent on a request that only loads one.
pub(crate) fn server_with_scripts() -> RedisServer {
    let server = RedisServer::start();
    manager(&server).try_lock("warm").unwrap().release().unwrap().unwrap_released();
    server.cli(&["DEL", FENCE]);
    server.cli(&["SCRIPT", "LOAD", include_str!("../../src/backend/redis/lua/renew.lua")]);
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

/// Key that contains at least the largest token of all locks that were released.
pub(crate) const FENCE: &str = "distlock:fence";

pub(crate) fn queue_key(name: &str) -> String {
    format!("distlock:queue:{{lock:{name}}}")
}

pub(crate) fn token_key(name: &str) -> String {
    format!("distlock:token:{{lock:{name}}}")
}

pub(crate) fn queue_length(server: &RedisServer, name: &str) -> usize {
    server.query(&["LLEN", &queue_key(name)])
}

#[track_caller]
pub(crate) fn await_queue_length(server: &RedisServer, name: &str, waiters: usize) {
    eventually("they are queued", TEST_TIMEOUT, || queue_length(server, name) == waiters);
}

/// Starts a thread that waits for a lock, and returns once the thread is in the server's queue.
#[track_caller]
pub(crate) fn spawn_queued_waiter(
    server: &RedisServer,
    mgr: &RedisMgr,
    name: &str,
) -> JoinHandle<Result<LockGuard, LockError>> {
    let before = queue_length(server, name);
    let waiting = spawn_call(mgr, name, |mgr, name| mgr.lock(name));
    await_queue_length(server, name, before + 1);
    waiting
}

pub(crate) fn spawn_call<M: Clone + Send + 'static, T: Send + 'static>(
    mgr: &M,
    name: &str,
    call: impl FnOnce(&M, &str) -> T + Send + 'static,
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
pub(crate) fn set_foreign_lock(server: &RedisServer, key: &str, id: &str, ttl_ms: u32) -> bool {
    let reply: Option<String> = server.query(&["SET", key, id, "NX", "PX", &ttl_ms.to_string()]);
    reply.is_some()
}

/// Matches the renewal of one lock: the one request that names the lock and not its queue.
pub(crate) fn is_renewal(lock: &'static str) -> impl Fn(&[Vec<u8>]) -> bool + Send + 'static {
    move |words| {
        let text = |word: &Vec<u8>| String::from_utf8_lossy(word).into_owned();
        words.iter().any(|word| text(word) == lock)
            && !words.iter().any(|word| text(word).contains("distlock:queue"))
    }
}
