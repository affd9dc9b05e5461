//! Fencing tokens increase from holder to holder, whichever nodes fail in between.

use std::{env, time::Duration};

use distlock::{FencingToken, RedisMgr};
use fastrand::Rng;

use super::{config_medium_timeout, manager, nodes_holding, quorum};
use crate::{
    helpers::{CALL_LIMIT, UnwrapReleased, completes_within, token_key, with_ttl},
    support::{Fault, Nodes, TEST_TIMEOUT, any_request, command, off_by},
};

/// To repeat a failure, use its seed:
/// `DISTLOCK_SEED=… cargo test --all-features --test it tokens_rise`.
fn seed() -> u64 {
    env::var("DISTLOCK_SEED")
        .ok()
        .map_or_else(|| fastrand::u64(..), |seed| seed.parse().expect("a number"))
}

/// The token must be stored on a quorum, because every later quorum includes one of these nodes.
#[track_caller]
fn expect_stored(nodes: &Nodes, token: FencingToken, name: &str, context: &str) {
    let stored = nodes.values(&token_key(name));
    let stored_there =
        stored.iter().flatten().filter(|stored| **stored == token.to_string()).count();
    assert!(
        stored_there >= quorum(nodes),
        "{token} is stored on {stored_there}: {stored:?} {context}"
    );
}

/// Goal: each grant has a larger token than the one before, although each may come from another
/// quorum. Method: random minorities are slow, stopped, refuse writes, or restart without data
/// while managers acquire the lock.
///
/// Fault: F87
#[test]
fn tokens_rise_over_random_partial_failures() {
    let seed = seed();
    eprintln!("seed {seed}");
    let mut rng = Rng::with_seed(seed);
    let nodes = Nodes::start(5).behind_proxies(&[1, 3]);
    let managers: Vec<_> =
        (0..3).map(|_| RedisMgr::new(config_medium_timeout(&nodes)).unwrap()).collect();
    let mut last = 0;
    for round in 0..60 {
        // A node loses its data while all others are available.
        if round % 3 == 0 {
            nodes.restart_empty(rng.usize(..5));
        }
        let mut order: Vec<usize> = (0..5).collect();
        rng.shuffle(&mut order);
        let failed = &order[..rng.usize(..3)];
        let stopped = rng.bool();
        failed.iter().for_each(|node| {
            if stopped {
                nodes.stop(*node)
            } else {
                nodes.server(*node).config_set("maxmemory", "1")
            }
        });
        let slow = nodes
            .proxy([1, 3][rng.usize(..2)])
            .on_request(any_request, Fault::DelayReply(Duration::from_millis(30)));
        let slow = slow.times(rng.usize(..3));
        for _ in 0..5 {
            let mgr = &managers[rng.usize(..3)];
            let guard = completes_within(TEST_TIMEOUT, "lock", || mgr.lock("x"))
                .unwrap_or_else(|e| panic!("{e} (seed {seed})"));
            assert!(
                guard.fencing_token().as_u64() > last,
                "{} after {last} (seed {seed}, round {round})",
                guard.fencing_token()
            );
            last = guard.fencing_token().as_u64();
            completes_within(TEST_TIMEOUT, "release", || guard.release().unwrap())
                .unwrap_released();
        }
        slow.disarm();
        slow.release();
        failed.iter().for_each(|node| {
            if stopped {
                nodes.cont(*node)
            } else {
                nodes.server(*node).config_set("maxmemory", "0")
            }
        });
    }
}

/// Goal: tokens do not depend on synchronous clocks. Method: the stored tokens of the nodes differ,
/// and are far ahead of the clocks. The largest token of a quorum is not enough then: the nodes
/// must agree on a token in a second round.
///
/// Fault: F87
/// Promise: P3
#[test]
fn tokens_rise_if_stored_tokens_of_nodes_differ() {
    let nodes = Nodes::start(5);
    let (mgr, other) = (manager(&nodes), manager(&nodes));
    let first = mgr.lock("x").unwrap();
    let base = first.fencing_token().as_u64() + 3_600_000_000;
    first.release().unwrap().unwrap_released();
    for node in 0..5 {
        let ahead = base + 1_000_000 * node as u64;
        nodes.server(node).cli(&["SET", &token_key("x"), &ahead.to_string()]);
    }
    let mut last = base;
    for round in 0..30 {
        // A different quorum each time.
        let failed = [round % 5, (round * 2 + 1) % 5];
        failed.iter().for_each(|node| nodes.config_set(*node, "maxmemory", "1"));
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
            &format!("round {round}, held on {:?}", nodes_holding(&nodes, &guard)),
        );
        guard.release().unwrap().unwrap_released();
        failed.iter().for_each(|node| nodes.config_set(*node, "maxmemory", "0"));
    }
}

/// Promise: P3
#[test]
fn token_is_on_a_quorum_before_it_is_returned() {
    let nodes = Nodes::start(5);
    let mgr = manager(&nodes);
    for round in 0..100 {
        let guard = mgr.lock("x").unwrap();
        expect_stored(&nodes, guard.fencing_token(), "x", &format!("round {round}"));
    }
}

/// Goal: a node with an impossible clock is left out and does not affect the tokens of the others.
/// Method: its clock is beyond 2^53 µs, and the others have stored such a token.
///
/// Fault: N39
#[test]
fn node_with_an_impossible_clock_is_left_out() {
    const AHEAD_S: i64 = 8_000_000_000;
    let nodes = Nodes::start(3).behind_proxies(&[2]);
    let first = manager(&nodes).lock("x").unwrap();
    let mut last = first.fencing_token();
    first.release().unwrap().unwrap_released();
    let absurd = last.as_u64() + 1_000_000 * AHEAD_S.unsigned_abs();
    (0..2).for_each(|node| {
        nodes.server(node).cli(&["SET", &token_key("x"), &absurd.to_string()]);
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
