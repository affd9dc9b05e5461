//! The one place where threads are made.

use std::{
    io,
    thread::{self, ThreadId},
};

use nix::sys::signal::{SigSet, SigmaskHow, Signal};

#[cfg(feature = "testing")]
use crate::sim;

/// A thread that somebody may wait for.
#[derive(Debug)]
pub(crate) enum Thread {
    Real(thread::JoinHandle<()>),
    #[cfg(feature = "testing")]
    Simulated(u64),
}

pub(crate) fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<Thread> {
    #[cfg(feature = "testing")]
    if let Some(world) = sim::world() {
        return world.spawn(name, Box::new(run)).map(Thread::Simulated);
    }
    with_signals_blocked(|| thread::Builder::new().name(name.into()).spawn(run).map(Thread::Real))
}

/// Threads that are made meanwhile get no signals: a program that blocks some, to wait for them,
/// would be ended by one that is delivered to ours. Not those that a thread brings upon itself.
pub(crate) fn with_signals_blocked<T>(action: impl FnOnce() -> T) -> T {
    let mut signals = SigSet::all();
    let own = [
        Signal::SIGSEGV,
        Signal::SIGBUS,
        Signal::SIGFPE,
        Signal::SIGILL,
        Signal::SIGTRAP,
        Signal::SIGSYS,
    ];
    own.into_iter().for_each(|signal| signals.remove(signal));
    // They are blocked here, since a thread that blocked them itself would come too late for some.
    let before = signals.thread_swap_mask(SigmaskHow::SIG_BLOCK);
    let made = action();
    if let Ok(before) = before {
        let _ = before.thread_set_mask();
    }
    made
}

/// The caller's thread. None that can be told from others in a simulated world, which runs no code
/// of users' inside of ours.
pub(crate) fn current() -> Option<ThreadId> {
    #[cfg(feature = "testing")]
    if sim::world().is_some() {
        return None;
    }
    Some(thread::current().id())
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
                if let Some(world) = sim::world() {
                    world.join(thread);
                }
            }
        }
    }
}
