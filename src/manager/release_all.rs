//! How the locks of several names are released.

use std::time::Duration;

use super::{HeldLock, Manager};
use crate::{core::lease::Lease, error::Result, lock_info::Released, sys::clock};

impl Manager {
    /// Releases several locks, the last one first, all within `timeout`. Their leases end before
    /// the first release is sent. Returns the first outcome that is not [`Released::Released`].
    pub(crate) fn release_all(&self, held: Vec<HeldLock>, timeout: Duration) -> Result<Released> {
        let _time = self.time.enter();
        let mut outcome = Ok(Released::Released);
        let mut all_ended = Vec::with_capacity(held.len());
        for held in held.into_iter().rev() {
            match self.end(held) {
                Ok(ended) => all_ended.extend(ended),
                Err(error) => keep_first(&mut outcome, Err(error)),
            }
        }
        let leases: Vec<(&Lease, bool)> =
            all_ended.iter().map(|ended| (&*ended.lease, ended.was_held)).collect();
        let deadline = clock::now().saturating_add(timeout);
        let results: Vec<_> = self.observer.shield(|| {
            let reports = self.backend.release_leases(&leases, deadline);
            let with_leases = leases.iter().zip(reports);
            with_leases
                .map(|((lease, _), report)| self.clean_up_after_release(lease, report))
                .collect()
        });
        for (ended, result) in all_ended.into_iter().zip(results) {
            let released =
                result.map_err(|error| self.release_error(error, &ended.lease.claim.key));
            self.report_ended(ended, &released);
            keep_first(&mut outcome, released);
        }
        outcome
    }
}

fn keep_first(outcome: &mut Result<Released>, next: Result<Released>) {
    if matches!(outcome, Ok(Released::Released)) {
        *outcome = next;
    }
}
