//! `Metrics`: the counts and times of a manager.

#[cfg(feature = "metrics")]
mod facade;
mod names;
mod per_lock;
mod recorder;
mod timing;

use std::{fmt, sync::Arc, time::Duration};

pub use self::timing::Timing;
pub(crate) use self::{names::Count, recorder::Recorder};
use self::{per_lock::LockStats, recorder::Counts};
use crate::sys::display::{HumanDuration, Quoted};

/// Maximum number of locks in the printed table.
const PRINTED_LOCKS_MAX: usize = 20;

/// A snapshot of the counts and times of a manager since its creation. Prints as a table.
///
/// Every manager keeps these numbers; nothing must be enabled. Each of the 1,000 most recently used
/// locks has its own [`LockMetrics`]. All other locks are added up in [`others`](Self::others).
///
/// ```no_run
/// # fn main() -> distlock::Result<()> {
/// let metrics = distlock::RedisMgr::instance()?.metrics();
/// println!("{metrics}");
/// if metrics.wait().quantile(0.99) > std::time::Duration::from_secs(1) {
///     eprintln!("locks are heavily contended");
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Metrics {
    server: Arc<str>,
    nodes: u64,
    nodes_reachable: u64,
    counts: Counts,
    wait: Timing,
    hold: Timing,
    renewal: Timing,
    margin: Timing,
    locks: Vec<LockMetrics>,
    others: LockMetrics,
}

impl Default for Metrics {
    fn default() -> Metrics {
        Recorder::new("nowhere".into(), 0, false).snapshot()
    }
}

impl Metrics {
    /// Number of acquisitions in progress.
    pub fn waiting(&self) -> u64 {
        self.counts.waiting()
    }

    /// Number of locks held now.
    pub fn held(&self) -> u64 {
        self.counts.held()
    }

    /// Number of servers. A cluster counts as one.
    pub fn nodes(&self) -> u64 {
        self.nodes
    }

    /// Number of servers that are not known to be unreachable. See
    /// [`HandleEvent::unreachable`](crate::HandleEvent::unreachable). A cluster is reachable as
    /// long as one of its nodes replies.
    pub fn nodes_reachable(&self) -> u64 {
        self.nodes_reachable
    }

    /// Time from asking for a lock until it was acquired.
    pub fn wait(&self) -> &Timing {
        &self.wait
    }

    /// Time from acquiring a lock until it was released, or until its loss was noticed.
    pub fn hold(&self) -> &Timing {
        &self.hold
    }

    /// Time from sending a renewal until it was confirmed.
    pub fn renewal(&self) -> &Timing {
        &self.renewal
    }

    /// Time that was left on the lease when a renewal was confirmed. A small value means that the
    /// lock was almost lost.
    pub fn margin(&self) -> &Timing {
        &self.margin
    }

    /// Metrics of each of the most recently used locks, sorted by name.
    pub fn locks(&self) -> &[LockMetrics] {
        &self.locks
    }

    /// Metrics of all other locks together. Their name is empty.
    pub fn others(&self) -> &LockMetrics {
        &self.others
    }
}

/// Metrics of one lock. See [`Metrics::locks`].
///
/// ```no_run
/// # fn main() -> distlock::Result<()> {
/// for lock in distlock::RedisMgr::instance()?.metrics().locks() {
///     let (name, times, mean) = (lock.name(), lock.acquired(), lock.hold().mean());
///     println!("{name}: {times} times, held for {mean:?} on average");
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct LockMetrics(LockStats);

impl LockMetrics {
    /// Name of the lock, without the prefix.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Number of times that the lock was acquired.
    pub fn acquired(&self) -> u64 {
        self.0.acquired
    }

    /// Number of acquisitions that found the lock already held.
    pub fn contended(&self) -> u64 {
        self.0.contended
    }

    /// Number of acquisitions that timed out because the lock stayed held.
    pub fn timed_out(&self) -> u64 {
        self.0.timed_out
    }

    /// Number of times that the lock was lost while it was held.
    pub fn lost(&self) -> u64 {
        self.0.lost
    }

    /// Time from asking for the lock until it was acquired.
    pub fn wait(&self) -> &Timing {
        &self.0.wait
    }

