//! The only place of the command where clocks are read.

use std::time::{Duration, Instant, SystemTime};

/// Timers stand still while the machine sleeps, and some while a process is stopped.
const TIMER_MAX: Duration = Duration::from_secs(1);

/// Now. What is timed here is shown to people or bounds a wait; no belief in a lock rests on it.
#[expect(clippy::disallowed_methods, reason = "the one place")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// The wall clock, to be compared with that of a server.
pub(crate) fn wall() -> SystemTime {
    SystemTime::now()
}

/// Between two looks at something that nobody tells of.
pub(crate) fn pause(span: Duration) {
    let _ = crossbeam_channel::never::<()>().recv_timeout(span);
}

/// For how long to wait before the next look at the time, for something that comes at a time since boot.
pub(crate) fn timer(until: Duration, now: Duration) -> Duration {
    until.saturating_sub(now).min(TIMER_MAX)
}

/// Time since the machine was started, the same for all its processes, and going on while it sleeps where the system has
/// such a clock.
pub(crate) fn since_boot() -> Duration {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    const CLOCK: rustix::time::ClockId = rustix::time::ClockId::Boottime;
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    const CLOCK: rustix::time::ClockId = rustix::time::ClockId::Monotonic;
    let time = rustix::time::clock_gettime(CLOCK);
    // That clock is never negative.
    Duration::new(time.tv_sec.try_into().unwrap_or(0), time.tv_nsec.try_into().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_while_the_machine_sleeps_is_seen_soon_after() {
        let at = Duration::from_secs;
        assert_eq!(timer(Duration::MAX, at(1000)), at(1), "whatever the clock says by then");
        assert_eq!(timer(at(1000) + at(1) / 2, at(1000)), at(1) / 2);
        assert_eq!(timer(at(999), at(1000)), Duration::ZERO);
    }
}
