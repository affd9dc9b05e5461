//! Checks with loom every order in which threads can meet over a lease and over the renewer's
//! state; run them with `make loom`. The lease, the schedule, the registration and the waits of
//! both threads are the real ones. Between taking a renewal and receiving its reply the real worker
//! needs a server. Here that part is repeated from `worker.rs`.

use std::time::Duration;

use crossbeam_channel::TryRecvError;
use loom::{model, sync::Arc as Checked, thread};

use super::*;
use crate::core::{
    claim::{Claim, Grant, InFlight},
    id::generate_lock_id,
    key::LockKey,
    kind::LockKind,
    lock_lost::LockLost,
    quorum::{NodeDeadlines, NodeSet},
    token::FencingToken,
};

fn claim(ttl: Duration) -> Claim {
    let (key, kind) = (LockKey::new("", "x").unwrap(), LockKind::Mutex);
    Claim { key, id: generate_lock_id(), ttl, kind, token: 0 }
}

fn lease(ttl: Duration, deadline: Moment) -> Arc<Lease> {
    let mut node_deadlines = NodeDeadlines::new(1);
    node_deadlines.confirm(0, deadline);
    let long_ago = Moment::from_nanos(0);
    let in_flight =
        InFlight { broken_until: long_ago, unanswered: NodeSet::EMPTY, unanswered_until: long_ago };
    let may_hold = NodeSet::single(0);
    let grant = Grant {
        token: FencingToken(1),
        since: Moment::default(),
        node_deadlines,
        provisional: false,
        in_flight,
        may_hold,
        queue_entry: String::new(),
        is_token_in_fence: false,
    };
    Arc::new(Lease::new(claim(ttl), grant, long_ago))
}

fn far() -> Moment {
    clock::now().saturating_add(Duration::from_secs(3600))
}

/// A renewer whose threads are run by the test.
fn renewer() -> (Checked<LockRenewer>, Arc<Shared>) {
    let shared = Arc::new(Shared::default());
    let finished = Arc::<Slot<()>>::default();
    finished.fill(());
    (
        Checked::new(LockRenewer { shared: shared.clone(), timer: Mutex::new(None), finished }),
        shared,
    )
}

fn plan() -> RenewalPlan {
    RenewalPlan { renew: true, provisional: false, hold_until: Moment::NEVER }
}

/// The worker until it is stopped, and the end of the timer. Confirms each renewal, and returns
/// their number.
fn work(shared: &Shared, confirmed_until: Moment) -> usize {
    let mut renewals = 0;
    while let Some(due) = shared.wait_for_renewals(Moment::NEVER) {
        for (generation, lease) in due {
            if !shared.state.lock().schedule.contains(generation) {
                continue;
            }
            renewals += 1;
            let sent = clock::now();
            // Here the reply is in flight.
            if lease.update_deadline(confirmed_until, clock::now()) {
                // Not due again within this check.
                shared
                    .state
                    .lock()
                    .schedule
                    .on_renewed(generation, sent.saturating_add(Duration::from_secs(3600)));
            }
        }
    }
    for lease in shared.end_all().0 {
        lease.end(LeaseEnd::Lost(LockLost::Shutdown));
    }
    renewals
}

/// Of two threads that end a lease, one does. The loss is reported once, whenever the receiver is
/// requested.
#[test]
fn lease_ends_once_and_reports_its_loss_once() {
    model(|| {
        let lease = lease(Duration::from_secs(1), Moment::from_nanos(100));
        let ends = {
            let lease = lease.clone();
            thread::spawn(move || lease.end(LeaseEnd::Lost(LockLost::Gone)))
        };
        let expires = {
            let lease = lease.clone();
            thread::spawn(move || lease.expire(Moment::from_nanos(100)))
        };
        let first = lease.lost().try_recv();
        assert!(ends.join().unwrap() ^ expires.join().unwrap());
        let Some(LeaseEnd::Lost(why)) = lease.ended() else { panic!("the lease has not ended") };
        let reported: Vec<_> = first.into_iter().chain(lease.lost().try_recv()).collect();
        assert_eq!(reported, [why]);
        assert_eq!(lease.lost().try_recv(), Err(TryRecvError::Disconnected));
    });
}

#[test]
fn release_and_expiry_agree_on_how_lease_ended() {
    model(|| {
        let lease = lease(Duration::from_secs(1), Moment::from_nanos(100));
        let lost = lease.lost().clone();
        let releases = {
            let lease = lease.clone();
            thread::spawn(move || lease.end(LeaseEnd::Released))
        };
        let expired = lease.expire(Moment::from_nanos(200));
        assert!(releases.join().unwrap() != expired);
        assert_eq!(lost.try_recv().is_ok(), expired);
        assert_eq!(lost.try_recv(), Err(TryRecvError::Disconnected));
    });
}

/// A lease that was reported as not held is never held again, although a confirmation arrives at
/// that moment.
#[test]
fn lease_reported_as_lost_is_never_held_again() {
    model(|| {
        let lease = lease(Duration::from_secs(1), Moment::from_nanos(100));
        let revises = {
            let lease = lease.clone();
            thread::spawn(move || {
                lease.update_deadline(Moment::from_nanos(1_000), Moment::from_nanos(99))
            })
        };
        let looks = {
            let lease = lease.clone();
            thread::spawn(move || {
                [lease.is_held(Moment::from_nanos(100)), lease.is_held(Moment::from_nanos(101))]
            })
        };
        let [first, second] = looks.join().unwrap();
        let revised = revises.join().unwrap();
        assert!(first || !second, "a lost lease was held again");
        assert_eq!(first, revised);
        assert_eq!(lease.ended().is_none(), revised);
    });
}

