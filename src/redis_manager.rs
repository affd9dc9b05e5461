//! `RedisMgr`: the lock manager, as an ordinary value and as a process-wide singleton.

mod groups;
mod inspect;
mod lock_all;

use std::{
    fmt,
    panic::{RefUnwindSafe, UnwindSafe},
    sync::Arc,
    time::Duration,
};

use crate::{
    config::{Config, LockOptions},
    core::{detached::Detached, kind::LockKind},
    error::{LockError, Result},
    fallible_once::FallibleOnce,
    guard::LockGuard,
    lock_info::Released,
    manager::{Manager, ManagerHandle},
    observe::metrics::Metrics,
    reentrant::{ReentrantGuard, acquire_unless_own},
    sys::fork,
    user_connection::PooledConnection,
    with_lock::run_and_release,
};

/// Acquires, renews and releases locks on one Redis server, or on several nodes.
///
/// A manager owns a connection pool and one thread that renews [all the locks it
/// holds](crate#how-it-works). Cloning a manager is cheap. A process usually needs one:
/// [`instance`](Self::instance).
///
/// The manager shuts down when the last of its clones, guards, and handles of read-write locks and
/// semaphores is dropped. The process-wide manager lives until [`shutdown`](Self::shutdown) or the
/// end of the process; after a shutdown, there is no other one. Locks that are still held at the
/// end of the process expire.
///
/// A process that forks must fork before it creates its first manager, or call `exec` in the child.
/// If a process has created a manager, its forked children cannot use or create one: every call
/// fails with [`LockError::Forked`].
#[derive(Clone)]
pub struct RedisMgr {
    pub(crate) handle: Arc<ManagerHandle>,
}

static GLOBAL: FallibleOnce<RedisMgr> = FallibleOnce::new();

