//! Shutdown of the renewer: ends all leases, and has their locks released.

use super::{report_loss, worker::Worker};
use crate::core::{lease::LeaseEnd, lock_lost::LockLost};

impl Worker {
    pub(super) fn drain(mut self) {
        let (leases, errands) = {
            let mut state = self.desk.shared.state.lock();
            (state.schedule.take_all(), std::mem::take(&mut state.errands))
        };
        for lease in &leases {
            lease.end(LeaseEnd::Lost(LockLost::Shutdown));
            self.isolate_panic(|worker| report_loss(worker.desk.redlock.observer(), lease));
        }
        for errand in errands {
            self.isolate_panic(|worker| worker.run_errand(errand));
        }
        let deadline = self.desk.limits().1;
        self.desk.residues.drain(&leases, deadline);
        // The caller of the shutdown may not have waited for this thread.
        self.desk.redlock.observer().close();
    }
}
