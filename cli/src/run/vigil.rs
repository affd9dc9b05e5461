//! `Vigil`: when a guardian has to step in, and how much time it then has. Pure. Its wrapper reckons along, to know when it had to.

use std::time::Duration;

use super::{notice::Notice, word::Word};

/// How many words of a wrapper that is well come while a lease would run out.
const WORDS_A_LEASE: u32 = 12;

/// What a guardian knows about its wrapper. Times are since boot.
#[derive(Debug)]
pub(super) struct Vigil {
    ttl: Duration,
    notice: Notice,
    /// What may be running.
    group: Option<i32>,
    held_until: Duration,
    heard_at: Duration,
    /// The wrapper's silence means nothing.
    aside: bool,
    /// The wrapper ends the group itself, and will have killed it then.
    kills_at: Option<Duration>,
}

/// A group that has to end, and when it has to be killed.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Sentence {
    pub(super) group: i32,
    pub(super) kill_at: Duration,
}

impl Vigil {
    /// Over a wrapper that asks for its lock.
    pub(super) fn begin(ttl: Duration, grace: Duration, now: Duration) -> Vigil {
        Vigil {
            ttl,
            notice: Notice { ttl, grace },
            group: None,
            held_until: now,
            heard_at: now,
            aside: false,
            kills_at: None,
        }
    }

    pub(super) fn hear(&mut self, word: &Word, now: Duration) {
        self.heard_at = now;
        match word {
            Word::Asking(_) => {}
            Word::Group(group, until) => {
                self.group = Some(*group);
                self.held_until = *until;
                // Of a lock that was handed over, a claim window.
                self.notice.ttl = until.saturating_sub(now);
            }
            Word::HeldUntil(until) => {
                self.held_until = *until;
                self.notice.see(until.saturating_sub(now));
                self.aside = false;
            }
            Word::Pausing => self.aside = true,
            Word::Ending(at) => self.kills_at = Some(self.kills_at.map_or(*at, |before| before.min(*at))),
            Word::Over => self.group = None,
        }
    }

    /// When the wrapper's silence means that it is frozen while its lease runs out. The command then has just the time to
    /// end before others can have the lock.
    pub(super) fn alarm(&self) -> Option<Duration> {
        self.group?;
        if let Some(at) = self.kills_at {
            // It is given a moment to tell that it has done so.
            return Some(at.saturating_add(self.notice.reserve() / 2));
        }
        if self.aside {
            return None;
        }
        let patience = self.notice.ttl / (WORDS_A_LEASE / 3);
        let at = self.notice.ask_at(self.held_until).max(self.heard_at.saturating_add(patience));
        // One that is well has said by then that it ends the group, or that it has renewed.
        Some(at.min(self.held_until.saturating_sub(self.notice.reserve() / 2)))
    }

    /// The wrapper is frozen. Told once.
    pub(super) fn frozen(&mut self, now: Duration) -> Option<Sentence> {
        let group = self.group.take()?;
        Some(Sentence { group, kill_at: self.kills_at.unwrap_or_else(|| self.notice.kill_at(now, self.held_until)) })
    }

    /// The wrapper is dead. The lock has to be there until the command is gone, and is best given up at once: half of the
    /// time that is left has to do.
    pub(super) fn orphaned(&mut self, now: Duration) -> Option<Sentence> {
        let group = self.group.take()?;
        let left = self.held_until.saturating_sub(now);
        let kill_at = now.saturating_add(self.notice.grace.min(left / 2));
        Some(Sentence { group, kill_at: self.kills_at.map_or(kill_at, |at| at.min(kill_at)) })
    }

    /// When the lock is certainly over, so that nothing remains to be done about it.
    pub(super) fn end(&self, now: Duration) -> Duration {
        now.max(self.held_until).saturating_add(self.ttl)
    }
}

