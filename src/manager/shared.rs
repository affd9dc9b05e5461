//! Locks that several clients hold together.

use super::RedisMgr;
use crate::{
    core::detached::Detached, error::Result, guard::LockGuard, rw_lock::RwLock,
    semaphore::Semaphore,
};

impl RedisMgr {
    /// Takes over a lock that its holder has [detached](LockGuard::detach), under another id and
    /// with a new, larger fencing token. The lock is renewed from here on. Only one successor can
    /// have it, and late requests of the former holder have no effect. Blocks for one round trip,
    /// at most for one [operation timeout](crate::Config::operation_timeout).
    ///
    /// # Errors
    ///
    /// [`LockError::Lost`](crate::LockError::Lost) if the lock has expired, or if another client
    /// has it, such as a successor that was faster.
    /// [`LockError::InvalidOptions`](crate::LockError::InvalidOptions) with [several
    /// nodes](crate::Config::nodes). [`LockError::Unavailable`](crate::LockError::Unavailable) if
    /// the server does not reply; the lock may then stay held until it expires.
    pub fn adopt(&self, detached: &Detached) -> Result<LockGuard> {
        let held = self.handle.inner()?.adopt(detached)?;
        Ok(LockGuard::new(held, self.handle.clone()))
    }

    /// Returns a handle of the read-write lock with this name. Sends nothing.
    ///
    /// # Errors
    ///
    /// [`LockError::InvalidName`](crate::LockError::InvalidName) if the name is invalid.
    /// [`LockError::Shutdown`](crate::LockError::Shutdown) after a shutdown.
    pub fn rw_lock(&self, name: &str) -> Result<RwLock> {
        RwLock::new(&self.handle, name)
    }

    /// Returns a handle of the semaphore with this name, with `limit` permits. Sends nothing.
    ///
    /// # Errors
    ///
    /// The errors of [`rw_lock`](Self::rw_lock), and
    /// [`LockError::InvalidOptions`](crate::LockError::InvalidOptions) if the limit is 0, or with
    /// [several nodes](crate::Config::nodes) if it is more than 1: they would grant too many
    /// permits.
    pub fn semaphore(&self, name: &str, limit: u32) -> Result<Semaphore> {
        Semaphore::new(&self.handle, name, limit)
    }
}
