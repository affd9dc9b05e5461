//! `MultiGuard`: locks of several names, all or none.

use std::{fmt, sync::Arc, time::Duration};

use crossbeam_channel::Receiver;

use crate::{
    config::LockOptions,
    core::{
        id::LockId,
        lease::{Lease, LossChannel},
        lock_lost::LockLost,
        token::FencingToken,
    },
    error::{LockError, Result},
    guard::{LockGuard, forked_channel},
    lock_info::Released,
    manager::{Manager, ManagerHandle},
    reentrant::check_not_own,
    renew::Registration,
    sys::display::Quoted,
};

/// Maximum number of names of one call; otherwise one call could use up the memory of a server.
const NAMES_MAX: usize = 1_000;

/// Several locks, held together: from [`RedisMgr::lock_all`](crate::RedisMgr::lock_all) and the
/// like. Dropping it releases them, in the reverse order of their acquisition, and blocks for at
/// most one [operation timeout](crate::Config::operation_timeout): what is not released by then is
/// released as after a failed [release](LockGuard#dropping).
///
/// If one of the locks is lost, all count as lost.
///
/// ```
/// # #[cfg(feature = "testing")] {
/// # let mgr = distlock::testing::MemoryServer::new().manager();
/// let both = mgr.lock_all(["account:1", "account:2"])?;
/// both.ensure_held()?;
/// println!("{:?} {:?}", both.token("account:1"), both.token("account:2"));
/// assert!(mgr.try_lock("account:2").unwrap_err().is_contended());
/// both.release()?;
/// # assert!(mgr.try_lock_all(["account:2", "account:1"]).is_ok());
/// # }
/// # Ok::<(), distlock::LockError>(())
/// ```
#[must_use = "if unused, the locks are released at once; bind it to a name, not to `_`"]
pub struct MultiGuard {
    /// In the order of their acquisition, which is that of their names.
    guards: Vec<LockGuard>,
    losses: Arc<LossChannel>,
}

impl MultiGuard {
    /// Acquires locks of all these names, in their order.
    pub(crate) fn acquire(
        handle: &Arc<ManagerHandle>,
        names: impl IntoIterator<Item = impl AsRef<str>>,
        options: &LockOptions,
    ) -> Result<MultiGuard> {
        let names: Vec<_> = names.into_iter().take(NAMES_MAX + 1).collect();
        let mut names: Vec<&str> = names.iter().map(AsRef::as_ref).collect();
        names.sort_unstable();
        check(&names, options)?;
        names.iter().try_for_each(|name| check_not_own(handle, name, options))?;
        let held = handle.manager()?.acquire_all(&names, options)?;
        let guards: Vec<_> =
            held.into_iter().map(|held| LockGuard::new(held, handle.clone())).collect();
        let losses = LossChannel::new();
        guards.iter().for_each(|guard| guard.report_loss_to(&losses));
        let all = MultiGuard { guards, losses };
        // The first lock may have been lost while the last one was waited for.
        all.ensure_held()?;
        Ok(all)
    }

