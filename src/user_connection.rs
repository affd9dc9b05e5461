//! `PooledConnection`: a pooled connection that users borrow for their own commands.

use std::io;

use redis::{ConnectionLike, RedisResult, Value};

use crate::{
    backend::redis::{Connection, PooledConnections},
    error::LockError,
    sys::fork,
};

/// A connection borrowed from a manager's pool. See
/// [`RedisMgr::connection`](crate::RedisMgr::connection).
#[derive(Debug)]
pub struct PooledConnection {
    /// `None` only while this is being dropped.
    connections: Option<PooledConnections>,
}

impl PooledConnection {
    pub(crate) fn new(pooled: PooledConnections) -> PooledConnection {
        PooledConnection { connections: Some(pooled) }
    }

    fn get(&mut self) -> RedisResult<&mut Connection> {
        if fork::is_forked_child() {
            return Err(io::Error::other(LockError::Forked).into());
        }
        let connections = self.connections.as_mut().map(|pooled| pooled.0.iter_mut());
        connections
            .and_then(|mut connections| connections.next())
            .ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected).into())
    }
}

impl Drop for PooledConnection {
    fn drop(&mut self) {
        let Some(mut pooled) = self.connections.take() else { return };
        if fork::is_forked_child() {
            // In a forked child, the pool's mutex may stay locked forever, and the parent uses the
            // socket.
            std::mem::forget(pooled);
        } else {
            pooled.0.iter_mut().for_each(Connection::close_if_used_by_caller);
        }
    }
}

impl ConnectionLike for PooledConnection {
    fn req_packed_command(&mut self, command: &[u8]) -> RedisResult<Value> {
        self.get()?.req_packed_command(command)
    }

    fn req_packed_commands(
        &mut self,
        commands: &[u8],
        offset: usize,
        count: usize,
    ) -> RedisResult<Vec<Value>> {
        self.get()?.req_packed_commands(commands, offset, count)
    }

    fn get_db(&self) -> i64 {
        self.connections
            .as_ref()
            .and_then(|pooled| pooled.0.first())
            .map_or(0, ConnectionLike::get_db)
    }

    fn check_connection(&mut self) -> bool {
        self.get().is_ok_and(|pooled| pooled.check_connection())
    }

    fn is_open(&self) -> bool {
        // A closed connection reconnects at its next use.
        true
    }
}
