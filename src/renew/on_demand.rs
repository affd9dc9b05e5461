//! Renewals that holders ask for, and wait for: `LockGuard::renew`.

use std::sync::Arc;

use super::{
    Registration,
    schedule::{Generation, Schedule},
};
use crate::{
    backend::error::BackendError,
    sys::{
        clock::{self, Moment},
        slot::Slot,
    },
};

/// How a renewal has ended; `None` if its lease has ended.
type Outcome = Option<Result<(), BackendError>>;

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
    /// Only a renewal that is sent later counts.
    since: Moment,
    outcome: Arc<Slot<Outcome>>,
}

impl AskedRenewals {
    /// Adds a holder, and returns its number.
    fn add(&mut self, generation: Generation, since: Moment, outcome: Arc<Slot<Outcome>>) -> u64 {
        self.last_number += 1;
        self.asked.push(Asked { number: self.last_number, generation, since, outcome });
        self.last_number
    }

    /// Removes the holder with this number, which waits no longer. Others may wait for the same
    /// lease.
    fn remove(&mut self, number: u64) {
        self.asked.retain(|asked| asked.number != number);
    }

    /// Reports a confirmed renewal. Returns whether a holder waits for a later one.
    pub(super) fn on_renewed(&mut self, generation: Generation, sent: Moment) -> bool {
        let applies = |asked: &Asked| asked.generation == generation && asked.since <= sent;
        self.answer(applies, &Some(Ok(())));
        self.asked.iter().any(|asked| asked.generation == generation)
    }

    pub(super) fn on_failed(&mut self, generation: Generation, error: &BackendError) {
        self.answer(|asked| asked.generation == generation, &Some(Err(error.clone())));
    }

    /// Reports the end of each lease that the schedule does not contain any more.
    pub(super) fn on_ended(&mut self, schedule: &Schedule) {
        self.answer(|asked| !schedule.contains(asked.generation), &None);
    }

    fn answer(&mut self, applies: impl Fn(&Asked) -> bool, answer: &Outcome) {
        self.asked.retain(|asked| {
            let is_answered = applies(asked);
            if is_answered {
                asked.outcome.fill(answer.clone());
            }
            !is_answered
        });
    }
}

/// A renewal that a holder has asked for, and whose outcome it can wait for.
pub(crate) struct PendingRenewal<'a> {
    registration: &'a Registration,
    number: u64,
    outcome: Arc<Slot<Outcome>>,
}

impl Registration {
    /// Asks for a renewal now. Returns `None` if the lease has ended.
    pub(crate) fn ask_renewal(&self) -> Option<PendingRenewal<'_>> {
        let outcome = Arc::<Slot<Outcome>>::default();
        let (generation, since) = (self.generation, clock::now());
        let mut state = self.shared.state.lock();
        if !state.schedule.contains(generation) {
            return None;
        }
        let number = state.asked.add(generation, since, outcome.clone());
        state.schedule.schedule_renewal(generation, since);
        self.shared.wake_sleepers(state);
        Some(PendingRenewal { registration: self, number, outcome })
    }
}

impl PendingRenewal<'_> {
    /// Waits until `until` for the outcome. Returns `None` if there is none by then, or if the
    /// lease has ended.
    pub(crate) fn wait_until(self, until: Moment) -> Option<Result<(), BackendError>> {
        let outcome = self.outcome.wait_until(until).flatten();
        self.registration.shared.state.lock().asked.remove(self.number);
        outcome
    }
}
