//! `Config`: how a manager reaches its servers, and the defaults of its locks.

mod diagnosis;
#[cfg(feature = "mysql")]
mod mysql;
mod options;
#[cfg(feature = "tls")]
mod tls;
mod urls;
mod validated;

use std::{env, fmt, sync::Arc, time::Duration};

#[cfg(feature = "mysql")]
pub use self::mysql::MySqlConfig;
pub use self::options::LockOptions;
#[cfg(feature = "tls")]
pub use self::tls::Tls;
pub(crate) use self::validated::{LockParams, ValidatedConfig};
use self::{
    urls::{split_urls, with_lower_case_scheme},
    validated::TTL_MAX,
};
use crate::{
    backend::redis::{self, Endpoint, Replicas},
    error::{LockError, Result},
    observe::event::HandleEvent,
};

/// What the keys of locks begin with, unless [`Config::prefix`] says otherwise.
pub(crate) const DEFAULT_PREFIX: &str = "lock:";

/// How a [`RedisMgr`](crate::RedisMgr) reaches its server or nodes, and the defaults of its locks.
///
/// ```
/// use std::time::Duration;
/// let url = "redis://:secret@10.0.0.5:6379/0";
/// let config = distlock::Config::new(url).ttl(Duration::from_secs(30));
/// assert!(!format!("{config:?}").contains("secret"));
/// ```
#[derive(Clone)]
#[must_use]
pub struct Config {
    urls: Vec<String>,
    /// Environment variable from which the URLs are.
    variable: Option<&'static str>,
    /// Whether the variable is UTF-8. Do not ignore one that is not: the locks would then be
    /// acquired on another server.
    is_utf8: bool,
    password: Option<String>,
    pub(crate) prefix: String,
    pub(crate) pool_size: u32,
    pub(crate) operation_timeout: Duration,
    pub(crate) claim_window: Duration,
    pub(crate) spin: Duration,
    pub(crate) local_handover: Duration,
    pub(crate) ttl: Duration,
    chosen_quarantine: Option<Duration>,
    max_hold: Option<Duration>,
    pub(crate) yield_to_others: Duration,
    pub(crate) replicas: Replicas,
    pub(crate) fail_fast: bool,
    pub(crate) handlers: Vec<Arc<dyn HandleEvent>>,
    pub(crate) metrics_by_lock: bool,
    #[cfg(feature = "tls")]
    tls: Option<Tls>,
}

impl Config {
    /// Creates a configuration for the server at `url`:
    /// `redis://[user[:password]@]host[:port][/db]`, the same with `valkey://`, or
    /// `unix:///path/to/socket[?db=0&user=…&pass=…]`. `rediss://` and `valkeys://` are the same
    /// with TLS, with the feature `tls`.
    ///
    /// `redis+sentinel://[user[:password]@]host[:26379],host,host/master[/db]` is a server that
    /// Redis Sentinel names: the hosts are the sentinels, `master` is the name in their
    /// configuration, and the user, password and database are those of the server itself. If the
    /// sentinels need a login, add `?sentinel_user=…&sentinel_pass=…`. Locks and waiters follow the
    /// master. A failover may lose locks that the new master has not received; their guards report
    /// it.
    ///
    /// `redis+cluster://[user[:password]@]host[:6379],host` is a Redis Cluster: the hosts are some
    /// of its nodes, and each lock is kept by the node of its slot. Locks and waiters follow their
    /// slots. Names that contain `}` but no hash tag are refused.
    ///
    /// Several URLs, separated by commas, are [nodes](Self::nodes). URLs are validated only when a
    /// manager is created.
    pub fn new(url: impl Into<String>) -> Config {
        Config::nodes(split_urls(&url.into()))
    }

