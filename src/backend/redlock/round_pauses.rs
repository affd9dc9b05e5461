//! How long to wait between rounds, for preferred nodes, for nodes to release votes, and for a node
//! to accept a subscription. Pure.

use std::time::Duration;

use super::broadcast_options::PREFERRED_WAIT_MIN;
use crate::{
    core::backoff::{RETRY_PAUSE_MAX, splitmix64},
    sys::clock::Moment,
};

/// Pause after a lost round. Doubles with each, up to `SPLIT_VOTE_PAUSE_MAX` after a split vote,
/// and otherwise up to `RETRY_PAUSE_MAX`.
const VOTE_PAUSE_MIN: Duration = Duration::from_micros(250);
const SPLIT_VOTE_PAUSE_MAX: Duration = Duration::from_millis(64);
/// Bounds of the wait for nodes to release the votes of a lost round. Within these bounds, the wait
/// is four times as long as the round took.
const RELEASE_WAIT_MIN: Duration = Duration::from_millis(100);
const RELEASE_WAIT_MAX: Duration = Duration::from_millis(500);

/// Pause before the next round, after `lost_rounds` lost ones. Half of it is random, so that
/// contenders that took votes from each other do not collide again. After a split vote its
/// maximum is lower, because no contender has a quorum, and the next round may win one.
pub(crate) fn vote_backoff(lost_rounds: u32, split: bool, jitter_seed: u64) -> Duration {
    let pause_max = if split { SPLIT_VOTE_PAUSE_MAX } else { RETRY_PAUSE_MAX };
    let pause = VOTE_PAUSE_MIN.saturating_mul(1 << lost_rounds.clamp(1, 11)).min(pause_max);
    pause / 2 + pause / 2000 * u32::try_from(splitmix64(jitter_seed) % 1000).unwrap_or(0)
}

/// Time until which to wait for nodes to confirm a release sent at `now`, after a round that began
/// at `asked_at`. Never later than `call_deadline`: releases not confirmed by then are cleaned up
/// in the background.
pub(crate) fn release_wait_until(asked_at: Moment, now: Moment, call_deadline: Moment) -> Moment {
    now.saturating_add((now.duration_since(asked_at) * 4).clamp(RELEASE_WAIT_MIN, RELEASE_WAIT_MAX))
        .min(call_deadline)
}

/// How long to wait for a preferred node once the outcome is decided. A node that is far away
/// replies long after the others.
pub(crate) fn preferred_wait(last_round_trip: Duration, longest: Duration) -> Duration {
    last_round_trip.saturating_mul(2).min(longest).max(PREFERRED_WAIT_MIN)
}

/// Share of the remaining time that the next node gets to accept a subscription, after `tried` of
/// `nodes` have failed. The first node is the one that all clients prefer; it may be far away, so
/// it gets half. If it does not reply, the others need the rest.
pub(crate) fn subscribe_budget(left: Duration, tried: usize, nodes: usize) -> Duration {
    let shares = if tried == 0 { 2 } else { nodes.saturating_sub(tried).max(1) };
    left / u32::try_from(shares).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const START: Moment = Moment::from_nanos(1_000_000_000);

    /// The shortest and the longest of many pauses.
    fn extremes(pause: impl Fn(u64) -> Duration) -> (Duration, Duration) {
        let pauses = || (0..2_000).map(&pause);
        (pauses().min().unwrap(), pauses().max().unwrap())
    }

    #[test]
    fn release_wait_never_exceeds_call_deadline() {
        let at = |millis| START.saturating_add(Duration::from_millis(millis));
        assert_eq!(release_wait_until(START, at(1), Moment::NEVER), at(101));
        assert_eq!(release_wait_until(START, at(50), Moment::NEVER), at(250));
        assert_eq!(release_wait_until(START, at(900), Moment::NEVER), at(1400));
        assert_eq!(release_wait_until(START, at(900), at(1000)), at(1000));
        assert_eq!(
            release_wait_until(START, at(900), at(800)),
            at(800),
            "the request must still be sent"
        );
    }

    /// Fault: N116
    #[test]
    fn subscribe_budget_gives_first_node_half_of_the_time() {
        let shares = |nodes| {
            let mut left = 24;
            let next = |tried| {
                let share = subscribe_budget(Duration::from_secs(left), tried, nodes).as_secs();
                left -= share;
                share
            };
            (0..nodes).map(next).collect::<Vec<_>>()
        };
        assert_eq!(shares(2), [12, 12]);
        assert_eq!(shares(3), [12, 6, 6]);
        assert_eq!(shares(5), [12, 3, 3, 3, 3]);
        // A node that refuses at once leaves its time to the next.
        assert_eq!(subscribe_budget(Duration::from_secs(24), 2, 3), Duration::from_secs(24));
    }

    #[test]
    fn vote_backoff_is_half_jitter() {
        let pauses = [
            (0, true, 500),
            (1, false, 500),
            (3, false, 2_000),
            (99, true, 64_000),
            (99, false, 500_000),
        ];
        for (losses, split, micros) in pauses {
            let (shortest, longest) =
                extremes(|jitter_seed| vote_backoff(losses, split, jitter_seed));
            let whole = Duration::from_micros(micros);
            assert!(
                shortest >= whole / 2 && shortest < whole * 51 / 100,
                "{shortest:?} of {whole:?}"
            );
            assert!(longest <= whole && longest > whole * 99 / 100, "{longest:?} of {whole:?}");
        }
    }

    proptest! {
        #[test]
        fn vote_backoff_stays_within_bounds(losses: u32, split: bool, jitter_seed: u64) {
            let pause = vote_backoff(losses, split, jitter_seed);
            let longest = if split { SPLIT_VOTE_PAUSE_MAX } else { RETRY_PAUSE_MAX };
            prop_assert!(pause >= VOTE_PAUSE_MIN / 2 && pause <= longest);
        }

    }
}
