//! Threads of one process, and processes with such threads, that compete for one lock without
//! doing anything while they hold it.

use std::{
    sync::{
        Barrier,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

use crate::{
    Result, TTL,
    cluster::Cluster,
    measure::now,
    report::{Figure, Quantity, micros, number, per_second},
    support::{Worker, WorkerSide},
};

pub(crate) const ROLE: &str = "threads";

/// The locks of each thread within the window, and the longest wait of any of them.
struct Shares {
    locks: Vec<u64>,
    longest_wait: Duration,
    window: Duration,
}

impl Shares {
    fn sum(&self) -> f64 {
        self.locks.iter().sum::<u64>() as f64
    }

    fn per_second(&self) -> Quantity {
        per_second(self.sum(), self.window)
    }

    fn fewest_by_most(&self) -> f64 {
        let (fewest, most) = (self.locks.iter().min(), self.locks.iter().max());
        fewest.copied().unwrap_or(0) as f64 / most.copied().unwrap_or(0).max(1) as f64
    }
}

/// Has threads lock and release until the window has passed. `pair` gets the function that counts.
fn compete(
    threads: usize,
    window: Duration,
    thread: impl Fn(&mut dyn FnMut(Duration) -> bool) -> Result<()> + Sync,
) -> Result<Shares> {
    let (start, longest) = (Barrier::new(threads), AtomicU64::new(0));
    let locks = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| {
                    start.wait();
                    let (begin, mut locks) = (now(), 0);
                    let end = begin + window;
                    let mut count = |waited: Duration| {
                        locks += 1;
                        let waited = u64::try_from(waited.as_nanos()).unwrap_or(u64::MAX);
                        longest.fetch_max(waited, Ordering::Relaxed);
                        now() < end
                    };
                    thread(&mut count).map_err(|error| error.to_string())?;
                    Ok(locks)
                })
            })
            .collect();
        let joined = workers.into_iter().map(|worker| worker.join().unwrap_or(Ok(0)));
        joined.collect::<std::result::Result<Vec<u64>, String>>()
    })?;
    let longest_wait = Duration::from_nanos(longest.into_inner());
    Ok(Shares { locks, longest_wait, window })
}

fn ours(config: distlock::Config, threads: usize, window: Duration) -> Result<Shares> {
    let mgr = distlock::RedisMgr::new(config)?;
    compete(threads, window, |count| {
        loop {
            let asked = now();
            let guard = mgr.lock("contended")?;
            let goes_on = count(now() - asked);
            drop(guard);
            if !goes_on {
                return Ok(());
            }
        }
    })
}

fn rslock(urls: &[String], threads: usize, window: Duration) -> Result<Shares> {
    let manager = rslock::LockManager::new(urls.to_vec());
    compete(threads, window, |count| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let end = now() + window;
            let mut asked = now();
            while now() < end {
                let Ok(lock) = manager.lock("contended", TTL).await else { continue };
                let goes_on = count(now() - asked);
                manager.unlock(&lock).await;
                if !goes_on {
                    break;
                }
                asked = now();
            }
            Ok(())
        })
    })
}

pub(crate) fn measure(brief: bool) -> Result<Vec<Figure>> {
    let cluster = Cluster::start(1);
    let window = Duration::from_millis(if brief { 50 } else { 3_000 });
    let urls: Vec<String> = cluster.servers.iter().map(|server| server.url()).collect();
    let config = || distlock::Config::new(urls[0].clone());
    let mut figures = Vec::new();
    for threads in [8, 32] {
        let without = ours(config().local_handover(Duration::ZERO), threads, window)?;
        let (ours, peers) = (ours(config(), threads, window)?, rslock(&urls, threads, window)?);
        let what = format!("{threads} threads of one process, locks");
        let ratio = number(ours.sum() / peers.sum());
        figures.extend([
            Figure::new(what, ours.per_second()).compare(peers.per_second(), "rslock 0.7.3"),
            Figure::new("  times as many", ratio).at_least(10.0),
            Figure::new("  fewest / most of a thread", number(ours.fewest_by_most()))
                .at_least(0.8)
                .compare(number(peers.fewest_by_most()), "rslock 0.7.3"),
            Figure::new("  longest wait", micros(ours.longest_wait))
                .compare(micros(peers.longest_wait), "rslock 0.7.3"),
            Figure::new("  without handing over", without.per_second()),
        ]);
    }
    // Longer, because a turn of a process lasts 5 ms, and 8 of them take turns.
    figures.extend(processes(&cluster, 4 * window)?);
    Ok(figures)
}

/// Eight processes with eight threads each.
fn processes(cluster: &Cluster, window: Duration) -> Result<Vec<Figure>> {
    let (url, window_ms) = (cluster.servers[0].url(), window.as_millis().to_string());
    let args = [("url", url.as_str()), ("window_ms", window_ms.as_str())];
    let mut workers: Vec<_> = (0..8).map(|_| Worker::spawn(ROLE, &args)).collect();
    workers.iter().for_each(|worker| drop(worker.expect("ready")));
    workers.iter_mut().for_each(|worker| worker.send("go"));
    let mut locks = Vec::new();
    let (mut longest, mut threads) = (Duration::ZERO, Vec::new());
    for worker in &workers {
        let line = worker.expect("locks");
        let mut fields = line.split_whitespace().map(str::parse::<u64>);
        let mut field = || fields.next().ok_or("a field is missing")?.map_err(|_| "no number");
        locks.push(field()?);
        longest = longest.max(Duration::from_nanos(field()?));
        threads.push(field()? as f64 / 1_000.0);
    }
    let all = Shares { locks, longest_wait: longest, window };
    let least_fair = threads.into_iter().fold(1.0, f64::min);
    Ok(vec![
        Figure::new("8 processes of 8 threads, locks", all.per_second()),
        Figure::new("  fewest / most of a process", number(all.fewest_by_most())).at_least(0.95),
        Figure::new("  fewest / most of a thread in its process", number(least_fair)),
        Figure::new("  longest wait", micros(all.longest_wait)),
    ])
}

/// One of the processes.
pub(crate) fn work(side: &WorkerSide) -> Result<()> {
    let window = Duration::from_millis(side.arg("window_ms").parse()?);
    let config = distlock::Config::new(side.arg("url"));
    side.say("ready");
    side.hear();
    let shares = ours(config, 8, window)?;
    let (locks, fair) = (shares.locks.iter().sum::<u64>(), shares.fewest_by_most());
    let longest = shares.longest_wait.as_nanos();
    side.say(format!("locks {locks} {longest} {}", (fair * 1_000.0) as u64));
    Ok(())
}
