//! The last part of `make bench`: lock and release on five nodes, compared with the crates
//! `redlock` and `rslock`. Each crate is used as its documentation shows. They take turns on the
//! same servers. `-- --test` measures only briefly.

#[path = "../../table/blocks.rs"]
mod blocks;
// The table uses all of these modules; this program uses a part.
#[allow(dead_code)]
#[path = "../../table/cluster.rs"]
mod cluster;
#[allow(dead_code)]
#[path = "../../table/measure.rs"]
mod measure;
#[allow(dead_code)]
#[path = "../../table/report.rs"]
mod report;
mod threads;

use std::{error::Error, process::ExitCode, time::Duration};

use distlock_test_support as support;

use blocks::{BLOCK, Totals, lock_and_release};
use cluster::Cluster;
use measure::{Placement, median, now};
use report::{Figure, Table, micros, number};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const NODES: usize = 5;
const TTL: Duration = Duration::from_secs(10);

fn main() -> ExitCode {
    if let Some(side) = support::WorkerSide::from_env() {
        return match threads::work(&side) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("peers: {error}");
                ExitCode::FAILURE
            }
        };
    }
    let (brief, only_threads) = (has_arg("--test"), has_arg("threads"));
    let cluster = Cluster::start(NODES);
    let (started, others) = (now(), measure::cpu_of_other_processes());
    let figures = threads::measure(brief).and_then(|mut figures| {
        if !only_threads {
            figures.extend(measure_all(&cluster, brief)?);
        }
        Ok(figures)
    });
    let figures = match figures {
        Ok(figures) => figures,
        Err(error) => {
            eprintln!("peers: {error}");
            return ExitCode::FAILURE;
        }
    };
    if brief {
        println!("bench peers ... ok");
        return ExitCode::SUCCESS;
    }
    let others =
        others.and_then(|before| Ok(measure::cpu_of_other_processes()?.saturating_sub(before)));
    let share = others.map_or(f64::NAN, |cpu| cpu.as_secs_f64() / (now() - started).as_secs_f64());
    let mut table = Table::default();
    table.add("peers", figures, share / report::cores() as f64);
    println!("{}\n\n{table}", report::machine());
    ExitCode::SUCCESS
}

fn has_arg(wanted: &str) -> bool {
    std::env::args().any(|arg| arg == wanted)
}

fn measure_all(cluster: &Cluster, brief: bool) -> Result<Vec<Figure>> {
    let pinned = Placement::different_cores(&cluster.pids())?;
    let mut figures = compare(
        cluster,
        brief,
        if pinned.is_some() { "servers on another core" } else { "one core" },
    )?;
    drop(pinned);
    let pinned = Placement::same_core(&cluster.pids())?;
    figures.extend(compare(cluster, brief, "servers on the same core")?);
    drop(pinned);
    Ok(figures)
}

fn compare(cluster: &Cluster, brief: bool, place: &str) -> Result<Vec<Figure>> {
    let (min_pairs, min_time) =
        if brief { (BLOCK as u64, Duration::ZERO) } else { (4_000, Duration::from_secs(15)) };
    let urls: Vec<String> = cluster.servers.iter().map(|server| server.url()).collect();
    let ours = distlock::RedisMgr::new(cluster.config())?;
    let redlock = redlock::RedLock::new(urls.clone());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let rslock = rslock::LockManager::new(urls);
    let mut totals = [Totals::new(), Totals::new(), Totals::new()];
    let mut ratios = [const { Vec::new() }; 2];

    // Creates connections and loads scripts before the measurement.
    lock_and_release(&ours)?;
    pair_of_redlock(&redlock)?;
    runtime.block_on(pair_of_rslock(&rslock))?;
    let (until, mut turn) = (now() + min_time, 0);
    // Stops at the first of the two limits.
    while totals[0].pair.len() == 0 || (totals[0].pair.len() < min_pairs && now() < until) {
        let mut p50 = [0.0; 3];
        // The order rotates.
        for side in (0..3).map(|place| (place + turn) % 3) {
            p50[side] = totals[side].block(|| match side {
                0 => lock_and_release(&ours),
                1 => pair_of_redlock(&redlock),
                _ => runtime.block_on(pair_of_rslock(&rslock)),
            })?;
        }
        ratios[0].push(p50[0] / p50[1]);
        ratios[1].push(p50[0] / p50[2]);
        turn += 1;
    }

    let [ours, redlock, rslock] = &totals;
    let compared = |what: String, theirs: &Totals, of| {
        Figure::new(what, micros(ours.pair.p50()))
            .compare(micros(theirs.pair.p50()), of)
            .at_most_raw_times(1.0)
    };
    let p99 = |theirs: &Totals, of| {
        Figure::new("  lock + release, p99", micros(ours.pair.p99()))
            .compare(micros(theirs.pair.p99()), of)
    };
    let cpu = |theirs: &Totals, of| {
        Figure::new("  processor time of the process, mean", micros(ours.cpu_per_pair()))
            .compare(micros(theirs.cpu_per_pair()), of)
    };
    let [of_redlock, of_rslock] = ratios.map(|ratios| number(median(ratios)));
    let adjacent = "  median ratio of adjacent blocks";
    Ok(vec![
        compared(format!("lock + release on 5 nodes, {place}, p50"), redlock, "redlock 2"),
        Figure::new(adjacent, of_redlock),
        p99(redlock, "redlock 2"),
        cpu(redlock, "redlock 2"),
        compared(format!("lock + release on 5 nodes, {place}, p50"), rslock, "rslock 0.7.3"),
        Figure::new(adjacent, of_rslock),
        p99(rslock, "rslock 0.7.3"),
        cpu(rslock, "rslock 0.7.3"),
    ])
}

fn pair_of_redlock(manager: &redlock::RedLock) -> Result<(Duration, Duration)> {
    let started = now();
    let lock = manager
        .lock(b"redlock", TTL.as_millis().try_into()?)?
        .ok_or("redlock did not acquire the lock")?;
    let locked = now();
    manager.unlock(&lock);
    Ok((locked - started, now() - locked))
}

async fn pair_of_rslock(manager: &rslock::LockManager) -> Result<(Duration, Duration)> {
    let started = now();
    let lock = manager.lock("rslock", TTL).await?;
    let locked = now();
    manager.unlock(&lock).await;
    Ok((locked - started, now() - locked))
}
