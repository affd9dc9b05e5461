//! `ClockSample`: one reading of a server's clock, by which times are converted between that clock
//! and the local one. Pure.

use std::time::Duration;

use crate::sys::clock::Moment;

/// The server's clock showed `server_us` at a moment between `sent` and `received` on the local
/// clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClockSample {
    sent: Moment,
    received: Moment,
    server_us: u64,
}

/// Assumed bound on clock drift: over any interval, two clocks differ by at most one part in this
/// many.
pub(crate) const DRIFT_DIVISOR: u32 = 100;

impl ClockSample {
    pub(crate) fn new(sent: Moment, received: Moment, server_us: u64) -> ClockSample {
        ClockSample { sent, received, server_us }
    }

    /// Returns a lower bound of what the server's clock shows at `moment`, if both clocks run at
    /// the same rate.
    pub(crate) fn server_us_at(&self, moment: Moment) -> u64 {
        self.server_us.saturating_add(micros(moment.duration_since(self.received)))
    }

    /// Returns a lower bound of the local time at which the server's clock showed `server_us`.
    ///
    /// The difference may be negative, because a grant can be older than the sample.
    pub(crate) fn local_lower_bound(&self, server_us: u64) -> Moment {
        // Both values are truncated to microseconds, so equal values may be almost one microsecond
        // apart.
        let read_us = self.server_us.saturating_add(1);
        match server_us.checked_sub(read_us) {
            Some(later) => {
                let span = Duration::from_micros(later);
                self.sent.saturating_add(span - span / DRIFT_DIVISOR)
            }
            None => {
                let span = Duration::from_micros(read_us - server_us);
                self.sent.saturating_sub(span.saturating_add(span / (DRIFT_DIVISOR - 1)))
            }
        }
    }

    /// Returns the duration of the exchange.
    pub(crate) fn round_trip(&self) -> Duration {
        self.received.duration_since(self.sent)
    }

    pub(crate) fn is_newer_than(&self, other: &ClockSample) -> bool {
        self.sent > other.sent
    }
}

fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(micros: u64) -> Moment {
        Moment::from_nanos(micros * 1000)
    }

    #[test]
    fn local_bound_of_earlier_time_precedes_sample() {
        let sample = ClockSample::new(at(1_000_000), at(1_000_100), 50_000_000);
        assert!(sample.local_lower_bound(49_900_000) < at(900_001));
        assert!(sample.local_lower_bound(50_000_000) <= at(1_000_000));
    }

    #[test]
    fn local_bound_allows_one_percent_of_drift() {
        let sample = ClockSample::new(at(1_000_000_000), at(1_000_000_100), 50_000_000_000);
        // One microsecond is for the truncation.
        assert_eq!(sample.local_lower_bound(50_100_000_001), at(1_099_000_000));
        assert_eq!(sample.local_lower_bound(49_901_000_001), at(900_000_000));
    }

    #[test]
    fn server_clock_advances_from_sample() {
        let sample = ClockSample::new(at(1_000), at(1_100), 50_000);
        assert_eq!(sample.server_us_at(at(1_100)), 50_000);
        assert_eq!(sample.server_us_at(at(1_350)), 50_250);
        assert_eq!(sample.server_us_at(at(1_050)), 50_000, "the clock may not have been read yet");
    }

    #[test]
    fn round_trip_spans_request_to_reply() {
        assert_eq!(
            ClockSample::new(at(1_000), at(1_100), 50_000).round_trip(),
            Duration::from_micros(100)
        );
    }

    #[test]
    fn newer_sample_is_the_one_sent_later() {
        let asked_at = |micros| ClockSample::new(at(micros), at(900), 50_000);
        assert!(asked_at(2).is_newer_than(&asked_at(1)));
        assert!(!asked_at(1).is_newer_than(&asked_at(2)));
        assert!(!asked_at(1).is_newer_than(&asked_at(1)));
    }

    proptest! {
        /// For any offset between the clocks and any drift within the bound, the mapped time is
        /// never after the true one and not much before it. All values are in nanoseconds; servers
        /// report whole microseconds.
        #[test]
        fn local_bound_is_never_late(
            read_at in 1u64..1_000_000_000_000,
            shown_then in 1u64 << 42..1 << 50,
            delay in prop_oneof![Just(0), 0u64..1_000_000_000],
            on_the_way_back in 0u64..1_000_000_000,
            event_at in 0u64..2_000_000_000_000,
            rate_ppm in prop_oneof![Just(-10_000), -10_000i128..=10_000, Just(10_000)],
        ) {
            // The server's clock runs at 1 + rate relative to ours. Both are measured from the
            // sample.
            let elapsed = i128::from(event_at) - i128::from(read_at);
            let shown =
                i128::from(shown_then) + elapsed + (elapsed * rate_ppm).div_euclid(1_000_000);
            let (sent, received) = (read_at.saturating_sub(delay), read_at + on_the_way_back);
            let reading = ClockSample::new(
                Moment::from_nanos(sent),
                Moment::from_nanos(received),
                shown_then / 1_000,
            );
            let mapped =
                reading.local_lower_bound(u64::try_from(shown / 1_000).unwrap()).as_nanos();
            // The arithmetic truncates fractions of a nanosecond.
            prop_assert!(mapped <= event_at + 2, "{mapped} is later than {event_at}");
            let error = delay + event_at.abs_diff(read_at) / 49 + 3_000;
            prop_assert!(mapped + error >= event_at, "{mapped} is much earlier than {event_at}");
        }

        #[test]
        fn server_clock_is_never_overestimated(read_at in 0u64..1 << 40, later in 0u64..1 << 40) {
            let reading = ClockSample::new(at(10), at(500), read_at);
            prop_assert!(reading.server_us_at(at(500 + later)) <= read_at + later);
        }
    }
}
