//! A Redis Cluster: each lock is kept by the node of its slot, as a single server would keep it.

mod acquisition;
mod clean_up;
mod grant_stream;
mod list;
mod map;
mod map_request;
mod node_link;
mod part;
mod redirect;
mod renewals;
mod router;
mod subscriptions;

use std::{borrow::Cow, cell::RefCell, sync::Arc, time::Duration};

use self::{
    acquisition::{ClusterAcquisition, SlotServer},
    clean_up::ClusterCleaner,
    grant_stream::ClusterGrantStream,
    renewals::ClusterRenewals,
    router::{Patience, Router},
    subscriptions::Subscriptions,
};
use crate::{
    backend::{
        AcquireRequest, Acquisition, Backend, Feature, GrantStream, Inspection, LeaseRenewals,
        Passed, ReleaseReport, RenewSoon, ResidueCleaner, StreamError,
        error::{BackendError, NodeError, NodeErrorKind},
        redis::{
            Endpoint, NodeConnections, RedisSettings, ReleaseAttempts, Request, Urgency, Yielding,
            adopt::adopt_on_one_server,
            groups::{
                add_members, add_members_to_holder, downgrade_on_one_server, release_any_kind,
            },
            list::DescribeLocks,
            requests_and_replies::{Inspect, Ping},
        },
    },
    core::{
        ack::PendingAcks,
        claim::{Claim, Residue},
        holder::Holder,
        id::LockId,
        key::{InvalidName, LockKey},
        lease::Lease,
        quorum::NodeSet,
        slot::tag_of_slot,
    },
    lock_info::{LockInfo, Released},
    observe::Observer,
    sys::clock::{self, Moment},
};

/// What the channels of all managers begin with.
const CHANNEL_PREFIX: &str = "distlock:client:";

#[derive(Debug)]
pub(crate) struct ClusterBackend {
    router: Arc<Router>,
    subscriptions: Arc<Subscriptions>,
    yielding: Option<Yielding>,
}

impl ClusterBackend {
    /// Does not connect.
    pub(crate) fn new(
        endpoint: Arc<Endpoint>,
        settings: RedisSettings,
        observer: Arc<Observer>,
    ) -> ClusterBackend {
        let router = Router::new(endpoint, settings, observer);
        ClusterBackend {
            router: Arc::new(router),
            subscriptions: Arc::default(),
            yielding: Yielding::new(settings.yield_to_others),
        }
    }

    fn operation_deadline(&self) -> Moment {
        clock::now().saturating_add(self.router.operation_timeout)
    }

    /// Asks about one lock, and once more if the connection was stale. For requests that change
    /// nothing.
    fn look<C: Request>(
        &self,
        key: &LockKey,
        request: &C,
        deadline: Moment,
    ) -> Result<C::Reply, BackendError> {
        let patience = Patience { deadline, waits_for_nodes: true };
        let ask = || self.router.ask(slot_of(key)?, request, patience);
        let is_stale = |failure: &NodeError| failure.outcome_unknown && failure.is_transient();
        let asked = match ask() {
            Err(failure) if is_stale(&failure) && clock::now() < deadline => ask(),
            asked => asked,
        };
        asked.map(|(_, exchange)| exchange.reply).map_err(BackendError::Node)
    }

    /// Sends a release, over a reserved connection if the pool is exhausted or closed.
    fn send(
        &self,
        key: &LockKey,
        release: &mut ReleaseAttempts<'_>,
        is_reserved: bool,
        deadline: Moment,
    ) -> Result<Released, NodeError> {
        let slot = slot_of(key)?;
        release.send(deadline, |request, until| {
            let patience = Patience { deadline: until, waits_for_nodes: true };
            let followed = self.router.follow(slot, patience, |part, is_asking| {
                let ask = |connections: &mut NodeConnections| {
                    self.router.ask_over(part, connections.only(), request, is_asking, until)
                };
                let asked = if is_reserved {
                    part.pool.with_reserved(until, ask)
                } else {
                    part.pool.with_connections(until, ask)
                };
                // There was no time to send the release.
                asked.unwrap_or_else(|| Err(NodeError::outcome_unknown(NodeErrorKind::TimedOut)))
            });
            followed.map(|(_, exchange)| exchange)
        })
    }
}

