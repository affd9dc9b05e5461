//! Measures pairs of lock and release in blocks. The sides of a comparison take turns within one
//! run.

use std::time::Duration;

use distlock::{LockManager, Released};

use crate::{
    Result,
    measure::{Times, median, now, process_cpu},
};

/// Pairs in a block. It is small, so that changes of the machine's speed affect both sides.
pub(crate) const BLOCK: usize = 20;

pub(crate) struct Totals {
    pub(crate) pair: Times,
    pub(crate) lock: Times,
    pub(crate) release: Times,
    cpu: Duration,
}

impl Totals {
    pub(crate) fn new() -> Totals {
        Totals {
            pair: Times::new(),
            lock: Times::new(),
            release: Times::new(),
            cpu: Duration::ZERO,
        }
    }

    /// Measures one block and returns its p50.
    pub(crate) fn block(
        &mut self,
        mut pair: impl FnMut() -> Result<(Duration, Duration)>,
    ) -> Result<f64> {
        let mut pairs = Vec::with_capacity(BLOCK);
        let before = process_cpu();
        for _ in 0..BLOCK {
            let (lock, release) = pair()?;
            self.lock.add(lock);
            self.release.add(release);
            self.pair.add(lock + release);
            pairs.push((lock + release).as_secs_f64());
        }
        self.cpu += process_cpu() - before;
        Ok(median(pairs))
    }

    pub(crate) fn cpu_per_pair(&self) -> Duration {
        self.cpu / u32::try_from(self.pair.len()).unwrap_or(u32::MAX)
    }
}

/// Acquires and releases a lock. Returns how long each took.
pub(crate) fn lock_and_release(mgr: &dyn LockManager) -> Result<(Duration, Duration)> {
    let started = now();
    let guard = mgr.lock("ours")?;
    let locked = now();
    let released = guard.release()?;
    let ended = now();
    match released {
        Released::Released => Ok((locked - started, ended - locked)),
        other => Err(format!("the lock was not released: {other:?}").into()),
    }
}
