//! `Service`: the parts of a manager and how they work together. `Core::take` and `Core::give_up` are the whole life
//! of a lock.

use std::{
    collections::HashMap,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;

use crate::{
    acquire::{Acquirer, Crowd, Listener},
    clock::{self, Moment},
    config::{LockOptions, Settings},
    error::{Action, LockError, LockLost, Result},
    event::{AcquiredEvent, ReleasedEvent},
    fork,
    grant::Claim,
    holder::Holder,
    id::{generate_lock_id, random_uuid},
    key::{LockKey, MAX_NAME_BYTES},
    lease::{End, Lease},
    lock_info::LockInfo,
    metrics::Metrics,
    node::calls::Inspected,
    observer::{Hold, Observer, Wait},
    redlock::{Ending, Leaving, Look, NodeSet, Pooled, Redlock, Slip, Trouble, label, past_a_failover},
    released::Released,
    renewer::{LockRenewer, Registration, Upkeep, tell_loss},
};

/// How long a release waits for a pooled connection before it takes another way.
const POOL_PATIENCE: Duration = Duration::from_millis(5);

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

/// A lock whose holder only remembers its identifier.
#[derive(Debug)]
enum ById {
    Kept(Kept),
    /// The lock of this key is being given up.
    Going(LockKey),
}

impl ById {
    fn key(&self) -> &LockKey {
        match self {
            ById::Kept(kept) => &kept.lease.claim.key,
            ById::Going(key) => key,
        }
    }
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

    /// The end of the story: of the lease, of its renewal, of the lock; in this order, so that nobody believes in a
    /// lock that may be free. Takes at most `patience`.
    pub(crate) fn give_up(&self, kept: Kept, patience: Duration) -> Result<Released> {
        let Kept { lease, registration } = kept;
        let was_held = lease.is_held(clock::now()) && lease.end(End::Released);
        drop(registration);
        self.tell_loss(&lease);
        if lease.ended() == Some(End::Lost(LockLost::Shutdown)) {
            // The shutdown has released it, or left it to expire.
            return Err(LockError::Shutdown);
        }
        let held = lease.hold.held(clock::now());
        let (outcome, released) = self.release_claim(&lease, was_held, patience);
        // A request that is still under way would find the lock free, and take it for nobody.
        let (now, late) = (clock::now(), lease.late);
        let open = late.open.without(released);
        if now < late.broken_until {
            self.renewer.undo(&lease.claim, &lease.place, self.redlock.all(), late.until());
        } else if now < late.open_until && !open.is_empty() {
            self.renewer.undo(&lease.claim, &lease.place, open, late.open_until);
        }
        if was_held {
            self.tell_release(&lease, held, &outcome);
        }
        outcome
    }

    fn tell_loss(&self, lease: &Lease) {
        if let Some(End::Lost(_)) = lease.ended() {
            lease.hold.end("lost");
            tell_loss(self.redlock.observer(), lease);
        }
    }

    /// Tells how a lock went in which its holder believed until now. The server may know better.
    fn tell_release(&self, lease: &Lease, held: Duration, outcome: &Result<Released>) {
        let (observer, lock, id, token) =
            (self.redlock.observer(), lease.claim.key.name(), &lease.claim.id, lease.token);
        let why = match outcome {
            Ok(Released::Gone) => LockLost::Gone,
            Ok(Released::OwnedByOther(by)) => LockLost::Taken { by: Box::new(by.clone()) },
            Ok(Released::Released) | Err(_) => {
                lease.hold.end("released");
                return observer.released(ReleasedEvent { lock, id, token, held, confirmed: outcome.is_ok() });
            }
        };
        lease.hold.end("lost");
        observer.lost(lock, id, token, &why, held);
    }

    /// The same for a holder who does not ask how it went: a lock that is known to be lost is not released again.
    pub(crate) fn let_go(&self, kept: Kept, patience: Duration) -> Result<()> {
        let held = kept.lease.is_held(clock::now());
        self.tell_loss(&kept.lease);
        match kept.lease.ended() {
            None if held => self.give_up(kept, patience).map(drop),
            None | Some(End::Lost(LockLost::Expired | LockLost::MaxHold)) => {
                // A renewal may have been applied without our knowing, or the first request may still be.
                let lease = &kept.lease;
                let nodes = if clock::now() < lease.late.broken_until { self.redlock.all() } else { lease.nodes() };
                self.withdraw(&lease.claim, &lease.place, nodes, lease.late.until(), patience);
                Ok(())
            }
            Some(_) => Ok(()),
        }
    }

    pub(crate) fn key(&self, name: &str) -> Result<LockKey> {
        LockKey::new(&self.settings.prefix, name)
    }

    /// Keeps a lock whose holder only remembers its identifier.
    pub(crate) fn keep_by_id(&self, kept: Kept) -> Result<String> {
        let id = kept.lease.claim.id.to_string();
        let mut by_id = self.by_id.lock();
        // Shutting down closes first, then empties the table.
        if self.is_closed() {
            drop(by_id);
            return self.let_go(kept, self.patience()).and(Err(LockError::Shutdown));
        }
        by_id.insert(id.clone(), ById::Kept(kept));
        Ok(id)
    }

    /// Gives up the lock of this name that was kept under this identifier, or else one of another process.
    pub(crate) fn release_by_id(&self, key: &LockKey, id: &str) -> Result<Released> {
        let entry = match self.by_id.lock().get_mut(id) {
            Some(entry) if entry.key() == key => Some(std::mem::replace(entry, ById::Going(key.clone()))),
            _ => None,
        };
        match entry {
            Some(ById::Kept(kept)) => {
                let outcome = self.give_up(kept, self.operation_timeout());
                self.by_id.lock().remove(id);
                outcome
            }
            // To release it as well would be to overtake its holder, who would take that for a loss.
            Some(ById::Going(_)) => Ok(Released::Gone),
            None => self.release(key, id),
        }
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

    /// Releases a lock of our own; what fails is repeated in the background. Like keeping a lock, giving it up does
    /// not depend on the pool. Also tells which nodes kept it until now.
    fn release_claim(&self, lease: &Lease, was_held: bool, patience: Duration) -> (Result<Released>, NodeSet) {
        let (claim, now) = (&lease.claim, clock::now());
        let until = now.saturating_add(patience);
        let left = || until.after(clock::now());
        let open = lease.late.open;
        let ask = |may_be_done| {
            let (id, waiter) = (claim.id.as_str().as_bytes(), lease.place.as_str());
            let leaving = Leaving { key: &claim.key, id, waiter, was_held, open, may_be_done };
            let alone = || self.redlock.release_last(leaving, until);
            match self.redlock.links(clock::now().saturating_add(POOL_PATIENCE).min(until)) {
                Ok(mut links) => self.redlock.release(&mut links, leaving, left()),
                // A lock that came after pool and renewer had been ended.
                Err(_) if self.is_closed() => alone(),
                Err(_) => match self.renewer.release(claim, waiter, was_held, may_be_done, until) {
                    Some(ending) => ending,
                    None if self.is_closed() => alone(),
                    None => Ending::unheard(self.redlock.all()),
                },
            }
        };
        let Ending { outcome, unsettled, mut unheard, released, .. } = past_a_failover(until, ask);
        let kept =
            if outcome.is_err() && self.redlock.len() == 1 { lease.nodes() } else { lease.nodes().both(unsettled) };
        if !kept.is_empty() {
            // After a shutdown there is no background, and the lock is left to expire.
            self.renewer.undo(claim, &lease.place, kept, now);
        }
        unheard.retain(|(node, _)| lease.nodes().has(*node));
        if !unheard.is_empty() {
            // Most answers come with the next use of their connections.
            self.renewer.doubt(claim, &lease.place, unheard, clock::now().saturating_add(self.operation_timeout()));
        }
        let failed = |trouble| self.redlock.error(trouble, Action::Release, Some(claim.key.name()));
        (outcome.map_err(failed), released)
    }

    /// Releases what is held under `id`, by whomever.
    fn release(&self, key: &LockKey, id: &str) -> Result<Released> {
        self.release_by(key, id.as_bytes(), false, self.operation_deadline())
    }

    /// Takes the lock away from the holder of which this identifier is told.
    pub(crate) fn force_release_if(&self, key: &LockKey, id: &str) -> Result<Released> {
        let deadline = self.operation_deadline();
        match self.release_by(key, id.as_bytes(), false, deadline)? {
            // The text that is told stands for bytes that are none: those are its own, and compared.
            Released::OwnedByOther(holder) if holder.id() == id && holder.id_bytes() != id.as_bytes() => {
                self.release_by(key, holder.id_bytes(), false, deadline)
            }
            released => Ok(released),
        }
    }

    fn release_by(&self, key: &LockKey, id: &[u8], was_held: bool, deadline: Moment) -> Result<Released> {
        let failed = |trouble| self.redlock.error(trouble, Action::Release, Some(key.name()));
        let ask = |may_be_done| match self.redlock.links(deadline) {
            Ok(mut links) => {
                let leaving = Leaving { key, id, waiter: "", was_held, open: NodeSet::NONE, may_be_done };
                self.redlock.release(&mut links, leaving, deadline.after(clock::now()))
            }
            Err(failure) => {
                let outcome = Err(Trouble::Alone(failure));
                Ending { outcome, may_be_done, ..Ending::unheard(self.redlock.all()) }
            }
        };
        past_a_failover(deadline, ask).outcome.map_err(failed)
    }

    /// Takes the lock away from whoever holds it, a quorum of the nodes or some of them; true if it did.
    pub(crate) fn force_release(&self, key: &LockKey) -> Result<bool> {
        let failed = |trouble| self.redlock.error(trouble, Action::Inspect, Some(key.name()));
        let deadline = self.operation_deadline();
        // Half the time, so that there is another half for taking it away.
        let ballot = self.redlock.inspect_all(key, self.operation_timeout() / 2).map_err(failed)?;
        let mut ids: Vec<&[u8]> = Vec::new();
        for slip in &ballot.slips {
            if let Slip::Said(answer) = slip
                && let Inspected::Held(holder) = &answer.reply
                && !ids.contains(&holder.id_bytes())
            {
                ids.push(holder.id_bytes());
            }
        }
        // By their identifiers: should an answer be lost, asking again must not hit the next holder.
        let outcomes: Vec<_> = ids.into_iter().map(|id| self.release_by(key, id, true, deadline)).collect();
        // Whose release went through was the only one who could hold it, whatever is not known of the others.
        if outcomes.iter().any(|outcome| matches!(outcome, Ok(Released::Released))) {
            return Ok(true);
        }
        outcomes.into_iter().find_map(Result::err).map_or(Ok(false), Err)
    }

    /// Makes nodes forget a claim that came to nothing. Takes at most `patience`.
    fn withdraw(&self, claim: &Claim, waiter: &str, nodes: NodeSet, late_until: Moment, patience: Duration) {
        if !self.renewer.undo(claim, waiter, nodes, late_until) {
            // Shut down: nobody is left to do it in the background. What fails is left to expire.
            let leaving = Leaving {
                key: &claim.key,
                id: claim.id.as_str().as_bytes(),
                waiter,
                was_held: false,
                open: NodeSet::NONE,
                may_be_done: NodeSet::NONE,
            };
            let ending = self.redlock.release_last(leaving, clock::now().saturating_add(patience));
            if let Err(trouble) = ending.outcome {
                say!(debug, "left {:?} to expire: {trouble}", claim.key);
            }
        }
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
