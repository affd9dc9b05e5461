//! `MySqlMgr`: the lock manager whose locks are kept in MySQL or MariaDB.

use std::{
    fmt,
    panic::{RefUnwindSafe, UnwindSafe},
    sync::Arc,
    time::Duration,
};

use crate::{
    backend::{Backend as _, mysql::MySqlBackend},
    config::{Config, LockOptions, MySqlConfig},
    core::{detached::Detached, holder::Holder, kind::LockKind},
    error::{LockError, Result},
    guard::LockGuard,
    lock_info::{LockInfo, Released},
    manager::{Manager, ManagerHandle},
    multi_guard::MultiGuard,
    observe::{Observer, metrics::Metrics},
    reentrant::{ReentrantGuard, acquire_unless_own},
    rw_lock::RwLock,
    semaphore::Semaphore,
    sys::fork,
    with_lock::run_and_release,
};

/// A lock manager whose locks are rows in a MySQL or MariaDB database. With the feature `mysql`.
///
/// Its methods are those of [`RedisMgr`](crate::RedisMgr), with the same guards, errors and events.
/// Clones are cheap and share everything. Dropping the last clone and the last guard shuts the
/// manager down.
///
/// Each lock that is held or waited for uses a connection. If the holder's process dies, the server
/// notices the end of its connection and gives the lock to the first waiter, usually within a
/// millisecond. If the process is paused or cut off, the lock is free after its ttl.
///
/// ```no_run
/// use distlock::{MySqlConfig, MySqlMgr};
///
/// # fn main() -> distlock::Result<()> {
/// let mgr = MySqlMgr::new(MySqlConfig::new("mysql://app:secret@10.0.0.7/shop"))?;
/// mgr.create_table()?; // once; does nothing if the table exists
/// let guard = mgr.lock("orders:42")?;
/// println!("held with fencing token {}", guard.fencing_token());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct MySqlMgr {
    handle: Arc<ManagerHandle>,
    backend: Arc<MySqlBackend>,
}

impl MySqlMgr {
    /// Creates a manager. Connects once, to check that the server can keep locks; an unreachable
    /// server is no error here. Blocks for at most one operation timeout.
    ///
    /// # Errors
    ///
    /// [`InvalidConfig`](LockError::InvalidConfig) if a setting is out of range, or if the server
    /// is a member of a cluster with several primaries, or behind a proxy that shares connections.
    /// [`Refused`](LockError::Refused) if the server refuses the user. [`Tls`](LockError::Tls) if
    /// its certificate is not trusted, or it offers no TLS although the configuration asks for it.
    pub fn new(config: MySqlConfig) -> Result<MySqlMgr> {
        if !fork::claim_process() {
            return Err(LockError::Forked);
        }
        let (config, backend) = config.validate()?;
        backend.check_server()?;
        let backend = Arc::new(backend);
        let server = backend.label().clone();
        let Config { handlers, metrics_by_lock, .. } = &config.settings;
        let observer = Observer::start(handlers.clone(), server, 1, *metrics_by_lock)?;
        let handle =
            ManagerHandle::new(Manager::start_on(backend.clone(), None, observer, config)?);
        Ok(MySqlMgr { handle: Arc::new(handle), backend })
    }

    /// Creates the table of the locks if it does not exist. Needs the privilege `CREATE`.
    /// [`MySqlConfig::table_statement`] and `distlock mysql-schema` have the statement for those
    /// who create tables themselves.
    pub fn create_table(&self) -> Result<()> {
        self.handle.manager()?;
        self.backend.create_table()
    }

    /// Deletes the rows of locks that nobody holds, and that nobody has acquired for `age`. Returns
    /// their number. Reads the whole table, a thousand rows at a time; each exchange with the
    /// server takes at most one operation timeout. A row stays in the table after its lock was
    /// released, with the last fencing token. The tokens of a lock whose row was deleted go on from
    /// the server's clock, so they still rise as long as that clock is not set back by more than
    /// `age`.
    pub fn prune(&self, age: Duration) -> Result<u64> {
        self.handle.manager()?;
        self.backend.prune(age)
    }

    /// Acquires a lock, waiting as long as it takes. As [`RedisMgr::lock`](crate::RedisMgr::lock).
    pub fn lock(&self, name: &str) -> Result<LockGuard> {
        self.lock_with(name, &LockOptions::new())
    }

