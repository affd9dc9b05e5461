//! Which nodes are killed and restarted, and when.

use super::node_status::NodeTable;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Step {
    Kill(usize),
    Restart(usize),
}

/// Kills and restarts two nodes. The second is killed when the first is back but does not vote yet.
/// For a while exactly a quorum is left, and never less.
#[derive(Debug)]
pub(crate) struct Outages {
    /// Each step with the number of rounds, of all children together, after which it is due.
    steps: Vec<(u32, Step)>,
    next: usize,
}

impl Outages {
    pub(crate) fn new(seed: u64, nodes: usize, total_rounds: u32) -> Outages {
        let after = |percent: u32| (total_rounds * percent / 100).max(1);
        // The queue node.
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

    /// The next step, if it is due. A node is only killed while all nodes are up.
    pub(crate) fn next_step(&mut self, rounds: u32, nodes: &NodeTable) -> Option<Step> {
        let (after, step) = *self.steps.get(self.next)?;
        let are_all_up = nodes.nodes.iter().all(|node| node.is_up());
        let is_due = rounds >= after && (are_all_up || matches!(step, Step::Restart(_)));
        is_due.then(|| {
            self.next += 1;
            step
        })
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.next == self.steps.len()
    }
}
