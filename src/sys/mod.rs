//! The machine: time, threads, forks, mutexes, logging and text. The only place that reads a clock,
//! waits, or starts a thread.

#[macro_use]
pub(crate) mod logging;

pub(crate) mod clock;
pub(crate) mod display;
pub(crate) mod fork;
#[cfg(feature = "testing")]
pub(crate) mod manual_clock;
pub(crate) mod outbox;
#[cfg(feature = "testing")]
pub mod sim;
pub(crate) mod sleeper;
pub(crate) mod slot;
pub(crate) mod sync;
pub(crate) mod threads;
pub(crate) mod user_code;
