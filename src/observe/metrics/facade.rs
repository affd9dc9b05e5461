//! Forwards the counts and times to the `metrics` facade. Without the feature `metrics` every
//! function here does nothing.
//!
//! Metric names follow OpenTelemetry: dots, no unit in the name, times in seconds. The labels
//! `server.address` and `error.type` are OpenTelemetry's own. Lock names are not used as labels,
//! because their number is unbounded.

#[cfg(not(feature = "metrics"))]
pub(super) use self::off::{count, describe, failed, hold, lost, renewal, wait};
#[cfg(feature = "metrics")]
pub(super) use self::on::{count, describe, failed, hold, lost, renewal, wait};

#[cfg(not(feature = "metrics"))]
mod off {
    use std::{sync::Arc, time::Duration};

    use crate::{core::lock_lost::LockLost, error::LockError, observe::metrics::count::Count};

    pub(in crate::observe::metrics) fn describe() {}
    pub(in crate::observe::metrics) fn count(_: Count, _: &Arc<str>) {}
    pub(in crate::observe::metrics) fn failed(_: &LockError, _: &Arc<str>) {}
    pub(in crate::observe::metrics) fn lost(_: &LockLost, _: &Arc<str>) {}
    pub(in crate::observe::metrics) fn wait(_: Duration, _: &'static str, _: &Arc<str>) {}
    pub(in crate::observe::metrics) fn hold(_: Duration, _: &'static str, _: &Arc<str>) {}
    pub(in crate::observe::metrics) fn renewal(_: Duration, _: Duration, _: &Arc<str>) {}
}

#[cfg(feature = "metrics")]
mod on {
    use std::{
        panic::{AssertUnwindSafe, catch_unwind},
        sync::Arc,
        time::Duration,
    };

    use metrics::{Unit, counter, describe_counter, describe_histogram, histogram};

    use crate::{core::lock_lost::LockLost, error::LockError, observe::metrics::count::Count};

    const ERROR: &str = "error.type";
    const OUTCOME: &str = "distlock.outcome";
    const SERVER: &str = "server.address";

    /// Runs `feed`, which calls the installed recorder. A panic in the recorder, which is user
    /// code, must not end the thread that renews locks.
    fn record_safely(feed: impl FnOnce()) {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(feed)) {
            // Dropping the payload of a panic may panic again.
            std::mem::forget(panic);
        }
    }

    /// Describes all metrics to the recorder, if one is already installed.
    pub(in crate::observe::metrics) fn describe() {
        record_safely(|| {
            for (count, about) in COUNTER_DESCRIPTIONS {
                describe_counter!(counter_name(*count), Unit::Count, *about);
            }
            describe_histogram!(
                "distlock.lock.wait.duration",
                Unit::Seconds,
                "time from asking for a lock until the outcome"
            );
            describe_histogram!(
                "distlock.lock.hold.duration",
                Unit::Seconds,
                "time from acquiring a lock until its release or loss"
            );
            describe_histogram!(
                "distlock.renewal.duration",
                Unit::Seconds,
                "time from sending a renewal until its confirmation"
            );
            describe_histogram!(
                "distlock.renewal.margin",
                Unit::Seconds,
                "time left on a lease when its renewal was confirmed"
            );
        });
    }

    const COUNTER_DESCRIPTIONS: &[(Count, &str)] = &[
        (Count::Attempted, "acquisitions attempted"),
        (Count::Acquired, "locks acquired"),
        (Count::Contended, "acquisitions that found the lock already held"),
        (Count::TimedOut, "acquisitions that timed out"),
        (Count::Failed, "acquisitions that failed for a reason other than contention"),
        (Count::Released, "locks released"),
        (Count::Lost, "locks lost while they were held"),
        (Count::Renewals, "renewals confirmed"),
        (Count::RenewalsFailed, "renewals that were not confirmed"),
        (Count::RenewalsOverdue, "renewals overdue"),
        (Count::Reconnected, "servers reached again after an outage"),
        (Count::ServersChanged, "node restarts, replacements and possible losses of locks"),
        (Count::EventsDropped, "events dropped because a handler was too slow"),
    ];

    fn counter_name(count: Count) -> &'static str {
        match count {
            Count::Attempted => "distlock.lock.attempted",
            Count::Acquired => "distlock.lock.acquired",
            Count::Contended => "distlock.lock.contended",
            Count::TimedOut => "distlock.lock.timed_out",
            Count::Failed => "distlock.lock.failed",
            Count::Released => "distlock.lock.released",
            Count::Lost => "distlock.lock.lost",
            Count::Renewals => "distlock.renewal.confirmed",
            Count::RenewalsFailed => "distlock.renewal.failed",
            Count::RenewalsOverdue => "distlock.renewal.overdue",
            Count::Reconnected => "distlock.server.reconnected",
            Count::ServersChanged => "distlock.server.changed",
            Count::EventsDropped => "distlock.events.dropped",
        }
    }

    fn server_label(server: &Arc<str>) -> metrics::SharedString {
        metrics::SharedString::from(server.clone())
    }

    pub(in crate::observe::metrics) fn count(count: Count, server: &Arc<str>) {
        record_safely(|| {
            counter!(counter_name(count), SERVER => server_label(server)).increment(1)
        });
    }

    pub(in crate::observe::metrics) fn failed(error: &LockError, server: &Arc<str>) {
        let why = match error {
            LockError::Unavailable { .. } => "unavailable",
            LockError::PoolExhausted { .. } => "pool_exhausted",
            LockError::NoQuorum { .. } => "no_quorum",
            LockError::Refused { .. } => "refused",
            LockError::WrongType { .. } => "wrong_type",
            LockError::Shutdown => "shutdown",
            _ => "_OTHER",
        };
        record_safely(|| {
            counter!(counter_name(Count::Failed), SERVER => server_label(server), ERROR => why)
                .increment(1)
        });
    }

    pub(in crate::observe::metrics) fn lost(why: &LockLost, server: &Arc<str>) {
        let why = match why {
            LockLost::Expired => "expired",
            LockLost::Taken { .. } => "taken",
            LockLost::Gone => "gone",
            LockLost::MaxHold => "max_hold",
            LockLost::Shutdown => "shutdown",
        };
        record_safely(|| {
            counter!(counter_name(Count::Lost), SERVER => server_label(server), ERROR => why)
                .increment(1)
        });
    }

    pub(in crate::observe::metrics) fn wait(
        span: Duration,
        outcome: &'static str,
        server: &Arc<str>,
    ) {
        record_safely(|| {
            histogram!(
                "distlock.lock.wait.duration",
                SERVER => server_label(server),
                OUTCOME => outcome
            )
            .record(span.as_secs_f64());
        });
    }

    pub(in crate::observe::metrics) fn hold(
        span: Duration,
        outcome: &'static str,
        server: &Arc<str>,
    ) {
        record_safely(|| {
            histogram!(
                "distlock.lock.hold.duration",
                SERVER => server_label(server),
                OUTCOME => outcome
            )
            .record(span.as_secs_f64());
        });
    }

    pub(in crate::observe::metrics) fn renewal(
        took: Duration,
        margin: Duration,
        server: &Arc<str>,
    ) {
        record_safely(|| {
            histogram!("distlock.renewal.duration", SERVER => server_label(server))
                .record(took.as_secs_f64());
            histogram!("distlock.renewal.margin", SERVER => server_label(server))
                .record(margin.as_secs_f64());
        });
    }
}
