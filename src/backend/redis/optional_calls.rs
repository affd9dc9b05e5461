//! The calls that not every backend has, for those in which each lock is kept by one server.

use super::{OneServerForEachLock, acquire_all::acquire_all, adopt::adopt, downgrade::downgrade};
use crate::{
    backend::{
        AdoptReport, AllRequest, AllResult, Feature, OptionalCalls, Passed, error::BackendError,
    },
    core::{claim::Claim, id::LockId, lease::Lease},
    sys::clock::Moment,
};

impl<B: OneServerForEachLock> OptionalCalls for B {
    fn refusal_of(&self, feature: Feature) -> Option<&'static str> {
        feature.refusal_of_one_server()
    }

    fn acquire_all(&self, request: AllRequest<'_>) -> AllResult {
        acquire_all(self, request)
    }

    fn downgrade(&self, lease: &Lease, deadline: Moment) -> Result<Passed, BackendError> {
        downgrade(self, lease, deadline)
    }

    fn adopt(&self, former: &LockId, claim: &Claim, deadline: Moment) -> AdoptReport {
        adopt(self, former, claim, deadline)
    }
}
