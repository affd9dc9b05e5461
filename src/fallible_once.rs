//! `FallibleOnce`: a value that is created once per process. No mutex is held while the value is
//! created, because creating it may use the network, and may call user code that asks for the
//! value.

use std::{
    sync::OnceLock,
    thread::{self, ThreadId},
};

use parking_lot::{Condvar, Mutex};

use crate::error::{LockError, Result};

pub(crate) struct FallibleOnce<T> {
    value: OnceLock<T>,
    initializers: Mutex<Initializers>,
    one_finished: Condvar,
}

struct Initializers {
    /// Threads that are creating the value. The first one to succeed sets it.
    running: Vec<ThreadId>,
    /// Number of initializers that have finished.
    finished: u64,
}

impl<T> FallibleOnce<T> {
    pub(crate) const fn new() -> FallibleOnce<T> {
        FallibleOnce {
            value: OnceLock::new(),
            initializers: Mutex::new(Initializers { running: Vec::new(), finished: 0 }),
            one_finished: Condvar::new(),
        }
    }

    /// Returns the value, or waits for another thread that is creating it, or creates it. If the
    /// other thread fails, all waiting threads try at the same time.
    pub(crate) fn get_or_try_init(&self, init: impl FnOnce() -> Result<T>) -> Result<&T> {
        if let Some(value) = self.value.get() {
            return Ok(value);
        }
        let _initializing = self.begin(true)?;
        if self.value.get().is_none() {
            // A thread in `try_init`, which does not wait, may have been faster.
            drop(self.value.set(init()?));
        }
        self.value.get().ok_or(LockError::InitInProgress)
    }

    /// Creates the value, unless another thread sets it first. Does not wait for other threads,
    /// which may take just as long to fail.
    pub(crate) fn try_init(&self, init: impl FnOnce() -> Result<T>) -> Result<&T> {
        let _initializing = self.begin(false)?;
        if self.value.get().is_none() && self.value.set(init()?).is_ok() {
            return self.value.get().ok_or(LockError::InitInProgress);
        }
        Err(LockError::AlreadyInitialized)
    }

    fn begin(&self, wait: bool) -> Result<Initializing<'_, T>> {
        let thread_id = thread::current().id();
        let mut initializers = self.initializers.lock();
        if initializers.running.contains(&thread_id) {
            // A recursive call would wait for itself.
            return Err(LockError::InitInProgress);
        }
        let ended = initializers.finished;
        while wait
            && !initializers.running.is_empty()
            && initializers.finished == ended
            && self.value.get().is_none()
        {
            self.one_finished.wait(&mut initializers);
        }
        initializers.running.push(thread_id);
        Ok(Initializing { once: self, thread_id })
    }
}

/// Marks a thread as creating the value, until this is dropped.
struct Initializing<'a, T> {
    once: &'a FallibleOnce<T>,
    thread_id: ThreadId,
}

impl<T> Drop for Initializing<'_, T> {
    fn drop(&mut self) {
        let mut initializers = self.once.initializers.lock();
        initializers.running.retain(|running| *running != self.thread_id);
        initializers.finished += 1;
        drop(initializers);
        self.once.one_finished.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::{
        panic::{AssertUnwindSafe, catch_unwind},
        sync::{Barrier, mpsc},
        time::Duration,
    };

    use crossbeam_channel::bounded;

    use super::*;

    #[test]
    fn initialized_once_after_failed_tries() {
        let one = FallibleOnce::new();
        assert!(matches!(one.try_init(|| Err(LockError::Shutdown)), Err(LockError::Shutdown)));
        assert!(matches!(
            one.get_or_try_init(|| Err(LockError::Shutdown)),
            Err(LockError::Shutdown)
        ));
        assert_eq!(*one.try_init(|| Ok(1)).unwrap(), 1);
        assert!(matches!(one.try_init(|| Ok(2)), Err(LockError::AlreadyInitialized)));
        assert_eq!(*one.get_or_try_init(|| Ok(3)).unwrap(), 1);
    }

    /// Fault: N53
    #[test]
    fn recursive_initialization_is_an_error() {
        let one = FallibleOnce::new();
        let asked = || (one.get_or_try_init(|| Ok(2)).err(), one.try_init(|| Ok(3)).err());
        let made = one.get_or_try_init(|| {
            assert!(matches!(
                asked(),
                (Some(LockError::InitInProgress), Some(LockError::InitInProgress))
            ));
            Ok(1)
        });
        assert_eq!(*made.unwrap(), 1);
        assert!(matches!(asked(), (None, Some(LockError::AlreadyInitialized))));
    }

    #[test]
    fn panic_in_initializer_allows_another_try() {
        let one = FallibleOnce::new();
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            one.try_init(|| panic!("in the initializer")).map(drop)
        }));
        assert!(panicked.is_err());
        assert_eq!(*one.get_or_try_init(|| Ok(1)).unwrap(), 1);
    }

    /// All threads are creating the value when the first one finishes, and only one sets it.
    #[test]
    fn try_init_does_not_wait_for_others() {
        let (one, all_in) = (FallibleOnce::new(), Barrier::new(4));
        let make = |number| {
            one.try_init(|| {
                all_in.wait();
                Ok(number)
            })
        };
        let made: Vec<_> = thread::scope(|threads| {
            let all: Vec<_> =
                (0..4).map(|number| threads.spawn(move || make(number).is_ok())).collect();
            all.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(made.iter().filter(|made| **made).count(), 1, "{made:?}");
    }

    /// Threads that waited for a failed initializer do not wait for each other, because each may
    /// take long to fail.
    #[test]
    fn waiters_try_concurrently_after_a_failure() {
        let one = FallibleOnce::<u8>::new();
        let (started, all_started) = bounded(3);
        let fails = |meanwhile: &dyn Fn()| {
            one.get_or_try_init(|| {
                meanwhile();
                Err(LockError::Shutdown)
            })
        };
        thread::scope(|threads| {
            let (all_in, go) = bounded::<()>(0);
            let try_for_long = move || {
                started.send(()).unwrap();
                let _ = go.recv();
            };
            fails(&|| {
                for _ in 0..3 {
                    let try_for_long = try_for_long.clone();
                    threads.spawn(move || fails(&try_for_long).unwrap_err());
                }
                // `notify_all` returns the number of waiting threads: loop until all of them wait.
                while one.one_finished.notify_all() < 3 {
                    thread::yield_now();
                }
            })
            .unwrap_err();
            for _ in 0..3 {
                assert!(
                    all_started.recv_timeout(Duration::from_secs(60)).is_ok(),
                    "the threads wait for each other"
                );
            }
            drop(all_in);
        });
    }

    /// `get_or_try_init` returns what another thread is creating.
    #[test]
    fn get_waits_for_a_running_initializer() {
        let one = FallibleOnce::new();
        let (started, has_started) = mpsc::channel();
        thread::scope(|threads| {
            let made = one.try_init(|| {
                threads.spawn(|| {
                    started.send(()).unwrap();
                    *one.get_or_try_init(|| Ok(2)).unwrap()
                });
                has_started.recv().unwrap();
                Ok(1)
            });
            assert_eq!(*made.unwrap(), 1);
        });
        assert_eq!(*one.get_or_try_init(|| Ok(3)).unwrap(), 1);
    }
}
