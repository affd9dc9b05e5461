//! `LockInfo`: a held lock with its holder and its waiters, and how a release ended.

use std::fmt;

use crate::{
    core::{holder::Holder, id::LockId, kind::HeldBy, token::FencingToken},
    sys::display::Quoted,
};

/// A held lock, its holder and its waiters. This is a snapshot, and may be outdated by the time it
/// is read.
///
/// ```no_run
/// # fn main() -> distlock::Result<()> {
/// for lock in distlock::RedisMgr::instance()?.locks("orders:*")? {
///     println!("{} is held by {}, {} waiting", lock.name(), lock.holder(), lock.waiting());
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LockInfo {
    name: String,
    holder: Holder,
    token: Option<FencingToken>,
    waiters: Vec<QueuedWaiter>,
    certain: bool,
    members: Vec<Holder>,
    permit_limit: Option<u32>,
}

impl LockInfo {
    /// `token` is the last token granted for this lock; zero if unknown.
    pub(crate) fn new(
        name: &str,
        holder: Holder,
        token: u64,
        waiters: Vec<String>,
        certain: bool,
    ) -> LockInfo {
        // The last token does not belong to a holder of another library, which gets none.
        let token = (token > 0 && holder.held_for().is_some()).then_some(FencingToken(token));
        let waiters = waiters.into_iter().map(|id| QueuedWaiter { id }).collect();
        let (name, members, permit_limit) = (name.to_owned(), Vec::new(), None);
        LockInfo { name, holder, token, waiters, certain, members, permit_limit }
    }

    /// Adds what is known of the group that has the lock.
    pub(crate) fn set_group(&mut self, held_by: HeldBy, members: Vec<Holder>) {
        self.holder = self.holder.clone().with_group(held_by, members.last());
        self.members = members;
    }

    pub(crate) fn set_permit_limit(&mut self, limit: Option<u32>) {
        self.permit_limit = limit;
    }

    pub(crate) fn set_uncertain(&mut self) {
        self.certain = false;
    }

    pub(crate) fn into_holder(self) -> Holder {
        self.holder
    }

    /// Returns the name of the lock, without its prefix.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the holder, with the age of the lock ([`held_for`](Holder::held_for)) and the time
    /// left ([`ttl_left`](Holder::ttl_left)).
    pub fn holder(&self) -> &Holder {
        &self.holder
    }

    /// Returns the readers, or the holders of permits, that share the lock; empty if one client
    /// holds it alone. Those that expire first come first. At most the first thousand readers or
    /// permits are listed, and fewer if many locks are listed at once; [`Holder::held_by`] has
    /// their number.
    pub fn members(&self) -> &[Holder] {
        &self.members
    }

    /// Returns the limit of permits that the first waiter for permits asks for. `None` if none is
    /// known to wait, because the server does not keep the limit of a semaphore, and with several
    /// nodes.
    pub fn permit_limit(&self) -> Option<u32> {
        self.permit_limit
    }

    /// Returns the holder's fencing token; `None` if the holder uses another library, or if several
    /// clients share the lock.
    pub fn fencing_token(&self) -> Option<FencingToken> {
        self.token
    }

    /// Returns the waiters, the next one first. A long queue is cut off; see
    /// [`waiting`](Self::waiting).
    pub fn waiters(&self) -> &[QueuedWaiter] {
        &self.waiters
    }

    /// Returns the number of waiters, of which threads of one manager are one; see
    /// [`Holder::waiters`](crate::Holder::waiters).
    pub fn waiting(&self) -> u64 {
        self.holder.waiters().unwrap_or(0)
    }

    /// Returns true if a quorum of the nodes agrees on this holder; always true with a single
    /// server.
    ///
    /// If false, the lock is being acquired or released at this moment, or a minority of the nodes
    /// still keeps it until it expires there, or too few nodes replied.
    pub fn is_certain(&self) -> bool {
        self.certain
    }
}

impl fmt::Display for LockInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let by = if self.certain { "is held by" } else { "is held on some nodes by" };
        write!(f, "lock {} {by} {}", Quoted(&self.name), self.holder)?;
        match self.waiting() {
            0 => Ok(()),
            waiting => write!(f, "; {waiting} waiting"),
        }
    }
}

/// How a release ended. Displays as the end of a sentence about the lock, like
/// [`LockLost`](crate::LockLost).
///
/// ```
/// let lost = distlock::Released::Gone;
/// assert_eq!(format!("lock a: {lost}"), "lock a: it no longer exists on the server");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub enum Released {
    /// The lock was held until now, and is released.
    Released,
    /// The lock had been lost, and no other client has it: its lease had ended, or its key was
    /// deleted.
    Gone,
    /// The lock had been lost, and another client holds it; it was not changed.
    OwnedByOther(Holder),
}

impl fmt::Display for Released {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Released::Released => f.write_str("it was released"),
            Released::Gone => f.write_str("it no longer exists on the server"),
            Released::OwnedByOther(holder) => write!(f, "it is now held by {holder}"),
        }
    }
}

/// A client that waits for a lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueuedWaiter {
    id: String,
}

impl QueuedWaiter {
    /// Returns the identifier under which the waiter will hold the lock, cut after 512 bytes.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Returns the parsed identifier: host, process and thread of the waiter, and when it asked for
    /// the lock.
    pub fn lock_id(&self) -> Option<LockId> {
        self.id.parse().ok()
    }
}

impl fmt::Display for QueuedWaiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.lock_id() {
            Some(id) => {
                write!(f, "{} (pid {}, thread {})", id.host().escape_debug(), id.pid(), id.tid())
            }
            None => write!(f, "a client that calls itself {}", Quoted(&self.id)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcome_of_a_release_displays_without_rust_syntax() {
        let other = Holder::from_id("web-3|pid7|tid9|ts1763712345678".into());
        for (outcome, text) in [
            (Released::Released, "it was released"),
            (Released::Gone, "it no longer exists on the server"),
            (Released::OwnedByOther(other), "it is now held by web-3 (pid 7, thread 9)"),
        ] {
            assert_eq!(outcome.to_string(), text);
        }
    }
}
