//! Lock and release without contention, compared with the two raw commands.
//!
//! Measured once with the server on its own core: there a round trip consists of two threads that
//! wake each other, as with a server on another machine. Measured once on the same core: there no
//! thread must be woken, and the work alone remains.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use distlock::{Config, LockManager, RedisMgr};

use crate::{
    Result, Scale,
    blocks::{BLOCK, Totals, lock_and_release},
    measure::{Placement, median, now},
    raw::Raw,
    report::{Figure, micros, number},
    support::RedisServer,
};

pub(crate) fn row(scale: Scale) -> Result<Vec<Figure>> {
    let server = RedisServer::start();
    let config = Config::new(server.url());
    let pinned = Placement::different_cores(&[server.pid()])?;
    let place = if pinned.is_some() { "server on another core" } else { "one core" };
    let mut figures = compare(&server, config.clone(), lock_and_release, scale)?.figures(place);
    // The raw connection does not spin while it waits for a reply.
    figures.push(
        compare(&server, config.clone().spin(Duration::ZERO), lock_and_release, scale)?
            .figure("  the same without spinning, p50".to_owned()),
    );
    figures.push(
        compare(&server, config.clone(), lock_and_release_later, scale)?
            .figure("  the same with release_later, p50".to_owned())
            .at_most_raw_times(0.75),
    );
    drop(pinned);
    let pinned = Placement::same_core(&[server.pid()])?;
    let same_core = compare(&server, config.clone(), lock_and_release, scale)?;
    figures.extend(same_core.figures("server on the same core"));
    drop(pinned);
    figures.push(server_time(&server, config, scale)?);
    Ok(figures)
}

/// Time that the server itself counts for the scripts of a pair.
fn server_time(server: &RedisServer, config: Config, scale: Scale) -> Result<Figure> {
    let pairs = scale.pick(20_000, 10);
    let mgr = RedisMgr::new(config)?;
    let mut raw = Raw::connect(&server.url())?;
    // What a script calls is part of the script's time, and is also counted for its own command.
    let spent = |commands: &[&str], pair: &mut dyn FnMut() -> Result<()>| {
        pair()?;
        server.cli(&["CONFIG", "RESETSTAT"]);
        for _ in 0..pairs {
            pair()?;
        }
        let info: String = server.query(&["INFO", "commandstats"]);
        let of = |command: &&str| {
            let line =
                info.lines().find_map(|line| line.strip_prefix("cmdstat_")?.strip_prefix(command));
            let micros = line.and_then(|line| line.split_once("usec=")?.1.split(',').next());
            micros.and_then(|micros| micros.parse().ok()).unwrap_or(0_u64)
        };
        let all = commands.iter().map(of).sum();
        Ok::<_, Box<dyn std::error::Error>>(Duration::from_micros(all) / pairs)
    };
    let ours = spent(&["evalsha:"], &mut || lock_and_release(&mgr).map(drop))?;
    let pair = raw.pair("lock:raw");
    let raw = spent(&["set:", "evalsha:"], &mut || raw.run(&pair).map(drop))?;
    Ok(Figure::new("time of the server for lock + release, mean", micros(ours))
        .compare(micros(raw), "SET NX PX, EVALSHA"))
}

/// Acquires a lock, and releases it without waiting for the reply. Each lock has another name than
/// the last: to acquire the same one again takes a confirmation of its release first.
fn lock_and_release_later(mgr: &dyn LockManager) -> Result<(Duration, Duration)> {
    static NAMES: AtomicU64 = AtomicU64::new(0);
    let name = format!("ours:{}", NAMES.fetch_add(1, Ordering::Relaxed) % 1000);
    let started = now();
    let guard = mgr.lock(&name)?;
    let locked = now();
    guard.release_later();
    Ok((locked - started, now() - locked))
}

struct Comparison {
    raw: Totals,
    ours: Totals,
    /// Ratios of one block of ours to the adjacent raw block.
    ratios: Vec<f64>,
}

fn compare(
    server: &RedisServer,
    config: Config,
    pair: fn(&dyn LockManager) -> Result<(Duration, Duration)>,
    scale: Scale,
) -> Result<Comparison> {
    let (min_pairs, min_time) =
        scale.pick((20_000, Duration::from_secs(10)), (BLOCK as u64, Duration::ZERO));
    let mgr = RedisMgr::new(config)?;
    let mut connection = Raw::connect(&server.url())?;
    let (mut raw, mut ours) = (Totals::new(), Totals::new());
    let mut ratios = Vec::new();
    drop(mgr.lock("ours")?);
    let until = now() + min_time;
    // Stops at the first of the two limits.
    while ours.pair.len() == 0 || (ours.pair.len() < min_pairs && now() < until) {
        let mut pairs: Vec<_> = (0..BLOCK).map(|_| connection.pair("lock:raw")).collect();
        let mut raw_block = || {
            raw.block(|| {
                connection.run(&pairs.pop().ok_or("the block needs more pairs than prepared")?)
            })
        };
        let mut our_block = || ours.block(|| pair(&mgr));
        // The order alternates.
        let (raw_p50, our_p50) = if ratios.len() % 2 == 0 {
            (raw_block()?, our_block()?)
        } else {
            let our_p50 = our_block()?;
            (raw_block()?, our_p50)
        };
        ratios.push(our_p50 / raw_p50);
    }
    Ok(Comparison { raw, ours, ratios })
}

impl Comparison {
    fn figure(&self, what: String) -> Figure {
        Figure::new(what, micros(self.ours.pair.p50()))
            .compare(micros(self.raw.pair.p50()), "SET NX PX, EVALSHA")
    }

    fn figures(&self, place: &str) -> Vec<Figure> {
        let Comparison { raw, ours, ratios } = self;
        vec![
            self.figure(format!("lock + release, {place}, p50")).at_most_raw_times(1.10),
            Figure::new("  lock alone, p50", micros(ours.lock.p50()))
                .compare(micros(raw.lock.p50()), "SET NX PX"),
            Figure::new("  release alone, p50", micros(ours.release.p50()))
                .compare(micros(raw.release.p50()), "EVALSHA"),
            Figure::new("  lock + release, p99", micros(ours.pair.p99()))
                .compare(micros(raw.pair.p99()), "both"),
            Figure::new("  processor time of the process, mean", micros(ours.cpu_per_pair()))
                .compare(micros(raw.cpu_per_pair()), "both"),
            Figure::new("  median ratio of adjacent blocks", number(median(ratios.clone()))),
        ]
    }
}
