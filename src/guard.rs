//! `LockGuard`: the user's hand on a lease, and what letting go of it does.

use std::{
    fmt,
    sync::{Arc, LazyLock},
    time::Duration,
};

use crossbeam_channel::{Receiver, bounded};

use crate::{
    clock,
    error::{LockError, LockLost, Result},
    fork,
    id::LockId,
    lease::{End, Lease},
    released::Released,
    renewer::Registration,
    service::{Core, Kept, Service},
    text::Quoted,
    token::FencingToken,
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
    service: Option<Arc<Service>>,
}

impl LockGuard {
    pub(crate) fn new(kept: Kept, service: Arc<Service>) -> LockGuard {
        LockGuard { lease: kept.lease, registration: Some(kept.registration), service: Some(service) }
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
        !fork::is_child() && self.lease.is_held(clock::now())
    }

    /// How much longer the lock may be believed in without another renewal; zero when it is lost.
    pub fn remaining(&self) -> Duration {
        let now = clock::now();
        if !fork::is_child() && self.lease.is_held(now) { self.lease.deadline().after(now) } else { Duration::ZERO }
    }

    /// [`is_held`](Self::is_held), for use with `?`.
    ///
    /// # Errors
    ///
    /// [`LockError::Lost`] with the reason when the lock is lost; [`LockError::Forked`] in a forked child.
    pub fn ensure_held(&self) -> Result<()> {
        if fork::is_child() {
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
    /// When the lock is released instead, the channel is closed without a message; in a forked child it is closed.
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
        /// Of a process that holds no lock.
        static CLOSED: LazyLock<Receiver<LockLost>> = LazyLock::new(|| bounded(0).1);
        if fork::is_child() {
            // Who tells, in the parent, may have had the lease locked when it forked.
            return &CLOSED;
        }
        self.lease.lost()
    }

    /// Releases the lock and says how that went. Blocks for a round trip, at most for one
    /// [operation timeout](crate::Config::operation_timeout).
    ///
    /// # Errors
    ///
    /// [`LockError::Unavailable`] when the server does not answer: the release is then repeated in the background
    /// until the lock has expired. [`LockError::Refused`] when the server refuses; with `READONLY`, as a former master does
    /// until its name leads to the next one, only after an operation timeout.
    pub fn release(mut self) -> Result<Released> {
        self.release_in_place()
    }

    pub(crate) fn release_in_place(&mut self) -> Result<Released> {
        let Some((kept, service)) = self.take_apart() else { return Err(LockError::Forked) };
        part(service, |core, patience| core.give_up(kept, patience)).ok_or(LockError::Shutdown)?
    }

    /// `None` when there is nothing to let go of.
    fn take_apart(&mut self) -> Option<(Kept, Arc<Service>)> {
        let (registration, service) = (self.registration.take()?, self.service.take()?);
        let kept = Kept { lease: self.lease.clone(), registration };
        if fork::is_child() {
            // Touch nothing, not even to free it.
            std::mem::forget((kept, service));
            return None;
        }
        Some((kept, service))
    }
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        let Some((kept, service)) = self.take_apart() else { return };
        if let Some(Err(error)) = part(service, |core, patience| core.let_go(kept, patience)) {
            say!(warn, "releases lock {} in the background: {error}", Quoted(self.name()));
        }
    }
}

/// Lets go of a lock, within one operation timeout. The last guard to go also shuts the manager down, and leaves half of the
/// time for that. `None` when the manager was shut down in between.
fn part<T>(service: Arc<Service>, release: impl FnOnce(&Core, Duration) -> T) -> Option<T> {
    let started = clock::now();
    let core = service.core_for_ending()?;
    let timeout = core.operation_timeout();
    let patience = if Arc::strong_count(&service) == 1 { timeout / 2 } else { timeout };
    let released = release(core, patience);
    // Of several that go at once, who is the last shows now.
    if let Some(service) = Arc::into_inner(service) {
        service.end(started.saturating_add(timeout).after(clock::now()));
    }
    Some(released)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Config, Holder, LockError, LockId, LockOptions, RedisMgr};

    /// Compiles only if they are; a guard may be dropped by another thread than the one that took the lock.
    #[test]
    fn what_may_cross_threads_does() {
        fn crosses<T: Send + Sync>(_: Option<T>) {}
        crosses::<(LockGuard, RedisMgr, LockError, LockLost)>(None);
        crosses::<(Config, LockOptions, LockId, Holder)>(None);
    }
}
