//! A Redis Cluster: each lock is kept by the node of its slot, as a single server would keep it.

mod acquisition;
mod cleanup;
mod cluster_node;
mod grant_stream;
mod list;
mod map;
mod map_request;
mod node_link;
mod redirect_reply;
mod renewals;
mod router;
mod subscriptions;

use std::{borrow::Cow, cell::RefCell, sync::Arc, time::Duration};

use self::{
    acquisition::{ClusterAcquisition, SlotServer},
    cleanup::ClusterCleaner,
    grant_stream::ClusterGrantStream,
    renewals::ClusterRenewals,
    router::{Patience, Router},
    subscriptions::Subscriptions,
};
use crate::{
    backend::{
        AcquireRequest, Acquisition, AdoptReport, AllAnswer, AllOutcome, AllRequest, Backend,
        Feature, GrantStream, Inspection, LeaseRenewals, Passed, ReleaseReport, RenewSoon,
        ReportedIds, ResidueCleaner,
        error::{BackendError, NodeError, NodeErrorKind},
        redis::{
            Connection, Endpoint, NodeConnections, RedisSettings, ReleaseAttempts, Request,
            Urgency, Yielding,
            acquire_all::acquire_all_on_one_server,
            adopt::adopt_on_one_server,
            ask_for_lock,
            group_requests::{downgrade_on_one_server, release_any_kind},
            inspect::{OneServerForEachLock, lookup_on_one_server, reported_ids_on_one_server},
            release_on_one_server,
            requests_and_replies::Ping,
        },
    },
    core::{
        claim::{Claim, Residue},
        cluster_slot::tag_of_slot,
        id::LockId,
        key::{InvalidName, LockKey},
        lease::Lease,
        quorum::NodeSet,
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

    fn why_no_connection(&self) -> &'static str {
        "no connection leads to all keys; connect to the nodes of the cluster with a client for \
         clusters"
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

    fn open_stream(&self, channel: &str, _: Moment) -> Result<Box<dyn GrantStream>, NodeError> {
        let stream = ClusterGrantStream::open(&self.router, &self.subscriptions, channel);
        Ok(Box::new(stream.map_err(NodeError::not_sent)?))
    }

    fn release_lease(&self, lease: &Lease, was_held: bool, deadline: Moment) -> ReleaseReport {
        let key = &lease.claim.key;
        release_on_one_server(lease, was_held, self.yielding.as_ref(), deadline, |release| {
            self.send(key, release, false, deadline)
        })
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

    fn acquires_all(&self, keys: &[LockKey]) -> bool {
        keys.windows(2).all(|pair| pair[0].slot() == pair[1].slot())
    }

    fn acquire_all(&self, request: AllRequest<'_>) -> AllAnswer {
        let Some(key) = request.claims.first().map(|claim| &claim.key) else {
            return AllAnswer::unsupported();
        };
        let answer = acquire_all_on_one_server(request, |all, until| {
            let patience = Patience { deadline: until, waits_for_nodes: false };
            let replicas = self.router.replicas();
            let followed = self.router.follow(slot_of(key)?, patience, |part, is_asking| {
                let mut connections = part.pool.get(Urgency::Other, until)?;
                let ask = |connection: &mut _| {
                    self.router.ask_over(part, connection, all, is_asking, until)
                };
                ask_for_lock(&part.node, connections.only(), replicas, until, ask)
            });
            followed.map(|(_, exchange)| exchange)
        });
        if let (Some(yielding), AllOutcome::Held { index, holder }) =
            (&self.yielding, &answer.outcome)
        {
            yielding.on_holder(request.claims[*index].key.lock_key(), holder, clock::now());
        }
        answer
    }

    fn adopt(&self, former: &LockId, claim: &Claim, deadline: Moment) -> AdoptReport {
        adopt_on_one_server(former, claim, deadline, |request, until| {
            let patience = Patience { deadline: until, waits_for_nodes: true };
            let followed = self.router.follow(slot_of(&claim.key)?, patience, |part, is_asking| {
                let mut connections = part.pool.get(Urgency::Other, until)?;
                let connection = connections.only();
                let ask = |connection: &mut Connection| {
                    self.router.ask_over(part, connection, request, is_asking, until)
                };
                ask_for_lock(&part.node, connection, self.router.replicas(), until, ask)
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
                let connection = connections.only();
                let downgraded =
                    self.router.ask_over(part, connection, request, is_asking, until)?;
                self.router.replicas().confirm(&part.node, connection, until)?;
                Ok(downgraded)
            });
            followed.map(|(_, exchange)| exchange)
        })
    }

    fn lease_residue(&self, lease: &Lease) -> Residue {
        lease.residue(NodeSet::single(0))
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
        let mut release = ReleaseAttempts::of_residue(claim, residue);
        let result = self.send(&claim.key, &mut release, true, deadline);
        result.map(drop).map_err(BackendError::Node)
    }

    fn reported_ids(&self, key: &LockKey, deadline: Moment) -> Result<ReportedIds, BackendError> {
        reported_ids_on_one_server(self, key, deadline)
    }

    fn lookup(
        &self,
        key: &LockKey,
        waiters_max: u64,
    ) -> Result<Inspection<LockInfo>, BackendError> {
        lookup_on_one_server(self, key, waiters_max)
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

impl OneServerForEachLock for ClusterBackend {
    /// Asks once more if the connection was stale.
    fn ask_about<R: Request>(
        &self,
        key: &LockKey,
        request: &R,
        deadline: Moment,
    ) -> Result<R::Reply, BackendError> {
        let patience = Patience { deadline, waits_for_nodes: true };
        let ask = || self.router.ask(slot_of(key)?, request, patience);
        let is_stale = |failure: &NodeError| failure.outcome_unknown && failure.is_transient();
        let asked = match ask() {
            Err(failure) if is_stale(&failure) && clock::now() < deadline => ask(),
            asked => asked,
        };
        asked.map(|(_, exchange)| exchange.reply).map_err(BackendError::Node)
    }
}

/// Returns the channel of a slot, for a manager with the channel `manager`.
fn channel_of_slot(manager: &str, slot: u16) -> String {
    let id = manager.strip_prefix(CHANNEL_PREFIX).unwrap_or(manager);
    format!("{CHANNEL_PREFIX}{{{}}}:{id}", tag_of_slot(slot))
}