fn slot_of(key: &LockKey) -> Result<u16, NodeError> {
    key.slot().ok_or_else(|| NodeError::not_sent(std::io::ErrorKind::InvalidInput.into()))
}

impl Backend for ClusterBackend {
    fn label(&self) -> &Arc<str> {
        self.router.label()
    }

    fn operation_timeout(&self) -> Duration {
        self.router.operation_timeout
    }

    fn adapt_key(&self, key: LockKey) -> Result<LockKey, InvalidName> {
        key.in_cluster()
    }

    /// The channel is in the slot of the lock.
    fn channel_for<'a>(&self, manager: &'a str, key: &LockKey) -> Cow<'a, str> {
        key.slot().map_or(Cow::Borrowed(manager), |slot| channel_of_slot(manager, slot).into())
    }

    fn acquisition<'a>(&'a self, request: AcquireRequest<'a>) -> Box<dyn Acquisition + 'a> {
        let server = SlotServer {
            router: &self.router,
            slot: request.claim.key.slot().unwrap_or(0),
            yielding: self.yielding.as_ref(),
            last: RefCell::new(None),
        };
        Box::new(ClusterAcquisition::on(server, &self.subscriptions, request))
    }

    fn open_stream(&self, channel: &str, _: Moment) -> Result<Box<dyn GrantStream>, StreamError> {
        match ClusterGrantStream::open(&self.router, &self.subscriptions, channel) {
            Ok(stream) => Ok(Box::new(stream)),
            Err(error) => {
                Err(StreamError { cause: NodeError::not_sent(error), out_of_time: false })
            }
        }
    }

    fn release_lease(&self, lease: &Lease, was_held: bool, deadline: Moment) -> ReleaseReport {
        let (key, id) = (&lease.claim.key, lease.claim.id.as_str().as_bytes());
        let left_free_for = self
            .yielding
            .as_ref()
            .map_or(Duration::ZERO, |yielding| yielding.on_release(key.lock_key(), clock::now()));
        let result = ReleaseAttempts::new(key, id, &lease.queue_entry, was_held)
            .of_kind(lease.claim.kind)
            .keeping(&self.lease_residue(lease))
            .leaving_free(left_free_for)
            .through_failover(deadline, |release| self.send(key, release, false, deadline));
        let (now, in_flight) = (clock::now(), lease.in_flight);
        let mut residues = Vec::new();
        if result.is_err() {
            residues.push(Residue { in_flight_until: now, ..self.lease_residue(lease) });
        }
        // A request that is still in flight would find the lock free and acquire it again.
        if now < in_flight.broken_until {
            residues.push(self.lease_residue(lease));
        }
        ReleaseReport { result: result.map_err(BackendError::Node), residues }
    }

    fn release_id(
        &self,
        key: &LockKey,
        id: &[u8],
        was_held: bool,
        deadline: Moment,
    ) -> Result<Released, BackendError> {
        release_any_kind(id, |kind| {
            let release = ReleaseAttempts::new(key, id, "", was_held).of_kind(kind);
            release
                .through_failover(deadline, |release| self.send(key, release, false, deadline))
                .map_err(BackendError::Node)
        })
    }

    fn refusal_of(&self, feature: Feature) -> Option<&'static str> {
        feature.refusal_of_one_server()
    }

    fn adopt(
        &self,
        former: &LockId,
        claim: &Claim,
        deadline: Moment,
    ) -> Result<Passed, BackendError> {
        adopt_on_one_server(former, claim, deadline, |request, until| {
            let patience = Patience { deadline: until, waits_for_nodes: true };
            let followed = self.router.follow(slot_of(&claim.key)?, patience, |part, is_asking| {
                let mut connections = part.pool.get(Urgency::Other, until)?;
                let connection = connections.only();
                let adopted = self.router.ask_over(part, connection, request, is_asking, until)?;
                self.router.replicas().confirm(&part.node, connection, until)?;
                Ok(adopted)
            });
            followed.map(|(_, exchange)| exchange)
        })
    }

    fn downgrade(&self, lease: &Lease, deadline: Moment) -> Result<Passed, BackendError> {
        downgrade_on_one_server(lease, deadline, |request, until| {
            let patience = Patience { deadline: until, waits_for_nodes: true };
            let slot = slot_of(&lease.claim.key)?;
            let followed = self.router.follow(slot, patience, |part, is_asking| {
                let mut connections = part.pool.get(Urgency::Release, until)?;
                self.router.ask_over(part, connections.only(), request, is_asking, until)
            });
            followed.map(|(_, exchange)| exchange)
        })
    }

    fn lease_residue(&self, lease: &Lease) -> Residue {
        Residue {
            nodes: NodeSet::single(0),
            queue_entry: lease.queue_entry.clone(),
            in_flight_until: lease.in_flight.until(),
            keep_until: lease.keep_until,
            pending_acks: PendingAcks::new(),
        }
    }

    fn lease_renewals(self: Arc<Self>, _: RenewSoon) -> Box<dyn LeaseRenewals + Send> {
        Box::new(ClusterRenewals::new(self.router.clone()))
    }

    fn residue_cleaner(self: Arc<Self>) -> Box<dyn ResidueCleaner + Send> {
        Box::new(ClusterCleaner::new(self.router.clone()))
    }

    fn clean_up_once(
        &self,
        claim: &Claim,
        residue: &Residue,
        deadline: Moment,
    ) -> Result<(), BackendError> {
        let (key, id) = (&claim.key, claim.id.as_str().as_bytes());
        let mut release = ReleaseAttempts::new(key, id, &residue.queue_entry, false)
            .of_kind(claim.kind)
            .keeping(residue);
        let result = self.send(key, &mut release, true, deadline);
        result.map(drop).map_err(BackendError::Node)
    }

    fn inspect(&self, key: &LockKey) -> Result<Inspection<Holder>, BackendError> {
        let found = self.look(key, &Inspect(key), self.operation_deadline())?;
        add_members_to_holder(key, found, |request| {
            self.look(key, request, self.operation_deadline())
        })
    }

    fn reported_ids(&self, key: &LockKey, deadline: Moment) -> Result<Vec<Vec<u8>>, BackendError> {
        Ok(match self.look(key, &Inspect(key), deadline)? {
            Inspection::Held(holder) => vec![holder.id_bytes().to_vec()],
            Inspection::Free | Inspection::WrongType => Vec::new(),
        })
    }

    fn lookup(&self, key: &LockKey) -> Result<Inspection<LockInfo>, BackendError> {
        let request = DescribeLocks::lookup(key);
        let (_, found) = self.look(key, &request, self.operation_deadline())?;
        let found = found.into_iter().next();
        let mut found = [found.map_or(Inspection::Free, |found| found.into_lock_info(key))];
        add_members(std::slice::from_ref(key), &mut found, |request| {
            self.look(key, request, self.operation_deadline())
        })?;
        let [found] = found;
        Ok(found)
    }

    fn list(&self, prefix: &str, pattern: &str) -> Result<Vec<LockInfo>, BackendError> {
        self.list_all(prefix, pattern)
    }

    /// The longest time of any node.
    fn ping(&self) -> Result<Duration, BackendError> {
        let deadline = self.operation_deadline();
        let mut longest = Duration::ZERO;
        for part in self.router.masters(deadline).map_err(BackendError::Node)? {
            let began = clock::now();
            let ping = || {
                let mut connections = part.pool.get(Urgency::Other, deadline)?;
                self.router.ask_over(&part, connections.only(), &Ping, false, deadline)
            };
            // A stale connection has been closed.
            ping().or_else(|_| ping()).map_err(BackendError::Node)?;
            longest = longest.max(clock::now().duration_since(began));
        }
        Ok(longest)
    }

    fn close(&self) {
        self.router.close();
    }
}

/// Returns the channel of a slot, for a manager with the channel `manager`.
fn channel_of_slot(manager: &str, slot: u16) -> String {
    let id = manager.strip_prefix(CHANNEL_PREFIX).unwrap_or(manager);
    format!("{CHANNEL_PREFIX}{{{}}}:{id}", tag_of_slot(slot))
}
