//! `Ack`: whether an abandoned reply has arrived. Usable after the connection was returned to the
//! pool.

use std::sync::Arc;

use crate::sync::atomic::{AtomicU64, Ordering};

/// Acknowledgement of one abandoned reply: set when the reply arrives and is not an error. Never
/// set if the reply is an error, or if the connection closes first.
#[derive(Clone, Debug)]
pub(crate) struct Ack {
    acknowledged: Arc<AtomicU64>,
    number: u64,
}

impl Ack {
    pub(crate) fn is_acknowledged(&self) -> bool {
        // Relaxed, because no other data is read after it.
        self.acknowledged.load(Ordering::Relaxed) >= self.number
    }
}

/// Issues the acks of one connection, whose replies arrive in order.
#[derive(Debug, Default)]
pub(crate) struct AckTracker {
    /// Number of abandoned replies received, including errors.
    received: u64,
    /// Number of the last reply that was not an error, shared with the acks issued since the last
    /// error. `None` until an ack is issued.
    acknowledged: Option<Arc<AtomicU64>>,
}

impl AckTracker {
    /// Issues an ack for the last of `owed` replies in flight.
    pub(crate) fn issue(&mut self, owed: u32) -> Ack {
        let settled = self.acknowledged.get_or_insert_default().clone();
        Ack { acknowledged: settled, number: self.received + u64::from(owed) }
    }

    /// Records that the next abandoned reply has arrived.
    pub(crate) fn record(&mut self, is_error: bool) {
        self.received += 1;
        if is_error {
            // Detach the acks of later replies too. They stay unset, which only causes a harmless
            // repetition of their requests.
            self.acknowledged = None;
        } else if let Some(settled) = &self.acknowledged {
            settled.store(self.received, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ack_is_set_by_its_own_reply() {
        let mut receipts = AckTracker::default();
        let first = receipts.issue(1);
        let second = receipts.issue(2);
        assert!(!first.is_acknowledged() && !second.is_acknowledged());
        receipts.record(false);
        assert!(first.is_acknowledged() && !second.is_acknowledged());
        let third = receipts.issue(2);
        receipts.record(false);
        assert!(second.is_acknowledged() && !third.is_acknowledged());
        drop(receipts);
        assert!(!third.is_acknowledged(), "it came to nothing with the connection");
    }

    #[test]
    fn error_reply_acknowledges_nothing() {
        let mut receipts = AckTracker::default();
        let refused = receipts.issue(1);
        let behind = receipts.issue(2);
        receipts.record(true);
        let later = receipts.issue(2);
        receipts.record(false);
        assert!(!refused.is_acknowledged() && !later.is_acknowledged());
        receipts.record(false);
        assert!(later.is_acknowledged() && !refused.is_acknowledged() && !behind.is_acknowledged());
    }
}
