//! Looking at locks, and taking them from their holders.

use super::RedisMgr;
use crate::{
    core::holder::Holder,
    error::Result,
    lock_info::{LockInfo, Released},
};

impl RedisMgr {
    /// Returns the current holder of the lock, with the time left and the number of waiters; `None`
    /// if the lock is free. Blocks for one round trip, or two if several clients hold the lock; at
    /// most for one operation timeout. Changes nothing.
    ///
    /// # Errors
    ///
    /// [`LockError::Unavailable`](crate::LockError::Unavailable),
    /// [`LockError::Refused`](crate::LockError::Refused) or a similar error if the server cannot
    /// reply.
    pub fn holder(&self, name: &str) -> Result<Option<Holder>> {
        let manager = self.handle.manager()?;
        manager.inspect(&manager.key(name)?)
    }

    /// Returns true if any client holds the lock. Blocks like [`holder`](Self::holder).
    ///
    /// # Errors
    ///
    /// The errors of [`holder`](Self::holder).
    pub fn is_locked(&self, name: &str) -> Result<bool> {
        Ok(self.holder(name)?.is_some())
    }

    /// Lists the held locks whose names match `pattern`, sorted by name, with their holders and
    /// waiters. Changes nothing.
    ///
    /// The pattern is a Redis glob over names without the prefix: `*` matches any text, `?` any
    /// byte, `[a-c]` one byte of a set, and a backslash escapes the next byte. Locks of other
    /// clients under the prefix are listed too. With an empty prefix, where a key can be any
    /// data, only locks of this library are listed.
    ///
    /// The request is split into many small steps (`SCAN`, then 50 locks at a time), so that the
    /// server can serve other clients in between. The call blocks until the whole key space has
    /// been scanned: for at most one operation timeout in each step, and at most 60 operation
    /// timeouts in total (a minute by default). It uses one pooled connection to each node. A lock
    /// that is acquired or released during the call may or may not be listed. Each lock lists its
    /// first 100 waiters, or fewer if there are very many in total; see
    /// [`lock_info`](Self::lock_info).
    ///
    /// With several nodes, the locks of all responding nodes are listed.
    /// [`LockInfo::is_certain`] says whether a quorum agrees on the holder.
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
    /// [`LockError::InvalidName`](crate::LockError::InvalidName) if no name can match the pattern,
    /// because it is empty, longer than any name, or has a `[` without a `]`.
    /// [`LockError::Unavailable`](crate::LockError::Unavailable),
    /// [`LockError::NoQuorum`](crate::LockError::NoQuorum),
    /// [`LockError::PoolExhausted`](crate::LockError::PoolExhausted) or
    /// [`LockError::Refused`](crate::LockError::Refused) if the server cannot reply. The server's
    /// user also needs the permissions `+scan` and `+lrange`.
    pub fn locks(&self, pattern: &str) -> Result<Vec<LockInfo>> {
        self.handle.manager()?.locks(pattern)
    }

    /// Returns the holder of one lock and its first 1,000 waiters in queue order; `None` if the
    /// lock is free. Blocks like [`holder`](Self::holder). Changes nothing.
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
    /// The errors of [`holder`](Self::holder), and
    /// [`LockError::WrongType`](crate::LockError::WrongType) if the key holds something that is not
    /// a lock.
    pub fn lock_info(&self, name: &str) -> Result<Option<LockInfo>> {
        let manager = self.handle.manager()?;
        manager.lock_info(&manager.key(name)?)
    }

    /// Takes the lock away from its current holder and hands it over to the next waiter. Returns
    /// true on success; false if the lock was free or its holder changed during the call.
    ///
    /// Of a read-write lock that readers have, and of a semaphore, all holders lose it, including
    /// those that join during the call. To release one of them, pass its id to
    /// [`force_release_if`](Self::force_release_if).
    ///
    /// This is for operators: the former holder finds out at its next renewal, and may keep working
    /// until then. Blocks for two round trips, at most for one operation timeout. Finding the
    /// holder may take at most half of that.
    ///
    /// The holder may be any client, with any bytes as its identifier. Identifiers over 512 bytes
    /// are compared by their first 512 bytes.
    ///
    /// # Errors
    ///
    /// The errors of [`holder`](Self::holder), and
    /// [`LockError::WrongType`](crate::LockError::WrongType) if the key holds something that is not
    /// a lock. After [`LockError::Unavailable`](crate::LockError::Unavailable), the lock may have
    /// been released.
    pub fn force_release(&self, name: &str) -> Result<bool> {
        let manager = self.handle.manager()?;
        let key = manager.key(name)?;
        manager.force_release(&key)
    }

    /// Takes the lock away from the holder with the identifier `id` (see [`Holder::id`]), and from
    /// no other client: the server compares and releases in one step. Blocks for one round trip, or
    /// two if the identifier is not valid UTF-8 or the lock has several holders; at most for one
    /// [operation timeout](crate::Config::operation_timeout).
    ///
    /// Of several holders, [`holder`](Self::holder) names the one that expires last. All are in
    /// [`LockInfo::members`] and [`Semaphore::holders`](crate::Semaphore::holders).
    ///
    /// ```no_run
    /// # fn main() -> distlock::Result<()> {
    /// let mgr = distlock::RedisMgr::instance()?;
    /// if let Some(stuck) = mgr.holder("orders:42")? {
    ///     println!("{}", mgr.force_release_if("orders:42", stuck.id())?);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`LockGuard::release`](crate::LockGuard::release). A key that holds something
    /// that is not a lock counts as [`Released::Gone`](crate::Released::Gone).
    pub fn force_release_if(&self, name: &str, id: &str) -> Result<Released> {
        let manager = self.handle.manager()?;
        manager.force_release_if(&manager.key(name)?, id)
    }
}
