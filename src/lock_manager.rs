//! `LockManager`: what all lock managers can do.

use std::{fmt, time::Duration};

#[cfg(feature = "mysql")]
use crate::mysql_manager::MySqlMgr;
use crate::{
    config::LockOptions,
    core::{detached::Detached, holder::Holder},
    error::{LockError, Result},
    guard::LockGuard,
    lock_info::{LockInfo, Released},
    multi_guard::MultiGuard,
    redis_manager::RedisMgr,
    reentrant::ReentrantGuard,
    rw_lock::RwLock,
    semaphore::Semaphore,
};

/// A lock manager, wherever its locks are kept: for code that takes any.
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
        let _ = (names, options);
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
        let _ = name;
        Err(cannot("keep read-write locks"))
    }

    /// Returns a handle of a semaphore. See [`RedisMgr::semaphore`].
    fn semaphore(&self, name: &str, limit: u32) -> Result<Semaphore> {
        let _ = (name, limit);
        Err(cannot("keep semaphores"))
    }

    /// Takes over a lock that its holder has detached. See [`RedisMgr::adopt`].
    fn adopt(&self, detached: &Detached) -> Result<LockGuard> {
        let _ = detached;
        Err(cannot("adopt locks"))
    }

    /// Acquires a lock that its thread can acquire again. See [`RedisMgr::lock_reentrant`].
    fn lock_reentrant(&self, name: &str) -> Result<ReentrantGuard> {
        let _ = name;
        Err(cannot("acquire reentrant locks"))
    }

    /// Acquires a lock and returns only its id. See [`RedisMgr::acquire_lock`].
    fn acquire_lock(
        &self,
        name: &str,
        lock_timeout: Duration,
        acquire_timeout: Duration,
    ) -> Result<Option<String>> {
        let _ = (name, lock_timeout, acquire_timeout);
        Err(cannot("acquire locks by id"))
    }

    /// Releases a lock by its id. See [`RedisMgr::release_lock`].
    fn release_lock(&self, name: &str, id: &str) -> Result<bool> {
        let _ = (name, id);
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
        let _ = pattern;
        Err(cannot("list locks"))
    }

    /// Describes a held lock. See [`RedisMgr::lock_info`].
    fn lock_info(&self, name: &str) -> Result<Option<LockInfo>> {
        let _ = name;
        Err(cannot("describe locks"))
    }

    /// Takes a lock from its holder. See [`RedisMgr::force_release`].
    fn force_release(&self, name: &str) -> Result<bool> {
        let _ = name;
        Err(cannot("release locks of others"))
    }

    /// Takes a lock from the holder with this id. See [`RedisMgr::force_release_if`].
    fn force_release_if(&self, name: &str, id: &str) -> Result<Released> {
        let _ = (name, id);
        Err(cannot("release locks of others"))
    }

    /// Measures the time of one exchange with the server.
    fn ping(&self) -> Result<Duration> {
        Err(cannot("measure the time of an exchange"))
    }

    /// Returns the server as named in messages; the name of the manager's type if there is none.
    fn server(&self) -> &str {
        std::any::type_name::<Self>()
    }

    /// Releases all locks, wakes all waiters, and stops the threads. See [`RedisMgr::shutdown`].
    fn shutdown(&self);
}

/// The error of a method that a manager does not implement.
fn cannot(action: &str) -> LockError {
    let reason = format!("this lock manager cannot {action}; use a RedisMgr");
    LockError::InvalidOptions { reason }
}

macro_rules! lock_manager {
    ($manager:ty) => {
        impl LockManager for $manager {
            fn lock_with(&self, name: &str, options: &LockOptions) -> Result<LockGuard> {
                self.lock_with(name, options)
            }

            fn lock_all_with(&self, names: &[&str], options: &LockOptions) -> Result<MultiGuard> {
                self.lock_all_with(names, options)
            }

            fn rw_lock(&self, name: &str) -> Result<RwLock> {
                self.rw_lock(name)
            }

            fn semaphore(&self, name: &str, limit: u32) -> Result<Semaphore> {
                self.semaphore(name, limit)
            }

            fn adopt(&self, detached: &Detached) -> Result<LockGuard> {
                self.adopt(detached)
            }

            fn lock_reentrant(&self, name: &str) -> Result<ReentrantGuard> {
                self.lock_reentrant(name)
            }

            fn acquire_lock(
                &self,
                name: &str,
                lock_timeout: Duration,
                acquire_timeout: Duration,
            ) -> Result<Option<String>> {
                self.acquire_lock(name, lock_timeout, acquire_timeout)
            }

            fn release_lock(&self, name: &str, id: &str) -> Result<bool> {
                self.release_lock(name, id)
            }

            fn holder(&self, name: &str) -> Result<Option<Holder>> {
                self.holder(name)
            }

            fn locks(&self, pattern: &str) -> Result<Vec<LockInfo>> {
                self.locks(pattern)
            }

            fn lock_info(&self, name: &str) -> Result<Option<LockInfo>> {
                self.lock_info(name)
            }

            fn force_release(&self, name: &str) -> Result<bool> {
                self.force_release(name)
            }

            fn force_release_if(&self, name: &str, id: &str) -> Result<Released> {
                self.force_release_if(name, id)
            }

            fn ping(&self) -> Result<Duration> {
                self.ping()
            }

            fn server(&self) -> &str {
                self.server()
            }

            fn shutdown(&self) {
                self.shutdown();
            }
        }
    };
}

lock_manager!(RedisMgr);
#[cfg(feature = "mysql")]
lock_manager!(MySqlMgr);
