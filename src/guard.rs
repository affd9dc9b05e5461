//! `LockGuard`: the user's handle for a lease. Dropping it releases the lock.

mod guard_type;

use std::{
    fmt,
    panic::{RefUnwindSafe, UnwindSafe},
    sync::{Arc, LazyLock},
    time::Duration,
};

use crossbeam_channel::{Receiver, bounded};

pub(crate) use self::guard_type::guard_type;
use crate::{
    core::{
        detached::Detached,
        id::LockId,
        kind::LockKind,
        lease::{Lease, LossChannel},
        lock_lost::LockLost,
        token::FencingToken,
    },
    error::{LockError, Result},
    lock_info::Released,
    manager::{HeldLock, Manager, ManagerHandle},
    renew::{Registration, RenewalPlan},
    sys::{
        clock::{self, Moment},
        display::{HumanDuration, Quoted},
        fork,
    },
};

/// A held lock, released when this guard is dropped.
///
/// # Validity
///
/// A lock can expire on the server while its holder is paused, cut off or slow, and nothing can
/// notify the holder in time. So the guard considers its lease valid only until a local deadline,
/// counted from before the last confirmed request was sent. [`is_held`](Self::is_held) compares
/// that deadline with the clock. The result is exact even if no other thread of the process has run
/// for hours.
///
/// Check the guard before each step that must not happen twice. Where the resource can check it,
/// send the [`fencing_token`](Self::fencing_token) with each write: only that closes the gap
/// between the check and the write.
///
/// # Dropping
///
/// Bind the guard to a name, such as `_guard`. These drop it, and so release the lock, before the
/// work begins, and the compiler does not warn: `let _ = mgr.lock("x")?;`, `let Ok(_) =
/// mgr.try_lock("x") else { return };`, and `if mgr.try_lock("x").is_ok() { work() }`.
///
/// Dropping stops the renewal, then releases the lock on the server. It blocks for one round trip,
/// at most for one [operation timeout](crate::Config::operation_timeout). If the server does not
/// reply, a background thread retries the release until the lock has expired; in a database, the
/// connection is closed instead. Dropping never panics; call [`release`](Self::release) to learn
/// the outcome. In a forked child, dropping does nothing.
///
/// A leaked guard keeps its lock until [`max_hold`](crate::LockOptions::max_hold), or forever if
/// there is no such limit.
///
/// A guard keeps its manager alive. It can be sent to another thread.
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
#[must_use = "if unused, the lock is released at once; bind it to a name, not to `_`"]
pub struct LockGuard {
    lease: Arc<Lease>,
    /// `None` once the guard has been released or dropped.
    held: Option<(HeldLock, Arc<ManagerHandle>)>,
}

impl LockGuard {
    pub(crate) fn new(held: HeldLock, manager: Arc<ManagerHandle>) -> LockGuard {
        LockGuard { lease: held.lease.clone(), held: Some((held, manager)) }
    }

    /// Returns the name of the lock, without its prefix.
    pub fn name(&self) -> &str {
        self.lease.claim.key.name()
    }

    /// Returns the identifier of this acquisition: the value of the lock key in Redis.
    ///
    /// If another thread of this manager has [handed the lock over](crate::Config::local_handover),
    /// this is the identifier of the acquisition to which the server granted it. Only the
    /// [tokens](Self::fencing_token) of such guards differ.
    pub fn id(&self) -> &LockId {
        &self.lease.claim.id
    }

    /// Returns how the lock is held: alone, or together with others.
    pub fn kind(&self) -> LockKind {
        self.lease.claim.kind
    }

    /// Returns the fencing token of this acquisition. It never changes, even if the lock is lost.
    pub fn fencing_token(&self) -> FencingToken {
        self.lease.token()
    }

    /// Returns true while the lease is valid. Compares a local deadline with the clock: no round
    /// trip, no waiting. Once false, always false.
    pub fn is_held(&self) -> bool {
        // A forked child has a copy of the guard, but not the lock.
        !fork::is_forked_child() && self.is_held_here()
    }

    fn is_held_here(&self) -> bool {
        let is_held = self.lease.is_held(self.lease.now());
        if !is_held {
            self.lease.on_end_noticed();
        }
        is_held
    }

