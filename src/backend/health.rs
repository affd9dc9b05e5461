//! `NodeHealth`: what the last exchanges with a node say about it. So callers do not wait for a
//! node that does not reply, and each outage is reported once. The caller passes the time.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;

use super::error::{NodeError, NodeErrorKind};
use crate::{observe::Observer, sys::clock::Moment};

/// Minimum back-off after a failure: the node is not asked while the others form a quorum. Doubles
/// with each further failure, up to [`BACKOFF_MAX`].
const BACKOFF_MIN: Duration = Duration::from_millis(20);
const BACKOFF_MAX: Duration = Duration::from_secs(1);
/// Number of consecutive failures after which a node is failing, and waiters move to another queue
/// node.
const FAILING_FAILURES_MIN: u32 = 3;
/// How long open sockets must carry replies, while no attempt to connect fails, until an outage has
/// ended. Where a server refuses new connections only, it is not reported again and again.
const RECOVERY: Duration = Duration::from_secs(5);

#[derive(Debug, Default)]
pub(crate) struct NodeHealth {
    state: Mutex<State>,
    /// An outage has been reported and has not ended, so that replies need not lock the state.
    is_down: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    consecutive_failures: u32,
    backoff_until: Moment,
    /// Time at which the current outage was noticed.
    down_since: Option<Moment>,
    /// First reply since the last attempt to connect failed.
    replied_at: Option<Moment>,
    /// End of the last outage.
    recovered_at: Moment,
    /// Number of attempts to connect in progress.
    connecting: u32,
    /// Time since which attempts have been in progress and none has succeeded.
    no_success_since: Moment,
    /// Start of the last attempt.
    last_begun: Moment,
}

/// One attempt to connect, in progress until it is dropped.
pub(crate) struct Connecting<'a> {
    health: &'a NodeHealth,
    begun: Moment,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConnectOutcome {
    /// The connection had a usable socket.
    WasConnected,
    Connected,
    Failed,
    /// The caller had too little time to tell whether the node is down.
    Unknown,
}

/// What is to be reported after an attempt to connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HealthChange {
    /// The node cannot be reached.
    Down,
    /// It can be reached again. If a socket has broken, and the next one opens at once, no outage
    /// was reported before.
    Up { away: Duration, was_reported: bool },
}

impl ConnectOutcome {
    /// `is_hurried` says whether the caller had less time than usual.
    pub(crate) fn of<T>(opened: &Result<T, NodeError>, is_hurried: bool) -> ConnectOutcome {
        match opened {
            Ok(_) => ConnectOutcome::Connected,
            Err(error) if is_hurried && error.is_timeout() => ConnectOutcome::Unknown,
            Err(_) => ConnectOutcome::Failed,
        }
    }
}

impl HealthChange {
    /// Reports the change, which `failure` has caused if the server is down. `is_counted` says
    /// whether the metrics count it as a server.
    pub(crate) fn report(
        self,
        observer: &Observer,
        server: &Arc<str>,
        is_counted: bool,
        failure: Option<&NodeError>,
    ) {
        match (self, failure) {
            (HealthChange::Down, Some(NodeError { kind, .. })) => {
                if is_counted {
                    observer.node_down();
                }
                let has_replied = matches!(kind, NodeErrorKind::Refused { .. });
                observer.unreachable(server, has_replied, &kind.to_string());
            }
            (HealthChange::Up { away, was_reported }, _) => {
                if was_reported && is_counted {
                    observer.node_up();
                }
                observer.reconnected(server, away, was_reported);
            }
            (HealthChange::Down, None) => {}
        }
    }
}

impl NodeHealth {
    /// Whether the node has not failed since its last reply.
    pub(crate) fn is_healthy(&self) -> bool {
        self.state.lock().consecutive_failures == 0
    }

    /// Whether the node has failed repeatedly since its last reply.
    pub(crate) fn is_failing(&self) -> bool {
        self.state.lock().consecutive_failures >= FAILING_FAILURES_MIN
    }

    /// Whether the node failed recently.
    pub(crate) fn is_backing_off(&self, now: Moment) -> bool {
        now < self.state.lock().backoff_until
    }

    /// End of the back-off.
    pub(crate) fn backoff_until(&self) -> Moment {
        self.state.lock().backoff_until
    }

    pub(crate) fn record_success(&self) {
        let mut state = self.state.lock();
        state.consecutive_failures = 0;
        state.backoff_until = Moment::from_nanos(0);
    }

