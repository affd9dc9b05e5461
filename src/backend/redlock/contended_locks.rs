//! `ContendedLocks`: the locks that were contended when this process last asked for them.

use std::{
    hash::{DefaultHasher, Hash as _, Hasher as _},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use crate::core::key::LockKey;

/// Number of locks that are remembered. Locks that share a slot replace each other.
const SLOTS: usize = 256;

/// The hash of one lock in each slot; 0 in an empty one.
#[derive(Debug)]
pub(super) struct ContendedLocks(Box<[AtomicU64]>);

impl ContendedLocks {
    pub(super) fn new() -> ContendedLocks {
        ContendedLocks((0..SLOTS).map(|_| AtomicU64::new(0)).collect())
    }

    /// Records whether a claim has found the lock contended.
    pub(super) fn record(&self, key: &LockKey, contended: bool) {
        let (slot, hash) = self.slot(key);
        if contended {
            slot.store(hash, Relaxed);
        } else {
            // If another lock has the slot, it stays.
            let _ = slot.compare_exchange(hash, 0, Relaxed, Relaxed);
        }
    }

    pub(super) fn contains(&self, key: &LockKey) -> bool {
        let (slot, hash) = self.slot(key);
        slot.load(Relaxed) == hash
    }

    fn slot(&self, key: &LockKey) -> (&AtomicU64, u64) {
        // A hash without a secret is enough: names that collide on purpose cost one round trip.
        let mut hasher = DefaultHasher::new();
        key.lock_key().hash(&mut hasher);
        let hash = hasher.finish() | 1;
        (&self.0[(hash >> 1) as usize % SLOTS], hash)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_claim_for_a_lock_decides() {
        let (locks, key) = (ContendedLocks::new(), |name| LockKey::new("", name).unwrap());
        let (lock, other) = (key("a"), key("b"));
        assert!(!locks.contains(&lock));
        locks.record(&lock, true);
        assert!(locks.contains(&lock) && !locks.contains(&other));
        locks.record(&other, false);
        assert!(locks.contains(&lock));
        locks.record(&lock, false);
        assert!(!locks.contains(&lock));
    }
}
