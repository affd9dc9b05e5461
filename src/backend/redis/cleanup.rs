//! `RedisCleaner`: cleans up residues in pipelined batches. One by one, each would take a round
//! trip; over a slow connection, residues could be added faster than they are cleaned up.

use std::{sync::Arc, time::Duration};

use super::{
    Connection, ExchangeLimits, NodeError, RedisNode, exchange_all,
    requests::{InCluster, Release},
};
use crate::{
    backend::{CleanupLimits, ResidueCleaner, error::BackendError},
    core::{
        claim::{Claim, Residue},
        quorum::NodeSet,
    },
    sys::clock::{self, Moment},
};

/// Maximum number of requests sent before their replies are read.
pub(crate) const PIPELINE_MAX: usize = 32;
/// Interval at which an exchange checks whether it must end.
pub(crate) const CHECK_INTERVAL: Duration = Duration::from_millis(20);

pub(crate) struct RedisCleaner {
    node: Arc<RedisNode>,
    operation_timeout: Duration,
    /// Opens when it is first used.
    connection: Connection,
    /// Whether the server is a node of a cluster with sharded channels.
    is_sharded: bool,
}

impl ResidueCleaner for RedisCleaner {
    /// Skips the remaining residues once the server does not reply or cannot be reached.
    fn clean_up(
        &mut self,
        residues: &mut [(&Claim, &mut Residue)],
        limits: CleanupLimits<'_>,
    ) -> Option<BackendError> {
        let mut first_failure = None;
        for batch in residues.chunks_mut(PIPELINE_MAX) {
            let Some(deadline) = limits.deadline(self.operation_timeout) else { break };
            let Err(failure) = self.release_batch(batch, limits, deadline) else { continue };
            let was_not_sent = !failure.outcome_unknown && !self.connection.is_connected();
            let is_unreachable = failure.is_timeout() || was_not_sent;
            first_failure.get_or_insert(BackendError::Node(failure));
            if is_unreachable {
                break;
            }
        }
        first_failure
    }

    fn close(&mut self) {
        self.connection = self.node.reserved_connection();
    }
}

impl RedisCleaner {
    pub(crate) fn new(node: Arc<RedisNode>, operation_timeout: Duration) -> RedisCleaner {
        let connection = node.reserved_connection();
        RedisCleaner { connection, node, operation_timeout, is_sharded: false }
    }

    pub(crate) fn set_sharded(&mut self, is_sharded: bool) {
        self.is_sharded = is_sharded;
    }

    /// Tries each residue of a batch once, and removes those that the server confirms. Returns the
    /// first failure.
    fn release_batch(
        &mut self,
        batch: &mut [(&Claim, &mut Residue)],
        limits: CleanupLimits<'_>,
        deadline: Moment,
    ) -> Result<(), NodeError> {
        let now = clock::now();
        let mut check = |now: Moment| match limits {
            CleanupLimits::Unless(must_end) if must_end() => None,
            _ => Some(now.saturating_add(CHECK_INTERVAL)),
        };
        let mut limits = ExchangeLimits { deadline, connect_by: deadline, check: &mut check };
        let releases: Vec<_> =
            batch.iter().map(|(claim, residue)| Release::of_residue(claim, residue, now)).collect();
        let is_sharded = self.is_sharded;
        let in_cluster = |request| InCluster { request, is_sharded, is_asking: false };
        let requests: Vec<_> = releases.iter().map(in_cluster).collect();
        let results = exchange_all(&self.node, &mut self.connection, &requests, &mut limits);
        let mut first_failure = Ok(());
        for ((_, residue), result) in batch.iter_mut().zip(results) {
            let result = result.map(|_| residue.nodes = NodeSet::EMPTY);
            first_failure = first_failure.and(result);
        }
        first_failure
    }
}
