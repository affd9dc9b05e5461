//! Work under a lock, whose loss is an error.

use crate::{
    core::lock_lost::LockLost,
    error::{LockError, Result},
    guard::LockGuard,
    lock_info::Released,
};

/// Runs `work` and releases the lock. Returns the result of the work only if the lock was held
/// until the work had ended.
pub(crate) fn run_and_release<T>(
    guard: LockGuard,
    work: impl FnOnce(&LockGuard) -> T,
) -> Result<T> {
    let name = guard.name().to_owned();
    let result = work(&guard);
    let held = guard.ensure_held();
    let released = guard.release();
    match (held, released) {
        (Err(error), _) => Err(error),
        // The server had lost the lock during the work.
        (_, Ok(Released::Gone)) => Err(LockError::Lost { name, why: LockLost::Gone }),
        (_, Ok(Released::OwnedByOther(by))) => {
            Err(LockError::Lost { name, why: LockLost::Taken { by: Box::new(by) } })
        }
        // A release without a reply is tried again in the background.
        (_, Ok(Released::Released) | Err(_)) => Ok(result),
    }
}
