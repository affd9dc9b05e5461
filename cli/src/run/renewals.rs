//! `RenewalChange`: what the supervisor learns about the renewals of its locks, for its messages.

use crossbeam_channel::{Receiver, Sender, unbounded};
use distlock::{HandleEvent, RenewalFailedEvent, RenewalOverdueEvent, RenewedEvent};

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

/// Sends them to the supervisor.
#[derive(Debug)]
pub(super) struct RenewalHandler(Sender<RenewalChange>);

impl RenewalHandler {
    pub(super) fn new() -> (RenewalHandler, Receiver<RenewalChange>) {
        let (sender, changes) = unbounded();
        (RenewalHandler(sender), changes)
    }

    fn report(&self, change: RenewalChange) {
        // While nobody receives them, the command has ended.
        let _ = self.0.send(change);
    }
}

impl HandleEvent for RenewalHandler {
    fn renewed(&self, event: &RenewedEvent<'_>) {
        self.report(RenewalChange::Confirmed { lock: event.lock().to_owned() });
    }

    fn renewal_failed(&self, event: &RenewalFailedEvent<'_>) {
        let (lock, why) = (event.lock().to_owned(), event.why().to_owned());
        self.report(RenewalChange::Failed { lock, why });
    }

    fn renewal_overdue(&self, event: &RenewalOverdueEvent<'_>) {
        self.report(RenewalChange::Overdue { lock: event.lock().to_owned() });
    }
}