    /// Creates a configuration for several independent servers (Redlock). A lock is held while more
    /// than half of the nodes keep it: with three nodes one may be unreachable, with five nodes
    /// two.
    ///
    /// The nodes must be masters that do not replicate to each other. Their order means nothing.
    ///
    /// ```
    /// let urls = ["redis://10.0.0.1", "redis://10.0.0.2", "redis://10.0.0.3"];
    /// let config = distlock::Config::nodes(urls);
    /// # let _ = config;
    /// ```
    pub fn nodes<I>(urls: I) -> Config
    where
        I: IntoIterator,
        I::Item: Into<String>,
    {
        Config {
            urls: urls.into_iter().map(|url| with_lower_case_scheme(url.into())).collect(),
            variable: None,
            is_utf8: true,
            password: None,
            prefix: DEFAULT_PREFIX.into(),
            pool_size: 10,
            operation_timeout: Duration::from_secs(1),
            claim_window: Duration::from_secs(1),
            spin: Duration::from_micros(200),
            local_handover: Duration::from_millis(5),
            ttl: Duration::from_secs(10),
            chosen_quarantine: None,
            max_hold: None,
            yield_to_others: Duration::ZERO,
            replicas: Replicas::default(),
            fail_fast: false,
            handlers: Vec::new(),
            metrics_by_lock: false,
            #[cfg(feature = "tls")]
            tls: None,
        }
    }

    /// Creates a configuration from the environment: `DISTLOCK_URL`, else `REDIS_URL`, else
    /// `redis://127.0.0.1:6379`. An empty variable counts as not set. If the variable is not UTF-8,
    /// creating a manager fails.
    pub fn from_env() -> Config {
        let set = |name| env::var_os(name).filter(|url| !url.is_empty()).map(|url| (name, url));
        match ["DISTLOCK_URL", "REDIS_URL"].into_iter().find_map(set) {
            Some((name, url)) => {
                let (url, is_utf8) = match url.into_string() {
                    Ok(url) => (url, true),
                    // Never used.
                    Err(_) => (String::new(), false),
                };
                Config { variable: Some(name), is_utf8, ..Config::new(url) }
            }
            None => Config::new("redis://127.0.0.1:6379"),
        }
    }

    /// Sets the password for every server whose URL has none. Use this if you keep secrets apart
    /// from addresses. Defaults to no password.
    ///
    /// ```
    /// let config = distlock::Config::new("redis://10.0.0.5").password("secret");
    /// assert!(!format!("{config:?}").contains("secret"));
    /// ```
    pub fn password(mut self, password: impl Into<String>) -> Config {
        self.password = Some(password.into()).filter(|password| !password.is_empty());
        self
    }

    /// Sets the certificates for servers with `rediss://` URLs. Without this, the authorities of
    /// the system are trusted. With the feature `tls`.
    #[cfg(feature = "tls")]
    pub fn tls(mut self, tls: Tls) -> Config {
        self.tls = Some(tls);
        self
    }

