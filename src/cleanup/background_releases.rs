//! `BackgroundReleases`: the releases that nobody waits for, until they are confirmed. The next
//! call of the manager for the same lock repeats them first; otherwise it could find its own lock
//! held.

use std::{
    collections::HashMap,
    ptr,
    sync::{Arc, Weak},
};

use crate::{
    core::lease::Lease,
    sys::sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

/// Minimum number of locks at which those without a pending release are removed.
const PURGE_MIN: usize = 64;

#[derive(Debug, Default)]
pub(super) struct BackgroundReleases {
    /// There may be one. Most managers never have any, and then need no mutex.
    may_have_any: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// The leases by lock key. The entry of the clean-up queue keeps a lease alive.
    by_lock: HashMap<Box<str>, Vec<Weak<Lease>>>,
    purge_at: usize,
}

impl BackgroundReleases {
    pub(super) fn add(&self, lease: &Arc<Lease>) {
        let mut state = self.state.lock();
        if state.by_lock.len() >= state.purge_at {
            state.by_lock.retain(|_, leases| leases.iter().any(|lease| lease.strong_count() > 0));
            state.purge_at = PURGE_MIN.max(2 * state.by_lock.len());
        }
        let leases = state.by_lock.entry(lease.claim.key.lock_key().into()).or_default();
        leases.retain(|lease| lease.strong_count() > 0);
        leases.push(Arc::downgrade(lease));
        self.may_have_any.store(true, Ordering::Release);
    }

    pub(super) fn remove(&self, lease: &Arc<Lease>) {
        let mut state = self.state.lock();
        if let Some(leases) = state.by_lock.get_mut(lease.claim.key.lock_key()) {
            leases.retain(|one| !ptr::eq(one.as_ptr(), Arc::as_ptr(lease)));
        }
    }

    /// The leases of this lock whose release is not confirmed.
    pub(super) fn of_lock(&self, lock: &str) -> Vec<Arc<Lease>> {
        if !self.may_have_any.load(Ordering::Acquire) {
            return Vec::new();
        }
        let state = self.state.lock();
        let leases = state.by_lock.get(lock).into_iter().flatten();
        leases.filter_map(Weak::upgrade).collect()
    }
}
