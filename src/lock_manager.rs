//! `LockManager`: what all lock managers can do.

use std::{fmt, sync::Arc, time::Duration};

#[cfg(feature = "mysql")]
use crate::mysql_manager::MySqlMgr;
use crate::{
    config::LockOptions,
    core::{detached::Detached, holder::Holder},
    error::{LockError, Result},
    guard::LockGuard,
    lock_info::{LockInfo, Released},
    multi_guard::MultiGuard,
    observe::metrics::Metrics,
    redis_manager::RedisMgr,
    reentrant::ReentrantGuard,
    rw_lock::RwLock,
    semaphore::Semaphore,
    with_lock::run_and_release,
};

/// A lock manager, wherever its locks are kept: for code that takes any. References, boxes and
/// [`Arc`]s of managers are managers too.
///
/// A fake for tests needs only `lock_with`, `holder` and `shutdown`. What it does not implement
/// either calls these, or fails with [`LockError::InvalidOptions`]. See
/// [docs/testing.md](https://docs.rs/crate/distlock/latest/source/docs/testing.md).
///
/// ```no_run
/// use distlock::{LockManager, RedisMgr};
///
/// fn bill(locks: &dyn LockManager, order: u64) -> distlock::Result<()> {
///     let guard = locks.lock(&format!("orders:{order}"))?;
///     guard.ensure_held()
/// }
///
/// # fn main() -> distlock::Result<()> {
/// bill(RedisMgr::instance()?, 42)
/// # }
/// ```
#[expect(unused_variables, reason = "the methods that fail name their parameters for readers")]
pub trait LockManager: fmt::Debug + Send + Sync {
    /// Acquires a lock with these options. See [`RedisMgr::lock_with`].
    fn lock_with(&self, name: &str, options: &LockOptions) -> Result<LockGuard>;

    /// Acquires a lock, waiting as long as it takes. See [`RedisMgr::lock`].
    fn lock(&self, name: &str) -> Result<LockGuard> {
        self.lock_with(name, &LockOptions::new())
    }

    /// Acquires a lock if it is free. See [`RedisMgr::try_lock`].
    fn try_lock(&self, name: &str) -> Result<LockGuard> {
        self.lock_with(name, &LockOptions::new().wait(Duration::ZERO))
    }

    /// Acquires a lock, waiting for at most `wait`. See [`RedisMgr::try_lock_for`].
    fn try_lock_for(&self, name: &str, wait: Duration) -> Result<LockGuard> {
        self.lock_with(name, &LockOptions::new().wait(wait))
    }

    /// Acquires the locks of several names. See [`RedisMgr::lock_all_with`].
    fn lock_all_with(&self, names: &[&str], options: &LockOptions) -> Result<MultiGuard> {
        Err(cannot("acquire several locks together"))
    }

    /// Acquires the locks of several names. See [`RedisMgr::lock_all`].
    fn lock_all(&self, names: &[&str]) -> Result<MultiGuard> {
        self.lock_all_with(names, &LockOptions::new())
    }

    /// Acquires the locks of several names if all are free. See [`RedisMgr::try_lock_all`].
    fn try_lock_all(&self, names: &[&str]) -> Result<MultiGuard> {
        self.lock_all_with(names, &LockOptions::new().wait(Duration::ZERO))
    }

    /// Acquires the locks of several names. See [`RedisMgr::try_lock_all_for`].
    fn try_lock_all_for(&self, names: &[&str], wait: Duration) -> Result<MultiGuard> {
        self.lock_all_with(names, &LockOptions::new().wait(wait))
    }

    /// Returns a handle of a read-write lock. See [`RedisMgr::rw_lock`].
    fn rw_lock(&self, name: &str) -> Result<RwLock> {
        Err(cannot("keep read-write locks"))
    }

    /// Returns a handle of a semaphore. See [`RedisMgr::semaphore`].
    fn semaphore(&self, name: &str, limit: u32) -> Result<Semaphore> {
        Err(cannot("keep semaphores"))
    }

    /// Takes over a lock that its holder has detached. See [`RedisMgr::adopt`].
    fn adopt(&self, detached: &Detached) -> Result<LockGuard> {
        Err(cannot("adopt locks"))
    }

    /// Acquires a lock that its thread can acquire again. See [`RedisMgr::lock_reentrant`].
    fn lock_reentrant(&self, name: &str) -> Result<ReentrantGuard> {
        Err(cannot("acquire reentrant locks"))
    }

    /// Acquires a lock and returns only its id. See [`RedisMgr::acquire_lock`].
    fn acquire_lock(
        &self,
        name: &str,
        lock_timeout: Duration,
        acquire_timeout: Duration,
    ) -> Result<Option<String>> {
        Err(cannot("acquire locks by id"))
    }

    /// Releases a lock by its id. See [`RedisMgr::release_lock`].
    fn release_lock(&self, name: &str, id: &str) -> Result<bool> {
        Err(cannot("release locks by id"))
    }

    /// Returns the holder of a lock. See [`RedisMgr::holder`].
    fn holder(&self, name: &str) -> Result<Option<Holder>>;

    /// Returns whether a lock is held.
    fn is_locked(&self, name: &str) -> Result<bool> {
        Ok(self.holder(name)?.is_some())
    }