    /// Sets the prefix that turns a lock name into its key. Defaults to `lock:`.
    ///
    /// - *python-redis-lock uses the same default.* Its waiters do not notice a release by
    ///   distlock, and its `reset_all()` deletes all locks with this prefix. If a program on the
    ///   same database uses that library, set another prefix. docs/interoperability.md has a table
    ///   of libraries that can share locks, with the prefix for each.
    /// - *The key is the prefix followed by the name, and nothing else.* `a:` with `b:c` and `a:b:`
    ///   with `c` are therefore the same lock, which either application can force to be released.
    ///   No prefix should begin with another one.
    ///
    /// With an empty prefix, the keys are the bare names. If distlock then finds a lock key without
    /// an expiry, it sets none, because the key could be any program's data.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Config {
        self.prefix = prefix.into();
        self
    }

    /// Sets the maximum number of pooled connections to each node: 1 to 10,000, by default 10. A
    /// thread that waits for a lock uses none of them. A request waits for a connection for at most
    /// half an [operation timeout](Self::operation_timeout), or with several nodes for a whole one.
    pub fn pool_size(mut self, connections: u32) -> Config {
        self.pool_size = connections;
        self
    }

    /// Sets the maximum time for one exchange with the server, including connecting: 1 ms to a
    /// minute, by default one second. For a lock with a short ttl the timeout is shorter, so that a
    /// second attempt fits into the lease.
    ///
    /// The timeout should be at least five round trips. A release may have to connect and send its
    /// request twice, and each try has half of this time.
    pub fn operation_timeout(mut self, timeout: Duration) -> Config {
        self.operation_timeout = timeout;
        self
    }

    /// Sets how long a released lock stays reserved for the next waiter, until that waiter confirms
    /// it: 10 ms to 24 h, by default one second. The ttl of the waiter's lease is an upper limit.
    ///
    /// A waiter that is connected but frozen delays the queue by this time. A waiter that cannot
    /// run within this time loses its turn.
    pub fn claim_window(mut self, window: Duration) -> Config {
        self.claim_window = window;
        self
    }

    /// Sets how long a thread busy-waits for a reply before it sleeps: at most 10 ms, by default
    /// 200 µs. Zero turns busy-waiting off.
    ///
    /// A thread busy-waits only for replies of a server that usually replies within that time, and
    /// yields to other threads meanwhile. It never busy-waits for a lock. With several nodes, this
    /// setting has no effect.
    pub fn spin(mut self, longest: Duration) -> Config {
        self.spin = longest;
        self
    }

    /// Sets for how long after a grant by the servers threads of this manager may pass a lock on
    /// without them. Defaults to 5 ms, at most 1 s and an eighth of the lease; zero turns it off.
    ///
    /// A lock that is released in this time goes to the thread of this manager that has waited
    /// longest, with a larger token and the same [id](crate::LockGuard::id). A later release goes
    /// to the servers: clients elsewhere wait for at most this time and one hold longer. Locks that
    /// differ in ttl or renewal do not pass, nor do other kinds than mutexes.
    ///
    /// Of the threads that wait for a mutex, only one of each manager is in the servers' queue. The
    /// next one joins that queue, at its end, when the first has had the lock. So if locks are held
    /// for longer than this time, a manager with many waiting threads gets the lock as often as one
    /// with a single thread that asks again and again. With zero, each thread has its own place; so
    /// it has with [`yield_to_others`](Self::yield_to_others), which turns this off.
    pub fn local_handover(mut self, window: Duration) -> Config {
        self.local_handover = window;
        self
    }

    /// Sets the ttl of locks whose options do not set one: how long a lock stays held if its holder
    /// dies. From 10 ms to 24 h; defaults to 10 s. The lock is renewed every third of the ttl.
    pub fn ttl(mut self, ttl: Duration) -> Config {
        self.ttl = ttl;
        self
    }

    /// Sets the quarantine: how long each of several nodes does not vote after a start. A node that
    /// restarts may have lost its data, and would grant locks that are still held. A first start
    /// looks like a restart, unless the nodes are [declared new](Self::declare_nodes_new). For
    /// tests on fresh nodes, set `Duration::ZERO`.
    ///
    /// A single server grants no lock during its quarantine, after a start and after a failover to
    /// another server. Locks that are held are renewed meanwhile, if the server has them. So a lock
    /// that a failover has lost is not granted while its former holder still relies on it.
    ///
    /// The quarantine must be at least the longest [`ttl`](Self::ttl) that any program uses on
    /// these nodes. A lock whose ttl is longer than the quarantine is refused. With three or more
    /// nodes, the quarantine defaults to the ttl of this configuration. With fewer, it defaults to
    /// zero, which turns it off: two nodes cannot spare one, and locks on a single server would
    /// not be available for that time.
    ///
    /// # Without a quarantine
    ///
    /// `Duration::ZERO` is safe only if no node ever loses data:
    ///
    /// - Each node writes everything to disk before it replies, from its first start on:
    ///   `appendonly yes`, `appendfsync always` and `no-appendfsync-on-rewrite no`.
    /// - No node is ever a promoted replica, and no address of a node ever leads to another server.
    /// - No node is ever restored from a backup, flushed, or started without its data.
    ///
    /// Otherwise two clients can hold a lock at the same time. distlock does not check these
    /// conditions.
    pub fn quarantine(mut self, longest_ttl: Duration) -> Config {
        self.chosen_quarantine = Some(longest_ttl);
        self
    }

    /// Declares that the nodes are new, so that they vote at once, without a
    /// [quarantine](Self::quarantine). Call this once, when the nodes are set up, before any
    /// manager connects to them; `distlock init` does the same.
    ///
    /// Only you can know that a node is new: one that has lost its data looks the same. *A wrong
    /// declaration lets two clients hold a lock at the same time.* Call this only if no node has
    /// ever been used, or if nobody has held a lock there for the longest ttl in use. Never call it
    /// whenever a program or a node starts.
    ///
    /// If all nodes are declared new already, the call changes nothing. If only some are, or if one
    /// has been used, it fails unless `even_if_used` is true, and changes nothing: another one may
    /// have lost its data. If all have lost their data, the call cannot notice. The declaration
    /// applies to the present run of each server: once a node restarts, it is in quarantine again.
    /// A manager that has already connected to a node waits for the end of its quarantine.
    ///
    /// For a single server without a quarantine, this does nothing. Of several nodes, all must be
    /// reachable. The call asks them one after the other, and may block for three operation
    /// timeouts for each.
    ///
    /// # Errors
    ///
    /// [`LockError::InvalidConfig`](crate::LockError::InvalidConfig) if a node has been used, is a
    /// replica or was one, or if the configuration is invalid. Errors such as
    /// [`LockError::Unavailable`](crate::LockError::Unavailable) if a node cannot be reached; then
    /// call this again, with `true` if some nodes have been declared new by the call that failed.
    pub fn declare_nodes_new(&self, even_if_used: bool) -> Result<()> {
        match self.validate()? {
            config if config.endpoints.len() < 2 && config.quarantine.is_zero() => Ok(()),
            config if config.endpoints.iter().any(|endpoint| !endpoint.cluster.is_empty()) => {
                let reason = "the nodes of a cluster cannot be declared new; wait for the end of \
                              the quarantine";
                Err(LockError::InvalidConfig { reason: reason.into() })
            }
            ValidatedConfig { endpoints, settings, .. } => {
                redis::declare_new(&endpoints, settings.operation_timeout, TTL_MAX, even_if_used)
            }
        }
    }

    /// Sets the maximum time that a lock is held, for locks whose options do not set one. Defaults
    /// to no limit. See [`LockOptions::max_hold`].
    pub fn max_hold(mut self, limit: Duration) -> Config {
        self.max_hold = Some(limit);
        self
    }

    /// Leaves a lock free now and then, for clients of other libraries. For the time of a migration
    /// in which they share locks with distlock. Defaults to zero, which turns this off; at most
    /// 10 s.
    ///
    /// Such clients do not queue, but poll. Normally a release hands the lock to the next waiter of
    /// distlock, so they get no turn while any distlock client waits. With this setting, a release
    /// now and then leaves the lock free for `pause` before the next waiter gets it. Set `pause` to
    /// a little more than the other clients' polling interval, in all programs that use distlock.
    ///
    /// - If this manager has seen such a client hold the lock within the last 200 pauses, every
    ///   third of its releases leaves the lock free. A client that polls throughout then gets at
    ///   least a quarter of the locks; one that locks again at once can get most of them.
    /// - Otherwise a release does so once in 50 pauses, to find out whether there is such a client.
    ///   Each manager that uses the lock does this, and costs up to a fiftieth of the rate.
    ///
    /// The order of distlock's own queue does not change. A call that times out meanwhile names
    /// `left free for other clients` as the holder. This setting turns
    /// [`local_handover`](Self::local_handover) off. With several nodes, it has no other effect.
    pub fn yield_to_others(mut self, pause: Duration) -> Config {
        self.yield_to_others = pause;
        self
    }

    /// Requires that `count` replicas have a lock before it counts as held. For a server with
    /// replicas of which one is promoted when it fails, for example by Sentinel. Defaults to no
    /// replicas: a failover can then lose locks that the new master has not received, and other
    /// clients can acquire them while their holders still rely on them.
    ///
    /// With this setting, an acquisition and each renewal wait until `count` replicas have it, for
    /// up to `within`, which must be 1 ms to half of the
    /// [`operation_timeout`](Self::operation_timeout). If they do not, the acquisition is retried
    /// while the call has time, then what it left is released, and the call fails with
    /// [`LockError::Unavailable`](crate::LockError::Unavailable). A renewal that too few replicas
    /// have does not extend the lease, so locks are lost within a ttl once too few replicas are
    /// connected.
    ///
    /// A lock then costs two more round trips: one of ours, and one of the master to its replicas.
    /// Locks survive a failover as long as the promoted replica is one of those that had them. With
    /// more replicas than `count`, that is not certain: Sentinel prefers the replica that has
    /// received most, but a partition may leave it no choice. Require all replicas that may be
    /// promoted, or also set `min-replicas-to-write`.
    ///
    /// ```
    /// # use std::time::Duration;
    /// let url = "redis+sentinel://s1,s2,s3/mymaster";
    /// let config = distlock::Config::new(url).replicas(1, Duration::from_millis(50));
    /// ```
    ///
    /// Uses `WAIT`, for which the user needs `+wait`. Several nodes do without replicas, and refuse
    /// this setting.
    pub fn replicas(mut self, count: u32, within: Duration) -> Config {
        self.replicas = Replicas { count, within };
        self
    }

    /// Sets whether calls fail at once while the servers are known to be unreachable, instead of
    /// trying until their wait ends. Defaults to false. For programs that can do other work
    /// meanwhile, such as a backend whose few threads must stay free.
    ///
    /// The servers count as unreachable once a call has failed because too few of them reply or
    /// vote. A call stops at its second failure in a row, although it could wait longer. From then
    /// on, calls return the same error without asking. One call at a time still asks, as a probe:
    /// 20 ms after the failure, then at pauses as long as the outage has lasted, up to one second.
    /// If the servers do not reply, a probe blocks for one operation timeout. The first usable
    /// reply to any call ends this.
    ///
    /// Calls without a limit fail in this way too, and so do calls that wait in the queue when the
    /// servers die. Calls that find all pooled connections in use go on waiting. Renewals, releases
    /// and the clean-up of locks are not affected.
    pub fn fail_fast(mut self, on: bool) -> Config {
        self.fail_fast = on;
        self
    }

    /// Adds a handler for the events of this manager's locks. Each handler receives every event;
    /// the handlers are called in the order in which they were added. Defaults to none.
    pub fn event_handler(mut self, handler: Arc<dyn HandleEvent>) -> Config {
        self.handlers.push(handler);
        self
    }

    /// Adds the label `lock_name` to the metrics of the feature `metrics`. Defaults to false: each
    /// name adds about 60 time series to a Prometheus server, so their number must be small.
    pub fn metrics_by_lock(mut self, on: bool) -> Config {
        self.metrics_by_lock = on;
        self
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
            .field("local_handover", &self.local_handover)
            .field("ttl", &self.ttl)
            .field("quarantine", &self.chosen_quarantine)
            .field("max_hold", &self.max_hold)
            .field("yield_to_others", &self.yield_to_others)
            .field("replicas", &self.replicas.count)
            .field("fail_fast", &self.fail_fast)
            .field("events", &self.handlers)
            .finish_non_exhaustive()
    }
}

/// The same as [`Config::from_env`]: reads the URL from the environment.
impl Default for Config {
    fn default() -> Config {
        Config::from_env()
    }
}

fn display_label(url: &str) -> String {
    Endpoint::parse(url)
        .map_or_else(|_| "<not usable>".into(), |endpoint| endpoint.label.to_string())
}
