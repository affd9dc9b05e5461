//! `LockGuard`: the user's hand on a lease, and what letting go of it does.

use std::{fmt, sync::Arc, time::Duration};

use crossbeam_channel::Receiver;

use crate::{
    clock,
    error::{LockError, LockLost, Result},
    grant::FencingToken,
    holder::Holder,
    id::LockId,
    key::Quoted,
    lease::{End, Lease},
    manager::RedisMgr,
    renewer::Registration,
};

/// A lock that is held, and released when this is dropped.
///
/// # Belief
///
/// The server can take a lock away while its holder is paused, cut off or slow, and nobody can tell the holder in
/// time. So the guard believes in its lock only until a local deadline, counted from before the last request that the
/// server confirmed. [`is_held`](Self::is_held) compares that deadline with the clock: it is exact even if no other
/// thread of the process has run for hours. Look before each step that must not be done twice, and send
/// [`fencing_token`](Self::fencing_token) along where the resource can check it: only that closes the gap between
/// looking and acting.
///
/// # Dropping
///
/// Dropping stops the renewal, then releases the lock at the server, which blocks for a round trip and at most for
/// one [operation timeout](crate::Config::operation_timeout). If the server does not answer, the release is repeated
/// in the background until the lock has expired there. Dropping never panics; call [`release`](Self::release) to
/// learn how it went. A guard that is leaked keeps its lock until [`max_hold`](crate::LockOptions::max_hold), or for
/// ever. In a forked child, dropping does nothing.
///
/// A guard keeps its manager alive, and may be sent to another thread.
///
/// ```no_run
/// # fn main() -> distlock::Result<()> {
/// let mgr = distlock::RedisMgr::instance()?;
/// let guard = mgr.lock("orders:42")?;
/// println!("{} with token {}", guard.name(), guard.fencing_token());
/// guard.ensure_held()?;
/// # Ok(())
/// # }
/// ```
#[must_use = "if unused, the lock is released at once"]
pub struct LockGuard {
    lease: Arc<Lease>,
    /// Both are only empty while the guard is being dropped.
    registration: Option<Registration>,
    mgr: Option<RedisMgr>,
}

/// How a release ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum Released {
    /// The lock was ours until now.
    Released,
    /// Nobody held it any more: it had expired or been deleted.
    Gone,
    /// It had been lost, and another holds it; that was left alone.
    OwnedByOther(Holder),
}

impl LockGuard {
    pub(crate) fn new(lease: Arc<Lease>, registration: Registration, mgr: RedisMgr) -> LockGuard {
        LockGuard { lease, registration: Some(registration), mgr: Some(mgr) }
    }

    /// The name of the lock, without its prefix.
    pub fn name(&self) -> &str {
        self.lease.claim.key.name()
    }

    /// Under which identifier the lock is held: the value of its key in Redis.
    pub fn id(&self) -> &LockId {
        &self.lease.claim.id
    }

    /// The token of this acquisition; the same for as long as the guard lives, lost or not.
    pub fn fencing_token(&self) -> FencingToken {
        self.lease.token
    }

    /// Whether the lock may still be believed in. Arithmetic: no round trip, no waiting. Once false, always false.
    pub fn is_held(&self) -> bool {
        // A forked child has a copy of the guard, and not the lock.
        self.in_own_process() && self.lease.is_held(clock::now())
    }

    /// How much longer the lock may be believed in without another renewal; zero when it is lost.
    pub fn remaining(&self) -> Duration {
        let now = clock::now();
        if self.in_own_process() && self.lease.is_held(now) { self.lease.deadline().after(now) } else { Duration::ZERO }
    }

    /// [`is_held`](Self::is_held), for use with `?`.
    ///
    /// # Errors
    ///
    /// [`LockError::Lost`] with the reason when the lock is lost; [`LockError::Forked`] in a forked child.
    pub fn ensure_held(&self) -> Result<()> {
        if !self.in_own_process() {
            return Err(LockError::Forked);
        }
        if self.lease.is_held(clock::now()) {
            return Ok(());
        }
        let why = match self.lease.ended() {
            Some(End::Lost(why)) => why,
            Some(End::Released) | None => LockLost::Expired,
        };
        Err(LockError::Lost { name: self.name().to_owned(), why })
    }

    /// Tells once, and why, when the lock is lost: at its deadline at the latest, or as soon as the server says so.
    /// When the lock is released instead, the channel is closed without a message.
    ///
    /// ```no_run
    /// # fn work(guard: distlock::LockGuard, jobs: crossbeam_channel::Receiver<u32>) {
    /// crossbeam_channel::select! {
    ///     recv(guard.lost()) -> why => eprintln!("stop: {why:?}"),
    ///     recv(jobs) -> job => println!("{job:?}"),
    /// }
    /// # }
    /// ```
    pub fn lost(&self) -> &Receiver<LockLost> {
        self.lease.lost()
    }

    /// Releases the lock and says how that went. Blocks for a round trip, at most for one
    /// [operation timeout](crate::Config::operation_timeout).
    ///
    /// # Errors
    ///
    /// [`LockError::Unavailable`] when the server does not answer: the release is then repeated in the background
    /// until the lock has expired. [`LockError::Refused`] when the server refuses.
    pub fn release(mut self) -> Result<Released> {
        self.release_in_place()
    }

    pub(crate) fn release_in_place(&mut self) -> Result<Released> {
        self.let_go(true).unwrap_or(Err(LockError::Forked))
    }

    /// Ends the lease, then its renewal, then the lock; in this order, so that nobody believes in a lock that may be
    /// free. `None` when there is nothing to do.
    fn let_go(&mut self, asked: bool) -> Option<Result<Released>> {
        let (registration, mgr) = (self.registration.take(), self.mgr.take()?);
        if !mgr.in_own_process() {
            // Threads that held locks or sockets are not in this process: touch nothing of theirs.
            std::mem::forget((registration, mgr, self.lease.clone()));
            return None;
        }
        let was_held = self.lease.end(End::Released);
        drop(registration);
        if was_held || asked {
            return Some(mgr.release_claim(&self.lease.claim, was_held));
        }
        if matches!(self.lease.ended(), Some(End::Lost(LockLost::Expired | LockLost::MaxHold))) {
            // A renewal may have been applied without our knowing.
            mgr.undo_claim(&self.lease.claim);
        }
        None
    }

    fn in_own_process(&self) -> bool {
        self.mgr.as_ref().is_some_and(RedisMgr::in_own_process)
    }
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.let_go(false) {
            log::warn!("released lock {} in the background: {error}", Quoted(self.name()));
        }
    }
}

impl fmt::Debug for LockGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LockGuard")
            .field("name", &self.name())
            .field("id", self.id())
            .field("fencing_token", &self.fencing_token())
            .field("remaining", &self.remaining())
            .finish_non_exhaustive()
    }
}
