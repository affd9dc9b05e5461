//! The end of the renewer: what is held is released, and what is left over is taken back, as far as the nodes answer until the
//! time is over.

use super::{tell_loss, undo::Undo, worker::Worker};
use crate::{
    clock,
    error::LockLost,
    lease::End,
    redlock::{NodeSet, Trouble},
};

impl Worker {
    pub(super) fn finish(mut self) {
        let (leases, undos, errands) = {
            let mut state = self.desk.shared.state.lock();
            (state.schedule.take_all(), state.undos.take_all(), std::mem::take(&mut state.errands))
        };
        for lease in &leases {
            lease.end(End::Lost(LockLost::Shutdown));
            self.apart(|worker| tell_loss(worker.desk.redlock.observer(), lease));
        }
        for errand in errands {
            self.apart(|worker| worker.run_errand(errand));
        }
        let until = clock::now();
        // What its holder gives up at this moment is the holder's to release.
        let held = leases.iter().filter(|lease| lease.ended() != Some(End::Released)).map(|lease| Undo {
            claim: lease.claim.clone(),
            waiter: lease.place.clone(),
            nodes: lease.nodes(),
            unless_held: None,
            until,
        });
        // What is held goes first: others wait for it.
        let mut left: Vec<Undo> = held.chain(undos).collect();
        // An answer that is lost, or a connection that has ended meanwhile, is made up for by the second time.
        let first = self.take_back_all(&mut left);
        let trouble = self.take_back_all(&mut left).or(first);
        if let Some(trouble) = trouble.filter(|_| !left.is_empty()) {
            say!(warn, "shut down without releasing all locks, which are left to expire: {trouble}");
        }
        // Whoever has stopped this may not have waited for it.
        self.desk.redlock.observer().close();
    }

    /// Tries each once, and keeps those of which something is left. A node that does not answer is not asked about the others.
    fn take_back_all(&mut self, left: &mut Vec<Undo>) -> Option<Trouble> {
        let stop = self.desk.limits().1;
        let (mut silent, mut trouble) = (NodeSet::NONE, None);
        left.retain_mut(|undo| {
            let now = clock::now();
            let to = undo.nodes.without(silent);
            if to.is_empty() || now >= stop {
                return true;
            }
            // Half the time, so that there is another half.
            let deadline = now.saturating_add(stop.after(now) / 2);
            let Some(ballot) = self.apart(|worker| worker.take_back(undo, to, deadline)) else { return true };
            silent = silent.with(ballot.silent());
            let done = undo.nodes.is_empty();
            if !done {
                trouble = Some(Trouble::of(&self.desk.redlock, ballot, |_| "done".into()));
            }
            !done
        });
        trouble
    }
}
