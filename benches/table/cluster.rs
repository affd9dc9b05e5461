//! Several independent servers.

use std::time::Duration;

use distlock::{Config, LockManager, MySqlConfig, MySqlMgr, RedisMgr};

use crate::{Result, support::RedisServer};

pub(crate) struct Cluster {
    pub(crate) servers: Vec<RedisServer>,
}

impl Cluster {
    pub(crate) fn start(nodes: usize) -> Cluster {
        Cluster { servers: (0..nodes).map(|_| RedisServer::start()).collect() }
    }

    /// All URLs, separated by commas.
    pub(crate) fn urls(&self) -> String {
        self.urls_from(0)
    }

    /// All URLs in an order that begins with this server, and is otherwise the same.
    pub(crate) fn urls_from(&self, first: usize) -> String {
        let urls = self.servers.iter().map(RedisServer::url);
        urls.cycle().skip(first).take(self.servers.len()).collect::<Vec<_>>().join(",")
    }

    pub(crate) fn pids(&self) -> Vec<u32> {
        self.servers.iter().map(RedisServer::pid).collect()
    }

    /// Number of script calls on all servers together.
    pub(crate) fn script_calls(&self) -> u64 {
        let calls = |server: &RedisServer| -> u64 {
            let stats = server.commandstats();
            ["eval", "evalsha"].iter().filter_map(|name| stats.get(*name)).sum()
        };
        self.servers.iter().map(calls).sum()
    }

    pub(crate) fn config(&self) -> Config {
        config(&self.urls())
    }
}

/// The configuration for servers that have just been started. They need no quarantine, because they
/// have never granted a lock.
pub(crate) fn config(urls: &str) -> Config {
    Config::new(urls).quarantine(Duration::ZERO)
}

/// A manager for these servers, or for the database of a URL that begins with `mysql`. It may hold
/// this number of locks in a database, each of which needs a connection.
pub(crate) fn manager(urls: &str, locks: usize) -> Result<Box<dyn LockManager>> {
    if urls.starts_with("mysql:") {
        let config = MySqlConfig::new(urls).max_connections(u32::try_from(locks)?);
        return Ok(Box::new(MySqlMgr::new(config)?));
    }
    Ok(Box::new(RedisMgr::new(config(urls))?))
}
