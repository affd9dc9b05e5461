//! `GracePeriod`: how long before its lock expires a command gets SIGTERM, and when it gets
//! SIGKILL. Pure. A wrapper that cannot renew and the guardian of a stopped wrapper follow the same
//! rule.

use std::time::Duration;

/// Maximum time between SIGKILL and the end of the lease, which a killed process needs to be gone
/// on a busy machine.
const KILL_MARGIN_MAX: Duration = Duration::from_secs(1);

/// How much time a command has to end. Times are since boot.
#[derive(Clone, Copy, Debug)]
pub(super) struct GracePeriod {
    /// Ttl of the lock, for which a renewal keeps it. At most this much of the time that is left
    /// counts: a lock with a period (`--at-least`) is first held for the whole period.
    ttl: Duration,
    /// For how long one confirmation keeps the lock.
    lease: Duration,
    /// Time between SIGTERM and SIGKILL, if the lease lasts that long.
    pub(super) grace: Duration,
}

impl GracePeriod {
    pub(super) fn new(ttl: Duration, grace: Duration) -> GracePeriod {
        GracePeriod { ttl, lease: ttl, grace }
    }

    /// Sets the lease of a lock that was just granted. After a hand-over, this is the claim window.
    pub(super) fn start(&mut self, remaining: Duration) {
        self.lease = remaining.min(self.ttl);
    }

    /// Accounts for a longer lease: a lock from a grant is first held for a claim window only, and
    /// for its ttl once it is confirmed.
    pub(super) fn extend(&mut self, remaining: Duration) {
        self.lease = self.lease.max(remaining.min(self.ttl));
    }

    /// For how long one confirmation keeps the lock.
    pub(super) fn lease(self) -> Duration {
        self.lease
    }

    /// The latest time for SIGTERM if the lock is held until `held_until`. The end may take a sixth
    /// of the lease at most, so that there is time to repeat a late renewal.
    pub(super) fn term_at(self, held_until: Duration) -> Duration {
        self.latest_kill_at(held_until).saturating_sub(self.grace.min(self.lease / 6))
    }

    /// The time for SIGKILL if SIGTERM is sent now.
    pub(super) fn kill_at(self, now: Duration, held_until: Duration) -> Duration {
        now.saturating_add(self.grace).min(self.latest_kill_at(held_until).max(now))
    }

    pub(super) fn kill_margin(self) -> Duration {
        KILL_MARGIN_MAX.min(self.lease / 20)
    }

    fn latest_kill_at(self, held_until: Duration) -> Duration {
        held_until.saturating_sub(self.kill_margin())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn period(ttl: u64, grace: u64) -> GracePeriod {
        GracePeriod::new(at(ttl), at(grace))
    }

    #[test]
    fn grace_is_limited_by_rest_of_lease() {
        for (grace, term_at, kill_at) in [(0, 1059, 1059), (5, 1054, 1059), (500, 1049, 1059)] {
            let period = period(60, grace);
            assert_eq!(period.term_at(at(1060)), at(term_at), "{grace}");
            assert_eq!(period.kill_at(at(term_at), at(1060)), at(kill_at), "{grace}");
        }
        assert_eq!(period(60, 5).kill_at(at(1010), at(1060)), at(1015), "no sooner than necessary");
        assert_eq!(period(60, 5).kill_at(at(1061), at(1060)), at(1061), "at once");
    }

    #[test]
    fn granted_lock_starts_with_claim_window() {
        let mut period = period(60, 5);
        period.start(at(1));
        assert!(period.term_at(at(1001)) > at(1000) + at(3) / 4);
        for remaining in [1, 60, 2] {
            period.extend(at(remaining));
        }
        assert_eq!(period.term_at(at(1060)), at(1054));
    }

    /// Renewals keep the lock for its ttl only, so a third of that may be left before each.
    ///
    /// Fault: N206
    #[test]
    fn period_gives_no_more_time_to_end_than_the_ttl() {
        for (ttl, grace) in [(1, 5), (3, 5), (30, 19), (30, 100_000)] {
            let mut period = period(ttl, grace);
            period.start(at(86_400));
            period.extend(at(80_000));
            let before = at(100_000) - period.term_at(at(100_000));
            assert!(before < at(ttl) / 4, "{ttl} {grace}: {before:?}");
        }
    }

    /// Renewals are due every third of the lease.
    #[test]
    fn late_renewal_can_be_repeated_before_sigterm() {
        for ttl in [1, 3, 30, 86_400] {
            let chance =
                period(ttl, 100_000).term_at(at(200_000)).checked_sub(at(200_000 - ttl)).unwrap();
            assert!(chance > at(ttl) * 3 / 4, "{ttl}: {chance:?}");
        }
    }
}
