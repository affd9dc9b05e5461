//! `Config`: how servers are reached, and the defaults of locks, with their units.

mod options;
mod settings;

use std::{env, fmt, sync::Arc, time::Duration};

pub use self::options::LockOptions;
pub(crate) use self::settings::Settings;
use crate::{event::HandleEvent, node::Endpoint};

/// How a [`RedisMgr`](crate::RedisMgr) reaches its server, and the defaults of its locks.
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
    /// The variable whose URL is no text: it may not be passed over, which would be to lock elsewhere.
    unreadable: Option<&'static str>,
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
    /// A configuration for the server at `url`: `redis://[user[:password]@]host[:port][/db]`, the same with
    /// `valkey://`, or `unix:///path/to/socket[?db=0&user=…&pass=…]`. Several URLs, with commas between them, are
    /// [nodes](Self::nodes). They are looked at when a manager is made of them.
    pub fn new(url: impl Into<String>) -> Config {
        Config::nodes(split(&url.into()))
    }

    /// A configuration for several independent servers that decide together: a lock is held when more than half of the
    /// nodes keep it, so two of five, or one of three, may be away. They have to be masters that do not replicate to each
    /// other; name them in the same order everywhere, for waiters line up on the first that is there.
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
            unreadable: None,
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

    /// The URL, or URLs, from the environment: `DISTLOCK_URL`, else `REDIS_URL`, else `redis://127.0.0.1:6379`.
    /// One that is not UTF-8 is refused when a manager is made of it.
    pub fn from_env() -> Config {
        let set = |name| env::var_os(name).filter(|url| !url.is_empty()).map(|url| (name, url));
        match ["DISTLOCK_URL", "REDIS_URL"].into_iter().find_map(set) {
            Some((name, url)) => match url.into_string() {
                Ok(url) => Config::new(url),
                // Still one server for those who look at the nodes one by one, and none that works.
                Err(_) => Config { unreadable: Some(name), ..Config::nodes([""]) },
            },
            None => Config::new("redis://127.0.0.1:6379"),
        }
    }

    /// The password for all servers whose URL has none: for secrets that are kept apart from addresses. Defaults to none.
    ///
    /// ```
    /// let config = distlock::Config::new("redis://10.0.0.5").password("secret");
    /// assert!(!format!("{config:?}").contains("secret"));
    /// ```
    pub fn password(mut self, password: impl Into<String>) -> Config {
        self.password = Some(password.into()).filter(|password| !password.is_empty());
        self
    }

    /// What stands before each lock name to make its key. Defaults to `lock:`. With an empty prefix the keys are the
    /// bare names, and a key without an expiry is then never given one, since it may be anybody's data.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Config {
        self.prefix = prefix.into();
        self
    }

    /// How many connections the pool may hold, to each node. Defaults to 10. Threads that wait for a lock use none of them.
    pub fn pool_size(mut self, connections: u32) -> Config {
        self.pool_size = connections;
        self
    }

    /// The longest time for one exchange with the server, connecting included. Defaults to 1 s. For a lock with a
    /// short lease it is shortened, so that a second try fits into the lease.
    ///
    /// Five round trips have to fit in: a release connects and asks in half of the time, so that it can do so twice.
    pub fn operation_timeout(mut self, timeout: Duration) -> Config {
        self.operation_timeout = timeout;
        self
    }

    /// How long a lock is kept for the next waiter until it answers. Defaults to 1 s, and is never longer than the
    /// lease. A waiter that is connected but frozen holds up the line for this long; a waiter that cannot run within
    /// it loses its turn.
    pub fn claim_window(mut self, window: Duration) -> Config {
        self.claim_window = window;
        self
    }

    /// How long a thread keeps its core while it waits for an answer, before it sleeps. Defaults to 200 µs; zero never
    /// spins. It only spins where answers usually come within that time, lets other threads run meanwhile, and never
    /// while it waits for a lock: only while a request to a server nearby is under way. Without effect for several nodes.
    pub fn spin(mut self, longest: Duration) -> Config {
        self.spin = longest;
        self
    }

    /// The lease of locks that do not say otherwise: how long a lock outlives a holder that died. Defaults to 10 s;
    /// 10 ms to 24 h. It is renewed every third of it.
    pub fn ttl(mut self, ttl: Duration) -> Config {
        self.ttl = ttl;
        self
    }

    /// For how long one of several nodes does not vote after it may have lost its memory: after a restart, the first
    /// start included. Voting sooner, it would give locks away that it has forgotten. One that writes everything to disk
    /// before it answers (`appendonly yes`, `appendfsync always`), and has no replicas, is told when it has outlived this,
    /// under the key `distlock:memory`; a restart with that key on its disk costs it no votes.
    ///
    /// It has to be the longest [`ttl`](Self::ttl) that anybody takes locks with on these nodes, and a lock with a longer one
    /// is refused. Defaults to the ttl of this configuration for three nodes and more, and to zero, which switches it
    /// off, for less: two nodes cannot spare one.
    pub fn quarantine(mut self, longest_ttl: Duration) -> Config {
        self.quarantine = Some(longest_ttl);
        self
    }

    /// The longest time that locks which do not say otherwise are held. Defaults to no limit.
    /// See [`LockOptions::max_hold`].
    pub fn max_hold(mut self, limit: Duration) -> Config {
        self.max_hold = Some(limit);
        self
    }

    /// Tells this handler what happens to the locks. May be called several times; each handler is told of everything, in
    /// the order in which they were set. Defaults to none, and then no thread is started for them.
    pub fn events(mut self, handler: Arc<dyn HandleEvent>) -> Config {
        self.handlers.push(handler);
        self
    }

    /// This configuration for each of its nodes alone, in their order: for tools that look at the nodes one by one.
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
            .field("servers", &self.urls.iter().map(|url| shown(url)).collect::<Vec<_>>())
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

/// Where another URL begins after a comma; a password may contain commas.
fn split(urls: &str) -> Vec<String> {
    let mut list: Vec<String> = Vec::new();
    for piece in urls.split(',') {
        let piece_is_url = piece.trim_start().split_once("://").is_some_and(|(scheme, _)| {
            !scheme.is_empty() && scheme.bytes().all(|byte| byte.is_ascii_alphabetic() || byte == b'+')
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

fn shown(url: &str) -> String {
    Endpoint::parse(url).map_or_else(|_| "<not usable>".into(), |endpoint| endpoint.label.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comma_in_a_password_ends_no_url() {
        let config = Config::new("redis://:a,b@h1:1, redis://u:c%2Cd@h2:2,unix:///s?pass=e,f,valkey://:,,g@h3:3");
        let endpoints = config.check().unwrap().endpoints;
        let read: Vec<_> =
            endpoints.iter().map(|endpoint| (&*endpoint.label, endpoint.password.as_deref().unwrap())).collect();
        assert_eq!(read, [("h1:1", "a,b"), ("h2:2", "c,d"), ("/s", "e,f"), ("h3:3", ",,g")]);
    }
}
