//! `MySqlMgr`: the lock manager whose locks are kept in MySQL or MariaDB.

use std::{
    fmt,
    panic::{RefUnwindSafe, UnwindSafe},
    sync::Arc,
    time::Duration,
};

use crate::{
    backend::mysql::MySqlBackend,
    config::{Config, LockOptions, MySqlConfig},
    core::{detached::Detached, holder::Holder},
    error::{LockError, Result},
    guard::LockGuard,
    lock_info::{LockInfo, Released},
    manager::{Manager, ManagerHandle},
    multi_guard::MultiGuard,
    observe::{Observer, metrics::Metrics},
    redis_manager::RedisMgr,
    reentrant::ReentrantGuard,
    rw_lock::RwLock,
    semaphore::Semaphore,
    sys::fork,
};

/// A lock manager whose locks are rows in a MySQL or MariaDB database. With the feature `mysql`.
///
/// It has the methods of [`RedisMgr`](crate::RedisMgr) for mutexes, with the same guards, errors
/// and events. `rw_lock`, `semaphore` and `adopt` return an error. There is no process-wide
/// instance, and no `connection` for other statements. Clones are cheap and share everything.
/// Dropping the last clone and the last guard shuts the manager down.
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
    /// Has what all managers do, wherever their locks are kept.
    methods: RedisMgr,
    backend: Arc<MySqlBackend>,
}

impl MySqlMgr {
    /// Creates a manager. Connects once, to check that the server can keep locks; an unreachable
    /// server is reported, but is no error here. Blocks for at most one operation timeout.
    ///
    /// # Errors
    ///
    /// [`InvalidConfig`](LockError::InvalidConfig) if a setting is out of range, or if the server
    /// is a member of a cluster with several primaries, or behind a proxy that shares connections.
    /// [`Refused`](LockError::Refused) if the server refuses the user. [`Tls`](LockError::Tls) if
    /// its certificate is not trusted, or it offers no TLS although the configuration asks for it.
    /// [`NoThread`](LockError::NoThread) if the system starts no thread.
    /// [`Forked`](LockError::Forked) in a forked child of a process that has used this library.
    pub fn new(config: MySqlConfig) -> Result<MySqlMgr> {
        if !fork::claim_process() {
            return Err(LockError::Forked);
        }
        let (config, session) = config.validate()?;
        let Config { handlers, metrics_by_lock, prefix, pool_size, operation_timeout, .. } =
            &config.settings;
        let server = session.endpoint.label.clone();
        let observer = Observer::start(handlers.clone(), server, 1, *metrics_by_lock)?;
        let backend =
            MySqlBackend::new(session, prefix.clone(), *pool_size, *operation_timeout, &observer);
        backend.check_server()?;
        let backend = Arc::new(backend);
        let manager = Manager::start_on(backend.clone(), None, observer, config)?;
        let methods = RedisMgr::from_handle(ManagerHandle::new(manager));
        Ok(MySqlMgr { methods, backend })
    }

    /// Creates the table of the locks if it does not exist. Needs the privilege `CREATE`.
    /// [`MySqlConfig::table_statement`] and `distlock mysql-schema` have the statement for those
    /// who create tables themselves. Blocks for at most one operation timeout.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](LockError::Unavailable) if the server does not reply,
    /// [`Refused`](LockError::Refused) if it refuses the statement.
    pub fn create_table(&self) -> Result<()> {
        self.methods.handle.manager()?;
        self.backend.create_table()
    }

    /// Deletes the rows of locks that nobody holds, and that nobody has acquired for `age`. Returns
    /// their number. Reads the whole table, a thousand rows at a time, and deletes 16 at a time;
    /// each step takes at most one operation timeout. A row stays in the table after its lock was
    /// released, with the last fencing token. The tokens of a lock whose row was deleted go on from
    /// the server's clock, so they still rise as long as that clock is not set back by more than
    /// `age`.
    ///
    /// # Errors
    ///
    /// As [`create_table`](Self::create_table). Rows that were deleted before stay deleted.
    pub fn prune(&self, age: Duration) -> Result<u64> {
        self.methods.handle.manager()?;
        self.backend.prune(age)
    }

    /// Runs `work` while holding a lock. As [`RedisMgr::with_lock`].
    pub fn with_lock<T>(&self, name: &str, work: impl FnOnce(&LockGuard) -> T) -> Result<T> {
        self.methods.with_lock(name, work)
    }

    /// As [`RedisMgr::with_lock_with`].
    pub fn with_lock_with<T>(
        &self,
        name: &str,
        options: &LockOptions,
        work: impl FnOnce(&LockGuard) -> T,
    ) -> Result<T> {
        self.methods.with_lock_with(name, options, work)
    }
}

