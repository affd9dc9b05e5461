//! Pauses between tries: they grow, and two clients rarely pause for the same time. Pure.

use std::time::Duration;

/// Pause after a failed request. Doubles with each failure, up to `RETRY_PAUSE_MAX`.
const RETRY_PAUSE_MIN: Duration = Duration::from_millis(10);
pub(crate) const RETRY_PAUSE_MAX: Duration = Duration::from_millis(500);

/// Pause after `failures` failures in a row.
pub(crate) fn retry_backoff(failures: u32, pause_max: Duration, jitter_seed: u64) -> Duration {
    add_jitter(RETRY_PAUSE_MIN.saturating_mul(1 << failures.min(10)).min(pause_max), jitter_seed)
}

/// Makes a pause up to a tenth longer, never shorter: a poll must not come before the expiry of the
/// key.
pub(crate) fn add_jitter(pause: Duration, jitter_seed: u64) -> Duration {
    pause.saturating_add(pause / 1000 * u32::try_from(splitmix64(jitter_seed) % 100).unwrap_or(0))
}

/// One step of splitmix64, which turns neighbouring seeds into unrelated numbers.
pub(crate) fn splitmix64(seed: u64) -> u64 {
    let mut x = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn splitmix64_matches_published_values() {
        // The first outputs for two seeds, as published with the algorithm.
        assert_eq!(splitmix64(0), 0xe220_a839_7b1d_cdaf);
        assert_eq!(splitmix64(1_234_567), 6_457_827_717_110_365_317);
    }

    proptest! {
        #[test]
        fn retry_backoff_stays_within_bounds(failures: u32, jitter_seed: u64) {
            let pause = retry_backoff(failures, RETRY_PAUSE_MAX, jitter_seed);
            prop_assert!(
                pause >= RETRY_PAUSE_MIN && pause <= RETRY_PAUSE_MAX + RETRY_PAUSE_MAX / 10
            );
        }
    }
}
