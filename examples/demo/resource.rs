//! What the lock protects: a number in Redis that everybody reads, works on, and writes back one larger. It refuses
//! whoever comes with an older token than it has seen.

use std::{env, time::Duration};

use distlock::{Config, FencingToken, RedisMgr};

use crate::common::Outcome;

/// KEYS: the resource. ARGV: a token, and a value to write or nothing.
/// Replies with the value, or with nothing when the token is older than one that was here before.
const SCRIPT: &str = r"
local seen = tonumber(redis.call('HGET', KEYS[1], 'token') or '0')
if tonumber(ARGV[1]) < seen then return false end
redis.call('HSET', KEYS[1], 'token', ARGV[1])
if ARGV[2] ~= '' then redis.call('HSET', KEYS[1], 'value', ARGV[2]) end
redis.call('EXPIRE', KEYS[1], 3600)
return tonumber(redis.call('HGET', KEYS[1], 'value') or '0')
";

#[derive(Debug)]
pub(crate) struct Resource {
    mgr: RedisMgr,
    key: String,
    script: redis::Script,
}

impl Resource {
    /// The variable that names the resource's server, where it is not that of the locks.
    pub(crate) const SERVER: &str = "CONTENTION_RESOURCE_URL";

    /// Of a child: on the server that the parent has named, or on that of the locks.
    pub(crate) fn find(locks: &RedisMgr, key: &str) -> Outcome<Resource> {
        Ok(match env::var(Resource::SERVER) {
            Ok(url) => Resource::new(&RedisMgr::new(Config::new(url))?, key),
            Err(_) => Resource::new(locks, key),
        })
    }

    pub(crate) fn new(mgr: &RedisMgr, key: &str) -> Resource {
        Resource { mgr: mgr.clone(), key: key.to_owned(), script: redis::Script::new(SCRIPT) }
    }

    pub(crate) fn key(&self) -> &str {
        &self.key
    }

    /// The value, if no later holder has been here. From now on, earlier ones are refused.
    pub(crate) fn read(&self, token: FencingToken) -> Outcome<Option<u64>> {
        self.call(token, None)
    }

    /// Whether the value was taken.
    pub(crate) fn write(&self, token: FencingToken, value: u64) -> Outcome<bool> {
        Ok(self.call(token, Some(value))?.is_some())
    }

    pub(crate) fn remove(&self) -> Outcome {
        Ok(redis::cmd("DEL").arg(&self.key).query(&mut self.mgr.connection()?)?)
    }

    /// Asks again when the answer is lost, as happens to a process that is stopped while it waits for one. Doing the
    /// same twice under one token changes nothing more.
    fn call(&self, token: FencingToken, value: Option<u64>) -> Outcome<Option<u64>> {
        let value = value.map(|value| value.to_string()).unwrap_or_default();
        let mut call = self.script.key(&self.key);
        call.arg(token.as_u64()).arg(value);
        let mut tries = 1..=3;
        loop {
            tries.next();
            match call.invoke(&mut self.mgr.connection()?) {
                Err(error) if error.is_io_error() && !tries.is_empty() => {}
                answer => return Ok(answer?),
            }
        }
    }
}

/// How long the work on one round takes, a part of it at a time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work(pub(crate) Duration);

impl Work {
    pub(crate) const STEP: Duration = Duration::from_millis(20);

    pub(crate) fn shortest(self) -> Duration {
        self.0 / 2
    }

    /// Half to one and a half of the usual.
    pub(crate) fn once(self) -> Duration {
        self.shortest() + self.0.mul_f64(fastrand::f64())
    }
}
