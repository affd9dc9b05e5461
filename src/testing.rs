//! For the tests of programs that use this library. With the feature `testing`.
//!
//! * [`MemoryServer`] is a lock server in memory, for tests that use the real managers.
//! * For a fake of your own, implement [`LockManager`](crate::LockManager). What it returns can be
//!   constructed: `LockError::held` and the like, `LockLost::taken`, `Holder::new`,
//!   `FencingToken::new`, and the `new` of each event.

mod values;

use std::{fmt, sync::Arc, time::Duration};

use crate::{
    backend::memory::{MemoryBackend, Server},
    config::{Config, DEFAULT_PREFIX},
    core::key::LockKey,
    error::{LockError, Result},
    manager::{Manager, ManagerHandle},
    observe::Observer,
    redis_manager::RedisMgr,
    sys::{
        fork,
        manual_clock::{self, ManualClock},
    },
};

/// How the server is named in messages.
const LABEL: &str = "memory";

/// A lock server in memory, for tests: no Redis, no sockets, no set-up. Its managers run the same
/// code as managers of a Redis server: they wait in the queue, renew, lose locks, and report
/// events. Only the server is replaced, by one in this process, and with it what concerns
/// connections.
///
/// Clones share the server. Each manager behaves like one of another process. Names are those of
/// locks, with the default [prefix](Config::prefix).
///
/// ```
/// use std::time::Duration;
///
/// use distlock::{LockError, LockLost, testing::MemoryServer};
///
/// let server = MemoryServer::new(); // its clock is stopped
/// let mgr = server.manager_with(|config| config.ttl(Duration::from_secs(10)));
///
/// // Somebody else has the lock. The call waits for 5 s, which takes no time.
/// server.hold("orders:42", "otherhost|pid7|tid7|ts1", Duration::from_secs(60));
/// match mgr.try_lock_for("orders:42", Duration::from_secs(5)) {
///     Err(LockError::Timeout { holder, .. }) => {
///         assert_eq!(holder.unwrap().host(), Some("otherhost"))
///     }
///     other => panic!("{other:?}"),
/// }
/// server.advance(Duration::from_secs(60));
///
/// // We have it, keep it for an hour, and lose it.
/// let guard = mgr.try_lock("orders:42")?;
/// server.advance(Duration::from_secs(3600));
/// assert!(guard.is_held());
/// server.take_away("orders:42");
/// server.advance(Duration::from_secs(10));
/// assert_eq!(guard.lost().try_recv(), Ok(LockLost::Gone));
///
/// // The server is gone.
/// server.stop();
/// assert!(mgr.try_lock("orders:42").unwrap_err().is_unavailable());
/// # Ok::<(), LockError>(())
/// ```
///
/// For all of this in tests of a service, see
/// [docs/testing.md](https://docs.rs/crate/distlock/latest/source/docs/testing.md).
#[derive(Clone)]
pub struct MemoryServer {
    server: Arc<Server>,
    /// `None` for the real time.
    clock: Option<Arc<ManualClock>>,
}

impl MemoryServer {
    /// Starts a server whose clock is stopped until it is [advanced](Self::advance). It is also the
    /// clock of the managers: nothing expires, is renewed, or is retried meanwhile. Event handlers
    /// are called on the threads on which the events happen.
    ///
    /// While the thread that created the server waits in a call, the clock goes on. So a call that
    /// times out after five seconds does that at once. A call on another thread waits for an
    /// `advance`.
    #[expect(clippy::new_without_default, reason = "it starts a clock")]
    pub fn new() -> MemoryServer {
        let clock = ManualClock::new();
        let _entered = manual_clock::enter(Some(&clock));
        MemoryServer { server: Arc::new(Server::new()), clock: Some(clock.clone()) }
    }

    /// Starts a server whose time is the real one: a lock with a ttl of one second expires after
    /// one second.
    pub fn with_real_time() -> MemoryServer {
        MemoryServer { server: Arc::new(Server::new()), clock: None }
    }

    /// Lets this much time pass. What is due meanwhile happens in its order and before this
    /// returns: expiries, renewals, losses, events, and the time limits of calls that wait.
    ///
    /// # Panics
    ///
    /// If the time of the server is the real one.
    #[track_caller]
    #[expect(clippy::panic, reason = "a test has no other use for the error")]
    pub fn advance(&self, span: Duration) {
        match &self.clock {
            Some(clock) => clock.advance(span),
            None => panic!("the real time cannot be advanced"),
        }
    }

    /// Makes the calling thread use the server's clock.
    fn enter(&self) -> Option<manual_clock::Entered> {
        manual_clock::enter(self.clock.as_ref())
    }

    /// Creates a manager with the default configuration.
    ///
    /// # Panics
    ///
    /// If no thread can be started, or in a forked child.
    #[track_caller]
    pub fn manager(&self) -> RedisMgr {
        self.manager_with(|config| config)
    }

