//! `Receipt`: whether an answer that nobody waits for has come, for who left it behind and has the connection no more.

use std::sync::Arc;

use crate::sync::atomic::{AtomicU64, Ordering};

/// For one answer. Settled once that has come and is no error; never, if it is one or the connection has ended before.
#[derive(Clone, Debug)]
pub(crate) struct Receipt {
    settled: Arc<AtomicU64>,
    number: u64,
}

impl Receipt {
    pub(crate) fn is_settled(&self) -> bool {
        // Nothing else is read because of it.
        self.settled.load(Ordering::Relaxed) >= self.number
    }
}

/// The receipts for what one connection owes, which comes in order.
#[derive(Debug, Default)]
pub(crate) struct Receipts {
    /// Of the answers that nobody waited for, how many have come, errors included.
    come: u64,
    /// Up to which of them all are well, of those since the last error. Made with the first receipt.
    settled: Option<Arc<AtomicU64>>,
}

impl Receipts {
    /// For the last of `owed` answers that are out.
    pub(crate) fn write(&mut self, owed: u32) -> Receipt {
        let settled = self.settled.get_or_insert_default().clone();
        Receipt { settled, number: self.come + u64::from(owed) }
    }

    /// The next answer has come.
    pub(crate) fn take(&mut self, is_error: bool) {
        self.come += 1;
        if is_error {
            // Those behind it are not known to be settled then either: asking in vain does no harm.
            self.settled = None;
        } else if let Some(settled) = &self.settled {
            settled.store(self.come, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_receipt_is_settled_by_its_own_answer() {
        let mut receipts = Receipts::default();
        let first = receipts.write(1);
        let second = receipts.write(2);
        assert!(!first.is_settled() && !second.is_settled());
        receipts.take(false);
        assert!(first.is_settled() && !second.is_settled());
        let third = receipts.write(2);
        receipts.take(false);
        assert!(second.is_settled() && !third.is_settled());
        drop(receipts);
        assert!(!third.is_settled(), "it came to nothing with the connection");
    }

    #[test]
    fn an_error_settles_nothing() {
        let mut receipts = Receipts::default();
        let refused = receipts.write(1);
        let behind = receipts.write(2);
        receipts.take(true);
        let later = receipts.write(2);
        receipts.take(false);
        assert!(!refused.is_settled() && !later.is_settled());
        receipts.take(false);
        assert!(later.is_settled() && !refused.is_settled() && !behind.is_settled());
    }
}
