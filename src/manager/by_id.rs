//! Locks without a guard, whose holders keep only the id: `RedisMgr::acquire_lock`.

use std::{collections::HashMap, time::Duration};

use parking_lot::Mutex;

use super::{HeldLock, HeldThrough, Manager};
use crate::{
    config::LockOptions,
    core::{key::LockKey, kind::LockKind},
    error::{LockError, Result},
    lock_info::Released,
};

/// The locks without a guard, by their ids.
#[derive(Debug, Default)]
pub(super) struct LocksById(Mutex<HashMap<String, IdEntry>>);

impl LocksById {
    pub(super) fn take_all(&self) -> Vec<HeldLock> {
        let entries = std::mem::take(&mut *self.0.lock());
        let held = entries.into_values().filter_map(|entry| match entry {
            IdEntry::Held(held) => Some(held),
            IdEntry::Releasing(_) => None,
        });
        held.collect()
    }
}

/// State of a lock that is held by id.
#[derive(Debug)]
enum IdEntry {
    Held(HeldLock),
    /// The lock of this key is being released.
    Releasing(LockKey),
}

impl IdEntry {
    fn key(&self) -> &LockKey {
        match self {
            IdEntry::Held(held) => &held.lease.claim.key,
            IdEntry::Releasing(key) => key,
        }
    }
}

impl Manager {
    /// Acquires a lock that is held by its id. `None` if another client holds it.
    pub(crate) fn acquire_by_id(
        &self,
        name: &str,
        ttl: Duration,
        wait: Duration,
    ) -> Result<Option<String>> {
        let options = LockOptions::new().ttl(ttl).wait(wait);
        match self.acquire(LockKind::Mutex, name, &options, HeldThrough::Id) {
            Ok(held) => self.insert_by_id(held).map(Some),
            Err(error) if error.is_contended() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Stores a lock under its id, and returns the id.
    fn insert_by_id(&self, held: HeldLock) -> Result<String> {
        let id = held.lease.claim.id.to_string();
        let mut by_id = self.by_id.0.lock();
        // A shutdown sets `closed` first, and then empties the table.
        if self.is_closed() {
            drop(by_id);
            return self.give_up(held, false, self.time_left()).and(Err(LockError::Shutdown));
        }
        by_id.insert(id.clone(), IdEntry::Held(held));
        Ok(id)
    }

    /// Releases the lock with this key and id: a lock that is stored here, or else one of another
    /// manager or process.
    pub(crate) fn release_by_id(&self, key: &LockKey, id: &str) -> Result<Released> {
        let entry = match self.by_id.0.lock().get_mut(id) {
            Some(entry) if entry.key() == key => {
                Some(std::mem::replace(entry, IdEntry::Releasing(key.clone())))
            }
            _ => None,
        };
        match entry {
            Some(IdEntry::Held(held)) => {
                let outcome = self.release(held, self.operation_timeout());
                self.by_id.0.lock().remove(id);
                outcome
            }
            // A second release could overtake the first, which would then report a loss.
            Some(IdEntry::Releasing(_)) => Ok(Released::Gone),
            None => self.release_unregistered(key, id),
        }
    }
}
