//! Passes the counts and times on to the `metrics` facade. Without the feature `metrics` nothing
//! here does anything.
//!
//! The recorder is user code, and may block. So all threads only note what is to be passed on, and
//! the outbox's thread calls the recorder, twice a second.
//!
//! The names are those of Prometheus, with units; docs/metrics.md lists them. Lock names are a
//! label only if the user asks for it, because their number is unbounded.

#[cfg(not(feature = "metrics"))]
pub(super) use self::off::{EXPORT_INTERVAL, Exporter, Pending};
#[cfg(feature = "metrics")]
pub(super) use self::on::{EXPORT_INTERVAL, Exporter, Pending};

/// Values of the gauges.
#[derive(Clone, Copy, Debug, Default)]
#[cfg_attr(not(feature = "metrics"), expect(dead_code, reason = "for the recorder only"))]
pub(super) struct Gauges {
    pub(super) held: u64,
    pub(super) waiting: u64,
    pub(super) nodes: u64,
    pub(super) reachable: u64,
}

#[cfg(not(feature = "metrics"))]
mod off {
    use std::{sync::Arc, time::Duration};

    use super::Gauges;
    use crate::observe::metrics::count::{Count, Time};

    pub(in crate::observe::metrics) const EXPORT_INTERVAL: Duration = Duration::MAX;

    #[derive(Debug)]
    pub(in crate::observe::metrics) struct Pending;

    impl Pending {
        pub(in crate::observe::metrics) fn new(_: bool) -> Pending {
            Pending
        }

        pub(in crate::observe::metrics) fn count(
            &self,
            _: Count,
            _: Option<&'static str>,
            _: Option<&str>,
        ) {
        }

        pub(in crate::observe::metrics) fn time(
            &self,
            _: Time,
            _: Option<&'static str>,
            _: &str,
            _: Duration,
        ) -> bool {
            true
        }
    }

    pub(in crate::observe::metrics) struct Exporter;

    impl Exporter {
        pub(in crate::observe::metrics) fn new(_: Arc<str>) -> Exporter {
            Exporter
        }

        pub(in crate::observe::metrics) fn export(&mut self, _: &Pending, _: Gauges) {}
    }
}

#[cfg(feature = "metrics")]
mod on {
    use std::{collections::HashMap, mem, ptr, sync::Arc, time::Duration};

    use metrics::{Key, Label, Level, Metadata, SharedString, Unit};
    use parking_lot::Mutex;

    use super::Gauges;
    use crate::observe::metrics::count::{Count, Time};

    pub(in crate::observe::metrics) const EXPORT_INTERVAL: Duration = Duration::from_millis(500);
    /// Maximum number of series and of samples that wait for the next export.
    const PENDING_MAX: usize = 16_384;

    const METADATA: Metadata<'static> =
        Metadata::new(module_path!(), Level::INFO, Some(module_path!()));

    const SERVER: &str = "server_address";
    const LOCK: &str = "lock_name";
    const ERROR: &str = "error_type";
    const OUTCOME: &str = "outcome";

    /// A counter or a histogram, with its labels.
    #[derive(Debug, PartialEq, Eq, Hash)]
    struct Series<T> {
        what: T,
        /// The value of its own label.
        label: Option<&'static str>,
        lock: Option<Box<str>>,
    }

    /// What is still to be passed on.
    #[derive(Debug)]
    pub(in crate::observe::metrics) struct Pending {
        by_lock: bool,
        values: Mutex<Values>,
    }

    #[derive(Debug, Default)]
    struct Values {
        counts: HashMap<Series<Count>, u64>,
        times: Vec<(Series<Time>, f64)>,
    }

    impl Pending {
        pub(in crate::observe::metrics) fn new(by_lock: bool) -> Pending {
            Pending { by_lock, values: Mutex::default() }
        }

        pub(in crate::observe::metrics) fn count(
            &self,
            what: Count,
            label: Option<&'static str>,
            lock: Option<&str>,
        ) {
            let lock = lock.filter(|_| self.by_lock).map(Box::from);
            let counts = &mut self.values.lock().counts;
            // Beyond the limit, the lock's name is left out.
            let lock = lock.filter(|_| counts.len() < PENDING_MAX);
            *counts.entry(Series { what, label, lock }).or_default() += 1;
        }

        /// Returns false if the duration is dropped, because the recorder is too slow.
        pub(in crate::observe::metrics) fn time(
            &self,
            what: Time,
            label: Option<&'static str>,
            lock: &str,
            time: Duration,
        ) -> bool {
            let lock = self.by_lock.then(|| lock.into());
            let times = &mut self.values.lock().times;
            let has_room = times.len() < PENDING_MAX;
            if has_room {
                times.push((Series { what, label, lock }, time.as_secs_f64()));
            }
            has_room
        }
    }

