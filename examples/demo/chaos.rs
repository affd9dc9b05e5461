//! Which processes are killed or stopped, and when.

use std::time::Duration;

use super::child_status::{ChildStatus, ChildTable, State};
use crate::common::nanos;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fault {
    Kill,
    Stop,
}

#[derive(Clone, Copy, Debug)]
enum Target {
    Holder,
    Waiter,
}

/// The sequence of faults, which is repeated.
const PLAN: [(Fault, Target); 6] = [
    (Fault::Stop, Target::Holder),
    (Fault::Kill, Target::Holder),
    (Fault::Stop, Target::Waiter),
    (Fault::Kill, Target::Waiter),
    (Fault::Stop, Target::Holder),
    (Fault::Kill, Target::Holder),
];

#[derive(Debug)]
pub(crate) struct Chaos {
    random: fastrand::Rng,
    next: usize,
    /// Number of rounds, of all children together, for each fault.
    interval: u32,
    /// Maximum time since a holder acquired the lock. A holder that has held it for longer could
    /// have released it by the time the signal arrives.
    hold_max: u64,
}

impl Chaos {
    pub(crate) fn new(seed: u64, total_rounds: u32, shortest_work: Duration) -> Chaos {
        let faults = u32::try_from(PLAN.len()).unwrap_or(u32::MAX);
        Chaos {
            random: fastrand::Rng::with_seed(seed),
            next: 0,
            interval: (total_rounds / (faults + 1)).max(2),
            hold_max: nanos(shortest_work / 2),
        }
    }

    /// The next fault and the child to inject it into, if the fault is due and such a child exists.
    pub(crate) fn next_fault(&mut self, table: &ChildTable, now: u64) -> Option<(Fault, u32)> {
        let (fault, target) = PLAN[self.next % PLAN.len()];
        let due = (u32::try_from(self.next).ok()? + 1) * self.interval;
        if table.total_rounds() < due {
            return None;
        }
        let matches_target = |status: &&ChildStatus| {
            !status.stopped
                && match (target, status.state) {
                    (Target::Holder, State::Holding { since, .. }) => {
                        now.saturating_sub(since) < self.hold_max
                    }
                    (Target::Waiter, State::Waiting) => true,
                    _ => false,
                }
        };
        let candidates: Vec<u32> =
            table.children.iter().filter(matches_target).map(|status| status.child).collect();
        let child = self.random.choice(candidates)?;
        self.next += 1;
        Some((fault, child))
    }
}
