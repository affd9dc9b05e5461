//! Many who want the same lock at once: they take the votes from each other, and make progress all
//! the same.

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

/// What all that hold the lock one after the other leave behind.
#[derive(Default)]
struct Resource {
    inside: Mutex<()>,
    last: Mutex<Option<FencingToken>>,
}

impl Resource {
    fn enter(&self, guard: &LockGuard) {
        let alone = self.inside.try_lock().expect("two are inside");
        let before = self.last.lock().replace(guard.fencing_token());
        assert!(before < Some(guard.fencing_token()), "{before:?} before {guard:?}");
        thread::yield_now();
        assert!(guard.is_held());
        drop(alone);
    }
}

/// Contenders, each with a manager of its own, take the lock until all have it `rounds` times
/// together; returns their shares.
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

#[test]
fn five_who_wait_have_it_in_turn() {
    let nodes = Nodes::start(5);
    let shares = contend(&managers(&nodes), ROUNDS, |mgr| Some(mgr.lock("x").unwrap()));
    assert!(shares.iter().sum::<u64>() >= ROUNDS);
    assert!(shares.iter().all(|share| *share >= ROUNDS / 20), "somebody starves: {shares:?}");
    wait_until_free_everywhere(&nodes, "x");
}

/// Who only tries gets the lock as soon as nobody has it: that all fail at once, for ever, must not
/// happen.
#[test]
fn five_who_only_try_make_progress() {
    let nodes = Nodes::start(5);
    let shares = contend(&managers(&nodes), ROUNDS, |mgr| match mgr.try_lock("x") {
        Ok(guard) => Some(guard),
        Err(error) => {
            assert!(error.is_contended(), "{error:?}");
            None
        }
    });
    assert!(shares.iter().sum::<u64>() >= ROUNDS);
    assert!(shares.iter().all(|share| *share > 0), "somebody starves: {shares:?}");
    wait_until_free_everywhere(&nodes, "x");
}

/// Some wait, and some are in a hurry.
#[test]
fn those_who_wait_and_those_who_try_share_it() {
    let nodes = Nodes::start(5);
    let managers = managers(&nodes);
    let patience = |mgr: &RedisMgr| {
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
            patience(mgr).map_or(LockOptions::new(), |wait| LockOptions::new().wait(wait));
        match mgr.lock_with("x", &options) {
            Ok(guard) => Some(guard),
            Err(error) => {
                assert!(error.is_contended(), "{error:?}");
                None
            }
        }
    });
    for waits in [0, 1, 4] {
        assert!(shares[waits] >= ROUNDS / 20, "somebody starves: {shares:?}");
    }
    wait_until_free_everywhere(&nodes, "x");
}

/// With a node away, and the one with the line at that.
#[test]
fn five_contend_over_the_nodes_that_are_left() {
    for away in [&[0][..], &[0, 3], &[4]] {
        let nodes = Nodes::start(5);
        // Short, for a waiter finds out by it that its node has stopped; long enough for a slow
        // machine to release.
        let config = || config_long_timeouts(&nodes).operation_timeout(3 * SECOND);
        let managers: Vec<_> = (0..CONTENDERS).map(|_| RedisMgr::new(config()).unwrap()).collect();
        managers.iter().for_each(|mgr| drop(mgr.lock("early").unwrap()));
        away.iter().for_each(|node| if *node == 0 { nodes.stop(*node) } else { nodes.kill(*node) });
        let shares = contend(&managers, ROUNDS / 2, |mgr| Some(mgr.lock("x").unwrap()));
        assert!(shares.iter().all(|share| *share > 0), "{away:?}: somebody starves: {shares:?}");
        wait_until_free_everywhere(&nodes, "x");
    }
}

#[test]
fn contenders_for_many_locks_do_not_mind_each_other() {
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
                    *totals[which].try_lock().expect("two are inside") += 1;
                    guard.release().unwrap().unwrap_released();
                }
            });
        }
    });
    assert_eq!(totals.iter().map(|total| *total.lock()).sum::<u64>(), 400);
}

/// Processes that want it again as soon as they have released it.
#[test]
fn five_processes_have_it_in_turn() {
    let nodes = Nodes::start(5);
    let mgr = RedisMgr::new(config_long_timeouts(&nodes)).unwrap();
    let mut hands: Vec<Worker> = (0..CONTENDERS).map(|_| spawn_worker(&nodes, &[])).collect();
    hands.iter_mut().for_each(|worker| worker.send("lock x"));
    let (mut shares, mut last) = ([0_u64; CONTENDERS], 0);
    for _ in 0..50 {
        let (served, token, id) = next_locked(hands.iter(), "x");
        assert!(token > last, "{token} after {last}");
        assert_eq!(mgr.holder("x").unwrap().unwrap().id(), id, "two believe in it");
        (last, shares[served]) = (token, shares[served] + 1);
        release(&mut hands[served], "x");
        hands[served].send("lock x");
    }
    assert!(shares.iter().all(|share| *share >= 5), "somebody starves: {shares:?}");
}
