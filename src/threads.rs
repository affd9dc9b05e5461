//! The one place where threads are made.

use std::{
    io,
    thread::{self, ThreadId},
};

#[cfg(feature = "testing")]
use crate::testing;

/// A thread that somebody may wait for.
#[derive(Debug)]
pub(crate) enum Thread {
    Real(thread::JoinHandle<()>),
    #[cfg(feature = "testing")]
    Simulated(u64),
}

pub(crate) fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<Thread> {
    #[cfg(feature = "testing")]
    if let Some(world) = testing::world() {
        return world.spawn(name, Box::new(run)).map(Thread::Simulated);
    }
    thread::Builder::new().name(name.into()).spawn(run).map(Thread::Real)
}

/// Whether the caller is on this thread.
pub(crate) fn is_current(id: Option<ThreadId>) -> bool {
    id.is_some_and(|id| thread::current().id() == id)
}

impl Thread {
    /// Tells it from others, by `is_current`. A simulated one runs no code of users'.
    pub(crate) fn id(&self) -> Option<ThreadId> {
        match self {
            Thread::Real(thread) => Some(thread.thread().id()),
            #[cfg(feature = "testing")]
            Thread::Simulated(_) => None,
        }
    }

    /// Waits for its end. Threads of ours catch their panics; there is nothing to hear from them.
    pub(crate) fn join(self) {
        match self {
            Thread::Real(thread) => drop(thread.join()),
            #[cfg(feature = "testing")]
            Thread::Simulated(thread) => {
                if let Some(world) = testing::world() {
                    world.join(thread);
                }
            }
        }
    }
}
