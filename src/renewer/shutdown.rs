//! The end of the renewer: what is held is released, and what is left over is taken back, as far as
//! the nodes answer until the time is over.

use super::{cleanup_queue::Cleanup, cleanup_worker::PIPELINE_MAX, report_loss, worker::Worker};
use crate::{
    clock::{self, Moment},
    error::LockLost,
    lease::LeaseEnd,
    redlock::{AskError, NodeSet, PendingAcks},
};

impl Worker {
    pub(super) fn drain(mut self) {
        let (leases, cleanups, errands) = {
            let mut state = self.desk.shared.state.lock();
            (
                state.schedule.take_all(),
                state.cleanups.take_all(),
                std::mem::take(&mut state.errands),
            )
        };
        for lease in &leases {
            lease.end(LeaseEnd::Lost(LockLost::Shutdown));
            self.isolate_panic(|worker| report_loss(worker.desk.redlock.observer(), lease));
        }
        for errand in errands {
            self.isolate_panic(|worker| worker.run_errand(errand));
        }
        let until = clock::now();
        // What its holder gives up at this moment is the holder's to release.
        let held =
            leases.iter().filter(|lease| lease.ended() != Some(LeaseEnd::Released)).map(|lease| {
                Cleanup {
                    claim: lease.claim.clone(),
                    queue_entry: lease.queue_entry.clone(),
                    nodes: lease.may_hold(),
                    unless_held: None,
                    pending_acks: PendingAcks::new(),
                    expires_at: until,
                }
            });
        // What is held goes first: others wait for it.
        let mut remaining: Vec<Cleanup> = held.chain(cleanups).collect();
        // An answer that is lost, or a connection that has ended meanwhile, is made up for by the
        // second time.
        let first = self.release_all(&mut remaining);
        let error = self.release_all(&mut remaining).or(first);
        if !remaining.is_empty() {
            let why = error.map_or_else(
                || "not all was confirmed in time".into(),
                |trouble| trouble.to_string(),
            );
            log_safely!(
                warn,
                "shut down without releasing all locks, which are left to expire: {why}"
            );
        }
        // Whoever has stopped this may not have waited for it.
        self.desk.redlock.observer().close();
    }

    /// Tries each once, and keeps those of which something is left. A node that does not answer, or
    /// cannot be reached, is not asked about the others.
    fn release_all(&mut self, remaining: &mut Vec<Cleanup>) -> Option<AskError> {
        let (mut unreachable, mut error) = (NodeSet::EMPTY, None);
        for batch in remaining.chunks_mut(PIPELINE_MAX) {
            error =
                self.release_batch(batch, &mut unreachable, Worker::half_of_time_left).or(error);
        }
        remaining.retain(|undo| !undo.nodes.is_empty());
        error
    }

    /// Half the time, so that there is another half. `None` when it is over.
    fn half_of_time_left(&self) -> Option<Moment> {
        let (now, stop) = (clock::now(), self.desk.limits().1);
        (now < stop).then(|| now.saturating_add(stop.duration_since(now) / 2))
    }
}
