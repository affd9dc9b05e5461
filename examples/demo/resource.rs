//! What the lock protects: a number, on the server of the lock. Each holder reads it, works, and
//! writes it back plus one. The resource rejects a token that is smaller than one it has seen.

use std::{env, time::Duration};

use distlock::{Config, FencingToken, RedisMgr};

use super::database::Row;
use crate::common::Result;

/// KEYS: the resource. ARGV: a token, and a value to write or an empty string.
/// Reply: the value, or nil if the resource has seen a larger token.
const SCRIPT: &str = r"
local seen = tonumber(redis.call('HGET', KEYS[1], 'token') or '0')
if tonumber(ARGV[1]) < seen then return false end
redis.call('HSET', KEYS[1], 'token', ARGV[1])
if ARGV[2] ~= '' then redis.call('HSET', KEYS[1], 'value', ARGV[2]) end
redis.call('EXPIRE', KEYS[1], 3600)
return tonumber(redis.call('HGET', KEYS[1], 'value') or '0')
";

pub(crate) struct Resource {
    store: Store,
    key: String,
}

enum Store {
    Redis { mgr: RedisMgr, script: redis::Script },
    Database(Row),
}

impl Resource {
    /// Environment variable with the URL of the resource's server, if the locks are on other
    /// servers.
    pub(crate) const URL_VARIABLE: &str = "CONTENTION_RESOURCE_URL";

    /// The resource of a child: on the server that the parent has named, else on that of the locks.
    pub(crate) fn find(locks: &RedisMgr, key: &str) -> Result<Resource> {
        Ok(match env::var(Resource::URL_VARIABLE) {
            Ok(url) => Resource::new(&RedisMgr::new(Config::new(url))?, key),
            Err(_) => Resource::new(locks, key),
        })
    }

    pub(crate) fn new(mgr: &RedisMgr, key: &str) -> Resource {
        let store = Store::Redis { mgr: mgr.clone(), script: redis::Script::new(SCRIPT) };
        Resource { store, key: key.to_owned() }
    }

    pub(crate) fn in_database(url: &str, key: &str) -> Result<Resource> {
        Ok(Resource { store: Store::Database(Row::new(url, key)?), key: key.to_owned() })
    }

    pub(crate) fn key(&self) -> &str {
        &self.key
    }

    /// Reads the value. From now on the resource rejects smaller tokens. Returns `None` if it
    /// rejects this one.
    pub(crate) fn read(&self, token: FencingToken) -> Result<Option<u64>> {
        self.call(token, None)
    }

    /// Writes a value. Returns false if the resource rejects the token.
    pub(crate) fn write(&self, token: FencingToken, value: u64) -> Result<bool> {
        Ok(self.call(token, Some(value))?.is_some())
    }

    pub(crate) fn remove(&self) -> Result {
        match &self.store {
            Store::Redis { mgr, .. } => {
                Ok(redis::cmd("DEL").arg(&self.key).query(&mut mgr.connection()?)?)
            }
            Store::Database(row) => row.remove(),
        }
    }

    /// Repeats the call if the reply is lost, as happens to a process that is stopped while it
    /// waits for one. A repeated call with the same token changes nothing.
    fn call(&self, token: FencingToken, value: Option<u64>) -> Result<Option<u64>> {
        let (mgr, script) = match &self.store {
            Store::Redis { mgr, script } => (mgr, script),
            Store::Database(row) => return row.call(token, value),
        };
        let value = value.map(|value| value.to_string()).unwrap_or_default();
        let mut call = script.key(&self.key);
        call.arg(token.as_u64()).arg(value);
        let mut attempts = 1..=3;
        loop {
            attempts.next();
            match call.invoke(&mut mgr.connection()?) {
                Err(error) if error.is_io_error() && !attempts.is_empty() => {}
                reply => return Ok(reply?),
            }
        }
    }
}

/// Duration of the work in a round. It is done in steps.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Work(pub(crate) Duration);

impl Work {
    pub(crate) const STEP: Duration = Duration::from_millis(20);

    pub(crate) fn shortest(self) -> Duration {
        self.0 / 2
    }

    pub(crate) fn longest(self) -> Duration {
        self.shortest() + self.0
    }

    /// A random duration from the shortest to the longest.
    pub(crate) fn random(self) -> Duration {
        self.shortest() + self.0.mul_f64(fastrand::f64())
    }
}
