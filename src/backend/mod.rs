//! Where locks are kept. A [`Backend`] is one Redis server, several that decide together, a Redis
//! Cluster, or a database. The modules above it know no nodes, votes or replies.

mod acquire_all;
mod address;
mod checkout_queue;
pub(crate) mod cluster;
mod discovery;
pub(crate) mod error;
mod feature;
mod grant_stream;
mod health;
mod lease_renewals;
#[cfg(feature = "testing")]
pub(crate) mod memory;
#[cfg(feature = "mysql")]
pub(crate) mod mysql;
mod optional_calls;
pub(crate) mod redis;
pub(crate) mod redlock;
#[cfg(feature = "tls")]
mod tls_advice;
pub(crate) mod transport;

use std::{borrow::Cow, fmt, sync::Arc, time::Duration};

pub(crate) use self::acquire_all::{AllOutcome, AllRequest, AllResult};
pub(crate) use self::checkout_queue::ReservedPlaces;
use self::error::{BackendError, NodeError};
pub(crate) use self::feature::Feature;
pub(crate) use self::grant_stream::{CancelHandle, GrantStream, QueuePlace, StreamEvent, WakeFn};
pub(crate) use self::lease_renewals::{
    LeaseRenewals, LeaseResidue, RenewSoon, Renewal, RenewalLimits, RenewalReport,
};
pub(crate) use self::optional_calls::{AdoptReport, OptionalCalls, Passed};
use crate::{
    core::{
        cancel::CancelToken,
        claim::{Claim, Grant, GrantNotice, Residue},
        holder::Holder,
        key::{InvalidName, LockKey},
        lease::Lease,
    },
    error::{Action, LockError},
    lock_info::{LockInfo, Released},
    sys::clock::{self, Moment},
};

/// Where locks are kept. Every call ends by its deadline, with yes, no, or unknown.
pub(crate) trait Backend:
    Releases + Looks + OptionalCalls + Send + Sync + fmt::Debug
{
    /// The servers as named in messages.
    fn label(&self) -> &Arc<str>;

    /// Maximum duration of one exchange.
    fn operation_timeout(&self) -> Duration;

    /// Time by which an exchange that begins now must end.
    fn operation_deadline(&self) -> Moment {
        clock::now().saturating_add(self.operation_timeout())
    }

    /// Longest time for which a backend that works may leave a claim without a reply.
    fn longest_silence(&self) -> Duration {
        self.operation_timeout()
    }

    /// Begins to pursue a claim. Sends nothing yet.
    fn acquisition<'a>(&'a self, request: AcquireRequest<'a>) -> Box<dyn Acquisition + 'a>;

    /// Returns a key as this backend keeps it.
    fn adapt_key(&self, key: LockKey) -> Result<LockKey, InvalidName> {
        Ok(key)
    }

    /// Returns the channel for the grants of a lock, for a manager with this channel.
    fn channel_for<'a>(&self, manager: &'a str, _key: &LockKey) -> Cow<'a, str> {
        Cow::Borrowed(manager)
    }

    /// Subscribes to the grant messages on this channel.
    fn open_stream(
        &self,
        channel: &str,
        deadline: Moment,
    ) -> Result<Box<dyn GrantStream>, NodeError>;

    /// Ends the requests that wait at the servers for their locks, because the manager is shut
    /// down.
    fn end_waits(&self) {}

    /// Whether waiters who queue at `place` should queue elsewhere now.
    fn should_move_queue(&self, _place: QueuePlace) -> bool {
        false
    }

    /// Whether what this residue leaves on the servers may keep the lock from other clients.
    fn excludes_others(&self, residue: &Residue) -> bool {
        !residue.is_empty()
    }

    /// Releases the locks of several leases: in one exchange if this backend can, otherwise one
    /// after the other, until one fails. `deadline` returns the deadline of a release that begins
    /// now. Returns the reports in their order.
    fn release_leases(
        &self,
        leases: &[(&Lease, bool)],
        deadline: &dyn Fn() -> Moment,
    ) -> Vec<ReleaseReport> {
        let mut has_failed = false;
        let release = |&(lease, was_held): &(&Lease, bool)| {
            // After a failure there is no time for the others any more.
            let until = if has_failed { clock::now() } else { deadline() };
            let report = self.release_lease(lease, was_held, until);
            has_failed |= report.result.is_err();
            report
        };
        leases.iter().map(release).collect()
    }

    /// Whether [`acquire_all`](OptionalCalls::acquire_all) can acquire mutexes with these keys.
    fn acquires_all(&self, _: &[LockKey]) -> bool {
        false
    }

    /// Maximum number of locks that this manager can hold, if it is limited by its connections.
    fn locks_max(&self) -> Option<u32> {
        None
    }

    /// Waits until `deadline`, or until `cancel` is cancelled, for what is needed to acquire this
    /// many locks one after the other.
    fn reserve(
        &self,
        _locks: u32,
        _deadline: Moment,
        _cancel: Option<&CancelToken>,
    ) -> Result<ReservedPlaces, BackendError> {
        Ok(ReservedPlaces::default())
    }

    /// How often to [probe](LeaseRenewals::probe), if a server may have to be left out although no
    /// lock is asked for. The interval is at most a third of the ttl.
    fn probe_interval(&self) -> Option<Duration> {
        None
    }

    /// Returns what renews the leases of a manager. If the backend learns between two renewals that
    /// leases may be lost, it calls `renew_soon` with the ids of their claims.
    fn lease_renewals(self: Arc<Self>, renew_soon: RenewSoon) -> Box<dyn LeaseRenewals + Send>;

    /// Called when the renewer has this lease, so that it can be asked to renew it soon.
    fn on_registered(&self, _lease: &Lease) {}

    /// Whether the lock of a lease that has ended can be released without its caller.
    fn releases_in_background(&self) -> bool {
        true
    }

    /// Returns what cleans up residues in the background.
    fn residue_cleaner(self: Arc<Self>) -> Box<dyn ResidueCleaner + Send>;

    /// Lists all locks whose names match, by name.
    fn list(&self, prefix: &str, pattern: &str) -> Result<Vec<LockInfo>, BackendError>;

    /// Measures how long the servers take to reply.
    fn ping(&self) -> Result<Duration, BackendError>;

    /// Closes the connections that are not in use.
    fn close(&self);

    /// Converts an error into the one that the user sees.
    fn lock_error(&self, error: BackendError, action: Action, name: Option<&str>) -> LockError {
        error.into_lock_error(self.label().clone(), action, name)
    }

    /// Says why users cannot borrow a connection, if this backend has no pool for them.
    fn why_no_connection(&self) -> &'static str {
        "it has no connections"
    }

    /// Returns the error for a key that holds something that is not a lock.
    fn wrong_type(&self, key: &LockKey) -> LockError {
        let (name, key) = (key.name().to_owned(), key.lock_key().to_owned());
        LockError::WrongType { name, key, server: self.label().clone() }
    }
}

