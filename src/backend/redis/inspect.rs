//! Looks at one lock, which one server keeps.

use std::slice;

use super::{
    Request,
    group_requests::{add_members, add_members_to_holder},
    list_requests::DescribeLocks,
    requests_and_replies::Inspect,
};
use crate::{
    backend::{Backend, Inspection, ReportedIds, error::BackendError},
    core::{holder::Holder, key::LockKey},
    lock_info::LockInfo,
    sys::clock::{self, Moment},
};

/// A backend in which each lock is kept by one server.
pub(crate) trait OneServerForEachLock: Backend {
    /// Sends a request that changes nothing to the server that keeps this lock.
    fn ask_about<R: Request>(
        &self,
        key: &LockKey,
        request: &R,
        deadline: Moment,
    ) -> Result<R::Reply, BackendError>;
}

fn deadline(backend: &impl Backend) -> Moment {
    clock::now().saturating_add(backend.operation_timeout())
}

pub(crate) fn inspect_on_one_server(
    backend: &impl OneServerForEachLock,
    key: &LockKey,
) -> Result<Inspection<Holder>, BackendError> {
    let deadline = deadline(backend);
    let found = backend.ask_about(key, &Inspect(key), deadline)?;
    add_members_to_holder(key, found, |request| backend.ask_about(key, request, deadline))
}

pub(crate) fn reported_ids_on_one_server(
    backend: &impl OneServerForEachLock,
    key: &LockKey,
    deadline: Moment,
) -> Result<ReportedIds, BackendError> {
    Ok(match backend.ask_about(key, &Inspect(key), deadline)? {
        Inspection::Held(holder) => Inspection::Held(vec![holder.id_bytes().to_vec()]),
        Inspection::Free => Inspection::Free,
        Inspection::WrongType => Inspection::WrongType,
    })
}

pub(crate) fn lookup_on_one_server(
    backend: &impl OneServerForEachLock,
    key: &LockKey,
) -> Result<Inspection<LockInfo>, BackendError> {
    let (request, deadline) = (DescribeLocks::lookup(key), deadline(backend));
    let (_, found) = backend.ask_about(key, &request, deadline)?;
    let found = found.into_iter().next();
    let mut found = [found.map_or(Inspection::Free, |found| found.into_lock_info(key))];
    add_members(slice::from_ref(key), &mut found, |request| {
        backend.ask_about(key, request, deadline)
    })?;
    let [found] = found;
    Ok(found)
}
