//! Code that the examples share: a server to use, cleaning up when an example ends, and time.
#![allow(dead_code, reason = "each example uses a part of it")]

mod cleanup;
pub(crate) mod http;
mod server;

use std::{error::Error, process::ExitCode, time::Duration};

pub(crate) use cleanup::Cleanup;
pub(crate) use server::Server;

pub(crate) type Result<T = ()> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// The exit code of an example. Prints the error if the example failed.
pub(crate) fn exit_code(outcome: Result) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Fails the example if a claim that it makes is wrong.
pub(crate) fn ensure(holds: bool, claim: &str) -> Result {
    if holds { Ok(()) } else { Err(format!("this claim is wrong: {claim}").into()) }
}

/// Sleeps. In the examples, this stands for real work.
pub(crate) fn sleep(time: Duration) {
    let _ = crossbeam_channel::never::<()>().recv_timeout(time);
}

/// Nanoseconds since the machine started: the same clock in all its processes.
///
/// On Linux and Android this clock also counts the time in which the machine is suspended, as the
/// clock of the locks does.
pub(crate) fn now() -> u64 {
    use rustix::time::{ClockId, clock_gettime};
    #[cfg(any(target_os = "linux", target_os = "android"))]
    const CLOCK: ClockId = ClockId::Boottime;
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    const CLOCK: ClockId = ClockId::Monotonic;
    let time = clock_gettime(CLOCK);
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000_000
        + u64::try_from(time.tv_nsec).unwrap_or(0)
}

/// A duration in nanoseconds, for arithmetic with [`now`].
pub(crate) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