    /// Acquires a lock if it is free. As [`RedisMgr::try_lock`](crate::RedisMgr::try_lock).
    pub fn try_lock(&self, name: &str) -> Result<LockGuard> {
        self.lock_with(name, &LockOptions::new().wait(Duration::ZERO))
    }

    /// Acquires a lock, waiting for at most `wait`. As
    /// [`RedisMgr::try_lock_for`](crate::RedisMgr::try_lock_for).
    pub fn try_lock_for(&self, name: &str, wait: Duration) -> Result<LockGuard> {
        self.lock_with(name, &LockOptions::new().wait(wait))
    }

    /// Acquires a lock with these options. As [`RedisMgr::lock_with`](crate::RedisMgr::lock_with).
    pub fn lock_with(&self, name: &str, options: &LockOptions) -> Result<LockGuard> {
        acquire_unless_own(&self.handle, LockKind::Mutex, name, options)
    }

    /// Acquires the locks of several names. As [`RedisMgr::lock_all`](crate::RedisMgr::lock_all).
    /// Each uses a connection, and the call waits for all of them before it acquires the first
    /// lock, so that no two calls wait for each other's. If the call fails, it releases the locks
    /// that it has acquired before it returns, which takes at most one operation timeout.
    ///
    /// # Errors
    ///
    /// [`LockError::InvalidOptions`](crate::LockError::InvalidOptions) if there are more names than
    /// [connections](crate::MySqlConfig::max_connections). Otherwise the errors of
    /// [`RedisMgr::lock_all`](crate::RedisMgr::lock_all).
    pub fn lock_all(&self, names: impl IntoIterator<Item = impl AsRef<str>>) -> Result<MultiGuard> {
        self.lock_all_with(names, &LockOptions::new())
    }

    /// Acquires the locks of several names if all are free. As
    /// [`RedisMgr::try_lock_all`](crate::RedisMgr::try_lock_all).
    pub fn try_lock_all(
        &self,
        names: impl IntoIterator<Item = impl AsRef<str>>,
    ) -> Result<MultiGuard> {
        self.try_lock_all_for(names, Duration::ZERO)
    }

    /// Acquires the locks of several names, waiting for at most `wait` in total. As
    /// [`RedisMgr::try_lock_all_for`](crate::RedisMgr::try_lock_all_for).
    pub fn try_lock_all_for(
        &self,
        names: impl IntoIterator<Item = impl AsRef<str>>,
        wait: Duration,
    ) -> Result<MultiGuard> {
        self.lock_all_with(names, &LockOptions::new().wait(wait))
    }

    /// Acquires the locks of several names with these options. As
    /// [`RedisMgr::lock_all_with`](crate::RedisMgr::lock_all_with).
    pub fn lock_all_with(
        &self,
        names: impl IntoIterator<Item = impl AsRef<str>>,
        options: &LockOptions,
    ) -> Result<MultiGuard> {
        MultiGuard::acquire(&self.handle, names, options)
    }

    /// Fails: read-write locks are not supported in a database.
    pub fn rw_lock(&self, name: &str) -> Result<RwLock> {
        RwLock::new(&self.handle, name)
    }

    /// Fails: semaphores are not supported in a database.
    pub fn semaphore(&self, name: &str, limit: u32) -> Result<Semaphore> {
        Semaphore::new(&self.handle, name, limit)
    }

    /// Fails: a lock in a database cannot outlive the connection of its holder.
    pub fn adopt(&self, detached: &Detached) -> Result<LockGuard> {
        let held = self.handle.manager()?.adopt(detached)?;
        Ok(LockGuard::new(held, self.handle.clone()))
    }

    /// Runs `work` while holding a lock. As [`RedisMgr::with_lock`](crate::RedisMgr::with_lock).
    pub fn with_lock<T>(&self, name: &str, work: impl FnOnce(&LockGuard) -> T) -> Result<T> {
        run_and_release(self.lock(name)?, work)
    }

    /// As [`RedisMgr::with_lock_with`](crate::RedisMgr::with_lock_with).
    pub fn with_lock_with<T>(
        &self,
        name: &str,
        options: &LockOptions,
        work: impl FnOnce(&LockGuard) -> T,
    ) -> Result<T> {
        run_and_release(self.lock_with(name, options)?, work)
    }

