//! What N independent nodes decide together (Redlock).

mod acquisition;
mod broadcast;
mod broadcast_options;
mod cleanup;
mod common_members;
mod contended_locks;
mod error;
mod footprint;
mod inspect;
mod list;
mod optional_calls;
mod release;
mod renewals;
mod reported_holder;
mod responses;
mod round;
mod round_pauses;
mod vote_releases;

use std::{fmt, sync::Arc, time::Duration};

use parking_lot::Mutex;
use smallvec::SmallVec;

#[cfg(test)]
pub(crate) use self::footprint::Footprint;
use self::{
    acquisition::QuorumAcquisition,
    broadcast::broadcast,
    cleanup::QuorumCleaner,
    contended_locks::ContendedLocks,
    renewals::QuorumRenewals,
    reported_holder::most_reported_holder,
    round_pauses::{preferred_wait, subscribe_budget},
};
pub(crate) use self::{
    broadcast_options::BroadcastOptions,
    responses::{Response, Responses},
};
pub(crate) use crate::backend::redis::{NodeConnections, PooledConnections};
use crate::{
    backend::{
        AcquireRequest, Acquisition, Backend, GrantStream, LeaseRenewals, QueuePlace, RenewSoon,
        ResidueCleaner,
        error::BackendError,
        redis::{
            ConnectionPool, Endpoint, Exchange, NodeError, NodeErrorKind, RedisGrantStream,
            RedisNode, Request, Urgency, Voters, requests::Ping,
        },
    },
    core::{
        claim::Residue,
        kind::LockKind,
        node_reply::Vote,
        quorum::{NodeSet, prevents_quorum, quorum},
        validity::EXPIRY_SLACK,
    },
    error::{Action, LockError},
    lock_info::LockInfo,
    observe::Observer,
    sys::clock::{self, Moment},
};

/// Distance of the proposed token above the latest of the nodes' clocks, in microseconds. It
/// usually makes all nodes store the same token in the first round.
const TOKEN_HEADROOM_US: u64 = 10_000;

/// The nodes, and the connections to them.
pub(crate) struct Redlock {
    nodes: Arc<[Arc<RedisNode>]>,
    voters: Arc<Mutex<Voters>>,
    pool: Arc<ConnectionPool>,
    contended_locks: ContendedLocks,
    label: Arc<str>,
    operation_timeout: Duration,
}

impl Redlock {
    /// Does not connect. Returns `None` if no thread can be spawned for the pool.
    pub(crate) fn new(
        endpoints: &[Arc<Endpoint>],
        pool_size: u32,
        operation_timeout: Duration,
        quarantine: Duration,
        observer: &Arc<Observer>,
    ) -> Option<Redlock> {
        let labels = || endpoints.iter().map(|endpoint| endpoint.label.clone());
        let voters = Arc::new(Mutex::new(Voters::new(labels(), quarantine)));
        let node = |(index, endpoint): (usize, &Arc<Endpoint>)| {
            // With several replies in flight, a spinning thread could take a core from the servers
            // that must send them.
            let spin_max = Duration::ZERO;
            let node = RedisNode::new(
                endpoint.clone(),
                operation_timeout,
                spin_max,
                Duration::ZERO,
                observer.clone(),
            );
            Arc::new(node.with_voters(index, voters.clone()))
        };
        let nodes: Arc<[_]> = endpoints.iter().enumerate().map(node).collect();
        let pool = Arc::new(ConnectionPool::new(nodes.clone(), pool_size)?);
        Some(Redlock {
            nodes,
            voters,
            pool,
            contended_locks: ContendedLocks::new(),
            label: join_labels(endpoints),
            operation_timeout,
        })
    }

