//! Passes the counts and times on to the `metrics` facade, with the feature `metrics`.
//!
//! The recorder is user code, and may block. So all threads only note what is to be passed on, and
//! the outbox's thread calls the recorder, twice a second.
//!
//! The names are those of Prometheus, with units; docs/metrics.md lists them. Lock names are a
//! label only if the user asks for it, because their number is unbounded.

use std::{collections::HashMap, mem, ptr, sync::Arc, time::Duration};

use metrics::{Key, Label, Level, Metadata, SharedString, Unit};
use parking_lot::Mutex;

use super::names::{Count, Time};

/// Values of the gauges.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Gauges {
    pub(super) held: u64,
    pub(super) waiting: u64,
    pub(super) nodes: u64,
    pub(super) reachable: u64,
}

pub(super) const EXPORT_INTERVAL: Duration = Duration::from_millis(500);
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
pub(super) struct Pending {
    by_lock: bool,
    values: Mutex<Values>,
}

#[derive(Debug, Default)]
struct Values {
    counts: HashMap<Series<Count>, u64>,
    times: Vec<(Series<Time>, f64)>,
}

impl Pending {
    pub(super) fn new(by_lock: bool) -> Pending {
        Pending { by_lock, values: Mutex::default() }
    }

    pub(super) fn count(&self, what: Count, label: Option<&'static str>, lock: Option<&str>) {
        let lock = lock.filter(|_| self.by_lock).map(Box::from);
        let counts = &mut self.values.lock().counts;
        // Beyond the limit, the lock's name is left out.
        let lock = lock.filter(|_| counts.len() < PENDING_MAX);
        *counts.entry(Series { what, label, lock }).or_default() += 1;
    }

    /// Returns false if the duration is dropped, because the recorder is too slow.
    pub(super) fn time(
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

/// Values of the label [`ERROR`] of a counter, if it has that.
fn errors(count: Count) -> &'static [&'static str] {
    match count {
        Count::Failed => &[
            "unavailable",
            "pool_exhausted",
            "no_quorum",
            "refused",
            "tls",
            "wrong_type",
            "cancelled",
            "shutdown",
            "other",
        ],
        Count::Lost => &["expired", "taken", "gone", "connection_lost", "max_hold", "shutdown"],
        _ => &[],
    }
}

/// Name and help text.
fn histogram(time: Time) -> (&'static str, &'static str) {
    match time {
        Time::Wait => {
            ("distlock_lock_wait_seconds", "Time from asking for a lock until the outcome")
        }
        Time::Hold => {
            ("distlock_lock_hold_seconds", "Time from acquiring a lock until its release or loss")
        }
        Time::Renewal => {
            ("distlock_renewal_seconds", "Time from sending a renewal until its confirmation")
        }
        Time::Margin => (
            "distlock_renewal_margin_seconds",
            "Time left on a lease when a renewal was confirmed that did not confirm its grant",
        ),
    }
}

const TIMES: [Time; 4] = [Time::Wait, Time::Hold, Time::Renewal, Time::Margin];

fn gauges_of(values: Gauges) -> [(&'static str, &'static str, u64); 4] {
    [
        ("distlock_locks_held", "Locks held now", values.held),
        ("distlock_locks_waiting", "Acquisitions in progress", values.waiting),
        ("distlock_nodes", "Servers; a cluster counts as one", values.nodes),
        (
            "distlock_nodes_reachable",
            "Servers not known to be unreachable; a cluster counts as reachable while one of its \
             nodes replies",
            values.reachable,
        ),
    ]
}

/// Calls the installed recorder, on the outbox's thread.
pub(super) struct Exporter {
    server: SharedString,
    /// Address of the recorder that knows the metrics. Another one may be installed later.
    known_to: usize,
    /// What has been passed on. Only changes are, so that managers of one server add up.
    gauges: Gauges,
}

impl Exporter {
    pub(super) fn new(server: Arc<str>) -> Exporter {
        Exporter { server: server.into(), known_to: 0, gauges: Gauges::default() }
    }

    pub(super) fn export(&mut self, pending: &Pending, gauges: Gauges) {
        let Values { counts, times } = mem::take(&mut *pending.values.lock());
        metrics::with_recorder(|recorder| {
            let address = ptr::from_ref(recorder).cast::<()>().addr();
            if mem::replace(&mut self.known_to, address) != address {
                self.gauges = Gauges::default();
                self.introduce(recorder);
            }
            for (Series { what, label, lock }, count) in counts {
                let key = self.key(what.metric().0, ERROR, label, lock);
                recorder.register_counter(&key, &METADATA).increment(count);
            }
            for (Series { what, label, lock }, seconds) in times {
                let key = self.key(histogram(what).0, OUTCOME, label, lock);
                recorder.register_histogram(&key, &METADATA).record(seconds);
            }
            let former = gauges_of(mem::replace(&mut self.gauges, gauges));
            for ((name, _, now), (.., before)) in gauges_of(gauges).iter().zip(former) {
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
            let ((name, about), errors) = (count.metric(), errors(count));
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
        for (name, about, _) in gauges_of(Gauges::default()) {
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
