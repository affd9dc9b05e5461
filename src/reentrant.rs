//! `ReentrantGuard`: a lock that the thread holding it can acquire again.

use std::{
    cell::RefCell,
    collections::HashMap,
    ops::Deref,
    panic::{RefUnwindSafe, UnwindSafe},
    ptr,
    rc::{Rc, Weak},
    sync::Arc,
    time::Duration,
};

use crate::{
    config::LockOptions,
    core::kind::LockKind,
    error::{LockError, Result},
    guard::LockGuard,
    lock_info::Released,
    manager::{HeldThrough, ManagerHandle},
};

type HeldByThread = HashMap<(*const ManagerHandle, Box<str>), Weak<LockGuard>>;

thread_local! {
    /// The locks that this thread holds, by manager and name. A guard keeps its handle, so no other
    /// handle has the same address while the guard exists.
    static HELD: RefCell<HeldByThread> = RefCell::default();
}

/// A lock held by this thread, which can acquire it again without a round trip. Dropping the last
/// of its guards releases the lock.
///
/// The guard cannot be sent to another thread, because only this thread may enter again. It
/// dereferences to [`LockGuard`], but cannot be detached.
///
/// ```no_run
/// # fn main() -> distlock::Result<()> {
/// let mgr = distlock::RedisMgr::instance()?;
/// let outer = mgr.lock_reentrant("orders:42")?;
/// let inner = mgr.lock_reentrant("orders:42")?;
/// assert_eq!(inner.hold_count(), 2);
/// assert_eq!(inner.fencing_token(), outer.fencing_token());
/// # Ok(())
/// # }
/// ```
#[must_use = "if unused, the lock is released at once; bind it to a name, not to `_`"]
#[derive(Debug)]
pub struct ReentrantGuard {
    guard: Rc<LockGuard>,
    handle: *const ManagerHandle,
}

/// Fails if this thread would wait for a lock that it holds itself. Only a reentrant guard makes
/// that certain, because it stays on its thread: another thread may release any other guard.
pub(crate) fn check_not_own(
    handle: &ManagerHandle,
    name: &str,
    options: &LockOptions,
) -> Result<()> {
    let own = HELD.try_with(|held| {
        let held = held.borrow();
        // The usual case, which must cost nothing.
        if held.is_empty() {
            return None;
        }
        held.get(&(ptr::from_ref(handle), Box::from(name))).and_then(Weak::upgrade)
    });
    let is_own = own.ok().flatten().is_some_and(|guard| guard.is_held_until_released());
    if is_own && options.wait_limit() != Some(Duration::ZERO) {
        return Err(LockError::WouldDeadlock { name: name.to_owned() });
    }
    Ok(())
}

/// Acquires a lock, unless this thread would wait for itself.
pub(crate) fn acquire_unless_own(
    handle: &Arc<ManagerHandle>,
    kind: LockKind,
    name: &str,
    options: &LockOptions,
) -> Result<LockGuard> {
    check_not_own(handle, name, options)?;
    let held = handle.manager()?.acquire(kind, name, options, HeldThrough::Guard)?;
    Ok(LockGuard::new(held, handle.clone()))
}

impl ReentrantGuard {
    /// Enters again if this thread holds the lock; acquires it otherwise.
    pub(crate) fn enter(
        handle: &Arc<ManagerHandle>,
        name: &str,
        options: &LockOptions,
    ) -> Result<ReentrantGuard> {
        let manager = handle.manager()?;
        let key = (Arc::as_ptr(handle), Box::from(name));
        let held = HELD.try_with(|held| held.borrow().get(&key).and_then(Weak::upgrade));
        // Without the table, this thread could wait for a lock that it holds.
        let held = held.map_err(|_| LockError::InvalidOptions {
            reason: "this thread is ending, and its record of reentrant locks is gone; use \
                     RedisMgr::lock instead"
                .into(),
        })?;
        if let Some(guard) = held {
            guard.ensure_held()?;
            return Ok(ReentrantGuard { guard, handle: key.0 });
        }
        let held = manager.acquire(LockKind::Mutex, name, options, HeldThrough::Guard)?;
        let guard = Rc::new(LockGuard::new(held, handle.clone()));
        // This cannot fail: the table existed above, and only this thread can destroy it.
        let _ = HELD.try_with(|held| held.borrow_mut().insert(key, Rc::downgrade(&guard)));
        Ok(ReentrantGuard { guard, handle: Arc::as_ptr(handle) })
    }

    /// Returns how many guards of this thread hold the lock.
    pub fn hold_count(&self) -> usize {
        Rc::strong_count(&self.guard)
    }

    /// Releases this hold. The last hold releases the lock and returns the outcome; the others
    /// return `None`. The last one blocks like [`LockGuard::release`].
    ///
    /// # Errors
    ///
    /// The errors of [`LockGuard::release`], and [`LockError::Lost`] if the lock was lost and this
    /// is not the last hold.
    pub fn release(mut self) -> Result<Option<Released>> {
        if Rc::strong_count(&self.guard) > 1 {
            return self.guard.ensure_held().map(|()| None);
        }
        self.unregister();
        match Rc::get_mut(&mut self.guard) {
            Some(guard) => guard.release_in_place().map(Some),
            None => Err(LockError::Shutdown),
        }
    }

    fn unregister(&self) {
        let key = (self.handle, Box::from(self.guard.name()));
        // While the thread ends, its table may already be destroyed; then there is nothing to
        // remove.
        let _ = HELD.try_with(|held| {
            let mut held = held.borrow_mut();
            // An event handler may have acquired the lock again; that entry must stay.
            if held.get(&key).is_some_and(|guard| ptr::eq(guard.as_ptr(), Rc::as_ptr(&self.guard)))
            {
                held.remove(&key);
            }
        });
    }
}

impl Deref for ReentrantGuard {
    type Target = LockGuard;

    fn deref(&self) -> &LockGuard {
        &self.guard
    }
}

// As for `LockGuard`.
impl UnwindSafe for ReentrantGuard {}
impl RefUnwindSafe for ReentrantGuard {}

impl Drop for ReentrantGuard {
    fn drop(&mut self) {
        if Rc::strong_count(&self.guard) == 1 {
            self.unregister();
        }
    }
}