/// How long after one word a wrapper owes the next. The less is left, the sooner: a renewal makes that much more of it.
pub(super) fn next_word_after(remaining: Duration, ttl: Duration) -> Duration {
    let span = if remaining.is_zero() { ttl } else { remaining.min(ttl) };
    (span / WORDS_A_LEASE).max(Duration::from_millis(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// A lease of 60 s that was confirmed at 1000.
    fn vigil(grace: u64) -> Vigil {
        let mut vigil = Vigil::begin(at(60), at(grace), at(1000));
        assert_eq!(vigil.alarm(), None, "it waits for its lock, however long");
        vigil.hear(&Word::Group(7, at(1060)), at(1000));
        vigil
    }

    #[test]
    fn a_dead_wrappers_command_is_dead_before_the_lease_is_over() {
        assert_eq!(vigil(5).orphaned(at(1020)), Some(Sentence { group: 7, kill_at: at(1025) }));
        assert_eq!(vigil(500).orphaned(at(1020)), Some(Sentence { group: 7, kill_at: at(1040) }));
        assert_eq!(vigil(5).orphaned(at(2000)), Some(Sentence { group: 7, kill_at: at(2000) }));
    }

    #[test]
    fn silence_is_an_alarm_only_when_the_lease_runs_out() {
        assert_eq!(vigil(5).alarm(), Some(at(1054)));
        assert_eq!(vigil(500).alarm(), Some(at(1049)), "no more than a sixth of the lease is for the end");
        let mut vigil = vigil(5);
        vigil.hear(&Word::HeldUntil(at(1060)), at(1054));
        let late = at(1059) + Duration::from_millis(500);
        assert_eq!(
            vigil.alarm(),
            Some(late),
            "it lives, and knows that it cannot renew: the last moment for it to say so"
        );
        assert_eq!(vigil.frozen(late), Some(Sentence { group: 7, kill_at: late }));
        assert_eq!((vigil.frozen(late), vigil.alarm()), (None, None), "once");
    }

    /// A lock of 60 s that was handed over at 1000, with a claim window of 1 s.
    fn handed_over() -> Vigil {
        let mut vigil = Vigil::begin(at(60), at(5), at(900));
        vigil.hear(&Word::Group(7, at(1001)), at(1000));
        vigil
    }

    #[test]
    fn of_a_lock_that_was_handed_over_no_more_is_believed_than_was_told() {
        let mut vigil = handed_over();
        for heard in [0, 200, 600, 900].map(|ms| at(1000) + Duration::from_millis(ms)) {
            vigil.hear(&Word::HeldUntil(at(1001)), heard);
            let alarm = vigil.alarm().unwrap();
            assert!(alarm > heard && alarm > at(1000) + at(3) / 4, "it is given time to be confirmed: {alarm:?}");
            assert!(alarm < at(1001), "the command outlives its lock: {alarm:?}");
        }
        let alarm = vigil.alarm().unwrap();
        assert!(vigil.frozen(alarm).unwrap().kill_at < at(1001));
        assert!(vigil.end(alarm) >= at(1060), "it may have been confirmed, and nobody has told");
    }

    #[test]
    fn a_lock_that_was_handed_over_and_confirmed_is_as_any() {
        let mut vigil = handed_over();
        vigil.hear(&Word::HeldUntil(at(1060)), at(1000));
        assert_eq!(vigil.alarm(), Some(at(1054)));
        assert_eq!(vigil.orphaned(at(1002)), Some(Sentence { group: 7, kill_at: at(1007) }));
    }

    #[test]
    fn the_next_word_comes_before_the_last_one_is_worth_nothing() {
        for (remaining, pause) in [(at(60), at(5)), (at(12), at(1)), (at(6) / 5, at(1) / 10)] {
            assert_eq!(next_word_after(remaining, at(60)), pause);
        }
        assert_eq!(next_word_after(Duration::ZERO, at(60)), at(5), "of a lock that is lost no word is owed");
        assert_eq!(next_word_after(Duration::from_nanos(1), at(60)), Duration::from_millis(1));
    }

    #[test]
    fn a_frozen_wrappers_command_is_dead_when_the_lease_is_over() {
        assert_eq!(vigil(500).frozen(at(1050)), Some(Sentence { group: 7, kill_at: at(1059) }));
    }

    #[test]
    fn what_a_wrapper_ends_is_killed_even_if_it_freezes_meanwhile() {
        let mut vigil = vigil(5);
        for word in [Word::Ending(at(1059)), Word::Ending(at(1100)), Word::HeldUntil(at(1200)), Word::Pausing] {
            vigil.hear(&word, at(1054));
            assert_eq!(vigil.alarm(), Some(at(1059) + Duration::from_millis(500)), "the lease ends at 1060");
        }
        assert_eq!(vigil.frozen(at(1060)), Some(Sentence { group: 7, kill_at: at(1059) }));
        assert_eq!(vigil.alarm(), None);
    }

    #[test]
    fn a_wrapper_that_dies_while_it_ends_its_command_leaves_no_more_time_for_that() {
        let mut vigil = vigil(500);
        vigil.hear(&Word::Ending(at(1010)), at(1005));
        assert_eq!(vigil.orphaned(at(1006)), Some(Sentence { group: 7, kill_at: at(1010) }));
    }

    #[test]
    fn a_wrapper_that_says_so_may_be_silent() {
        for word in [Word::Pausing, Word::Over] {
            let mut vigil = vigil(5);
            vigil.hear(&word, at(1001));
            assert_eq!(vigil.alarm(), None);
            assert_eq!(vigil.orphaned(at(1002)).is_some(), word != Word::Over, "it may still die");
        }
    }
}
