//! Locks and atomics. With `--cfg loom`, those of the model checker loom, which tries every
//! interleaving. Under Miri, the locks of the standard library, because Miri rejects how
//! `parking_lot` calls the system.

#[cfg(not(all(test, any(loom, miri))))]
pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard};
#[cfg(not(all(test, loom)))]
pub(crate) use std::sync::atomic;

#[cfg(all(test, any(loom, miri)))]
pub(crate) use self::checked::{Condvar, Mutex, MutexGuard};
#[cfg(all(test, loom))]
pub(crate) use loom::sync::atomic;

/// Locks of loom or of the standard library with the interface of `parking_lot`.
#[cfg(all(test, any(loom, miri)))]
mod checked {
    use std::{
        ops::{Deref, DerefMut},
        time::Duration,
    };

    #[cfg(loom)]
    use loom::sync;
    #[cfg(miri)]
    use std::sync;

    #[derive(Debug)]
    pub(crate) struct Mutex<T>(sync::Mutex<T>);

    /// Empty only while the thread waits on a condvar.
    #[derive(Debug)]
    pub(crate) struct MutexGuard<'a, T>(Option<sync::MutexGuard<'a, T>>);

    #[derive(Debug, Default)]
    pub(crate) struct Condvar(sync::Condvar);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Mutex<T> {
            Mutex(sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            MutexGuard(self.0.lock().ok())
        }
    }

    impl<T: Default> Default for Mutex<T> {
        fn default() -> Mutex<T> {
            Mutex::new(T::default())
        }
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;

        fn deref(&self) -> &T {
            self.0.as_ref().unwrap()
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.0.as_mut().unwrap()
        }
    }

    impl Condvar {
        pub(crate) fn new() -> Condvar {
            Condvar(sync::Condvar::new())
        }

        pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
            guard.0 = guard.0.take().and_then(|guard| self.0.wait(guard).ok());
        }

        #[cfg(miri)]
        pub(crate) fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, timeout: Duration) {
            guard.0 = guard
                .0
                .take()
                .and_then(|guard| self.0.wait_timeout(guard, timeout).ok().map(|(guard, _)| guard));
        }

        /// Ignores the timeout. Time does not pass in loom, so a thread that is not woken sleeps
        /// for ever, and loom reports a deadlock.
        #[cfg(loom)]
        pub(crate) fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, _: Duration) {
            self.wait(guard);
        }

        pub(crate) fn notify_one(&self) {
            self.0.notify_one();
        }

        pub(crate) fn notify_all(&self) {
            self.0.notify_all();
        }
    }
}
