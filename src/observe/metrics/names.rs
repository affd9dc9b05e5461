//! The metrics, with their names and descriptions. `Count`: the kinds of events that have a
//! counter. `Time`: what is measured.

use super::Metrics;

/// Defines [`Count`] from one table, with the name and description of each metric, and the methods
/// of [`Metrics`] that return the counters.
macro_rules! counts {
    ($($(#[$about_method:meta])* $method:ident: $count:ident, $name:literal, $about:literal;)*) => {
        /// Kinds of events that have a counter.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub(crate) enum Count {
            $($count,)*
        }

        impl Count {
            /// All counters, in the order of the life of a lock.
            pub(super) const ALL: [Count; [$($name),*].len()] = [$(Count::$count),*];

            /// Name and description of the metric.
            #[cfg(feature = "metrics")]
            pub(super) fn metric(self) -> (&'static str, &'static str) {
                match self {
                    $(Count::$count => ($name, $about),)*
                }
            }
        }

        impl Metrics {
            $(
                $(#[$about_method])*
                pub fn $method(&self) -> u64 {
                    self.counts.get(Count::$count)
                }
            )*
        }
    };
}

counts! {
    /// Number of acquisitions that were attempted.
    attempted: Attempted, "distlock_lock_attempted_total", "Acquisitions attempted";
    /// Number of locks acquired.
    acquired: Acquired, "distlock_lock_acquired_total", "Locks acquired";
    /// Number of acquisitions that found the lock already held.
    contended: Contended, "distlock_lock_contended_total",
        "Acquisitions that found the lock held";
    /// Number of acquisitions that timed out because the lock stayed held.
    timed_out: TimedOut, "distlock_lock_timed_out_total", "Acquisitions that timed out";
    /// Number of acquisitions that failed for a reason other than contention.
    failed: Failed, "distlock_lock_failed_total",
        "Acquisitions that failed for a reason other than contention";
    /// Number of locks released by their holders.
    released: Released, "distlock_lock_released_total", "Locks released";
    /// Number of locks that their holders detached, for a successor.
    detached: Detached, "distlock_lock_detached_total", "Locks detached";
    /// Number of locks lost while they were held.
    lost: Lost, "distlock_lock_lost_total", "Locks lost while they were held";
    /// Number of confirmed renewals.
    renewals: Renewals, "distlock_renewal_confirmed_total", "Renewals confirmed";
    /// Number of renewals that were not confirmed.
    renewals_failed: RenewalsFailed, "distlock_renewal_failed_total", "Renewals not confirmed";
    /// Number of overdue renewals: half of the lease's validity passed without a confirmation,
    /// although a renewal was due before.
    renewals_overdue: RenewalsOverdue, "distlock_renewal_overdue_total", "Renewals overdue";
    /// Number of times that a server was reached again after an outage.
    reconnected: Reconnected, "distlock_server_reconnected_total",
        "Servers reached again after an outage";
    /// Number of times that one of several nodes was restarted or replaced, or may have lost its
    /// locks.
    servers_changed: ServersChanged, "distlock_server_changed_total",
        "Node restarts, replacements and possible losses of locks";
    /// Number of log lines, events and exported durations dropped because a logger, an event
    /// handler or a metrics recorder was too slow.
    reports_dropped: ReportsDropped, "distlock_reports_dropped_total",
        "Log lines, events and durations dropped because user code was too slow";
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Time {
    Wait,
    Hold,
    Renewal,
    Margin,
}
