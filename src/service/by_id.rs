//! Locks whose holders only remember an identifier.

use super::{Core, Kept};
use crate::{
    error::{LockError, Result},
    key::LockKey,
    released::Released,
};

/// Where such a lock is on its way.
#[derive(Debug)]
pub(super) enum ById {
    Kept(Kept),
    /// The lock of this key is being given up.
    Going(LockKey),
}

impl ById {
    fn key(&self) -> &LockKey {
        match self {
            ById::Kept(kept) => &kept.lease.claim.key,
            ById::Going(key) => key,
        }
    }
}

impl Core {
    /// Keeps a lock whose holder only remembers its identifier.
    pub(crate) fn keep_by_id(&self, kept: Kept) -> Result<String> {
        let id = kept.lease.claim.id.to_string();
        let mut by_id = self.by_id.lock();
        // Shutting down closes first, then empties the table.
        if self.is_closed() {
            drop(by_id);
            return self.let_go(kept, self.patience()).and(Err(LockError::Shutdown));
        }
        by_id.insert(id.clone(), ById::Kept(kept));
        Ok(id)
    }

    /// Gives up the lock of this name that was kept under this identifier, or else one of another process.
    pub(crate) fn release_by_id(&self, key: &LockKey, id: &str) -> Result<Released> {
        let entry = match self.by_id.lock().get_mut(id) {
            Some(entry) if entry.key() == key => Some(std::mem::replace(entry, ById::Going(key.clone()))),
            _ => None,
        };
        match entry {
            Some(ById::Kept(kept)) => {
                let outcome = self.give_up(kept, self.operation_timeout());
                self.by_id.lock().remove(id);
                outcome
            }
            // To release it as well would be to overtake its holder, who would take that for a loss.
            Some(ById::Going(_)) => Ok(Released::Gone),
            None => self.release(key, id),
        }
    }
}
