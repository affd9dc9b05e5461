//! `Config`: how a manager reaches its servers, and the defaults of its locks.

mod options;
mod validated;

use std::{env, fmt, sync::Arc, time::Duration};

pub use self::options::LockOptions;
pub(crate) use self::validated::ValidatedConfig;
use crate::{event::HandleEvent, node::Endpoint};

/// How a [`RedisMgr`](crate::RedisMgr) reaches its server or nodes, and the defaults of its locks.
///
/// ```
/// use std::time::Duration;
/// let config = distlock::Config::new("redis://:secret@10.0.0.5:6379/0").ttl(Duration::from_secs(30));
/// assert!(!format!("{config:?}").contains("secret"));
/// ```
#[derive(Clone)]
#[must_use]
pub struct Config {
    urls: Vec<String>,
    /// The environment variable whose URL is not UTF-8. It must not be ignored, because the locks
    /// would then be taken on another server.
    non_utf8_variable: Option<&'static str>,
    password: Option<String>,
    prefix: String,
    pool_size: u32,
    operation_timeout: Duration,
    claim_window: Duration,
    spin: Duration,
    ttl: Duration,
    quarantine: Option<Duration>,
    max_hold: Option<Duration>,
    handlers: Vec<Arc<dyn HandleEvent>>,
}

impl Config {
    /// Creates a configuration for the server at `url`:
    /// `redis://[user[:password]@]host[:port][/db]`, the same with `valkey://`, or
    /// `unix:///path/to/socket[?db=0&user=…&pass=…]`.
    ///
    /// Several URLs, separated by commas, are [nodes](Self::nodes). A URL is validated when a
    /// manager is created.
    pub fn new(url: impl Into<String>) -> Config {
        Config::nodes(split_urls(&url.into()))
    }

    /// Creates a configuration for several independent servers (Redlock). A lock is held while more
    /// than half of the nodes keep it: with three nodes one may be unreachable, with five nodes
    /// two.
    ///
    /// The nodes must be masters that do not replicate to each other. List them in the same order
    /// in every program, because waiters queue on the first reachable node.
    ///
    /// ```
    /// let config = distlock::Config::nodes(["redis://10.0.0.1", "redis://10.0.0.2", "redis://10.0.0.3"]);
    /// # let _ = config;
    /// ```
    pub fn nodes<I>(urls: I) -> Config
    where
        I: IntoIterator,
        I::Item: Into<String>,
    {
        Config {
            urls: urls.into_iter().map(Into::into).collect(),
            non_utf8_variable: None,
            password: None,
            prefix: "lock:".into(),
            pool_size: 10,
            operation_timeout: Duration::from_secs(1),
            claim_window: Duration::from_secs(1),
            spin: Duration::from_micros(200),
            ttl: Duration::from_secs(10),
            quarantine: None,
            max_hold: None,
            handlers: Vec::new(),
        }
    }

    /// Creates a configuration from the environment: `DISTLOCK_URL`, else `REDIS_URL`, else
    /// `redis://127.0.0.1:6379`. If the variable is not UTF-8, creating a manager fails.
    pub fn from_env() -> Config {
        let set = |name| env::var_os(name).filter(|url| !url.is_empty()).map(|url| (name, url));
        match ["DISTLOCK_URL", "REDIS_URL"].into_iter().find_map(set) {
            Some((name, url)) => match url.into_string() {
                Ok(url) => Config::new(url),
                // One unusable server, so that `each_node` returns one configuration.
                Err(_) => Config { non_utf8_variable: Some(name), ..Config::nodes([""]) },
            },
            None => Config::new("redis://127.0.0.1:6379"),
        }
    }

    /// Sets the password for every server whose URL has none, for secrets that are kept apart from
    /// addresses. Defaults to no password.
    ///
    /// ```
    /// let config = distlock::Config::new("redis://10.0.0.5").password("secret");
    /// assert!(!format!("{config:?}").contains("secret"));
    /// ```
    pub fn password(mut self, password: impl Into<String>) -> Config {
        self.password = Some(password.into()).filter(|password| !password.is_empty());
        self
    }

