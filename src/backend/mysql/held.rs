//! `HeldLocks`: the sessions whose transactions hold locks, by the id of the holder.
//!
//! Invariant: one thread at a time uses a session. A renewal checks it out; a release takes it
//! away, and waits for a renewal that uses it. A session that is not put back is closed, which ends
//! its transaction. No mutex is held over an exchange with the server.

use std::collections::{HashMap, HashSet};

use super::{loss_watch::LossWatch, pool::PooledSession};
use crate::sys::{
    clock::{self, Moment},
    sync::{Condvar, Mutex},
};

#[derive(Debug, Default)]
pub(super) struct HeldLocks {
    slots: Mutex<HashMap<Box<str>, Slot>>,
    /// A renewal has put a session back, or closed it.
    returned: Condvar,
}

/// `None` while a renewal uses the session.
type Slot = Option<Box<HeldSession>>;

#[derive(Debug)]
pub(super) struct HeldSession {
    pub(super) session: PooledSession,
    /// When the renewal was sent that the server has not replied to yet.
    pub(super) renewal_sent: Option<Moment>,
}

impl HeldLocks {
    /// Keeps a session, and has its connection watched. The watch begins under the mutex, so that
    /// it finds the session here; it does not block.
    pub(super) fn insert(&self, id: &str, mut session: PooledSession, watch: Option<&LossWatch>) {
        let mut slots = self.slots.lock();
        if let Some(watch) = watch {
            session.watch(watch);
        }
        let replaced =
            slots.insert(id.into(), Some(Box::new(HeldSession { session, renewal_sent: None })));
        drop(slots);
        drop(replaced);
    }

    /// The ids that are held on these connections, unless they are being renewed, which notices
    /// that a connection is closed.
    pub(super) fn ids_of(&self, connections: &HashSet<u64>) -> Vec<Box<str>> {
        let slots = self.slots.lock();
        let lost = slots.iter().filter(|(_, slot)| {
            slot.as_ref().is_some_and(|held| connections.contains(&held.session.connection.id()))
        });
        lost.map(|(id, _)| id.clone()).collect()
    }

    /// Lends a session to a renewal. `None` if there is none, or it is in use.
    pub(super) fn check_out(&self, id: &str) -> Option<Box<HeldSession>> {
        self.slots.lock().get_mut(id)?.take()
    }

    /// Ends a renewal. With `None`, the lock is lost.
    pub(super) fn put_back(&self, id: &str, held: Option<Box<HeldSession>>) {
        let mut slots = self.slots.lock();
        let unused = match (slots.get_mut(id), held) {
            (Some(slot), Some(held)) => {
                *slot = Some(held);
                None
            }
            (Some(_), None) => {
                slots.remove(id);
                None
            }
            // Discarded meanwhile.
            (None, held) => held,
        };
        drop(slots);
        clock::wake_all(&self.returned);
        drop(unused);
    }

    /// Takes a session away, waiting until `until` for a renewal that uses it.
    pub(super) fn take(&self, id: &str, until: Moment) -> Option<Box<HeldSession>> {
        let mut slots = self.slots.lock();
        while matches!(slots.get(id), Some(None)) && clock::now() < until {
            clock::park(&self.returned, &mut slots, until);
        }
        slots.remove(id)?
    }

    /// Gives up a lock without a release: closes its session, now or when its renewal ends.
    pub(super) fn discard(&self, id: &str) {
        let slot = self.slots.lock().remove(id);
        drop(slot);
    }

    /// Gives up the locks whose renewal has panicked.
    pub(super) fn discard_renewing(&self) {
        self.slots.lock().retain(|_, slot| slot.is_some());
        clock::wake_all(&self.returned);
    }

    pub(super) fn close(&self) {
        let slots = std::mem::take(&mut *self.slots.lock());
        drop(slots);
    }
}
