//! The simulator: the library as it is, on servers, clocks and a network that exist only here, and a scheduler that a seed
//! decides for. `docs/simulator.md` tells how it works and how to replay a seed.

#![expect(clippy::disallowed_methods, reason = "how many seeds fit into a time is for people")]

#[path = "sim/calm.rs"]
mod calm;
#[path = "sim/differential.rs"]
mod differential;
#[path = "sim/enemy.rs"]
mod enemy;
#[path = "sim/fiber.rs"]
mod fiber;
#[path = "sim/judge.rs"]
mod judge;
#[path = "sim/net.rs"]
mod net;
#[path = "sim/node.rs"]
mod node;
#[path = "sim/plan.rs"]
mod plan;
#[path = "sim/scenes.rs"]
mod scenes;
#[path = "sim/scripts.rs"]
mod scripts;
#[path = "sim/store.rs"]
mod store;
#[path = "sim/story.rs"]
mod story;
#[path = "sim/teeth.rs"]
mod teeth;
#[path = "sim/user.rs"]
mod user;
#[path = "sim/world.rs"]
mod world;

use distlock_test_support as support;

use std::{
    collections::BTreeMap,
    env,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

fn number(name: &str) -> Option<u64> {
    env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is not a number: {text}")))
}

/// As many seeds as `SIM_SEEDS` says, or as fit into the time for a test; `SIM_SEED` replays one, and tells all about it.
#[test]
fn seeds() {
    if let Some(seed) = number("SIM_SEED") {
        let report = story::run(seed, true, |_| {});
        assert!(report.wrong.is_empty(), "seed {seed}: {:#?}", report.wrong);
        return;
    }
    let (count, first) = (number("SIM_SEEDS"), number("SIM_FIRST").unwrap_or(0));
    let started = Instant::now();
    let next = AtomicU64::new(first);
    let found = Mutex::new(Vec::new());
    let counts = Mutex::new(BTreeMap::<&'static str, u64>::new());
    let steps = AtomicU64::new(0);
    let on = || match count {
        Some(count) => next.load(Ordering::Relaxed) < first + count,
        None => started.elapsed() < Duration::from_secs(20),
    };
    thread::scope(|threads| {
        for _ in 0..thread::available_parallelism().map_or(1, |cores| cores.get()) {
            threads.spawn(|| {
                while on() && found.lock().unwrap().len() < 8 {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    let report = story::run(seed, false, |_| {});
                    steps.fetch_add(report.steps, Ordering::Relaxed);
                    if !report.wrong.is_empty() {
                        found.lock().unwrap().push((seed, report.wrong));
                    }
                    let mut counts = counts.lock().unwrap();
                    report.counts.into_iter().for_each(|(what, count)| *counts.entry(what).or_default() += count);
                }
            });
        }
    });
    let (seeds, steps) = (next.load(Ordering::Relaxed) - first, steps.load(Ordering::Relaxed));
    println!("{seeds} seeds, {steps} steps, {:.1} s: {:?}", started.elapsed().as_secs_f64(), counts.lock().unwrap());
    let found = found.into_inner().unwrap();
    for (seed, wrong) in &found {
        println!("seed {seed}: {wrong:#?}");
        println!("replay: SIM_SEED={seed} cargo test --features testing --test sim seeds -- --nocapture");
    }
    assert!(found.is_empty(), "{} of {seeds} seeds went wrong", found.len());
}
