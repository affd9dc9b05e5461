//! `Service`: the parts of a manager and how they work together. `Core::take` and `Core::give_up` are the whole life
//! of a lock.

mod by_id;
mod ending;

use std::{
    collections::HashMap,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;

use self::by_id::ById;
use crate::{
    acquire::{Acquirer, Crowd, Listener},
    clock::{self, Moment},
    config::{LockOptions, Settings},
    error::{Action, LockError, Result},
    event::AcquiredEvent,
    fork,
    grant::Claim,
    holder::Holder,
    id::{generate_lock_id, random_uuid},
    key::{LockKey, MAX_NAME_BYTES},
    lease::Lease,
    lock_info::LockInfo,
    metrics::Metrics,
    node::calls::Inspected,
    observer::{Hold, Observer, Wait},
    redlock::{Look, Pooled, Redlock, Trouble, label},
    renewer::{LockRenewer, Registration, Upkeep},
};

/// What the clones of a manager and its guards share; shuts down when the last of them goes.
pub(crate) struct Service {
    /// Empty only while the service is being dropped.
    core: Option<Core>,
    number: u64,
}

/// The parts.
pub(crate) struct Core {
    settings: Settings,
    redlock: Arc<Redlock>,
    acquirer: Acquirer,
    renewer: LockRenewer,
    /// Since when it is shut down.
    closed: OnceLock<Moment>,
    /// Locks whose holders only remember an identifier.
    by_id: Mutex<HashMap<String, ById>>,
}

/// A lease, and the registration that keeps it alive.
#[derive(Debug)]
pub(crate) struct Kept {
    pub(crate) lease: Arc<Lease>,
    pub(crate) registration: Registration,
}

impl Service {
    /// Starts the threads. Connects to several nodes, to look at them, and to one server not before it is needed.
    pub(crate) fn start(settings: Settings) -> Result<Service> {
        static STARTED: AtomicU64 = AtomicU64::new(0);
        let no_thread = |purpose| move |cause| LockError::NoThread { purpose, cause };
        let Settings { ref endpoints, pool_size, operation_timeout, spin, quarantine, .. } = settings;
        let handlers = settings.handlers.clone();
        let observer = Observer::start(handlers, label(endpoints)).map_err(no_thread("event handlers"))?;
        let redlock = Redlock::new(endpoints, pool_size, operation_timeout, spin, quarantine, observer)
            .ok_or_else(|| no_thread("connection pool")(std::io::ErrorKind::WouldBlock.into()))?;
        let redlock = Arc::new(redlock);
        if redlock.len() > 1 {
            redlock.introduce()?;
        }
        let renewer = LockRenewer::start(redlock.clone()).map_err(no_thread("lock renewer"))?;
        let channel = format!("distlock:client:{}", random_uuid());
        let acquirer = Acquirer {
            redlock: redlock.clone(),
            listener: Arc::new(Listener::new(redlock.clone(), channel)),
            claim_window: settings.claim_window,
            heal: !settings.prefix.is_empty(),
            crowd: Crowd::new(),
        };
        let core = Core { settings, redlock, acquirer, renewer, closed: OnceLock::new(), by_id: Mutex::default() };
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        Ok(Service { core: Some(core), number })
    }

    /// Differs between the services of a process.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// What was counted; nothing in a forked child, where the tables may be locked by a thread that is not there.
    pub(crate) fn metrics(&self) -> Metrics {
        match &self.core {
            Some(core) if !fork::is_child() => core.redlock.observer().metrics(),
            _ => Metrics::default(),
        }
    }

    pub(crate) fn server(&self) -> &str {
        self.core.as_ref().map_or("", |core| core.redlock.label())
    }

    /// The parts, for new business.
    pub(crate) fn core(&self) -> Result<&Core> {
        if fork::is_child() {
            return Err(LockError::Forked);
        }
        match &self.core {
            Some(core) if !core.is_closed() => Ok(core),
            _ => Err(LockError::Shutdown),
        }
    }

    /// The parts, for ending what was begun before a shutdown.
    pub(crate) fn core_for_ending(&self) -> Option<&Core> {
        self.core.as_ref().filter(|_| !fork::is_child())
    }

    /// The last one who had it is gone. Takes at most `patience`.
    pub(crate) fn end(mut self, patience: Duration) {
        self.close(Some(patience));
    }

    fn close(&mut self, patience: Option<Duration>) {
        let Some(core) = self.core.take() else { return };
        if fork::is_child() {
            std::mem::forget(core);
        } else {
            core.shutdown(patience.unwrap_or_else(|| core.operation_timeout()));
        }
    }

    pub(crate) fn shutdown(&self) {
        if let Some(core) = self.core_for_ending() {
            core.shutdown(core.operation_timeout());
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.close(None);
    }
}

impl Core {
    pub(crate) fn operation_timeout(&self) -> Duration {
        self.redlock.operation_timeout()
    }

    fn is_closed(&self) -> bool {
        self.closed.get().is_some()
    }

    /// For how long a call may take back what it has left: once all is shut down, for one operation timeout since then.
    fn patience(&self) -> Duration {
        let timeout = self.operation_timeout();
        self.closed.get().map_or(timeout, |at| at.saturating_add(timeout).after(clock::now()))
    }

    fn operation_deadline(&self) -> Moment {
        clock::now().saturating_add(self.redlock.operation_timeout())
    }

    /// The one story: from a name to a lease that is kept.
    pub(crate) fn take(&self, name: &str, options: &LockOptions) -> Result<Kept> {
        let terms = self.settings.terms(options)?;
        let claim = Claim { key: self.key(name)?, id: generate_lock_id(), ttl: terms.ttl };
        let observer = self.redlock.observer();
        observer.attempted(name, &claim.id, terms.wait);
        let wait = Wait::begin(name, &claim.id);
        let patience = terms.wait.unwrap_or(Duration::MAX).saturating_add(self.operation_timeout());
        let hard_limit = clock::now().saturating_add(patience);
        let left = || self.patience().min(hard_limit.after(clock::now()));
        let (grant, contended) = match self.acquirer.run(&claim, terms.wait) {
            Ok(granted) => granted,
            Err(failed) => {
                if let Some(leftover) = &failed.leftover {
                    self.withdraw(&claim, &leftover.waiter, leftover.nodes, leftover.late_until, left());
                }
                observer.not_acquired(name, &claim.id, wait.end("not acquired"), &failed.error);
                return Err(failed.error);
            }
        };
        let waited = wait.end("acquired");
        let hold = Hold::begin(name, &claim.id, grant.token.0);
        let lease = Arc::new(Lease::open(claim, &grant, hold));
        let upkeep = Upkeep {
            votes: grant.votes,
            renew: terms.renew,
            provisional: grant.provisional,
            hold_until: terms.max_hold.map_or(Moment::NEVER, |limit| clock::now().saturating_add(limit)),
        };
        match self.renewer.keep(&lease, upkeep) {
            Some(registration) => {
                observer.acquired(AcquiredEvent {
                    lock: name,
                    id: &lease.claim.id,
                    token: lease.token,
                    waited,
                    contended,
                });
                Ok(Kept { lease, registration })
            }
            None => {
                // Shut down in between. The lock goes back as if it had never been ours, or expires.
                let _ = self.release_claim(&lease, true, left()).0;
                observer.not_acquired(name, &lease.claim.id, waited, &LockError::Shutdown);
                Err(LockError::Shutdown)
            }
        }
    }

    pub(crate) fn key(&self, name: &str) -> Result<LockKey> {
        LockKey::new(&self.settings.prefix, name)
    }

    pub(crate) fn inspect(&self, key: &LockKey) -> Result<Option<Holder>> {
        let failed = |trouble| self.redlock.error(trouble, Action::Inspect, Some(key.name()));
        match self.redlock.inspect(key).map_err(failed)? {
            Inspected::Held(holder) => Ok(Some(holder)),
            Inspected::Free => Ok(None),
            Inspected::WrongType => Err(self.wrong_type(key)),
        }
    }

    fn wrong_type(&self, key: &LockKey) -> LockError {
        let (name, key) = (key.name().to_owned(), key.lock().to_owned());
        LockError::WrongType { name, key, server: self.redlock.label().clone() }
    }

    /// The locks whose names match.
    pub(crate) fn locks(&self, pattern: &str) -> Result<Vec<LockInfo>> {
        if pattern.len() > MAX_NAME_BYTES {
            let reason = format!("the pattern has {} bytes, and names have at most {MAX_NAME_BYTES}", pattern.len());
            return Err(LockError::InvalidName { reason });
        }
        let failed = |trouble| self.redlock.error(trouble, Action::Inspect, None);
        self.redlock.locks(&self.settings.prefix, pattern).map_err(failed)
    }

    pub(crate) fn lock_info(&self, key: &LockKey) -> Result<Option<LockInfo>> {
        let failed = |trouble| self.redlock.error(trouble, Action::Inspect, Some(key.name()));
        match self.redlock.look_at(key).map_err(failed)? {
            Look::Held(lock) => Ok(Some(lock)),
            Look::Free => Ok(None),
            Look::WrongType => Err(self.wrong_type(key)),
        }
    }

    pub(crate) fn ping(&self) -> Result<Duration> {
        self.redlock.ping().map_err(|trouble| self.redlock.error(trouble, Action::Ping, None))
    }

    pub(crate) fn connection(&self) -> Result<Pooled> {
        let pooled = self.redlock.links(self.operation_deadline());
        pooled.map_err(|failure| self.redlock.error(Trouble::Alone(failure), Action::Connect, None))
    }

    /// Ends everything, within `patience` as far as the server is concerned.
    fn shutdown(&self, patience: Duration) {
        let _ = self.closed.set(clock::now());
        self.acquirer.listener.close();
        // Their leases end with all the others.
        let kept = std::mem::take(&mut *self.by_id.lock());
        let ended = self.renewer.stop(clock::now().saturating_add(patience));
        drop(kept);
        self.redlock.close();
        // Otherwise the renewer has losses to tell of yet.
        if ended {
            self.redlock.observer().close();
        }
    }
}
