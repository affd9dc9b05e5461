//! `RedisMgr`: what users take locks from. An ordinary value, and a process-wide one.

use std::{fmt, sync::Arc, time::Duration};

use crate::{
    config::{Config, LockOptions},
    error::{LockError, Result},
    fork,
    guard::LockGuard,
    holder::Holder,
    lock_info::LockInfo,
    metrics::Metrics,
    pooled::PooledConnection,
    process_wide::ProcessWide,
    reentrant::ReentrantGuard,
    released::Released,
    service::Service,
};

/// Takes locks on one Redis server, or several nodes, and keeps them.
///
/// A manager owns a pool of connections, and one thread that renews [all the locks it holds](crate#how-it-works).
/// Making one for one server connects to nothing. Cloning is cheap. A
/// process usually needs one: [`instance`](Self::instance).
///
/// A process that forks does so before it makes its first manager, or starts a program in the child: a forked child of a
/// process that has made a manager can neither use nor make any, and is told so by [`LockError::Forked`].
///
/// The manager is shut down when the last of its clones and guards is dropped. The process-wide one lives until
/// [`shutdown`](Self::shutdown) or the end of the process, which leaves what is still held to expire.
#[derive(Clone)]
pub struct RedisMgr {
    service: Arc<Service>,
}

static PROCESS_WIDE: ProcessWide<RedisMgr> = ProcessWide::new();