    pub(crate) fn record_failure(&self, now: Moment) {
        let mut state = self.state.lock();
        let backoff = BACKOFF_MIN.saturating_mul(1 << state.consecutive_failures.min(10));
        state.backoff_until = now.saturating_add(backoff.min(BACKOFF_MAX));
        state.consecutive_failures = state.consecutive_failures.saturating_add(1);
    }

    /// Records a reply to a request that was sent at `sent`. An open socket can outlast an outage
    /// in which none could be opened. Returns what is to be reported.
    pub(crate) fn record_reply(&self, sent: Moment, now: Moment) -> Option<HealthChange> {
        if !self.is_down.load(Ordering::Relaxed) {
            return None;
        }
        let mut state = self.state.lock();
        // The reply to an earlier request may have arrived before the outage.
        state.down_since.filter(|since| *since < sent)?;
        let replied_at = *state.replied_at.get_or_insert(now);
        if now.duration_since(replied_at) < RECOVERY {
            return None;
        }
        self.end_outage(&mut state, replied_at)
    }

    fn end_outage(&self, state: &mut State, at: Moment) -> Option<HealthChange> {
        let down_since = state.down_since.take()?;
        state.recovered_at = at;
        let was_reported = self.is_down.swap(false, Ordering::Relaxed);
        Some(HealthChange::Up { away: at.duration_since(down_since), was_reported })
    }

    pub(crate) fn begin_connect(&self, now: Moment) -> Connecting<'_> {
        let mut state = self.state.lock();
        if state.connecting == 0 {
            state.no_success_since = now;
        }
        state.last_begun = now;
        state.connecting += 1;
        Connecting { health: self, begun: now }
    }

    /// Whether attempts to connect have been in progress for at least `patience` without success.
    /// Returns false if the last attempt began a while ago, so that another caller tries from time
    /// to time.
    pub(crate) fn is_connect_stalled(&self, now: Moment, patience: Duration) -> bool {
        let state = self.state.lock();
        state.connecting > 0
            && now.duration_since(state.no_success_since) >= patience
            && now.duration_since(state.last_begun) < BACKOFF_MAX
    }
}

impl Connecting<'_> {
    /// Records how the attempt ended, and when the former socket was opened if it has broken. A
    /// socket that was opened before the last outage ended belongs to that outage. Returns what is
    /// to be reported.
    pub(crate) fn end(
        self,
        now: Moment,
        outcome: ConnectOutcome,
        broken: Option<Moment>,
    ) -> Option<HealthChange> {
        let mut state = self.health.state.lock();
        if matches!(outcome, ConnectOutcome::WasConnected | ConnectOutcome::Connected) {
            state.no_success_since = now;
        }
        // A socket that the attempt itself has opened counts only by the outcome.
        let broke =
            broken.is_some_and(|opened_at| (state.recovered_at..self.begun).contains(&opened_at));
        if broke || outcome == ConnectOutcome::Failed {
            state.down_since.get_or_insert(now);
        }
        if outcome == ConnectOutcome::Failed {
            state.replied_at = None;
            let was_down = self.health.is_down.swap(true, Ordering::Relaxed);
            return (!was_down).then_some(HealthChange::Down);
        }
        if outcome != ConnectOutcome::Connected {
            return None;
        }
        self.health.end_outage(&mut state, now)
    }
}

