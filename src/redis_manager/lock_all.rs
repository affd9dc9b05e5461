//! Locks of several names at once.

use std::time::Duration;

use super::RedisMgr;
use crate::{config::LockOptions, error::Result, multi_guard::MultiGuard};

impl RedisMgr {
    /// Acquires the locks of all these names. Waits without a time limit.
    ///
    /// The locks are acquired one after the other, in the order of their names, each in its queue.
    /// So calls with any names in any order cannot deadlock, unless a caller has other locks
    /// already. Those that are acquired already are renewed meanwhile; with
    /// [`renew(false)`](LockOptions::renew) they may expire, and the call then fails.
    /// [`max_hold`](LockOptions::max_hold) counts from when all are acquired.
    ///
    /// Once the time of the call has passed, each further lock may take up to one [operation
    /// timeout](crate::Config::operation_timeout). A server that does not reply ends the call at
    /// the first of them.
    ///
    /// # Errors
    ///
    /// [`LockError::InvalidOptions`](crate::LockError::InvalidOptions) if there is no name, if one
    /// is given twice, or if there are more than 1,000. Otherwise the errors of
    /// [`lock`](Self::lock); all locks that were acquired are then released in the background.
    pub fn lock_all(&self, names: impl IntoIterator<Item = impl AsRef<str>>) -> Result<MultiGuard> {
        self.lock_all_with(names, &LockOptions::new())
    }

    /// Acquires the locks of all these names if all are free and nobody waits for them. Does not
    /// wait. One server grants all of them or none in one request; in a cluster, that is so if all
    /// names have one hash tag. Otherwise they are acquired one after the
    /// other.
    ///
    /// # Errors
    ///
    /// [`LockError::Held`](crate::LockError::Held) names the first lock that is not free, and its
    /// holder. Otherwise the errors of [`lock_all`](Self::lock_all).
    pub fn try_lock_all(
        &self,
        names: impl IntoIterator<Item = impl AsRef<str>>,
    ) -> Result<MultiGuard> {
        self.try_lock_all_for(names, Duration::ZERO)
    }

    /// Acquires the locks of all these names. Waits for at most `wait` in total.
    ///
    /// # Errors
    ///
    /// [`LockError::Timeout`](crate::LockError::Timeout) names the lock that was not free in time.
    /// Otherwise the errors of [`lock_all`](Self::lock_all).
    pub fn try_lock_all_for(
        &self,
        names: impl IntoIterator<Item = impl AsRef<str>>,
        wait: Duration,
    ) -> Result<MultiGuard> {
        self.lock_all_with(names, &LockOptions::new().wait(wait))
    }

    /// Acquires the locks of all these names as `options` specify. The maximum wait counts for all
    /// together.
    ///
    /// # Errors
    ///
    /// The errors of [`lock_all`](Self::lock_all) and [`lock_with`](Self::lock_with).
    pub fn lock_all_with(
        &self,
        names: impl IntoIterator<Item = impl AsRef<str>>,
        options: &LockOptions,
    ) -> Result<MultiGuard> {
        MultiGuard::acquire(&self.handle, names, options)
    }
}
