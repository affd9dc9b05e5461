//! `CancelToken`: ends waits for locks from another thread.

use std::{collections::BTreeMap, fmt, sync::Arc};

use crate::sys::{clock::TimeSource, sync::Mutex};

/// Ends waits for locks: any thread may call [`cancel`](Self::cancel), and all calls whose options
/// have the token return [`LockError::Cancelled`](crate::LockError::Cancelled). Clones are the same
/// token. A token stays cancelled.
///
/// ```
/// # #[cfg(feature = "testing")] {
/// use distlock::{CancelToken, LockOptions};
/// # let mgr = distlock::testing::MemoryServer::new().manager();
///
/// let stop = CancelToken::new();
/// let held = mgr.lock("orders:42")?;
/// let options = LockOptions::new().cancel(&stop);
/// std::thread::scope(|scope| {
///     let waiter = scope.spawn(|| mgr.lock_with("orders:42", &options));
///     stop.cancel();
///     assert!(waiter.join().unwrap().unwrap_err().is_cancelled());
/// });
/// assert!(held.is_held());
/// # }
/// # Ok::<(), distlock::LockError>(())
/// ```
#[derive(Clone, Default)]
pub struct CancelToken(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    is_cancelled: bool,
    last_number: u64,
    /// With the clock by which the thread waits that registered the waker.
    wakers: BTreeMap<u64, (TimeSource, Waker)>,
}

type Waker = Arc<dyn Fn() + Send + Sync>;

/// Has a waker called if the token is cancelled. Dropping this ends that.
pub(crate) struct CancelRegistration {
    token: CancelToken,
    number: u64,
}

impl CancelToken {
    /// Creates a token that is not cancelled.
    pub fn new() -> CancelToken {
        CancelToken::default()
    }

    /// Ends all waits with this token, now and later. Does not wait for them. Do not call it in a
    /// signal handler, where it could wait forever for a mutex that the interrupted thread has
    /// locked; call it on a thread that waits for signals.
    ///
    /// A thread that waits for its turn returns at once. One that is exchanging a request with the
    /// server returns after that: at most one
    /// [operation timeout](crate::Config::operation_timeout) later. A lock that was granted
    /// meanwhile is returned. What a cancelled call may have left on the server is cleaned up in
    /// the background. Locks that are held already are not affected.
    pub fn cancel(&self) {
        let wakers = {
            let mut state = self.0.lock();
            state.is_cancelled = true;
            std::mem::take(&mut state.wakers)
        };
        for (time, wake) in wakers.into_values() {
            let _time = time.enter();
            wake();
        }
    }

    /// Returns whether the token has been cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.0.lock().is_cancelled
    }

    /// Has `wake` called once if the token is cancelled; at once if it has been.
    pub(crate) fn on_cancel(&self, wake: Waker) -> CancelRegistration {
        let mut state = self.0.lock();
        state.last_number += 1;
        let number = state.last_number;
        let is_cancelled = state.is_cancelled;
        if !is_cancelled {
            state.wakers.insert(number, (TimeSource::current(), wake.clone()));
        }
        drop(state);
        if is_cancelled {
            wake();
        }
        CancelRegistration { token: self.clone(), number }
    }
}

impl Drop for CancelRegistration {
    fn drop(&mut self) {
        let waker = self.token.0.lock().wakers.remove(&self.number);
        drop(waker);
    }
}

impl fmt::Debug for CancelToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CancelToken").field("is_cancelled", &self.is_cancelled()).finish()
    }
}

impl fmt::Debug for CancelRegistration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CancelRegistration").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn each_registered_waker_is_called_once() {
        let token = CancelToken::new();
        let calls = Arc::new(AtomicU32::new(0));
        let wake = || -> Waker {
            let calls = calls.clone();
            Arc::new(move || {
                calls.fetch_add(1, Ordering::SeqCst);
            })
        };
        let (gone, _stays) = (token.on_cancel(wake()), token.clone().on_cancel(wake()));
        drop(gone);
        assert!(!token.is_cancelled());
        token.cancel();
        token.cancel();
        assert!(token.clone().is_cancelled());
        assert_eq!(calls.load(Ordering::SeqCst), 1);
        let _late = token.on_cancel(wake());
        assert_eq!(calls.load(Ordering::SeqCst), 2, "at once");
    }
}
