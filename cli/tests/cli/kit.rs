//! Short words for what several tests do with the library and its server.

use std::{
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use distlock::{Config, LockError, LockGuard, LockLost, LockOptions, RedisMgr};

use crate::support::{CEILING, RedisServer, eventually};

pub(crate) const SECOND: Duration = Duration::from_secs(1);

pub(crate) const BOUNDED: Duration = Duration::from_secs(10);

/// A configuration in which nothing but a defect runs into a timeout, however slow the machine.
pub(crate) fn patient(url: impl Into<String>) -> Config {
    Config::new(url).ttl(30 * SECOND).operation_timeout(20 * SECOND).claim_window(20 * SECOND)
}

pub(crate) fn manager(server: &RedisServer) -> RedisMgr {
    RedisMgr::new(patient(server.url())).unwrap()
}

/// A server that knows the scripts, so that the first answer that a fault meets is none to a question about those.
pub(crate) fn taught() -> RedisServer {
    let server = RedisServer::start();
    manager(&server).try_lock("warm").unwrap().release().unwrap().unwrap_released();
    server.cli(&["DEL", &fence_key("warm")]);
    server.cli(&["SCRIPT", "LOAD", include_str!("../../../src/node/lua/renew.lua")]);
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
pub(crate) fn lease(ttl: Duration) -> LockOptions {
    LockOptions::new().ttl(ttl)
}

/// What a call of the library returned, which must have been within `bound`.
#[track_caller]
pub(crate) fn within<T>(bound: Duration, what: &str, call: impl FnOnce() -> T) -> T {
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

/// A thread that waits for a lock; it is in the server's queue when this returns.
#[track_caller]
pub(crate) fn waiter(server: &RedisServer, mgr: &RedisMgr, name: &str) -> JoinHandle<Result<LockGuard, LockError>> {
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
pub(crate) fn lost(guard: &LockGuard) -> LockLost {
    let channel = guard.lost().clone();
    let why = channel.recv_timeout(CEILING).expect("the loss is told");
    assert!(!guard.is_held());
    assert_eq!(guard.remaining(), Duration::ZERO);
    match guard.ensure_held() {
        Err(LockError::Lost { why: told, .. }) => assert_eq!(told, why),
        other => panic!("expected the loss, got {other:?}"),
    }
    let again = channel.recv_timeout(CEILING);
    assert_eq!(again, Err(crossbeam_channel::RecvTimeoutError::Disconnected), "told twice, or never closed");
    why
}

/// A client in another language: `SET key id NX PX ttl`.
pub(crate) fn foreign_take(server: &RedisServer, key: &str, id: &str, ttl_ms: u32) -> bool {
    let reply: Option<String> = server.query(&["SET", key, id, "NX", "PX", &ttl_ms.to_string()]);
    reply.is_some()
}

/// Matches the renewal of one lock: the one request that names the lock and not its line.
pub(crate) fn is_renewal(lock: &'static str) -> impl Fn(&[Vec<u8>]) -> bool + Send + 'static {
    move |words| {
        let text = |word: &Vec<u8>| String::from_utf8_lossy(word).into_owned();
        words.iter().any(|word| text(word) == lock) && !words.iter().any(|word| text(word).contains("distlock:queue"))
    }
}
