//! `LockInfo`: what can be seen of a lock from outside.

use std::fmt;

use crate::{holder::Holder, id::LockId, text::Quoted, token::FencingToken};

/// A lock that is held, its holder, and who waits for it: a snapshot, already old when it is read.
///
/// ```no_run
/// # fn main() -> distlock::Result<()> {
/// for lock in distlock::RedisMgr::instance()?.locks("orders:*")? {
///     println!("{} is held by {}, {} wait", lock.name(), lock.holder(), lock.waiting());
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LockInfo {
    name: String,
    holder: Holder,
    token: Option<FencingToken>,
    waiters: Vec<Waiter>,
    certain: bool,
}

impl LockInfo {
    /// `token` is the last one given; zero when it is not known.
    pub(crate) fn new(name: &str, holder: Holder, token: u64, waiters: Vec<String>, certain: bool) -> LockInfo {
        // The last token of a lock is not that of a holder who takes none.
        let token = (token > 0 && holder.held_for().is_some()).then_some(FencingToken(token));
        let waiters = waiters.into_iter().map(|id| Waiter { id }).collect();
        LockInfo { name: name.to_owned(), holder, token, waiters, certain }
    }

    /// The name of the lock, without its prefix.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Who holds it: with its age ([`held_for`](Holder::held_for)) and the time it has left ([`ttl_left`](Holder::ttl_left)).
    pub fn holder(&self) -> &Holder {
        &self.holder
    }

    /// The holder's token, if it has one: clients of other kinds take none.
    pub fn fencing_token(&self) -> Option<FencingToken> {
        self.token
    }

    /// Those who wait, the next one first. Of a long line only the beginning is told: see [`waiting`](Self::waiting).
    pub fn waiters(&self) -> &[Waiter] {
        &self.waiters
    }

    /// How many wait.
    pub fn waiting(&self) -> u64 {
        self.holder.waiters().unwrap_or(0)
    }

    /// Whether a quorum of the nodes says that this is the holder; always true of one server. A lock for which it is
    /// false is being taken or given up just now, was left on a minority of the nodes and expires there, or too few
    /// nodes answered.
    pub fn is_certain(&self) -> bool {
        self.certain
    }
}

impl fmt::Display for LockInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let by = if self.certain { "is held by" } else { "is on some nodes held by" };
        write!(f, "lock {} {by} {}", Quoted(&self.name), self.holder)?;
        match self.waiting() {
            0 => Ok(()),
            waiting => write!(f, "; {waiting} wait"),
        }
    }
}

/// Somebody who waits for a lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiter {
    id: String,
}

impl Waiter {
    /// Under which identifier it will hold the lock, cut after some hundred bytes.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The identifier in parts: the host, process and thread that wait, and when they asked.
    pub fn lock_id(&self) -> Option<LockId> {
        self.id.parse().ok()
    }
}

impl fmt::Display for Waiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.lock_id() {
            Some(id) => write!(f, "{} (pid {}, thread {})", id.host().escape_debug(), id.pid(), id.tid()),
            None => write!(f, "a client that calls itself {}", Quoted(&self.id)),
        }
    }
}