/// Defines methods as those of `RedisMgr`.
macro_rules! forward {
    ($($(#[$doc:meta])* fn $method:ident($($arg:ident: $type:ty),*) $(-> $result:ty)?;)*) => {
        impl MySqlMgr {
            $($(#[$doc])* pub fn $method(&self, $($arg: $type),*) $(-> $result)? {
                self.methods.$method($($arg),*)
            })*
        }
    };
}

forward! {
    /// Acquires a lock, waiting as long as it takes. As [`RedisMgr::lock`].
    fn lock(name: &str) -> Result<LockGuard>;

    /// Acquires a lock if it is free. As [`RedisMgr::try_lock`].
    fn try_lock(name: &str) -> Result<LockGuard>;

    /// Acquires a lock, waiting for at most `wait`. As [`RedisMgr::try_lock_for`].
    fn try_lock_for(name: &str, wait: Duration) -> Result<LockGuard>;

    /// Acquires a lock with these options. As [`RedisMgr::lock_with`].
    fn lock_with(name: &str, options: &LockOptions) -> Result<LockGuard>;

    /// Acquires the locks of several names. As [`RedisMgr::lock_all`]. Each uses a connection, and
    /// the call waits for all of them before it acquires the first lock, so that no two calls wait
    /// for each other's. If the call fails, it releases the locks that it has acquired before it
    /// returns, which takes at most one operation timeout.
    ///
    /// # Errors
    ///
    /// [`LockError::InvalidOptions`](crate::LockError::InvalidOptions) if there are more names than
    /// [connections](crate::MySqlConfig::max_connections). Otherwise the errors of
    /// [`RedisMgr::lock_all`].
    fn lock_all(names: impl IntoIterator<Item = impl AsRef<str>>) -> Result<MultiGuard>;

    /// Acquires the locks of several names if all are free. As [`RedisMgr::try_lock_all`].
    fn try_lock_all(names: impl IntoIterator<Item = impl AsRef<str>>) -> Result<MultiGuard>;

    /// Acquires the locks of several names, waiting for at most `wait` in total. As
    /// [`RedisMgr::try_lock_all_for`].
    fn try_lock_all_for(
        names: impl IntoIterator<Item = impl AsRef<str>>,
        wait: Duration
    ) -> Result<MultiGuard>;

    /// Acquires the locks of several names with these options. As [`RedisMgr::lock_all_with`].
    fn lock_all_with(
        names: impl IntoIterator<Item = impl AsRef<str>>,
        options: &LockOptions
    ) -> Result<MultiGuard>;

    /// Fails: read-write locks are not supported in a database.
    fn rw_lock(name: &str) -> Result<RwLock>;

    /// Fails: semaphores are not supported in a database.
    fn semaphore(name: &str, limit: u32) -> Result<Semaphore>;

    /// Fails: a lock in a database cannot outlive the connection of its holder.
    fn adopt(detached: &Detached) -> Result<LockGuard>;

    /// Acquires a lock that its thread can acquire again. As [`RedisMgr::lock_reentrant`].
    fn lock_reentrant(name: &str) -> Result<ReentrantGuard>;

    /// As [`RedisMgr::lock_reentrant_with`].
    fn lock_reentrant_with(name: &str, options: &LockOptions) -> Result<ReentrantGuard>;

    /// Acquires a lock and returns only its id. As [`RedisMgr::acquire_lock`].
    fn acquire_lock(
        name: &str,
        lock_timeout: Duration,
        acquire_timeout: Duration
    ) -> Result<Option<String>>;

    /// Releases a lock by its id. As [`RedisMgr::release_lock`].
    fn release_lock(name: &str, id: &str) -> Result<bool>;

    /// Returns the holder of a lock. As [`RedisMgr::holder`]; the time left is not known.
    fn holder(name: &str) -> Result<Option<Holder>>;

    /// Returns whether a lock is held. As [`RedisMgr::is_locked`].
    fn is_locked(name: &str) -> Result<bool>;

    /// Lists held locks. As [`RedisMgr::locks`]. Waiters of other users of the database are listed
    /// only with the privilege `PROCESS`.
    fn locks(pattern: &str) -> Result<Vec<LockInfo>>;

    /// Describes a held lock. As [`RedisMgr::lock_info`].
    fn lock_info(name: &str) -> Result<Option<LockInfo>>;

    /// Takes a lock from its holder, by ending the holder's connection. As
    /// [`RedisMgr::force_release`]. Needs a privilege (`SUPER`, `CONNECTION ADMIN`) if the holder
    /// is another user of the database.
    fn force_release(name: &str) -> Result<bool>;

    /// Takes a lock from the holder with this id. As [`RedisMgr::force_release_if`].
    fn force_release_if(name: &str, id: &str) -> Result<Released>;

    /// Measures the time of one exchange with the server.
    fn ping() -> Result<Duration>;

    /// Releases all locks, wakes all waiters, and stops the threads. As [`RedisMgr::shutdown`].
    fn shutdown();

    /// Returns the counters and timings of this manager.
    fn metrics() -> Metrics;

    /// Returns the server as named in messages.
    fn server() -> &str;
}

// As for `RedisMgr`.
impl UnwindSafe for MySqlMgr {}
impl RefUnwindSafe for MySqlMgr {}

impl fmt::Debug for MySqlMgr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MySqlMgr").field("server", &self.server()).finish_non_exhaustive()
    }
}