    /// Returns the time left until the lease expires unless it is renewed; zero once the lock is
    /// lost.
    pub fn remaining(&self) -> Duration {
        let now = self.lease.now();
        if !fork::is_forked_child() && self.lease.is_held(now) {
            self.lease.deadline().duration_since(now)
        } else {
            Duration::ZERO
        }
    }

    /// Checks [`is_held`](Self::is_held), for use with `?`.
    ///
    /// # Errors
    ///
    /// [`LockError::Lost`] with the reason if the lock is lost. [`LockError::Forked`] in a forked
    /// child.
    pub fn ensure_held(&self) -> Result<()> {
        if fork::is_forked_child() {
            return Err(LockError::Forked);
        }
        if self.is_held_here() { Ok(()) } else { Err(LockError::not_held(&self.lease)) }
    }

    /// Returns a channel that receives one message, with the reason, when the lock is lost: as soon
    /// as the server reports it, and at the lease's deadline at the latest.
    ///
    /// When the lock is released instead, the channel closes without a message. In a forked child
    /// it is closed.
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
        // In a forked child, the lease's mutex may be locked by a thread of the parent.
        forked_channel().unwrap_or_else(|| self.lease.lost())
    }

    /// Renews the lease now. For [`LockOptions::renew(false)`](crate::LockOptions::renew), and to
    /// make sure of the lock before a long step. Blocks for one round trip, at most for one
    /// [operation timeout](crate::Config::operation_timeout).
    ///
    /// ```
    /// # #[cfg(feature = "testing")] {
    /// # use std::time::Duration;
    /// # let server = distlock::testing::MemoryServer::new();
    /// # let mgr = server.manager();
    /// let options = distlock::LockOptions::new().ttl(Duration::from_secs(10)).renew(false);
    /// let guard = mgr.lock_with("orders:42", &options)?;
    /// # server.advance(Duration::from_secs(6));
    /// guard.renew()?; // another 10 s from now on
    /// # assert!(guard.remaining() > Duration::from_secs(9));
    /// # }
    /// # Ok::<(), distlock::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`LockError::Lost`] if the lock is lost. If the server does not reply, or refuses, the
    /// errors of [`release`](Self::release); the renewal is then retried while the lease is valid.
    pub fn renew(&self) -> Result<()> {
        let (lease, inner) = self.renewable()?;
        inner.renew(&[lease])
    }

    /// Renews the lease now with another ttl, which later renewals use too. A longer ttl counts
    /// from now on. A shorter one counts once the former one has run out: the time left never
    /// shrinks. Blocks like [`renew`](Self::renew).
    ///
    /// ```
    /// # #[cfg(feature = "testing")] {
    /// # use std::time::Duration;
    /// # let mgr = distlock::testing::MemoryServer::new().manager();
    /// let guard = mgr.lock("orders:42")?;
    /// guard.extend(Duration::from_secs(60))?;
    /// assert!(guard.remaining() > Duration::from_secs(59));
    /// # }
    /// # Ok::<(), distlock::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`LockError::InvalidOptions`] if the ttl is out of range, or if the lock is in a database or
    /// on several nodes. Otherwise the errors of [`renew`](Self::renew).
    pub fn extend(&self, ttl: Duration) -> Result<()> {
        let (lease, inner) = self.renewable()?;
        inner.extend(&[lease], ttl)
    }

    /// What the manager needs to renew the lease.
    pub(crate) fn renewable(&self) -> Result<((&Arc<Lease>, &Registration), &Manager)> {
        self.ensure_held()?;
        let (held, manager) = self.held.as_ref().ok_or(LockError::Shutdown)?;
        Ok(((&held.lease, &held.registration), manager.manager()?))
    }

    /// Releases the lock and returns the outcome. Blocks for one round trip, at most for one
    /// [operation timeout](crate::Config::operation_timeout).
    ///
    /// # Errors
    ///
    /// [`LockError::Unavailable`] if the server does not reply; a background thread then retries
    /// the release until the lock has expired. In a database, the connection is closed instead, and
    /// the server releases the lock when it notices.
    ///
    /// [`LockError::Refused`] if the server refuses. A former master refuses with `READONLY` until
    /// its host name leads to the new master; that error takes one operation timeout, because the
    /// release is retried for that long.
    ///
    /// [`LockError::Shutdown`] if the manager was shut down. The shutdown has released the lock, or
    /// leaves it to expire if that failed.
    pub fn release(mut self) -> Result<Released> {
        self.release_in_place()
    }

    /// Releases the lock in the background, and does not wait. A failure is logged, and the release
    /// is retried until the lock has expired. If this manager acquires the same lock before the
    /// release is confirmed, that call completes the release first, within half an operation
    /// timeout. Other clients get the lock as soon as the server has carried out the release.
    ///
    /// In a database, this waits for the release. So does the last guard of a manager that is
    /// dropped, because the manager then ends. A process that ends earlier may not have sent the
    /// release, and the lock then stays until it expires: call
    /// [`RedisMgr::shutdown`](crate::RedisMgr::shutdown) first.
    ///
    /// ```
    /// # #[cfg(feature = "testing")] {
    /// # let mgr = distlock::testing::MemoryServer::new().manager();
    /// let guard = mgr.lock("orders:42")?;
    /// guard.release_later(); // returns at once
    /// assert!(mgr.try_lock("orders:42").is_ok());
    /// # }
    /// # Ok::<(), distlock::LockError>(())
    /// ```
    pub fn release_later(mut self) {
        let Some((held, manager)) = self.take_parts() else { return };
        let released = manager.release(|inner, timeout| inner.give_up(held, true, timeout));
        self.log_failed_release(released);
    }

    /// Leaves the lock to a successor, usually in another process. Renews it once, and then neither
    /// renews nor releases it: it expires after its ttl unless it is
    /// [adopted](crate::RedisMgr::adopt) before. Blocks like [`renew`](Self::renew). If a
    /// connection broke while the lock was acquired, then waits until the server ignores the lost
    /// request: for at most one [operation timeout](crate::Config::operation_timeout) after it was
    /// sent.
    ///
    /// ```
    /// # #[cfg(feature = "testing")] {
    /// # let server = distlock::testing::MemoryServer::new();
    /// # let (mgr, other) = (server.manager(), server.manager());
    /// let text = mgr.lock("orders:42")?.detach()?.to_string(); // send it to the other process
    /// let guard = other.adopt(&text.parse()?)?; // there
    /// assert!(guard.is_held());
    /// # }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`LockError::InvalidOptions`] if the lock is in a database, on several nodes, or [held at
    /// least](crate::LockOptions::hold_at_least) for a time. Otherwise the errors of
    /// [`renew`](Self::renew). After an error, the lock is released as if the guard were dropped.
    pub fn detach(mut self) -> Result<Detached> {
        let ((lease, registration), inner) = self.renewable()?;
        inner.prepare_detach(lease, registration)?;
        let Some((held, manager)) = self.take_parts() else { return Err(LockError::Forked) };
        manager.release(|inner, _| inner.detach(held)).ok_or(LockError::Shutdown)?
    }

    /// Whether the lock is held, and nothing but a release or a loss will end that.
    pub(crate) fn is_held_until_released(&self) -> bool {
        let is_endless = |plan: &RenewalPlan| plan.renew && plan.hold_until == Moment::NEVER;
        self.is_held() && self.held.as_ref().is_some_and(|(held, _)| is_endless(&held.plan))
    }

    pub(crate) fn is_released_in_background(&self) -> bool {
        self.lease.is_released_in_background
    }

    /// Whether [`release_later`](Self::release_later) does not wait.
    pub(crate) fn can_release_in_background(&self) -> bool {
        let manager = self.held.as_ref().and_then(|(_, handle)| handle.manager_unless_forked());
        manager.is_some_and(Manager::releases_in_background)
    }

    /// Has a loss reported to the channel of several guards. Call it before [`lost`](Self::lost).
    pub(crate) fn report_loss_to(&self, channel: &Arc<LossChannel>) {
        self.lease.report_loss_to(channel);
    }

    fn log_failed_release(&self, released: Option<Result<()>>) {
        if let Some(Err(error)) = released {
            log_safely!(warn, "{error}");
        }
    }

    /// Logs that a guard was dropped whose lock had been reported as lost, unless the holder has
    /// noticed the loss.
    pub(crate) fn log_drop_after_loss(&self) {
        if fork::is_forked_child() || self.lease.is_end_noticed() {
            return;
        }
        match self.lease.reported_loss(self.lease.now()) {
            // The program has ended its locks itself.
            None | Some((LockLost::Shutdown, _)) => {}
            Some((why, ago)) => log_safely!(
                warn,
                "the guard of lock {} was dropped {} after the lock was lost: {why}; work done \
                 since then was not protected",
                Quoted(self.name()),
                HumanDuration(ago)
            ),
        }
    }

    pub(crate) fn release_in_place(&mut self) -> Result<Released> {
        let Some((held, manager)) = self.take_parts() else { return Err(LockError::Forked) };
        manager.release(|inner, timeout| inner.release(held, timeout)).ok_or(LockError::Shutdown)?
    }

    /// Has the locks of several guards of one manager released.
    pub(crate) fn release_all(
        guards: &mut [LockGuard],
        release: impl FnOnce(&Manager, Vec<HeldLock>, Duration) -> Result<Released>,
    ) -> Result<Released> {
        let parts: Option<Vec<_>> = guards.iter_mut().map(LockGuard::take_parts).collect();
        let (held, mut managers): (_, Vec<_>) = parts.ok_or(LockError::Forked)?.into_iter().unzip();
        // Only the last one may be the last guard of the manager.
        let Some(manager) = managers.pop() else { return Ok(Released::Released) };
        drop(managers);
        manager
            .release(|inner, timeout| release(inner, held, timeout))
            .ok_or(LockError::Shutdown)?
    }

    /// Turns a write lock into a read lock.
    pub(crate) fn downgrade(mut self) -> Result<LockGuard> {
        self.ensure_held()?;
        let Some((held, manager)) = self.take_parts() else { return Err(LockError::Forked) };
        let started = clock::now();
        // Also after a shutdown: otherwise nobody would release the lock.
        let inner = manager.manager_unless_forked().ok_or(LockError::Forked)?;
        match inner.downgrade(held) {
            Ok(held) => Ok(LockGuard::new(held, manager)),
            Err(error) => manager.maybe_shut_down(started, Err(error)),
        }
    }

    /// Returns `None` if there is nothing to release.
    fn take_parts(&mut self) -> Option<(HeldLock, Arc<ManagerHandle>)> {
        let parts = self.held.take()?;
        if fork::is_forked_child() {
            // The child must not touch these values, not even to free them.
            std::mem::forget(parts);
            return None;
        }
        Some(parts)
    }
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        let Some((held, manager)) = self.take_parts() else { return };
        let in_background = self.is_released_in_background();
        let released =
            manager.release(|inner, timeout| inner.give_up(held, in_background, timeout));
        self.log_failed_release(released);
        self.log_drop_after_loss();
    }
}

