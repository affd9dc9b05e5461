//! `Renewals`: what the supervisor learns about the renewals of its locks, for its messages.

use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender, unbounded};
use distlock::{HandleEvent, RenewalFailedEvent, RenewalOverdueEvent, RenewedEvent};
use parking_lot::Mutex;

/// The supervisor's side.
#[derive(Debug)]
pub(super) struct Renewals {
    last_error: LastError,
    pub(super) changes: Receiver<RenewalChange>,
}

/// What has happened to a renewal of the lock of this name.
#[derive(Debug)]
pub(super) enum RenewalChange {
    Failed {
        lock: String,
        why: String,
    },
    /// Neither confirmed nor refused by the time at which it should have been.
    Overdue {
        lock: String,
    },
    Confirmed {
        lock: String,
    },
}

/// The error of the last renewal, or `None` if it succeeded.
type LastError = Arc<Mutex<Option<String>>>;

/// The manager's side.
#[derive(Debug)]
pub(super) struct RenewalHandler {
    last_error: LastError,
    changes: Sender<RenewalChange>,
}

impl Renewals {
    pub(super) fn new() -> (Renewals, RenewalHandler) {
        let (sender, changes) = unbounded();
        let last_error = LastError::default();
        let handler = RenewalHandler { last_error: last_error.clone(), changes: sender };
        (Renewals { last_error, changes }, handler)
    }

    /// The error of the last renewal, as part of a message.
    pub(super) fn last_error(&self) -> Option<String> {
        self.last_error.lock().clone()
    }
}

impl RenewalHandler {
    fn report(&self, change: RenewalChange) {
        // While nobody receives them, the command has ended.
        let _ = self.changes.send(change);
    }
}

impl HandleEvent for RenewalHandler {
    fn renewed(&self, event: &RenewedEvent<'_>) {
        *self.last_error.lock() = None;
        self.report(RenewalChange::Confirmed { lock: event.lock().to_owned() });
    }

    fn renewal_failed(&self, event: &RenewalFailedEvent<'_>) {
        let (lock, why) = (event.lock().to_owned(), event.why().to_owned());
        *self.last_error.lock() = Some(why.clone());
        self.report(RenewalChange::Failed { lock, why });
    }

    fn renewal_overdue(&self, event: &RenewalOverdueEvent<'_>) {
        self.report(RenewalChange::Overdue { lock: event.lock().to_owned() });
    }
}