/// A lease is released while its renewal is in flight.
#[test]
fn renewal_in_flight_does_not_revive_released_lease() {
    model(|| {
        let (renewer, shared) = renewer();
        let worker = thread::spawn(move || work(&shared, far()));
        // Due at once.
        let lease = lease(Duration::ZERO, far());
        let registration = renewer.register(&lease, plan());
        assert!(lease.end(LeaseEnd::Released));
        drop(registration);
        assert_eq!(lease.deadline(), Moment::from_nanos(0));
        renewer.stop(Moment::NEVER);
        assert!(worker.join().unwrap() <= 1);
        assert_eq!(
            (lease.ended(), lease.deadline()),
            (Some(LeaseEnd::Released), Moment::from_nanos(0))
        );
        assert_eq!(renewer.shared.state.lock().schedule.earliest_deadline(), Moment::NEVER);
    });
}

/// A lease that is registered while a thread is about to wait wakes it: the worker if it is due at
/// once, and the timer if it ends at once.
#[test]
fn threads_wake_for_lease_that_is_registered_as_they_park() {
    model(|| {
        let (renewer, shared) = renewer();
        let worker = {
            let shared = shared.clone();
            thread::spawn(move || {
                shared.wait_for_renewals(Moment::NEVER).map_or(0, |due| due.len())
            })
        };
        let registration = renewer.register(&lease(Duration::ZERO, far()), plan());
        assert_eq!(worker.join().unwrap(), 1);
        drop(registration);
        let timer =
            thread::spawn(move || shared.wait_for_deadline().map_or(0, |due| due.expired.len()));
        let past = Moment::from_nanos(100);
        let registration = renewer.register(&lease(Duration::from_secs(60), past), plan());
        assert_eq!(timer.join().unwrap(), 1);
        drop(registration);
    });
}

/// Hands the lock of a lease over to a next holder. Returns its lease.
fn hand_over(registration: &Registration, former: &Lease) -> Option<Arc<Lease>> {
    let next = Arc::new(former.successor(false, clock::now()));
    let is_registered = registration.replace(next.clone(), Moment::NEVER);
    (is_registered && former.end(LeaseEnd::Released)).then_some(next)
}

/// A lock is handed over while its renewal falls due: it is that of the former holder, who then
/// keeps the lock, or that of the next one.
#[test]
fn renewal_concerns_the_lease_that_goes_on() {
    model(|| {
        let (renewer, shared) = renewer();
        let worker = thread::spawn(move || shared.wait_for_renewals(Moment::NEVER).unwrap());
        // Due at once.
        let former = lease(Duration::ZERO, far());
        let registration = renewer.register(&former, plan()).unwrap();
        let next = hand_over(&registration, &former);
        let goes_on = next.as_ref().unwrap_or(&former);
        let due = worker.join().unwrap();
        assert!(Arc::ptr_eq(&due[0].1, goes_on) && goes_on.ended().is_none());
        drop(registration);
    });
}

/// A lock is handed over while the renewer stops. The lease that goes on ends with the others.
#[test]
fn lease_of_a_next_holder_ends_with_the_others() {
    model(|| {
        let (renewer, shared) = renewer();
        let former = lease(Duration::from_secs(60), far());
        let registration = renewer.register(&former, plan()).unwrap();
        let stops = thread::spawn(move || {
            shared.shut_down(Moment::NEVER);
            for lease in shared.end_all().0 {
                lease.end(LeaseEnd::Lost(LockLost::Shutdown));
            }
        });
        let next = hand_over(&registration, &former);
        stops.join().unwrap();
        let goes_on = next.as_ref().unwrap_or(&former);
        assert_eq!(goes_on.ended(), Some(LeaseEnd::Lost(LockLost::Shutdown)));
        drop(registration);
    });
}

/// A holder asks for a renewal while the worker is about to wait, and waits for the outcome.
#[test]
fn holder_learns_the_outcome_of_the_renewal_it_asks_for() {
    model(|| {
        let (renewer, shared) = renewer();
        let worker = thread::spawn(move || {
            let due = shared.wait_for_renewals(Moment::NEVER).unwrap();
            shared.state.lock().asked.on_outcome(due[0].0, clock::now(), Ok(()));
        });
        let lease = lease(Duration::from_secs(60), far());
        let registration = renewer.register(&lease, plan()).unwrap();
        let asked = registration.ask_renewal(&lease).unwrap();
        assert!(matches!(asked.wait_until(Moment::NEVER), Some(Ok(()))));
        worker.join().unwrap();
        drop(registration);
    });
}

/// A lease that is registered while the renewer stops is refused, or ends with the others.
#[test]
fn no_lease_survives_a_shutdown() {
    model(|| {
        let (renewer, shared) = renewer();
        let worker = thread::spawn(move || work(&shared, far()));
        let stops = {
            let renewer = renewer.clone();
            thread::spawn(move || renewer.stop(Moment::NEVER))
        };
        let lease = lease(Duration::from_secs(60), far());
        let kept = renewer.register(&lease, plan());
        stops.join().unwrap();
        worker.join().unwrap();
        match &kept {
            Some(_) => assert_eq!(lease.ended(), Some(LeaseEnd::Lost(LockLost::Shutdown))),
            None => assert_eq!(lease.ended(), None),
        }
        drop(kept);
    });
}
