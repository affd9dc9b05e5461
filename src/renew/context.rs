//! What both threads of the renewer need to end leases.

use std::sync::Arc;

use super::{report_loss, sleep_until_due::Shared};
use crate::{
    backend::Backend,
    cleanup::Cleaner,
    core::{
        lease::{Lease, LeaseEnd},
        lock_lost::LockLost,
    },
    observe::Observer,
};

#[derive(Clone)]
pub(super) struct Context {
    pub(super) backend: Arc<dyn Backend>,
    pub(super) observer: Arc<Observer>,
    pub(super) shared: Arc<Shared>,
    pub(super) cleaner: Arc<Cleaner>,
}

impl Context {
    /// Ends a lease that has been removed from the schedule, unless it has ended.
    pub(super) fn end_as_lost(&self, lease: &Lease, why: LockLost) {
        lease.end(LeaseEnd::Lost(why));
        report_loss(&self.observer, lease);
        self.shared.state.lock().asked.on_ended();
    }

    /// Has what an ended lease may have left cleaned up.
    pub(super) fn clean_up(&self, lease: &Lease) {
        // After a shutdown, it is left to expire.
        let _ = self.cleaner.clean_up_lease(lease);
    }
}
