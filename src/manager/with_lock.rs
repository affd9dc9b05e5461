//! `RedisMgr::with_lock`: work under a lock, whose loss is an error.

use super::RedisMgr;
use crate::{
    core::lock_lost::LockLost,
    error::{LockError, Result},
    guard::LockGuard,
    lock_info::Released,
};

impl RedisMgr {
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
        let guard = self.lock(name)?;
        let result = work(&guard);
        let held = guard.ensure_held();
        let released = guard.release();
        let lost = |why| Err(LockError::Lost { name: name.to_owned(), why });
        match (held, released) {
            (Err(error), _) => Err(error),
            // The server had lost the lock during the work.
            (_, Ok(Released::Gone)) => lost(LockLost::Gone),
            (_, Ok(Released::OwnedByOther(by))) => lost(LockLost::Taken { by: Box::new(by) }),
            // A release without a reply is tried again in the background.
            (_, Ok(Released::Released) | Err(_)) => Ok(result),
        }
    }
}
