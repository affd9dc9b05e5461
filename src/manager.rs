//! `RedisMgr`: owns the connections, the threads and the defaults. `Core::take` and `Core::give_up` are the whole life of a lock.

use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use redis::{ConnectionLike, RedisResult, Value};
use uuid::Uuid;

use crate::{
    acquire::{Acquirer, Mailbox, NotAcquired, Subscriber},
    clock::{self, Moment},
    config::{Config, LockOptions, Settings},
    error::{Action, LockError, Result},
    grant::Claim,
    guard::{LockGuard, Released},
    holder::Holder,
    id::generate_lock_id,
    key::LockKey,
    lease::{End, Lease},
    node::{
        Failure, Pooled, RedisNode,
        script::{Inspect, Inspected, Release, ReleaseReply},
    },
    reentrant::ReentrantGuard,
    renewer::{LockRenewer, Registration, Upkeep},
};

/// Takes locks on one Redis server, and keeps them.
///
/// A manager owns a pool of connections, one thread that renews the locks it holds ([one for all of
/// them](crate#how-it-works)), and one that hears of grants. Making one connects to nothing. Cloning is cheap. A
/// process usually needs one: [`instance`](Self::instance).
///
/// The manager is shut down when the last of its clones and guards is dropped. The process-wide one lives until
/// [`shutdown`](Self::shutdown) or the end of the process, which leaves what is still held to expire.
#[derive(Clone)]
pub struct RedisMgr {
    inner: Arc<Inner>,
}

struct Inner {
    /// Empty only while the manager is being dropped.
    core: Option<Core>,
    number: u64,
    pid: u32,
}

struct Core {
    settings: Settings,
    node: Arc<RedisNode>,
    acquirer: Acquirer,
    renewer: LockRenewer,
    closed: AtomicBool,
    /// Locks that were taken by `acquire_lock`, by their identifiers.
    by_id: Mutex<HashMap<String, (Arc<Lease>, Registration)>>,
}

static INSTANCE: OnceLock<RedisMgr> = OnceLock::new();
/// Held while the process-wide manager is made, so that it is made once.
static MAKING: Mutex<()> = Mutex::new(());

