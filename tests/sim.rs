//! The simulator: runs the unmodified library on servers, clocks and a network that exist only in
//! memory. A seed determines every random choice. `docs/simulator.md` explains how it works and how
//! to replay a seed.

#![expect(clippy::disallowed_methods, reason = "limits how long the test runs")]

#[path = "sim/client.rs"]
mod client;
#[path = "sim/differential.rs"]
mod differential;
#[path = "sim/fault_free.rs"]
mod fault_free;
#[path = "sim/fiber.rs"]
mod fiber;
#[path = "sim/flaw.rs"]
mod flaw;
#[path = "sim/invariants.rs"]
mod invariants;
#[path = "sim/kinds.rs"]
mod kinds;
#[path = "sim/late_replies.rs"]
mod late_replies;
#[path = "sim/nemesis.rs"]
mod nemesis;
#[path = "sim/net.rs"]
mod net;
#[path = "sim/node.rs"]
mod node;
#[path = "sim/run.rs"]
mod run;
#[path = "sim/scenario.rs"]
mod scenario;
#[path = "sim/scripted.rs"]
mod scripted;
#[path = "sim/self_check.rs"]
mod self_check;
#[path = "sim/votes.rs"]
mod votes;
#[path = "sim/world.rs"]
mod world;

use distlock_test_support as support;

use std::{
    collections::BTreeMap,
    env,
    process::Command,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

fn env_number(name: &str) -> Option<u64> {
    env::var(name)
        .ok()
        .map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is not a number: {text}")))
}

/// What happens must not depend on the process, for example on its id.
#[test]
fn replay_in_another_process_is_the_same() {
    let replay = |seed: u64| {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["seeds_run_without_violations", "--exact", "--nocapture"])
            .env("SIM_SEED", seed.to_string())
            .output()
            .unwrap();
        let printed = String::from_utf8(output.stdout).unwrap();
        // The last line says how long it took.
        let lines = printed.lines().filter(|line| !line.starts_with("test result"));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    for seed in 0..20 {
        let (first, second) = (replay(seed), replay(seed));
        assert!(first.len() > 100, "{first:?}");
        let differs = first.iter().zip(&second).find(|(first, second)| first != second);
        assert_eq!((differs, first.len()), (None, second.len()), "seed {seed}");
    }
}

/// Runs `SIM_SEEDS` seeds from `SIM_FIRST` on, or as many as fit into 20 seconds. With `SIM_SEED`,
/// replays one seed and prints everything that happens.
#[test]
fn seeds_run_without_violations() {
    if let Some(seed) = env_number("SIM_SEED") {
        let report = run::run_seed(seed, true, |_| {});
        assert!(report.violations.is_empty(), "seed {seed}: {:#?}", report.violations);
        return;
    }
    let (count, first) = (env_number("SIM_SEEDS"), env_number("SIM_FIRST").unwrap_or(0));
    let started = Instant::now();
    let next = AtomicU64::new(first);
    let found = Mutex::new(Vec::new());
    let counts = Mutex::new(BTreeMap::<&'static str, u64>::new());
    let steps = AtomicU64::new(0);
    let has_more = || match count {
        Some(count) => next.load(Ordering::Relaxed) < first + count,
        None => started.elapsed() < Duration::from_secs(20),
    };
    thread::scope(|threads| {
        for _ in 0..thread::available_parallelism().map_or(1, |cores| cores.get()) {
            threads.spawn(|| {
                while has_more() && found.lock().unwrap().len() < 8 {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    let report = run::run_seed(seed, false, |_| {});
                    steps.fetch_add(report.steps, Ordering::Relaxed);
                    if !report.violations.is_empty() {
                        found.lock().unwrap().push((seed, report.violations));
                    }
                    let mut counts = counts.lock().unwrap();
                    report
                        .counts
                        .into_iter()
                        .for_each(|(what, count)| *counts.entry(what).or_default() += count);
                }
            });
        }
    });
    let (seeds, steps) = (next.load(Ordering::Relaxed) - first, steps.load(Ordering::Relaxed));
    println!(
        "{seeds} seeds, {steps} steps, {:.1} s: {:?}",
        started.elapsed().as_secs_f64(),
        counts.lock().unwrap()
    );
    let found = found.into_inner().unwrap();
    for (seed, violations) in &found {
        println!("seed {seed}: {violations:#?}");
        println!(
            "replay: SIM_SEED={seed} cargo test --features testing --test sim seeds -- --nocapture"
        );
    }
    assert!(found.is_empty(), "{} of {seeds} seeds violated an invariant", found.len());
}
