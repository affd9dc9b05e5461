//! `Timing`: a histogram of durations. Pure.

use std::{fmt, time::Duration};

use hdrhistogram::Histogram;

/// Maximum recorded duration: 30 days. Longer durations are recorded as this.
const RECORDED_US_MAX: u64 = 30 * 24 * 60 * 60 * 1_000_000;

/// A histogram of durations, in microseconds. Its memory grows with the range of the values, not
/// with their number.
///
/// ```
/// let timing = distlock::Timing::default();
/// assert_eq!(timing.count(), 0);
/// assert_eq!(timing.quantile(0.99), std::time::Duration::ZERO);
/// ```
#[derive(Clone)]
pub struct Timing {
    histogram: Option<Histogram<u64>>,
}

impl fmt::Debug for Timing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Timing")
            .field("count", &self.count())
            .field("mean", &self.mean())
            .field("max", &self.max())
            .finish_non_exhaustive()
    }
}

impl Timing {
    /// Creates an empty histogram that keeps `digits` significant digits of each value.
    pub(super) fn new(digits: u8) -> Timing {
        // Fails only for more than five digits.
        Timing { histogram: Histogram::new(digits).ok() }
    }

    pub(super) fn record(&mut self, span: Duration) {
        let micros =
            u64::try_from(span.as_micros()).unwrap_or(RECORDED_US_MAX).min(RECORDED_US_MAX);
        if let Some(histogram) = &mut self.histogram {
            // The histogram resizes itself. Recording fails only if `usize` is too small for the
            // new size.
            let _ = histogram.record(micros);
        }
    }

    pub(super) fn add(&mut self, other: &Timing) {
        if let (Some(histogram), Some(other)) = (&mut self.histogram, &other.histogram) {
            let _ = histogram.add(other);
        }
    }

    /// Number of recorded durations.
    pub fn count(&self) -> u64 {
        self.histogram.as_ref().map_or(0, Histogram::len)
    }

    /// Shortest recorded duration; zero if there is none.
    pub fn min(&self) -> Duration {
        self.histogram
            .as_ref()
            .filter(|histogram| !histogram.is_empty())
            .map_or(Duration::ZERO, |h| micros(h.min()))
    }

    /// Longest recorded duration; zero if there is none.
    pub fn max(&self) -> Duration {
        self.histogram.as_ref().map_or(Duration::ZERO, |histogram| micros(histogram.max()))
    }

    /// Mean of the recorded durations; zero if there is none.
    pub fn mean(&self) -> Duration {
        self.histogram
            .as_ref()
            .map_or(Duration::ZERO, |histogram| Duration::from_secs_f64(histogram.mean() / 1e6))
    }

    /// Duration that the fraction `q` of all values did not exceed: the median for 0.5, the 99th
    /// percentile for 0.99. Zero if nothing was recorded. Values of `q` outside of 0 to 1 are
    /// clamped.
    pub fn quantile(&self, q: f64) -> Duration {
        let value = |histogram: &Histogram<u64>| {
            histogram.value_at_quantile(q.clamp(0.0, 1.0)).min(histogram.max())
        };
        self.histogram.as_ref().map_or(Duration::ZERO, |histogram| micros(value(histogram)))
    }
}

fn micros(micros: u64) -> Duration {
    Duration::from_micros(micros)
}

impl Default for Timing {
    fn default() -> Timing {
        Timing::new(2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn recorded_values_read_back_within_precision() {
        let mut timing = Timing::default();
        for millis in 1..=100 {
            timing.record(Duration::from_millis(millis));
        }
        let near =
            |span: Duration, millis: u64| span.abs_diff(Duration::from_millis(millis)) < span / 50;
        assert_eq!(timing.count(), 100);
        assert!(
            near(timing.min(), 1) && near(timing.max(), 100) && near(timing.quantile(0.5), 50),
            "{timing:?}"
        );
        assert!(near(timing.quantile(0.99), 99), "{timing:?}");
        assert!(near(timing.mean(), 50) || near(timing.mean(), 51), "{timing:?}");
        assert!(near(timing.quantile(7.0), 100) && near(timing.quantile(-1.0), 1));
        let mut twice = timing.clone();
        twice.add(&timing);
        assert_eq!(twice.count(), 200);
        let none = Timing::default();
        assert_eq!(
            (none.count(), none.min(), none.max(), none.mean()),
            (0, Duration::ZERO, Duration::ZERO, Duration::ZERO)
        );
    }

    #[test]
    fn extreme_times_are_clamped() {
        let mut timing = Timing::new(1);
        for span in [Duration::ZERO, Duration::from_nanos(1), Duration::MAX] {
            timing.record(span);
        }
        assert_eq!((timing.count(), timing.min()), (3, Duration::ZERO));
        let month = Duration::from_secs(30 * 86_400);
        assert!(timing.max() >= month && timing.max() < month * 2, "{timing:?}");
    }

    proptest! {
        #[test]
        fn quantiles_are_bounded_and_monotonic(
            micros in proptest::collection::vec(0u64..1 << 40, 1..50),
            part in 0.0..1.0,
        ) {
            let mut timing = Timing::new(1);
            micros.iter().for_each(|micros| timing.record(Duration::from_micros(*micros)));
            prop_assert!(
                timing.min() <= timing.quantile(part) && timing.quantile(part) <= timing.max()
            );
            prop_assert!(timing.quantile(part / 2.0) <= timing.quantile(part));
        }
    }
}