impl RedisMgr {
    /// The process-wide manager. The first call makes it, of `DISTLOCK_URL`, `REDIS_URL` or `redis://127.0.0.1:6379`,
    /// unless [`init`](Self::init) has.
    ///
    /// # Errors
    ///
    /// Those of [`new`](Self::new); a later call tries again.
    pub fn instance() -> Result<&'static RedisMgr> {
        if let Some(mgr) = INSTANCE.get() {
            return Ok(mgr);
        }
        let _making = MAKING.lock();
        match INSTANCE.get() {
            Some(mgr) => Ok(mgr),
            None => {
                let mgr = RedisMgr::new(Config::from_env())?;
                Ok(INSTANCE.get_or_init(|| mgr))
            }
        }
    }

    /// Makes the process-wide manager, once, before anybody uses [`instance`](Self::instance).
    ///
    /// # Errors
    ///
    /// [`LockError::AlreadyInitialized`] when there is one, which is not changed; else those of [`new`](Self::new).
    pub fn init(config: Config) -> Result<&'static RedisMgr> {
        let _making = MAKING.lock();
        if INSTANCE.get().is_some() {
            return Err(LockError::AlreadyInitialized);
        }
        let mgr = RedisMgr::new(config)?;
        Ok(INSTANCE.get_or_init(|| mgr))
    }

    /// Makes a manager of one's own. Does not connect, so a server that is away is no error here; see
    /// [`ping`](Self::ping).
    ///
    /// # Errors
    ///
    /// [`LockError::InvalidConfig`] or [`LockError::InvalidOptions`] when the configuration cannot work,
    /// [`LockError::NoThread`] when the system gives no thread.
    pub fn new(config: Config) -> Result<RedisMgr> {
        static MANAGERS: AtomicU64 = AtomicU64::new(0);
        let settings = config.check()?;
        let no_thread = |purpose| move |cause| LockError::NoThread { purpose, cause };
        let node =
            RedisNode::new(settings.endpoint.clone(), settings.pool_size, settings.operation_timeout, settings.spin)
                .ok_or_else(|| no_thread("connection pool")(std::io::ErrorKind::WouldBlock.into()))?;
        let node = Arc::new(node);
        let mailbox = Arc::new(Mailbox::default());
        let renewer = LockRenewer::start(node.clone()).map_err(no_thread("lock renewer"))?;
        let channel = format!("distlock:client:{}", Uuid::new_v4());
        let subscriber = match Subscriber::start(node.clone(), channel, mailbox.clone()) {
            Ok(subscriber) => subscriber,
            Err(cause) => {
                renewer.stop();
                return Err(no_thread("lock subscriber")(cause));
            }
        };
        let acquirer = Acquirer {
            node: node.clone(),
            mailbox,
            subscriber,
            claim_window: settings.claim_window,
            heal: !settings.prefix.is_empty(),
        };
        let closed = AtomicBool::new(false);
        let core = Core { settings, node, acquirer, renewer, closed, by_id: Mutex::default() };
        let number = MANAGERS.fetch_add(1, Ordering::Relaxed);
        Ok(RedisMgr { inner: Arc::new(Inner { core: Some(core), number, pid: std::process::id() }) })
    }

    /// Takes the lock, waiting for its turn without a limit.
    ///
    /// Who asks first is served first, over all threads, processes and machines. Waiting uses no pooled connection
    /// and sends next to nothing. A lock is not reentrant: a thread that waits for a lock it holds waits for ever;
    /// see [`lock_reentrant`](Self::lock_reentrant).
    ///
    /// # Errors
    ///
    /// [`LockError::Unavailable`] when the server has been away for as long as the lease, and those of
    /// [`lock_with`](Self::lock_with).
    pub fn lock(&self, name: &str) -> Result<LockGuard> {
        self.lock_with(name, &LockOptions::new())
    }

    /// Takes the lock if it is free right now. Blocks for a round trip, at most for one
    /// [operation timeout](Config::operation_timeout).
    ///
    /// # Errors
    ///
    /// [`LockError::Held`] says who has it; else those of [`lock_with`](Self::lock_with).
    pub fn try_lock(&self, name: &str) -> Result<LockGuard> {
        self.lock_with(name, &LockOptions::new().wait(Duration::ZERO))
    }

    /// Takes the lock, waiting for at most `wait`.
    ///
    /// # Errors
    ///
    /// [`LockError::Timeout`] says who has it; else those of [`lock_with`](Self::lock_with).
    pub fn try_lock_for(&self, name: &str, wait: Duration) -> Result<LockGuard> {
        self.lock_with(name, &LockOptions::new().wait(wait))
    }

    /// Takes the lock as `options` say. Returns within their wait and one operation timeout, whatever the server does.
    ///
    /// ```no_run
    /// # fn main() -> distlock::Result<()> {
    /// use std::time::Duration;
    /// use distlock::{LockOptions, RedisMgr};
    ///
    /// let options = LockOptions::new().ttl(Duration::from_secs(30)).wait(Duration::from_secs(5));
    /// match RedisMgr::instance()?.lock_with("orders:42", &options) {
    ///     Ok(guard) => println!("token {}", guard.fencing_token()),
    ///     Err(error) if error.is_contended() => println!("later, then: {error}"),
    ///     Err(error) => return Err(error),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Held`](LockError::Held) or [`Timeout`](LockError::Timeout) when somebody else has it,
    /// [`Unavailable`](LockError::Unavailable) or [`PoolExhausted`](LockError::PoolExhausted) when that could not be
    /// found out, [`Refused`](LockError::Refused) or [`WrongType`](LockError::WrongType) when the server or its data
    /// stand in the way, [`InvalidName`](LockError::InvalidName) or [`InvalidOptions`](LockError::InvalidOptions)
    /// when the call cannot work, [`Shutdown`](LockError::Shutdown) and [`Forked`](LockError::Forked).
    pub fn lock_with(&self, name: &str, options: &LockOptions) -> Result<LockGuard> {
        let core = self.open_core()?;
        let (lease, registration) = core.take(name, options)?;
        Ok(LockGuard::new(lease, registration, self.clone()))
    }

    /// Takes the lock for this thread, which may take it again; waits for its turn without a limit. Taking it again
    /// costs no round trip.
    ///
    /// # Errors
    ///
    /// Those of [`lock`](Self::lock); [`LockError::Lost`] when this thread holds the lock and has lost it.
    pub fn lock_reentrant(&self, name: &str) -> Result<ReentrantGuard> {
        self.lock_reentrant_with(name, &LockOptions::new())
    }

    /// [`lock_reentrant`](Self::lock_reentrant) as `options` say; they only matter where the lock is not held yet.
    ///
    /// # Errors
    ///
    /// Those of [`lock_with`](Self::lock_with); [`LockError::Lost`] when this thread holds the lock and has lost it.
    pub fn lock_reentrant_with(&self, name: &str, options: &LockOptions) -> Result<ReentrantGuard> {
        self.open_core()?;
        ReentrantGuard::enter(self, name, options)
    }

    /// The C++ design's `acquireLock`: takes the lock with a lease of `lock_timeout`, waiting for at most
    /// `acquire_timeout`, and returns its identifier; `None` when somebody else held it all the time. It is renewed
    /// until [`release_lock`](Self::release_lock) or [`shutdown`](Self::shutdown).
    ///
    /// Prefer [`try_lock_for`](Self::try_lock_for): a guard cannot be forgotten, and knows when its lock is lost.
    ///
    /// # Errors
    ///
    /// Those of [`lock_with`](Self::lock_with), except contention.
    pub fn acquire_lock(
        &self,
        name: &str,
        lock_timeout: Duration,
        acquire_timeout: Duration,
    ) -> Result<Option<String>> {
        let core = self.open_core()?;
        match core.take(name, &LockOptions::new().ttl(lock_timeout).wait(acquire_timeout)) {
            Ok((lease, registration)) => {
                let id = lease.claim.id.to_string();
                core.by_id.lock().insert(id.clone(), (lease, registration));
                Ok(Some(id))
            }
            Err(error) if error.is_contended() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The C++ design's `releaseLock`: true if the lock was held under `id` until now. A wrong identifier touches
    /// nothing, neither the lock nor its renewal. An identifier of another process is released too.
    ///
    /// # Errors
    ///
    /// Those of [`LockGuard::release`].
    pub fn release_lock(&self, name: &str, id: &str) -> Result<bool> {
        let core = self.open_core()?;
        let key = LockKey::new(&core.settings.prefix, name)?;
        let ours = {
            let mut by_id = core.by_id.lock();
            if by_id.get(id).is_some_and(|(lease, _)| lease.claim.key == key) { by_id.remove(id) } else { None }
        };
        let outcome = match ours {
            Some((lease, registration)) => core.give_up(&lease, registration)?,
            // The empty identifier stands for "whoever holds it", which is not meant here.
            None if id.is_empty() => return Ok(false),
            None => core.release(&key, id)?,
        };
        Ok(outcome == Released::Released)
    }

    /// Who holds the lock now, for how long, and how many wait; `None` when it is free. Changes nothing.
    ///
    /// # Errors
    ///
    /// [`LockError::Unavailable`], [`LockError::Refused`] and the like when the server cannot be asked.
    pub fn holder(&self, name: &str) -> Result<Option<Holder>> {
        let core = self.open_core()?;
        let key = LockKey::new(&core.settings.prefix, name)?;
        let deadline = core.operation_deadline();
        let answer = match core.node.ask(&Inspect(&key), deadline) {
            // The connection may have gone stale; asking again changes nothing.
            Err(failure) if failure.sent && failure.is_passing() => core.node.ask(&Inspect(&key), deadline),
            answer => answer,
        };
        match answer.map_err(|failure| core.node.error(failure, Action::Inspect, Some(name)))?.reply {
            Inspected::Held(holder) => Ok(Some(holder)),
            Inspected::Free => Ok(None),
            Inspected::WrongType => Err(core.wrong_type(&key)),
        }
    }

    /// Whether anybody holds the lock now.
    ///
    /// # Errors
    ///
    /// Those of [`holder`](Self::holder).
    pub fn is_locked(&self, name: &str) -> Result<bool> {
        Ok(self.holder(name)?.is_some())
    }

    /// Takes the lock away from whoever holds it, and hands it to the next waiter; true if somebody held it. The
    /// former holder learns of it at its next renewal, and may go on working until then: this is for operators.
    ///
    /// # Errors
    ///
    /// Those of [`holder`](Self::holder).
    pub fn force_release(&self, name: &str) -> Result<bool> {
        let core = self.open_core()?;
        let key = LockKey::new(&core.settings.prefix, name)?;
        Ok(core.release(&key, "")? == Released::Released)
    }

    /// Asks the server whether it is there, and returns how long the answer took: for a check at start-up.
    ///
    /// # Errors
    ///
    /// [`LockError::Unavailable`], [`LockError::Refused`] and the like.
    pub fn ping(&self) -> Result<Duration> {
        let core = self.open_core()?;
        core.node.ping(core.operation_deadline()).map_err(|failure| core.node.error(failure, Action::Ping, None))
    }

    /// A connection out of the pool, for commands of one's own: it implements [`redis::ConnectionLike`]. It goes back
    /// when it is dropped. Locks that are held do not need the pool; taking others waits for a free connection.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let mut connection = distlock::RedisMgr::instance()?.connection()?;
    /// let visits: u64 = redis::cmd("INCR").arg("visits").query(&mut connection)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`LockError::PoolExhausted`] when none becomes free within one operation timeout.
    pub fn connection(&self) -> Result<PooledConnection> {
        let core = self.open_core()?;
        let pooled = core.node.pooled(core.operation_deadline());
        pooled.map(PooledConnection).map_err(|failure| core.node.error(failure, Action::Connect, None))
    }

    /// Releases everything that is held, wakes everybody who waits with [`LockError::Shutdown`], and ends the
    /// threads. Holders learn [`LockLost::Shutdown`](crate::LockLost::Shutdown). Every later call fails with
    /// [`LockError::Shutdown`]. What cannot be released within one operation timeout, because the server is away, is
    /// left to expire.
    pub fn shutdown(&self) {
        if self.in_own_process()
            && let Some(core) = &self.inner.core
        {
            core.shutdown();
        }
    }

    /// The server, as errors call it.
    pub fn server(&self) -> &str {
        self.inner.core.as_ref().map_or("", |core| core.node.label())
    }

    pub(crate) fn in_own_process(&self) -> bool {
        self.inner.pid == std::process::id()
    }

    pub(crate) fn number(&self) -> u64 {
        self.inner.number
    }

    pub(crate) fn release_claim(&self, claim: &Claim, was_held: bool) -> Result<Released> {
        match &self.inner.core {
            Some(core) => core.release_claim(claim, was_held),
            None => Err(LockError::Shutdown),
        }
    }

    pub(crate) fn undo_claim(&self, claim: &Claim) {
        if let Some(core) = &self.inner.core {
            core.withdraw(claim.clone(), String::new());
        }
    }

    fn open_core(&self) -> Result<&Core> {
        if !self.in_own_process() {
            return Err(LockError::Forked);
        }
        match &self.inner.core {
            Some(core) if !core.closed.load(Ordering::Acquire) => Ok(core),
            _ => Err(LockError::Shutdown),
        }
    }
}

impl Core {
    fn operation_deadline(&self) -> Moment {
        clock::now().saturating_add(self.node.operation_timeout())
    }

    /// The one story: from a name to a lease that is kept.
    fn take(&self, name: &str, options: &LockOptions) -> Result<(Arc<Lease>, Registration)> {
        let terms = self.settings.terms(options)?;
        let claim = Claim { key: LockKey::new(&self.settings.prefix, name)?, id: generate_lock_id(), ttl: terms.ttl };
        let grant = match self.acquirer.run(&claim, terms.wait) {
            Ok(grant) => grant,
            Err(NotAcquired { error, leftover }) => {
                if let Some(waiter) = leftover {
                    self.withdraw(claim, waiter);
                }
                return Err(error);
            }
        };
        let upkeep = Upkeep {
            renew: terms.renew,
            provisional: grant.provisional,
            hold_until: terms.max_hold.map_or(Moment::NEVER, |limit| clock::now().saturating_add(limit)),
        };
        let lease = Arc::new(Lease::open(claim, grant));
        match self.renewer.keep(&lease, upkeep) {
            Some(registration) => Ok((lease, registration)),
            None => {
                // Shut down in between. The lock goes back as if it had never been ours, or expires.
                let _ = self.release_claim(&lease.claim, true);
                Err(LockError::Shutdown)
            }
        }
    }

    /// The end of the story: of the lease, of its renewal, of the lock; in this order, so that nobody believes in a
    /// lock that may be free.
    fn give_up(&self, lease: &Lease, registration: Registration) -> Result<Released> {
        let was_held = lease.end(End::Released);
        drop(registration);
        self.release_claim(&lease.claim, was_held)
    }

    /// Releases a lock of our own; what fails is repeated in the background. Like keeping a lock, giving it up does
    /// not depend on the pool.
    fn release_claim(&self, claim: &Claim, was_held: bool) -> Result<Released> {
        let call = Release { key: &claim.key, id: claim.id.as_str(), waiter: "" };
        let outcome = self.release_twice(&claim.key, was_held, |deadline| {
            match self.node.pooled(deadline.min(clock::now().saturating_add(POOL_PATIENCE))) {
                Ok(mut connection) => self.node.ask_on(&mut connection, &call, deadline).map(|answer| answer.reply),
                Err(_) => self.renewer.release(claim, deadline),
            }
        });
        if outcome.is_err() {
            // After a shutdown there is no background, and the lock is left to expire.
            let _ = self.renewer.undo(claim.clone(), String::new());
        }
        outcome
    }

    /// Releases whatever is held under `id`; the empty one stands for whoever holds it.
    fn release(&self, key: &LockKey, id: &str) -> Result<Released> {
        let call = Release { key, id, waiter: "" };
        self.release_twice(key, false, |deadline| self.node.ask(&call, deadline).map(|answer| answer.reply))
    }

    /// Asks, and asks again if the answer is lost. "Nobody holds it" then means that the first request was carried
    /// out; and so does "somebody else" if it was held until then, for a release hands the lock on.
    fn release_twice(
        &self,
        key: &LockKey,
        was_held: bool,
        ask: impl Fn(Moment) -> std::result::Result<ReleaseReply, Failure>,
    ) -> Result<Released> {
        let deadline = self.operation_deadline();
        // Half the time, so that there is another half.
        let first = ask(clock::now().saturating_add(self.node.operation_timeout() / 2));
        let (reply, may_be_done) = match first {
            Err(failure) if failure.is_passing() => (ask(deadline), failure.sent),
            reply => (reply, false),
        };
        match reply {
            Ok(ReleaseReply::Released) => Ok(Released::Released),
            Ok(ReleaseReply::Gone) if may_be_done => Ok(Released::Released),
            Ok(ReleaseReply::Other(_)) if may_be_done && was_held => Ok(Released::Released),
            Ok(ReleaseReply::Gone | ReleaseReply::WrongType) => Ok(Released::Gone),
            Ok(ReleaseReply::Other(holder)) => Ok(Released::OwnedByOther(holder)),
            Err(failure) => Err(self.node.error(failure, Action::Release, Some(key.name()))),
        }
    }

    /// Makes the server forget a claim that came to nothing.
    fn withdraw(&self, claim: Claim, waiter: String) {
        if let Err((claim, waiter)) = self.renewer.undo(claim, waiter) {
            // Shut down: nobody is left to do it in the background. What fails is left to expire.
            let call = Release { key: &claim.key, id: claim.id.as_str(), waiter: &waiter };
            if let Err(failure) = self.node.ask(&call, self.operation_deadline()) {
                log::debug!("left {:?} to expire: {}", claim.key, failure.reason);
            }
        }
    }

    fn wrong_type(&self, key: &LockKey) -> LockError {
        LockError::WrongType {
            name: key.name().to_owned(),
            key: key.lock().to_owned(),
            server: self.node.label().clone(),
        }
    }

    fn shutdown(&self) {
        self.closed.store(true, Ordering::Release);
        self.acquirer.mailbox.close();
        // Their leases end with all the others.
        let kept = std::mem::take(&mut *self.by_id.lock());
        self.renewer.stop();
        drop(kept);
        self.acquirer.subscriber.stop();
    }
}

/// How long a release waits for a pooled connection before it takes another way.
const POOL_PATIENCE: Duration = Duration::from_millis(5);

impl Drop for Inner {
    fn drop(&mut self) {
        let Some(core) = self.core.take() else { return };
        if self.pid == std::process::id() {
            core.shutdown();
        } else {
            // In a forked child the threads are not there, and what they had locked stays locked.
            std::mem::forget(core);
        }
    }
}

impl fmt::Debug for RedisMgr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisMgr").field("server", &self.server()).finish_non_exhaustive()
    }
}

/// A connection out of a manager's pool. See [`RedisMgr::connection`].
#[derive(Debug)]
pub struct PooledConnection(Pooled);

impl ConnectionLike for PooledConnection {
    fn req_packed_command(&mut self, command: &[u8]) -> RedisResult<Value> {
        self.0.req_packed_command(command)
    }

    fn req_packed_commands(&mut self, commands: &[u8], offset: usize, count: usize) -> RedisResult<Vec<Value>> {
        self.0.req_packed_commands(commands, offset, count)
    }

    fn get_db(&self) -> i64 {
        self.0.get_db()
    }

    fn check_connection(&mut self) -> bool {
        self.0.check_connection()
    }

    fn is_open(&self) -> bool {
        self.0.is_open()
    }
}
