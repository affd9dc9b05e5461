//! An event handler that records all events.

use std::{sync::Arc, thread};

use distlock::{
    AcquiredEvent, AttemptedEvent, Config, ContendedEvent, FailedEvent, HandleEvent, LostEvent,
    ReconnectedEvent, RedisMgr, ReleasedEvent, RenewalFailedEvent, RenewalOverdueEvent,
    RenewedEvent, RetryingEvent, ServerChangedEvent, TimedOutEvent,
};
use parking_lot::Mutex;

use crate::support::{TEST_TIMEOUT, eventually_some};

/// Records each event as a line, together with the name of the thread that reported it.
#[derive(Debug, Default)]
pub(super) struct Recorder {
    lines: Mutex<Vec<(String, Option<String>)>>,
}

impl Recorder {
    fn record(&self, line: String) {
        self.lines.lock().push((line, thread::current().name().map(str::to_owned)));
    }

    pub(super) fn clear(&self) {
        self.lines.lock().clear();
    }

    pub(super) fn lines(&self) -> Vec<String> {
        self.lines.lock().iter().map(|(line, _)| line.clone()).collect()
    }

    /// Waits for an event whose line starts with `prefix`, and returns the first one.
    #[track_caller]
    pub(super) fn expect(&self, prefix: &str) -> String {
        let found = || self.lines().into_iter().find(|line| line.starts_with(prefix));
        eventually_some(&format!("event {prefix:?} after {:?}", self.lines()), TEST_TIMEOUT, found)
    }

    pub(super) fn count(&self, prefix: &str) -> usize {
        self.lines().iter().filter(|line| line.starts_with(prefix)).count()
    }

    /// The names of the threads that reported events whose line starts with `prefix`.
    pub(super) fn threads(&self, prefix: &str) -> Vec<Option<String>> {
        let lines = self.lines.lock();
        lines
            .iter()
            .filter(|(line, _)| line.starts_with(prefix))
            .map(|(_, thread)| thread.clone())
            .collect()
    }
}

impl HandleEvent for Recorder {
    fn attempted(&self, event: &AttemptedEvent<'_>) {
        self.record(format!("attempted {} {} {:?}", event.lock(), event.id(), event.wait()));
    }

    fn contended(&self, event: &ContendedEvent<'_>) {
        self.record(format!(
            "contended {} {} by {}",
            event.lock(),
            event.id(),
            event.holder().id()
        ));
    }

    fn acquired(&self, event: &AcquiredEvent<'_>) {
        assert!(event.waited() < TEST_TIMEOUT);
        let contended = event.contended();
        self.record(format!(
            "acquired {} {} {} contended={contended}",
            event.lock(),
            event.id(),
            event.token()
        ));
    }

    fn renewed(&self, event: &RenewedEvent<'_>) {
        assert!(event.margin() < TEST_TIMEOUT && event.took() < TEST_TIMEOUT);
        self.record(format!(
            "renewed {} {} with {} ms",
            event.lock(),
            event.id(),
            event.margin().as_millis()
        ));
    }

    fn renewal_failed(&self, event: &RenewalFailedEvent<'_>) {
        let left = event.remaining().as_millis();
        self.record(format!(
            "renewal failed {} {} with {left} ms: {}",
            event.lock(),
            event.id(),
            event.why()
        ));
    }

    fn retrying(&self, event: &RetryingEvent<'_>) {
        assert!(event.gives_up_in() < TEST_TIMEOUT);
        let (lock, server) = (event.lock(), event.server());
        self.record(format!("retrying {lock} {} {server}: {}", event.id(), event.why()));
    }

    fn renewal_overdue(&self, event: &RenewalOverdueEvent<'_>) {
        self.record(format!(
            "renewal overdue {} {} with {} ms",
            event.lock(),
            event.id(),
            event.remaining().as_millis()
        ));
    }

    fn lost(&self, event: &LostEvent<'_>) {
        assert!(event.held() < TEST_TIMEOUT);
        self.record(format!(
            "lost {} {} {}: {}",
            event.lock(),
            event.id(),
            event.token(),
            event.why()
        ));
    }

    fn released(&self, event: &ReleasedEvent<'_>) {
        assert!(event.held() < TEST_TIMEOUT);
        let confirmed = event.confirmed();
        self.record(format!(
            "released {} {} {} confirmed={confirmed}",
            event.lock(),
            event.id(),
            event.token()
        ));
    }

    fn timed_out(&self, event: &TimedOutEvent<'_>) {
        assert!(event.waited() < TEST_TIMEOUT);
        let holder = event.holder().map_or("an unknown holder", |holder| holder.id());
        self.record(format!("timed out {} {} by {holder}", event.lock(), event.id()));
    }

    fn failed(&self, event: &FailedEvent<'_>) {
        assert!(event.waited() < TEST_TIMEOUT && !event.error().is_contended());
        self.record(format!("failed {} {}: {}", event.lock(), event.id(), event.error()));
    }

    fn reconnected(&self, event: &ReconnectedEvent<'_>) {
        assert!(event.away() < TEST_TIMEOUT);
        self.record(format!("reconnected {}", event.server()));
    }

    fn server_changed(&self, event: &ServerChangedEvent<'_>) {
        let quarantined = event.quarantine().is_some();
        self.record(format!(
            "changed {} replaced={} quarantined={quarantined}",
            event.server(),
            event.replaced()
        ));
    }
}

/// A manager whose events are recorded.
pub(super) fn recorded(config: Config) -> (Arc<Recorder>, RedisMgr) {
    let recorder = Arc::new(Recorder::default());
    let mgr = RedisMgr::new(config.event_handler(recorder.clone())).unwrap();
    (recorder, mgr)
}
