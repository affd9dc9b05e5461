//! `Claim` (what is requested) and `Grant` (what the nodes granted), with the arithmetic of
//! deadlines. Pure.

use std::time::Duration;

use crate::{
    clock::Moment,
    id::LockId,
    key::LockKey,
    node::{ClockSample, DRIFT_DIVISOR},
    redlock::{NodeDeadlines, NodeSet},
    token::FencingToken,
};

/// One acquisition of one lock. All its requests have the same id until the outcome is known.
#[derive(Clone, Debug)]
pub(crate) struct Claim {
    pub(crate) key: LockKey,
    pub(crate) id: LockId,
    pub(crate) ttl: Duration,
}

impl Claim {
    pub(crate) fn ttl_ms(&self) -> u64 {
        u64::try_from(self.ttl.as_millis()).unwrap_or(u64::MAX)
    }
}

/// A granted lock. It is valid while a quorum keeps it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Grant {
    pub(crate) token: FencingToken,
    /// Deadline of the lock on each node.
    pub(crate) node_deadlines: NodeDeadlines,
    /// At least one node granted the lock for the claim window only, so it must be confirmed soon.
    pub(crate) provisional: bool,
    pub(crate) in_flight: InFlight,
    /// Nodes that may hold the lock.
    pub(crate) may_hold: NodeSet,
    /// Queue entry that may still be queued, or be added by a late request; or empty.
    pub(crate) queue_entry: String,
}

/// Requests of a successful claim that may still be applied. Applied after the release, such a
/// request would acquire the lock again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InFlight {
    /// Latest time at which requests whose connection broke can still be applied.
    pub(crate) broken_until: Moment,
    /// Nodes that had not replied when the quorum was reached, and the latest time at which they
    /// can still apply the request.
    pub(crate) unanswered: NodeSet,
    pub(crate) unanswered_until: Moment,
}

impl InFlight {
    /// Nodes that have not replied and can still apply the request at `now`.
    pub(crate) fn unanswered_at(&self, now: Moment) -> NodeSet {
        if now < self.unanswered_until { self.unanswered } else { NodeSet::EMPTY }
    }

    /// Latest time at which any of these requests can be applied.
    pub(crate) fn until(&self) -> Moment {
        if self.unanswered.is_empty() {
            self.broken_until
        } else {
            self.broken_until.max(self.unanswered_until)
        }
    }
}

impl Grant {
    pub(crate) fn deadline(&self) -> Moment {
        self.node_deadlines.valid_until().unwrap_or(Moment::from_nanos(0))
    }
}

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

/// Deadline of a lock that was handed to a waiter, without a request.
///
/// The grant message contains the server's time, which is mapped to the local clock through an
/// earlier exchange with that server. A message that lay unread in a socket buffer is thus
/// recognized as old. `now` is an upper bound, because a grant cannot come from the future: a
/// server clock that jumps forward cannot extend the lease.
pub(crate) fn deadline_from_grant(
    reading: &ClockSample,
    granted_at_us: u64,
    px: Duration,
    now: Moment,
) -> Moment {
    deadline_from_sent(reading.local_lower_bound(granted_at_us).min(now), px)
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
    use crate::id::generate_lock_id;
    use proptest::prelude::*;

    fn at(millis: u64) -> Moment {
        Moment::from_nanos(millis * 1_000_000)
    }

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn unanswered_nodes_count_until_their_deadline() {
        let (begun, open_until) = (Moment::from_nanos(5), Moment::from_nanos(9));
        let late = InFlight {
            broken_until: begun,
            unanswered: NodeSet::single(2),
            unanswered_until: open_until,
        };
        assert_eq!(late.unanswered_at(begun), NodeSet::single(2));
        assert_eq!(late.unanswered_at(Moment::from_nanos(8)), NodeSet::single(2));
        assert_eq!(late.unanswered_at(open_until), NodeSet::EMPTY);
        assert_eq!(late.unanswered_at(Moment::from_nanos(10)), NodeSet::EMPTY);
        assert_eq!(late.until(), open_until);
        assert_eq!(InFlight { unanswered: NodeSet::EMPTY, ..late }.until(), begun);
    }

    #[test]
    fn ttl_rounded_down_to_whole_milliseconds() {
        let ask_for = |ttl| {
            Claim { key: LockKey::new("", "x").unwrap(), id: generate_lock_id(), ttl }.ttl_ms()
        };
        assert_eq!(ask_for(Duration::from_micros(1_500_999)), 1_500);
        assert_eq!(ask_for(Duration::MAX), u64::MAX);
    }

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
        assert!(deadline_from_grant(&reading, 498_000_000, SECOND, at(10_500)) < at(9_000));
        // Granted 100 ms after the sample.
        let deadline = deadline_from_grant(&reading, 500_100_000, SECOND, at(10_101));
        assert!(deadline > at(11_080) && deadline < at(11_100), "{deadline:?}");
    }

    #[test]
    fn server_clock_jump_cannot_extend_a_grant() {
        let reading = ClockSample::new(at(10_000), at(10_001), 500_000_000);
        let hour_us = 3_600_000_000;
        assert_eq!(
            deadline_from_grant(&reading, 500_000_000 + hour_us, SECOND, at(10_101)),
            deadline_from_sent(at(10_101), SECOND)
        );
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
            let believed =
                deadline_from_grant(&reading, granted_at_us, Duration::from_millis(px_ms), now);
            prop_assert!(believed < truth.saturating_add(Duration::from_millis(px_ms)));
        }
    }
}
