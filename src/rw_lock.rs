//! `RwLock`: a lock that many readers or one writer hold.

use std::{fmt, sync::Arc, time::Duration};

use crate::{
    config::LockOptions,
    core::kind::LockKind,
    error::Result,
    guard::{LockGuard, guard_type},
    manager::ManagerHandle,
    reentrant::acquire_unless_own,
};

/// A lock that many readers hold together, or one writer alone: a handle, from
/// [`RedisMgr::rw_lock`](crate::RedisMgr::rw_lock). Clones are handles of the same lock.
///
/// Readers and writers wait in one queue, first in, first out: a waiting writer goes before readers
/// that come later. A release of a writer admits all readers up to the next writer in the queue.
///
/// - A reader cannot become a writer: two readers that both tried it would wait for each other.
///   Release the read lock, acquire the write lock, and check again what you have read. A writer
///   can become a reader: [`WriteGuard::downgrade`].
/// - A thread must not wait for this lock while it has it. A second read lock of the same thread
///   waits forever if a writer has queued in between. That is no error, because another thread may
///   release the first guard, which can be sent to it.
/// - A [mutex](crate::RedisMgr::lock) of the same name and a write lock exclude each other. But
///   only read-write locks keep the order of readers in the queue, so do not mix them.
/// - The tokens of readers do not decide between them. A resource that checks tokens must be
///   written by writers only.
/// - Over [several nodes](crate::Config::nodes), readers that hold the lock at the same time may
///   have the same fencing token. It is larger than that of each writer before them.
///
/// ```
/// # #[cfg(feature = "testing")] {
/// # let mgr = distlock::testing::MemoryServer::new().manager();
/// let catalog = mgr.rw_lock("catalog")?;
/// let (one, two) = (catalog.read()?, catalog.read()?);
/// assert!(catalog.try_write().unwrap_err().is_contended());
/// drop((one, two));
///
/// let writer = catalog.write()?;
/// let reader = writer.downgrade()?; // no other writer in between
/// assert!(reader.is_held());
/// # }
/// # Ok::<(), distlock::LockError>(())
/// ```
#[derive(Clone)]
pub struct RwLock {
    handle: Arc<ManagerHandle>,
    name: Arc<str>,
}

impl RwLock {
    pub(crate) fn new(handle: &Arc<ManagerHandle>, name: &str) -> Result<RwLock> {
        handle.manager()?.check_kind(LockKind::Read, name)?;
        Ok(RwLock { handle: handle.clone(), name: name.into() })
    }

    /// Returns the name of the lock, without its prefix.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Acquires the lock for reading. Waits without a time limit.
    ///
    /// # Errors
    ///
    /// The errors of [`RedisMgr::lock_with`](crate::RedisMgr::lock_with).
    pub fn read(&self) -> Result<ReadGuard> {
        self.read_with(&LockOptions::new())
    }

    /// Acquires the lock for reading if no writer has it and no other client waits for it. Does not
    /// wait for it: blocks for at most one [operation
    /// timeout](crate::Config::operation_timeout).
    ///
    /// # Errors
    ///
    /// [`LockError::Held`](crate::LockError::Held) if it cannot be acquired now; otherwise as for
    /// [`read`](Self::read).
    pub fn try_read(&self) -> Result<ReadGuard> {
        self.try_read_for(Duration::ZERO)
    }

    /// Acquires the lock for reading. Waits for at most `wait`, then one [operation
    /// timeout](crate::Config::operation_timeout) for the server.
    ///
    /// # Errors
    ///
    /// [`LockError::Timeout`](crate::LockError::Timeout) if it could not be acquired in time;
    /// otherwise as for [`read`](Self::read).
    pub fn try_read_for(&self, wait: Duration) -> Result<ReadGuard> {
        self.read_with(&LockOptions::new().wait(wait))
    }

    /// Acquires the lock for reading, with `options`.
    ///
    /// # Errors
    ///
    /// As for [`read`](Self::read).
    pub fn read_with(&self, options: &LockOptions) -> Result<ReadGuard> {
        self.acquire(LockKind::Read, options).map(ReadGuard)
    }

    /// Acquires the lock for writing. Waits without a time limit.
    ///
    /// # Errors
    ///
    /// The errors of [`RedisMgr::lock_with`](crate::RedisMgr::lock_with).
    pub fn write(&self) -> Result<WriteGuard> {
        self.write_with(&LockOptions::new())
    }

    /// Acquires the lock for writing if it is free. Does not wait for it: blocks for at most one
    /// [operation timeout](crate::Config::operation_timeout).
    ///
    /// # Errors
    ///
    /// [`LockError::Held`](crate::LockError::Held) if it cannot be acquired now; otherwise as for
    /// [`write`](Self::write).
    pub fn try_write(&self) -> Result<WriteGuard> {
        self.try_write_for(Duration::ZERO)
    }

    /// Acquires the lock for writing. Waits for at most `wait`, then one [operation
    /// timeout](crate::Config::operation_timeout) for the server.
    ///
    /// # Errors
    ///
    /// [`LockError::Timeout`](crate::LockError::Timeout) if it could not be acquired in time;
    /// otherwise as for [`write`](Self::write).
    pub fn try_write_for(&self, wait: Duration) -> Result<WriteGuard> {
        self.write_with(&LockOptions::new().wait(wait))
    }

    /// Acquires the lock for writing, with `options`.
    ///
    /// # Errors
    ///
    /// As for [`write`](Self::write).
    pub fn write_with(&self, options: &LockOptions) -> Result<WriteGuard> {
        self.acquire(LockKind::Write, options).map(WriteGuard)
    }

    fn acquire(&self, kind: LockKind, options: &LockOptions) -> Result<LockGuard> {
        acquire_unless_own(&self.handle, kind, &self.name, options)
    }
}

impl fmt::Debug for RwLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RwLock").field("name", &self.name).finish_non_exhaustive()
    }
}

guard_type! {
    /// A read lock, released when this guard is dropped. Dereferences to [`LockGuard`], with all of
    /// its methods.
    ///
    /// Its fencing token is larger than those of all writers before it, and smaller than those of
    /// all writers after it.
    #[must_use = "if unused, the lock is released at once; bind it to a name, not to `_`"]
    ReadGuard
}

guard_type! {
    /// A write lock, released when this guard is dropped. Dereferences to [`LockGuard`], with all
    /// of its methods.
    #[must_use = "if unused, the lock is released at once; bind it to a name, not to `_`"]
    WriteGuard
}

impl WriteGuard {
    /// Turns the write lock into a read lock with the same id and token, without a moment in which
    /// another writer could have it. Readers at the head of the queue are granted the lock too: up
    /// to a hundred at once, and the others when they ask next. Blocks for one round trip, at most
    /// for one [operation timeout](crate::Config::operation_timeout). The channel of
    /// [`lost`](LockGuard::lost) of this guard closes; the new guard has its own.
    ///
    /// # Errors
    ///
    /// [`LockError::Lost`](crate::LockError::Lost) if the lock is lost. If the server does not
    /// reply, or refuses, the errors of [`LockGuard::release`]; the lock is then released in the
    /// background.
    pub fn downgrade(self) -> Result<ReadGuard> {
        self.0.downgrade().map(ReadGuard)
    }
}
