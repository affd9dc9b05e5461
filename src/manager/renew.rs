//! Renewals that holders ask for.

use std::{sync::Arc, time::Duration};

use super::Manager;
use crate::{
    backend::{
        Feature,
        error::{BackendError, NodeError, NodeErrorKind},
    },
    core::lease::Lease,
    error::{Action, LockError, Result},
    renew::Registration,
    sys::clock,
};

impl Manager {
    /// Renews leases now. The renewer sends the requests, so that no two renewals of a lease can
    /// overtake each other.
    pub(crate) fn renew(&self, leases: &[(&Arc<Lease>, &Registration)]) -> Result<()> {
        let _time = self.time.enter();
        let until = self.backend.operation_deadline();
        // The renewer sends them together, and one deadline applies to all.
        let asked: Vec<_> = leases.iter().map(|(lease, of)| of.ask_renewal(lease)).collect();
        let outcomes: Vec<_> = asked
            .into_iter()
            .map(|asked| asked.and_then(|asked| asked.wait_until(until)))
            .collect();
        // A loss comes before a failure, because the caller must not go on.
        if let Some((lease, _)) = leases.iter().find(|(lease, _)| !lease.is_held(clock::now())) {
            return Err(LockError::not_held(lease));
        }
        let timed_out = || BackendError::Node(NodeError::outcome_unknown(NodeErrorKind::TimedOut));
        leases.iter().zip(outcomes).try_for_each(|((lease, _), outcome)| {
            let (outcome, name) =
                (outcome.unwrap_or_else(|| Err(timed_out())), lease.claim.key.name());
            outcome.map_err(|error| self.backend.lock_error(error, Action::Renew, Some(name)))
        })
    }

    /// Renews leases with another ttl, which then stays.
    pub(crate) fn extend(
        &self,
        leases: &[(&Arc<Lease>, &Registration)],
        ttl: Duration,
    ) -> Result<()> {
        self.config.check_ttl(ttl)?;
        self.check_feature(Feature::OtherTtl)?;
        leases.iter().for_each(|(lease, _)| lease.set_ttl(ttl));
        self.renew(leases)
    }
}
