//! The timer thread: ends leases at their deadlines, and reports overdue renewals. On shutdown it
//! ends all leases.
//!
//! Invariant: until the shutdown it does no network I/O and waits for no other thread, so neither a
//! server nor a renewal delays the end of a lease.

use super::{DueDeadlines, context::Context};
use crate::{
    core::{
        lease::{Lease, LeaseEnd},
        lock_lost::LockLost,
    },
    sys::{clock, logging::isolate_panic, threads::Thread},
};

pub(super) struct Timer {
    pub(super) context: Context,
    /// The thread that renews.
    pub(super) worker: Thread,
}

impl Timer {
    pub(super) fn run(self) {
        while let Some(DueDeadlines { expired, overdue }) = self.context.shared.wait_for_deadline()
        {
            for (lease, why) in expired {
                isolate_panic(|| self.expire(&lease, why));
            }
            for lease in overdue {
                isolate_panic(|| self.report_overdue(&lease));
            }
        }
        self.shut_down();
    }

    /// Ends a lease that has expired. Also has its key released, because a renewal may have been
    /// applied without a reply.
    fn expire(&self, lease: &Lease, why: LockLost) {
        // The holder may have noticed first.
        self.context.end_as_lost(lease, why);
        if !matches!(lease.ended(), Some(LeaseEnd::Released)) {
            self.context.residues.clean_up(lease);
        }
    }

    fn report_overdue(&self, lease: &Lease) {
        let (claim, left) = (&lease.claim, lease.deadline().duration_since(clock::now()));
        self.context.observer.renewal_overdue(claim.key.name(), &claim.id, left);
    }

    fn shut_down(self) {
        let Timer { context, worker } = self;
        let (leases, deadline) = context.shared.end_all();
        for lease in &leases {
            // It may have expired before, while this thread slept.
            lease.expire(clock::now());
            isolate_panic(|| context.end_as_lost(lease, LockLost::Shutdown));
        }
        // The worker may be re-acquiring a lock on more nodes, which the release must include.
        worker.join();
        isolate_panic(|| context.residues.drain(&leases, deadline));
        // The caller of the shutdown may not have waited for this thread.
        context.observer.close();
    }
}
