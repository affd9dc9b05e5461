//! Acquiring a lock: ask, wait for the grant, ask again. Ends with a grant, or with the error that
//! explains why there is none.

mod attempt;
mod backoff;
mod crowd;
mod quorum_ask;
mod retry;

use std::{sync::Arc, time::Duration};

use self::attempt::Attempt;
pub(crate) use self::crowd::Crowd;
use crate::{
    backend::redlock::Redlock,
    core::{
        claim::{Claim, Grant},
        quorum::NodeSet,
    },
    error::LockError,
    sys::clock::Moment,
    wait::GrantListener,
};

/// Minimum TTL that is set on another holder's key without one, in milliseconds. Leases are renewed
/// after a third, so a holder with a lease of up to three minutes has set its own TTL again by
/// then.
const REPAIRED_TTL_MIN_MS: u64 = 60_000;

/// What all acquisitions of a manager share.
#[derive(Debug)]
pub(crate) struct Acquirer {
    pub(crate) redlock: Arc<Redlock>,
    pub(crate) listener: Arc<GrantListener>,
    pub(crate) claim_window: Duration,
    /// A lock key without a TTL is given one. False with an empty prefix, where the key may be
    /// anybody's data.
    pub(crate) repair_ttl: bool,
    pub(crate) crowd: Crowd,
}

/// An acquisition that ended without the lock.
#[derive(Debug)]
pub(crate) struct NotAcquired {
    pub(crate) error: LockError,
    /// What nodes may still know of the claim, and must be made to forget.
    pub(crate) residue: Option<Residue>,
}

/// What a failed acquisition may have left on the nodes.
#[derive(Debug)]
pub(crate) struct Residue {
    /// Queue entry of the claim, or empty.
    pub(crate) queue_entry: String,
    /// Latest time at which a request that is still in flight can take effect.
    pub(crate) in_flight_until: Moment,
    pub(crate) nodes: NodeSet,
}

impl Acquirer {
    /// Acquires the lock, waiting at most `wait`. Returns within `wait` plus one operation timeout.
    /// The flag says whether another holder was in the way.
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

    /// How long a claim keeps the lock from others until it is confirmed.
    pub(crate) fn claim_window_for(&self, claim: &Claim) -> Duration {
        self.claim_window.min(claim.ttl)
    }

    /// TTL for another holder's key that has none, or 0 to leave the key alone. That holder's lease
    /// is not known here.
    fn repair_ttl_ms(&self, claim: &Claim) -> u64 {
        if self.repair_ttl { claim.ttl_ms().max(REPAIRED_TTL_MIN_MS) } else { 0 }
    }

    /// Queue entry of a claim: its claim window, the channel for the grant message, and its id.
    pub(crate) fn queue_entry(&self, claim: &Claim) -> String {
        format!(
            "{} {} {}",
            self.claim_window_for(claim).as_millis(),
            self.listener.channel(),
            claim.id
        )
    }
}
