//! The parts of a manager and how they work together. A lock begins in [`Manager::acquire`]
//! and ends in [`Manager::release`].

mod acquire;
mod acquire_all;
mod by_id;
mod detach;
mod downgrade;
mod handle;
mod local_handover;
mod release;
mod release_all;
mod renew;

use std::{
    io::{self, ErrorKind},
    sync::{Arc, OnceLock},
    time::Duration,
};

pub(crate) use self::{acquire::HeldThrough, handle::ManagerHandle};
use self::{by_id::LocksById, local_handover::HandedOver};
use crate::{
    acquire::{Acquirer, CircuitBreaker},
    backend::{
        Backend, Inspection,
        cluster::ClusterBackend,
        error::{BackendError, NodeError, NodeErrorKind},
        redis::{ConnectionPool, PooledConnections, RedisBackend, RedisSettings},
        redlock::{Redlock, join_labels},
    },
    cleanup::Cleaner,
    config::{Config, ValidatedConfig},
    core::{
        holder::Holder,
        id::random_uuid,
        key::{LockKey, MAX_NAME_BYTES},
        lease::Lease,
        pattern,
    },
    error::{Action, LockError, Result},
    local::{LocalHold, LocalQueues},
    lock_info::LockInfo,
    observe::{HoldSpan, Observer, metrics::Metrics},
    renew::{LockRenewer, Registration, RenewalPlan},
    sys::clock::{self, Moment, TimeSource},
    wait::GrantListener,
};

/// Maximum wait at a shutdown for the last log lines, events and metrics, because a process often
/// ends right after it.
const REPORTS_MAX: Duration = Duration::from_millis(200);
/// Maximum number of waiters that are listed of one lock.
const LISTED_WAITERS_MAX: u64 = 1_000;

/// The parts of a manager.
pub(crate) struct Manager {
    config: ValidatedConfig,
    backend: Arc<dyn Backend>,
    observer: Arc<Observer>,
    /// For the users' own commands; `None` if the backend has no connections.
    pool: Option<Arc<ConnectionPool>>,
    acquirer: Acquirer,
    /// Waiting threads, by lock; `None` if no lock is handed over inside the process.
    local: Option<Arc<LocalQueues<HandedOver>>>,
    renewer: LockRenewer,
    cleaner: Arc<Cleaner>,
    time: TimeSource,
    /// Time of the shutdown; empty before it.
    closed: OnceLock<Moment>,
    /// Locks without a guard, by the id that `acquire_lock` returned.
    by_id: LocksById,
}

/// A lease, and the registration that keeps it alive.
#[derive(Debug)]
pub(crate) struct HeldLock {
    pub(crate) lease: Arc<Lease>,
    pub(crate) registration: Registration,
    pub(crate) span: HoldSpan,
    pub(crate) plan: RenewalPlan,
    /// The lock may be handed over to another thread of this process.
    pub(crate) local: Option<LocalHold<HandedOver>>,
}

impl Manager {
    /// Starts the threads.
    pub(crate) fn start(config: ValidatedConfig) -> Result<Manager> {
        let (server, nodes) = (join_labels(&config.endpoints), config.endpoints.len());
        let Config { handlers, metrics_by_lock, .. } = &config.settings;
        let observer = Observer::start(handlers.clone(), server, nodes, *metrics_by_lock)?;
        let (backend, pool) = open_backend(&config, &observer)?;
        Manager::start_on(backend, pool, observer, config)
    }

    /// Starts the threads of a manager whose locks `backend` keeps.
    pub(crate) fn start_on(
        backend: Arc<dyn Backend>,
        pool: Option<Arc<ConnectionPool>>,
        observer: Arc<Observer>,
        config: ValidatedConfig,
    ) -> Result<Manager> {
        let cleaner = Arc::new(Cleaner::new(backend.clone()));
        let probe_interval = backend
            .probe_interval()
            .map_or(Duration::MAX, |most| most.min(config.settings.ttl / 3));
        let renewer = observer
            .shield(|| {
                LockRenewer::start(
                    backend.clone(),
                    observer.clone(),
                    cleaner.clone(),
                    probe_interval,
                )
            })
            .map_err(no_thread("lock renewer"))?;
        let channel = format!("distlock:client:{}", random_uuid());
        let acquirer = Acquirer {
            backend: backend.clone(),
            observer: observer.clone(),
            listener: Arc::new(GrantListener::new(backend.clone(), channel)),
            claim_window: config.settings.claim_window,
            repair_ttl: !config.settings.prefix.is_empty(),
            breaker: config.settings.fail_fast.then(CircuitBreaker::default),
        };
        let window = config.settings.local_handover;
        let local = (!window.is_zero() && config.settings.yield_to_others.is_zero())
            .then(|| Arc::new(LocalQueues::new(window)));
        Ok(Manager {
            config,
            observer,
            pool,
            backend,
            acquirer,
            local,
            renewer,
            cleaner,
            time: TimeSource::current(),
            closed: OnceLock::new(),
            by_id: LocksById::default(),
        })
    }

    pub(crate) fn label(&self) -> &str {
        self.backend.label()
    }

    pub(crate) fn metrics(&self) -> Metrics {
        self.observer.metrics()
    }

    pub(crate) fn operation_timeout(&self) -> Duration {
        self.backend.operation_timeout()
    }

    fn is_closed(&self) -> bool {
        self.closed.get().is_some()
    }

    /// Time that a call may spend on its own clean-up: one operation timeout, counted from the
    /// shutdown if there was one.
    fn time_left(&self) -> Duration {
        let timeout = self.operation_timeout();
        self.closed
            .get()
            .map_or(timeout, |at| at.saturating_add(timeout).duration_since(clock::now()))
    }

