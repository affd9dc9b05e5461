//! How the locks of several names are released.

use std::time::Duration;

use super::{HeldLock, Manager, release::EndedLock};
use crate::{
    core::lease::Lease,
    error::Result,
    lock_info::Released,
    sys::clock::{self, Moment},
};

impl Manager {
    /// Releases several locks, the last one first: in one exchange within `timeout` if the backend
    /// can, and otherwise each within `timeout`, until one fails. Returns an outcome that is not
    /// [`Released::Released`], if there is one.
    pub(crate) fn release_all(&self, held: Vec<HeldLock>, timeout: Duration) -> Result<Released> {
        self.release_each_until(held, &|| clock::now().saturating_add(timeout))
    }

    /// The same, but releases all locks within `timeout`.
    pub(crate) fn release_all_within(
        &self,
        held: Vec<HeldLock>,
        timeout: Duration,
    ) -> Result<Released> {
        let _time = self.time.enter();
        let deadline = clock::now().saturating_add(timeout);
        self.release_each_until(held, &|| deadline)
    }

    /// The leases end before the first release is sent, and no handler is called before the last
    /// one has ended.
    fn release_each_until(
        &self,
        held: Vec<HeldLock>,
        deadline: &dyn Fn() -> Moment,
    ) -> Result<Released> {
        let _time = self.time.enter();
        let ended = held.into_iter().rev().map(|held| self.end(held));
        let (mut kept, mut done) = (Vec::new(), Vec::new());
        for (ended, outcome) in ended {
            match outcome {
                Some(outcome) => done.push((outcome, ended)),
                None => kept.push(ended),
            }
        }
        let leases: Vec<(&Lease, bool)> =
            kept.iter().map(|ended: &EndedLock| (&*ended.lease, ended.was_held)).collect();
        let results: Vec<Result<Released>> = self.observer.shield(|| {
            let reports = self.backend.release_leases(&leases, deadline);
            let with_leases = leases.iter().zip(reports);
            with_leases
                .map(|((lease, was_held), report)| self.conclude_release(lease, *was_held, report))
                .collect()
        });
        let mut first = Ok(Released::Released);
        for (outcome, ended) in done.into_iter().chain(results.into_iter().zip(kept)) {
            self.report_ended(ended, outcome.as_ref().ok());
            if matches!(first, Ok(Released::Released)) {
                first = outcome;
            }
        }
        first
    }
}
