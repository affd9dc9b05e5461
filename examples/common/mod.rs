//! What the examples share: a server to talk to, processes that do not outlive their example, and pauses.
#![allow(dead_code, reason = "each example uses a part of it")]

mod server;
mod watchdog;

use std::{error::Error, process::ExitCode, time::Duration};

pub(crate) use server::Server;
pub(crate) use watchdog::Watchdog;

pub(crate) type Outcome<T = ()> = Result<T, Box<dyn Error + Send + Sync>>;

/// Ends an example: what it shows holds, or a sentence says why not.
pub(crate) fn conclude(outcome: Outcome) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Fails an example whose claim turned out to be wrong.
pub(crate) fn ensure(holds: bool, claim: &str) -> Outcome {
    if holds { Ok(()) } else { Err(format!("this should hold and does not: {claim}").into()) }
}

/// Stands for real work.
pub(crate) fn work_for(span: Duration) {
    let _ = crossbeam_channel::never::<()>().recv_timeout(span);
}

/// Nanoseconds since the machine started, the same for all of its processes.
///
/// Where the system has one, this clock goes on while the machine is suspended, like the one of the locks.
pub(crate) fn now() -> u64 {
    use rustix::time::{ClockId, clock_gettime};
    #[cfg(any(target_os = "linux", target_os = "android"))]
    const CLOCK: ClockId = ClockId::Boottime;
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    const CLOCK: ClockId = ClockId::Monotonic;
    let time = clock_gettime(CLOCK);
    u64::try_from(time.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}

/// Nanoseconds of a span, for arithmetic with [`now`].
pub(crate) fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}
