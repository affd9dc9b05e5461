//! `Listing`: what a list of locks has found so far, within limits; `ScanProgress`: how far a scan
//! is.

use std::collections::BTreeSet;

use super::NodeError;
use crate::{
    backend::{Inspection, error::BackendError},
    core::key::LockKey,
    lock_info::LockInfo,
    sys::clock::Moment,
};

/// Maximum number of locks in one script call, which blocks a server for less than a millisecond.
/// Up to 5 ms would be acceptable; the rest is a reserve for slow machines, long queues and large
/// groups.
pub(crate) const DESCRIBE_BATCH_MAX: usize = 50;
/// Maximum time for all steps of a list together, in operation timeouts.
pub(crate) const LIST_TIMEOUTS_MAX: u32 = 60;
/// Maximum number of scan steps and reported keys together. Servers with locks need far fewer.
const SCAN_WORK_MAX: usize = 1 << 20;
/// Maximum number of bytes that a list keeps: 256 for each of `SCAN_WORK_MAX` locks.
const LIST_BYTES_MAX: usize = 256 << 20;
/// Maximum number of times that a node is scanned from the beginning again. A node that keeps
/// closing its connections is most likely the same server all the time, and listing it must end.
const SCAN_RESTARTS_MAX: u32 = 8;

pub(crate) struct Listing<'a> {
    prefix: &'a str,
    /// Bytes that may still be kept. Without a limit, servers could report names and waiters
    /// without end.
    bytes_left: usize,
    work_left: usize,
    keys: BTreeSet<LockKey>,
    locks: Vec<LockInfo>,
}

impl Listing<'_> {
    pub(crate) fn new(prefix: &str) -> Listing<'_> {
        Listing {
            prefix,
            bytes_left: LIST_BYTES_MAX,
            work_left: SCAN_WORK_MAX,
            keys: BTreeSet::new(),
            locks: Vec::new(),
        }
    }

    /// Adds the keys that one step of a scan has found.
    pub(crate) fn add_keys(&mut self, keys: Vec<String>) -> Result<(), BackendError> {
        self.work_left = self.work_left.checked_sub(1 + keys.len()).ok_or_else(too_many_keys)?;
        for key in keys {
            // A key that cannot be the name of a lock was written by another program, and may be of
            // any length.
            let name = key.strip_prefix(self.prefix);
            let Some(Ok(key)) = name.map(|name| LockKey::new(self.prefix, name)) else { continue };
            let bytes = key.lock_key().len();
            if self.keys.insert(key) {
                self.reserve(bytes)?;
            }
        }
        Ok(())
    }

    /// Takes the keys that all scans have found, each once, in their order.
    pub(crate) fn take_keys(&mut self) -> Vec<LockKey> {
        std::mem::take(&mut self.keys).into_iter().collect()
    }

    pub(crate) fn add_lock(&mut self, found: Inspection<LockInfo>) -> Result<(), BackendError> {
        // Without a prefix, any string key may match. Only an id of this library shows that a key
        // is a lock.
        if let Inspection::Held(lock) = found
            && (!self.prefix.is_empty() || lock.holder().lock_id().is_some())
        {
            let waiters: usize = lock.waiters().iter().map(|waiter| waiter.id().len()).sum();
            self.reserve(lock.name().len() + lock.holder().id().len() + waiters)?;
            self.locks.push(lock);
        }
        Ok(())
    }

    pub(crate) fn into_locks(self) -> Vec<LockInfo> {
        self.locks
    }

    fn reserve(&mut self, bytes: usize) -> Result<(), BackendError> {
        self.bytes_left = self.bytes_left.checked_sub(bytes).ok_or_else(too_many_keys)?;
        Ok(())
    }
}

fn too_many_keys() -> BackendError {
    BackendError::Node(NodeError::protocol("it keeps reporting more keys"))
}

/// Progress of the scan of one node.
#[derive(Clone)]
pub(crate) struct ScanProgress {
    pub(crate) cursor: String,
    /// When the connection was opened over which the last keys came.
    connected_at: Option<Moment>,
    restarts: u32,
}

impl ScanProgress {
    pub(crate) fn start() -> ScanProgress {
        ScanProgress { cursor: "0".to_owned(), connected_at: None, restarts: 0 }
    }

    /// Records keys that came over the connection opened at `connected_at`, and where the next ones
    /// begin. Returns true if these were the last. Another connection may lead to another server,
    /// where the cursor means nothing, so the scan begins again.
    pub(crate) fn advance(&mut self, connected_at: Option<Moment>, next: Option<String>) -> bool {
        let reconnected = self.cursor != "0"
            && self.connected_at != connected_at
            && self.restarts < SCAN_RESTARTS_MAX;
        self.connected_at = connected_at;
        if reconnected {
            *self = ScanProgress { restarts: self.restarts + 1, ..ScanProgress::start() };
            return false;
        }
        next.map(|next| self.cursor = next).is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fault: N62
    #[test]
    fn scan_after_reconnect_starts_again() {
        let at = |nanos| Some(Moment::from_nanos(nanos));
        let to = |cursor: &str| Some(cursor.to_owned());
        let mut progress = ScanProgress::start();
        assert!(!progress.advance(at(1), to("17")) && !progress.advance(at(1), to("5")));
        assert_eq!(progress.cursor, "5");
        assert!(!progress.advance(at(2), None), "the scan ended with the keys of another server");
        assert_eq!(progress.cursor, "0");
        assert!(!progress.advance(at(3), to("17")), "the scan ended with its first keys");
        assert!(progress.advance(at(3), None));
        // The scan of a node that closes every connection ends too.
        let mut progress = ScanProgress::start();
        let steps = (1..).take_while(|step| {
            !progress.advance(at(*step), (step % 100 != 0).then(|| step.to_string()))
        });
        assert_eq!(steps.count(), 99);
    }
}
