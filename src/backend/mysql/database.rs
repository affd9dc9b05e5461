//! `Database`: the server, and what one manager has there: sessions for locks, and a few for
//! everything else.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use super::{
    connection::Connection, held::HeldLocks, inspect, loss_watch::LossWatch, outcome::check,
    pool::SessionPool, session::SessionSettings, sql::Table,
};
use crate::{
    backend::{error::NodeError, health::NodeHealth},
    core::{cancel::CancelToken, holder::Holder, key::LockKey},
    observe::Observer,
    sys::clock::{self, Moment},
};

/// Connections for everything but locks, which may be all that are left when locks use the others.
const CONTROL_CONNECTIONS: u32 = 2;

#[derive(Debug)]
pub(super) struct Database {
    pub(super) label: Arc<str>,
    pub(super) operation_timeout: Duration,
    pub(super) table: Table,
    pub(super) prefix: String,
    /// Sessions that hold locks or wait for them.
    pub(super) locks: SessionPool,
    pub(super) control: SessionPool,
    pub(super) held: Arc<HeldLocks>,
    /// Ends the waits in the server's queues at a shutdown.
    pub(super) shutdown: CancelToken,
    pub(super) watch: OnceLock<LossWatch>,
}

impl Database {
    pub(super) fn new(
        settings: SessionSettings,
        prefix: String,
        max_connections: u32,
        operation_timeout: Duration,
        observer: &Arc<Observer>,
    ) -> Database {
        let (label, table) = (settings.endpoint.label.clone(), settings.table.clone());
        let settings = Arc::new(settings);
        let health = Arc::new(NodeHealth::default());
        let pool = |size| {
            let (observer, health) = (observer.clone(), health.clone());
            SessionPool::new(settings.clone(), observer, health, operation_timeout, size)
        };
        Database {
            label,
            operation_timeout,
            table,
            prefix,
            locks: pool(max_connections),
            control: pool(CONTROL_CONNECTIONS),
            held: Arc::default(),
            shutdown: CancelToken::new(),
            watch: OnceLock::new(),
        }
    }

    pub(super) fn execute(&self, statement: &str) -> Result<(), NodeError> {
        self.with_control(self.deadline(), |connection, deadline| {
            check(&connection.query(statement, deadline)?)
        })
    }

    /// Deadline of an exchange that begins now.
    pub(super) fn deadline(&self) -> Moment {
        clock::now().saturating_add(self.operation_timeout)
    }

    /// After an error that says that the server is read-only, closes the idle sessions, so that the
    /// next calls connect to the server that the host name leads to then.
    pub(super) fn close_idle_if_read_only(&self, error: &NodeError) {
        if error.is_not_master() {
            self.locks.close_idle();
            self.control.close_idle();
        }
    }

    /// Runs `action` on a connection that holds no lock. Closes it after a failure.
    pub(super) fn with_control<T>(
        &self,
        deadline: Moment,
        action: impl FnOnce(&mut Connection, Moment) -> Result<T, NodeError>,
    ) -> Result<T, NodeError> {
        let mut session = self.control.get(self.control.enter(deadline, None)?, deadline)?;
        let result = action(&mut session.connection, deadline);
        if result.is_ok() {
            self.control.put(session);
        }
        result
    }

    pub(super) fn holder(
        &self,
        key: &LockKey,
        deadline: Moment,
    ) -> Result<Option<Holder>, NodeError> {
        self.with_control(deadline, |connection, deadline| {
            inspect::holder(&self.table, connection, "", key.lock_key(), deadline)
        })
    }
}
