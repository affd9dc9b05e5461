//! `Part`: one node of a cluster, with its connections.

use std::sync::Arc;

use crate::{
    backend::{
        discovery::ServerName,
        redis::{ConnectionPool, RedisNode},
    },
    sys::{
        clock::{self, Moment},
        sync::Mutex,
    },
};

#[derive(Debug)]
pub(super) struct Part {
    pub(super) name: ServerName,
    /// Unique, also among former nodes. Never zero.
    pub(super) number: u64,
    pub(super) node: Arc<RedisNode>,
    pub(super) pool: Arc<ConnectionPool>,
    failed_at: Mutex<Moment>,
}

impl Part {
    pub(super) fn new(
        name: ServerName,
        number: u64,
        node: Arc<RedisNode>,
        pool: ConnectionPool,
    ) -> Part {
        let failed_at = Mutex::new(Moment::from_nanos(0));
        Part { name, number, node, pool: Arc::new(pool), failed_at }
    }

    /// Time of the last failure that lies with the node.
    pub(super) fn failed_at(&self) -> Moment {
        *self.failed_at.lock()
    }

    /// Records that the node does not serve requests now. Requests for its slots ask for the map.
    pub(super) fn note_failure(&self) {
        *self.failed_at.lock() = clock::now();
    }
}
