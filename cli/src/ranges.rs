//! The ranges of the options that are durations. They are checked here, because the library would
//! report a value by the name of its own setting.

use std::{ops::RangeInclusive, time::Duration};

use crate::{exit::Failure, format::duration};

/// The ttls that the library accepts. `--at-least` has the same range.
pub(crate) const TTL: RangeInclusive<Duration> =
    Duration::from_millis(10)..=Duration::from_secs(24 * 60 * 60);
/// The timeouts that the library accepts.
pub(crate) const TIMEOUT: RangeInclusive<Duration> =
    Duration::from_millis(1)..=Duration::from_secs(60);
/// Time between two polls of `top`.
pub(crate) const INTERVAL: RangeInclusive<Duration> =
    Duration::from_millis(50)..=Duration::from_secs(60 * 60);
/// Time that `bench` measures: long enough to measure something, short enough to wait for.
pub(crate) const BENCH_TIME: RangeInclusive<Duration> =
    Duration::from_millis(100)..=Duration::from_secs(10 * 60);

/// Fails with a message that names the option.
pub(crate) fn check(
    option: &str,
    value: Duration,
    range: &RangeInclusive<Duration>,
) -> Result<(), Failure> {
    if range.contains(&value) {
        return Ok(());
    }
    let [shown, least, most] = [value, *range.start(), *range.end()].map(duration);
    // It is shown rounded.
    let is = if shown == most { "is more than" } else { "is" };
    Err(Failure::usage(format!("{option} {is} {shown}, but must be {least} to {most}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Otherwise the library would refuse a value that this command has accepted, or the reverse.
    #[test]
    fn ranges_are_those_of_the_library() {
        let nanosecond = Duration::from_nanos(1);
        let accepts = |config: distlock::Config| distlock::RedisMgr::new(config).is_ok();
        let config = || distlock::Config::new("redis://h");
        for (range, accepts) in [
            (TTL, &(|ttl| accepts(config().ttl(ttl))) as &dyn Fn(Duration) -> bool),
            (TIMEOUT, &|timeout| accepts(config().operation_timeout(timeout))),
        ] {
            for (value, expected) in [
                (*range.start() - nanosecond, false),
                (*range.start(), true),
                (*range.end(), true),
                (*range.end() + nanosecond, false),
            ] {
                assert_eq!(accepts(value), expected, "{value:?}");
                assert_eq!(check("--x", value, &range).is_ok(), expected, "{value:?}");
            }
        }
    }
}
