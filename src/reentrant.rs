//! `ReentrantGuard`: a lock that its thread can take again.

use std::{
    cell::RefCell,
    collections::HashMap,
    ops::Deref,
    ptr,
    rc::{Rc, Weak},
    sync::Arc,
};

use crate::{
    config::LockOptions,
    error::{LockError, Result},
    guard::LockGuard,
    released::Released,
    service::Service,
};

type Held = HashMap<(u64, Box<str>), Weak<LockGuard>>;

thread_local! {
    /// What this thread holds, by manager and name.
    static HELD: RefCell<Held> = RefCell::default();
}

/// A lock that is held by this thread, which can take it again without a round trip. The last guard to go releases it.
///
/// It stays on its thread, since only that thread may enter again. Everything of [`LockGuard`] can be asked of it.
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
#[must_use = "if unused, the lock is released at once"]
#[derive(Debug)]
pub struct ReentrantGuard {
    guard: Rc<LockGuard>,
    service: u64,
}

impl ReentrantGuard {
    /// Enters again if this thread holds the lock, else takes it.
    pub(crate) fn enter(service: &Arc<Service>, name: &str, options: &LockOptions) -> Result<ReentrantGuard> {
        let core = service.core()?;
        let key = (service.number(), Box::from(name));
        let held = HELD.try_with(|held| held.borrow().get(&key).and_then(Weak::upgrade));
        // It may hold this lock, and would wait for itself.
        let held = held.map_err(|_| LockError::InvalidOptions {
            reason: "this thread is ending, and does not know any more what it holds; take an ordinary lock".into(),
        })?;
        if let Some(guard) = held {
            guard.ensure_held()?;
            return Ok(ReentrantGuard { guard, service: key.0 });
        }
        let guard = Rc::new(LockGuard::new(core.take(name, options)?, service.clone()));
        let number = key.0;
        // The table was there before, and does not go while its thread is in here.
        let _ = HELD.try_with(|held| held.borrow_mut().insert(key, Rc::downgrade(&guard)));
        Ok(ReentrantGuard { guard, service: number })
    }

    /// How many guards of this thread hold the lock.
    pub fn hold_count(&self) -> usize {
        Rc::strong_count(&self.guard)
    }

    /// Lets go of this hold. The last one releases the lock and says how that went; the others return `None`.
    ///
    /// # Errors
    ///
    /// As [`LockGuard::release`], and [`LockError::Lost`] when the lock was lost under a hold that is not the last.
    pub fn release(mut self) -> Result<Option<Released>> {
        if Rc::strong_count(&self.guard) > 1 {
            return self.guard.ensure_held().map(|()| None);
        }
        self.forget();
        match Rc::get_mut(&mut self.guard) {
            Some(guard) => guard.release_in_place().map(Some),
            None => Err(LockError::Shutdown),
        }
    }

    fn forget(&self) {
        let key = (self.service, Box::from(self.guard.name()));
        // While the thread ends, its table may be gone already, and needs no tidying then.
        let _ = HELD.try_with(|held| {
            let mut held = held.borrow_mut();
            // A handler that is told of the release may have taken the lock again.
            if held.get(&key).is_some_and(|guard| ptr::eq(guard.as_ptr(), Rc::as_ptr(&self.guard))) {
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

impl Drop for ReentrantGuard {
    fn drop(&mut self) {
        if Rc::strong_count(&self.guard) == 1 {
            self.forget();
        }
    }
}
