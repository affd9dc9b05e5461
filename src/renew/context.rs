//! What both threads of the renewer need to end leases.

use std::sync::Arc;

use super::{ResidueSink, Shared, report_loss};
use crate::{
    backend::Backend,
    core::{
        lease::{Lease, LeaseEnd},
        lock_lost::LockLost,
    },
    observe::Observer,
    sys::display::Quoted,
};

#[derive(Clone)]
pub(super) struct Context {
    pub(super) backend: Arc<dyn Backend>,
    pub(super) observer: Arc<Observer>,
    pub(super) shared: Arc<Shared>,
    pub(super) residues: Arc<dyn ResidueSink>,
}

impl Context {
    pub(super) fn end_as_lost(&self, lease: &Lease, why: LockLost) {
        if lease.end(LeaseEnd::Lost(why.clone())) {
            log_safely!(
                warn,
                "lock {} at {} is lost: {why}",
                Quoted(lease.claim.key.name()),
                self.backend.label()
            );
        }
        report_loss(&self.observer, lease);
    }
}
