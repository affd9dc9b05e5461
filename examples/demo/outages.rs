//! Which nodes are killed and started again, and when.

use super::nodes::Nodes;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Step {
    Kill(usize),
    Restart(usize),
}

/// Two nodes go and come back. The second is killed when the first is back and does not vote yet, so that for a while
/// exactly a quorum is left, and never less.
#[derive(Debug)]
pub(crate) struct Outages {
    /// After so many rounds of all children together.
    steps: Vec<(u32, Step)>,
    next: usize,
}

impl Outages {
    pub(crate) fn new(seed: u64, nodes: usize, rounds_of_all: u32) -> Outages {
        let after = |percent: u32| (rounds_of_all * percent / 100).max(1);
        // Where everybody waits in line.
        let first = 1;
        let second = fastrand::Rng::with_seed(seed).usize(2..=nodes.max(2));
        let steps = vec![
            (after(12), Step::Kill(first)),
            (after(24), Step::Restart(first)),
            (after(26), Step::Kill(second)),
            (after(44), Step::Restart(second)),
        ];
        Outages { steps: if nodes > 2 { steps } else { Vec::new() }, next: 0 }
    }

    /// The next step, if it is time for it.
    pub(crate) fn step(&mut self, rounds: u32, nodes: &Nodes) -> Option<Step> {
        let (after, step) = *self.steps.get(self.next)?;
        let all_answer = nodes.seats.iter().all(|seat| seat.is_up());
        let due = rounds >= after && (all_answer || matches!(step, Step::Restart(_)));
        due.then(|| {
            self.next += 1;
            step
        })
    }

    pub(crate) fn are_over(&self) -> bool {
        self.next == self.steps.len()
    }
}
