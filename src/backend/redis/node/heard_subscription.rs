//! `HeardSubscription`: whether the server is known to have our subscription, so that a waiter need
//! not ask for that when it joins the queue. Pure.
//!
//! *Invariant*: an open connection never leads to another server. So what one request has learned
//! about the subscription holds for all requests, until a connection is opened: for more requests,
//! after one has broken, or for another subscription.

use std::sync::atomic::{AtomicU64, Ordering};

const NEVER: u64 = u64::MAX;

#[derive(Debug)]
pub(crate) struct HeardSubscription {
    /// Number of connections that were opened.
    opened: AtomicU64,
    /// This number when a request was sent that found the subscription.
    heard_at: AtomicU64,
}

impl Default for HeardSubscription {
    fn default() -> HeardSubscription {
        HeardSubscription { opened: AtomicU64::new(0), heard_at: AtomicU64::new(NEVER) }
    }
}

impl HeardSubscription {
    pub(super) fn on_connection_opened(&self) {
        self.opened.fetch_add(1, Ordering::AcqRel);
    }

    /// Returns what [`record`](Self::record) needs. Call this before sending the request.
    pub(crate) fn opened(&self) -> u64 {
        self.opened.load(Ordering::Acquire)
    }

    /// Whether a request would find the subscription.
    pub(crate) fn is_known(&self) -> bool {
        self.heard_at.load(Ordering::Acquire) == self.opened()
    }

    /// Records whether a request that was sent after `opened` connections found the subscription.
    pub(crate) fn record(&self, opened: u64, is_heard: bool) {
        self.heard_at.store(if is_heard { opened } else { NEVER }, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_new_connection_may_lead_elsewhere() {
        let heard = HeardSubscription::default();
        assert!(!heard.is_known());
        heard.record(heard.opened(), true);
        assert!(heard.is_known());
        heard.record(heard.opened(), false);
        assert!(!heard.is_known(), "the subscription has ended");
        let before = heard.opened();
        heard.on_connection_opened();
        heard.record(before, true);
        assert!(!heard.is_known(), "the request was sent over an older connection");
        heard.record(heard.opened(), true);
        assert!(heard.is_known());
        heard.on_connection_opened();
        assert!(!heard.is_known());
    }
}
