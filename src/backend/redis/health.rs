//! `ConnectGate`: tracks the attempts to connect to a node, so that only some callers wait for a
//! node that accepts no connections.

use std::time::Duration;

use parking_lot::Mutex;

use crate::sys::clock::Moment;

#[derive(Debug)]
pub(super) struct ConnectGate(Mutex<ConnectAttempts>);

#[derive(Debug)]
struct ConnectAttempts {
    /// Number of attempts in progress.
    in_progress: u32,
    /// Time since which attempts have been in progress and none has succeeded.
    no_success_since: Moment,
    /// Start of the last attempt.
    last_begun: Moment,
}

/// One attempt to connect, in progress until it is dropped.
pub(super) struct Connecting<'a>(&'a ConnectGate);

impl Default for ConnectGate {
    fn default() -> ConnectGate {
        let never = Moment::from_nanos(0);
        ConnectGate(Mutex::new(ConnectAttempts {
            in_progress: 0,
            no_success_since: never,
            last_begun: never,
        }))
    }
}

impl ConnectGate {
    pub(super) fn begin(&self, now: Moment) -> Connecting<'_> {
        let mut attempts = self.0.lock();
        if attempts.in_progress == 0 {
            attempts.no_success_since = now;
        }
        attempts.last_begun = now;
        attempts.in_progress += 1;
        Connecting(self)
    }

    /// Records that an attempt succeeded.
    pub(super) fn record_success(&self, now: Moment) {
        self.0.lock().no_success_since = now;
    }

    /// Whether attempts have been in progress for at least `patience` without success. Returns
    /// false if the last attempt began at least `pause` ago, so that another caller tries from time
    /// to time.
    pub(super) fn is_stalled(&self, now: Moment, patience: Duration, pause: Duration) -> bool {
        let attempts = self.0.lock();
        attempts.in_progress > 0
            && now.duration_since(attempts.no_success_since) >= patience
            && now.duration_since(attempts.last_begun) < pause
    }
}

impl Drop for Connecting<'_> {
    fn drop(&mut self) {
        self.0.0.lock().in_progress -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STALLED_AFTER: Duration = Duration::from_nanos(10);
    const PAUSE: Duration = Duration::from_nanos(30);

    /// Fault: N60
    #[test]
    fn connect_gate_stalls_without_success() {
        let at = Moment::from_nanos;
        let gate = ConnectGate::default();
        let is_stalled = |now| gate.is_stalled(at(now), STALLED_AFTER, PAUSE);
        assert!(!is_stalled(100), "no attempt is in progress");
        let first = gate.begin(at(100));
        assert!(!is_stalled(109) && is_stalled(110));
        let second = gate.begin(at(107));
        drop(first);
        assert!(is_stalled(110), "the second attempt is still in progress");
        gate.record_success(at(111));
        assert!(!is_stalled(120) && is_stalled(121));
        drop(second);
        assert!(!is_stalled(121), "no attempt is in progress any more");
        let third = gate.begin(at(200));
        assert!(!is_stalled(209) && is_stalled(210));
        drop(third);
    }

    /// Fault: N60
    #[test]
    fn connect_gate_admits_another_attempt_after_pause() {
        let at = Moment::from_nanos;
        let gate = ConnectGate::default();
        let is_stalled = |now| gate.is_stalled(at(now), STALLED_AFTER, PAUSE);
        let _first = gate.begin(at(100));
        assert!(is_stalled(129) && !is_stalled(130));
        let _second = gate.begin(at(130));
        assert!(is_stalled(130), "the first attempt has been in progress for long enough");
    }
}
