//! The r2d2 pool. Its items are sets of connections, one to each node, that are not open yet: each
//! connection opens when it is first used. The caller's deadline therefore covers connecting,
//! errors keep their kind, and no worker of the pool ever blocks on a dead server.

use std::{
    convert::Infallible,
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

#[cfg(feature = "testing")]
use crate::sys::sim;
use crate::{
    backend::redis::{Connection, NodeError, NodeErrorKind, RedisNode},
    sys::{
        clock::{self, Moment},
        threads,
    },
};

/// A connection to each of the nodes, in their order. Each opens when it is first used.
#[derive(Debug)]
pub(crate) struct NodeConnections(pub(crate) Box<[Connection]>);

impl NodeConnections {
    /// The connection to the only server.
    pub(crate) fn only(&mut self) -> &mut Connection {
        &mut self.0[0]
    }
}

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
    closed: Arc<AtomicBool>,
    size: u32,
}

pub(crate) type PooledConnections = r2d2::PooledConnection<ConnectionFactory>;

impl ConnectionPool {
    /// Does not connect. Returns `None` if the pool panics because it cannot spawn a thread.
    pub(crate) fn new(nodes: Arc<[Arc<RedisNode>]>, size: u32) -> Option<ConnectionPool> {
        let closed = Arc::new(AtomicBool::new(false));
        let build = move || {
            let factory = ConnectionFactory { nodes, closed: closed.clone() };
            let workers = ScheduledThreadPool::builder()
                .num_threads(1)
                .thread_name_pattern("distlock-pool")
                .on_drop_behavior(OnPoolDropBehavior::DiscardPendingScheduled)
                .build();
            let pool = Pool::builder()
                .max_size(size)
                .min_idle(Some(0))
                .test_on_check_out(false)
                .error_handler(Box::new(NopErrorHandler))
                .thread_pool(Arc::new(workers))
                .build_unchecked(factory);
            ConnectionPool { pool: Mutex::new(Some(pool)), closed, size }
        };
        threads::with_signals_blocked(|| panic::catch_unwind(panic::AssertUnwindSafe(build)).ok())
    }

    pub(crate) fn get(&self, deadline: Moment) -> Result<PooledConnections, NodeError> {
        let pool = self.pool.lock().clone();
        let closed = NodeError { outcome_unknown: false, kind: NodeErrorKind::Closed };
        let Some(pool) = pool else { return Err(closed) };
        if let Some(connection) = pool.try_get() {
            return Ok(connection);
        }
        #[cfg(feature = "testing")]
        if let Some(world) = sim::world() {
            // The pool waits on the real clock, not on the simulated one. Block only if there is
            // room, because the thread of the pool then adds a connection at once.
            return clock::poll(&*world, deadline, || match pool.state().connections {
                made if made < self.size => pool.get_timeout(Duration::from_secs(60 * 60)).ok(),
                _ => pool.try_get(),
            })
            .ok_or(NodeError { outcome_unknown: false, kind: NodeErrorKind::PoolExhausted });
        }
        // r2d2 adds the timeout to an `Instant`, which panics if it is too large.
        let left = deadline.duration_since(clock::now()).min(Duration::from_secs(60 * 60));
        if let Ok(connection) = pool.get_timeout(left) {
            return Ok(connection);
        }
        // If this thread was not scheduled in time, connections may be free by now, so it tries
        // once more. The count is taken before: connections that are created in between are free
        // for the next caller, and must not count as in use.
        let is_full = pool.state().connections >= self.size;
        pool.try_get().ok_or_else(|| {
            if self.closed.load(Ordering::Relaxed) {
                return closed;
            }
            NodeError {
                outcome_unknown: false,
                kind: if is_full { NodeErrorKind::PoolExhausted } else { NodeErrorKind::TimedOut },
            }
        })
    }

    pub(crate) fn size(&self) -> u32 {
        self.size
    }

    /// Stops the pool's thread and closes what is idle. Connections in use are closed when they are
    /// returned.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        let pool = self.pool.lock().take();
        while let Some(connections) = pool.as_ref().and_then(Pool::try_get) {
            drop(connections);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closed_pool_fails_waiting_and_later_callers() {
        let pool = ConnectionPool::new(Arc::new([]), 1).unwrap();
        let late = clock::now().saturating_add(Duration::from_millis(200));
        let taken = pool.get(late.saturating_add(Duration::from_secs(60))).unwrap();
        std::thread::scope(|threads| {
            let waiting = threads.spawn(|| pool.get(late).map(drop).unwrap_err().kind);
            pool.close();
            assert!(matches!(waiting.join().unwrap(), NodeErrorKind::Closed));
        });
        assert!(matches!(pool.get(late).unwrap_err().kind, NodeErrorKind::Closed));
        drop(taken);
    }

    /// Fault: N125
    #[test]
    fn pool_without_time_left_reports_exhausted_only_if_full() {
        let pool = ConnectionPool::new(Arc::new([]), 1).unwrap();
        let now = clock::now();
        let late = pool.get(now).err();
        assert!(late.is_none_or(|failure| matches!(failure.kind, NodeErrorKind::TimedOut)));
        let taken = pool.get(now.saturating_add(Duration::from_secs(60))).unwrap();
        assert!(matches!(pool.get(now).unwrap_err().kind, NodeErrorKind::PoolExhausted));
        drop(taken);
        assert!(pool.get(clock::now()).is_ok());
    }
}
