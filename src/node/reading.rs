//! `Reading`: what a server's clock said in one exchange. Pure: it carries moments from one clock to the other.

use std::time::Duration;

use redis::Value;

use crate::clock::Moment;

/// The server read `server_us` on its clock, some time between `sent` and `received` on ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reading {
    sent: Moment,
    received: Moment,
    server_us: u64,
}

/// Clocks run at different rates; nothing here relies on a difference below one part in this many.
pub(crate) const DRIFT: u32 = 100;

impl Reading {
    pub(crate) fn new(sent: Moment, received: Moment, server_us: u64) -> Reading {
        Reading { sent, received, server_us }
    }

    /// From the answer to `TIME`.
    pub(crate) fn from_time(sent: Moment, received: Moment, answer: &Value) -> Option<Reading> {
        let Value::Array(parts) = answer else { return None };
        let [seconds, micros] = parts.as_slice() else { return None };
        let number = |value: &Value| redis::from_redis_value_ref::<u64>(value).ok();
        let server_us = number(seconds)?.checked_mul(1_000_000)?.checked_add(number(micros)?)?;
        Some(Reading { sent, received, server_us })
    }

    /// What the server's clock shows, at least, at `moment` after this reading.
    pub(crate) fn server_us_at(&self, moment: Moment) -> u64 {
        self.server_us.saturating_add(micros(moment.after(self.received)))
    }

    /// The local moment that is surely not later than the one at which the server's clock showed `server_us`.
    ///
    /// The difference is signed: a grant can be older than the reading it is measured against.
    pub(crate) fn not_later_than(&self, server_us: u64) -> Moment {
        match server_us.checked_sub(self.server_us) {
            Some(later) => {
                let span = Duration::from_micros(later);
                self.sent.saturating_add(span - span / DRIFT)
            }
            None => {
                let span = Duration::from_micros(self.server_us - server_us + 1);
                self.sent.saturating_sub(span.saturating_add(span / (DRIFT - 1)))
            }
        }
    }

    pub(crate) fn is_newer_than(&self, other: &Reading) -> bool {
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
    fn a_moment_before_the_reading_lies_before_it_here_too() {
        let reading = Reading::new(at(1_000_000), at(1_000_100), 50_000_000);
        assert!(reading.not_later_than(49_900_000) < at(900_001));
        assert_eq!(reading.not_later_than(50_000_000), at(1_000_000));
    }

    proptest! {
        /// Whatever the offset between the clocks, and however they drift within the bound, the mapped moment is
        /// never after the true one.
        #[test]
        fn mapping_never_errs_towards_later(
            offset in 0u64..1 << 40,
            read_at in 1_000u64..1_000_000_000,
            delay in 0u64..1_000_000,
            on_the_way_back in 0u64..1_000_000,
            event_at in 0u64..2_000_000_000,
            rate_ppm in -9_900i64..=9_900,
        ) {
            // The server's clock runs at 1 + rate against ours, both measured from the reading.
            let sent = read_at.saturating_sub(delay);
            let elapsed = event_at as i64 - read_at as i64;
            let server_elapsed = elapsed + elapsed / 1_000_000 * rate_ppm + elapsed % 1_000_000 * rate_ppm / 1_000_000;
            let base = offset + 4_000_000_000;
            let server_us = base.checked_add_signed(server_elapsed).unwrap();
            let mapped = Reading::new(at(sent), at(read_at + on_the_way_back), base).not_later_than(server_us);
            // A microsecond of rounding in this test's own arithmetic.
            prop_assert!(mapped <= at(event_at + 2), "{mapped:?} is later than {event_at} us");
        }

        #[test]
        fn the_server_clock_is_never_overestimated(read_at in 0u64..1 << 40, later in 0u64..1 << 40) {
            let reading = Reading::new(at(10), at(500), read_at);
            prop_assert!(reading.server_us_at(at(500 + later)) <= read_at + later);
        }
    }
}