    /// Acquires a lock that its thread can acquire again. As
    /// [`RedisMgr::lock_reentrant`](crate::RedisMgr::lock_reentrant).
    pub fn lock_reentrant(&self, name: &str) -> Result<ReentrantGuard> {
        self.lock_reentrant_with(name, &LockOptions::new())
    }

    /// As [`RedisMgr::lock_reentrant_with`](crate::RedisMgr::lock_reentrant_with).
    pub fn lock_reentrant_with(&self, name: &str, options: &LockOptions) -> Result<ReentrantGuard> {
        ReentrantGuard::enter(&self.handle, name, options)
    }

    /// Acquires a lock and returns only its id. As
    /// [`RedisMgr::acquire_lock`](crate::RedisMgr::acquire_lock).
    pub fn acquire_lock(
        &self,
        name: &str,
        lock_timeout: Duration,
        acquire_timeout: Duration,
    ) -> Result<Option<String>> {
        self.handle.manager()?.acquire_by_id(name, lock_timeout, acquire_timeout)
    }

    /// Releases a lock by its id. As [`RedisMgr::release_lock`](crate::RedisMgr::release_lock).
    pub fn release_lock(&self, name: &str, id: &str) -> Result<bool> {
        let manager = self.handle.manager()?;
        Ok(manager.release_by_id(&manager.key(name)?, id)? == Released::Released)
    }

    /// Returns the holder of a lock. As [`RedisMgr::holder`](crate::RedisMgr::holder); the time
    /// left is not known.
    pub fn holder(&self, name: &str) -> Result<Option<Holder>> {
        let manager = self.handle.manager()?;
        manager.inspect(&manager.key(name)?)
    }

    /// Returns whether a lock is held. As [`RedisMgr::is_locked`](crate::RedisMgr::is_locked).
    pub fn is_locked(&self, name: &str) -> Result<bool> {
        Ok(self.holder(name)?.is_some())
    }

    /// Lists held locks. As [`RedisMgr::locks`](crate::RedisMgr::locks). Waiters of other users of
    /// the database are listed only with the privilege `PROCESS`.
    pub fn locks(&self, pattern: &str) -> Result<Vec<LockInfo>> {
        self.handle.manager()?.locks(pattern)
    }

    /// Describes a held lock. As [`RedisMgr::lock_info`](crate::RedisMgr::lock_info).
    pub fn lock_info(&self, name: &str) -> Result<Option<LockInfo>> {
        let manager = self.handle.manager()?;
        manager.lock_info(&manager.key(name)?)
    }

    /// Takes a lock from its holder, by ending the holder's connection. As
    /// [`RedisMgr::force_release`](crate::RedisMgr::force_release). Needs a privilege (`SUPER`,
    /// `CONNECTION ADMIN`) if the holder is another user of the database.
    pub fn force_release(&self, name: &str) -> Result<bool> {
        let manager = self.handle.manager()?;
        manager.force_release(&manager.key(name)?)
    }

    /// Takes a lock from the holder with this id. As
    /// [`RedisMgr::force_release_if`](crate::RedisMgr::force_release_if).
    pub fn force_release_if(&self, name: &str, id: &str) -> Result<Released> {
        let manager = self.handle.manager()?;
        manager.force_release_if(&manager.key(name)?, id)
    }

    /// Measures the time of one exchange with the server.
    pub fn ping(&self) -> Result<Duration> {
        self.handle.manager()?.ping()
    }

    /// Releases all locks, wakes all waiters, and stops the threads. As
    /// [`RedisMgr::shutdown`](crate::RedisMgr::shutdown).
    pub fn shutdown(&self) {
        self.handle.shutdown();
    }

    /// Returns the counters and timings of this manager.
    pub fn metrics(&self) -> Metrics {
        self.handle.metrics()
    }

    /// Returns the server as named in messages.
    pub fn server(&self) -> &str {
        self.handle.server()
    }
}

// As for `RedisMgr`.
impl UnwindSafe for MySqlMgr {}
impl RefUnwindSafe for MySqlMgr {}

impl fmt::Debug for MySqlMgr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MySqlMgr").field("server", &self.server()).finish_non_exhaustive()
    }
}
