//! Renewals that holders ask for, and wait for: `LockGuard::renew`.

use crossbeam_channel::{Sender, bounded};

use super::{Registration, schedule::Generation};
use crate::{
    backend::error::BackendError,
    sys::clock::{self, Moment},
};

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
    reply: Sender<Result<(), BackendError>>,
}

impl AskedRenewals {
    /// Adds a holder, and returns its number.
    fn add(
        &mut self,
        generation: Generation,
        since: Moment,
        reply: Sender<Result<(), BackendError>>,
    ) -> u64 {
        self.last_number += 1;
        self.asked.push(Asked { number: self.last_number, generation, since, reply });
        self.last_number
    }

    /// Removes the holder with this number, which waits no longer. Others may wait for the same
    /// lease.
    fn remove(&mut self, number: u64) {
        self.asked.retain(|asked| asked.number != number);
    }

    /// Reports a confirmed renewal. Returns whether a holder waits for a later one.
    pub(super) fn on_renewed(&mut self, generation: Generation, sent: Moment) -> bool {
        self.answer(generation, |asked| asked.since <= sent, &Ok(()));
        self.asked.iter().any(|asked| asked.generation == generation)
    }

    pub(super) fn on_failed(&mut self, generation: Generation, error: &BackendError) {
        self.answer(generation, |_| true, &Err(error.clone()));
    }

    /// Disconnects the holders of a lease that has ended.
    pub(super) fn on_ended(&mut self, generation: Generation) {
        self.asked.retain(|asked| asked.generation != generation);
    }

    fn answer(
        &mut self,
        generation: Generation,
        applies: impl Fn(&Asked) -> bool,
        answer: &Result<(), BackendError>,
    ) {
        self.asked.retain(|asked| {
            let is_answered = asked.generation == generation && applies(asked);
            if is_answered {
                // The channel has room for one answer, and only one is ever sent.
                let _ = asked.reply.try_send(answer.clone());
            }
            !is_answered
        });
    }
}

impl Registration {
    /// Renews the lease now, and waits until `until` for the outcome. Returns `None` if there is
    /// none by then, or if the lease has ended.
    pub(crate) fn renew_now(&self, until: Moment) -> Option<Result<(), BackendError>> {
        let (reply, outcome) = bounded(1);
        let (generation, since) = (self.generation, clock::now());
        let mut state = self.shared.state.lock();
        if !state.schedule.contains(generation) {
            return None;
        }
        let number = state.asked.add(generation, since, reply);
        state.schedule.schedule_renewal(generation, since);
        self.shared.wake_sleepers(state);
        let outcome = clock::recv_until(&outcome, until);
        self.shared.state.lock().asked.remove(number);
        outcome
    }
}
