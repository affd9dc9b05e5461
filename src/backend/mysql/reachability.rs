//! `Reachability`: whether connections to the server can be opened. Reports each outage once.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use crate::{
    backend::error::{NodeError, NodeErrorKind},
    observe::Observer,
    sys::{
        clock::{self, Moment},
        sync::Mutex,
    },
};

/// How long open connections must be usable, while no attempt to open one fails, until an outage
/// has ended: a server may refuse new connections only.
const RECOVERY: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct Reachability {
    server: Arc<str>,
    /// Unset until the manager has been created: its check of the server reports to nobody.
    observer: OnceLock<Arc<Observer>>,
    outage: Mutex<Option<Outage>>,
}

#[derive(Debug)]
struct Outage {
    since: Moment,
    last_failure: Moment,
}

impl Reachability {
    pub(super) fn new(server: Arc<str>) -> Reachability {
        Reachability { server, observer: OnceLock::new(), outage: Mutex::new(None) }
    }

    pub(super) fn report_to(&self, observer: Arc<Observer>) {
        let _ = self.observer.set(observer);
    }

    /// Opens a connection by `deadline`, which is less than `usual_time` ahead if the caller has
    /// little time left, and records whether that is possible. No user code runs meanwhile.
    pub(super) fn observe<T>(
        &self,
        deadline: Moment,
        usual_time: Duration,
        open: impl FnOnce() -> Result<T, NodeError>,
    ) -> Result<T, NodeError> {
        let Some(observer) = self.observer.get() else { return open() };
        observer.shield(|| {
            let is_hurried = deadline.duration_since(clock::now()) < usual_time / 2;
            let opened = open();
            match &opened {
                Ok(_) => self.end_outage(observer, |_| true),
                Err(error) if is_hurried && error.is_timeout() => {}
                Err(NodeError { kind: NodeErrorKind::Closed, .. }) => {}
                Err(error) => self.on_failure(observer, error),
            }
            opened
        })
    }

    /// Records that an open connection is usable.
    pub(super) fn on_usable(&self) {
        if let Some(observer) = self.observer.get() {
            let now = clock::now();
            self.end_outage(observer, |outage| now.duration_since(outage.last_failure) >= RECOVERY);
        }
    }

    fn on_failure(&self, observer: &Observer, error: &NodeError) {
        let now = clock::now();
        {
            let mut outage = self.outage.lock();
            if let Some(outage) = &mut *outage {
                outage.last_failure = now;
                return;
            }
            *outage = Some(Outage { since: now, last_failure: now });
        }
        let has_replied = matches!(error.kind, NodeErrorKind::Refused { .. });
        observer.node_down();
        observer.unreachable(&self.server, has_replied, &error.kind.to_string());
    }

    fn end_outage(&self, observer: &Observer, has_ended: impl FnOnce(&Outage) -> bool) {
        let Some(outage) = self.outage.lock().take_if(|outage| has_ended(outage)) else { return };
        observer.node_up();
        observer.reconnected(&self.server, clock::now().duration_since(outage.since), true);
    }
}
