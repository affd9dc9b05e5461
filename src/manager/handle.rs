//! `ManagerHandle`: what the clones of a manager and its guards share.

use std::{sync::Arc, time::Duration};

use super::{Manager, release::without_retries};
use crate::{
    error::{LockError, Result},
    observe::metrics::Metrics,
    sys::{
        clock::{self, Moment},
        fork,
    },
};

/// Shuts the manager down when the last clone or guard is dropped.
pub(crate) struct ManagerHandle {
    /// Empty only while the handle is being dropped.
    manager: Option<Manager>,
}

impl ManagerHandle {
    pub(crate) fn new(manager: Manager) -> ManagerHandle {
        ManagerHandle { manager: Some(manager) }
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

    /// Returns the parts, for a new operation. Fails in a forked child, and after a shutdown, once
    /// that has ended.
    pub(crate) fn manager(&self) -> Result<&Manager> {
        if fork::is_forked_child() {
            return Err(LockError::Forked);
        }
        match &self.manager {
            Some(manager) if !manager.is_closed() => Ok(manager),
            Some(manager) => {
                manager.await_shutdown();
                Err(LockError::Shutdown)
            }
            None => Err(LockError::Shutdown),
        }
    }

    /// Returns the parts, for an operation that began before a shutdown. `None` in a forked child.
    pub(crate) fn manager_unless_forked(&self) -> Option<&Manager> {
        self.manager.as_ref().filter(|_| !fork::is_forked_child())
    }

    /// Releases what a guard holds, within one operation timeout. The last guard of a manager also
    /// shuts it down, and reserves half of the time for that. Returns `None` in a forked child.
    pub(crate) fn release<T>(
        self: Arc<Self>,
        release: impl FnOnce(&Manager, Duration) -> Result<T>,
    ) -> Option<Result<T>> {
        let started = clock::now();
        let manager = self.manager_unless_forked()?;
        let timeout = manager.operation_timeout();
        let release_timeout = if Arc::strong_count(&self) == 1 { timeout / 2 } else { timeout };
        let released = release(manager, release_timeout);
        manager.await_shutdown();
        Some(self.maybe_shut_down(started, released))
    }

    /// Drops a guard's reference, after an operation that began at `started`. The last guard of a
    /// manager shuts it down, within one operation timeout after that.
    pub(crate) fn maybe_shut_down<T>(
        self: Arc<Self>,
        started: Moment,
        result: Result<T>,
    ) -> Result<T> {
        // If several guards are dropped at once, only now is it certain which one is the last.
        let Some(mut handle) = Arc::into_inner(self) else { return result };
        let timeout = handle.manager.as_ref().map_or(Duration::ZERO, Manager::operation_timeout);
        let left = started.saturating_add(timeout).duration_since(clock::now());
        handle.close(Some(left));
        result.map_err(without_retries)
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
