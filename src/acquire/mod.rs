//! Until a lock is ours: ask, wait for the grant, look again. Ends with a grant, or with the limit
//! that fired.

mod attempt;
mod backoff;
#[cfg(all(test, loom))]
mod checks;
mod crowd;
mod grant_listener;
mod quorum_ask;
mod retry;
mod subscription;
mod wait_handle;
mod wait_registry;

use std::{sync::Arc, time::Duration};

use self::attempt::Attempt;
pub(crate) use self::{crowd::Crowd, grant_listener::GrantListener};
use crate::{
    clock::Moment,
    error::LockError,
    grant::{Claim, Grant},
    redlock::{NodeSet, Redlock},
};

/// An expiry that is put back on another's lock is no shorter: a holder that renews a lease of up
/// to three times that has set its own again by then.
const REPAIRED_TTL_MIN_MS: u64 = 60_000;

/// What it takes to acquire.
#[derive(Debug)]
pub(crate) struct Acquirer {
    pub(crate) redlock: Arc<Redlock>,
    pub(crate) listener: Arc<GrantListener>,
    pub(crate) claim_window: Duration,
    /// Whether a holder without an expiry is given one: never with an empty prefix, where it may
    /// be anybody's data.
    pub(crate) repair_ttl: bool,
    pub(crate) crowd: Crowd,
}

/// An acquisition that ended without the lock.
#[derive(Debug)]
pub(crate) struct NotAcquired {
    pub(crate) error: LockError,
    /// Nodes may know the claim, and have to be told to forget it.
    pub(crate) residue: Option<Residue>,
}

/// What an acquisition may have left at the nodes.
#[derive(Debug)]
pub(crate) struct Residue {
    /// Its entry in the queue, or empty.
    pub(crate) queue_entry: String,
    /// Until when a request of it that is still on its way may be carried out.
    pub(crate) in_flight_until: Moment,
    pub(crate) nodes: NodeSet,
}

impl Acquirer {
    /// Takes the lock, waiting for at most `wait`; returns by then plus one operation timeout. Also
    /// tells whether somebody stood in the way.
    pub(crate) fn run(
        &self,
        claim: &Claim,
        wait: Option<Duration>,
    ) -> Result<(Grant, bool), Box<NotAcquired>> {
        let mut attempt = Attempt::new(self, claim, wait);
        let outcome = attempt.run();
        if attempt.has_several_nodes() {
            self.crowd.remember(claim.key.lock_key(), attempt.has_lost_rounds());
        }
        let outcome = outcome.map(|grant| (grant, attempt.contended));
        outcome.map_err(|error| Box::new(NotAcquired { error, residue: attempt.residue() }))
    }

    /// For how long a claim that is to be confirmed keeps the lock from others.
    pub(crate) fn claim_window_for(&self, claim: &Claim) -> Duration {
        self.claim_window.min(claim.ttl)
    }

    /// The expiry for another holder that has none, whose lease nobody here knows; or 0.
    fn repair_ttl_ms(&self, claim: &Claim) -> u64 {
        if self.repair_ttl { claim.ttl_ms().max(REPAIRED_TTL_MIN_MS) } else { 0 }
    }

    /// The entry of a claim in the queue: for how long to claim, where to tell, and whom.
    pub(crate) fn queue_entry(&self, claim: &Claim) -> String {
        format!(
            "{} {} {}",
            self.claim_window_for(claim).as_millis(),
            self.listener.channel(),
            claim.id
        )
    }
}
