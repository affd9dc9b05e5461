//! `Metrics`: what a manager has counted, and how long things took.

mod facade;
mod per_lock;
mod recorder;
mod timing;

use std::{fmt, sync::Arc, time::Duration};

pub(crate) use self::recorder::{Count, Recorder};
pub use self::timing::Timing;
use self::{per_lock::LockStats, recorder::Counts};
use crate::display::{HumanDuration, Quoted};

/// Locks that stand in the table for people.
const PRINTED_LOCKS_MAX: usize = 20;

/// What a manager has counted since it was made: a copy, which prints as a table.
///
/// Every manager counts, always. For each of the 1,000 locks that it used last there is a
/// [`LockMetrics`]; all the rest are counted together as [`others`](Self::others).
///
/// ```no_run
/// # fn main() -> distlock::Result<()> {
/// let metrics = distlock::RedisMgr::instance()?.metrics();
/// println!("{metrics}");
/// if metrics.wait().quantile(0.99) > std::time::Duration::from_secs(1) {
///     eprintln!("locks are in short supply");
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Metrics {
    server: Arc<str>,
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
        Recorder::new("nowhere".into()).snapshot()
    }
}

impl Metrics {
    /// How many locks were asked for.
    pub fn attempted(&self) -> u64 {
        self.counts.get(Count::Attempted)
    }

    /// How many were taken.
    pub fn acquired(&self) -> u64 {
        self.counts.get(Count::Acquired)
    }

    /// How often somebody else held the lock that was asked for.
    pub fn contended(&self) -> u64 {
        self.counts.get(Count::Contended)
    }

    /// How often somebody else held it for longer than the caller wanted to wait.
    pub fn timed_out(&self) -> u64 {
        self.counts.get(Count::TimedOut)
    }

    /// How often a lock could not be had for another reason.
    pub fn failed(&self) -> u64 {
        self.counts.get(Count::Failed)
    }

    /// How many were given up by their holders.
    pub fn released(&self) -> u64 {
        self.counts.get(Count::Released)
    }

    /// How many were lost while they were held.
    pub fn lost(&self) -> u64 {
        self.counts.get(Count::Lost)
    }

    /// How many are asked for now, without an outcome yet.
    pub fn waiting(&self) -> u64 {
        self.attempted().saturating_sub(self.acquired() + self.timed_out() + self.failed())
    }

    /// How many are held now.
    pub fn held(&self) -> u64 {
        self.acquired().saturating_sub(self.released() + self.lost())
    }

    /// How often a lease was renewed.
    pub fn renewals(&self) -> u64 {
        self.counts.get(Count::Renewals)
    }

    /// How often a renewal was not confirmed.
    pub fn renewals_failed(&self) -> u64 {
        self.counts.get(Count::RenewalsFailed)
    }

    /// How often half of a lease was over without the confirmation that was due.
    pub fn dangers(&self) -> u64 {
        self.counts.get(Count::RenewalsOverdue)
    }

    /// How often a server was connected to again after it had been away.
    pub fn reconnected(&self) -> u64 {
        self.counts.get(Count::Reconnected)
    }

    /// How often one of several nodes was not what it had been, or might have forgotten its locks.
    pub fn servers_changed(&self) -> u64 {
        self.counts.get(Count::ServersChanged)
    }

    /// How many events handlers were too slow for.
    pub fn events_dropped(&self) -> u64 {
        self.counts.get(Count::EventsDropped)
    }

    /// From asking for a lock until it was taken.
    pub fn wait(&self) -> &Timing {
        &self.wait
    }

    /// From taking a lock until it was given up, or its loss was noticed.
    pub fn hold(&self) -> &Timing {
        &self.hold
    }

    /// From sending a renewal to its confirmation.
    pub fn renewal(&self) -> &Timing {
        &self.renewal
    }

    /// For how much longer holders could have believed in their locks when a renewal was confirmed:
    /// how close it was.
    pub fn margin(&self) -> &Timing {
        &self.margin
    }

    /// What was counted for each of the locks that were used last, by name.
    pub fn locks(&self) -> &[LockMetrics] {
        &self.locks
    }

    /// What was counted for all other locks together; its name is empty.
    pub fn others(&self) -> &LockMetrics {
        &self.others
    }
}

/// What was counted for one lock. See [`Metrics::locks`].
///
/// ```no_run
/// # fn main() -> distlock::Result<()> {
/// for lock in distlock::RedisMgr::instance()?.metrics().locks() {
///     println!("{}: {} times, held for {:?} on average", lock.name(), lock.acquired(), lock.hold().mean());
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct LockMetrics(LockStats);

impl LockMetrics {
    /// The name of the lock, without its prefix.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// How often it was taken.
    pub fn acquired(&self) -> u64 {
        self.0.acquired
    }

    /// How often somebody else held it when it was asked for.
    pub fn contended(&self) -> u64 {
        self.0.contended
    }

    /// How often somebody else held it for longer than the caller wanted to wait.
    pub fn timed_out(&self) -> u64 {
        self.0.timed_out
    }

    /// How often it was lost while it was held.
    pub fn lost(&self) -> u64 {
        self.0.lost
    }

    /// From asking for it until it was taken.
    pub fn wait(&self) -> &Timing {
        &self.0.wait
    }

    /// From taking it until it was given up, or its loss was noticed.
    pub fn hold(&self) -> &Timing {
        &self.0.hold
    }

    /// The least time that was left to believe in it when a renewal was confirmed; `None` when
    /// there was no renewal.
    pub fn least_margin(&self) -> Option<Duration> {
        self.0.min_margin
    }
}

impl fmt::Display for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "locks at {}: {} held, {} asked for",
            self.server,
            self.held(),
            self.waiting()
        )?;
        let counts = [
            ("attempted", self.attempted()),
            ("acquired", self.acquired()),
            ("contended", self.contended()),
            ("timed out", self.timed_out()),
            ("failed", self.failed()),
            ("released", self.released()),
            ("lost", self.lost()),
            ("renewed", self.renewals()),
            ("not renewed", self.renewals_failed()),
            ("in danger", self.dangers()),
            ("reconnected", self.reconnected()),
            ("events dropped", self.events_dropped()),
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
        lock.least_margin().map_or_else(|| "-".into(), |margin| HumanDuration(margin).to_string())
    )
}

fn cell(timing: &Timing, span: Duration) -> String {
    if timing.count() == 0 { "-".into() } else { HumanDuration(span).to_string() }
}