impl Drop for Connecting<'_> {
    fn drop(&mut self) {
        self.health.state.lock().connecting -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::{ConnectOutcome::*, *};

    fn at(millis: u64) -> Moment {
        Moment::from_nanos(millis * 1_000_000)
    }

    fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn failing_node_backoff_doubles_up_to_one_second() {
        let health = NodeHealth::default();
        let backs_off_after = |millis: u64| health.is_backing_off(at(1000 + millis));
        for (failures, backoff) in (1..).zip([20, 40, 80, 160, 320, 640]) {
            health.record_failure(at(1000));
            assert!(backs_off_after(backoff - 1) && !backs_off_after(backoff), "{backoff}");
            assert_eq!((health.is_healthy(), health.is_failing()), (false, failures >= 3));
        }
        for _ in 0..100 {
            health.record_failure(at(1000));
            assert!(backs_off_after(999) && !backs_off_after(1000));
        }
        health.record_success();
        assert!(health.is_healthy() && !health.is_failing() && !backs_off_after(0));
        health.record_failure(at(1000));
        assert!(backs_off_after(19) && !backs_off_after(20));
    }

    /// Fault: N60
    #[test]
    fn connecting_is_stalled_without_success() {
        let health = NodeHealth::default();
        let is_stalled = |now| health.is_connect_stalled(at(now), ms(10));
        assert!(!is_stalled(100), "no attempt is in progress");
        let first = health.begin_connect(at(100));
        assert!(!is_stalled(109) && is_stalled(110));
        let second = health.begin_connect(at(107));
        first.end(at(108), Failed, None);
        assert!(is_stalled(110), "the second attempt is still in progress");
        let third = health.begin_connect(at(110));
        third.end(at(111), Connected, None);
        assert!(!is_stalled(120) && is_stalled(121));
        drop(second);
        assert!(!is_stalled(121), "no attempt is in progress any more");
        let _fourth = health.begin_connect(at(200));
        assert!(!is_stalled(209) && is_stalled(210));
    }

    /// Fault: N60
    #[test]
    fn stalled_node_admits_another_attempt_after_pause() {
        let health = NodeHealth::default();
        let is_stalled = |now| health.is_connect_stalled(at(now), ms(10));
        let _first = health.begin_connect(at(100));
        assert!(is_stalled(1099) && !is_stalled(1100));
        let _second = health.begin_connect(at(1100));
        assert!(is_stalled(1100), "the first attempt has been in progress for long enough");
    }

    #[test]
    fn outage_is_reported_once() {
        let health = NodeHealth::default();
        let attempt = |begun, ended, outcome, broken: Option<u64>| {
            health.begin_connect(at(begun)).end(at(ended), outcome, broken.map(at))
        };
        assert_eq!(attempt(10, 11, Connected, None), None, "there was no outage");
        let up = |away, was_reported| Some(HealthChange::Up { away: ms(away), was_reported });
        assert_eq!(attempt(100, 110, Failed, Some(11)), Some(HealthChange::Down));
        assert_eq!(attempt(120, 130, Failed, None), None);
        assert_eq!(attempt(140, 150, Connected, None), up(40, true));
        assert_eq!(attempt(160, 170, Connected, Some(11)), None, "it broke in the same outage");
        assert_eq!(attempt(200, 210, Connected, Some(150)), up(0, false), "it broke later");
        assert_eq!(attempt(220, 230, Unknown, Some(211)), None);
        assert_eq!(attempt(240, 250, Failed, None), Some(HealthChange::Down));
    }

    #[test]
    fn reply_over_an_open_socket_ends_an_outage() {
        let health = NodeHealth::default();
        assert_eq!(health.record_reply(at(10), at(11)), None, "there was no outage");
        let failed = health.begin_connect(at(100)).end(at(110), Failed, None);
        assert_eq!(failed, Some(HealthChange::Down));
        assert_eq!(health.record_reply(at(109), at(5200)), None, "it was sent before");
        assert_eq!(health.record_reply(at(120), at(130)), None, "the next attempt may fail");
        assert_eq!(health.begin_connect(at(140)).end(at(150), Failed, None), None);
        assert_eq!(health.record_reply(at(5150), at(5160)), None);
        assert_eq!(health.record_reply(at(10_158), at(10_159)), None);
        let up = HealthChange::Up { away: ms(5050), was_reported: true };
        assert_eq!(health.record_reply(at(10_159), at(10_160)), Some(up));
        assert_eq!(health.record_reply(at(16_000), at(16_001)), None, "it has been reported");
        assert_eq!(health.begin_connect(at(17_000)).end(at(17_001), Connected, None), None);
    }

    #[test]
    fn attempt_without_enough_time_is_no_outage() {
        let health = NodeHealth::default();
        let attempt = |begun, ended, outcome, broken: Option<u64>| {
            health.begin_connect(at(begun)).end(at(ended), outcome, broken.map(at))
        };
        // The socket that broke is the attempt's own.
        assert_eq!(attempt(10, 20, Unknown, Some(15)), None);
        assert_eq!(attempt(30, 40, Connected, None), None);
        // An earlier socket broke.
        assert_eq!(attempt(50, 60, Unknown, Some(40)), None);
        assert_eq!(attempt(70, 80, WasConnected, None), None);
        let up = HealthChange::Up { away: ms(35), was_reported: false };
        assert_eq!(attempt(90, 95, Connected, None), Some(up));
    }
}
