//! `LockOptions`: how one lock is taken and held.

use std::time::Duration;

#[expect(unused_imports, reason = "the documentation leads there")]
use super::Config;

/// How one lock is taken and held; what is not said comes from the [`Config`].
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
    pub(super) renew: bool,
    pub(super) max_hold: Option<Duration>,
}

impl LockOptions {
    /// Waits for its turn without a limit, renewed until released.
    pub fn new() -> LockOptions {
        LockOptions { ttl: None, wait: None, renew: true, max_hold: None }
    }

    /// The lease, 10 ms to 24 h, in whole milliseconds (rounded down). Defaults to [`Config::ttl`].
    pub fn ttl(mut self, ttl: Duration) -> LockOptions {
        self.ttl = Some(ttl);
        self
    }

    /// The longest time to wait for the lock. Zero tries once. Defaults to no limit.
    pub fn wait(mut self, longest: Duration) -> LockOptions {
        self.wait = Some(longest);
        self
    }

    /// Whether the lease is renewed while the lock is held. Defaults to true. Without renewal the lock is lost one
    /// lease after it was taken.
    pub fn renew(mut self, renew: bool) -> LockOptions {
        self.renew = renew;
        self
    }

    /// The longest time the lock is held: then it is given up, and its holder learns [`LockLost::MaxHold`]. A bound
    /// on holders that hang. Defaults to [`Config::max_hold`].
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
