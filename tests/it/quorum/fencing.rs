//! Tokens rise from holder to holder, whatever happens to the nodes in between.

use std::{env, time::Duration};

use distlock::{FencingToken, RedisMgr};
use fastrand::Rng;

use super::{config_medium_timeout, manager, nodes_holding, quorum};
use crate::{
    helpers::{CALL_LIMIT, UnwrapReleased, completes_within, fence_key, with_ttl},
    support::{CEILING, Fault, Nodes, any_request, command, off_by},
};

/// Run again with the seed of a failure: `DISTLOCK_SEED=… cargo test --test it tokens_rise`.
fn seed() -> u64 {
    env::var("DISTLOCK_SEED")
        .ok()
        .map_or_else(|| fastrand::u64(..), |seed| seed.parse().expect("a number"))
}

/// The token must be where every later quorum has a node.
#[track_caller]
fn expect_stored(nodes: &Nodes, token: FencingToken, name: &str, context: &str) {
    let stored = nodes.values(&fence_key(name));
    let stored_there =
        stored.iter().flatten().filter(|stored| **stored == token.to_string()).count();
    assert!(
        stored_there >= quorum(nodes),
        "{token} is stored on {stored_there}: {stored:?} {context}"
    );
}

/// Goal: whoever gets the lock later has the larger token, though every acquisition may be by
/// another majority. Method: random minorities are killed, stopped, slow, or restart without data,
/// one at a time, while others take the lock.
#[test]
fn tokens_rise_over_any_sequence_of_partial_failures() {
    let seed = seed();
    eprintln!("seed {seed}");
    let mut dice = Rng::with_seed(seed);
    let nodes = Nodes::start(5).behind_proxies(&[1, 3]);
    let managers: Vec<_> =
        (0..3).map(|_| RedisMgr::new(config_medium_timeout(&nodes)).unwrap()).collect();
    let mut last = 0;
    for round in 0..60 {
        // One that forgets everything, while all the others are there.
        if round % 3 == 0 {
            nodes.restart_empty(dice.usize(..5));
        }
        let mut order: Vec<usize> = (0..5).collect();
        dice.shuffle(&mut order);
        let away = &order[..dice.usize(..3)];
        let stopped = dice.bool();
        away.iter().for_each(|node| {
            if stopped {
                nodes.stop(*node)
            } else {
                nodes.server(*node).config_set("maxmemory", "1")
            }
        });
        let slow = nodes
            .proxy([1, 3][dice.usize(..2)])
            .on_request(any_request, Fault::DelayReply(Duration::from_millis(30)));
        let slow = slow.times(dice.usize(..3));
        for _ in 0..5 {
            let mgr = &managers[dice.usize(..3)];
            let guard = completes_within(CEILING, "locking", || mgr.lock("x"))
                .unwrap_or_else(|e| panic!("{e} (seed {seed})"));
            assert!(
                guard.fencing_token().as_u64() > last,
                "{} after {last} (seed {seed}, round {round})",
                guard.fencing_token()
            );
            last = guard.fencing_token().as_u64();
            completes_within(CEILING, "releasing", || guard.release().unwrap()).unwrap_released();
        }
        slow.disarm();
        slow.let_go();
        away.iter().for_each(|node| {
            if stopped {
                nodes.cont(*node)
            } else {
                nodes.server(*node).config_set("maxmemory", "0")
            }
        });
    }
}

/// Goal: clocks that disagree do not matter. Method: each node has given a token of its own, far
/// above its clock; the largest of a majority is not enough, so the nodes have to agree on one in a
/// second round.
#[test]
fn tokens_rise_although_the_counters_are_far_apart() {
    let nodes = Nodes::start(5);
    let (mgr, other) = (manager(&nodes), manager(&nodes));
    let first = mgr.lock("x").unwrap();
    let base = first.fencing_token().as_u64() + 3_600_000_000;
    first.release().unwrap().unwrap_released();
    for node in 0..5 {
        let ahead = base + 1_000_000 * node as u64;
        nodes.server(node).cli(&["SET", &fence_key("x"), &ahead.to_string()]);
    }
    let mut last = base;
    for round in 0..30 {
        // Another majority each time.
        let away = [round % 5, (round * 2 + 1) % 5];
        away.iter().for_each(|node| nodes.config_set(*node, "maxmemory", "1"));
        let guard =
            [&mgr, &other][round % 2].lock_with("x", &with_ttl(Duration::from_secs(30))).unwrap();
        assert!(
            guard.fencing_token().as_u64() > last,
            "{} after {last}, round {round}",
            guard.fencing_token()
        );
        last = guard.fencing_token().as_u64();
        expect_stored(
            &nodes,
            guard.fencing_token(),
            "x",
            &format!("round {round}, kept on {:?}", nodes_holding(&nodes, &guard)),
        );
        guard.release().unwrap().unwrap_released();
        away.iter().for_each(|node| nodes.config_set(*node, "maxmemory", "0"));
    }
}

#[test]
fn a_token_is_stored_by_a_majority_before_anybody_has_it() {
    let nodes = Nodes::start(5);
    let mgr = manager(&nodes);
    for round in 0..100 {
        let guard = mgr.lock("x").unwrap();
        expect_stored(&nodes, guard.fencing_token(), "x", &format!("round {round}"));
    }
}

/// Goal: a node whose clock shows a time that cannot be is left out, and has no part in the tokens
/// of the others. Method: it shows one beyond 2^53 us, and the others have been made to store such
/// a token before.
#[test]
fn a_node_whose_clock_cannot_be_stops_no_lock() {
    const AHEAD_S: i64 = 8_000_000_000;
    let nodes = Nodes::start(3).behind_proxies(&[2]);
    let first = manager(&nodes).lock("x").unwrap();
    let mut last = first.fencing_token();
    first.release().unwrap().unwrap_released();
    let absurd = last.as_u64() + 1_000_000 * AHEAD_S.unsigned_abs();
    (0..2).for_each(|node| {
        nodes.server(node).cli(&["SET", &fence_key("x"), &absurd.to_string()]);
    });
    nodes.proxy(2).on_request(command("TIME"), off_by(AHEAD_S)).forever();
    let mgr = RedisMgr::new(config_medium_timeout(&nodes)).unwrap();
    for round in 0..5 {
        let guard = mgr.try_lock_for("x", CALL_LIMIT).unwrap();
        let token = guard.fencing_token();
        assert!(last < token && token.as_u64() < absurd, "{token} after {last}");
        expect_stored(&nodes, token, "x", &format!("round {round}"));
        last = token;
        assert_eq!(nodes_holding(&nodes, &guard), [0, 1]);
        guard.release().unwrap().unwrap_released();
    }
}
