//! `make bench`, its last part: lock and release on five nodes beside the crates `redlock` and `rslock`, each as its
//! documentation shows it, in turn on the same servers. `-- --test` does it for an instant.

#[path = "../../table/blocks.rs"]
mod blocks;
// The table uses all of what these have; this program does not.
#[allow(dead_code)]
#[path = "../../table/cluster.rs"]
mod cluster;
#[allow(dead_code)]
#[path = "../../table/measure.rs"]
mod measure;
#[allow(dead_code)]
#[path = "../../table/report.rs"]
mod report;

use std::{error::Error, process::ExitCode, time::Duration};

use distlock_test_support as support;

use blocks::{BLOCK, Totals, lock_and_release};
use cluster::Cluster;
use measure::{Placement, median, now};
use report::{Line, Table, micros, number};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const NODES: usize = 5;
const TTL: Duration = Duration::from_secs(10);

fn main() -> ExitCode {
    let brief = std::env::args().any(|arg| arg == "--test");
    let cluster = Cluster::start(NODES);
    let (started, others) = (now(), measure::cpu_of_others());
    let lines = match measure_all(&cluster, brief) {
        Ok(lines) => lines,
        Err(error) => {
            eprintln!("peers: {error}");
            return ExitCode::FAILURE;
        }
    };
    if brief {
        println!("bench peers ... ok");
        return ExitCode::SUCCESS;
    }
    let others = others.and_then(|before| Ok(measure::cpu_of_others()?.saturating_sub(before)));
    let share = others.map_or(f64::NAN, |cpu| cpu.as_secs_f64() / (now() - started).as_secs_f64());
    let mut table = Table::default();
    table.add("peers", lines, share / report::cores() as f64);
    println!("{}\n\n{table}", report::machine());
    ExitCode::SUCCESS
}

fn measure_all(cluster: &Cluster, brief: bool) -> Result<Vec<Line>> {
    let apart = Placement::apart(&cluster.pids())?;
    let mut lines = compare(cluster, brief, if apart.is_some() { "servers on another core" } else { "one core" })?;
    drop(apart);
    let together = Placement::together(&cluster.pids())?;
    lines.extend(compare(cluster, brief, "servers on the same core")?);
    drop(together);
    Ok(lines)
}

fn compare(cluster: &Cluster, brief: bool, place: &str) -> Result<Vec<Line>> {
    let (least_pairs, least_time) =
        if brief { (BLOCK as u64, Duration::ZERO) } else { (4_000, Duration::from_secs(15)) };
    let urls: Vec<String> = cluster.servers.iter().map(|server| server.url()).collect();
    let ours = distlock::RedisMgr::new(cluster.config())?;
    let redlock = redlock::RedLock::new(urls.clone());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let rslock = rslock::LockManager::new(urls);
    let mut totals = [Totals::new(), Totals::new(), Totals::new()];
    let mut ratios = [const { Vec::new() }; 2];

    // Connections and scripts are there before anything is timed.
    lock_and_release(&ours)?;
    pair_of_redlock(&redlock)?;
    runtime.block_on(pair_of_rslock(&rslock))?;
    let (until, mut turn) = (now() + least_time, 0);
    // Whichever comes first is enough.
    while totals[0].pair.len() == 0 || (totals[0].pair.len() < least_pairs && now() < until) {
        let mut p50 = [0.0; 3];
        // Who goes first alternates too.
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
    let beside = |what: String, theirs: &Totals, of| {
        Line::new(what, micros(ours.pair.p50())).beside(micros(theirs.pair.p50()), of).at_most_times_raw(1.0)
    };
    let p99 = |theirs: &Totals, of| {
        Line::new("  lock + release, p99", micros(ours.pair.p99())).beside(micros(theirs.pair.p99()), of)
    };
    let cpu = |theirs: &Totals, of| {
        Line::new("  processor time of the process, mean", micros(ours.cpu_per_pair()))
            .beside(micros(theirs.cpu_per_pair()), of)
    };
    let [of_redlock, of_rslock] = ratios.map(|ratios| number(median(ratios)));
    let neighbours = "  median of the ratios of neighbouring blocks";
    Ok(vec![
        beside(format!("lock + release on 5 nodes, {place}, p50"), redlock, "redlock 2"),
        Line::new(neighbours, of_redlock),
        p99(redlock, "redlock 2"),
        cpu(redlock, "redlock 2"),
        beside(format!("lock + release on 5 nodes, {place}, p50"), rslock, "rslock 0.7.3"),
        Line::new(neighbours, of_rslock),
        p99(rslock, "rslock 0.7.3"),
        cpu(rslock, "rslock 0.7.3"),
    ])
}

fn pair_of_redlock(manager: &redlock::RedLock) -> Result<(Duration, Duration)> {
    let started = now();
    let lock = manager.lock(b"redlock", TTL.as_millis().try_into()?)?.ok_or("redlock did not get the lock")?;
    let between = now();
    manager.unlock(&lock);
    Ok((between - started, now() - between))
}

async fn pair_of_rslock(manager: &rslock::LockManager) -> Result<(Duration, Duration)> {
    let started = now();
    let lock = manager.lock("rslock", TTL).await?;
    let between = now();
    manager.unlock(&lock).await;
    Ok((between - started, now() - between))
}
