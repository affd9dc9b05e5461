//! `Receipt`: whether an answer that nobody waits for has come, for who left it behind and has the
//! connection no more.

use std::sync::Arc;

use crate::sync::atomic::{AtomicU64, Ordering};

/// For one answer. Settled once that has come and is no error; never, if it is one or the
/// connection has ended before.
#[derive(Clone, Debug)]
pub(crate) struct Ack {
    acknowledged: Arc<AtomicU64>,
    number: u64,
}

impl Ack {
    pub(crate) fn is_acknowledged(&self) -> bool {
        // Nothing else is read because of it.
        self.acknowledged.load(Ordering::Relaxed) >= self.number
    }
}

/// The receipts for what one connection owes, which comes in order.
#[derive(Debug, Default)]
pub(crate) struct AckTracker {
    /// Of the answers that nobody waited for, how many have come, errors included.
    received: u64,
    /// Up to which of them all are well, of those since the last error. Made with the first
    /// receipt.
    acknowledged: Option<Arc<AtomicU64>>,
}

impl AckTracker {
    /// For the last of `owed` answers that are out.
    pub(crate) fn issue(&mut self, owed: u32) -> Ack {
        let settled = self.acknowledged.get_or_insert_default().clone();
        Ack { acknowledged: settled, number: self.received + u64::from(owed) }
    }

    /// The next answer has come.
    pub(crate) fn record(&mut self, is_error: bool) {
        self.received += 1;
        if is_error {
            // Those behind it are not known to be settled then either: asking in vain does no harm.
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