    /// Time from acquiring the lock until it was released, or until its loss was noticed.
    pub fn hold(&self) -> &Timing {
        &self.0.hold
    }

    /// Shortest time that was left on the lease when a renewal was confirmed; `None` if no renewal
    /// was confirmed.
    pub fn min_margin(&self) -> Option<Duration> {
        self.0.min_margin
    }
}

impl fmt::Display for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "locks at {}: {} held, {} waiting", self.server, self.held(), self.waiting())?;
        let counts = [
            ("attempted", self.attempted()),
            ("acquired", self.acquired()),
            ("contended", self.contended()),
            ("timed out", self.timed_out()),
            ("failed", self.failed()),
            ("released", self.released()),
            ("detached", self.detached()),
            ("lost", self.lost()),
            ("renewals", self.renewals()),
            ("renewals failed", self.renewals_failed()),
            ("renewals overdue", self.renewals_overdue()),
            ("reconnected", self.reconnected()),
            ("reports dropped", self.reports_dropped()),
        ];
        let counted = counts
            .iter()
            .filter(|(what, count)| *count > 0 || matches!(*what, "acquired" | "lost"));
        let counted: Vec<_> = counted.map(|(what, count)| format!("{what} {count}")).collect();
        writeln!(f, "  {}", counted.join(", "))?;
        writeln!(
            f,
            "\n  {:<8} {:>9} {:>8} {:>8} {:>8} {:>8} {:>8}",
            "", "count", "min", "p50", "p90", "p99", "max"
        )?;
        for (what, timing) in [
            ("wait", &self.wait),
            ("hold", &self.hold),
            ("renewal", &self.renewal),
            ("margin", &self.margin),
        ] {
            let [half, most, nearly_all] =
                [0.5, 0.9, 0.99].map(|part| cell(timing, timing.quantile(part)));
            let (min, max) = (cell(timing, timing.min()), cell(timing, timing.max()));
            let count = timing.count();
            writeln!(
                f,
                "  {what:<8} {count:>9} {min:>8} {half:>8} {most:>8} {nearly_all:>8} {max:>8}"
            )?;
        }
        let mut locks: Vec<_> = self.locks.iter().collect();
        locks.sort_by_key(|lock| {
            std::cmp::Reverse(lock.acquired() + lock.timed_out() + lock.contended())
        });
        let rest = locks.len().saturating_sub(PRINTED_LOCKS_MAX);
        locks.truncate(PRINTED_LOCKS_MAX);
        if !locks.is_empty() {
            let head = [
                "acquired",
                "contended",
                "timed out",
                "lost",
                "wait p99",
                "hold p50",
                "hold p99",
                "margin",
            ];
            write!(f, "\n  {:<24}", "lock")?;
            head.iter().try_for_each(|head| write!(f, " {head:>9}"))?;
            writeln!(f)?;
        }
        for lock in locks {
            write_row(f, &Quoted(lock.name()).to_string(), lock)?;
        }
        if self.others.acquired() + self.others.timed_out() + self.others.contended() > 0 {
            write_row(f, "others", &self.others)?;
        }
        if rest > 0 {
            writeln!(f, "  and {rest} more")?;
        }
        Ok(())
    }
}

fn write_row(f: &mut fmt::Formatter<'_>, name: &str, lock: &LockMetrics) -> fmt::Result {
    write!(f, "  {name:<24}")?;
    for count in [lock.acquired(), lock.contended(), lock.timed_out(), lock.lost()] {
        write!(f, " {count:>9}")?;
    }
    write!(f, " {:>9}", cell(lock.wait(), lock.wait().quantile(0.99)))?;
    write!(f, " {:>9}", cell(lock.hold(), lock.hold().quantile(0.5)))?;
    write!(f, " {:>9}", cell(lock.hold(), lock.hold().quantile(0.99)))?;
    writeln!(
        f,
        " {:>9}",
        lock.min_margin().map_or_else(|| "-".into(), |margin| HumanDuration(margin).to_string())
    )
}

fn cell(timing: &Timing, span: Duration) -> String {
    if timing.count() == 0 { "-".into() } else { HumanDuration(span).to_string() }
}
