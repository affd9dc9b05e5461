//! `ContentionMemory`: remembers which locks were contended the last time. A wrong guess costs one
//! round trip.

use std::{
    hash::{DefaultHasher, Hash as _, Hasher as _},
    sync::atomic::{AtomicU64, Ordering},
};

/// Number of locks remembered. Two locks that share a slot overwrite each other.
const SLOTS: usize = 256;

#[derive(Debug)]
pub(super) struct ContentionMemory {
    slots: Box<[AtomicU64]>,
}

impl ContentionMemory {
    pub(super) fn new() -> ContentionMemory {
        ContentionMemory { slots: (0..SLOTS).map(|_| AtomicU64::new(0)).collect() }
    }

    pub(super) fn remember(&self, lock: &str, contended: bool) {
        let (slot, hash) = self.slot(lock);
        if contended {
            slot.store(hash, Ordering::Relaxed);
        } else if slot.load(Ordering::Relaxed) == hash {
            slot.store(0, Ordering::Relaxed);
        }
    }

    pub(super) fn is_likely(&self, lock: &str) -> bool {
        let (slot, hash) = self.slot(lock);
        slot.load(Ordering::Relaxed) == hash
    }

    fn slot(&self, lock: &str) -> (&AtomicU64, u64) {
        // An unkeyed hash is enough: names chosen to collide cost one round trip, and no more.
        let mut hasher = DefaultHasher::new();
        lock.hash(&mut hasher);
        // Zero marks an empty slot.
        let hash = hasher.finish() | 1;
        (&self.slots[(hash >> 1) as usize % SLOTS], hash)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_remembers_the_last_time() {
        let memory = ContentionMemory::new();
        assert!(!memory.is_likely("a"));
        memory.remember("a", true);
        assert!(memory.is_likely("a"));
        memory.remember("a", false);
        assert!(!memory.is_likely("a"));
    }
}
