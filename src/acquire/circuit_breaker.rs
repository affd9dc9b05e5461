//! `CircuitBreaker`: while the servers are unreachable, calls fail at once, except for one probe at
//! a time. The caller passes the time.

use std::time::Duration;

use parking_lot::Mutex;

use crate::{backend::error::BackendError, sys::clock::Moment};

/// Pause after a failed probe: as long as the outage has lasted, within these bounds.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(crate) struct CircuitBreaker(Mutex<Option<Outage>>);

#[derive(Debug)]
struct Outage {
    since: Moment,
    probe_at: Moment,
    /// Longest timeout of a failed request. A call that gives the servers more may succeed.
    timeout: Duration,
    reason: BackendError,
}

impl CircuitBreaker {
    /// Returns why a call must fail at once. Otherwise the call may ask. With a `probe_time`, it
    /// does so now, and is the only probe of unreachable servers for that time, unless it ends
    /// earlier.
    pub(super) fn reject(
        &self,
        now: Moment,
        timeout: Duration,
        probe_time: Option<Duration>,
    ) -> Option<BackendError> {
        let mut outage = self.0.lock();
        let outage = outage.as_mut().filter(|outage| timeout <= outage.timeout)?;
        if now < outage.probe_at {
            return Some(outage.reason.clone());
        }
        if let Some(probe_time) = probe_time {
            outage.probe_at = now.saturating_add(probe_time);
        }
        None
    }

    /// Whether the servers are known to be unreachable, so that the next failure ends any call.
    pub(super) fn is_open(&self) -> bool {
        self.0.lock().is_some()
    }

    /// Records that a request with this timeout failed.
    pub(super) fn on_failure(&self, now: Moment, timeout: Duration, reason: &BackendError) {
        if !reason.is_outage() {
            // Servers that refuse a request are there. An exhausted pool says nothing about them.
            if !reason.is_pool_exhausted() {
                self.on_reply();
            }
            return;
        }
        let mut outage = self.0.lock();
        let (since, longest) = outage
            .as_ref()
            .map_or((now, timeout), |outage| (outage.since, outage.timeout.max(timeout)));
        let pause = now.duration_since(since).clamp(PAUSE_MIN, PAUSE_MAX);
        let (probe_at, reason) = (now.saturating_add(pause), reason.clone());
        *outage = Some(Outage { since, probe_at, timeout: longest, reason });
    }

    /// Records a usable reply: the servers are there.
    pub(super) fn on_reply(&self) {
        *self.0.lock() = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::error::{NodeError, NodeErrorKind};

    const SECOND: Duration = Duration::from_secs(1);

    fn at(millis: u64) -> Moment {
        Moment::from_nanos(millis * 1_000_000)
    }

    fn timed_out() -> BackendError {
        BackendError::Node(NodeError::outcome_unknown(NodeErrorKind::TimedOut))
    }

    /// Fault: N147
    #[test]
    fn one_probe_at_a_time_passes_an_open_breaker() {
        let breaker = CircuitBreaker::default();
        let rejects = |now| breaker.reject(at(now), SECOND, Some(2 * SECOND)).is_some();
        assert!(!rejects(0) && !breaker.is_open());
        breaker.on_failure(at(1000), SECOND, &timed_out());
        assert!(breaker.is_open() && rejects(1000) && rejects(1019));
        assert!(breaker.reject(at(1020), SECOND, None).is_none(), "it does not ask yet");
        assert!(!rejects(1020) && rejects(1021) && rejects(3019), "one probe");
        assert!(!rejects(3020), "the probe has ended without a reply");
        for (failed, pause) in [(3100, 1000), (1300, 300), (9000, 1000)] {
            // A shorter timeout says no less about the outage.
            breaker.on_failure(at(failed), SECOND / 2, &timed_out());
            assert!(rejects(failed + pause - 1) && !rejects(failed + pause), "{failed}");
        }
        let patient = breaker.reject(at(9000), 2 * SECOND, Some(SECOND));
        assert!(patient.is_none(), "a longer timeout may succeed");
        breaker.on_reply();
        assert!(!rejects(9000) && !breaker.is_open());
    }

    /// Fault: N147
    #[test]
    fn only_a_reply_closes_the_breaker() {
        let breaker = CircuitBreaker::default();
        let exhausted = NodeErrorKind::PoolExhausted { pool_size: 1 };
        let refused = NodeError::refused("OOM".into(), "command not allowed".into());
        for (error, leaves_open) in [(NodeError::not_applied(exhausted), true), (refused, false)] {
            breaker.on_failure(at(0), SECOND, &timed_out());
            breaker.on_failure(at(1), SECOND, &BackendError::Node(error));
            assert_eq!(breaker.is_open(), leaves_open);
        }
    }
}
