//! `Recorder`: counts and times, updated by all threads of a manager.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;

#[cfg(feature = "metrics")]
use super::facade::{EXPORT_INTERVAL, Exporter, Gauges, Pending};
use super::{
    LockMetrics, Metrics,
    names::{Count, Time},
    per_lock::PerLockTable,
    timing::Timing,
};
use crate::{core::lock_lost::LockLost, error::LockError};

/// Maximum number of locks with metrics of their own. The table is bounded, because a program may
/// use any number of lock names.
const TRACKED_LOCKS_MAX: usize = 1_000;
/// Maximum number of locks copied while the mutex is held; otherwise a snapshot would delay the
/// threads that lock and release.
const COPY_CHUNK_MAX: usize = 32;

/// Values of the counters, read one by one.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts([u64; Count::ALL.len()]);

impl Counts {
    pub(super) fn get(&self, count: Count) -> u64 {
        self.0[count as usize]
    }

    /// Number of acquisitions in progress.
    pub(super) fn waiting(&self) -> u64 {
        let ended = [Count::Acquired, Count::TimedOut, Count::Failed].map(|count| self.get(count));
        self.get(Count::Attempted).saturating_sub(ended.iter().sum())
    }

    /// Number of locks held.
    pub(super) fn held(&self) -> u64 {
        let ended = [Count::Released, Count::Detached, Count::Lost].map(|count| self.get(count));
        self.get(Count::Acquired).saturating_sub(ended.iter().sum())
    }
}

#[derive(Debug)]
pub(crate) struct Recorder {
    server: Arc<str>,
    counts: [AtomicU64; Count::ALL.len()],
    /// Histograms, and the metrics of each lock.
    tables: Mutex<Tables>,
    #[cfg(feature = "metrics")]
    pending: Pending,
    nodes: u64,
    nodes_down: AtomicU64,
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
    /// `by_lock` makes lock names a label of what is exported.
    pub(crate) fn new(server: Arc<str>, nodes: usize, by_lock: bool) -> Recorder {
        #[cfg(not(feature = "metrics"))]
        let _ = by_lock;
        let tables = Tables {
            wait: Timing::default(),
            hold: Timing::default(),
            renewal: Timing::default(),
            margin: Timing::default(),
            per_lock: PerLockTable::new(TRACKED_LOCKS_MAX),
        };
        Recorder {
            server,
            counts: [const { AtomicU64::new(0) }; Count::ALL.len()],
            tables: Mutex::new(tables),
            #[cfg(feature = "metrics")]
            pending: Pending::new(by_lock),
            nodes: nodes as u64,
            nodes_down: AtomicU64::new(0),
        }
    }

    pub(crate) fn server(&self) -> &Arc<str> {
        &self.server
    }

    /// How often [`exporter`](Self::exporter) is to be called.
    #[cfg(feature = "metrics")]
    pub(crate) const EXPORT_INTERVAL: Duration = EXPORT_INTERVAL;
    #[cfg(not(feature = "metrics"))]
    pub(crate) const EXPORT_INTERVAL: Duration = Duration::MAX;

    /// Returns a function that passes on what has changed since its last call. The last call of all
    /// is to pass true.
    #[cfg(feature = "metrics")]
    pub(crate) fn exporter(self: Arc<Recorder>) -> impl FnMut(bool) + Send + use<> {
        let mut exporter = Exporter::new(self.server.clone());
        move |is_last| {
            let counts = self.read_counts();
            let now = Gauges {
                held: counts.held(),
                waiting: counts.waiting(),
                nodes: self.nodes,
                reachable: self.nodes_reachable(),
            };
            exporter.export(&self.pending, if is_last { Gauges::default() } else { now });
        }
    }

    #[cfg(not(feature = "metrics"))]
    pub(crate) fn exporter(self: Arc<Recorder>) -> impl FnMut(bool) + Send + use<> {
        |_| {}
    }

    pub(crate) fn count(&self, count: Count) {
        self.count_as(count, None, None);
    }

    pub(crate) fn count_of(&self, count: Count, lock: &str) {
        self.count_as(count, None, Some(lock));
    }

    fn count_as(&self, count: Count, error: Option<&'static str>, lock: Option<&str>) {
        self.counts[count as usize].fetch_add(1, Ordering::Relaxed);
        #[cfg(feature = "metrics")]
        self.pending.count(count, error, lock);
        #[cfg(not(feature = "metrics"))]
        let _ = (error, lock);
    }

    fn time(&self, time: Time, outcome: Option<&'static str>, lock: &str, span: Duration) {
        #[cfg(feature = "metrics")]
        if !self.pending.time(time, outcome, lock, span) {
            self.count(Count::ReportsDropped);
        }
        #[cfg(not(feature = "metrics"))]
        let _ = (time, outcome, lock, span);
    }

