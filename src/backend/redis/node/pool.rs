//! The r2d2 pool. Its items are sets of connections, one to each node, that are not open yet: each
//! connection opens when it is first used. The caller's deadline therefore covers connecting,
//! errors keep their kind, and no worker of the pool ever blocks on a dead server.

use std::{
    convert::Infallible,
    ops::{Deref, DerefMut},
    panic,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use r2d2::{ManageConnection, NopErrorHandler, Pool};
use scheduled_thread_pool::{OnPoolDropBehavior, ScheduledThreadPool};

use super::redis_node::{NodeConnections, RedisNode};
#[cfg(feature = "testing")]
use crate::sys::sim;
use crate::{
    backend::{
        checkout_queue::{CheckoutQueue, NoPlace, Place, Urgency},
        error::{NodeError, NodeErrorKind},
        redis::ReleaseTurns,
    },
    sys::{
        clock::{self, Moment},
        threads,
    },
};

/// Maximum wait for the pool's thread to create a connection. r2d2 adds it to an `Instant`, which
/// panics if it is too large.
const CREATION_MAX: Duration = Duration::from_secs(60 * 60);

/// Maximum time that a release waits for a pooled connection before it uses a reserved one.
const RELEASE_TIMEOUT: Duration = Duration::from_millis(5);

#[derive(Debug)]
pub(crate) struct ConnectionFactory {
    nodes: Arc<[Arc<RedisNode>]>,
    closed: Arc<AtomicBool>,
}

impl ManageConnection for ConnectionFactory {
    type Connection = NodeConnections;
    type Error = Infallible;

    fn connect(&self) -> Result<NodeConnections, Infallible> {
        Ok(NodeConnections(self.nodes.iter().map(|node| node.pooled_connection()).collect()))
    }

    fn is_valid(&self, _: &mut NodeConnections) -> Result<(), Infallible> {
        Ok(())
    }

    /// Returns true once the pool is closed, so that a returned connection is closed at once, and
    /// not by the last thread to leave the pool.
    fn has_broken(&self, _: &mut NodeConnections) -> bool {
        self.closed.load(Ordering::Relaxed)
    }
}

#[derive(Debug)]
pub(crate) struct ConnectionPool {
    /// `None` once closed.
    pool: Mutex<Option<Pool<ConnectionFactory>>>,
    nodes: Arc<[Arc<RedisNode>]>,
    queue: Arc<CheckoutQueue>,
    closed: Arc<AtomicBool>,
    size: u32,
    release_turns: ReleaseTurns,
}

/// Connections that are in use until this is dropped.
#[derive(Debug)]
pub(crate) struct PooledConnections {
    // Dropped first, so that it is idle when the next thread gets the place.
    connections: r2d2::PooledConnection<ConnectionFactory>,
    _place: Place,
}

impl Deref for PooledConnections {
    type Target = NodeConnections;

    fn deref(&self) -> &NodeConnections {
        &self.connections
    }
}

impl DerefMut for PooledConnections {
    fn deref_mut(&mut self) -> &mut NodeConnections {
        &mut self.connections
    }
}

impl ConnectionPool {
    /// Does not connect. Returns `None` if the pool panics because it cannot spawn a thread.
    pub(crate) fn new(nodes: Arc<[Arc<RedisNode>]>, size: u32) -> Option<ConnectionPool> {
        let closed = Arc::new(AtomicBool::new(false));
        let release_turns = ReleaseTurns::new(nodes.clone());
        let build = move || {
            let factory = ConnectionFactory { nodes: nodes.clone(), closed: closed.clone() };
            let workers = ScheduledThreadPool::builder()
                .num_threads(1)
                .thread_name_pattern("distlock-pool")
                .on_drop_behavior(OnPoolDropBehavior::DiscardPendingScheduled)
                .build();
            let pool = Pool::builder()
                .max_size(size)
                .min_idle(Some(0))
                // A connection outlasts a change of passwords or certificates.
                .max_lifetime(None)
                .test_on_check_out(false)
                .error_handler(Box::new(NopErrorHandler))
                .thread_pool(Arc::new(workers))
                .build_unchecked(factory);
            let queue = Arc::new(CheckoutQueue::new(size));
            let pool = Mutex::new(Some(pool));
            ConnectionPool { pool, nodes, queue, closed, size, release_turns }
        };
        threads::with_signals_blocked(|| panic::catch_unwind(panic::AssertUnwindSafe(build)).ok())
    }

    pub(crate) fn get(
        &self,
        urgency: Urgency,
        deadline: Moment,
    ) -> Result<PooledConnections, NodeError> {
        let failed = |kind| NodeError::not_applied(kind);
        let place = self.queue.enter(urgency, deadline).map_err(|reason| {
            failed(match reason {
                NoPlace::Closed => NodeErrorKind::Closed,
                NoPlace::TimedOut => NodeErrorKind::PoolExhausted { pool_size: self.size },
            })
        })?;
        let pool = self.pool.lock().clone().ok_or_else(|| failed(NodeErrorKind::Closed))?;
        // Each place has a connection. The pool's thread may still have to create it, which takes
        // no time in the simulator.
        let left = match pool.try_get() {
            Some(connections) => return Ok(PooledConnections { connections, _place: place }),
            #[cfg(feature = "testing")]
            None if sim::world().is_some() => CREATION_MAX,
            None => deadline.duration_since(clock::now()).min(CREATION_MAX),
        };
        let connections = pool.get_timeout(left).ok().or_else(|| pool.try_get());
        let connections = connections.ok_or_else(|| failed(NodeErrorKind::TimedOut))?;
        Ok(PooledConnections { connections, _place: place })
    }

    /// Like [`get`](Self::get), for a request that is to end by `deadline`. Waits for half of the
    /// time at most, so that the other half is left for the reply. With too little time, the caller
    /// would close a healthy connection, and the next one would have to open another: once threads
    /// outnumber what the server can serve in one timeout, nobody would be served.
    pub(crate) fn get_to_ask(&self, deadline: Moment) -> Result<PooledConnections, NodeError> {
        self.get(Urgency::Other, deadline.halfway())
    }

    /// Like [`get`](Self::get), for commands of the user. Closes what leads to a server that is no
    /// master any more.
    pub(crate) fn lend(&self, deadline: Moment) -> Result<PooledConnections, NodeError> {
        let mut lent = self.get(Urgency::Other, deadline)?;
        self.nodes
            .iter()
            .zip(&mut lent.0)
            .for_each(|(node, connection)| node.drop_if_replaced(connection));
        Ok(lent)
    }

    /// Runs `release` with pooled connections, or with the reserved ones if the pool is exhausted
    /// or a shutdown has closed it. Returns `None` if there was no time for it before `until`.
    pub(crate) fn with_connections<T>(
        &self,
        until: Moment,
        release: impl FnOnce(&mut NodeConnections) -> T,
    ) -> Option<T> {
        match self.get(Urgency::Release, clock::now().saturating_add(RELEASE_TIMEOUT).min(until)) {
            Ok(mut connections) => Some(release(&mut connections)),
            Err(_) => self.with_reserved(until, release),
        }
    }

    /// Runs `release` with the reserved connections. Returns `None` if there was no time for it
    /// before `until`.
    pub(crate) fn with_reserved<T>(
        &self,
        until: Moment,
        release: impl FnOnce(&mut NodeConnections) -> T,
    ) -> Option<T> {
        self.release_turns.run(until, release)
    }

    /// Stops the pool's thread and closes what is idle. Connections in use are closed when they are
    /// returned. Releases still go over the reserved ones.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        self.queue.close();
        let pool = self.pool.lock().take();
        while let Some(connections) = pool.as_ref().and_then(Pool::try_get) {
            drop(connections);
        }
        self.release_turns.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closed_pool_fails_waiting_and_later_callers() {
        let pool = ConnectionPool::new(Arc::new([]), 1).unwrap();
        let late = clock::now().saturating_add(Duration::from_millis(200));
        let taken = pool.get(Urgency::Other, late.saturating_add(Duration::from_secs(60))).unwrap();
        std::thread::scope(|threads| {
            let waiting =
                threads.spawn(|| pool.get(Urgency::Other, late).map(drop).unwrap_err().kind);
            pool.close();
            assert!(matches!(waiting.join().unwrap(), NodeErrorKind::Closed));
        });
        assert!(matches!(pool.get(Urgency::Other, late).unwrap_err().kind, NodeErrorKind::Closed));
        drop(taken);
    }

    /// Fault: N125
    #[test]
    fn pool_without_time_left_reports_exhausted_only_if_full() {
        let pool = ConnectionPool::new(Arc::new([]), 1).unwrap();
        let now = clock::now();
        let late = pool.get(Urgency::Other, now).err();
        assert!(late.is_none_or(|failure| matches!(failure.kind, NodeErrorKind::TimedOut)));
        let taken = pool.get(Urgency::Other, now.saturating_add(Duration::from_secs(60))).unwrap();
        assert!(matches!(
            pool.get(Urgency::Other, now).unwrap_err().kind,
            NodeErrorKind::PoolExhausted { .. }
        ));
        drop(taken);
        assert!(pool.get(Urgency::Other, clock::now()).is_ok());
    }
}
