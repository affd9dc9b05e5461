//! `OptionalCalls`: what not every backend can do, and how the others refuse it.

use super::{AllRequest, AllResult, Feature, error::BackendError};
use crate::{
    core::{
        claim::{Claim, Grant, Residue},
        id::LockId,
        lease::Lease,
        lock_lost::LockLost,
    },
    sys::clock::Moment,
};

/// The calls that not every backend has.
pub(crate) trait OptionalCalls {
    /// Returns why this backend cannot do this, as a part of a sentence; `None` if it can.
    fn refusal_of(&self, feature: Feature) -> Option<&'static str> {
        feature.refusal_of_mutexes_only()
    }

    /// Acquires several mutexes in one request, all or none.
    fn acquire_all(&self, _: AllRequest<'_>) -> AllResult {
        AllResult::unsupported()
    }

    /// Turns a write lock into a read lock, without a moment in which it is not held.
    fn downgrade(&self, _lease: &Lease, _deadline: Moment) -> Result<Passed, BackendError> {
        Err(BackendError::unsupported())
    }

    /// Gives the lock of the holder `former` to this claim.
    fn adopt(&self, _former: &LockId, _: &Claim, _deadline: Moment) -> AdoptReport {
        AdoptReport { result: Err(BackendError::unsupported()), residue: None }
    }
}

/// Result of an adoption.
pub(crate) struct AdoptReport {
    pub(crate) result: Result<Passed, BackendError>,
    /// What a failed adoption may have left on the server: the claim may have the lock.
    pub(crate) residue: Option<Residue>,
}

/// Result of passing a lock on: from a writer to a reader, or to a successor.
#[derive(Debug)]
pub(crate) enum Passed {
    /// The grant of the next holder.
    To(Grant),
    Lost(LockLost),
}
