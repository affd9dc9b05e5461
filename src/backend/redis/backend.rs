//! `RedisBackend`: one server, which decides alone.

use std::{mem, sync::Arc, time::Duration};

use super::{
    Connection, ConnectionPool, Endpoint, Exchange, ExchangeLimits, HeardSubscription,
    NodeConnections, NodeError, PooledConnections, RedisAcquisition, RedisGrantStream, RedisNode,
    Replicas, Request,
    acquisition::{ClaimServer, PLACE},
    cleanup::RedisCleaner,
    connect, exchange, exchange_all,
    listing::{DESCRIBE_BATCH_MAX, LIST_TIMEOUTS_MAX, Listing, ScanProgress},
    one_server::{OneServerForEachLock, Purpose, exchange_over_pool},
    release::{FAILOVER_PAUSE_MAX, FAILOVER_PAUSE_MIN, release_all_on_one_server},
    renewals::RedisRenewals,
    requests::list::{DescribeLocks, Scan, key_pattern},
    requests::{Acquire, AcquireReply, Ping, Release},
    yielding::Yielding,
};
use crate::{
    backend::{
        AcquireRequest, Acquisition, Backend, GrantStream, LeaseRenewals, ReleaseReport, RenewSoon,
        ResidueCleaner, error::BackendError,
    },
    core::{clock_sample::ClockSample, key::LockKey, lease::Lease},
    lock_info::LockInfo,
    observe::Observer,
    sys::clock::{self, Moment},
};

/// How a server that decides alone is asked.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RedisSettings {
    pub(crate) pool_size: u32,
    pub(crate) operation_timeout: Duration,
    pub(crate) spin_max: Duration,
    /// How long a release now and then leaves a lock free.
    pub(crate) yield_to_others: Duration,
    /// How long the server grants nothing after a restart or a failover.
    pub(crate) quarantine: Duration,
    pub(crate) replicas: Replicas,
}

#[derive(Debug)]
pub(crate) struct RedisBackend {
    node: Arc<RedisNode>,
    pool: Arc<ConnectionPool>,
    operation_timeout: Duration,
    yielding: Option<Yielding>,
    replicas: Replicas,
}

impl RedisBackend {
    /// Does not connect. Returns `None` if no thread can be spawned for the pool.
    pub(crate) fn new(
        endpoint: Arc<Endpoint>,
        settings: RedisSettings,
        observer: Arc<Observer>,
    ) -> Option<RedisBackend> {
        let RedisSettings { pool_size, operation_timeout, spin_max, quarantine, replicas, .. } =
            settings;
        let node = RedisNode::new(endpoint, operation_timeout, spin_max, quarantine, observer);
        let node = Arc::new(node);
        let pool = Arc::new(ConnectionPool::new([node.clone()].into(), pool_size)?);
        let yielding = Yielding::new(settings.yield_to_others);
        Some(RedisBackend { node, pool, operation_timeout, yielding, replicas })
    }

    pub(crate) fn pool(&self) -> &Arc<ConnectionPool> {
        &self.pool
    }

    fn checkout(&self, deadline: Moment) -> Result<PooledConnections, BackendError> {
        self.pool.get_to_ask(deadline).map_err(BackendError::Node)
    }

    /// Asks, and asks again once if the connection was stale. If the server is no master, asks
    /// until `deadline`, because the next connection may lead to the new master. For requests that
    /// change nothing.
    fn ask<C: Request>(
        &self,
        connection: &mut Connection,
        request: &C,
        deadline: Moment,
    ) -> Result<C::Reply, BackendError> {
        let mut pause = FAILOVER_PAUSE_MIN;
        let mut was_stale = false;
        loop {
            let failure = match exchange(&self.node, connection, request, deadline) {
                Ok(exchange) => return Ok(exchange.reply),
                Err(failure) => failure,
            };
            let now = clock::now();
            if failure.is_not_master() && now.saturating_add(pause) < deadline {
                clock::sleep_until(now.saturating_add(pause));
                pause = (pause * 2).min(FAILOVER_PAUSE_MAX);
            } else if !failure.is_reply_lost()
                || now >= deadline
                || mem::replace(&mut was_stale, true)
            {
                return Err(BackendError::Node(failure));
            }
        }
    }
}

impl ClaimServer for &RedisBackend {
    fn acquire(
        &self,
        request: &Acquire<'_>,
        deadline: Moment,
    ) -> Result<Exchange<AcquireReply>, NodeError> {
        self.exchange(request.key, request, Purpose::Claim, deadline)
    }

    fn clock_sample(&self, _: u64) -> Option<ClockSample> {
        self.node.clock_sample()
    }

    fn heard_subscription(&self) -> Option<&HeardSubscription> {
        Some(&self.node.heard_subscription)
    }

    fn must_confirm(&self) -> bool {
        self.replicas.are_required()
    }

