//! What goes wrong on purpose: who is to be killed or stopped, and when.

use std::time::Duration;

use super::board::{Board, Seat, State};
use crate::common::nanos;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Blow {
    Kill,
    Stop,
}

#[derive(Clone, Copy, Debug)]
enum Victim {
    Holder,
    Waiter,
}

const PLAN: [(Blow, Victim); 6] = [
    (Blow::Stop, Victim::Holder),
    (Blow::Kill, Victim::Holder),
    (Blow::Stop, Victim::Waiter),
    (Blow::Kill, Victim::Waiter),
    (Blow::Stop, Victim::Holder),
    (Blow::Kill, Victim::Holder),
];

#[derive(Debug)]
pub(crate) struct Chaos {
    random: fastrand::Rng,
    next: usize,
    /// A blow falls once in so many rounds of all children together.
    every: u32,
    /// A holder is hit when it has just entered, so that it cannot have left when the blow arrives.
    fresh: u64,
}

impl Chaos {
    pub(crate) fn new(seed: u64, rounds_of_all: u32, shortest_work: Duration) -> Chaos {
        let blows = u32::try_from(PLAN.len()).unwrap_or(u32::MAX);
        Chaos {
            random: fastrand::Rng::with_seed(seed),
            next: 0,
            every: (rounds_of_all / (blows + 1)).max(2),
            fresh: nanos(shortest_work / 2),
        }
    }

    /// The next blow, if it is time for it and there is somebody to take it.
    pub(crate) fn strike(&mut self, board: &Board, now: u64) -> Option<(Blow, u32)> {
        let (blow, victim) = PLAN[self.next % PLAN.len()];
        let due = (u32::try_from(self.next).ok()? + 1) * self.every;
        if board.rounds_of_all() < due {
            return None;
        }
        let fits = |seat: &&Seat| {
            !seat.stopped
                && match (victim, seat.state) {
                    (Victim::Holder, State::Holding { since, .. }) => now.saturating_sub(since) < self.fresh,
                    (Victim::Waiter, State::Waiting) => true,
                    _ => false,
                }
        };
        let candidates: Vec<u32> = board.seats.iter().filter(fits).map(|seat| seat.child).collect();
        let child = self.random.choice(candidates)?;
        self.next += 1;
        Some((blow, child))
    }
}