    struct Counter {
        name: &'static str,
        about: &'static str,
        /// The values of the label [`ERROR`], if it has that.
        errors: &'static [&'static str],
    }

    fn counter(count: Count) -> Counter {
        let (name, about) = match count {
            Count::Attempted => ("distlock_lock_attempted_total", "Acquisitions attempted"),
            Count::Acquired => ("distlock_lock_acquired_total", "Locks acquired"),
            Count::Contended => {
                ("distlock_lock_contended_total", "Acquisitions that found the lock held")
            }
            Count::TimedOut => ("distlock_lock_timed_out_total", "Acquisitions that timed out"),
            Count::Failed => (
                "distlock_lock_failed_total",
                "Acquisitions that failed for a reason other than contention",
            ),
            Count::Released => ("distlock_lock_released_total", "Locks released"),
            Count::Lost => ("distlock_lock_lost_total", "Locks lost while they were held"),
            Count::Renewals => ("distlock_renewal_confirmed_total", "Renewals confirmed"),
            Count::RenewalsFailed => ("distlock_renewal_failed_total", "Renewals not confirmed"),
            Count::RenewalsOverdue => ("distlock_renewal_overdue_total", "Renewals overdue"),
            Count::Reconnected => {
                ("distlock_server_reconnected_total", "Servers reached again after an outage")
            }
            Count::ServersChanged => (
                "distlock_server_changed_total",
                "Node restarts, replacements and possible losses of locks",
            ),
            Count::ReportsDropped => (
                "distlock_reports_dropped_total",
                "Log lines, events and durations dropped because user code was too slow",
            ),
        };
        let errors: &[_] = match count {
            Count::Failed => &[
                "unavailable",
                "pool_exhausted",
                "no_quorum",
                "refused",
                "wrong_type",
                "shutdown",
                "other",
            ],
            Count::Lost => &["expired", "taken", "gone", "max_hold", "shutdown"],
            _ => &[],
        };
        Counter { name, about, errors }
    }

    /// Name and help text.
    fn histogram(time: Time) -> (&'static str, &'static str) {
        match time {
            Time::Wait => {
                ("distlock_lock_wait_seconds", "Time from asking for a lock until the outcome")
            }
            Time::Hold => (
                "distlock_lock_hold_seconds",
                "Time from acquiring a lock until its release or loss",
            ),
            Time::Renewal => {
                ("distlock_renewal_seconds", "Time from sending a renewal until its confirmation")
            }
            Time::Margin => (
                "distlock_renewal_margin_seconds",
                "Time left on a lease when its renewal was confirmed",
            ),
        }
    }

    const TIMES: [Time; 4] = [Time::Wait, Time::Hold, Time::Renewal, Time::Margin];

    fn gauges(values: Gauges) -> [(&'static str, &'static str, u64); 4] {
        [
            ("distlock_locks_held", "Locks held now", values.held),
            ("distlock_locks_waiting", "Acquisitions in progress", values.waiting),
            ("distlock_nodes", "Servers", values.nodes),
            ("distlock_nodes_reachable", "Servers not known to be unreachable", values.reachable),
        ]
    }

    /// Calls the installed recorder, on the outbox's thread.
    pub(in crate::observe::metrics) struct Exporter {
        server: SharedString,
        /// Address of the recorder that knows the metrics. Another one may be installed later.
        known_to: usize,
        /// What has been passed on. Only changes are, so that managers of one server add up.
        gauges: Gauges,
    }

    impl Exporter {
        pub(in crate::observe::metrics) fn new(server: Arc<str>) -> Exporter {
            Exporter { server: server.into(), known_to: 0, gauges: Gauges::default() }
        }

        pub(in crate::observe::metrics) fn export(&mut self, pending: &Pending, gauges: Gauges) {
            let Values { counts, times } = mem::take(&mut *pending.values.lock());
            metrics::with_recorder(|recorder| {
                let address = ptr::from_ref(recorder).cast::<()>().addr();
                if mem::replace(&mut self.known_to, address) != address {
                    self.gauges = Gauges::default();
                    self.introduce(recorder);
                }
                for (Series { what, label, lock }, count) in counts {
                    let key = self.key(counter(what).name, ERROR, label, lock);
                    recorder.register_counter(&key, &METADATA).increment(count);
                }
                for (Series { what, label, lock }, seconds) in times {
                    let key = self.key(histogram(what).0, OUTCOME, label, lock);
                    recorder.register_histogram(&key, &METADATA).record(seconds);
                }
                let former = super::on::gauges(mem::replace(&mut self.gauges, gauges));
                for ((name, _, now), (.., before)) in super::on::gauges(gauges).iter().zip(former) {
                    let gauge =
                        recorder.register_gauge(&self.key(name, OUTCOME, None, None), &METADATA);
                    if *now >= before {
                        gauge.increment((now - before) as f64);
                    } else {
                        gauge.decrement((before - now) as f64);
                    }
                }
            });
        }

        /// Describes all metrics, and registers the counters, so that they are zero until used.
        fn introduce(&self, recorder: &dyn metrics::Recorder) {
            for count in Count::ALL {
                let Counter { name, about, errors } = counter(count);
                recorder.describe_counter(name.into(), Some(Unit::Count), about.into());
                let register = |error| {
                    let key = self.key(name, ERROR, error, None);
                    recorder.register_counter(&key, &METADATA).increment(0);
                };
                if errors.is_empty() {
                    register(None);
                }
                errors.iter().for_each(|error| register(Some(error)));
            }
            for time in TIMES {
                let (name, about) = histogram(time);
                recorder.describe_histogram(name.into(), Some(Unit::Seconds), about.into());
            }
            for (name, about, _) in super::on::gauges(Gauges::default()) {
                recorder.describe_gauge(name.into(), Some(Unit::Count), about.into());
            }
        }

        fn key(
            &self,
            name: &'static str,
            label: &'static str,
            value: Option<&'static str>,
            lock: Option<Box<str>>,
        ) -> Key {
            let mut labels = vec![Label::new(SERVER, self.server.clone())];
            labels.extend(value.map(|value| Label::new(label, value)));
            labels.extend(lock.map(|lock| Label::new(LOCK, String::from(lock))));
            Key::from_parts(name, labels)
        }
    }
}