/// How locks are released, and what is left of them.
pub(crate) trait Releases {
    /// Releases the lock of a lease that has ended, even if all pooled connections are in use.
    /// `was_held` says whether the lease was valid until now.
    fn release_lease(&self, lease: &Lease, was_held: bool, deadline: Moment) -> ReleaseReport;

    /// Releases a lock if its holder has this id. `was_held` says whether it had when it was last
    /// inspected.
    fn release_id(
        &self,
        key: &LockKey,
        id: &[u8],
        was_held: bool,
        deadline: Moment,
    ) -> Result<Released, BackendError>;

    /// What a lease that has ended without a release may have left on the servers.
    fn lease_residue(&self, lease: &Lease) -> Residue;

    /// Cleans up after a claim once, for a caller that has nobody else to do it.
    fn clean_up_once(
        &self,
        claim: &Claim,
        residue: &Residue,
        deadline: Moment,
    ) -> Result<(), BackendError>;

    /// Repeats the release of a lease that was valid until then, so that the next acquisition does
    /// not find the lock held. The clean-up queue may repeat it too.
    fn complete_release(&self, lease: &Lease, deadline: Moment) -> Result<(), BackendError> {
        self.clean_up_once(&lease.claim, &self.lease_residue(lease), deadline)
    }
}

/// How one lock is looked at.
pub(crate) trait Looks {
    /// Returns the holder of a lock.
    fn inspect(&self, key: &LockKey) -> Result<Inspection<Holder>, BackendError> {
        Ok(self.lookup(key, 0)?.map(|lock| lock.into_holder()))
    }

    /// Returns the ids of all holders that any server reports, as far as they reply by `deadline`.
    fn reported_ids(&self, key: &LockKey, deadline: Moment) -> Result<ReportedIds, BackendError>;

    /// Describes one lock, with at most `waiters_max` of its waiters.
    fn lookup(&self, key: &LockKey, waiters_max: u64)
    -> Result<Inspection<LockInfo>, BackendError>;
}

/// What does not change while a claim is pursued.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AcquireRequest<'a> {
    pub(crate) claim: &'a Claim,
    /// Channel for the grant message.
    pub(crate) channel: &'a str,
    /// How long a claim keeps the lock from others until it is confirmed.
    pub(crate) claim_window: Duration,
    /// TTL for another holder's key that has none, in milliseconds; 0 to leave the key alone.
    pub(crate) repair_ttl_ms: u64,
    /// Time until which the caller waits for the lock.
    pub(crate) wait_deadline: Moment,
    /// Latest time at which the call returns.
    pub(crate) call_deadline: Moment,
    /// Ends the wait early, also one at the servers.
    #[cfg_attr(not(feature = "mysql"), expect(dead_code, reason = "only databases have such"))]
    pub(crate) cancel: Option<&'a CancelToken>,
    /// What the call has [reserved](Backend::reserve).
    #[cfg_attr(not(feature = "mysql"), expect(dead_code, reason = "only databases need it"))]
    pub(crate) places: Option<&'a ReservedPlaces>,
}

