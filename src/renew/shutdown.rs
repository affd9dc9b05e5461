//! Shutdown of the renewer: releases the locks that are held, and runs pending clean-up, as far as
//! the nodes reply before the deadline.

use super::{cleanup_queue::Cleanup, cleanup_worker::PIPELINE_MAX, report_loss, worker::Worker};
use crate::{
    backend::redlock::{AskError, PendingAcks},
    core::{lease::LeaseEnd, lock_lost::LockLost, quorum::NodeSet},
    sys::clock::{self, Moment},
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
        // Skip locks whose holders are releasing them at this moment.
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
        // Held locks first, because other clients wait for them.
        let mut remaining: Vec<Cleanup> = held.chain(cleanups).collect();
        // A second pass makes up for lost replies and for connections that were closed meanwhile.
        let first = self.release_all(&mut remaining);
        let error = self.release_all(&mut remaining).or(first);
        if !remaining.is_empty() {
            let why = error.map_or_else(
                || "some replies did not come in time".into(),
                |error| error.to_string(),
            );
            log_safely!(
                warn,
                "could not release all locks at shutdown: {why}; the remaining locks will expire"
            );
        }
        // The caller of the shutdown may not have waited for this thread.
        self.desk.redlock.observer().close();
    }

    /// Tries each entry once, and keeps the entries that nodes have not confirmed. Skips a node for
    /// the remaining entries once it does not reply or cannot be reached.
    fn release_all(&mut self, remaining: &mut Vec<Cleanup>) -> Option<AskError> {
        let (mut unreachable, mut error) = (NodeSet::EMPTY, None);
        for batch in remaining.chunks_mut(PIPELINE_MAX) {
            error =
                self.release_batch(batch, &mut unreachable, Worker::half_of_time_left).or(error);
        }
        remaining.retain(|cleanup| !cleanup.nodes.is_empty());
        error
    }

    /// Returns a deadline after half of the remaining time, which leaves the other half for a
    /// second try; `None` if no time is left.
    fn half_of_time_left(&self) -> Option<Moment> {
        let (now, stop) = (clock::now(), self.desk.limits().1);
        (now < stop).then(|| now.saturating_add(stop.duration_since(now) / 2))
    }
}
