//! When a waiter looks again by itself. Pure.
//!
//! A release hands the lock over without any of this. Looking is for what comes without a message: a holder that died,
//! a key that somebody deleted, a client that releases without handing over, a place in the line that was lost.

use std::time::Duration;

use crate::{clock::Moment, holder::Holder};

/// How soon the head of the line looks again although nothing points to it; others the later, the further back.
const PACE: Duration = Duration::from_millis(500);
/// The same behind a holder that is not of this library, and will hand over to nobody.
const PACE_FOREIGN: Duration = Duration::from_millis(50);
/// The head looks this soon after the holder's key must have expired, each further one a step later.
const AFTER_EXPIRY: Duration = Duration::from_millis(5);
const STEP: Duration = Duration::from_millis(25);
/// No pause is longer: it bounds how far two clocks drift apart between readings, and keeps the queue from expiring.
pub(crate) const PAUSE_MAX: Duration = Duration::from_secs(10);
/// Pause before an ask that failed is repeated; doubled with each failure.
const RETRY_MIN: Duration = Duration::from_millis(10);
pub(crate) const RETRY_MAX: Duration = Duration::from_millis(500);
/// The same before votes are asked for again.
const VOTE_MIN: Duration = Duration::from_micros(250);
const VOTE_MAX: Duration = Duration::from_millis(64);
/// How long to wait until what a lost vote had won has been given back: as long as the vote took, a few times over.
const GIVE_BACK_MIN: Duration = Duration::from_millis(100);
const GIVE_BACK_MAX: Duration = Duration::from_millis(500);

/// What a waiter saw when it last looked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sight {
    at: Moment,
    expires_in: Option<Duration>,
    foreign: bool,
    position: u64,
}

impl Sight {
    pub(crate) fn new(at: Moment, holder: &Holder, position: u64) -> Sight {
        Sight { at, expires_in: holder.ttl_left(), foreign: holder.lock_id().is_none(), position }
    }

    /// When to look again. `dice` is any number; it spreads waiters that would look at once.
    pub(crate) fn next_look(&self, dice: u64) -> Moment {
        let position = u32::try_from(self.position).unwrap_or(u32::MAX);
        let pace = if self.foreign { PACE_FOREIGN } else { PACE };
        let mut pause = pace.saturating_mul(position.saturating_add(1));
        if let Some(left) = self.expires_in {
            pause = pause.min(left.saturating_add(AFTER_EXPIRY).saturating_add(STEP.saturating_mul(position)));
        }
        self.at.saturating_add(spread(pause.min(PAUSE_MAX), dice))
    }
}

/// The pause after `failures` failures in a row.
pub(crate) fn retry_pause(failures: u32, longest: Duration, dice: u64) -> Duration {
    spread(RETRY_MIN.saturating_mul(1 << failures.min(10)).min(longest), dice)
}

/// The pause before votes are asked for again, after they were lost `losses` times in a row. Half of it is chance, so
/// that those who took them from each other do not meet again. Where nobody has a quorum the next one may have it soon.
pub(crate) fn vote_pause(losses: u32, split: bool, dice: u64) -> Duration {
    let longest = if split { VOTE_MAX } else { RETRY_MAX };
    let pause = VOTE_MIN.saturating_mul(1 << losses.clamp(1, 11)).min(longest);
    pause / 2 + pause / 2000 * u32::try_from(scramble(dice) % 1000).unwrap_or(0)
}

/// The pause between tries of a waiter that cannot be told of a grant, because it has no subscription.
pub(crate) fn poll_pause(dice: u64) -> Duration {
    spread(Duration::from_millis(100), dice)
}

/// Until when to wait for nodes to confirm what is given back to them at `now`, after an ask that began at `asked`. Never
/// longer than the call may take: what is not confirmed then is seen to in the background.
pub(crate) fn give_back_until(asked: Moment, now: Moment, hard_limit: Moment) -> Moment {
    now.saturating_add((now.after(asked) * 4).clamp(GIVE_BACK_MIN, GIVE_BACK_MAX)).min(hard_limit)
}

/// How much of the time that is left the next node gets to let us subscribe, of so many, when some were tried in vain. The first is
/// the one that all clients prefer, and may be far away; but one that does not answer must leave time to the others.
pub(crate) fn share(left: Duration, tried: usize, nodes: usize) -> Duration {
    let among = if tried == 0 { nodes.min(2) } else { nodes.saturating_sub(tried).max(1) };
    left / u32::try_from(among).unwrap_or(u32::MAX)
}

/// How often a waiter behind another one of its process makes sure that there is still one in front.
pub(crate) fn tick(dice: u64) -> Duration {
    spread(Duration::from_secs(1), dice)
}

/// Up to a tenth longer, never shorter: an expiry must not be looked for before it.
fn spread(pause: Duration, dice: u64) -> Duration {
    pause.saturating_add(pause / 1000 * u32::try_from(scramble(dice) % 100).unwrap_or(0))
}

