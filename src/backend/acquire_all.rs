//! Several locks in one request: all, or none.

use super::error::BackendError;
use crate::{
    core::{
        claim::{Claim, Grant, Residue},
        holder::Holder,
    },
    sys::clock::Moment,
};

/// A request for the locks of several claims, which does not wait. All have the same ttl.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AllRequest<'a> {
    pub(crate) claims: &'a [Claim],
    /// TTL for another holder's key that has none, in milliseconds; 0 to leave the key alone.
    pub(crate) repair_ttl_ms: u64,
    /// Latest time at which the call returns.
    pub(crate) call_deadline: Moment,
}

/// What became of a request for several locks.
#[derive(Debug)]
pub(crate) struct AllResult {
    pub(crate) outcome: AllOutcome,
    /// What each claim may have left on the servers, unless the locks were granted.
    pub(crate) residue: Option<Residue>,
}

#[derive(Debug)]
pub(crate) enum AllOutcome {
    /// The grant of each claim, in their order.
    Granted(Vec<Grant>),
    /// The lock of the claim with this index is not free.
    Held {
        index: usize,
        holder: Box<Holder>,
    },
    /// The key of this claim is not a lock.
    WrongType {
        index: usize,
    },
    Failed(BackendError),
}

impl AllResult {
    /// The result of a backend that acquires locks one after the other only.
    pub(super) fn unsupported() -> AllResult {
        AllResult { outcome: AllOutcome::Failed(BackendError::unsupported()), residue: None }
    }
}
