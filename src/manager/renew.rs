//! Renewals that holders ask for.

use std::time::Duration;

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
    /// Renews a lease now. The renewer sends the request, so that no two renewals of a lease can
    /// overtake each other.
    pub(crate) fn renew(&self, lease: &Lease, registration: &Registration) -> Result<()> {
        let _time = self.time.enter();
        let outcome = registration.renew_now(self.operation_deadline());
        let name = lease.claim.key.name();
        if !lease.is_held(clock::now()) {
            let (name, why) = (name.to_owned(), lease.why_not_held());
            return Err(LockError::Lost { name, why });
        }
        let timed_out = || BackendError::Node(NodeError::outcome_unknown(NodeErrorKind::TimedOut));
        let outcome = outcome.unwrap_or_else(|| Err(timed_out()));
        outcome.map_err(|error| self.backend.lock_error(error, Action::Renew, Some(name)))
    }

    /// Renews a lease with another ttl, which then stays.
    pub(crate) fn extend(
        &self,
        lease: &Lease,
        registration: &Registration,
        ttl: Duration,
    ) -> Result<()> {
        self.config.check_ttl(ttl)?;
        self.check_feature(Feature::OtherTtl)?;
        lease.set_ttl(ttl);
        self.renew(lease, registration)
    }
}
