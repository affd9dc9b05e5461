//! When a waiter polls, and when it looks again at a lock that another client holds. Pure.
//!
//! A release hands the lock over without polling. Polling covers what comes without a message: a
//! holder that died, a key that was deleted, a client that releases without handing over, a lost
//! queue entry.

use std::time::Duration;

use crate::{
    core::{backoff::add_jitter, holder::Holder},
    sys::clock::Moment,
};

/// Polling interval at the head of the queue.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Longest polling interval behind the head, for the first 33 waiters. A waiter learns only by
/// polling that hand-overs have made it the head. The lock that is granted to a frozen waiter
/// expires after a claim window, which is as long by default.
const POLL_INTERVAL_BEHIND: Duration = Duration::from_secs(1);
/// Growth of that limit with the position, so that hundreds of processes are no load.
const POLL_INTERVAL_STEP: Duration = Duration::from_millis(30);
/// Longest and shortest polling interval if the holder does not use this library, because its
/// release does not hand the lock over.
const POLL_INTERVAL_FOREIGN: Duration = Duration::from_millis(50);
const POLL_INTERVAL_FOREIGN_MIN: Duration = Duration::from_millis(1);
/// Time from the expiry of the holder's key to the poll of the head. Each further position adds
/// `EXPIRY_POLL_STEP`.
const EXPIRY_POLL_DELAY: Duration = Duration::from_millis(5);
const EXPIRY_POLL_STEP: Duration = Duration::from_millis(25);
/// Maximum polling interval. Otherwise clocks could drift too far apart between samples, and the
/// queue could expire.
pub(crate) const POLL_INTERVAL_MAX: Duration = Duration::from_secs(10);

/// What a waiter has seen of holders that do not use this library. It learns from their holds when
/// to look: often while a hold is young or likely to end, seldom while it is old.
#[derive(Debug, Default)]
pub(crate) struct ForeignHolds {
    /// The id of the current holder, and when it was first and last seen.
    current: Option<(Vec<u8>, Moment, Moment)>,
    /// For how long the previous one was seen.
    previous: Duration,
}

impl ForeignHolds {
    /// Returns after which time to look again; `None` if the holder uses this library.
    fn interval(&mut self, at: Moment, holder: &Holder) -> Option<Duration> {
        if !holder.is_foreign() {
            return None;
        }
        let age = match &mut self.current {
            Some((id, first, last)) if id == holder.id_bytes() => {
                *last = at;
                at.duration_since(*first)
            }
            current => {
                let ended = current.replace((holder.id_bytes().to_vec(), at, at));
                if let Some((_, first, last)) = ended {
                    self.previous = last.duration_since(first);
                }
                Duration::ZERO
            }
        };
        let interval =
            if age <= self.previous.saturating_mul(2) { self.previous / 8 } else { age / 4 };
        Some(interval.clamp(POLL_INTERVAL_FOREIGN_MIN, POLL_INTERVAL_FOREIGN))
    }
}

/// Returns when a waiter polls next that saw this holder at `at`, from this position in the queue.
/// `jitter_seed` is any number; it spreads waiters that would poll at the same time.
pub(crate) fn next_poll(
    at: Moment,
    holder: &Holder,
    position: u64,
    foreign: &mut ForeignHolds,
    jitter_seed: u64,
) -> Moment {
    // For the head of the queue; further back, up to a multiple of it.
    let interval = match foreign.interval(at, holder) {
        None => POLL_INTERVAL,
        Some(interval) if position == 0 => interval,
        // A poll by any waiter grants a free lock to the head, so the others need not hurry.
        Some(_) => POLL_INTERVAL_FOREIGN,
    };
    let position = u32::try_from(position).unwrap_or(u32::MAX);
    let place = position.saturating_add(1);
    let longest = POLL_INTERVAL_BEHIND.max(POLL_INTERVAL_STEP.saturating_mul(place));
    let mut pause = interval.saturating_mul(place).min(longest);
    if let Some(left) = holder.ttl_left() {
        pause = pause.min(
            left.saturating_add(EXPIRY_POLL_DELAY)
                .saturating_add(EXPIRY_POLL_STEP.saturating_mul(position)),
        );
    }
    at.saturating_add(add_jitter(pause.min(POLL_INTERVAL_MAX), jitter_seed))
}

/// Polling interval of a waiter without a subscription, which cannot receive a grant message.
pub(crate) fn unsubscribed_poll_interval(jitter_seed: u64) -> Duration {
    add_jitter(Duration::from_millis(100), jitter_seed)
}

