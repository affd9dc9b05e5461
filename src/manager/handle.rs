//! `ManagerHandle`: what the clones of a manager and its guards share.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use super::Manager;
use crate::{
    error::{LockError, Result},
    observe::metrics::Metrics,
    sys::fork,
};

/// Shuts the manager down when the last clone or guard is dropped.
pub(crate) struct ManagerHandle {
    /// Empty only while the handle is being dropped.
    manager: Option<Manager>,
    number: u64,
}

impl ManagerHandle {
    pub(crate) fn new(manager: Manager) -> ManagerHandle {
        static STARTED: AtomicU64 = AtomicU64::new(0);
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        ManagerHandle { manager: Some(manager), number }
    }

    /// Unique among the managers of a process.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Returns the metrics. They are empty in a forked child: their mutex may have been locked by
    /// another thread of the parent, which does not exist in the child.
    pub(crate) fn metrics(&self) -> Metrics {
        match &self.manager {
            Some(manager) if !fork::is_forked_child() => manager.metrics(),
            _ => Metrics::default(),
        }
    }

    pub(crate) fn server(&self) -> &str {
        self.manager.as_ref().map_or("", |manager| manager.label())
    }

    /// Returns the parts, for a new operation. Fails after a shutdown and in a forked child.
    pub(crate) fn manager(&self) -> Result<&Manager> {
        if fork::is_forked_child() {
            return Err(LockError::Forked);
        }
        match &self.manager {
            Some(manager) if !manager.is_closed() => Ok(manager),
            _ => Err(LockError::Shutdown),
        }
    }

    /// Returns the parts, for an operation that began before a shutdown. `None` in a forked child.
    pub(crate) fn manager_unless_forked(&self) -> Option<&Manager> {
        self.manager.as_ref().filter(|_| !fork::is_forked_child())
    }

    /// Shuts down within `timeout`. For the owner of the last reference.
    pub(crate) fn shut_down_within(mut self, timeout: Duration) {
        self.close(Some(timeout));
    }

    fn close(&mut self, timeout: Option<Duration>) {
        let Some(manager) = self.manager.take() else { return };
        if fork::is_forked_child() {
            std::mem::forget(manager);
        } else {
            manager.shutdown(timeout.unwrap_or_else(|| manager.operation_timeout()));
        }
    }

    pub(crate) fn shutdown(&self) {
        if let Some(manager) = self.manager_unless_forked() {
            manager.shutdown(manager.operation_timeout());
        }
    }
}

impl Drop for ManagerHandle {
    fn drop(&mut self) {
        self.close(None);
    }
}
