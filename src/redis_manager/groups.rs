//! Locks that several clients hold together.

use super::RedisMgr;
use crate::{error::Result, rw_lock::RwLock, semaphore::Semaphore};

impl RedisMgr {
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
