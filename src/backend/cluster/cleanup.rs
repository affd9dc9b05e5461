//! `ClusterCleaner`: cleans up residues on the nodes of their slots, in a batch for each node.

use std::{collections::BTreeMap, sync::Arc};

use super::{redirect_reply::Redirect, router::Router};
use crate::{
    backend::{CleanupLimits, ResidueCleaner, error::BackendError, redis::RedisCleaner},
    core::claim::{Claim, Residue},
};

pub(super) struct ClusterCleaner {
    router: Arc<Router>,
    /// By the number of the node.
    cleaners: BTreeMap<u64, RedisCleaner>,
}

impl ClusterCleaner {
    pub(super) fn new(router: Arc<Router>) -> ClusterCleaner {
        ClusterCleaner { router, cleaners: BTreeMap::new() }
    }
}

impl ResidueCleaner for ClusterCleaner {
    /// A residue whose slot is being moved is left for the next try.
    fn clean_up(
        &mut self,
        residues: &mut [(&Claim, &mut Residue)],
        limits: CleanupLimits<'_>,
    ) -> Option<BackendError> {
        let router = self.router.clone();
        let mut first_failure = None;
        let mut numbers = BTreeMap::new();
        for (claim, _) in &*residues {
            let Some(slot) = claim.key.slot() else { continue };
            let Some(deadline) = limits.deadline(router.operation_timeout) else { break };
            match router.owner(slot, deadline) {
                Ok(part) => drop(numbers.insert(slot, part)),
                Err(failure) => drop(first_failure.get_or_insert(BackendError::Node(failure))),
            }
        }
        let part_of = |claim: &Claim| claim.key.slot().and_then(|slot| numbers.get(&slot)).cloned();
        let number_of = |claim: &Claim| part_of(claim).map(|part| part.number);
        residues.sort_by_key(|(claim, _)| number_of(claim));
        for group in residues.chunk_by_mut(|(a, _), (b, _)| number_of(a) == number_of(b)) {
            let Some(part) = group.first().and_then(|(claim, _)| part_of(claim)) else { continue };
            let is_sharded = router.is_sharded();
            let cleaner = self
                .cleaners
                .entry(part.number)
                .or_insert_with(|| RedisCleaner::new(part.node.clone(), router.operation_timeout));
            cleaner.set_sharded(is_sharded);
            if let Some(failure) = cleaner.clean_up(group, limits) {
                if let BackendError::Node(failure) = &failure
                    && let Redirect::Moved { .. } = router.note(failure, &part)
                {
                    // The other slots of the node may have been moved too, and only the first
                    // failure is known.
                    router.on_stale_map();
                }
                first_failure.get_or_insert(failure);
            }
        }
        self.cleaners.retain(|number, _| router.has_part(*number));
        first_failure
    }

    fn close(&mut self) {
        self.cleaners.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        core::{id::generate_lock_id, key::LockKey, kind::LockKind, quorum::NodeSet},
        sys::clock,
    };
    use std::time::Duration;

    #[test]
    fn clean_up_that_must_end_looks_up_no_node() {
        let key = LockKey::new("lock:", "x").unwrap().in_cluster().unwrap();
        let (id, ttl) = (generate_lock_id(), Duration::from_secs(1));
        let claim = Claim { key, id, ttl, kind: LockKind::Mutex, token: 0 };
        let mut residue = Residue::new(NodeSet::single(0), "", clock::now());
        let mut cleaner = ClusterCleaner::new(Router::unreachable().0);
        let mut clean_up = |limits| cleaner.clean_up(&mut [(&claim, &mut residue)], limits);
        assert!(clean_up(CleanupLimits::Unless(&|| false)).is_some());
        assert!(clean_up(CleanupLimits::Unless(&|| true)).is_none());
    }
}
