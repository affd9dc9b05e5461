//! The one place where threads are made.

use std::{io, thread};

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

impl Thread {
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
