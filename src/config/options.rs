//! `LockOptions`: how one lock is acquired and held.

use std::time::{Duration, Instant};

use crate::{core::cancel::CancelToken, sys::clock};

#[expect(unused_imports, reason = "linked from the documentation")]
use super::Config;

/// How one lock is acquired and held. Unset options come from the [`Config`].
///
/// ```
/// use std::time::Duration;
/// let options = distlock::LockOptions::new()
///     .ttl(Duration::from_secs(30))
///     .wait(Duration::from_secs(5))
///     .max_hold(Duration::from_secs(600));
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct LockOptions {
    pub(super) ttl: Option<Duration>,
    pub(super) wait: Option<Duration>,
    pub(super) deadline: Option<Instant>,
    pub(super) cancel: Option<CancelToken>,
    pub(super) renew: bool,
    pub(super) release_in_background: bool,
    pub(super) hold_at_least: Duration,
    pub(super) max_hold: Option<Duration>,
}

impl LockOptions {
    /// Creates options that wait without a limit, and renew the lock until it is released.
    pub fn new() -> LockOptions {
        LockOptions {
            ttl: None,
            wait: None,
            deadline: None,
            cancel: None,
            renew: true,
            release_in_background: false,
            hold_at_least: Duration::ZERO,
            max_hold: None,
        }
    }

    /// How long a call that begins now may wait; `None` for no limit.
    pub(crate) fn wait_limit(&self) -> Option<Duration> {
        let left = self.deadline.map(clock::time_until);
        self.wait.map_or(left, |wait| Some(left.map_or(wait, |left| left.min(wait))))
    }

    pub(crate) fn is_held_at_least(&self) -> bool {
        !self.hold_at_least.is_zero()
    }

    /// Sets the ttl of the lease, from 10 ms to 24 h, rounded down to whole milliseconds. Defaults
    /// to [`Config::ttl`].
    pub fn ttl(mut self, ttl: Duration) -> LockOptions {
        self.ttl = Some(ttl);
        self
    }

    /// Sets the maximum time to wait for the lock. Zero tries once. Defaults to no limit.
    pub fn wait(mut self, longest: Duration) -> LockOptions {
        self.wait = Some(longest);
        self
    }

    /// Sets the time until which to wait for the lock: for several calls that must all end by then.
    /// If [`wait`](Self::wait) is set too, the earlier end counts. A time that has passed tries
    /// once.
    ///
    /// ```
    /// # #[cfg(feature = "testing")] {
    /// # let mgr = distlock::testing::MemoryServer::new().manager();
    /// use std::time::{Duration, Instant};
    /// let options =
    ///     distlock::LockOptions::new().deadline(Instant::now() + Duration::from_secs(5));
    /// let first = mgr.lock_with("stock", &options)?;
    /// let second = mgr.lock_with("prices", &options)?; // both within 5 s
    /// # assert!(first.is_held() && second.is_held());
    /// # }
    /// # Ok::<(), distlock::LockError>(())
    /// ```
    pub fn deadline(mut self, end: Instant) -> LockOptions {
        self.deadline = Some(end);
        self
    }

    /// Sets a token with which another thread ends the wait: [`CancelToken::cancel`].
    pub fn cancel(mut self, token: &CancelToken) -> LockOptions {
        self.cancel = Some(token.clone());
        self
    }

    /// Sets whether the lease is renewed while the lock is held. Defaults to true. Without renewal,
    /// the lock is lost one ttl after it was acquired.
    pub fn renew(mut self, renew: bool) -> LockOptions {
        self.renew = renew;
        self
    }

    /// Sets whether dropping the guard does not wait for the release, as if
    /// [`LockGuard::release_later`](crate::LockGuard::release_later) had been called. Defaults to
    /// false. Has no effect on [`LockGuard::release`](crate::LockGuard::release), and none in a
    /// database. Call [`RedisMgr::shutdown`](crate::RedisMgr::shutdown) before the process ends,
    /// or the last releases may not be sent.
    pub fn release_in_background(mut self, in_background: bool) -> LockOptions {
        self.release_in_background = in_background;
        self
    }

    /// Sets the time for which the lock stays taken, counted from its acquisition. If it is
    /// released earlier, or if its holder dies, it stays taken until then. So a job that several
    /// machines start at the same time runs once per period, even if it takes less time than
    /// their clocks differ by. Defaults to zero; at most 24 h.
    ///
    /// Use it with a [`wait`](Self::wait) of zero: a call that waits gets the lock once the period
    /// has passed. With permits of a semaphore, this limits a rate: at most `limit` per period. If
    /// the work fails and must run again before that, free the lock first:
    /// [`RedisMgr::force_release_if`](crate::RedisMgr::force_release_if) with the id of the guard.
    ///
    /// Until the time has ended, [`Holder::is_kept`](crate::Holder::is_kept) says that the lock has
    /// been released. The call for the lock blocks for one round trip more if it had to wait. Not
    /// for read-write locks, not for several names, not with several nodes, and not in a database.
    ///
    /// ```
    /// # #[cfg(feature = "testing")] {
    /// # use std::time::Duration;
    /// # let server = distlock::testing::MemoryServer::new();
    /// # let mgr = server.manager();
    /// let options = distlock::LockOptions::new()
    ///     .wait(Duration::ZERO)
    ///     .hold_at_least(Duration::from_secs(300));
    /// let run = || match mgr.lock_with("nightly", &options) {
    ///     Ok(_guard) => Ok(true), // the job
    ///     Err(error) if error.is_contended() => Ok(false),
    ///     Err(error) => Err(error),
    /// };
    /// assert_eq!((run()?, run()?), (true, false));
    /// # server.advance(Duration::from_secs(301));
    /// # assert!(run()?);
    /// # }
    /// # Ok::<(), distlock::LockError>(())
    /// ```
    pub fn hold_at_least(mut self, period: Duration) -> LockOptions {
        self.hold_at_least = period;
        self
    }

    /// Sets the maximum time that the lock is held, as a bound on holders that hang. The lock is
    /// then released, and its holder receives [`LockLost::MaxHold`]. Defaults to
    /// [`Config::max_hold`]. [`hold_at_least`](Self::hold_at_least) keeps it from others
    /// nevertheless.
    ///
    /// [`LockLost::MaxHold`]: crate::LockLost::MaxHold
    pub fn max_hold(mut self, limit: Duration) -> LockOptions {
        self.max_hold = Some(limit);
        self
    }
}

impl Default for LockOptions {
    fn default() -> LockOptions {
        LockOptions::new()
    }
}
