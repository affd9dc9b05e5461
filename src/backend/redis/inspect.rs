//! Looks at one lock, which one server keeps.

use super::{
    OneServerForEachLock,
    requests::list::{DescribeLocks, HeldDescription},
};
use crate::{
    backend::{Inspection, Looks, ReportedIds, error::BackendError},
    core::key::LockKey,
    lock_info::LockInfo,
    sys::clock::{self, Moment},
};

/// Asks for the description of one lock.
fn describe(
    backend: &impl OneServerForEachLock,
    key: &LockKey,
    waiters_max: u64,
    deadline: Moment,
) -> Result<Inspection<HeldDescription>, BackendError> {
    let found = backend.ask_about(key, &DescribeLocks::lookup(key, waiters_max), deadline)?;
    Ok(found.into_iter().next().unwrap_or(Inspection::Free))
}

impl<B: OneServerForEachLock> Looks for B {
    fn reported_ids(&self, key: &LockKey, deadline: Moment) -> Result<ReportedIds, BackendError> {
        Ok(describe(self, key, 0, deadline)?.map(|held| vec![held.holder.id_bytes().to_vec()]))
    }

    fn lookup(
        &self,
        key: &LockKey,
        waiters_max: u64,
    ) -> Result<Inspection<LockInfo>, BackendError> {
        let deadline = clock::now().saturating_add(self.operation_timeout());
        let found = describe(self, key, waiters_max, deadline)?;
        Ok(found.map(|held| held.into_lock_info(key)))
    }
}