    /// Connects to the nodes, and fails if a server cannot be a node. An unreachable or slow node
    /// is checked later, when a connection to it succeeds.
    pub(crate) fn validate_nodes(&self) -> Result<(), LockError> {
        let deadline = clock::now().saturating_add(self.operation_timeout);
        let mut connections = self
            .checkout(deadline)
            .map_err(|error| self.lock_error(error, Action::Connect, None))?;
        let responses = self.ask(
            &mut connections,
            BroadcastOptions {
                // A node that hangs should not delay the start of each program by a whole timeout.
                straggler_grace: self.operation_timeout / 4,
                ..BroadcastOptions::new(self.all_nodes(), deadline)
            },
            |_| Ping,
            |_, _| Vote::Yes,
        );
        for (node, response) in self.nodes.iter().zip(&responses.by_node) {
            if let Response::Failed(NodeError { kind: NodeErrorKind::Ineligible(why), .. }) =
                response
            {
                return Err(LockError::InvalidConfig {
                    reason: format!("{} cannot be a node: {why}", node.label()),
                });
            }
        }
        Ok(())
    }

    pub(crate) fn len(&self) -> usize {
        self.nodes.len()
    }

    pub(crate) fn quorum_size(&self) -> usize {
        quorum(self.nodes.len())
    }

    pub(crate) fn all_nodes(&self) -> NodeSet {
        NodeSet::first_n(self.nodes.len())
    }

    pub(crate) fn node(&self, index: usize) -> &Arc<RedisNode> {
        &self.nodes[index]
    }

    pub(crate) fn nodes(&self) -> &[Arc<RedisNode>] {
        &self.nodes
    }

    /// The nodes in the order in which all clients prefer them.
    fn order(&self) -> SmallVec<[usize; 8]> {
        self.voters.lock().order()
    }

    /// The nodes that clients prefer to this one.
    pub(crate) fn preferred_to(&self, node: usize) -> impl Iterator<Item = usize> {
        self.order().into_iter().take_while(move |other| *other != node)
    }

    /// Node to queue on: the first healthy one, so that all clients prefer the same.
    pub(crate) fn preferred_queue_node(&self) -> usize {
        let order = self.order();
        let healthy = order.iter().find(|node| self.nodes[**node].health.is_healthy());
        healthy.or(order.first()).copied().unwrap_or(0)
    }

    /// Whether a node that is preferred to this one is unhealthy and its back-off has ended, so
    /// that it is worth asking.
    pub(crate) fn may_have_recovered(&self, node: usize) -> bool {
        let now = clock::now();
        self.preferred_to(node)
            .map(|node| &self.nodes[node])
            .any(|node| !node.health.is_healthy() && !node.health.is_backing_off(now))
    }

    /// How long a claim waits for the reply of the queue node, although the other nodes grant the
    /// lock: without it, the claim could pass the queue.
    fn queue_node_wait(&self, node: usize, kind: LockKind) -> Duration {
        let longest = self.operation_timeout / 4;
        if kind.membership().is_some() {
            // Only the queue node knows of a writer that waits behind other readers.
            return longest;
        }
        let last = self.nodes[node].clock_sample().map(|sample| sample.round_trip());
        preferred_wait(last.unwrap_or_default(), longest)
    }

    pub(crate) fn operation_timeout(&self) -> Duration {
        self.operation_timeout
    }

    /// Takes connections from the pool, one to each node. Waits until `deadline` if none are free.
    pub(crate) fn checkout(&self, deadline: Moment) -> Result<PooledConnections, BackendError> {
        self.pool.get(Urgency::Other, deadline).map_err(BackendError::Node)
    }

    pub(crate) fn pool(&self) -> &Arc<ConnectionPool> {
        &self.pool
    }

    /// Connections outside the pool, for a thread that must never wait for users of the pool.
    pub(crate) fn reserved_connections(&self) -> NodeConnections {
        NodeConnections::reserved(&self.nodes)
    }

    /// Asks nodes, and counts their votes.
    pub(crate) fn ask<C: Request>(
        &self,
        connections: &mut NodeConnections,
        options: BroadcastOptions<'_>,
        request: impl Fn(usize) -> C,
        vote: impl Fn(usize, &Exchange<C::Reply>) -> Vote,
    ) -> Responses<C::Reply> {
        broadcast(&self.nodes, &self.order(), &mut connections.0, options, request, vote)
    }

    /// Reads the abandoned replies that have arrived from this node, which sets their acks.
    pub(crate) fn drain_replies(&self, connections: &mut NodeConnections, node: usize) {
        let (_, replied) = connections.0[node].read_unread(clock::now());
        if replied {
            self.nodes[node].health.record_success();
        }
    }