/// Neighbouring numbers become unrelated ones (the finisher of splitmix64).
fn scramble(dice: u64) -> u64 {
    let mut x = dice.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::generate_lock_id;
    use proptest::prelude::*;

    const START: Moment = Moment::from_nanos(1_000_000_000);

    fn sight(pttl_ms: i64, position: u64, foreign: bool) -> Sight {
        let id = if foreign { "lock_42".to_owned() } else { generate_lock_id().to_string() };
        Sight::new(START, &Holder::reported(id.as_bytes(), pttl_ms, 0, 0, 0), position)
    }

    fn pause(sight: Sight, dice: u64) -> Duration {
        sight.next_look(dice).after(START)
    }

    #[test]
    fn the_first_node_has_half_of_the_time_to_let_us_subscribe_and_the_others_share_the_rest() {
        let shares = |nodes| {
            let mut left = 24;
            let next = |tried| {
                let share = share(Duration::from_secs(left), tried, nodes).as_secs();
                left -= share;
                share
            };
            (0..nodes).map(next).collect::<Vec<_>>()
        };
        assert_eq!(shares(1), [24]);
        assert_eq!(shares(2), [12, 12]);
        assert_eq!(shares(3), [12, 6, 6]);
        assert_eq!(shares(5), [12, 3, 3, 3, 3]);
        // Who was refused at once leaves its time to the next.
        assert_eq!(share(Duration::from_secs(24), 2, 3), Duration::from_secs(24));
    }

    #[test]
    fn the_head_looks_just_after_the_holder_can_have_expired() {
        let pause = pause(sight(300, 0, false), 7);
        assert!(pause >= Duration::from_millis(305) && pause < Duration::from_millis(340), "{pause:?}");
    }

    #[test]
    fn giving_back_takes_no_longer_than_the_call() {
        let at = |millis| START.saturating_add(Duration::from_millis(millis));
        assert_eq!(give_back_until(START, at(1), Moment::NEVER), at(101));
        assert_eq!(give_back_until(START, at(50), Moment::NEVER), at(250));
        assert_eq!(give_back_until(START, at(900), Moment::NEVER), at(1400));
        assert_eq!(give_back_until(START, at(900), at(1000)), at(1000));
        assert_eq!(give_back_until(START, at(900), at(800)), at(800), "the request is sent all the same");
    }

    #[test]
    fn a_foreign_holder_is_looked_at_more_often() {
        assert!(pause(sight(30_000, 0, true), 1) < Duration::from_millis(60));
        assert!(pause(sight(30_000, 0, false), 1) >= PACE);
    }

    #[test]
    fn a_holder_without_expiry_is_looked_at_all_the_same() {
        assert!(pause(sight(-1, 0, false), 1) < Duration::from_secs(1));
    }

    #[test]
    fn five_hundred_waiters_together_ask_rarely() {
        // As if each stood for itself; in one process only the front one asks.
        let rate: f64 =
            (0..500).map(|position| 1.0 / pause(sight(30_000, position, false), position).as_secs_f64()).sum();
        assert!(rate < 70.0, "{rate} looks a second");
    }

    /// The shortest and the longest of many pauses.
    fn ends(pause: impl Fn(u64) -> Duration) -> (Duration, Duration) {
        let pauses = || (0..2_000).map(&pause);
        (pauses().min().unwrap(), pauses().max().unwrap())
    }

    #[test]
    fn who_would_come_back_at_the_same_moment_is_spread_over_a_tenth_of_the_pause() {
        for (millis, (shortest, longest)) in [
            (100, ends(poll_pause)),
            (1_000, ends(tick)),
            (80, ends(|dice| retry_pause(3, RETRY_MAX, dice))),
            (500, ends(|dice| retry_pause(u32::MAX, RETRY_MAX, dice))),
        ] {
            let whole = Duration::from_millis(millis);
            assert!(shortest >= whole && shortest < whole + whole / 100, "{shortest:?} of {whole:?}");
            assert!(longest <= whole + whole / 10 && longest > whole + whole * 9 / 100, "{longest:?} of {whole:?}");
        }
    }

    #[test]
    fn half_of_the_pause_after_a_lost_vote_is_chance() {
        let pauses = [(0, true, 500), (1, false, 500), (3, false, 2_000), (99, true, 64_000), (99, false, 500_000)];
        for (losses, split, micros) in pauses {
            let (shortest, longest) = ends(|dice| vote_pause(losses, split, dice));
            let whole = Duration::from_micros(micros);
            assert!(shortest >= whole / 2 && shortest < whole * 51 / 100, "{shortest:?} of {whole:?}");
            assert!(longest <= whole && longest > whole * 99 / 100, "{longest:?} of {whole:?}");
        }
    }

    #[test]
    fn dice_are_those_of_splitmix64() {
        // Published with the algorithm: the first numbers from two seeds.
        assert_eq!(scramble(0), 0xe220_a839_7b1d_cdaf);
        assert_eq!(scramble(1_234_567), 6_457_827_717_110_365_317);
    }

    proptest! {
        #[test]
        fn pauses_are_bounded_and_never_before_expiry(pttl in 0i64..100_000_000, position: u64, foreign: bool, dice: u64) {
            let pause = pause(sight(pttl, position, foreign), dice);
            prop_assert!(pause <= PAUSE_MAX + PAUSE_MAX / 10);
            prop_assert!(pause > Duration::ZERO);
        }

        #[test]
        fn further_back_means_later(pttl in 0i64..1_000_000, position in 0u64..1000, dice: u64) {
            prop_assert!(pause(sight(pttl, position, false), dice) <= pause(sight(pttl, position + 1, false), dice));
        }

        #[test]
        fn lost_votes_are_asked_for_again_soon_and_not_at_once(losses: u32, split: bool, dice: u64) {
            let pause = vote_pause(losses, split, dice);
            let longest = if split { VOTE_MAX } else { RETRY_MAX };
            prop_assert!(pause >= VOTE_MIN / 2 && pause <= longest);
        }

        #[test]
        fn retries_slow_down_within_bounds(failures: u32, dice: u64) {
            let pause = retry_pause(failures, RETRY_MAX, dice);
            prop_assert!(pause >= RETRY_MIN && pause <= RETRY_MAX + RETRY_MAX / 10);
        }
    }
}
