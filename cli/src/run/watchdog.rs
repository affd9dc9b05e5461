//! `Watchdog`: when a guardian must intervene, and how much time the command then has. Pure. The
//! wrapper keeps a copy, so that it notices when its guardian has intervened.

use std::time::Duration;

use super::{grace_period::GracePeriod, message::GuardianMessage};

/// Number of heartbeats that a running wrapper sends within one lease.
const HEARTBEATS_PER_LEASE: u32 = 12;

/// What a guardian knows about its wrapper. Times are since boot.
#[derive(Debug)]
pub(super) struct Watchdog {
    ttl: Duration,
    grace_period: GracePeriod,
    /// Process group of the command, while it may be running.
    group: Option<i32>,
    held_until: Duration,
    last_message_at: Duration,
    /// The wrapper has announced that it stops itself.
    paused: bool,
    /// Time at which the wrapper will send SIGKILL to the group itself, if it has announced that.
    kill_at: Option<Duration>,
}

/// A group that must end, and the time for SIGKILL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct KillOrder {
    pub(super) group: i32,
    pub(super) kill_at: Duration,
}

impl Watchdog {
    /// Creates the watchdog of a wrapper that is about to request its lock.
    pub(super) fn new(ttl: Duration, grace: Duration, now: Duration) -> Watchdog {
        Watchdog {
            ttl,
            grace_period: GracePeriod::new(ttl, grace),
            group: None,
            held_until: now,
            last_message_at: now,
            paused: false,
            kill_at: None,
        }
    }

    pub(super) fn on_message(&mut self, message: &GuardianMessage, now: Duration) {
        self.last_message_at = now;
        match message {
            GuardianMessage::Acquiring(_) => {}
            GuardianMessage::Started(group, until) => {
                self.group = Some(*group);
                self.held_until = *until;
                self.grace_period.start(until.saturating_sub(now));
            }
            GuardianMessage::HeldUntil(until) => {
                self.held_until = *until;
                self.grace_period.extend(until.saturating_sub(now));
                self.paused = false;
            }
            GuardianMessage::Paused => self.paused = true,
            GuardianMessage::Terminating(at) => {
                self.kill_at = Some(self.kill_at.map_or(*at, |before| before.min(*at)))
            }
            GuardianMessage::Done => self.group = None,
        }
    }

    /// Time at which the wrapper counts as frozen unless it sends a message first. The command then
    /// still has just enough time to end before the lease expires.
    pub(super) fn deadline(&self) -> Option<Duration> {
        self.group?;
        if let Some(at) = self.kill_at {
            // A wrapper that has killed the group needs a moment to report that it is gone.
            return Some(at.saturating_add(self.grace_period.kill_margin() / 2));
        }
        if self.paused {
            return None;
        }
        let silence_max = self.grace_period.lease() / (HEARTBEATS_PER_LEASE / 3);
        let at = self
            .grace_period
            .term_at(self.held_until)
            .max(self.last_message_at.saturating_add(silence_max));
        // By then, a running wrapper has reported a renewal, or that it terminates the group.
        Some(at.min(self.held_until.saturating_sub(self.grace_period.kill_margin() / 2)))
    }

    /// Handles a frozen wrapper. Returns the group to kill, but only once.
    pub(super) fn on_frozen(&mut self, now: Duration) -> Option<KillOrder> {
        let group = self.group.take()?;
        Some(KillOrder {
            group,
            kill_at: self
                .kill_at
                .unwrap_or_else(|| self.grace_period.kill_at(now, self.held_until)),
        })
    }

    /// Handles a dead wrapper. The lock must last until the command is gone, but is not renewed any
    /// more, so the group has at most half of the remaining lease. Returns the group to kill, but
    /// only once.
    pub(super) fn on_dead(&mut self, now: Duration) -> Option<KillOrder> {
        let group = self.group.take()?;
        let left = self.held_until.saturating_sub(now);
        let kill_at = now.saturating_add(self.grace_period.grace.min(left / 2));
        Some(KillOrder { group, kill_at: self.kill_at.map_or(kill_at, |at| at.min(kill_at)) })
    }

    /// Time at which the lock has certainly expired. Waiting any longer for the command to end is
    /// pointless.
    pub(super) fn lock_gone_at(&self, now: Duration) -> Duration {
        now.max(self.held_until).saturating_add(self.ttl)
    }
}

