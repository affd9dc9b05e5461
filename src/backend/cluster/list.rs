//! Lists the locks of all nodes: their keys first, then what the node of each says about it.

use std::sync::Arc;

use super::{ClusterBackend, cluster_node::Part};
use crate::{
    backend::{
        Backend as _, Inspection,
        error::{BackendError, NodeError},
        redis::{
            ExchangeLimits, OneServerForEachLock, exchange_all,
            listing::{DESCRIBE_BATCH_MAX, LIST_TIMEOUTS_MAX, Listing, ScanProgress},
            requests::list::{DescribeLocks, Scan, key_pattern},
        },
    },
    core::key::LockKey,
    lock_info::LockInfo,
    sys::clock::{self, Moment},
};

impl ClusterBackend {
    pub(super) fn list_all(
        &self,
        prefix: &str,
        pattern: &str,
    ) -> Result<Vec<LockInfo>, BackendError> {
        let timeout = self.router().operation_timeout;
        let end = clock::now().saturating_add(timeout.saturating_mul(LIST_TIMEOUTS_MAX));
        let step_deadline = || self.operation_deadline().min(end);
        let pattern = key_pattern(prefix, pattern);
        let mut listing = Listing::new(prefix);
        for part in self.router().masters(step_deadline())? {
            self.scan(&part, &pattern, &mut listing, &step_deadline)?;
        }
        // A key that is being moved is found on two nodes, but is in the list once.
        let keys = listing.take_keys().into_iter().filter_map(|key| key.in_cluster().ok());
        let mut by_slot: Vec<_> = keys.collect();
        by_slot.sort_by_key(LockKey::slot);
        let mut found = Vec::new();
        for batch in by_slot.chunks(DESCRIBE_BATCH_MAX) {
            found.extend(self.describe(batch, step_deadline())?);
        }
        for lock in found {
            listing.add_lock(lock)?;
        }
        let mut locks = listing.into_locks();
        locks.sort_by(|a, b| a.name().cmp(b.name()));
        Ok(locks)
    }

    fn scan(
        &self,
        part: &Arc<Part>,
        pattern: &str,
        listing: &mut Listing<'_>,
        step_deadline: &dyn Fn() -> Moment,
    ) -> Result<(), BackendError> {
        let mut progress = ScanProgress::start();
        let mut connections = part.pool.get_to_ask(step_deadline())?;
        let connection = connections.only();
        loop {
            let scan = Scan { cursor: &progress.cursor, pattern };
            let mut ask =
                || self.router().ask_over(part, connection, &scan, false, step_deadline());
            let asked = match ask() {
                Err(failure) if failure.is_reply_lost() => ask(),
                asked => asked,
            };
            let found = asked?.reply;
            listing.add_keys(found.keys)?;
            if progress.advance(connection.opened_at(), found.next_cursor) {
                return Ok(());
            }
        }
    }

    /// Describes locks. Those of one node share a round trip, unless their slots are being moved.
    fn describe(
        &self,
        keys: &[LockKey],
        deadline: Moment,
    ) -> Result<Vec<Inspection<LockInfo>>, BackendError> {
        let mut found = Vec::with_capacity(keys.len());
        let owner = |key: &LockKey| {
            key.slot().and_then(|slot| self.router().known_owner(slot).ok()).map(|part| part.number)
        };
        for same in keys.chunk_by(|a, b| owner(a) == owner(b)) {
            let part = same[0].slot().and_then(|slot| self.router().known_owner(slot).ok());
            let requests: Vec<_> =
                same.iter().map(|key| DescribeLocks::in_list(std::slice::from_ref(key))).collect();
            let mut results = Vec::new();
            if let Some(part) = part {
                let mut connections = part.pool.get_to_ask(deadline)?;
                let mut check = |_: Moment| Some(deadline);
                let mut limits =
                    ExchangeLimits { deadline, connect_by: deadline, check: &mut check };
                results = exchange_all(&part.node, connections.only(), &requests, &mut limits);
            }
            results.resize_with(requests.len(), || {
                Err(NodeError::not_applied(std::io::ErrorKind::NotConnected))
            });
            for ((key, request), result) in same.iter().zip(&requests).zip(results) {
                let described = match result {
                    Ok(exchange) => exchange.reply,
                    Err(_) => self.ask_about(key, request, deadline)?,
                };
                let described = described.into_iter().next();
                let described = described.unwrap_or(Inspection::Free);
                found.push(described.map(|held| held.into_lock_info(key)));
            }
        }
        Ok(found)
    }
}