    pub(crate) fn key(&self, name: &str) -> Result<LockKey> {
        Ok(self.backend.adapt_key(LockKey::new(&self.config.settings.prefix, name)?)?)
    }

    /// Returns the current holder according to the servers.
    pub(crate) fn inspect(&self, key: &LockKey) -> Result<Option<Holder>> {
        self.look(key, Action::Inspect, || self.backend.inspect(key))
    }

    /// Looks at a lock, as a part of this action.
    fn look<T>(
        &self,
        key: &LockKey,
        action: Action,
        look: impl FnOnce() -> std::result::Result<Inspection<T>, BackendError>,
    ) -> Result<Option<T>> {
        let _time = self.time.enter();
        let failed = |error| self.backend.lock_error(error, action, Some(key.name()));
        match look().map_err(failed)? {
            Inspection::Held(found) => Ok(Some(found)),
            Inspection::Free => Ok(None),
            Inspection::WrongType => Err(self.backend.wrong_type(key)),
        }
    }

    /// Returns the locks whose names match `pattern`.
    pub(crate) fn locks(&self, pattern: &str) -> Result<Vec<LockInfo>> {
        if pattern.len() > MAX_NAME_BYTES {
            let reason =
                format!("the pattern has {} bytes; the limit is {MAX_NAME_BYTES}", pattern.len());
            return Err(LockError::InvalidName { reason });
        }
        if let Some(why) = pattern::why_no_match(pattern) {
            let reason = format!("no name can match the pattern: {why}");
            return Err(LockError::InvalidName { reason });
        }
        let _time = self.time.enter();
        let failed = |error| self.backend.lock_error(error, Action::Inspect, None);
        self.backend.list(&self.config.settings.prefix, pattern).map_err(failed)
    }

    pub(crate) fn lock_info(&self, key: &LockKey) -> Result<Option<LockInfo>> {
        self.look(key, Action::Inspect, || self.backend.lookup(key, LISTED_WAITERS_MAX))
    }

    pub(crate) fn ping(&self) -> Result<Duration> {
        let _time = self.time.enter();
        self.backend.ping().map_err(|error| self.backend.lock_error(error, Action::Ping, None))
    }

    pub(crate) fn connection(&self) -> Result<PooledConnections> {
        let connections = match &self.pool {
            Some(pool) => pool.lend(self.backend.operation_deadline()),
            None => Err(NodeError::not_applied(NodeErrorKind::Ineligible(
                self.backend.why_no_connection().to_owned(),
            ))),
        };
        connections.map_err(|failure| {
            self.backend.lock_error(BackendError::Node(failure), Action::Connect, None)
        })
    }

    /// During a shutdown on another thread, waits until it has released the locks. Otherwise a
    /// program that ends once its calls return would leave them to expire.
    pub(crate) fn await_shutdown(&self) {
        if let Some(closed) = self.closed.get() {
            let _time = self.time.enter();
            self.renewer.await_stop(closed.saturating_add(self.operation_timeout()));
        }
    }

    /// Shuts everything down. Exchanges with the servers end within `timeout`.
    fn shutdown(&self, timeout: Duration) {
        let _time = self.time.enter();
        let _ = self.closed.set(clock::now());
        self.acquirer.listener.close();
        if let Some(local) = &self.local {
            local.close();
        }
        self.backend.end_waits();
        // The renewer ends their leases together with all others.
        let held_by_id = self.by_id.take_all();
        let deadline = clock::now().saturating_add(timeout);
        self.renewer.stop(deadline);
        drop(held_by_id);
        self.backend.close();
        // The renewer's timer closes the observer once it has reported all losses.
        self.observer.await_reports(deadline.min(clock::now().saturating_add(REPORTS_MAX)));
    }
}

/// A backend, and the pool for users' own commands, if there is one.
type OpenBackend = (Arc<dyn Backend>, Option<Arc<ConnectionPool>>);

/// Connects to several nodes here, to validate them. Connects to a single server only when it is
/// first needed.
fn open_backend(config: &ValidatedConfig, observer: &Arc<Observer>) -> Result<OpenBackend> {
    let no_pool = || no_thread("connection pool")(ErrorKind::WouldBlock.into());
    let ValidatedConfig { endpoints, quarantine, settings } = config;
    let Config { pool_size, operation_timeout, spin, yield_to_others, replicas, .. } = *settings;
    if let [endpoint] = &**endpoints {
        let settings = RedisSettings {
            pool_size,
            operation_timeout,
            spin_max: spin,
            yield_to_others,
            quarantine: *quarantine,
            replicas,
        };
        if !endpoint.cluster.is_empty() {
            let backend = ClusterBackend::new(endpoint.clone(), settings, observer.clone());
            return Ok((Arc::new(backend), None));
        }
        let backend =
            RedisBackend::new(endpoint.clone(), settings, observer.clone()).ok_or_else(no_pool)?;
        let pool = backend.pool().clone();
        return Ok((Arc::new(backend), Some(pool)));
    }
    let redlock = Redlock::new(endpoints, pool_size, operation_timeout, *quarantine, observer)
        .ok_or_else(no_pool)?;
    redlock.validate_nodes()?;
    let pool = redlock.pool().clone();
    Ok((Arc::new(redlock), Some(pool)))
}

fn no_thread(purpose: &'static str) -> impl FnOnce(io::Error) -> LockError {
    move |cause| LockError::NoThread { purpose, cause }
}