/// Interval at which a waiter that is not first in its process checks that it still is not. It
/// grows with the queue position, so that thousands of waiting threads cost next to nothing.
pub(crate) fn follower_interval(position: Option<u64>, jitter_seed: u64) -> Duration {
    let before = position.unwrap_or(0).min(90);
    add_jitter(Duration::from_millis(1000 + 100 * before), jitter_seed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::{
        backoff::{RETRY_PAUSE_MAX, retry_backoff},
        id::generate_lock_id,
    };
    use proptest::prelude::*;

    const START: Moment = Moment::from_nanos(1_000_000_000);

    fn pause(pttl_ms: i64, position: u64, foreign: bool, jitter_seed: u64) -> Duration {
        let id = if foreign { "lock_42".to_owned() } else { generate_lock_id().to_string() };
        let holder = Holder::from_report(id.as_bytes(), pttl_ms, 0, 0, 0);
        let mut seen = ForeignHolds::default();
        next_poll(START, &holder, position, &mut seen, jitter_seed).duration_since(START)
    }

    /// Polls behind foreign holders, each of which holds the lock for `hold`. Returns the longest
    /// time for which a release went unnoticed, after the first hold, and the number of polls.
    fn poll_behind(holds: u64, hold: Duration) -> (Duration, u64) {
        let (mut foreign, mut polls, mut latest) = (ForeignHolds::default(), 0, Duration::ZERO);
        let mut now = START;
        for number in 0..holds {
            let (began, id) = (now, format!("lock_{number}"));
            let holder = Holder::from_report(id.as_bytes(), 3_600_000, 0, 0, 0);
            while now.duration_since(began) < hold {
                now = next_poll(now, &holder, 0, &mut foreign, now.as_nanos());
                polls += 1;
            }
            if number > 0 {
                latest = latest.max(now.duration_since(began) - hold);
            }
        }
        (latest, polls)
    }

    #[test]
    fn release_of_a_short_foreign_hold_is_noticed_soon() {
        for hold in [1, 2, 5, 8] {
            let (latest, _) = poll_behind(20, Duration::from_millis(hold));
            assert!(latest <= Duration::from_micros(1_200), "{latest:?} after {hold} ms");
        }
        let (latest, _) = poll_behind(20, Duration::from_millis(200));
        assert!(latest < Duration::from_millis(35), "{latest:?}");
    }

    #[test]
    fn long_foreign_hold_after_a_short_one_is_polled_seldom() {
        let (_, polls) = poll_behind(1, Duration::from_secs(60));
        assert!(polls < 60 * 20 + 50, "{polls} polls");
        let mut foreign = ForeignHolds { current: None, previous: Duration::from_millis(2) };
        let holder = Holder::from_report(b"lock_1", 3_600_000, 0, 0, 0);
        let later = START.saturating_add(Duration::from_secs(1));
        assert!(foreign.interval(START, &holder) < Some(Duration::from_millis(2)));
        assert_eq!(foreign.interval(later, &holder), Some(POLL_INTERVAL_FOREIGN));
    }

    #[test]
    fn head_polls_just_after_holder_expiry() {
        let pause = pause(300, 0, false, 7);
        assert!(
            pause >= Duration::from_millis(305) && pause < Duration::from_millis(340),
            "{pause:?}"
        );
    }

    #[test]
    fn foreign_holder_polled_more_often() {
        assert!(pause(30_000, 0, true, 1) < Duration::from_millis(2));
        assert!(pause(30_000, 1, true, 1) >= 2 * POLL_INTERVAL_FOREIGN);
        assert!(pause(30_000, 0, false, 1) >= POLL_INTERVAL);
    }

    #[test]
    fn holder_without_expiry_still_polled() {
        assert!(pause(-1, 0, false, 1) < Duration::from_secs(1));
    }

    /// Otherwise a lock could stay free for up to ten seconds after the queue has become short.
    ///
    /// Fault: N267
    #[test]
    fn waiter_that_may_have_become_the_head_polls_within_a_second() {
        for position in 0..33 {
            let pause = pause(-3, position, false, position);
            assert!(pause <= Duration::from_millis(1_100), "{pause:?} at position {position}");
        }
    }

    #[test]
    fn five_hundred_waiters_poll_below_130_times_a_second() {
        // As if each waiter had a process of its own; within one process only the first polls.
        let rate: f64 = (0..500)
            .map(|position| 1.0 / pause(30_000, position, false, position).as_secs_f64())
            .sum();
        assert!(rate < 130.0, "{rate} polls a second");
    }

    /// The shortest and the longest of many pauses.
    fn extremes(pause: impl Fn(u64) -> Duration) -> (Duration, Duration) {
        let pauses = || (0..2_000).map(&pause);
        (pauses().min().unwrap(), pauses().max().unwrap())
    }

    #[test]
    fn pauses_get_up_to_ten_percent_jitter() {
        for (millis, (shortest, longest)) in [
            (100, extremes(unsubscribed_poll_interval)),
            (1_000, extremes(|jitter_seed| follower_interval(None, jitter_seed))),
            (10_000, extremes(|jitter_seed| follower_interval(Some(1_000), jitter_seed))),
            (80, extremes(|jitter_seed| retry_backoff(3, RETRY_PAUSE_MAX, jitter_seed))),
            (500, extremes(|jitter_seed| retry_backoff(u32::MAX, RETRY_PAUSE_MAX, jitter_seed))),
        ] {
            let whole = Duration::from_millis(millis);
            assert!(
                shortest >= whole && shortest < whole + whole / 100,
                "{shortest:?} of {whole:?}"
            );
            assert!(
                longest <= whole + whole / 10 && longest > whole + whole * 9 / 100,
                "{longest:?} of {whole:?}"
            );
        }
    }

    proptest! {
        #[test]
        fn poll_pause_is_positive_and_bounded(
            pttl in 0i64..100_000_000, position: u64, foreign: bool, jitter_seed: u64,
        ) {
            let pause = pause(pttl, position, foreign, jitter_seed);
            prop_assert!(pause <= POLL_INTERVAL_MAX + POLL_INTERVAL_MAX / 10);
            prop_assert!(pause > Duration::ZERO);
        }

        #[test]
        fn poll_pause_grows_with_queue_position(
            pttl in 0i64..1_000_000, position in 0u64..1000, jitter_seed: u64,
        ) {
            prop_assert!(
                pause(pttl, position, false, jitter_seed)
                    <= pause(pttl, position + 1, false, jitter_seed)
            );
        }

    }
}
