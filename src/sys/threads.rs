//! The only module that starts threads. The connection pool, r2d2, has one of its own.

#[cfg(feature = "testing")]
use std::sync::Arc;
use std::{
    io,
    thread::{self, ThreadId},
};

use nix::sys::signal::{SigSet, SigmaskHow, Signal};

use crate::sys::user_code;
#[cfg(feature = "testing")]
use crate::sys::{manual_clock, sim};

/// A thread that can be joined.
#[derive(Debug)]
pub(crate) enum Thread {
    Real(thread::JoinHandle<()>),
    /// Uses a clock that stands until it is advanced.
    #[cfg(feature = "testing")]
    Manual(thread::JoinHandle<()>, Arc<manual_clock::ThreadEnd>),
    #[cfg(feature = "testing")]
    Simulated(u64),
}

/// Starts a thread. If the calls of user code by the current thread are left to another one, so are
/// those of the new thread.
pub(crate) fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<Thread> {
    #[cfg(feature = "testing")]
    if let Some(world) = sim::world() {
        return world.spawn(name, Box::new(run)).map(Thread::Simulated);
    }
    let caller = user_code::caller();
    let run = move || match caller {
        Some(caller) => user_code::leave_to(caller, run),
        None => run(),
    };
    #[cfg(feature = "testing")]
    if let Some(clock) = manual_clock::current() {
        clock.begin_thread();
        let end = manual_clock::ThreadEnd::new(&clock);
        let (entered, reported) = (clock.clone(), end.clone());
        let run = move || {
            let _entered = manual_clock::enter_begun(Some(entered));
            // The threads of this library catch panics.
            run();
            reported.report();
        };
        let thread = spawn_real(name, run).inspect_err(|_| clock.cancel_thread())?;
        return Ok(Thread::Manual(thread, end));
    }
    spawn_real(name, run).map(Thread::Real)
}

fn spawn_real(
    name: &str,
    run: impl FnOnce() + Send + 'static,
) -> io::Result<thread::JoinHandle<()>> {
    with_signals_blocked(|| thread::Builder::new().name(name.into()).spawn(run))
}

/// Runs `action` with signals blocked, so that threads started by it do not receive any. A program
/// may block a signal in order to wait for it, and would be killed if one of our threads received
/// it. Signals that a fault in the thread itself raises, such as SIGSEGV, are not blocked.
pub(crate) fn with_signals_blocked<T>(action: impl FnOnce() -> T) -> T {
    let mut signals = SigSet::all();
    let faults = [
        Signal::SIGSEGV,
        Signal::SIGBUS,
        Signal::SIGFPE,
        Signal::SIGILL,
        Signal::SIGTRAP,
        Signal::SIGSYS,
    ];
    faults.into_iter().for_each(|signal| signals.remove(signal));
    // Block signals here, before the thread starts: a thread that blocks them itself could receive
    // one first.
    let before = signals.thread_swap_mask(SigmaskHow::SIG_BLOCK);
    let result = action();
    if let Ok(before) = before {
        let _ = before.thread_set_mask();
    }
    result
}

impl Thread {
    /// `None` for a simulated thread, which calls no user code.
    pub(crate) fn id(&self) -> Option<ThreadId> {
        match self {
            Thread::Real(thread) => Some(thread.thread().id()),
            #[cfg(feature = "testing")]
            Thread::Manual(thread, _) => Some(thread.thread().id()),
            #[cfg(feature = "testing")]
            Thread::Simulated(_) => None,
        }
    }

    /// Waits for the thread to end. The result is ignored, because our threads catch panics.
    pub(crate) fn join(self) {
        match self {
            Thread::Real(thread) => drop(thread.join()),
            #[cfg(feature = "testing")]
            Thread::Manual(thread, end) => {
                end.wait();
                drop(thread.join());
            }
            #[cfg(feature = "testing")]
            Thread::Simulated(thread) => {
                if let Some(world) = sim::world() {
                    world.join(thread);
                }
            }
        }
    }
}
