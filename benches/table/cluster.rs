//! Several independent servers.

use std::time::Duration;

use distlock::Config;

use crate::support::RedisServer;

pub(crate) struct Cluster {
    pub(crate) servers: Vec<RedisServer>,
}

impl Cluster {
    pub(crate) fn start(nodes: usize) -> Cluster {
        Cluster { servers: (0..nodes).map(|_| RedisServer::start()).collect() }
    }

    /// All URLs, with commas between them.
    pub(crate) fn urls(&self) -> String {
        self.servers.iter().map(RedisServer::url).collect::<Vec<_>>().join(",")
    }

    pub(crate) fn pids(&self) -> Vec<u32> {
        self.servers.iter().map(RedisServer::pid).collect()
    }

    /// How often all of them together have run a script.
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

/// For servers that have only just been started, and nobody has held a lock on them before.
pub(crate) fn config(urls: &str) -> Config {
    Config::new(urls).quarantine(Duration::ZERO)
}