// A panic cannot leave a guard in a broken state: no mutex inside is held while user code runs.
impl UnwindSafe for LockGuard {}
impl RefUnwindSafe for LockGuard {}

/// What a forked child, which holds no lock, gets in place of a channel for losses: a closed one.
pub(crate) fn forked_channel() -> Option<&'static Receiver<LockLost>> {
    static CLOSED: LazyLock<Receiver<LockLost>> = LazyLock::new(|| bounded(0).1);
    fork::is_forked_child().then(|| &*CLOSED)
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
    use crate::{Config, Holder, LockError, LockId, LockOptions, RedisMgr, ReentrantGuard};

    /// Fails to compile if a type loses `Send` or `Sync`: a guard may be dropped on another thread.
    #[test]
    fn public_types_are_send_and_sync() {
        fn crosses<T: Send + Sync>(_: Option<T>) {}
        crosses::<(LockGuard, RedisMgr, LockError, LockLost)>(None);
        crosses::<(Config, LockOptions, LockId, Holder)>(None);
    }

    /// Fails to compile if a type cannot be used inside of `catch_unwind`.
    #[test]
    fn manager_and_guards_are_unwind_safe() {
        fn survives<T: UnwindSafe + RefUnwindSafe>(_: Option<T>) {}
        survives::<(LockGuard, ReentrantGuard, RedisMgr)>(None);
    }
}
