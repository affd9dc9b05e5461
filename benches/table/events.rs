//! Lock and release with a handler of events that counts, against the same without one.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use distlock::{AcquiredEvent, AttemptedEvent, Config, HandleEvent, RedisMgr, ReleasedEvent};

use crate::{
    Result, Scale,
    blocks::{BLOCK, Totals, lock_and_release},
    measure::{Placement, median, now},
    report::{Line, micros, number},
    support::RedisServer,
};

/// What the least handler would do.
#[derive(Debug, Default)]
struct Count(AtomicU64);

impl HandleEvent for Count {
    fn attempted(&self, _: &AttemptedEvent<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn acquired(&self, _: &AcquiredEvent<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn released(&self, _: &ReleasedEvent<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

pub(crate) fn row(scale: Scale) -> Result<Vec<Line>> {
    let server = RedisServer::start();
    let (least_pairs, least_time) = scale.pick((20_000, Duration::from_secs(10)), (BLOCK as u64, Duration::ZERO));
    // On one core nobody is woken, and what remains is work.
    let together = Placement::together(&[server.pid()])?;
    let count = Arc::new(Count::default());
    let without = RedisMgr::new(Config::new(server.url()))?;
    let with = RedisMgr::new(Config::new(server.url()).event_handler(count.clone()))?;
    drop((without.lock("ours")?, with.lock("theirs")?));
    let (mut off, mut on, mut ratios) = (Totals::new(), Totals::new(), Vec::new());
    let until = now() + least_time;
    while on.pair.len() == 0 || (on.pair.len() < least_pairs && now() < until) {
        let mut off_block = || off.block(|| lock_and_release(&without));
        let mut on_block = || on.block(|| lock_and_release(&with));
        // Who goes first alternates.
        let (off_p50, on_p50) = if ratios.len() % 2 == 0 {
            (off_block()?, on_block()?)
        } else {
            let on_p50 = on_block()?;
            (off_block()?, on_p50)
        };
        ratios.push(on_p50 / off_p50);
    }
    drop(together);
    let told = count.0.load(Ordering::Relaxed);
    if told < 3 * on.pair.len() {
        return Err(format!("{told} events of {} locks were told", on.pair.len()).into());
    }
    Ok(vec![
        Line::new("lock + release with a handler of events, p50", micros(on.pair.p50()))
            .beside(micros(off.pair.p50()), "without")
            .at_most_times_raw(1.02),
        Line::new("  median of the ratios of neighbouring blocks", number(median(ratios))),
        Line::new("  processor time of the process, mean", micros(on.cpu_per_pair()))
            .beside(micros(off.cpu_per_pair()), "without"),
    ])
}
