//! `HeldLocks`: the sessions whose transactions hold locks, by the id of the holder.
//!
//! Invariant: one thread at a time uses a session. A renewal checks it out; a release takes it
//! away, and waits for a renewal that uses it. A session that is not put back is closed, which ends
//! its transaction. No mutex is held over an exchange with the server.

use std::{
    collections::{HashMap, HashSet},
    io,
};

use super::{loss_watch::LossWatch, session::Session};
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
type Slot = Option<Box<Session>>;

impl HeldLocks {
    /// Keeps a session.
    pub(super) fn insert(&self, id: &str, mut session: Session) {
        session.renewal_sent = None;
        let replaced = self.slots.lock().insert(id.into(), Some(Box::new(session)));
        drop(replaced);
    }

    /// Has the connection of a session watched. Reports a connection that is closed already. The
    /// watch begins under the mutex, so that it finds the session here; it does not block. If a
    /// renewal uses the session, the watch begins when it is put back.
    pub(super) fn watch(&self, id: &str, watch: Option<&LossWatch>) {
        let Some(watch) = watch else { return };
        let watched = match self.slots.lock().get_mut(id) {
            Some(Some(session)) => session.watch(watch),
            _ => Ok(()),
        };
        log_unwatched(watched);
    }

    /// The ids that are held on these connections, unless they are being renewed, which notices
    /// that a connection is closed.
    pub(super) fn ids_of(&self, connections: &HashSet<u64>) -> Vec<Box<str>> {
        let slots = self.slots.lock();
        let lost = slots.iter().filter(|(_, slot)| {
            slot.as_ref().is_some_and(|session| connections.contains(&session.connection.id()))
        });
        lost.map(|(id, _)| id.clone()).collect()
    }

    /// Lends a session to a renewal. `None` if there is none, or it is in use.
    pub(super) fn check_out(&self, id: &str) -> Option<Box<Session>> {
        self.slots.lock().get_mut(id)?.take()
    }

    /// Ends a renewal. With `None`, the lock is lost. The watch begins again, because it reports
    /// the end of a connection once, and may have done so while the renewal used the session.
    pub(super) fn put_back(
        &self,
        id: &str,
        session: Option<Box<Session>>,
        watch: Option<&LossWatch>,
    ) {
        let mut slots = self.slots.lock();
        let mut watched = Ok(());
        let unused = match (slots.get_mut(id), session) {
            (Some(slot), Some(mut session)) => {
                watched = watch.map_or(Ok(()), |watch| session.watch(watch));
                *slot = Some(session);
                None
            }
            (Some(_), None) => {
                slots.remove(id);
                None
            }
            // Discarded meanwhile.
            (None, session) => session,
        };
        drop(slots);
        clock::wake_all(&self.returned);
        drop(unused);
        log_unwatched(watched);
    }

    /// Takes a session away, waiting until `until` for a renewal that uses it.
    pub(super) fn take(&self, id: &str, until: Moment) -> Option<Box<Session>> {
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

/// After the mutex is unlocked, because a logger may block.
fn log_unwatched(watched: io::Result<()>) {
    if let Err(error) = watched {
        log_safely!(debug, "only renewals notice a lost lock: {error}");
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::{
        sync::{Arc, mpsc},
        time::Duration,
    };

    use super::{super::sql::ReadOnlyOff, *};
    use crate::backend::mysql::connection::tests::connected;

    /// Before the renewer knows the lease, and after a renewal has read its reply, nothing but the
    /// watch can show the end of a connection until the next renewal.
    ///
    /// Fault: N230
    /// Promise: P7
    #[test]
    fn connection_that_ends_unobserved_is_reported() {
        let held = Arc::new(HeldLocks::default());
        let (sender, reports) = mpsc::channel();
        let known = held.clone();
        let watch = LossWatch::start(Box::new(move |closed| {
            let ids = known.ids_of(&closed.iter().copied().collect());
            sender.send(ids.iter().map(|id| id.to_string()).collect::<Vec<_>>()).unwrap();
        }));
        let watch = Some(&watch.unwrap());
        let off = ReadOnlyOff::of(Some("0")).unwrap();
        let next = || reports.recv_timeout(Duration::from_secs(60)).unwrap();

        let (connection, server) = connected();
        held.insert("new", Session::new(connection, 1, off));
        drop(server);
        held.watch("new", watch);
        assert_eq!(next(), ["new"]);
        held.discard("new");

        let (connection, server) = connected();
        held.insert("renewed", Session::new(connection, 1, off));
        held.watch("renewed", watch);
        let lent = held.check_out("renewed");
        drop(server);
        assert!(next().is_empty(), "the renewal uses it");
        held.put_back("renewed", lent, watch);
        assert_eq!(next(), ["renewed"]);
    }
}
