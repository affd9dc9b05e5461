//! `Trouble`: why the lock was not renewed the last time, for the sentence with which its command is ended.

use std::sync::Arc;

use distlock::{HandleEvent, RenewalFailedEvent, RenewedEvent};
use parking_lot::Mutex;

#[derive(Clone, Debug, Default)]
pub(super) struct Trouble(Arc<Mutex<Option<String>>>);

impl Trouble {
    /// As part of a sentence, if anything is known.
    pub(super) fn why(&self) -> Option<String> {
        self.0.lock().clone()
    }

    fn set(&self, why: Option<String>) {
        *self.0.lock() = why;
    }
}

impl HandleEvent for Trouble {
    fn renewed(&self, _: &RenewedEvent<'_>) {
        self.set(None);
    }

    fn renewal_failed(&self, event: &RenewalFailedEvent<'_>) {
        self.set(Some(event.why().to_owned()));
    }
}
