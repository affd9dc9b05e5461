//! Renewals that holders ask for, and wait for: `LockGuard::renew`.

use std::sync::Arc;

use super::schedule::Generation;
use crate::{
    backend::error::BackendError,
    core::lease::Lease,
    sys::{clock::Moment, slot::Slot},
};

/// How a renewal has ended; `None` if its lease has ended.
pub(super) type Outcome = Option<Result<(), BackendError>>;

/// The holders that wait for a renewal.
#[derive(Debug, Default)]
pub(super) struct AskedRenewals {
    asked: Vec<Asked>,
    last_number: u64,
}

#[derive(Debug)]
struct Asked {
    number: u64,
    generation: Generation,
    lease: Arc<Lease>,
    /// Only a renewal that begins later counts: it has the ttl that the lease has by then.
    since: Moment,
    outcome: Arc<Slot<Outcome>>,
}

impl AskedRenewals {
    /// Adds a holder, and returns its number.
    pub(super) fn add(
        &mut self,
        generation: Generation,
        lease: Arc<Lease>,
        since: Moment,
        outcome: Arc<Slot<Outcome>>,
    ) -> u64 {
        self.last_number += 1;
        self.asked.push(Asked { number: self.last_number, generation, lease, since, outcome });
        self.last_number
    }

    /// Removes the holder with this number, which waits no longer. Others may wait for the same
    /// lease.
    pub(super) fn remove(&mut self, number: u64) {
        self.asked.retain(|asked| asked.number != number);
    }

    /// Reports the outcome of a renewal that began at `began`. A holder that asked later waits for
    /// the next one.
    pub(super) fn on_outcome(
        &mut self,
        generation: Generation,
        began: Moment,
        outcome: Result<(), BackendError>,
    ) {
        let applies = |asked: &Asked| asked.generation == generation && asked.since <= began;
        self.fill(applies, &Some(outcome));
    }

    /// Reports the end of each lease that has ended.
    pub(super) fn on_ended(&mut self) {
        self.fill(|asked| asked.lease.ended().is_some(), &None);
    }

    fn fill(&mut self, applies: impl Fn(&Asked) -> bool, outcome: &Outcome) {
        self.asked.retain(|asked| {
            let is_filled = applies(asked);
            if is_filled {
                asked.outcome.fill(outcome.clone());
            }
            !is_filled
        });
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::schedule::{
            Schedule,
            tests::{at, lease, plan},
        },
        *,
    };
    use crate::{
        backend::error::{NodeError, NodeErrorKind},
        core::{lease::LeaseEnd, lock_lost::LockLost},
    };

    fn ask(
        asked: &mut AskedRenewals,
        (generation, lease): &(Generation, Arc<Lease>),
        since: Moment,
    ) -> Arc<Slot<Outcome>> {
        let outcome = Arc::<Slot<Outcome>>::default();
        asked.add(*generation, lease.clone(), since, outcome.clone());
        outcome
    }

    fn leases<const N: usize>() -> [(Generation, Arc<Lease>); N] {
        let mut schedule = Schedule::default();
        std::array::from_fn(|_| {
            let lease = lease(1_000, 2_000);
            (schedule.insert(lease.clone(), plan(), at(0)), lease)
        })
    }

    /// What the holder has been told so far.
    fn told(outcome: &Slot<Outcome>) -> Option<Outcome> {
        outcome.wait_until(Moment::default())
    }

    /// A renewal that began earlier may have another ttl, and its failure says nothing of the next.
    ///
    /// Fault: N171
    #[test]
    fn renewal_counts_only_for_holders_that_asked_before_it_began() {
        let ([one, other], mut asked) = (leases(), AskedRenewals::default());
        let timed_out = BackendError::Node(NodeError::outcome_unknown(NodeErrorKind::TimedOut));
        for outcome in [Ok(()), Err(timed_out)] {
            let [early, late] = [10, 20].map(|since| ask(&mut asked, &one, at(since)));
            let of_other = ask(&mut asked, &other, at(10));
            asked.on_outcome(one.0, at(15), outcome.clone());
            assert!(told(&early).is_some_and(|told| told.is_some()));
            assert!(told(&late).is_none() && told(&of_other).is_none());
            asked.on_outcome(one.0, at(25), outcome);
            assert!(told(&late).is_some());
            asked.on_outcome(other.0, at(25), Ok(()));
        }
    }

    /// A shutdown removes all leases from the schedule first, and then ends one after the other. A
    /// holder that learned of the end before its lease has ended would take it for a timeout.
    ///
    /// Fault: N171
    #[test]
    fn holder_learns_of_the_end_of_its_own_lease() {
        let ([one, other], mut asked) = (leases(), AskedRenewals::default());
        let outcomes = [&one, &other].map(|lease| ask(&mut asked, lease, at(10)));
        one.1.end(LeaseEnd::Lost(LockLost::Shutdown));
        asked.on_ended();
        assert!(matches!(told(&outcomes[0]), Some(None)));
        assert!(told(&outcomes[1]).is_none());
        other.1.end(LeaseEnd::Lost(LockLost::Shutdown));
        asked.on_ended();
        assert!(matches!(told(&outcomes[1]), Some(None)));
    }
}