impl RedisMgr {
    /// Returns the process-wide manager. The first call creates it from `DISTLOCK_URL`, `REDIS_URL`
    /// or `redis://127.0.0.1:6379`. If [`init`](Self::init) is running on another thread, this
    /// call waits for it.
    ///
    /// # Errors
    ///
    /// The errors of [`new`](Self::new); a later call tries again. [`LockError::InitInProgress`] if
    /// the calling thread is itself creating the manager, for example when a logger calls this.
    pub fn instance() -> Result<&'static RedisMgr> {
        // Check this first: in a forked child, the mutex of `GLOBAL` may be locked by a thread that
        // does not exist there.
        if !fork::claim_process() {
            return Err(LockError::Forked);
        }
        GLOBAL.get_or_try_init(|| RedisMgr::new(Config::from_env()))
    }

    /// Creates the process-wide manager from `config`. Call it once, before the first
    /// [`instance`](Self::instance).
    ///
    /// # Errors
    ///
    /// [`LockError::AlreadyInitialized`] if the process-wide manager already exists, or another
    /// thread creates it first; that manager does not change. [`LockError::InitInProgress`] as for
    /// [`instance`](Self::instance). Otherwise the errors of [`new`](Self::new).
    pub fn init(config: Config) -> Result<&'static RedisMgr> {
        if !fork::claim_process() {
            return Err(LockError::Forked);
        }
        GLOBAL.try_init(|| RedisMgr::new(config))
    }

    /// Creates a manager. Does not connect if there is a single server, so an unreachable server is
    /// not an error here; see [`ping`](Self::ping).
    ///
    /// With [several nodes](Config::nodes), connects to all of them. That blocks for at most one
    /// [operation timeout](Config::operation_timeout), and for at most a quarter of it once most
    /// nodes have replied. The call fails if a node is a replica, or if one server is listed under
    /// two addresses. A node that does not reply in this time is not an error.
    ///
    /// # Errors
    ///
    /// [`LockError::InvalidConfig`] or [`LockError::InvalidOptions`] if the configuration is
    /// invalid. [`LockError::NoThread`] if the operating system cannot start a thread.
    /// [`LockError::Forked`] in a forked child of a process that has created a manager.
    pub fn new(config: Config) -> Result<RedisMgr> {
        if !fork::claim_process() {
            return Err(LockError::Forked);
        }
        Ok(RedisMgr::from_handle(Manager::start(config.validate()?).map(ManagerHandle::new)?))
    }

    pub(crate) fn from_handle(handle: ManagerHandle) -> RedisMgr {
        RedisMgr { handle: Arc::new(handle) }
    }

    /// Acquires the lock. Waits without a time limit.
    ///
    /// Waiters are served first in, first out, across threads, processes and machines. But managers
    /// take turns: each has one thread in the queue at a time, and its threads may pass the lock on
    /// among themselves for a moment ([`Config::local_handover`](crate::Config::local_handover)).
    /// A waiting thread uses no pooled connection and sends almost no requests.
    ///
    /// The lock is not reentrant: a thread that already holds it waits forever, and usually logs a
    /// warning. This is not an error, because another thread may release the guard. Only where the
    /// thread holds the lock by [`lock_reentrant`](Self::lock_reentrant), whose guard stays on its
    /// thread, the call fails with [`LockError::WouldDeadlock`].
    ///
    /// # Errors
    ///
    /// [`LockError::Unavailable`] once the server has been unreachable for a whole lease, and for
    /// at least one [operation timeout](Config::operation_timeout) (two with several nodes),
    /// counted from the first request that failed. A waiter sends one every half second to ten
    /// seconds, depending on its place in the queue; more often if the holder does not use this
    /// library, or while no grant messages can arrive. [`LockError::Refused`] with the code
    /// `READONLY` once the server has been a replica for a whole lease, as after a failover if the
    /// host name does not lead to the new master. Otherwise the errors of
    /// [`lock_with`](Self::lock_with).
    pub fn lock(&self, name: &str) -> Result<LockGuard> {
        self.lock_with(name, &LockOptions::new())
    }

    /// Acquires the lock if it is free. Does not wait for another holder. Usually blocks for one
    /// round trip, at most for one [operation timeout](Config::operation_timeout).
    ///
    /// # Errors
    ///
    /// [`LockError::Held`] names the holder. [`LockError::Timeout`] if no holder is known: for
    /// example, the lock is on its way to a thread of this process that waits for it.
    /// [`is_contended`](LockError::is_contended) is true for both. Otherwise the errors of
    /// [`lock_with`](Self::lock_with).
    pub fn try_lock(&self, name: &str) -> Result<LockGuard> {
        self.lock_with(name, &LockOptions::new().wait(Duration::ZERO))
    }

    /// Acquires the lock. Waits for at most `wait`. If a server does not reply, blocks for at most
    /// one [operation timeout](Config::operation_timeout) more.
    ///
    /// # Errors
    ///
    /// [`LockError::Timeout`] names the holder. Otherwise the errors of
    /// [`lock_with`](Self::lock_with).
    pub fn try_lock_for(&self, name: &str, wait: Duration) -> Result<LockGuard> {
        self.lock_with(name, &LockOptions::new().wait(wait))
    }

    /// Acquires the lock as `options` specify. Blocks for at most [`LockOptions::wait`] plus one
    /// [operation timeout](Config::operation_timeout), whatever the server does.
    ///
    /// ```no_run
    /// # fn main() -> distlock::Result<()> {
    /// use std::time::Duration;
    /// use distlock::{LockOptions, RedisMgr};
    ///
    /// let options = LockOptions::new().ttl(Duration::from_secs(30)).wait(Duration::from_secs(5));
    /// match RedisMgr::instance()?.lock_with("orders:42", &options) {
    ///     Ok(guard) => println!("token {}", guard.fencing_token()),
    ///     Err(error) if error.is_contended() => println!("try again later: {error}"),
    ///     Err(error) => return Err(error),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// - [`Held`](LockError::Held) or [`Timeout`](LockError::Timeout) if another client holds the
    ///   lock.
    /// - [`Unavailable`](LockError::Unavailable), [`NoQuorum`](LockError::NoQuorum) or
    ///   [`PoolExhausted`](LockError::PoolExhausted) if the holder could not be determined.
    /// - [`Refused`](LockError::Refused) if the server replied with an error, or
    ///   [`WrongType`](LockError::WrongType) if the key holds something that is not a lock.
    /// - [`Lost`](LockError::Lost) if the lease ended before this call could return, because the
    ///   thread was paused or an event handler was slow. A pause right after the call cannot be
    ///   noticed by it; only the [fencing token](LockGuard::fencing_token) protects against that.
    /// - [`InvalidName`](LockError::InvalidName) or [`InvalidOptions`](LockError::InvalidOptions)
    ///   if the arguments are invalid.
    /// - [`Tls`](LockError::Tls) if a TLS connection cannot be made, for example because the
    ///   server's certificate is not trusted.
    /// - [`Cancelled`](LockError::Cancelled) if [`LockOptions::cancel`] ended the wait.
    /// - [`WouldDeadlock`](LockError::WouldDeadlock) if this thread has the lock by
    ///   [`lock_reentrant`](Self::lock_reentrant), and would wait for itself.
    /// - [`Shutdown`](LockError::Shutdown) after a shutdown, and [`Forked`](LockError::Forked) in a
    ///   forked child.
    pub fn lock_with(&self, name: &str, options: &LockOptions) -> Result<LockGuard> {
        acquire_unless_own(&self.handle, LockKind::Mutex, name, options)
    }

    /// Acquires the lock, runs `work` and releases the lock. Waits without a time limit. Returns
    /// the result of the work only if the lock was held until the work had ended.
    ///
    /// ```no_run
    /// # fn main() -> distlock::Result<()> {
    /// # fn write(_: u64) {}
    /// let mgr = distlock::RedisMgr::instance()?;
    /// mgr.with_lock("orders:42", |guard| write(guard.fencing_token().as_u64()))?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`LockError::Lost`] if the lease ended before the work did; the work has been done
    /// nevertheless. Otherwise the errors of [`lock`](Self::lock).
    pub fn with_lock<T>(&self, name: &str, work: impl FnOnce(&LockGuard) -> T) -> Result<T> {
        run_and_release(self.lock(name)?, work)
    }

    /// Like [`with_lock`](Self::with_lock), with `options`.
    ///
    /// ```
    /// # #[cfg(feature = "testing")] {
    /// # let mgr = distlock::testing::MemoryServer::new().manager();
    /// let options = distlock::LockOptions::new().wait(std::time::Duration::from_secs(5));
    /// let token = mgr.with_lock_with("orders:42", &options, |guard| guard.fencing_token())?;
    /// # assert!(token.as_u64() > 0);
    /// # }
    /// # Ok::<(), distlock::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`lock_with`](Self::lock_with) and [`with_lock`](Self::with_lock).
    pub fn with_lock_with<T>(
        &self,
        name: &str,
        options: &LockOptions,
        work: impl FnOnce(&LockGuard) -> T,
    ) -> Result<T> {
        run_and_release(self.lock_with(name, options)?, work)
    }

    /// Acquires the lock for the calling thread, which may then acquire it again without a round
    /// trip. Waits without a time limit.
    ///
    /// # Errors
    ///
    /// The errors of [`lock`](Self::lock). [`LockError::Lost`] if this thread acquired the lock
    /// before and has lost it since. [`LockError::InvalidOptions`] in a thread-local
    /// destructor, if the record of this thread's locks is already gone.
    pub fn lock_reentrant(&self, name: &str) -> Result<ReentrantGuard> {
        self.lock_reentrant_with(name, &LockOptions::new())
    }

    /// Like [`lock_reentrant`](Self::lock_reentrant), with `options`. They have no effect if the
    /// thread already holds the lock: it keeps the ttl and all other options of the first call.
    ///
    /// # Errors
    ///
    /// The errors of [`lock_with`](Self::lock_with) and [`lock_reentrant`](Self::lock_reentrant).
    pub fn lock_reentrant_with(&self, name: &str, options: &LockOptions) -> Result<ReentrantGuard> {
        ReentrantGuard::enter(&self.handle, name, options)
    }

    /// Acquires the lock for code ported from a C++ `acquireLock(name, lockTimeout,
    /// acquireTimeout)`.
    ///
    /// `lock_timeout` is the ttl of the lease. The call waits for at most `acquire_timeout`, then
    /// one [operation timeout](crate::Config::operation_timeout) for the server.
    /// Returns the lock's identifier, or `None` if the lock did not become free in that time. The
    /// lock is renewed until [`release_lock`](Self::release_lock) or [`shutdown`](Self::shutdown).
    ///
    /// Prefer [`try_lock_for`](Self::try_lock_for): a guard releases its lock when it is dropped,
    /// and reports a loss. If a lock of this function is lost, its entry stays in memory until
    /// `release_lock` is called.
    ///
    /// # Errors
    ///
    /// The errors of [`lock_with`](Self::lock_with), except contention.
    pub fn acquire_lock(
        &self,
        name: &str,
        lock_timeout: Duration,
        acquire_timeout: Duration,
    ) -> Result<Option<String>> {
        self.handle.manager()?.acquire_by_id(name, lock_timeout, acquire_timeout)
    }

    /// Releases a lock that [`acquire_lock`](Self::acquire_lock) acquired, by its identifier.
    /// Returns true if the lock was held under `id` until now. Blocks for at most one [operation
    /// timeout](crate::Config::operation_timeout).
    ///
    /// A wrong identifier changes nothing, neither the lock nor its renewal. The identifier may
    /// come from another process.
    ///
    /// A second call with the same identifier returns false at once, even while the first call is
    /// still in progress on another thread. The lock may then still exist on the server. Only the
    /// first call reports the outcome.
    ///
    /// # Errors
    ///
    /// The errors of [`LockGuard::release`].
    pub fn release_lock(&self, name: &str, id: &str) -> Result<bool> {
        let inner = self.handle.manager()?;
        Ok(inner.release_by_id(&inner.key(name)?, id)? == Released::Released)
    }

    /// Takes over a lock that its holder has [detached](LockGuard::detach), under another id and
    /// with a new, larger fencing token. The lock is renewed from here on. Only one successor can
    /// have it, and late requests of the former holder have no effect. Blocks for one round trip,
    /// at most for one [operation timeout](Config::operation_timeout).
    ///
    /// # Errors
    ///
    /// [`LockError::Lost`] if the lock has expired, or if another client has it, such as a
    /// successor that was faster. [`LockError::InvalidOptions`] with [several
    /// nodes](Config::nodes). [`LockError::Unavailable`] if the server does not reply. If it has
    /// carried out the request nevertheless, the lock is released in the background; otherwise a
    /// later call can still take it over.
    pub fn adopt(&self, detached: &Detached) -> Result<LockGuard> {
        let held = self.handle.manager()?.adopt(detached)?;
        Ok(LockGuard::new(held, self.handle.clone()))
    }

    /// Checks that the server replies, and returns the round-trip time. Useful at start-up. Blocks
    /// for at most one operation timeout.
    ///
    /// # Errors
    ///
    /// [`LockError::Unavailable`], [`LockError::Refused`] or a similar error if the server does not
    /// reply, or refuses.
    pub fn ping(&self) -> Result<Duration> {
        self.handle.manager()?.ping()
    }

    /// Borrows a connection from the pool for commands of your own. The connection implements
    /// [`redis::ConnectionLike`]. With several nodes, it leads to the first node, even while that
    /// is dead, because the others have other data. While it is borrowed, acquisitions have one
    /// pooled connection fewer; renewals and releases do not need the pool.
    ///
    /// A socket that a restarted server has closed is replaced at the first command.
    ///
    /// Replies are returned unchanged, including errors. Unlike a [`LockError`], an error from a
    /// malicious server may contain the password. A reply of more than 4 MiB is an error and closes
    /// the connection.
    ///
    /// Dropping the connection returns it to the pool. If you sent commands over it, its socket is
    /// then closed, because commands such as `SELECT` change the state of the connection. So use
    /// one borrowed connection for several commands.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let mut connection = distlock::RedisMgr::instance()?.connection()?;
    /// let visits: u64 = redis::cmd("INCR").arg("visits").query(&mut connection)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`LockError::PoolExhausted`] if no connection becomes free within one operation timeout.
    /// [`LockError::Unavailable`] always in a Redis Cluster, where no connection leads to all keys,
    /// and for the server in memory of the feature `testing`.
    pub fn connection(&self) -> Result<PooledConnection> {
        let pooled = self.handle.manager()?.connection()?;
        Ok(PooledConnection::new(pooled))
    }

    /// Releases all held locks, wakes all waiters with [`LockError::Shutdown`], and stops the
    /// manager's threads. Holders receive [`LockLost::Shutdown`](crate::LockLost::Shutdown).
    /// Every later call fails with [`LockError::Shutdown`].
    ///
    /// Blocks for at most one operation timeout. If a lock cannot be released in that time, because
    /// its server is unreachable, it expires. If two threads call this, the second call waits for
    /// the first. So do the calls of other threads that fail with [`LockError::Shutdown`], and the
    /// guards that they drop: a program that ends once its threads learn of the shutdown leaves no
    /// locks behind. A call on one of the manager's own threads, for example by a logger, does not
    /// wait: the locks are released right after the call.
    pub fn shutdown(&self) {
        self.handle.shutdown();
    }

    /// Returns a copy of this manager's counters and timings, which prints as a table. Counting is
    /// always on. Takes a few microseconds for each lock listed, and no round trip. Also works
    /// after a [`shutdown`](Self::shutdown). In a forked child, the copy is empty.
    ///
    /// ```no_run
    /// # fn main() -> distlock::Result<()> {
    /// println!("{}", distlock::RedisMgr::instance()?.metrics());
    /// # Ok(())
    /// # }
    /// ```
    pub fn metrics(&self) -> Metrics {
        self.handle.metrics()
    }

    /// Returns the server address, as shown in errors.
    pub fn server(&self) -> &str {
        self.handle.server()
    }
}

// A panic cannot leave a manager in a broken state, because no mutex is locked while user code
// runs.
impl UnwindSafe for RedisMgr {}
impl RefUnwindSafe for RedisMgr {}

impl fmt::Debug for RedisMgr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisMgr").field("server", &self.server()).finish_non_exhaustive()
    }
}
