//! Lock and release with nobody else around, against the two raw commands.
//!
//! Once with the server on a core of its own, where a round trip is two threads waking each other up, as with a server
//! on another machine; and once on the same core, where nobody is woken and what remains is work.

use std::time::Duration;

use distlock::{Config, RedisMgr};

use crate::{
    Result, Scale,
    blocks::{BLOCK, Totals, lock_and_release},
    measure::{Placement, median, now},
    raw::Raw,
    report::{Line, micros, number},
    support::RedisServer,
};

pub(crate) fn row(scale: Scale) -> Result<Vec<Line>> {
    let server = RedisServer::start();
    let config = Config::new(server.url());
    let apart = Placement::apart(&[server.pid()])?;
    let place = if apart.is_some() { "server on another core" } else { "one core" };
    let mut lines = compare(&server, config.clone(), scale)?.lines(place);
    // The raw connection does not spin while it waits for an answer.
    lines.push(
        compare(&server, config.clone().spin(Duration::ZERO), scale)?
            .line("  the same without spinning, p50".to_owned()),
    );
    drop(apart);
    let together = Placement::together(&[server.pid()])?;
    lines.extend(compare(&server, config, scale)?.lines("server on the same core"));
    drop(together);
    Ok(lines)
}

struct Comparison {
    theirs: Totals,
    ours: Totals,
    /// Of one block of ours to the block of theirs beside it.
    ratios: Vec<f64>,
}

fn compare(server: &RedisServer, config: Config, scale: Scale) -> Result<Comparison> {
    let (least_pairs, least_time) = scale.pick((20_000, Duration::from_secs(10)), (BLOCK as u64, Duration::ZERO));
    let mgr = RedisMgr::new(config)?;
    let mut raw = Raw::connect(&server.url())?;
    let (mut theirs, mut ours) = (Totals::new(), Totals::new());
    let mut ratios = Vec::new();
    drop(mgr.lock("ours")?);
    let until = now() + least_time;
    // Whichever comes first is enough.
    while ours.pair.len() == 0 || (ours.pair.len() < least_pairs && now() < until) {
        let mut pairs: Vec<_> = (0..BLOCK).map(|_| raw.pair("lock:raw")).collect();
        let mut raw_block = || theirs.block(|| raw.run(&pairs.pop().ok_or("a block is longer than prepared")?));
        let mut our_block = || ours.block(|| lock_and_release(&mgr));
        // Who goes first alternates too.
        let (raw_p50, our_p50) = if ratios.len() % 2 == 0 {
            (raw_block()?, our_block()?)
        } else {
            let our_p50 = our_block()?;
            (raw_block()?, our_p50)
        };
        ratios.push(our_p50 / raw_p50);
    }
    Ok(Comparison { theirs, ours, ratios })
}

impl Comparison {
    fn line(&self, what: String) -> Line {
        Line::new(what, micros(self.ours.pair.p50())).beside(micros(self.theirs.pair.p50()), "SET NX PX, EVALSHA")
    }

    fn lines(&self, place: &str) -> Vec<Line> {
        let Comparison { theirs, ours, ratios } = self;
        vec![
            self.line(format!("lock + release, {place}, p50")).at_most_times_raw(1.10),
            Line::new("  lock alone, p50", micros(ours.lock.p50())).beside(micros(theirs.lock.p50()), "SET NX PX"),
            Line::new("  release alone, p50", micros(ours.release.p50()))
                .beside(micros(theirs.release.p50()), "EVALSHA"),
            Line::new("  lock + release, p99", micros(ours.pair.p99())).beside(micros(theirs.pair.p99()), "both"),
            Line::new("  processor time of the process, mean", micros(ours.cpu_per_pair()))
                .beside(micros(theirs.cpu_per_pair()), "both"),
            Line::new("  median of the ratios of neighbouring blocks", number(median(ratios.clone()))),
        ]
    }
}