impl RedisMgr {
    /// The process-wide manager. The first call makes it, of `DISTLOCK_URL`, `REDIS_URL` or `redis://127.0.0.1:6379`,
    /// unless [`init`](Self::init) has, or is about to: that is waited for.
    ///
    /// # Errors
    ///
    /// Those of [`new`](Self::new); a later call tries again. [`LockError::BeingMade`] on the thread that is making it just now,
    /// where a logger could call this.
    pub fn instance() -> Result<&'static RedisMgr> {
        // Before the lock, which a thread may have held that a forked child does not have.
        if !fork::may_make_a_manager() {
            return Err(LockError::Forked);
        }
        PROCESS_WIDE.get_or_make(|| RedisMgr::new(Config::from_env()))
    }

    /// Makes the process-wide manager, once, before anybody uses [`instance`](Self::instance).
    ///
    /// # Errors
    ///
    /// [`LockError::AlreadyInitialized`] when there is one, which is not changed, or when another thread was faster;
    /// [`LockError::BeingMade`] as for [`instance`](Self::instance); else those of [`new`](Self::new).
    pub fn init(config: Config) -> Result<&'static RedisMgr> {
        if !fork::may_make_a_manager() {
            return Err(LockError::Forked);
        }
        PROCESS_WIDE.make(|| RedisMgr::new(config))
    }

    /// Makes a manager of one's own. For one server it does not connect, so a server that is away is no error here; see
    /// [`ping`](Self::ping). [Several nodes](Config::nodes) are connected to, which takes at most one operation timeout, in
    /// order to refuse one server under two names, and replicas; a node that is away is no error.
    ///
    /// # Errors
    ///
    /// [`LockError::InvalidConfig`] or [`LockError::InvalidOptions`] when the configuration cannot work,
    /// [`LockError::NoThread`] when the system gives no thread, [`LockError::Forked`] in a child of a process that has made
    /// a manager.
    pub fn new(config: Config) -> Result<RedisMgr> {
        if !fork::may_make_a_manager() {
            return Err(LockError::Forked);
        }
        Ok(RedisMgr { service: Arc::new(Service::start(config.check()?)?) })
    }

    /// Takes the lock, waiting for its turn without a limit.
    ///
    /// Who asks first is served first, over all threads, processes and machines. Waiting uses no pooled connection
    /// and sends next to nothing. A lock is not reentrant: a thread that waits for a lock it holds waits for ever;
    /// see [`lock_reentrant`](Self::lock_reentrant).
    ///
    /// # Errors
    ///
    /// [`LockError::Unavailable`] when the server has been away for as long as the lease, [`LockError::Refused`] with the code
    /// `READONLY` when it has been a replica for as long, as a former master is until its name leads to the next one, and those of
    /// [`lock_with`](Self::lock_with).
    pub fn lock(&self, name: &str) -> Result<LockGuard> {
        self.lock_with(name, &LockOptions::new())
    }

    /// Takes the lock if it is free right now. Blocks for a round trip, at most for one
    /// [operation timeout](Config::operation_timeout).
    ///
    /// # Errors
    ///
    /// [`LockError::Held`] says who has it; else those of [`lock_with`](Self::lock_with).
    pub fn try_lock(&self, name: &str) -> Result<LockGuard> {
        self.lock_with(name, &LockOptions::new().wait(Duration::ZERO))
    }

    /// Takes the lock, waiting for at most `wait`.
    ///
    /// # Errors
    ///
    /// [`LockError::Timeout`] says who has it; else those of [`lock_with`](Self::lock_with).
    pub fn try_lock_for(&self, name: &str, wait: Duration) -> Result<LockGuard> {
        self.lock_with(name, &LockOptions::new().wait(wait))
    }

    /// Takes the lock as `options` say. Returns within their wait and one operation timeout, whatever the server does.
    ///
    /// ```no_run
    /// # fn main() -> distlock::Result<()> {
    /// use std::time::Duration;
    /// use distlock::{LockOptions, RedisMgr};
    ///
    /// let options = LockOptions::new().ttl(Duration::from_secs(30)).wait(Duration::from_secs(5));
    /// match RedisMgr::instance()?.lock_with("orders:42", &options) {
    ///     Ok(guard) => println!("token {}", guard.fencing_token()),
    ///     Err(error) if error.is_contended() => println!("later, then: {error}"),
    ///     Err(error) => return Err(error),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Held`](LockError::Held) or [`Timeout`](LockError::Timeout) when somebody else has it,
    /// [`Unavailable`](LockError::Unavailable) or [`PoolExhausted`](LockError::PoolExhausted) when that could not be
    /// found out, [`Refused`](LockError::Refused) or [`WrongType`](LockError::WrongType) when the server or its data
    /// stand in the way, [`InvalidName`](LockError::InvalidName) or [`InvalidOptions`](LockError::InvalidOptions)
    /// when the call cannot work, [`Shutdown`](LockError::Shutdown) and [`Forked`](LockError::Forked).
    pub fn lock_with(&self, name: &str, options: &LockOptions) -> Result<LockGuard> {
        let kept = self.service.core()?.take(name, options)?;
        Ok(LockGuard::new(kept, self.service.clone()))
    }

    /// Takes the lock for this thread, which may take it again; waits for its turn without a limit. Taking it again
    /// costs no round trip.
    ///
    /// # Errors
    ///
    /// Those of [`lock`](Self::lock); [`LockError::Lost`] when this thread holds the lock and has lost it;
    /// [`LockError::InvalidOptions`] in a destructor of the thread's storage, if what the thread holds is forgotten already.
    pub fn lock_reentrant(&self, name: &str) -> Result<ReentrantGuard> {
        self.lock_reentrant_with(name, &LockOptions::new())
    }

    /// [`lock_reentrant`](Self::lock_reentrant) as `options` say; they only matter where the lock is not held yet.
    ///
    /// # Errors
    ///
    /// Those of [`lock_with`](Self::lock_with), and as [`lock_reentrant`](Self::lock_reentrant).
    pub fn lock_reentrant_with(&self, name: &str, options: &LockOptions) -> Result<ReentrantGuard> {
        ReentrantGuard::enter(&self.service, name, options)
    }

    /// The C++ design's `acquireLock`: takes the lock with a lease of `lock_timeout`, waiting for at most
    /// `acquire_timeout`, and returns its identifier; `None` when somebody else held it all the time. It is renewed
    /// until [`release_lock`](Self::release_lock) or [`shutdown`](Self::shutdown).
    ///
    /// Prefer [`try_lock_for`](Self::try_lock_for): a guard cannot be forgotten, and knows when its lock is lost. What is
    /// lost is remembered here all the same until it is released.
    ///
    /// # Errors
    ///
    /// Those of [`lock_with`](Self::lock_with), except contention.
    pub fn acquire_lock(
        &self,
        name: &str,
        lock_timeout: Duration,
        acquire_timeout: Duration,
    ) -> Result<Option<String>> {
        let core = self.service.core()?;
        match core.take(name, &LockOptions::new().ttl(lock_timeout).wait(acquire_timeout)) {
            Ok(kept) => core.keep_by_id(kept).map(Some),
            Err(error) if error.is_contended() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The C++ design's `releaseLock`: true if the lock was held under `id` until now. A wrong identifier touches
    /// nothing, neither the lock nor its renewal. An identifier of another process is released too.
    ///
    /// Releasing twice returns false the second time. So it does, at once, while another thread is releasing the same
    /// identifier: the lock may still stand on the server then, and it is the first call that says how that went.
    ///
    /// # Errors
    ///
    /// Those of [`LockGuard::release`].
    pub fn release_lock(&self, name: &str, id: &str) -> Result<bool> {
        let core = self.service.core()?;
        Ok(core.release_by_id(&core.key(name)?, id)? == Released::Released)
    }

    /// Who holds the lock now, for how long, and how many wait; `None` when it is free. Changes nothing.
    ///
    /// # Errors
    ///
    /// [`LockError::Unavailable`], [`LockError::Refused`] and the like when the server cannot be asked.
    pub fn holder(&self, name: &str) -> Result<Option<Holder>> {
        let core = self.service.core()?;
        core.inspect(&core.key(name)?)
    }

    /// Whether anybody holds the lock now.
    ///
    /// # Errors
    ///
    /// Those of [`holder`](Self::holder).
    pub fn is_locked(&self, name: &str) -> Result<bool> {
        Ok(self.holder(name)?.is_some())
    }

    /// The locks that are held now and whose names match `pattern`, sorted by name: with their holders, and who waits.
    /// Changes nothing.
    ///
    /// The pattern is a glob, as Redis has it, over the names without their prefix: `*` is any text, `?` any byte,
    /// `[a-c]` one of some, and a backslash takes the meaning from the next byte. Locks of other clients under the prefix
    /// are told too. Under an empty prefix, where a key can be anybody's data, only locks of this library are.
    ///
    /// The server is asked in many small steps (`SCAN`, then fifty locks at a time), so that others are served in
    /// between. It blocks until all keys of the database have been looked at, for at most one operation timeout in each step
    /// and sixty in all (a minute, by default), and holds one pooled connection. What is
    /// taken or given up meanwhile may be told or not. Of the line of each lock the first 100 are told, or
    /// fewer when they are many altogether; see [`lock_info`](Self::lock_info).
    ///
    /// Of several nodes, the locks of all that answer are told, with [`LockInfo::is_certain`] saying whether a quorum
    /// agrees on the holder.
    ///
    /// ```no_run
    /// # fn main() -> distlock::Result<()> {
    /// for lock in distlock::RedisMgr::instance()?.locks("*")? {
    ///     println!("{lock}");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`LockError::InvalidName`] when the pattern is longer than any name, [`LockError::Unavailable`],
    /// [`LockError::NoQuorum`], [`LockError::PoolExhausted`], or [`LockError::Refused`] when the server cannot be asked:
    /// its user also needs the rights `+scan` and `+lrange`.
    pub fn locks(&self, pattern: &str) -> Result<Vec<LockInfo>> {
        self.service.core()?.locks(pattern)
    }

    /// What can be seen of one lock: its holder, and the first 1,000 of those who wait, in order; `None` when nobody holds
    /// it. Blocks for a round trip, at most for one operation timeout. Changes nothing.
    ///
    /// ```no_run
    /// # fn main() -> distlock::Result<()> {
    /// if let Some(lock) = distlock::RedisMgr::instance()?.lock_info("orders:42")? {
    ///     println!("{}", lock.holder());
    ///     lock.waiters().iter().for_each(|waiter| println!("  then {waiter}"));
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`holder`](Self::holder), and [`LockError::WrongType`] when the key holds something else than a lock.
    pub fn lock_info(&self, name: &str) -> Result<Option<LockInfo>> {
        let core = self.service.core()?;
        core.lock_info(&core.key(name)?)
    }

    /// Takes the lock away from whoever holds it now, and hands it to the next waiter; true if it did. False when nobody
    /// held it, or when it changed hands meanwhile. The former holder learns of it at its next renewal, and may go on
    /// working until then: this is for operators. Blocks for two round trips, at most for one operation timeout, half of
    /// which is for finding out who holds it.
    ///
    /// It may be of another kind, and call itself by any bytes; of more than 512 the first 512 say who it is.
    ///
    /// # Errors
    ///
    /// Those of [`holder`](Self::holder).
    pub fn force_release(&self, name: &str) -> Result<bool> {
        let core = self.service.core()?;
        let key = core.key(name)?;
        core.force_release(&key)
    }

    /// [`force_release`](Self::force_release), but only from the holder with this identifier, as [`Holder::id`] tells it, which
    /// is looked at and taken away in one step: nobody else loses the lock if it has changed hands since somebody looked.
    /// Blocks for a round trip, and for another where the identifier is no text; at most for one
    /// [operation timeout](Config::operation_timeout).
    ///
    /// ```no_run
    /// # fn main() -> distlock::Result<()> {
    /// let mgr = distlock::RedisMgr::instance()?;
    /// if let Some(stuck) = mgr.holder("orders:42")? {
    ///     println!("{:?}", mgr.force_release_if("orders:42", stuck.id())?);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`LockGuard::release`].
    pub fn force_release_if(&self, name: &str, id: &str) -> Result<Released> {
        let core = self.service.core()?;
        core.force_release_if(&core.key(name)?, id)
    }

    /// Asks the server whether it is there, and returns how long the answer took: for a check at start-up.
    ///
    /// # Errors
    ///
    /// [`LockError::Unavailable`], [`LockError::Refused`] and the like.
    pub fn ping(&self) -> Result<Duration> {
        self.service.core()?.ping()
    }

    /// A connection out of the pool, for commands of one's own: it implements [`redis::ConnectionLike`]. Locks that are
    /// held do not need the pool; taking others waits for a free connection. Of several nodes it leads to the first.
    ///
    /// What the server answers is passed on as it is, errors included: unlike a [`LockError`], it may have the password in it where
    /// the server means harm. It may have up to 4 MiB; more is an error, and the connection is closed.
    ///
    /// Its place goes back to the pool when it is dropped, and its socket is closed if it was used: commands such as
    /// `SELECT` leave a state behind in which no lock may be taken. Keep it for as long as it is useful.
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
    /// [`LockError::PoolExhausted`] when none becomes free within one operation timeout.
    pub fn connection(&self) -> Result<PooledConnection> {
        let pooled = self.service.core()?.connection()?;
        Ok(PooledConnection::new(pooled))
    }

    /// Releases everything that is held, wakes everybody who waits with [`LockError::Shutdown`], and ends the
    /// threads. Holders learn [`LockLost::Shutdown`](crate::LockLost::Shutdown). Every later call fails with
    /// [`LockError::Shutdown`]. What cannot be released within one operation timeout, because the server is away, is
    /// left to expire. Whoever calls this while another thread does waits as well;
    /// on the manager's own threads, where a logger could call this, nobody waits, and what is held is released right after.
    pub fn shutdown(&self) {
        self.service.shutdown();
    }

    /// What this manager has counted since it was made, and how long things took: a copy, which prints as a table.
    /// It always counts. Takes some microseconds for each lock that it tells, and no round trip; also works after a
    /// [`shutdown`](Self::shutdown). Empty in a forked child.
    ///
    /// ```no_run
    /// # fn main() -> distlock::Result<()> {
    /// println!("{}", distlock::RedisMgr::instance()?.metrics());
    /// # Ok(())
    /// # }
    /// ```
    pub fn metrics(&self) -> Metrics {
        self.service.metrics()
    }

    /// The server, as errors call it.
    pub fn server(&self) -> &str {
        self.service.server()
    }
}

impl fmt::Debug for RedisMgr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisMgr").field("server", &self.server()).finish_non_exhaustive()
    }
}