impl AcquireRequest<'_> {
    /// Queue entry of the claim: what it needs of a group, its claim window, the channel for the
    /// grant message, and its id.
    pub(crate) fn queue_entry(&self) -> String {
        let (window, id) = (self.claim_window.as_millis(), &self.claim.id);
        let prefix = self.claim.kind.queue_entry_prefix();
        format!("{prefix}{window} {} {id}", self.channel)
    }
}

/// One claim, from its first request until it is granted or abandoned.
pub(crate) trait Acquisition {
    /// Asks for the lock once. `place` is where the subscription leads to, if there is one.
    fn ask(&mut self, asking: Asking, place: Option<QueuePlace>) -> Answer;

    /// Judges a grant message for this claim. Returns the grant if the message alone is enough to
    /// hold the lock; otherwise the caller asks again.
    fn on_grant_message(&mut self, notice: GrantNotice) -> Option<Grant>;

    /// Earliest time at which a request that was put off can be sent.
    fn put_off_until(&self) -> Moment {
        Moment::NEVER
    }

    /// Whether this waiter must ask again itself, even if another thread of the manager asks for
    /// the same lock.
    fn must_ask_itself(&self) -> bool {
        false
    }

    /// What the servers may know of the claim, if it is abandoned now.
    fn residue(&self) -> Option<Residue>;
}

/// How to ask for a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asking {
    /// Without the queue.
    Try,
    /// From the queue: joins it, or stays in it.
    Queue,
    /// For the last time: leaves the queue.
    Last,
}

/// Answer to one request for a lock.
#[derive(Debug)]
pub(crate) enum Answer {
    Granted(Grant),
    /// Not decided yet: ask again at once.
    Undecided,
    /// We are at the head of the queue now: ask again at once.
    HeadOfQueue,
    Contended(Contention),
    /// The key is not a lock.
    WrongType,
    Failed(BackendError),
}

/// The lock went to another claim, or to none.
#[derive(Debug)]
pub(crate) struct Contention {
    /// The current holder, if one is known.
    pub(crate) holder: Option<Holder>,
    pub(crate) next: NextStep,
}

/// What a claim that was not granted does next.
#[derive(Debug)]
pub(crate) enum NextStep {
    /// Waits in the queue for its grant.
    AwaitGrant(QueueReport),
    /// Asks again at this time. This may be after the wait deadline.
    AskAgainAt(Moment),
    /// Joins the queue, if there is one to join.
    Queue { exists: bool },
    /// Nothing: the wait has ended.
    GiveUp,
}

/// What the reply said about our place in the queue.
#[derive(Debug)]
pub(crate) struct QueueReport {
    pub(crate) place: QueuePlace,
    pub(crate) position: u64,
    /// The holder, as reported where the queue is.
    pub(crate) holder: Holder,
    /// Our queue entry was gone, and this request added it again.
    pub(crate) was_lost: bool,
    /// Our channel has no subscriber there, so a hand-over would skip us.
    pub(crate) no_subscriber: bool,
    pub(crate) sent_at: Moment,
}

/// Cleans up what claims have left, over connections of its own, which open when they are first
/// used.
pub(crate) trait ResidueCleaner {
    /// Tries once to clean up the residue of each claim, and removes from it what the servers
    /// confirm. Returns why something is left.
    fn clean_up(
        &mut self,
        residues: &mut [(&Claim, &mut Residue)],
        limits: CleanupLimits<'_>,
    ) -> Option<BackendError>;

    /// Closes the connections.
    fn close(&mut self);
}

/// How long to try to clean up.
#[derive(Clone, Copy)]
pub(crate) enum CleanupLimits<'a> {
    /// At most one operation timeout for each exchange. An exchange ends early when this returns
    /// true, because the manager is shutting down.
    Unless(&'a dyn Fn() -> bool),
    /// Half of the time that is left until this deadline, which leaves the other half for a second
    /// try.
    HalfUntil(Moment),
}

impl CleanupLimits<'_> {
    /// Deadline of an exchange that begins now; `None` if none may begin.
    pub(crate) fn deadline(&self, operation_timeout: Duration) -> Option<Moment> {
        let now = clock::now();
        match self {
            CleanupLimits::Unless(must_end) => {
                (!must_end()).then(|| now.saturating_add(operation_timeout))
            }
            CleanupLimits::HalfUntil(end) => Some(now.saturating_add(end.duration_since(now) / 2)),
        }
    }
}

/// What is known about a lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Inspection<T> {
    Held(T),
    Free,
    /// The key is not a lock.
    WrongType,
}

impl<T> Inspection<T> {
    pub(crate) fn map<U>(self, convert: impl FnOnce(T) -> U) -> Inspection<U> {
        match self {
            Inspection::Held(found) => Inspection::Held(convert(found)),
            Inspection::Free => Inspection::Free,
            Inspection::WrongType => Inspection::WrongType,
        }
    }
}

/// The ids of all holders that the servers report.
pub(crate) type ReportedIds = Inspection<Vec<Vec<u8>>>;

/// Result of releasing the lock of a lease.
#[derive(Debug)]
pub(crate) struct ReleaseReport {
    pub(crate) result: Result<Released, BackendError>,
    /// What the release may have left on the servers.
    pub(crate) residues: Vec<Residue>,
}