/// Time until the wrapper's next heartbeat. It is short if little of the lease is left, so that the
/// guardian soon learns of a renewal.
pub(super) fn next_heartbeat_after(remaining: Duration, ttl: Duration) -> Duration {
    let span = if remaining.is_zero() { ttl } else { remaining.min(ttl) };
    (span / HEARTBEATS_PER_LEASE).max(Duration::from_millis(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// Watchdog of a wrapper whose lease of 60 s was confirmed at 1000 s.
    fn watchdog(grace: u64) -> Watchdog {
        let mut watchdog = Watchdog::new(at(60), at(grace), at(1000));
        assert_eq!(watchdog.deadline(), None, "a wait for the lock has no deadline");
        watchdog.on_message(&GuardianMessage::Started(7, at(1060)), at(1000));
        watchdog
    }

    #[test]
    fn dead_wrappers_command_is_killed_within_lease() {
        assert_eq!(watchdog(5).on_dead(at(1020)), Some(KillOrder { group: 7, kill_at: at(1025) }));
        assert_eq!(
            watchdog(500).on_dead(at(1020)),
            Some(KillOrder { group: 7, kill_at: at(1040) })
        );
        assert_eq!(watchdog(5).on_dead(at(2000)), Some(KillOrder { group: 7, kill_at: at(2000) }));
    }

    #[test]
    fn silence_sets_deadline_only_near_end_of_lease() {
        assert_eq!(watchdog(5).deadline(), Some(at(1054)));
        assert_eq!(
            watchdog(500).deadline(),
            Some(at(1049)),
            "the grace period is at most a sixth of the lease"
        );
        let mut watchdog = watchdog(5);
        watchdog.on_message(&GuardianMessage::HeldUntil(at(1060)), at(1054));
        let late = at(1059) + Duration::from_millis(500);
        assert_eq!(
            watchdog.deadline(),
            Some(late),
            "a running wrapper must report by then that it cannot renew"
        );
        assert_eq!(watchdog.on_frozen(late), Some(KillOrder { group: 7, kill_at: late }));
        assert_eq!((watchdog.on_frozen(late), watchdog.deadline()), (None, None), "only once");
    }

    /// The wrapper sends its heartbeats by the ttl.
    ///
    /// Fault: N206
    #[test]
    fn silence_after_a_period_is_judged_by_the_ttl() {
        let mut watchdog = Watchdog::new(at(60), at(500), at(1000));
        watchdog.on_message(&GuardianMessage::Started(7, at(1300)), at(1000));
        assert_eq!(watchdog.deadline(), Some(at(1289)), "the period keeps the lock until 1300");
        // Renewals have begun to move the end.
        watchdog.on_message(&GuardianMessage::HeldUntil(at(1340)), at(1300));
        assert_eq!(watchdog.deadline(), Some(at(1329)));
    }

    /// Watchdog of a wrapper that was handed a lock of 60 s at 1000 s, with a claim window of 1 s.
    fn handed_over() -> Watchdog {
        let mut watchdog = Watchdog::new(at(60), at(5), at(900));
        watchdog.on_message(&GuardianMessage::Started(7, at(1001)), at(1000));
        watchdog
    }

    #[test]
    fn granted_lock_is_valid_for_claim_window_only() {
        let mut watchdog = handed_over();
        for sent_at in [0, 200, 600, 900].map(|ms| at(1000) + Duration::from_millis(ms)) {
            watchdog.on_message(&GuardianMessage::HeldUntil(at(1001)), sent_at);
            let deadline = watchdog.deadline().unwrap();
            assert!(
                deadline > sent_at && deadline > at(1000) + at(3) / 4,
                "too little time to confirm the grant: {deadline:?}"
            );
            assert!(deadline < at(1001), "the command outlives its lock: {deadline:?}");
        }
        let deadline = watchdog.deadline().unwrap();
        assert!(watchdog.on_frozen(deadline).unwrap().kill_at < at(1001));
        assert!(
            watchdog.lock_gone_at(deadline) >= at(1060),
            "the grant may have been confirmed without a report to the guardian"
        );
    }

    #[test]
    fn confirmed_grant_has_full_lease() {
        let mut watchdog = handed_over();
        watchdog.on_message(&GuardianMessage::HeldUntil(at(1060)), at(1000));
        assert_eq!(watchdog.deadline(), Some(at(1054)));
        assert_eq!(watchdog.on_dead(at(1002)), Some(KillOrder { group: 7, kill_at: at(1007) }));
    }

    #[test]
    fn heartbeat_comes_before_previous_one_expires() {
        for (remaining, pause) in [(at(60), at(5)), (at(12), at(1)), (at(6) / 5, at(1) / 10)] {
            assert_eq!(next_heartbeat_after(remaining, at(60)), pause);
        }
        assert_eq!(
            next_heartbeat_after(Duration::ZERO, at(60)),
            at(5),
            "a lost lock needs no early heartbeat"
        );
        assert_eq!(next_heartbeat_after(Duration::from_nanos(1), at(60)), Duration::from_millis(1));
    }

    #[test]
    fn frozen_wrappers_command_is_killed_within_lease() {
        assert_eq!(
            watchdog(500).on_frozen(at(1050)),
            Some(KillOrder { group: 7, kill_at: at(1059) })
        );
    }

    #[test]
    fn announced_kill_happens_if_wrapper_freezes() {
        let mut watchdog = watchdog(5);
        for message in [
            GuardianMessage::Terminating(at(1059)),
            GuardianMessage::Terminating(at(1100)),
            GuardianMessage::HeldUntil(at(1200)),
            GuardianMessage::Paused,
        ] {
            watchdog.on_message(&message, at(1054));
            assert_eq!(
                watchdog.deadline(),
                Some(at(1059) + Duration::from_millis(500)),
                "half of the kill margin after the announced SIGKILL"
            );
        }
        assert_eq!(watchdog.on_frozen(at(1060)), Some(KillOrder { group: 7, kill_at: at(1059) }));
        assert_eq!(watchdog.deadline(), None);
    }

    #[test]
    fn announced_kill_is_not_delayed_if_wrapper_dies() {
        let mut watchdog = watchdog(500);
        watchdog.on_message(&GuardianMessage::Terminating(at(1010)), at(1005));
        assert_eq!(watchdog.on_dead(at(1006)), Some(KillOrder { group: 7, kill_at: at(1010) }));
    }

    #[test]
    fn announced_silence_sets_no_deadline() {
        for message in [GuardianMessage::Paused, GuardianMessage::Done] {
            let mut watchdog = watchdog(5);
            watchdog.on_message(&message, at(1001));
            assert_eq!(watchdog.deadline(), None);
            assert_eq!(
                watchdog.on_dead(at(1002)).is_some(),
                message != GuardianMessage::Done,
                "a paused wrapper may still die"
            );
        }
    }
}
