//! The timer thread: ends leases at their deadlines, and reports overdue renewals. On shutdown it
//! ends all leases.
//!
//! Invariant: until the shutdown it does no network I/O and waits for no other thread, so neither a
//! server nor a renewal delays the end of a lease.

use super::{context::Context, schedule::DueDeadlines};
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
            self.context.clean_up(lease);
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
        isolate_panic(|| context.cleaner.drain(&leases, deadline));
        // The caller of the shutdown may not have waited for this thread.
        context.observer.close();
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use super::{
        super::{
            Shared,
            schedule::tests::{lease, plan},
        },
        *,
    };
    use crate::{
        backend::redis::{Endpoint, RedisBackend, RedisSettings},
        cleanup::Cleaner,
        observe::Observer,
        sys::threads,
    };

    /// The timer may not have run since the lease expired. Other clients may have had the lock
    /// since then, so the holder must not learn that it had it until the shutdown.
    #[test]
    fn lease_that_expired_before_a_shutdown_is_lost_as_expired() {
        let endpoint = Arc::new(Endpoint::parse("redis://127.0.0.1:1").unwrap());
        let observer = Observer::start(Vec::new(), endpoint.label.clone(), 1, false).unwrap();
        let settings = RedisSettings { pool_size: 1, ..RedisSettings::default() };
        let backend = Arc::new(RedisBackend::new(endpoint, settings, observer.clone()).unwrap());
        let shared = Arc::new(Shared::default());
        let cleaner = Arc::new(Cleaner::new(backend.clone()));
        let context = Context { backend, observer, shared: shared.clone(), cleaner };
        let timer = Timer { context, worker: threads::spawn("worker", || ()).unwrap() };
        let now = clock::now();
        let in_an_hour = now.saturating_add(Duration::from_secs(3600)).as_nanos() / 1_000_000;
        let [expired, valid] = [1, in_an_hour].map(|deadline| lease(1_000, deadline));
        for lease in [&expired, &valid] {
            shared.state.lock().schedule.insert(lease.clone(), plan(), now);
        }
        shared.shut_down(now);
        timer.run();
        let why = |lease: &Lease| lease.reported_loss(now).map(|(why, _)| why);
        assert_eq!(why(&expired), Some(LockLost::Expired));
        assert_eq!(why(&valid), Some(LockLost::Shutdown));
    }
}
