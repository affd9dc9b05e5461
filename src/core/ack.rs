//! `Ack`: whether an abandoned reply has arrived. Checking an ack does not need the connection.

use std::sync::Arc;

use smallvec::SmallVec;

use crate::sys::sync::atomic::{AtomicU64, Ordering};

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

/// Nodes whose replies were abandoned. The ack shows whether the reply has arrived.
pub(crate) type PendingAcks = SmallVec<[(usize, Ack); 1]>;

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
    /// Issues an ack for the last of the replies in flight.
    pub(crate) fn issue(&mut self, unread: u32) -> Ack {
        let acknowledged = self.acknowledged.get_or_insert_default().clone();
        Ack { acknowledged, number: self.received + u64::from(unread) }
    }

    /// Records that the next abandoned reply has arrived.
    pub(crate) fn record(&mut self, is_error: bool) {
        self.received += 1;
        if is_error {
            // Detach the acks of later replies too. They stay unset, which only causes a harmless
            // repetition of their requests.
            self.acknowledged = None;
        } else if let Some(acknowledged) = &self.acknowledged {
            acknowledged.store(self.received, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ack_is_set_by_its_own_reply() {
        let mut tracker = AckTracker::default();
        let first = tracker.issue(1);
        let second = tracker.issue(2);
        assert!(!first.is_acknowledged() && !second.is_acknowledged());
        tracker.record(false);
        assert!(first.is_acknowledged() && !second.is_acknowledged());
        let third = tracker.issue(2);
        tracker.record(false);
        assert!(second.is_acknowledged() && !third.is_acknowledged());
        drop(tracker);
        assert!(!third.is_acknowledged(), "the connection was closed before the reply arrived");
    }

    #[test]
    fn error_reply_acknowledges_nothing() {
        let mut tracker = AckTracker::default();
        let refused = tracker.issue(1);
        let behind = tracker.issue(2);
        tracker.record(true);
        let later = tracker.issue(2);
        tracker.record(false);
        assert!(!refused.is_acknowledged() && !later.is_acknowledged());
        tracker.record(false);
        assert!(later.is_acknowledged() && !refused.is_acknowledged() && !behind.is_acknowledged());
    }
}