    pub(crate) fn contended(&self, lock: &str) {
        self.count_of(Count::Contended, lock);
        self.tables.lock().per_lock.touch(lock).contended += 1;
    }

    pub(crate) fn acquired(&self, lock: &str, waited: Duration) {
        self.count_of(Count::Acquired, lock);
        {
            let mut tables = self.tables.lock();
            tables.wait.record(waited);
            let row = tables.per_lock.touch(lock);
            row.acquired += 1;
            row.wait.record(waited);
        }
        self.time(Time::Wait, Some("acquired"), lock, waited);
    }

    pub(crate) fn timed_out(&self, lock: &str, waited: Duration) {
        self.count_of(Count::TimedOut, lock);
        self.tables.lock().per_lock.touch(lock).timed_out += 1;
        self.time(Time::Wait, Some("timed_out"), lock, waited);
    }

    pub(crate) fn failed(&self, lock: &str, error: &LockError) {
        let why = match error {
            LockError::Unavailable { .. } => "unavailable",
            LockError::PoolExhausted { .. } => "pool_exhausted",
            LockError::NoQuorum { .. } => "no_quorum",
            LockError::Refused { .. } => "refused",
            LockError::Tls { .. } => "tls",
            LockError::WrongType { .. } => "wrong_type",
            LockError::Cancelled { .. } => "cancelled",
            LockError::Shutdown => "shutdown",
            _ => "other",
        };
        self.count_as(Count::Failed, Some(why), Some(lock));
    }

    pub(crate) fn renewed(&self, lock: &str, margin: Option<Duration>, took: Duration) {
        self.count_of(Count::Renewals, lock);
        {
            let mut tables = self.tables.lock();
            tables.renewal.record(took);
            if let Some(margin) = margin {
                tables.margin.record(margin);
                tables.per_lock.entry(lock).record_margin(margin);
            }
        }
        self.time(Time::Renewal, None, lock, took);
        margin.into_iter().for_each(|margin| self.time(Time::Margin, None, lock, margin));
    }

    pub(crate) fn released(&self, lock: &str, held: Duration) {
        self.given_up(Count::Released, "released", lock, held);
    }

    pub(crate) fn detached(&self, lock: &str, held: Duration) {
        self.given_up(Count::Detached, "detached", lock, held);
    }

    fn given_up(&self, count: Count, outcome: &'static str, lock: &str, held: Duration) {
        self.count_of(count, lock);
        {
            let mut tables = self.tables.lock();
            tables.hold.record(held);
            tables.per_lock.entry(lock).hold.record(held);
        }
        self.time(Time::Hold, Some(outcome), lock, held);
    }

    pub(crate) fn lost(&self, lock: &str, held: Duration, why: &LockLost) {
        let reason = match why {
            LockLost::Expired => "expired",
            LockLost::Taken { .. } => "taken",
            LockLost::Gone => "gone",
            LockLost::ConnectionLost => "connection_lost",
            LockLost::MaxHold => "max_hold",
            LockLost::Shutdown => "shutdown",
        };
        self.count_as(Count::Lost, Some(reason), Some(lock));
        {
            let mut tables = self.tables.lock();
            tables.hold.record(held);
            let row = tables.per_lock.entry(lock);
            row.lost += 1;
            row.hold.record(held);
        }
        self.time(Time::Hold, Some("lost"), lock, held);
    }

    pub(crate) fn node_down(&self) {
        self.nodes_down.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn node_up(&self) {
        self.nodes_down.fetch_sub(1, Ordering::Relaxed);
    }

    /// Records whether a cluster is down. It counts as one server, however many nodes it has.
    pub(crate) fn cluster_down(&self, is_down: bool) {
        // Called for each reply, so this seldom writes.
        if (self.nodes_down.load(Ordering::Relaxed) != 0) != is_down {
            self.nodes_down.store(is_down.into(), Ordering::Relaxed);
        }
    }

    fn nodes_reachable(&self) -> u64 {
        // Two threads may report the end of an outage before its beginning.
        let down = self.nodes_down.load(Ordering::Relaxed).cast_signed().max(0);
        self.nodes.saturating_sub(down.unsigned_abs())
    }

    fn read_counts(&self) -> Counts {
        // Read in reverse, so that releases are read before acquisitions. Otherwise a snapshot
        // could show more releases than acquisitions.
        let mut counts = Counts::default();
        for (copy, count) in counts.0.iter_mut().zip(&self.counts).rev() {
            *copy = count.load(Ordering::Relaxed);
        }
        counts
    }

    /// Copies everything in chunks. Other threads keep counting between two chunks.
    pub(crate) fn snapshot(&self) -> Metrics {
        let counts = self.read_counts();
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
            nodes: self.nodes,
            nodes_reachable: self.nodes_reachable(),
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
        let recorder = Recorder::new("here".into(), 1, false);
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
        let recorder = Recorder::new("here".into(), 1, false);
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