    /// Smallest token to ask the nodes for.
    pub(crate) fn token_min(&self) -> u64 {
        let now = clock::now();
        let clocks = self.nodes.iter().filter_map(|node| node.clock_sample());
        clocks
            .map(|sample| sample.server_us_at(now))
            .max()
            .map_or(0, |latest| latest.saturating_add(TOKEN_HEADROOM_US))
    }
}

impl Backend for Redlock {
    fn label(&self) -> &Arc<str> {
        &self.label
    }

    fn operation_timeout(&self) -> Duration {
        self.operation_timeout
    }

    fn probe_interval(&self) -> Option<Duration> {
        Some(Duration::MAX)
    }

    fn excludes_others(&self, residue: &Residue) -> bool {
        let is_left = |node: usize| residue.nodes.contains(node);
        // Nobody acquires the lock against the vote of the queue node: the first healthy one, or
        // one of these once it is healthy again.
        let mut order = self.order().into_iter();
        let queue_node = order.find(|node| is_left(*node) || self.nodes[*node].health.is_healthy());
        prevents_quorum(residue.nodes.len(), self.nodes.len()) || queue_node.is_some_and(is_left)
    }

    /// One of several nodes may have been skipped until a pending release to it had expired.
    fn longest_silence(&self) -> Duration {
        self.operation_timeout.saturating_mul(2).saturating_add(EXPIRY_SLACK)
    }

    fn acquisition<'a>(&'a self, request: AcquireRequest<'a>) -> Box<dyn Acquisition + 'a> {
        Box::new(QuorumAcquisition::new(self, request))
    }

    /// Subscribes on the first node where that works. Nodes that failed recently come last.
    fn open_stream(
        &self,
        channel: &str,
        deadline: Moment,
    ) -> Result<Box<dyn GrantStream>, NodeError> {
        let timeout = self.operation_timeout;
        let mut nodes = self.order();
        nodes.sort_by_key(|node| !self.node(*node).health.is_healthy());
        let mut failed = NodeError::not_applied(NodeErrorKind::TimedOut);
        for (tried, node) in nodes.iter().enumerate() {
            let now = clock::now();
            let budget = subscribe_budget(deadline.duration_since(now), tried, nodes.len());
            let (server, until) = (self.node(*node), now.saturating_add(budget));
            match RedisGrantStream::open(server, QueuePlace(*node), channel, timeout, until) {
                Ok(stream) => return Ok(Box::new(stream)),
                Err(failure) => {
                    // Even a healthy node may be too distant to reply in its share of the time. If
                    // it replies to nothing, other requests notice that.
                    if !failure.is_timeout() {
                        server.health.record_failure(clock::now());
                    }
                    failed = failure;
                }
            }
        }
        Err(failed)
    }

    /// Waiters should move to the preferred queue node if it comes before this one, or if this one
    /// is failing.
    fn should_move_queue(&self, QueuePlace(node): QueuePlace) -> bool {
        let preferred = self.preferred_queue_node();
        self.preferred_to(node).any(|other| other == preferred)
            || (self.nodes[node].health.is_failing() && preferred != node)
    }

    fn lease_renewals(self: Arc<Self>, _: RenewSoon) -> Box<dyn LeaseRenewals + Send> {
        Box::new(QuorumRenewals::new(self))
    }

    fn residue_cleaner(self: Arc<Self>) -> Box<dyn ResidueCleaner + Send> {
        Box::new(QuorumCleaner::new(self))
    }

    fn list(&self, prefix: &str, pattern: &str) -> Result<Vec<LockInfo>, BackendError> {
        self.list_locks(prefix, pattern)
    }

    fn ping(&self) -> Result<Duration, BackendError> {
        Redlock::ping(self)
    }

    fn close(&self) {
        self.pool.close();
    }
}

impl fmt::Debug for Redlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redlock").field("nodes", &self.nodes).finish_non_exhaustive()
    }
}

/// The nodes as named in messages.
pub(crate) fn join_labels(endpoints: &[Arc<Endpoint>]) -> Arc<str> {
    endpoints.iter().map(|endpoint| &*endpoint.label).collect::<Vec<_>>().join(", ").into()
}
