//! Lock and release with an event handler that counts, compared with none.

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
    report::{Figure, micros, number},
    support::RedisServer,
};

/// A minimal event handler.
#[derive(Debug, Default)]
struct Counter(AtomicU64);

impl HandleEvent for Counter {
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

pub(crate) fn row(scale: Scale) -> Result<Vec<Figure>> {
    let server = RedisServer::start();
    let (min_pairs, min_time) =
        scale.pick((20_000, Duration::from_secs(10)), (BLOCK as u64, Duration::ZERO));
    // On one core no thread must be woken, so this measures the work alone.
    let pinned = Placement::same_core(&[server.pid()])?;
    let count = Arc::new(Counter::default());
    let without = RedisMgr::new(Config::new(server.url()))?;
    let with = RedisMgr::new(Config::new(server.url()).event_handler(count.clone()))?;
    drop((without.lock("ours")?, with.lock("theirs")?));
    let (mut off, mut on, mut ratios) = (Totals::new(), Totals::new(), Vec::new());
    let until = now() + min_time;
    while on.pair.len() == 0 || (on.pair.len() < min_pairs && now() < until) {
        let mut off_block = || off.block(|| lock_and_release(&without));
        let mut on_block = || on.block(|| lock_and_release(&with));
        // The order alternates.
        let (off_p50, on_p50) = if ratios.len() % 2 == 0 {
            (off_block()?, on_block()?)
        } else {
            let on_p50 = on_block()?;
            (off_block()?, on_p50)
        };
        ratios.push(on_p50 / off_p50);
    }
    drop(pinned);
    let received = count.0.load(Ordering::Relaxed);
    if received < 3 * on.pair.len() {
        return Err(
            format!("only {received} events of {} locks were received", on.pair.len()).into()
        );
    }
    Ok(vec![
        Figure::new("lock + release with an event handler, p50", micros(on.pair.p50()))
            .compare(micros(off.pair.p50()), "without")
            .at_most_raw_times(1.02),
        Figure::new("  median ratio of adjacent blocks", number(median(ratios))),
        Figure::new("  processor time of the process, mean", micros(on.cpu_per_pair()))
            .compare(micros(off.cpu_per_pair()), "without"),
    ])
}
