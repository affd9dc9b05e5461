//! What every backend in which each lock is kept by one server does in the same way.

/// Defines the methods of a [`Backend`](crate::backend::Backend) that is a
/// [`OneServerForEachLock`](super::OneServerForEachLock).
macro_rules! one_server_methods {
    () => {
        fn release_lease(
            &self,
            lease: &$crate::core::lease::Lease,
            was_held: bool,
            deadline: $crate::sys::clock::Moment,
        ) -> $crate::backend::ReleaseReport {
            $crate::backend::redis::release_on_one_server(self, lease, was_held, deadline)
        }

        fn release_id(
            &self,
            key: &$crate::core::key::LockKey,
            id: &[u8],
            was_held: bool,
            deadline: $crate::sys::clock::Moment,
        ) -> Result<$crate::lock_info::Released, $crate::backend::error::BackendError> {
            $crate::backend::redis::release_id_on_one_server(self, key, id, was_held, deadline)
        }

        fn refusal_of(&self, feature: $crate::backend::Feature) -> Option<&'static str> {
            feature.refusal_of_one_server()
        }

        fn acquire_all(
            &self,
            request: $crate::backend::AllRequest<'_>,
        ) -> $crate::backend::AllAnswer {
            $crate::backend::redis::acquire_all_on_one_server(self, request)
        }

        fn adopt(
            &self,
            former: &$crate::core::id::LockId,
            claim: &$crate::core::claim::Claim,
            deadline: $crate::sys::clock::Moment,
        ) -> $crate::backend::AdoptReport {
            $crate::backend::redis::adopt_on_one_server(self, former, claim, deadline)
        }

        fn downgrade(
            &self,
            lease: &$crate::core::lease::Lease,
            deadline: $crate::sys::clock::Moment,
        ) -> Result<$crate::backend::Passed, $crate::backend::error::BackendError> {
            $crate::backend::redis::downgrade_on_one_server(self, lease, deadline)
        }

        fn lease_residue(
            &self,
            lease: &$crate::core::lease::Lease,
        ) -> $crate::core::claim::Residue {
            lease.residue($crate::core::quorum::NodeSet::single(0))
        }

        fn clean_up_once(
            &self,
            claim: &$crate::core::claim::Claim,
            residue: &$crate::core::claim::Residue,
            deadline: $crate::sys::clock::Moment,
        ) -> Result<(), $crate::backend::error::BackendError> {
            $crate::backend::redis::clean_up_on_one_server(self, claim, residue, deadline)
        }

        fn reported_ids(
            &self,
            key: &$crate::core::key::LockKey,
            deadline: $crate::sys::clock::Moment,
        ) -> Result<$crate::backend::ReportedIds, $crate::backend::error::BackendError> {
            $crate::backend::redis::reported_ids_on_one_server(self, key, deadline)
        }

        fn lookup(
            &self,
            key: &$crate::core::key::LockKey,
            waiters_max: u64,
        ) -> Result<
            $crate::backend::Inspection<$crate::lock_info::LockInfo>,
            $crate::backend::error::BackendError,
        > {
            $crate::backend::redis::lookup_on_one_server(self, key, waiters_max)
        }
    };
}
pub(crate) use one_server_methods;
