//! Shutdown of the renewer: ends all leases, and has their locks released.

use super::{report_loss, worker::Worker};
use crate::core::{lease::LeaseEnd, lock_lost::LockLost};

impl Worker {
    pub(super) fn drain(mut self) {
        let leases = self.desk.shared.state.lock().schedule.take_all();
        for lease in &leases {
            lease.end(LeaseEnd::Lost(LockLost::Shutdown));
            self.isolate_panic(|worker| report_loss(worker.desk.redlock.observer(), lease));
        }
        let deadline = self.desk.limits().1;
        self.desk.residues.drain(&leases, deadline);
        // The caller of the shutdown may not have waited for this thread.
        self.desk.redlock.observer().close();
    }
}
