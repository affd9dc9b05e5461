//! The end of the renewer: what is held is released, and what is left over is taken back, as far as the nodes answer until the
//! time is over.

use super::{sweep::AT_ONCE, tell_loss, undo::Undo, worker::Worker};
use crate::{
    clock::{self, Moment},
    error::LockLost,
    lease::End,
    redlock::{NodeSet, Trouble, Unheard},
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
            asked: Unheard::new(),
            until,
        });
        // What is held goes first: others wait for it.
        let mut left: Vec<Undo> = held.chain(undos).collect();
        // An answer that is lost, or a connection that has ended meanwhile, is made up for by the second time.
        let first = self.take_back_all(&mut left);
        let trouble = self.take_back_all(&mut left).or(first);
        if !left.is_empty() {
            let why = trouble.map_or_else(|| "not all was confirmed in time".into(), |trouble| trouble.to_string());
            say!(warn, "shut down without releasing all locks, which are left to expire: {why}");
        }
        // Whoever has stopped this may not have waited for it.
        self.desk.redlock.observer().close();
    }

    /// Tries each once, and keeps those of which something is left. A node that does not answer, or cannot be reached, is not
    /// asked about the others.
    fn take_back_all(&mut self, left: &mut Vec<Undo>) -> Option<Trouble> {
        let (mut away, mut trouble) = (NodeSet::NONE, None);
        for some in left.chunks_mut(AT_ONCE) {
            trouble = self.take_back_some(some, &mut away, Worker::half_of_the_rest).or(trouble);
        }
        left.retain(|undo| !undo.nodes.is_empty());
        trouble
    }

    /// Half the time, so that there is another half. `None` when it is over.
    fn half_of_the_rest(&self) -> Option<Moment> {
        let (now, stop) = (clock::now(), self.desk.limits().1);
        (now < stop).then(|| now.saturating_add(stop.after(now) / 2))
    }
}
