//! `Recorder`: counts and times, updated by all threads of a manager.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;

use super::{LockMetrics, Metrics, count::Count, facade, per_lock::PerLockTable, timing::Timing};
use crate::{core::lock_lost::LockLost, error::LockError};

/// Maximum number of locks with metrics of their own. The table is bounded, because a program may
/// use any number of lock names.
const TRACKED_LOCKS_MAX: usize = 1_000;
/// Maximum number of locks copied while the mutex is held; otherwise a snapshot would delay the
/// threads that lock and release.
const COPY_CHUNK_MAX: usize = 32;

/// Values of the counters, read one by one.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts([u64; Count::VARIANTS]);

impl Counts {
    pub(super) fn get(&self, count: Count) -> u64 {
        self.0[count as usize]
    }
}

#[derive(Debug)]
pub(crate) struct Recorder {
    server: Arc<str>,
    counts: [AtomicU64; Count::VARIANTS],
    /// Histograms, and the metrics of each lock.
    tables: Mutex<Tables>,
}

#[derive(Debug)]
struct Tables {
    wait: Timing,
    hold: Timing,
    renewal: Timing,
    margin: Timing,
    per_lock: PerLockTable,
}

impl Recorder {
    pub(crate) fn new(server: Arc<str>) -> Recorder {
        facade::describe();
        let tables = Tables {
            wait: Timing::default(),
            hold: Timing::default(),
            renewal: Timing::default(),
            margin: Timing::default(),
            per_lock: PerLockTable::new(TRACKED_LOCKS_MAX),
        };
        Recorder {
            server,
            counts: [const { AtomicU64::new(0) }; Count::VARIANTS],
            tables: Mutex::new(tables),
        }
    }

    pub(crate) fn count(&self, count: Count) {
        self.counts[count as usize].fetch_add(1, Ordering::Relaxed);
        facade::count(count, &self.server);
    }

    pub(crate) fn contended(&self, lock: &str) {
        self.count(Count::Contended);
        self.tables.lock().per_lock.touch(lock).contended += 1;
    }

    pub(crate) fn acquired(&self, lock: &str, waited: Duration) {
        self.count(Count::Acquired);
        {
            let mut tables = self.tables.lock();
            tables.wait.record(waited);
            let row = tables.per_lock.touch(lock);
            row.acquired += 1;
            row.wait.record(waited);
        }
        facade::wait(waited, "acquired", &self.server);
    }

    pub(crate) fn timed_out(&self, lock: &str, waited: Duration) {
        self.count(Count::TimedOut);
        self.tables.lock().per_lock.touch(lock).timed_out += 1;
        facade::wait(waited, "timed_out", &self.server);
    }

    pub(crate) fn failed(&self, error: &LockError) {
        self.counts[Count::Failed as usize].fetch_add(1, Ordering::Relaxed);
        facade::failed(error, &self.server);
    }

    pub(crate) fn renewed(&self, lock: &str, margin: Duration, took: Duration) {
        self.count(Count::Renewals);
        {
            let mut tables = self.tables.lock();
            tables.renewal.record(took);
            tables.margin.record(margin);
            tables.per_lock.entry(lock).record_margin(margin);
        }
        facade::renewal(took, margin, &self.server);
    }

    pub(crate) fn released(&self, lock: &str, held: Duration) {
        self.count(Count::Released);
        {
            let mut tables = self.tables.lock();
            tables.hold.record(held);
            tables.per_lock.entry(lock).hold.record(held);
        }
        facade::hold(held, "released", &self.server);
    }

    pub(crate) fn lost(&self, lock: &str, held: Duration, why: &LockLost) {
        self.counts[Count::Lost as usize].fetch_add(1, Ordering::Relaxed);
        {
            let mut tables = self.tables.lock();
            tables.hold.record(held);
            let row = tables.per_lock.entry(lock);
            row.lost += 1;
            row.hold.record(held);
        }
        facade::lost(why, &self.server);
        facade::hold(held, "lost", &self.server);
    }

    /// Copies everything in chunks. Other threads keep counting between two chunks.
    pub(crate) fn snapshot(&self) -> Metrics {
        // Read in reverse, so that releases are read before acquisitions. Otherwise a snapshot
        // could show more releases than acquisitions.
        let mut counts = Counts::default();
        for (copy, count) in counts.0.iter_mut().zip(&self.counts).rev() {
            *copy = count.load(Ordering::Relaxed);
        }
        let tables = self.tables.lock();
        let (wait, hold) = (tables.wait.clone(), tables.hold.clone());
        let (renewal, margin) = (tables.renewal.clone(), tables.margin.clone());
        let others = tables.per_lock.others.clone();
        drop(tables);
        let mut locks = Vec::new();
        loop {
            let tables = self.tables.lock();
            let chunk = tables.per_lock.chunk(locks.len(), COPY_CHUNK_MAX).to_vec();
            drop(tables);
            if chunk.is_empty() {
                break;
            }
            locks.extend(chunk.into_iter().map(LockMetrics));
        }
        locks.sort_by(|a, b| a.name().cmp(b.name()));
        Metrics {
            server: self.server.clone(),
            counts,
            wait,
            hold,
            renewal,
            margin,
            locks,
            others: LockMetrics(others),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locks_beyond_the_maximum_count_as_others() {
        let recorder = Recorder::new("here".into());
        let names = TRACKED_LOCKS_MAX as u64 + 500;
        for n in 0..names {
            recorder.acquired(&format!("n{n}"), Duration::from_micros(n));
        }
        let metrics = recorder.snapshot();
        assert_eq!((metrics.acquired(), metrics.wait().count()), (names, names));
        assert_eq!((metrics.locks().len(), metrics.others().acquired()), (TRACKED_LOCKS_MAX, 500));
        assert!(metrics.to_string().contains("\n  others "), "{metrics}");
    }

    #[test]
    fn snapshot_is_consistent_while_threads_count() {
        let recorder = Recorder::new("here".into());
        std::thread::scope(|threads| {
            for thread in 0..3 {
                let recorder = &recorder;
                threads.spawn(move || {
                    for n in 0..2_000 {
                        recorder.count(Count::Attempted);
                        recorder.acquired(
                            &format!("n{}", (n * 7 + thread) % 1_500),
                            Duration::from_micros(n),
                        );
                        recorder.released("x", Duration::from_micros(n));
                    }
                });
            }
            for _ in 0..50 {
                let metrics = recorder.snapshot();
                assert!(
                    metrics.released() <= metrics.acquired()
                        && metrics.acquired() <= metrics.attempted()
                );
            }
        });
        let metrics = recorder.snapshot();
        assert_eq!(
            (metrics.acquired(), metrics.released(), metrics.wait().count()),
            (6_000, 6_000, 6_000)
        );
        assert_eq!((metrics.held(), metrics.waiting()), (0, 0));
    }
}
