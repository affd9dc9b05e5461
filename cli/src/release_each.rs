//! Releases of a lock that several clients share.

use distlock::{LockError, LockManager, Released};

/// How the releases for several holders ended.
#[derive(Debug)]
pub(crate) struct EachRelease {
    /// The outcomes in the order of the holders, up to the first failure.
    pub(crate) outcomes: Vec<Released>,
    pub(crate) error: Option<LockError>,
}

/// Takes the lock from the holders with these ids, one after the other, and from no other client:
/// one that joins meanwhile keeps its part. Stops at the first failure.
pub(crate) fn release_each<'a>(
    mgr: &dyn LockManager,
    name: &str,
    ids: impl Iterator<Item = &'a str>,
) -> EachRelease {
    let mut outcomes = Vec::new();
    for id in ids {
        match mgr.force_release_if(name, id) {
            Ok(outcome) => outcomes.push(outcome),
            Err(error) => return EachRelease { outcomes, error: Some(error) },
        }
    }
    EachRelease { outcomes, error: None }
}
