//! `Semaphore`: a limited number of permits under one name.

use std::{fmt, sync::Arc, time::Duration};

use crate::{
    config::LockOptions,
    core::{
        holder::Holder,
        kind::{HeldBy, LockKind, PERMITS_MAX},
    },
    error::{LockError, Result},
    guard::guard_type,
    lock_info::LockInfo,
    manager::ManagerHandle,
    reentrant::acquire_unless_own,
};

/// A limited number of permits under one name: a handle, from
/// [`RedisMgr::semaphore`](crate::RedisMgr::semaphore). Clones are handles of the same semaphore.
///
/// Permits have holders, are renewed, and expire one by one if their holder dies. Waiters are
/// served first in, first out: a waiter that needs many permits goes before one that comes later
/// and needs few.
///
/// The limit is not stored on the server: each request carries that of its handle. If programs use
/// different limits, each keeps to its own. A lower limit revokes no permit. But while a client
/// with a lower limit is the first in the queue, those behind it wait too, although there are
/// permits for them. So change a limit in all programs at about the same time.
///
/// The tokens of permits do not decide between holders: later permits have larger tokens, but
/// earlier ones are as valid. A resource that checks tokens needs a mutex.
///
/// ```
/// # #[cfg(feature = "testing")] {
/// # let mgr = distlock::testing::MemoryServer::new().manager();
/// let api = mgr.semaphore("api", 10)?;
/// let permit = api.acquire()?;
/// let more = api.acquire_many(3)?;
/// assert_eq!(api.available()?, 6);
/// drop((permit, more));
/// assert_eq!(api.available()?, 10);
/// # }
/// # Ok::<(), distlock::LockError>(())
/// ```
#[derive(Clone)]
pub struct Semaphore {
    handle: Arc<ManagerHandle>,
    name: Arc<str>,
    limit: u32,
}

impl Semaphore {
    pub(crate) fn new(handle: &Arc<ManagerHandle>, name: &str, limit: u32) -> Result<Semaphore> {
        handle.manager()?.check_kind(LockKind::Permits { limit, count: 1 }, name)?;
        if limit == 0 {
            let reason = "the limit of a semaphore is 0, but must be at least 1".into();
            return Err(LockError::InvalidOptions { reason });
        }
        Ok(Semaphore { handle: handle.clone(), name: name.into(), limit })
    }

    /// Returns the name of the semaphore, without its prefix.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the number of permits that all holders may have together.
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// Acquires a permit. Waits without a time limit.
    ///
    /// # Errors
    ///
    /// The errors of [`RedisMgr::lock_with`](crate::RedisMgr::lock_with).
    pub fn acquire(&self) -> Result<Permit> {
        self.acquire_many(1)
    }

    /// Acquires a permit if one is free and no other client waits for one. Does not wait for one:
    /// blocks for at most one [operation timeout](crate::Config::operation_timeout).
    ///
    /// # Errors
    ///
    /// [`LockError::Held`] if there is none now; otherwise as for [`acquire`](Self::acquire).
    pub fn try_acquire(&self) -> Result<Permit> {
        self.try_acquire_for(Duration::ZERO)
    }

    /// Acquires a permit. Waits for at most `wait`, then one [operation
    /// timeout](crate::Config::operation_timeout) for the server.
    ///
    /// # Errors
    ///
    /// [`LockError::Timeout`] if there was none in time; otherwise as for
    /// [`acquire`](Self::acquire).
    pub fn try_acquire_for(&self, wait: Duration) -> Result<Permit> {
        self.acquire_with(1, &LockOptions::new().wait(wait))
    }

    /// Acquires `count` permits together. Waits without a time limit.
    ///
    /// # Errors
    ///
    /// As for [`acquire_with`](Self::acquire_with).
    pub fn acquire_many(&self, count: u32) -> Result<Permit> {
        self.acquire_with(count, &LockOptions::new())
    }

    /// Acquires `count` permits together, with `options`.
    ///
    /// # Errors
    ///
    /// [`LockError::InvalidOptions`] if `count` is 0, more than the limit, or more than 9,999.
    /// While a mutex or a write lock of this name is held, there are no permits: an error about
    /// contention then names that holder, whose [`held_by`](Holder::held_by) is
    /// [`HeldBy::One`](crate::HeldBy::One). Otherwise the errors of
    /// [`RedisMgr::lock_with`](crate::RedisMgr::lock_with).
    pub fn acquire_with(&self, count: u32, options: &LockOptions) -> Result<Permit> {
        let limit = self.limit;
        let most = limit.min(PERMITS_MAX);
        if count == 0 || count > most {
            let but = match (count, most == limit) {
                (0, _) => String::new(),
                (_, true) => format!(", but {most} is the limit of the semaphore"),
                (_, false) => format!(", but {most} is the maximum"),
            };
            let reason = format!(
                "{count} permits were asked for{but}; ask for at least 1 and at most {most}"
            );
            return Err(LockError::InvalidOptions { reason });
        }
        let kind = LockKind::Permits { limit, count };
        acquire_unless_own(&self.handle, kind, &self.name, options).map(Permit)
    }

    /// Returns how many permits are free now. Blocks for two round trips, at most for one
    /// [operation timeout](crate::Config::operation_timeout). Changes nothing. Zero if a mutex
    /// or a read-write lock of this name is held.
    ///
    /// # Errors
    ///
    /// The errors of [`RedisMgr::lock_info`](crate::RedisMgr::lock_info).
    pub fn available(&self) -> Result<u32> {
        let Some(lock) = self.lock_info()? else { return Ok(self.limit) };
        let used = match lock.holder().held_by() {
            HeldBy::Permits { count } => count.unwrap_or(0),
            HeldBy::One | HeldBy::Readers { .. } => self.limit.into(),
        };
        Ok(self.limit.saturating_sub(u32::try_from(used).unwrap_or(u32::MAX)))
    }

    /// Returns the holders of permits, those first that expire first. [`Holder::held_by`] says how
    /// many permits each has. Blocks like [`available`](Self::available). At most the first
    /// thousand permits are listed.
    ///
    /// # Errors
    ///
    /// The errors of [`RedisMgr::lock_info`](crate::RedisMgr::lock_info).
    pub fn holders(&self) -> Result<Vec<Holder>> {
        Ok(match self.lock_info()? {
            Some(lock) if lock.holder().held_by() == HeldBy::One => vec![lock.holder().clone()],
            Some(lock) => lock.members().to_vec(),
            None => Vec::new(),
        })
    }

    fn lock_info(&self) -> Result<Option<LockInfo>> {
        let manager = self.handle.manager()?;
        manager.lock_info(&manager.key(&self.name)?)
    }
}

impl fmt::Debug for Semaphore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Semaphore")
            .field("name", &self.name)
            .field("limit", &self.limit)
            .finish_non_exhaustive()
    }
}

guard_type! {
    /// One or more permits of a semaphore, released when this guard is dropped. Dereferences to
    /// [`LockGuard`](crate::LockGuard), with all of its methods.
    #[must_use = "if unused, the permits are released at once; bind it to a name, not to `_`"]
    Permit
}

impl Permit {
    /// Returns the number of permits.
    pub fn count(&self) -> u32 {
        match self.kind() {
            LockKind::Permits { count, .. } => count,
            _ => 1,
        }
    }
}