    fn yielding(&self) -> Option<&Yielding> {
        self.yielding.as_ref()
    }
}

impl Backend for RedisBackend {
    fn label(&self) -> &Arc<str> {
        self.node.label()
    }

    fn operation_timeout(&self) -> Duration {
        self.operation_timeout
    }

    fn acquisition<'a>(&'a self, request: AcquireRequest<'a>) -> Box<dyn Acquisition + 'a> {
        Box::new(RedisAcquisition::on(self, self.operation_timeout, request))
    }

    fn open_stream(
        &self,
        channel: &str,
        deadline: Moment,
    ) -> Result<Box<dyn GrantStream>, NodeError> {
        let timeout = self.operation_timeout;
        let stream = RedisGrantStream::open(&self.node, PLACE, channel, timeout, deadline)?;
        Ok(Box::new(stream))
    }

    fn release_leases(
        &self,
        leases: &[(&Lease, bool)],
        deadline: &dyn Fn() -> Moment,
    ) -> Vec<ReleaseReport> {
        let ask_all = |requests: &[Release<'_>], until| {
            let check = &mut |_| Some(Moment::NEVER);
            let mut limits = ExchangeLimits { deadline: until, connect_by: until, check };
            let ask = |connections: &mut NodeConnections| {
                let connection = connections.only();
                match connect(&self.node, connection, until) {
                    Ok(()) => exchange_all(&self.node, connection, requests, &mut limits),
                    Err(failure) => requests.iter().map(|_| Err(failure.clone())).collect(),
                }
            };
            self.pool.with_connections(until, ask).unwrap_or_default()
        };
        release_all_on_one_server(leases, self.yielding.as_ref(), deadline(), ask_all)
    }

    fn acquires_all(&self, _: &[LockKey]) -> bool {
        true
    }

    fn probe_interval(&self) -> Option<Duration> {
        self.node.discovery().refresh_interval()
    }

    fn lease_renewals(self: Arc<Self>, _: RenewSoon) -> Box<dyn LeaseRenewals + Send> {
        Box::new(RedisRenewals::new(self.node.clone(), self.operation_timeout, self.replicas))
    }

    fn residue_cleaner(self: Arc<Self>) -> Box<dyn ResidueCleaner + Send> {
        Box::new(RedisCleaner::new(self.node.clone(), self.operation_timeout))
    }

    fn list(&self, prefix: &str, pattern: &str) -> Result<Vec<LockInfo>, BackendError> {
        let end =
            clock::now().saturating_add(self.operation_timeout.saturating_mul(LIST_TIMEOUTS_MAX));
        let step_deadline = || self.operation_deadline().min(end);
        let mut connections = self.checkout(step_deadline())?;
        let connection = connections.only();
        let pattern = key_pattern(prefix, pattern);
        // A search has no script that checks whether the server is a master.
        if let Ok(any) = LockKey::new(prefix, "*") {
            self.ask(connection, &DescribeLocks::lookup(&any, 0), step_deadline())?;
        }
        let (mut listing, mut progress) = (Listing::new(prefix), ScanProgress::start());
        loop {
            let scan = Scan { cursor: &progress.cursor, pattern: &pattern };
            let found = self.ask(connection, &scan, step_deadline())?;
            listing.add_keys(found.keys)?;
            if progress.advance(connection.opened_at(), found.next_cursor) {
                break;
            }
        }
        for batch in listing.take_keys().chunks(DESCRIBE_BATCH_MAX) {
            let request = DescribeLocks::in_list(batch);
            let found = self.ask(connection, &request, step_deadline())?;
            for (key, found) in batch.iter().zip(found) {
                listing.add_lock(found.map(|held| held.into_lock_info(key)))?;
            }
        }
        Ok(listing.into_locks())
    }

    fn ping(&self) -> Result<Duration, BackendError> {
        let began = clock::now();
        let deadline = began.saturating_add(self.operation_timeout);
        self.ask(self.checkout(deadline)?.only(), &Ping, deadline)?;
        Ok(clock::now().duration_since(began))
    }

    fn close(&self) {
        self.pool.close();
    }
}

impl OneServerForEachLock for RedisBackend {
    fn exchange<R: Request>(
        &self,
        _: &LockKey,
        request: &R,
        purpose: Purpose,
        deadline: Moment,
    ) -> Result<Exchange<R::Reply>, NodeError> {
        let (node, pool, replicas) = (&self.node, &self.pool, self.replicas);
        exchange_over_pool::<R>(node, pool, replicas, purpose, deadline, |connection| {
            exchange(node, connection, request, deadline)
        })
    }

    fn yielding(&self) -> Option<&Yielding> {
        self.yielding.as_ref()
    }

    fn ask_about<R: Request>(
        &self,
        _: &LockKey,
        request: &R,
        deadline: Moment,
    ) -> Result<R::Reply, BackendError> {
        self.ask(self.checkout(deadline)?.only(), request, deadline)
    }
}
