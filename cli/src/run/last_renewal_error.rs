//! `LastRenewalError`: why the last renewal failed, for the message when the command is ended.

use std::sync::Arc;

use distlock::{HandleEvent, RenewalFailedEvent, RenewedEvent};
use parking_lot::Mutex;

/// The error of the last renewal, or `None` if it succeeded.
#[derive(Clone, Debug, Default)]
pub(super) struct LastRenewalError(Arc<Mutex<Option<String>>>);

impl LastRenewalError {
    /// The error, as part of a message.
    pub(super) fn message(&self) -> Option<String> {
        self.0.lock().clone()
    }

    fn set(&self, why: Option<String>) {
        *self.0.lock() = why;
    }
}

impl HandleEvent for LastRenewalError {
    fn renewed(&self, _: &RenewedEvent<'_>) {
        self.set(None);
    }

    fn renewal_failed(&self, event: &RenewalFailedEvent<'_>) {
        self.set(Some(event.why().to_owned()));
    }
}
