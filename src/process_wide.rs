//! `ProcessWide`: a value that a process has once. It is made with no lock held, since making it may take its time over
//! the network, and calls code of users' that may ask for it.

use std::{
    sync::OnceLock,
    thread::{self, ThreadId},
};

use parking_lot::{Condvar, Mutex};

use crate::error::{LockError, Result};

pub(crate) struct ProcessWide<T> {
    made: OnceLock<T>,
    makers: Mutex<Makers>,
    one_less: Condvar,
}

struct Makers {
    /// Who is making it just now. Of several the first to be done has made it.
    now: Vec<ThreadId>,
    /// How many have been at it before.
    ended: u64,
}

impl<T> ProcessWide<T> {
    pub(crate) const fn new() -> ProcessWide<T> {
        ProcessWide {
            made: OnceLock::new(),
            makers: Mutex::new(Makers { now: Vec::new(), ended: 0 }),
            one_less: Condvar::new(),
        }
    }

    /// What there is, or what another is making; else makes it. If that one fails, all who waited for it try at once.
    pub(crate) fn get_or_make(&self, make: impl FnOnce() -> Result<T>) -> Result<&T> {
        if let Some(made) = self.made.get() {
            return Ok(made);
        }
        let _making = self.begin(true)?;
        if self.made.get().is_none() {
            // Somebody who did not wait may have been faster.
            drop(self.made.set(make()?));
        }
        self.made.get().ok_or(LockError::BeingMade)
    }

    /// Makes it, if nobody else does before this is done. Waits for nobody: others may need as long to fail.
    pub(crate) fn make(&self, make: impl FnOnce() -> Result<T>) -> Result<&T> {
        let _making = self.begin(false)?;
        if self.made.get().is_none() && self.made.set(make()?).is_ok() {
            return self.made.get().ok_or(LockError::BeingMade);
        }
        Err(LockError::AlreadyInitialized)
    }

    fn begin(&self, alone: bool) -> Result<Making<'_, T>> {
        let me = thread::current().id();
        let mut makers = self.makers.lock();
        if makers.now.contains(&me) {
            // It was asked for from inside, and would wait for itself.
            return Err(LockError::BeingMade);
        }
        let ended = makers.ended;
        while alone && !makers.now.is_empty() && makers.ended == ended && self.made.get().is_none() {
            self.one_less.wait(&mut makers);
        }
        makers.now.push(me);
        Ok(Making { of: self, me })
    }
}

/// Somebody is making it, until this is dropped.
struct Making<'a, T> {
    of: &'a ProcessWide<T>,
    me: ThreadId,
}

impl<T> Drop for Making<'_, T> {
    fn drop(&mut self) {
        let mut makers = self.of.makers.lock();
        makers.now.retain(|maker| *maker != self.me);
        makers.ended += 1;
        drop(makers);
        self.of.one_less.notify_all();
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
    fn it_is_made_once_and_a_failure_can_be_mended() {
        let one = ProcessWide::new();
        assert!(matches!(one.make(|| Err(LockError::Shutdown)), Err(LockError::Shutdown)));
        assert!(matches!(one.get_or_make(|| Err(LockError::Shutdown)), Err(LockError::Shutdown)));
        assert_eq!(*one.make(|| Ok(1)).unwrap(), 1);
        assert!(matches!(one.make(|| Ok(2)), Err(LockError::AlreadyInitialized)));
        assert_eq!(*one.get_or_make(|| Ok(3)).unwrap(), 1);
    }

    #[test]
    fn who_makes_it_and_asks_for_it_is_told_so() {
        let one = ProcessWide::new();
        let asked = || (one.get_or_make(|| Ok(2)).err(), one.make(|| Ok(3)).err());
        let made = one.get_or_make(|| {
            assert!(matches!(asked(), (Some(LockError::BeingMade), Some(LockError::BeingMade))));
            Ok(1)
        });
        assert_eq!(*made.unwrap(), 1);
        assert!(matches!(asked(), (None, Some(LockError::AlreadyInitialized))));
    }

    #[test]
    fn a_panic_leaves_room_for_the_next() {
        let one = ProcessWide::new();
        let panicked = catch_unwind(AssertUnwindSafe(|| one.make(|| panic!("while it is made")).map(drop)));
        assert!(panicked.is_err());
        assert_eq!(*one.get_or_make(|| Ok(1)).unwrap(), 1);
    }

    /// All of them are making it when the first is done, and only one has made it.
    #[test]
    fn who_makes_it_waits_for_nobody() {
        let (one, all_in) = (ProcessWide::new(), Barrier::new(4));
        let make = |number| {
            one.make(|| {
                all_in.wait();
                Ok(number)
            })
        };
        let made: Vec<_> = thread::scope(|threads| {
            let all: Vec<_> = (0..4).map(|number| threads.spawn(move || make(number).is_ok())).collect();
            all.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(made.iter().filter(|made| **made).count(), 1, "{made:?}");
    }

    /// Those who wait for one who fails do not wait for each other: each may take its time to fail.
    #[test]
    fn who_waited_for_a_failure_waits_once() {
        let one = ProcessWide::<u8>::new();
        let (tell, told) = bounded(3);
        let fails = |meanwhile: &dyn Fn()| {
            one.get_or_make(|| {
                meanwhile();
                Err(LockError::Shutdown)
            })
        };
        thread::scope(|threads| {
            let (all_in, go) = bounded::<()>(0);
            let try_for_long = move || {
                tell.send(()).unwrap();
                let _ = go.recv();
            };
            fails(&|| {
                for _ in 0..3 {
                    let try_for_long = try_for_long.clone();
                    threads.spawn(move || fails(&try_for_long).unwrap_err());
                }
                // Until all of them wait, of whom this counts those it wakes.
                while one.one_less.notify_all() < 3 {
                    thread::yield_now();
                }
            })
            .unwrap_err();
            for _ in 0..3 {
                assert!(told.recv_timeout(Duration::from_secs(60)).is_ok(), "they wait for each other");
            }
            drop(all_in);
        });
    }

    /// Who only asks for it gets what another is about to make.
    #[test]
    fn who_asks_for_it_waits_for_those_who_make_it() {
        let one = ProcessWide::new();
        let (tell, told) = mpsc::channel();
        thread::scope(|threads| {
            let made = one.make(|| {
                threads.spawn(|| {
                    tell.send(()).unwrap();
                    *one.get_or_make(|| Ok(2)).unwrap()
                });
                told.recv().unwrap();
                Ok(1)
            });
            assert_eq!(*made.unwrap(), 1);
        });
        assert_eq!(*one.get_or_make(|| Ok(3)).unwrap(), 1);
    }
}
