//! The only place in the command where clocks are read.

use std::time::{Duration, Instant, SystemTime};

/// Maximum time between two looks at the clock. Timers stop while the machine is suspended, and
/// some while the process is stopped, so a longer wait could end too late.
const SUSPEND_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The current time, for display and for bounding waits. The validity of a lock never depends on
/// it.
#[expect(clippy::disallowed_methods, reason = "the one place that reads this clock")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// The wall clock, for comparison with a server's.
pub(crate) fn wall_clock() -> SystemTime {
    SystemTime::now()
}

/// Waits for `span`, for loops that poll.
pub(crate) fn sleep(span: Duration) {
    let _ = crossbeam_channel::never::<()>().recv_timeout(span);
}

/// How long to wait, at `now`, for something that is due at `until`, before looking at the clock
/// again.
pub(crate) fn time_to_next_check(until: Duration, now: Duration) -> Duration {
    until.saturating_sub(now).min(SUSPEND_CHECK_INTERVAL)
}

/// Time since boot, the same for all processes of the machine. Where the system has such a clock,
/// it also counts the time the machine was suspended.
pub(crate) fn since_boot() -> Duration {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    const CLOCK: rustix::time::ClockId = rustix::time::ClockId::Boottime;
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    const CLOCK: rustix::time::ClockId = rustix::time::ClockId::Monotonic;
    let time = rustix::time::clock_gettime(CLOCK);
    // This clock is never negative.
    Duration::new(time.tv_sec.try_into().unwrap_or(0), time.tv_nsec.try_into().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fault: N119
    #[test]
    fn wait_is_short_enough_to_notice_suspension() {
        let at = Duration::from_secs;
        assert_eq!(
            time_to_next_check(Duration::MAX, at(1000)),
            at(1),
            "a due time in the far future"
        );
        assert_eq!(time_to_next_check(at(1000) + at(1) / 2, at(1000)), at(1) / 2);
        assert_eq!(time_to_next_check(at(999), at(1000)), Duration::ZERO);
    }
}