    /// Sets the prefix that turns a lock name into its key. Defaults to `lock:`.
    ///
    /// With an empty prefix, the keys are the bare names. A lock key without an expiry, which could
    /// be any data, then never gets one.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Config {
        self.prefix = prefix.into();
        self
    }

    /// Sets the maximum number of pooled connections to each node. Defaults to 10. A thread that
    /// waits for a lock uses none of them.
    pub fn pool_size(mut self, connections: u32) -> Config {
        self.pool_size = connections;
        self
    }

    /// Sets the maximum time for one exchange with the server, including the connect. Defaults to 1
    /// s. For a lock with a short ttl the timeout is shorter, so that a second attempt fits
    /// into the lease.
    ///
    /// Allow for at least five round trips: a release connects and sends its request within half of
    /// this time, so that it can do both twice.
    pub fn operation_timeout(mut self, timeout: Duration) -> Config {
        self.operation_timeout = timeout;
        self
    }

    /// Sets how long a lock is reserved for the next waiter until that waiter confirms it. Defaults
    /// to 1 s, and is never longer than the lease.
    ///
    /// A waiter that is connected but frozen delays the queue by this time. A waiter that cannot
    /// run within this time loses its turn.
    pub fn claim_window(mut self, window: Duration) -> Config {
        self.claim_window = window;
        self
    }

    /// Sets how long a thread busy-waits for a reply before it sleeps. Defaults to 200 µs; zero
    /// turns it off.
    ///
    /// A thread only spins while it has sent a request to a server whose replies usually arrive
    /// within that time, and it yields to other threads. It never spins while it waits for a
    /// lock. No effect with several nodes.
    pub fn spin(mut self, longest: Duration) -> Config {
        self.spin = longest;
        self
    }

    /// Sets the ttl of locks whose options do not set one: how long a lock outlives a holder that
    /// died. Defaults to 10 s; allowed are 10 ms to 24 h. The lock is renewed every third of
    /// the ttl.
    pub fn ttl(mut self, ttl: Duration) -> Config {
        self.ttl = ttl;
        self
    }

    /// Sets how long one of several nodes does not vote after a restart, including its first start.
    /// A restarted node may have lost its data, and would grant locks that are still held.
    ///
    /// A node loses no votes in a restart if it writes everything to disk before it replies
    /// (`appendonly yes`, `appendfsync always`), has no replicas, and has been up for this long
    /// once. Managers then store the key `distlock:memory` on it; a restart with that key on
    /// disk skips the quarantine.
    ///
    /// The quarantine must be at least the longest [`ttl`](Self::ttl) that any program uses on
    /// these nodes. A lock with a longer ttl is refused. With three or more nodes, the
    /// quarantine defaults to the ttl of this configuration. With fewer, it defaults to zero,
    /// which turns it off: two nodes cannot spare one.
    pub fn quarantine(mut self, longest_ttl: Duration) -> Config {
        self.quarantine = Some(longest_ttl);
        self
    }

    /// Sets the maximum time that a lock is held, for locks whose options do not set one. Defaults
    /// to no limit. See [`LockOptions::max_hold`].
    pub fn max_hold(mut self, limit: Duration) -> Config {
        self.max_hold = Some(limit);
        self
    }

    /// Adds a handler for the events of this manager's locks. Each handler receives every event, in
    /// the order in which the handlers were added. Defaults to none; no thread for events is
    /// started then.
    pub fn event_handler(mut self, handler: Arc<dyn HandleEvent>) -> Config {
        self.handlers.push(handler);
        self
    }

    /// Returns a configuration for each single node, in order: for tools that check the nodes one
    /// by one.
    ///
    /// ```
    /// let nodes = distlock::Config::new("redis://10.0.0.1,redis://10.0.0.2").each_node();
    /// assert_eq!(nodes.len(), 2);
    /// ```
    #[must_use]
    pub fn each_node(&self) -> Vec<Config> {
        self.urls.iter().map(|url| Config { urls: vec![url.clone()], ..self.clone() }).collect()
    }
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Config")
            .field("servers", &self.urls.iter().map(|url| display_label(url)).collect::<Vec<_>>())
            .field("prefix", &self.prefix)
            .field("pool_size", &self.pool_size)
            .field("operation_timeout", &self.operation_timeout)
            .field("claim_window", &self.claim_window)
            .field("spin", &self.spin)
            .field("ttl", &self.ttl)
            .field("quarantine", &self.quarantine)
            .field("max_hold", &self.max_hold)
            .field("events", &self.handlers)
            .finish()
    }
}

impl Default for Config {
    fn default() -> Config {
        Config::from_env()
    }
}

/// Splits at the commas that are followed by another URL; a password may contain commas.
fn split_urls(urls: &str) -> Vec<String> {
    let mut list: Vec<String> = Vec::new();
    for piece in urls.split(',') {
        let piece_is_url = piece.trim_start().split_once("://").is_some_and(|(scheme, _)| {
            !scheme.is_empty()
                && scheme.bytes().all(|byte| byte.is_ascii_alphabetic() || byte == b'+')
        });
        match list.last_mut() {
            Some(last) if !piece_is_url => {
                last.push(',');
                last.push_str(piece);
            }
            _ => list.push(piece.trim().to_owned()),
        }
    }
    list
}

fn display_label(url: &str) -> String {
    Endpoint::parse(url)
        .map_or_else(|_| "<not usable>".into(), |endpoint| endpoint.label.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comma_in_a_password_does_not_split_urls() {
        let config = Config::new(
            "redis://:a,b@h1:1, redis://u:c%2Cd@h2:2,unix:///s?pass=e,f,valkey://:,,g@h3:3",
        );
        let endpoints = config.validate().unwrap().endpoints;
        let read: Vec<_> = endpoints
            .iter()
            .map(|endpoint| (&*endpoint.label, endpoint.password.as_deref().unwrap()))
            .collect();
        assert_eq!(read, [("h1:1", "a,b"), ("h2:2", "c,d"), ("/s", "e,f"), ("h3:3", ",,g")]);
    }
}