    /// Creates a manager. [`local_handover`](Config::local_handover) is off unless it is set: a
    /// window would stay open while the clock is stopped. There are no connections and no other
    /// servers, so settings about connections have no effect, nor have
    /// [`quarantine`](Config::quarantine), [`replicas`](Config::replicas) and
    /// [`yield_to_others`](Config::yield_to_others), [`HandleEvent`](crate::HandleEvent) is not
    /// called for an unreachable or reconnected server, and [`connection`](RedisMgr::connection)
    /// fails.
    ///
    /// # Panics
    ///
    /// If the configuration is not valid, if no thread can be started, or in a forked child.
    #[track_caller]
    #[expect(clippy::panic, reason = "a test has no other use for the error")]
    pub fn manager_with(&self, configure: impl FnOnce(Config) -> Config) -> RedisMgr {
        match self.start(configure(
            Config::new(format!("redis://{LABEL}")).local_handover(Duration::ZERO),
        )) {
            Ok(handle) => RedisMgr::from_handle(handle),
            Err(error) => panic!("no manager in memory: {error}"),
        }
    }

    fn start(&self, config: Config) -> Result<ManagerHandle> {
        if !fork::claim_process() {
            return Err(LockError::Forked);
        }
        let _entered = self.enter();
        let (config, label) = (config.validate()?, Arc::<str>::from(LABEL));
        let Config { handlers, metrics_by_lock, operation_timeout, .. } = &config.settings;
        let observer = Observer::start(handlers.clone(), label.clone(), 1, *metrics_by_lock)?;
        let backend = MemoryBackend::new(self.server.clone(), label, *operation_timeout);
        Manager::start_on(Arc::new(backend), None, observer, config).map(ManagerHandle::new)
    }

    /// Lets somebody else hold a lock for `ttl`, even if it is held: as a client in another
    /// language could that ignores the rules. `holder` is the id that [`Holder`](crate::Holder)
    /// reports.
    ///
    /// A guard that had the lock notices at its next renewal, at most a third of its ttl later.
    ///
    /// # Panics
    ///
    /// If this cannot be the name of a lock.
    #[track_caller]
    pub fn hold(&self, name: &str, holder: &str, ttl: Duration) {
        let _entered = self.enter();
        self.server.hold(&key(name), holder, ttl);
    }

    /// Takes a lock away from its holder and gives it to the first waiter, if there is one: as
    /// [`force_release`](RedisMgr::force_release) in another process would. Returns whether there
    /// was a holder.
    ///
    /// A guard that had the lock notices at its next renewal, at most a third of its ttl later.
    ///
    /// # Panics
    ///
    /// If this cannot be the name of a lock.
    #[track_caller]
    pub fn take_away(&self, name: &str) -> bool {
        let _entered = self.enter();
        self.server.take_away(&key(name))
    }

    /// Stops the server: it refuses connections, and those that exist are closed. Its data and its
    /// time go on.
    pub fn stop(&self) {
        let _entered = self.enter();
        self.server.stop();
    }

    /// Lets each reply arrive this much later. The server carries out requests at once
    /// nevertheless, and sends grant messages to waiters without a delay.
    ///
    /// If that is later than the [operation timeout](Config::operation_timeout) (by default 1 s), a
    /// call fails after that timeout with [`LockError::Unavailable`], and the manager does not know
    /// whether the request was carried out. So a lock can be held although the call that asked for
    /// it has failed, until the manager has cleaned up after the call.
    ///
    /// The delay is in the time of the server: if its clock stands, the delay takes no time.
    pub fn slow(&self, delay: Duration) {
        self.server.slow(delay);
    }

    /// Lets the server accept connections again, and reply at once.
    pub fn resume(&self) {
        self.server.resume();
    }

    /// Deletes all data: as if the server had been restarted without it. The connections of the
    /// managers are closed. A clock that stands goes on by one millisecond, as it would during a
    /// restart, so that fencing tokens rise.
    pub fn forget(&self) {
        if let Some(clock) = &self.clock {
            clock.advance(Duration::from_millis(1));
        }
        let _entered = self.enter();
        self.server.forget();
    }
}

#[track_caller]
#[expect(clippy::panic, reason = "a test has no other use for the error")]
fn key(name: &str) -> LockKey {
    match LockKey::new(DEFAULT_PREFIX, name) {
        Ok(key) => key,
        Err(error) => panic!("{}", LockError::from(error)),
    }
}

impl fmt::Debug for MemoryServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryServer").finish_non_exhaustive()
    }
}

/// What servers in memory consist of, for the simulator.
#[doc(hidden)]
pub mod servers {
    pub use crate::backend::memory::{
        scripts::{Channels, Script},
        store::{Access, Bytes, CommandError, Data, Keys, StoreResult},
    };
}