    /// Returns the names of the locks, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.guards.iter().map(LockGuard::name)
    }

    /// Returns the fencing token of the lock with this name; `None` if it is not among these.
    pub fn token(&self, name: &str) -> Option<FencingToken> {
        self.guards.iter().find(|guard| guard.name() == name).map(LockGuard::fencing_token)
    }

    /// Returns the identifier of the holder of the lock with this name; `None` if it is not among
    /// these.
    pub fn id(&self, name: &str) -> Option<&LockId> {
        self.guards.iter().find(|guard| guard.name() == name).map(LockGuard::id)
    }

    /// Returns true while all leases are valid. No round trip, no waiting. Once false, always
    /// false.
    pub fn is_held(&self) -> bool {
        self.guards.iter().all(LockGuard::is_held)
    }

    /// Returns the time left until the first lease expires unless it is renewed.
    pub fn remaining(&self) -> Duration {
        self.guards.iter().map(LockGuard::remaining).min().unwrap_or_default()
    }

    /// Checks [`is_held`](Self::is_held), for use with `?`.
    ///
    /// # Errors
    ///
    /// As for [`LockGuard::ensure_held`]; the error names the lock that is lost.
    pub fn ensure_held(&self) -> Result<()> {
        self.guards.iter().try_for_each(LockGuard::ensure_held)
    }

    /// Returns a channel that receives one message when the first of the locks is lost. As
    /// [`LockGuard::lost`]. [`ensure_held`](Self::ensure_held) then names that lock.
    pub fn lost(&self) -> &Receiver<LockLost> {
        forked_channel().unwrap_or_else(|| self.losses.receiver())
    }

    /// Renews all leases now, as [`LockGuard::renew`] does. Blocks for one round trip or two, at
    /// most for one [operation timeout](crate::Config::operation_timeout).
    ///
    /// If one of the renewals fails, the others are carried out nonetheless. If one of the locks
    /// was lost before the call, none is renewed.
    ///
    /// # Errors
    ///
    /// [`LockError::Lost`] if one of the locks is lost; the error names it. Otherwise the error of
    /// the first renewal that failed, as for [`LockGuard::renew`]; it is then retried while the
    /// lease is valid.
    pub fn renew(&self) -> Result<()> {
        self.with_renewable(Manager::renew)
    }

    /// Renews all leases now with another ttl, which later renewals use too, as
    /// [`LockGuard::extend`] does. Blocks like [`renew`](Self::renew).
    ///
    /// ```
    /// # #[cfg(feature = "testing")] {
    /// # use std::time::Duration;
    /// # let mgr = distlock::testing::MemoryServer::new().manager();
    /// let both = mgr.lock_all(["account:1", "account:2"])?;
    /// both.extend(Duration::from_secs(60))?;
    /// assert!(both.remaining() > Duration::from_secs(59));
    /// # }
    /// # Ok::<(), distlock::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`LockError::InvalidOptions`] as for [`LockGuard::extend`]; nothing has changed then.
    /// Otherwise the errors of [`renew`](Self::renew). After an error, some of the locks may have
    /// the new ttl already; [`remaining`](Self::remaining) returns the time that all of them have.
    pub fn extend(&self, ttl: Duration) -> Result<()> {
        self.with_renewable(|manager, leases| manager.extend(leases, ttl))
    }

    fn with_renewable(
        &self,
        renew: impl FnOnce(&Manager, &[(&Arc<Lease>, &Registration)]) -> Result<()>,
    ) -> Result<()> {
        let renewable: Vec<_> =
            self.guards.iter().map(LockGuard::renewable).collect::<Result<_>>()?;
        let (leases, managers): (Vec<_>, Vec<_>) = renewable.into_iter().unzip();
        // All guards are of one manager.
        managers.first().map_or(Ok(()), |manager| renew(manager, &leases))
    }

    /// Releases all locks. Returns [`Released::Released`] if all were held until now, and otherwise
    /// the outcome of one that was not. Blocks for one round trip if there is one server, and
    /// otherwise for that of each lock. If the server does not reply, blocks for one [operation
    /// timeout](crate::Config::operation_timeout), and the locks are released in the background.
    ///
    /// # Errors
    ///
    /// As for [`LockGuard::release`].
    pub fn release(mut self) -> Result<Released> {
        LockGuard::release_all(&mut std::mem::take(&mut self.guards), Manager::release_all)
    }

    /// Releases all locks in the background. See [`LockGuard::release_later`]. In a database, this
    /// blocks as dropping the guard does.
    pub fn release_later(mut self) {
        release_later(std::mem::take(&mut self.guards));
    }
}

/// Releases locks without waiting, in reverse. In a database, where each release waits for its
/// reply, releases all within one operation timeout.
fn release_later(mut guards: Vec<LockGuard>) {
    if guards.first().is_some_and(LockGuard::can_release_in_background) {
        guards.into_iter().rev().for_each(LockGuard::release_later);
    } else {
        release_on_drop(&mut guards);
    }
}

/// Releases locks for a caller that does not need the outcome.
fn release_on_drop(guards: &mut [LockGuard]) {
    match LockGuard::release_all(guards, Manager::release_all_within) {
        Ok(_) | Err(LockError::Forked | LockError::Shutdown) => {}
        Err(error) => log_safely!(warn, "{error}"),
    }
}

/// Checks sorted names.
fn check(names: &[&str], options: &LockOptions) -> Result<()> {
    let invalid = |reason| Err(LockError::InvalidOptions { reason });
    if names.is_empty() {
        return invalid("there are no names; give at least one".into());
    }
    if names.len() > NAMES_MAX {
        return invalid(format!(
            "there are more than {NAMES_MAX} names, which is the maximum; use one lock for many of \
             them"
        ));
    }
    if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        let name = Quoted(pair[0]);
        return invalid(format!("the name {name} is given twice; leave one out"));
    }
    if options.is_held_at_least() {
        return invalid(
            "hold_at_least works with one lock only: of several, those acquired first would stay \
             taken if another one cannot be acquired"
                .into(),
        );
    }
    Ok(())
}

impl Drop for MultiGuard {
    fn drop(&mut self) {
        let in_background = |guard: &LockGuard| {
            guard.is_released_in_background() && guard.can_release_in_background()
        };
        if self.guards.first().is_some_and(in_background) {
            while self.guards.pop().is_some() {}
        } else {
            release_on_drop(&mut self.guards);
            self.guards.iter().for_each(LockGuard::log_drop_after_loss);
        }
    }
}

impl fmt::Debug for MultiGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.guards).finish()
    }
}
