//! Every order in which threads can meet over a lease and over the renewer's state; see `make loom`. The lease, the schedule,
//! the registration and the renewer's sleep are the real ones. What the thread does between taking a renewal up and
//! hearing of its answer takes a server, and is done here as `worker.rs` does it.

use std::time::Duration;

use crossbeam_channel::TryRecvError;
use loom::{model, sync::Arc as Checked, thread};

use super::*;
use crate::{
    error::LockLost,
    grant::{Grant, Late},
    id::generate_lock_id,
    key::LockKey,
    observer::Hold,
    redlock::Votes,
    sync::atomic::{AtomicBool, Ordering},
    token::FencingToken,
};

fn claim(ttl: Duration) -> Claim {
    Claim { key: LockKey::new("", "x").unwrap(), id: generate_lock_id(), ttl }
}

fn lease(ttl: Duration, deadline: Moment) -> Arc<Lease> {
    let mut votes = Votes::new(1);
    votes.confirm(0, deadline);
    let long_ago = Moment::from_nanos(0);
    let late = Late { broken_until: long_ago, open: NodeSet::NONE, open_until: long_ago };
    let nodes = NodeSet::only(0);
    let grant = Grant { token: FencingToken(1), votes, provisional: false, late, nodes, place: String::new() };
    Arc::new(Lease::open(claim(ttl), &grant, Hold::since(long_ago)))
}

fn far() -> Moment {
    clock::now().saturating_add(Duration::from_secs(3600))
}

/// A renewer whose thread is run by the test.
fn renewer() -> (Checked<LockRenewer>, Arc<Shared>) {
    let shared = Arc::new(Shared { state: Mutex::default(), changed: Condvar::new() });
    (
        Checked::new(LockRenewer { shared: shared.clone(), thread: Mutex::new(None), own: None, ended: bounded(0).1 }),
        shared,
    )
}

fn upkeep() -> Upkeep {
    Upkeep { votes: Votes::new(1), renew: true, provisional: false, hold_until: Moment::NEVER }
}

/// The thread of the renewer, until it is stopped: each renewal is confirmed. Returns how many there were.
fn work(shared: &Shared, confirmed_until: Moment) -> usize {
    let mut renewals = 0;
    while let Some(step) = shared.next() {
        for (generation, lease) in step.renew {
            if !shared.state.lock().schedule.is_kept(generation) {
                continue;
            }
            renewals += 1;
            let sent = clock::now();
            // Here the answer is on its way.
            let heard = shared.state.lock().schedule.heard(generation, &[(0, Some(confirmed_until))]);
            let Some(Some(validity)) = heard else { continue };
            if lease.revise(validity, clock::now()) {
                // Not due again, as far as this is looked at.
                shared.state.lock().schedule.renewed(generation, sent.saturating_add(Duration::from_secs(3600)));
            }
        }
    }
    let leases = shared.state.lock().schedule.take_all();
    for lease in leases {
        lease.end(End::Lost(LockLost::Shutdown));
    }
    renewals
}

/// Of two that end a lease one does; it is told once, whenever somebody begins to listen.
#[test]
fn a_lease_ends_once() {
    model(|| {
        let lease = lease(Duration::from_secs(1), Moment::from_nanos(100));
        let ends = {
            let lease = lease.clone();
            thread::spawn(move || lease.end(End::Lost(LockLost::Gone)))
        };
        let expires = {
            let lease = lease.clone();
            thread::spawn(move || lease.expire(Moment::from_nanos(100)))
        };
        let first = lease.lost().try_recv();
        assert!(ends.join().unwrap() ^ expires.join().unwrap());
        let Some(End::Lost(why)) = lease.ended() else { panic!("it has not ended") };
        let told: Vec<_> = first.into_iter().chain(lease.lost().try_recv()).collect();
        assert_eq!(told, [why]);
        assert_eq!(lease.lost().try_recv(), Err(TryRecvError::Disconnected));
    });
}

#[test]
fn a_release_and_a_loss_agree() {
    model(|| {
        let lease = lease(Duration::from_secs(1), Moment::from_nanos(100));
        let lost = lease.lost().clone();
        let releases = {
            let lease = lease.clone();
            thread::spawn(move || lease.end(End::Released))
        };
        let expired = lease.expire(Moment::from_nanos(200));
        assert!(releases.join().unwrap() != expired);
        assert_eq!(lost.try_recv().is_ok(), expired);
        assert_eq!(lost.try_recv(), Err(TryRecvError::Disconnected));
    });
}

/// Who was told "not held" is never told "held" again, although a confirmation comes at that moment.
#[test]
fn nobody_who_was_told_no_is_told_yes() {
    model(|| {
        let lease = lease(Duration::from_secs(1), Moment::from_nanos(100));
        let revises = {
            let lease = lease.clone();
            thread::spawn(move || lease.revise(Moment::from_nanos(1_000), Moment::from_nanos(99)))
        };
        let looks = {
            let lease = lease.clone();
            thread::spawn(move || [lease.is_held(Moment::from_nanos(100)), lease.is_held(Moment::from_nanos(101))])
        };
        let [first, second] = looks.join().unwrap();
        let revised = revises.join().unwrap();
        assert!(first || !second, "it came back from the dead");
        assert_eq!(first, revised);
        assert_eq!(lease.ended().is_none(), revised);
    });
}

/// A lease is let go of while its renewal is under way.
#[test]
fn a_renewal_in_flight_brings_nothing_back() {
    model(|| {
        let (renewer, shared) = renewer();
        let worker = thread::spawn(move || work(&shared, far()));
        // Due at once.
        let lease = lease(Duration::ZERO, far());
        let registration = renewer.keep(&lease, upkeep());
        assert!(lease.end(End::Released));
        drop(registration);
        assert_eq!(lease.deadline(), Moment::from_nanos(0));
        renewer.stop(Moment::NEVER);
        assert!(worker.join().unwrap() <= 1);
        assert_eq!((lease.ended(), lease.deadline()), (Some(End::Released), Moment::from_nanos(0)));
        assert_eq!(renewer.shared.state.lock().schedule.earliest(), Moment::NEVER);
    });
}

/// Whatever is brought while the thread lies down to sleep wakes it.
#[test]
fn the_renewer_sleeps_through_nothing() {
    model(|| {
        let (renewer, shared) = renewer();
        let undone = Checked::new(AtomicBool::new(false));
        let worker = {
            let undone = undone.clone();
            thread::spawn(move || {
                let step = shared.next();
                undone.store(step.is_some_and(|step| !step.undos.is_empty()), Ordering::Release);
            })
        };
        assert!(renewer.undo(&claim(Duration::from_secs(1)), "", NodeSet::only(0), Moment::from_nanos(0)));
        worker.join().unwrap();
        assert!(undone.load(Ordering::Acquire));
    });
}

/// Whoever keeps a lease while the renewer is stopped is turned away, or its lease ends with the others.
#[test]
fn no_lease_outlives_a_shutdown() {
    model(|| {
        let (renewer, shared) = renewer();
        let worker = thread::spawn(move || work(&shared, far()));
        let stops = {
            let renewer = renewer.clone();
            thread::spawn(move || renewer.stop(Moment::NEVER))
        };
        let lease = lease(Duration::from_secs(60), far());
        let kept = renewer.keep(&lease, upkeep());
        stops.join().unwrap();
        worker.join().unwrap();
        match &kept {
            Some(_) => assert_eq!(lease.ended(), Some(End::Lost(LockLost::Shutdown))),
            None => assert_eq!(lease.ended(), None),
        }
        drop(kept);
    });
}
