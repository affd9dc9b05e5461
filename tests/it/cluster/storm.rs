//! Many waiters on all nodes, while the slots of their locks move and masters change.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use parking_lot::Mutex;

use super::*;
use crate::{contention::pause, helpers::timed};

/// Managers, each as another process would have it, and threads of each.
const MANAGERS: usize = 4;
const THREADS: usize = 6;
/// Moves of slots; one in `FAILOVER_EVERY` of them is a failover of a master instead.
const MOVES: usize = 60;
const FAILOVER_EVERY: usize = 15;

/// What holders of one name see of each other.
#[derive(Default)]
struct Resource {
    inside: Mutex<Option<Arc<LockGuard>>>,
    last_token: AtomicU64,
}

/// Goal: no two valid leases of one name, tokens that rise, and nobody left behind.
///
/// Fault: N174, N175
/// Promise: P1, P3
#[test]
fn locks_exclude_each_other_while_slots_move_and_masters_change() {
    let cluster = Cluster::with_replicas(3);
    let managers: Vec<_> = (0..MANAGERS)
        .map(|_| {
            let config = config(&cluster).claim_window(SECOND).ttl(10 * SECOND);
            RedisMgr::new(config).unwrap()
        })
        .collect();
    let resources: Vec<_> = NAMES.iter().map(|_| Resource::default()).collect();
    let (ended, locked, longest) = (AtomicBool::new(false), AtomicU64::new(0), Mutex::default());
    thread::scope(|threads| {
        for (number, mgr) in managers.iter().cycle().take(MANAGERS * THREADS).enumerate() {
            let (resources, ended, locked, longest) = (&resources, &ended, &locked, &longest);
            threads.spawn(move || {
                let mut rng = fastrand::Rng::with_seed(number as u64);
                while !ended.load(Ordering::Acquire) {
                    let at = rng.usize(..NAMES.len());
                    let waited = use_lock(mgr, NAMES[at], &resources[at], &mut rng, ended);
                    let mut longest: parking_lot::MutexGuard<'_, Duration> = longest.lock();
                    *longest = (*longest).max(waited);
                    locked.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let moved = threads.spawn(|| disturb(&cluster)).join();
        ended.store(true, Ordering::Release);
        moved.unwrap();
    });
    println!("{} locks, longest wait {:?}", locked.into_inner(), longest.lock());
    for name in NAMES {
        drop(lock_eventually(&managers[0], name));
    }
}

/// Returns how long the call took.
fn use_lock(
    mgr: &RedisMgr,
    name: &str,
    resource: &Resource,
    rng: &mut fastrand::Rng,
    ended: &AtomicBool,
) -> Duration {
    let (guard, waited) = timed(|| {
        loop {
            match mgr.lock(name) {
                Ok(guard) => break Some(Arc::new(guard)),
                Err(error) => assert!(error.is_unavailable(), "{name}: {error:?}"),
            }
            // Otherwise a cluster that stays broken would keep the test from failing.
            if ended.load(Ordering::Acquire) {
                break None;
            }
        }
    });
    let Some(guard) = guard else { return waited };
    {
        let mut inside = resource.inside.lock();
        if guard.is_held() {
            let other = inside.as_ref().filter(|other| other.is_held());
            assert!(other.is_none(), "two holders: {other:?} and {guard:?}");
            let last = resource.last_token.swap(guard.fencing_token().as_u64(), Ordering::Relaxed);
            assert!(guard.fencing_token().as_u64() > last, "{last} {guard:?}");
        }
        *inside = Some(guard.clone());
    }
    if rng.bool() {
        pause(rng.u64(..3));
    }
    {
        let mut inside = resource.inside.lock();
        if inside.as_ref().is_some_and(|inside| Arc::ptr_eq(inside, &guard)) {
            *inside = None;
        }
    }
    // If it fails, the manager releases it in the background.
    let _ = Arc::into_inner(guard).map(LockGuard::release);
    waited
}

fn disturb(cluster: &Cluster) {
    let mut rng = fastrand::Rng::with_seed(7);
    for round in 1..=MOVES {
        let slot = slot(cluster, NAMES[rng.usize(..NAMES.len())]);
        if round % FAILOVER_EVERY == 0 {
            cluster.fail_over(cluster.owner(slot));
        } else {
            cluster.move_slot(slot);
        }
    }
}
