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
        // Read once for each node, because it may change meanwhile.
        let mut failed_at = BTreeMap::new();
        let mut owners = BTreeMap::new();
        for (claim, _) in &*residues {
            let Some(slot) = claim.key.slot() else { continue };
            let Some(deadline) = limits.deadline(router.operation_timeout) else { break };
            match router.owner(slot, deadline) {
                Ok(part) => {
                    let at = *failed_at.entry(part.number).or_insert_with(|| part.failed_at());
                    owners.insert(slot, (at, part));
                }
                Err(failure) => drop(first_failure.get_or_insert(BackendError::Node(failure))),
            }
        }
        let owner_of = |claim: &Claim| claim.key.slot().and_then(|slot| owners.get(&slot));
        // A node that does not reply must not delay the others, so the last one to fail is last.
        let place_of = |claim: &Claim| owner_of(claim).map(|(at, part)| (*at, part.number));
        residues.sort_by_key(|(claim, _)| place_of(claim));
        for group in residues.chunk_by_mut(|(a, _), (b, _)| place_of(a) == place_of(b)) {
            let owner = group.first().and_then(|(claim, _)| owner_of(claim));
            let Some((_, part)) = owner else { continue };
            let cleaner = self
                .cleaners
                .entry(part.number)
                .or_insert_with(|| RedisCleaner::new(part.node.clone(), router.operation_timeout));
            cleaner.set_sharded(router.is_sharded());
            if let Some(failure) = cleaner.clean_up(group, limits) {
                if let BackendError::Node(failure) = &failure
                    && let Redirect::Moved { .. } = router.note(failure, part)
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
    use std::time::Duration;

    use super::*;
    use crate::{
        backend::discovery::ServerName,
        core::{id::generate_lock_id, key::LockKey, kind::LockKind, quorum::NodeSet},
        sys::clock,
    };

    fn claim_of(name: &str) -> Claim {
        let key = LockKey::new("lock:", name).unwrap().in_cluster().unwrap();
        let (id, ttl) = (generate_lock_id(), Duration::from_secs(1));
        Claim { key, id, ttl, kind: LockKind::Mutex, token: 0 }
    }

    #[test]
    fn clean_up_that_must_end_looks_up_no_node() {
        let claim = claim_of("x");
        let mut residue = Residue::new(NodeSet::single(0), "", clock::now());
        let mut cleaner = ClusterCleaner::new(Router::unreachable().0);
        let mut clean_up = |limits| cleaner.clean_up(&mut [(&claim, &mut residue)], limits);
        assert!(clean_up(CleanupLimits::Unless(&|| false)).is_some());
        assert!(clean_up(CleanupLimits::Unless(&|| true)).is_none());
    }

    /// Fault: N257
    #[test]
    fn node_that_failed_last_is_cleaned_up_last() {
        let (router, first) = Router::unreachable();
        let second = ServerName { port: 2, ..first.clone() };
        let claims = [claim_of("a"), claim_of("b")];
        for (claim, name) in claims.iter().zip([&first, &second]) {
            router.serve(claim.key.slot().unwrap(), name);
        }
        let (first, second) = (router.part(&first).unwrap(), router.part(&second).unwrap());
        let mut cleaner = ClusterCleaner::new(router);
        for (early, late) in [(&second, &first), (&first, &second)] {
            late.note_failure();
            let mut residues = [(); 2].map(|()| Residue::new(NodeSet::single(0), "", clock::now()));
            let mut residues: Vec<_> = claims.iter().zip(&mut residues).collect();
            let limits = CleanupLimits::Unless(&|| false);
            assert!(cleaner.clean_up(&mut residues, limits).is_some());
            assert!(early.failed_at() < late.failed_at(), "{} was last", early.number);
        }
    }
}
