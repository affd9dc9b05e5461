//! The arithmetic of lease deadlines. Pure.

use std::time::Duration;

use crate::{
    core::clock_sample::{ClockSample, DRIFT_DIVISOR},
    sys::clock::Moment,
};

/// Time added to the moment from which a node refuses a request, because that moment is known only
/// to within a round trip.
pub(crate) const EXPIRY_SLACK: Duration = Duration::from_millis(100);

/// Safety margin between the local deadline and the expiry on the server: the possible drift of the
/// two clocks during the lease, and 2 ms.
pub(crate) fn margin(ttl: Duration) -> Duration {
    ttl / DRIFT_DIVISOR + Duration::from_millis(2)
}

/// Deadline of a lease that a server granted or renewed for a request sent at `sent`.
///
/// Counts from before the request left, not from the reply, because the server started counting
/// somewhere in between.
pub(crate) fn deadline_from_sent(sent: Moment, ttl: Duration) -> Moment {
    // The server counts in whole milliseconds.
    let ttl = Duration::from_millis(u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX));
    sent.saturating_add(ttl).saturating_sub(margin(ttl))
}

/// The earliest time at which a server can have granted a lock to a waiter, without a request. The
/// lease counts from then.
///
/// The grant message contains the server's time, which is mapped to the local clock through an
/// earlier exchange with that server. A message that lay unread in a socket buffer is thus
/// recognized as old. `now` is an upper bound: if the server's clock has jumped forward, the lease
/// counts from the time at which the message was read.
pub(crate) fn time_of_grant(reading: &ClockSample, granted_at_us: u64, now: Moment) -> Moment {
    reading.local_lower_bound(granted_at_us).min(now)
}

/// Minimum request timeout, because a third of a short lease would be too little.
const REQUEST_TIMEOUT_MIN: Duration = Duration::from_millis(50);

/// Timeout of a request for a lease. A short lease leaves no time for a long wait.
pub(crate) fn request_timeout(operation_timeout: Duration, ttl: Duration) -> Duration {
    operation_timeout.min((ttl / 3).max(REQUEST_TIMEOUT_MIN))
}

/// Minimum number of round trips that must fit into the time left of a grant; otherwise it is
/// confirmed before it is returned. A new connection, its login and the request take three. They
/// get half of the time that remains after the confirmation delay, so that a second try fits in.
const MIN_ROUND_TRIPS_LEFT: u32 = 10;

/// Whether a grant must be confirmed before it is returned, because little time is left compared
/// with the round trip.
pub(crate) fn needs_immediate_confirmation(left: Duration, round_trip: Duration) -> bool {
    round_trip.saturating_mul(MIN_ROUND_TRIPS_LEFT) > left
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(millis: u64) -> Moment {
        Moment::from_nanos(millis * 1_000_000)
    }

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn deadline_precedes_expiry_at_the_server() {
        assert_eq!(deadline_from_sent(at(5_000), 10 * SECOND), at(5_000 + 10_000 - 100 - 2));
        // The server does not grant fractions of a millisecond.
        assert_eq!(
            deadline_from_sent(at(0), Duration::from_micros(100_900)),
            deadline_from_sent(at(0), Duration::from_millis(100))
        );
    }

    #[test]
    fn stale_grant_has_expired_when_read() {
        let reading = ClockSample::new(at(10_000), at(10_001), 500_000_000);
        // Granted two seconds before the sample was taken, to an earlier queue entry of this
        // waiter.
        assert!(time_of_grant(&reading, 498_000_000, at(10_500)) < at(8_010));
        // Granted 100 ms after the sample.
        let granted = time_of_grant(&reading, 500_100_000, at(10_101));
        assert!(granted > at(10_092) && granted <= at(10_100), "{granted:?}");
    }

    #[test]
    fn grant_never_counts_from_the_future() {
        let reading = ClockSample::new(at(10_000), at(10_001), 500_000_000);
        let hour_us = 3_600_000_000;
        assert_eq!(time_of_grant(&reading, 500_000_000 + hour_us, at(10_101)), at(10_101));
    }

    #[test]
    fn slow_connection_needs_immediate_confirmation() {
        let millis = Duration::from_millis;
        assert!(!needs_immediate_confirmation(SECOND, Duration::ZERO));
        assert!(!needs_immediate_confirmation(SECOND, millis(100)));
        assert!(needs_immediate_confirmation(SECOND, millis(101)));
        assert!(needs_immediate_confirmation(millis(250), millis(26)));
        assert!(needs_immediate_confirmation(SECOND, Duration::MAX));
    }

    proptest! {
        /// The local deadline is before the expiry of the key, `px` after the grant, on any clock
        /// within the drift bound.
        ///
        /// Fault: F51
        #[test]
        fn deadline_precedes_key_expiry(
            read_after in 0u64..50,
            granted_after_us in -5_000_000i64..5_000_000,
            px_ms in 10u64..100_000,
            read_late_ms in 0u64..5_000,
        ) {
            let (sent, server_us) = (at(60_000), 900_000_000_000_u64);
            let reading = ClockSample::new(sent, at(60_000 + read_after), server_us);
            // Worst case: the server read its clock at the very end of the exchange.
            let truth_ns =
                60_000_000_000_i64 + (read_after as i64) * 1_000_000 + granted_after_us * 1_000;
            let truth = Moment::from_nanos(truth_ns as u64);
            let now = truth.saturating_add(Duration::from_millis(read_late_ms));
            let granted_at_us = server_us.checked_add_signed(granted_after_us).unwrap();
            let px = Duration::from_millis(px_ms);
            let believed = deadline_from_sent(time_of_grant(&reading, granted_at_us, now), px);
            prop_assert!(believed < truth.saturating_add(px));
        }
    }
}
