//! `Notice`: how long before the end of its lock a command is asked to end, and when it is killed. Pure. One rule for a wrapper
//! that cannot renew and for the guardian of one that is frozen.

use std::time::Duration;

/// What a command that is killed, on a machine that has much to do, takes to be gone.
const RESERVE_MAX: Duration = Duration::from_secs(1);

/// What a command is given. Times are since boot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Notice {
    /// For how long the lock is held without another confirmation.
    pub(super) ttl: Duration,
    /// Between asking it to end and killing it, if the lock lasts that long.
    pub(super) grace: Duration,
}

impl Notice {
    /// A lock that was handed over is held for a claim window only, until that is confirmed.
    pub(super) fn see(&mut self, remaining: Duration) {
        self.ttl = self.ttl.max(remaining);
    }

    /// The last chance to ask a command to end under a lock that is held until then. No more than a sixth of the lease is
    /// for the end, so that a renewal that is late has time to be repeated.
    pub(super) fn ask_at(self, held_until: Duration) -> Duration {
        self.latest_kill(held_until).saturating_sub(self.grace.min(self.ttl / 6))
    }

    /// When a command that is asked now has to be killed.
    pub(super) fn kill_at(self, now: Duration, held_until: Duration) -> Duration {
        now.saturating_add(self.grace).min(self.latest_kill(held_until).max(now))
    }

    pub(super) fn reserve(self) -> Duration {
        RESERVE_MAX.min(self.ttl / 20)
    }

    fn latest_kill(self, held_until: Duration) -> Duration {
        held_until.saturating_sub(self.reserve())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn notice(ttl: u64, grace: u64) -> Notice {
        Notice { ttl: at(ttl), grace: at(grace) }
    }

    #[test]
    fn a_command_has_its_grace_or_what_the_lease_leaves_of_it() {
        for (grace, ask_at, kill_at) in [(0, 1059, 1059), (5, 1054, 1059), (500, 1049, 1059)] {
            let notice = notice(60, grace);
            assert_eq!(notice.ask_at(at(1060)), at(ask_at), "{grace}");
            assert_eq!(notice.kill_at(at(ask_at), at(1060)), at(kill_at), "{grace}");
        }
        assert_eq!(notice(60, 5).kill_at(at(1010), at(1060)), at(1015), "no sooner than it has to be");
        assert_eq!(notice(60, 5).kill_at(at(1061), at(1060)), at(1061), "at once");
    }

    #[test]
    fn a_lock_that_was_handed_over_has_a_claim_window_first() {
        let mut notice = notice(1, 5);
        assert!(notice.ask_at(at(1001)) > at(1000) + at(3) / 4);
        for remaining in [1, 60, 2] {
            notice.see(at(remaining));
        }
        assert_eq!(notice.ask_at(at(1060)), at(1054));
    }

    /// Renewals come every third of the lease.
    #[test]
    fn a_renewal_that_is_late_has_time_to_be_repeated() {
        for ttl in [1, 3, 30, 86_400] {
            let chance = notice(ttl, 100_000).ask_at(at(200_000)).checked_sub(at(200_000 - ttl)).unwrap();
            assert!(chance > at(ttl) * 3 / 4, "{ttl}: {chance:?}");
        }
    }
}
