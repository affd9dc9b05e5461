//! Who calls code of the user (loggers, metrics recorders, event handlers): each thread itself, or,
//! for a thread that others depend on, an [outbox](crate::sys::outbox).

use std::{cell::RefCell, sync::Arc};

#[cfg(feature = "testing")]
use crate::sys::sim;

pub(crate) type Call = Box<dyn FnOnce() + Send>;

/// Makes calls on another thread, later.
pub(crate) trait TakeCalls: Send + Sync {
    fn take(&self, call: Call);
}

thread_local! {
    /// Who makes the calls of this thread. `None` if it makes them itself.
    static CALLER: RefCell<Option<Arc<dyn TakeCalls>>> = const { RefCell::new(None) };
}

/// Returns who makes the calls of the current thread; `None` if it makes them itself, as a
/// thread does whose thread-local values are being destroyed.
pub(crate) fn caller() -> Option<Arc<dyn TakeCalls>> {
    CALLER.try_with(|caller| caller.borrow().clone()).ok().flatten()
}

/// Runs `action`. Its calls, and those of the threads that it starts, are left to `caller`.
pub(crate) fn leave_to<T>(caller: Arc<dyn TakeCalls>, action: impl FnOnce() -> T) -> T {
    // Simulated threads share a real one.
    #[cfg(feature = "testing")]
    if sim::world().is_some() {
        return action();
    }
    let _restore = Restore(replace(Some(caller)));
    action()
}

fn replace(caller: Option<Arc<dyn TakeCalls>>) -> Option<Arc<dyn TakeCalls>> {
    CALLER.try_with(|current| current.replace(caller)).ok().flatten()
}

struct Restore(Option<Arc<dyn TakeCalls>>);

impl Drop for Restore {
    fn drop(&mut self) {
        drop(replace(self.0.take()));
    }
}
