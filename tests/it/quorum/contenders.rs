//! Many contenders for one lock at once: each takes votes from the others, and all make progress.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::Duration,
};

use distlock::{FencingToken, LockGuard, LockOptions, RedisMgr};
use parking_lot::Mutex;

use super::{
    config_long_timeouts, manager, next_locked, release, spawn_worker, wait_until_free_everywhere,
};
use crate::{
    helpers::{SECOND, UnwrapReleased},
    support::{Nodes, Worker},
};

const CONTENDERS: usize = 5;
const ROUNDS: u64 = 200;

/// A resource that records the token of its last holder and allows one holder at a time.
#[derive(Default)]
struct Resource {
    inside: Mutex<()>,
    last: Mutex<Option<FencingToken>>,
}

impl Resource {
    fn enter(&self, guard: &LockGuard) {
        let alone = self.inside.try_lock().expect("two holders at once");
        let before = self.last.lock().replace(guard.fencing_token());
        assert!(before < Some(guard.fencing_token()), "{before:?} before {guard:?}");
        thread::yield_now();
        assert!(guard.is_held());
        drop(alone);
    }
}

/// Contenders, each with its own manager, acquire the lock `rounds` times in total; returns the
/// share of each.
fn contend(
    managers: &[RedisMgr],
    rounds: u64,
    take: impl Fn(&RedisMgr) -> Option<LockGuard> + Sync,
) -> Vec<u64> {
    let (resource, total) = (Resource::default(), AtomicU64::new(0));
    thread::scope(|threads| {
        let contender = |mgr| {
            let (resource, total, take) = (&resource, &total, &take);
            threads.spawn(move || {
                let mut own = 0;
                while total.load(Ordering::SeqCst) < rounds {
                    let Some(guard) = take(mgr) else { continue };
                    resource.enter(&guard);
                    guard.release().unwrap().unwrap_released();
                    total.fetch_add(1, Ordering::SeqCst);
                    own += 1;
                }
                own
            })
        };
        let contenders: Vec<_> = managers.iter().map(contender).collect();
        contenders.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn managers(nodes: &Nodes) -> Vec<RedisMgr> {
    (0..CONTENDERS).map(|_| manager(nodes)).collect()
}

/// Fault: F83
#[test]
fn five_waiters_get_fair_shares() {
    let nodes = Nodes::start(5);
    let shares = contend(&managers(&nodes), ROUNDS, |mgr| Some(mgr.lock("x").unwrap()));
    assert!(shares.iter().sum::<u64>() >= ROUNDS);
    assert!(shares.iter().all(|share| *share >= ROUNDS / 20), "starved: {shares:?}");
    wait_until_free_everywhere(&nodes, "x");
}

/// Each program names the nodes in an order of its own. Goal: all queue on the same node
/// nevertheless. Otherwise each head of a queue has one vote, and nobody gets the lock.
///
/// Fault: N140
#[test]
fn order_in_which_nodes_are_named_means_nothing() {
    let nodes = Nodes::start(3);
    let managers: Vec<_> = (0..3)
        .map(|first| {
            let urls = [first, first + 1, first + 2].map(|node| nodes.url(node % 3));
            let config = crate::helpers::config_long_timeouts(urls.join(","));
            RedisMgr::new(config.quarantine(Duration::ZERO)).unwrap()
        })
        .collect();
    let shares = contend(&managers, ROUNDS, |mgr| Some(mgr.lock("x").unwrap()));
    assert!(shares.iter().all(|share| *share >= ROUNDS / 20), "starved: {shares:?}");
    wait_until_free_everywhere(&nodes, "x");
}

/// `try_lock` succeeds for one of the callers if nobody holds the lock: callers must not defeat
/// each other forever.
///
/// Fault: F83
#[test]
fn five_try_lock_callers_make_progress() {
    let nodes = Nodes::start(5);
    let shares = contend(&managers(&nodes), ROUNDS, |mgr| match mgr.try_lock("x") {
        Ok(guard) => Some(guard),
        Err(error) => {
            assert!(error.is_contended(), "{error:?}");
            None
        }
    });
    assert!(shares.iter().sum::<u64>() >= ROUNDS);
    assert!(shares.iter().all(|share| *share > 0), "starved: {shares:?}");
    wait_until_free_everywhere(&nodes, "x");
}

/// Some contenders wait without a limit, some for a while, some not at all.
#[test]
fn waiters_and_try_lock_callers_share_the_lock() {
    let nodes = Nodes::start(5);
    let managers = managers(&nodes);
    let wait_limit = |mgr: &RedisMgr| {
        let number = managers.iter().position(|other| std::ptr::eq(mgr, other)).unwrap();
        [
            None,
            Some(Duration::from_secs(20)),
            Some(Duration::from_millis(1)),
            Some(Duration::ZERO),
            None,
        ][number]
    };
    let shares = contend(&managers, ROUNDS, |mgr| {
        let options =
            wait_limit(mgr).map_or(LockOptions::new(), |wait| LockOptions::new().wait(wait));
        match mgr.lock_with("x", &options) {
            Ok(guard) => Some(guard),
            Err(error) => {
                assert!(error.is_contended(), "{error:?}");
                None
            }
        }
    });
    for waiter in [0, 1, 4] {
        assert!(shares[waiter] >= ROUNDS / 20, "starved: {shares:?}");
    }
    wait_until_free_everywhere(&nodes, "x");
}

/// The failed nodes include the queue node.
#[test]
fn five_waiters_make_progress_with_failed_nodes() {
    for failed in [&[0][..], &[0, 3], &[4]] {
        let nodes = Nodes::start(5);
        // Short, because a waiter needs this time to notice that its node has stopped. Long enough
        // for a release on a slow machine.
        let config = || config_long_timeouts(&nodes).operation_timeout(3 * SECOND);
        let managers: Vec<_> = (0..CONTENDERS).map(|_| RedisMgr::new(config()).unwrap()).collect();
        managers.iter().for_each(|mgr| drop(mgr.lock("early").unwrap()));
        failed
            .iter()
            .for_each(|node| if *node == 0 { nodes.stop(*node) } else { nodes.kill(*node) });
        let shares = contend(&managers, ROUNDS / 2, |mgr| Some(mgr.lock("x").unwrap()));
        assert!(shares.iter().all(|share| *share > 0), "{failed:?}: starved: {shares:?}");
        wait_until_free_everywhere(&nodes, "x");
    }
}

#[test]
fn contenders_for_different_locks_are_independent() {
    let nodes = Nodes::start(3);
    let managers = managers(&nodes);
    let totals: Vec<_> = (0..8).map(|_| Mutex::new(0)).collect();
    thread::scope(|threads| {
        for (number, mgr) in managers.iter().cycle().take(10).enumerate() {
            let totals = &totals;
            threads.spawn(move || {
                for round in 0..40 {
                    let which = (number * 3 + round) % totals.len();
                    let guard = mgr.lock(&format!("x{which}")).unwrap();
                    *totals[which].try_lock().expect("two holders at once") += 1;
                    guard.release().unwrap().unwrap_released();
                }
            });
        }
    });
    assert_eq!(totals.iter().map(|total| *total.lock()).sum::<u64>(), 400);
}

/// Each process wants the lock again as soon as it has released it.
#[test]
fn five_processes_get_fair_shares() {
    let nodes = Nodes::start(5);
    let mgr = RedisMgr::new(config_long_timeouts(&nodes)).unwrap();
    let mut workers: Vec<Worker> = (0..CONTENDERS).map(|_| spawn_worker(&nodes, &[])).collect();
    workers.iter_mut().for_each(|worker| worker.send("lock x"));
    let (mut shares, mut last) = ([0_u64; CONTENDERS], 0);
    for _ in 0..50 {
        let (served, token, id) = next_locked(workers.iter(), "x");
        assert!(token > last, "{token} after {last}");
        assert_eq!(mgr.holder("x").unwrap().unwrap().id(), id, "two holders at once");
        (last, shares[served]) = (token, shares[served] + 1);
        release(&mut workers[served], "x");
        workers[served].send("lock x");
    }
    assert!(shares.iter().all(|share| *share >= 5), "starved: {shares:?}");
}