    /// Lists held locks. See [`RedisMgr::locks`].
    fn locks(&self, pattern: &str) -> Result<Vec<LockInfo>> {
        Err(cannot("list locks"))
    }

    /// Describes a held lock. See [`RedisMgr::lock_info`].
    fn lock_info(&self, name: &str) -> Result<Option<LockInfo>> {
        Err(cannot("describe locks"))
    }

    /// Takes a lock from its holder. See [`RedisMgr::force_release`].
    fn force_release(&self, name: &str) -> Result<bool> {
        Err(cannot("release locks of others"))
    }

    /// Takes a lock from the holder with this id. See [`RedisMgr::force_release_if`].
    fn force_release_if(&self, name: &str, id: &str) -> Result<Released> {
        Err(cannot("release locks of others"))
    }

    /// Measures the time of one exchange with the server.
    fn ping(&self) -> Result<Duration> {
        Err(cannot("measure the time of an exchange"))
    }

    /// Returns the counters and timings of the manager; empty if it has none. See
    /// [`RedisMgr::metrics`].
    fn metrics(&self) -> Metrics {
        Metrics::default()
    }

    /// Returns the server as named in messages; the name of the manager's type if there is none.
    fn server(&self) -> &str {
        std::any::type_name::<Self>()
    }

    /// Releases all locks, wakes all waiters, and stops the threads. See [`RedisMgr::shutdown`].
    fn shutdown(&self);
}

impl dyn LockManager + '_ {
    /// Runs work under a lock. See [`RedisMgr::with_lock`](crate::RedisMgr::with_lock).
    ///
    /// ```
    /// # #[cfg(feature = "testing")] {
    /// use distlock::{LockManager, testing::MemoryServer};
    ///
    /// fn bill(locks: &dyn LockManager) -> distlock::Result<u64> {
    ///     locks.with_lock("orders:42", |guard| guard.fencing_token().as_u64())
    /// }
    ///
    /// assert!(bill(&MemoryServer::new().manager())? > 0);
    /// # }
    /// # Ok::<(), distlock::LockError>(())
    /// ```
    pub fn with_lock<T>(&self, name: &str, work: impl FnOnce(&LockGuard) -> T) -> Result<T> {
        run_and_release(self.lock(name)?, work)
    }

    /// Like `with_lock`, with `options`.
    pub fn with_lock_with<T>(
        &self,
        name: &str,
        options: &LockOptions,
        work: impl FnOnce(&LockGuard) -> T,
    ) -> Result<T> {
        run_and_release(self.lock_with(name, options)?, work)
    }
}

/// The error of a method that a manager does not implement.
fn cannot(action: &str) -> LockError {
    let reason = format!("this lock manager cannot {action}; use a RedisMgr");
    LockError::InvalidOptions { reason }
}

/// Defines methods as those of the type `$target`.
macro_rules! forward {
    ($target:ty; $(fn $method:ident($($arg:ident: $type:ty),*) $(-> $result:ty)?;)*) => {
        $(fn $method(&self, $($arg: $type),*) $(-> $result)? {
            <$target>::$method(self, $($arg),*)
        })*
    };
}

/// Implements the trait for `$manager`, with the methods of the type `$target`.
macro_rules! lock_manager {
    ($manager:ty, $target:ty $(, $generic:ident)?) => {
        impl$(<$generic: LockManager + ?Sized>)? LockManager for $manager {
            forward! {
                $target;
                fn lock_with(name: &str, options: &LockOptions) -> Result<LockGuard>;
                fn lock(name: &str) -> Result<LockGuard>;
                fn try_lock(name: &str) -> Result<LockGuard>;
                fn try_lock_for(name: &str, wait: Duration) -> Result<LockGuard>;
                fn lock_all_with(names: &[&str], options: &LockOptions) -> Result<MultiGuard>;
                fn lock_all(names: &[&str]) -> Result<MultiGuard>;
                fn try_lock_all(names: &[&str]) -> Result<MultiGuard>;
                fn try_lock_all_for(names: &[&str], wait: Duration) -> Result<MultiGuard>;
                fn rw_lock(name: &str) -> Result<RwLock>;
                fn semaphore(name: &str, limit: u32) -> Result<Semaphore>;
                fn adopt(detached: &Detached) -> Result<LockGuard>;
                fn lock_reentrant(name: &str) -> Result<ReentrantGuard>;
                fn acquire_lock(
                    name: &str,
                    lock_timeout: Duration,
                    acquire_timeout: Duration
                ) -> Result<Option<String>>;
                fn release_lock(name: &str, id: &str) -> Result<bool>;
                fn holder(name: &str) -> Result<Option<Holder>>;
                fn is_locked(name: &str) -> Result<bool>;
                fn locks(pattern: &str) -> Result<Vec<LockInfo>>;
                fn lock_info(name: &str) -> Result<Option<LockInfo>>;
                fn force_release(name: &str) -> Result<bool>;
                fn force_release_if(name: &str, id: &str) -> Result<Released>;
                fn ping() -> Result<Duration>;
                fn metrics() -> Metrics;
                fn server() -> &str;
                fn shutdown();
            }
        }
    };
}

lock_manager!(RedisMgr, RedisMgr);
#[cfg(feature = "mysql")]
lock_manager!(MySqlMgr, MySqlMgr);
lock_manager!(&M, M, M);
lock_manager!(Box<M>, M, M);
lock_manager!(Arc<M>, M, M);
