//! Metrics and spans that are passed on to the `metrics` and `tracing` facades.

mod facade {
    use std::{
        collections::{BTreeMap, BTreeSet},
        sync::Arc,
        time::Duration,
    };

    use distlock::{Config, LockOptions, RedisMgr};
    use metrics::{
        Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Metadata,
        Recorder, SharedString, Unit,
    };
    use parking_lot::Mutex;

    use crate::{
        helpers::{UnwrapReleased, config_long_timeouts, in_own_process},
        support::{RedisServer, TEST_TIMEOUT, eventually},
    };

    /// Records all values by name and labels, and the descriptions as rows of the table in
    /// docs/metrics.md.
    #[derive(Clone, Default)]
    struct MemoryRecorder {
        counts: Arc<Mutex<BTreeMap<String, u64>>>,
        gauges: Arc<Mutex<BTreeMap<String, f64>>>,
        times: Arc<Mutex<BTreeMap<String, Vec<f64>>>>,
        described: Arc<Mutex<BTreeMap<String, [String; 3]>>>,
    }

    struct Metric {
        name_and_labels: String,
        recorder: MemoryRecorder,
    }

    impl CounterFn for Metric {
        fn increment(&self, by: u64) {
            let mut counts = self.recorder.counts.lock();
            *counts.entry(self.name_and_labels.clone()).or_default() += by;
        }

        fn absolute(&self, _: u64) {}
    }

    impl GaugeFn for Metric {
        fn increment(&self, by: f64) {
            let mut gauges = self.recorder.gauges.lock();
            *gauges.entry(self.name_and_labels.clone()).or_default() += by;
        }

        fn decrement(&self, by: f64) {
            GaugeFn::increment(self, -by);
        }

        fn set(&self, _: f64) {
            panic!("managers of one server must add up");
        }
    }

    impl HistogramFn for Metric {
        fn record(&self, value: f64) {
            let mut times = self.recorder.times.lock();
            times.entry(self.name_and_labels.clone()).or_default().push(value);
        }
    }

    impl MemoryRecorder {
        fn metric(&self, key: &Key) -> Arc<Metric> {
            let labels: Vec<_> =
                key.labels().map(|label| format!(" {}={}", label.key(), label.value())).collect();
            let name_and_labels = format!("{}{}", key.name(), labels.concat());
            Arc::new(Metric { name_and_labels, recorder: self.clone() })
        }

        fn describe(&self, kind: &str, name: &KeyName, unit: Option<Unit>, about: &str) {
            let unit = unit.map_or("none", |unit| unit.as_str()).to_owned();
            let row = [kind.to_owned(), unit, about.to_owned()];
            self.described.lock().insert(name.as_str().to_owned(), row);
        }

        /// All time series so far: their names and labels.
        fn series(&self) -> Vec<String> {
            let counts: Vec<_> = self.counts.lock().keys().cloned().collect();
            let gauges: Vec<_> = self.gauges.lock().keys().cloned().collect();
            let times: Vec<_> = self.times.lock().keys().cloned().collect();
            [counts, gauges, times].concat()
        }
    }

    impl Recorder for MemoryRecorder {
        fn describe_counter(&self, key: KeyName, unit: Option<Unit>, about: SharedString) {
            self.describe("counter", &key, unit, &about);
        }

        fn describe_gauge(&self, key: KeyName, unit: Option<Unit>, about: SharedString) {
            self.describe("gauge", &key, unit, &about);
        }

        fn describe_histogram(&self, key: KeyName, unit: Option<Unit>, about: SharedString) {
            self.describe("histogram", &key, unit, &about);
        }

        fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
            Counter::from_arc(self.metric(key))
        }

        fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
            Gauge::from_arc(self.metric(key))
        }

        fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
            Histogram::from_arc(self.metric(key))
        }
    }

    /// The cells of the first table in docs/metrics.md whose head begins with `head`.
    fn table(head: &str) -> Vec<Vec<String>> {
        let page =
            std::fs::read_to_string(format!("{}/docs/metrics.md", env!("CARGO_MANIFEST_DIR")))
                .unwrap();
        let rows = page.lines().skip_while(|line| !line.starts_with(head)).skip(2);
        let rows = rows.take_while(|line| line.starts_with('|'));
        let cells = |row: &str| {
            row.trim_matches('|').split('|').map(|cell| cell.trim().replace('`', "")).collect()
        };
        rows.map(cells).collect()
    }

    /// Locks, finds locks held, times out, fails, renews and loses.
    fn use_all(server: &RedisServer, mgr: &RedisMgr) {
        let options = LockOptions::new().ttl(Duration::from_secs(6));
        let guard = mgr.lock_with("orders:42", &options).unwrap();
        mgr.try_lock("orders:42").unwrap_err();
        eventually("it is renewed", TEST_TIMEOUT, || mgr.metrics().renewals() > 0);
        guard.release().unwrap().unwrap_released();
        let passed = mgr.lock_with("passed", &options).unwrap();
        drop(mgr.adopt(&passed.detach().unwrap()).unwrap());
        server.cli(&["RPUSH", "lock:list", "x"]);
        mgr.try_lock("list").unwrap_err();
        let lost = mgr.lock_with("lost", &options).unwrap();
        server.cli(&["DEL", "lock:lost"]);
        eventually("it is lost", TEST_TIMEOUT, || !lost.is_held());
    }

    fn start(server: &RedisServer, configure: impl FnOnce(Config) -> Config) -> RedisMgr {
        RedisMgr::new(configure(config_long_timeouts(server.url()))).unwrap()
    }

    /// The recorder is installed after the manager.
    ///
    /// Fault: N131
    #[test]
    fn recorder_receives_all_metrics_with_their_labels() {
        let name = "observe::exporters::facade::recorder_receives_all_metrics_with_their_labels";
        if !in_own_process(name, &[]) {
            return;
        }
        let server = RedisServer::start();
        let mgr = start(&server, |config| config);
        let recorder = MemoryRecorder::default();
        metrics::set_global_recorder(recorder.clone()).unwrap_or_else(|_| panic!("installed"));
        let at = format!("server_address={}", mgr.server());
        let of = |name: &str| recorder.counts.lock().get(name).copied();
        let lost = |why: &str| of(&format!("distlock_lock_lost_total {at} error_type={why}"));
        eventually("the counters exist", TEST_TIMEOUT, || lost("expired").is_some());
        let zero: BTreeSet<_> = recorder.counts.lock().values().copied().collect();
        assert_eq!(zero, [0].into());
        use_all(&server, &mgr);
        let held = mgr.lock("held").unwrap();
        let gauge = |name: &str| {
            recorder.gauges.lock().get(&format!("distlock_locks_{name} {at}")).copied()
        };
        eventually("a lock is held", TEST_TIMEOUT, || gauge("held") == Some(1.0));
        assert_eq!(gauge("waiting"), Some(0.0));
        drop(held);
        drop(mgr);
        eventually("the gauges are zero", TEST_TIMEOUT, || gauge("held") == Some(0.0));
        let total = |name: &str| of(&format!("distlock_lock_{name}_total {at}"));
        assert_eq!(
            ["attempted", "acquired", "contended", "timed_out", "released", "detached"].map(total),
            [Some(7), Some(5), Some(1), Some(1), Some(3), Some(1)]
        );
        assert_eq!((lost("gone"), lost("taken")), (Some(1), Some(0)));
        assert_eq!(of(&format!("distlock_lock_failed_total {at} error_type=wrong_type")), Some(1));
        let times = recorder.times.lock().clone();
        let held = &times[&format!("distlock_lock_hold_seconds {at} outcome=released")];
        assert!(held.len() == 3 && held[0] > 0.0 && held[0] < 60.0, "not in seconds: {times:?}");
        assert_eq!(times[&format!("distlock_lock_wait_seconds {at} outcome=acquired")].len(), 5);
        assert_eq!(times[&format!("distlock_lock_wait_seconds {at} outcome=timed_out")].len(), 1);
        for series in recorder.series() {
            assert!(!series.contains("orders") && series.contains(&at), "{series}");
        }
    }

    /// Fault: N131
    #[test]
    fn page_of_metrics_lists_what_is_emitted() {
        let name = "observe::exporters::facade::page_of_metrics_lists_what_is_emitted";
        if !in_own_process(name, &[]) {
            return;
        }
        let recorder = MemoryRecorder::default();
        metrics::set_global_recorder(recorder.clone()).unwrap_or_else(|_| panic!("installed"));
        let server = RedisServer::start();
        let mgr = start(&server, |config| config.metrics_by_lock(true));
        // The recorder gets the gauges last, and this one is one until the last export.
        let last = format!("distlock_nodes_reachable server_address={}", mgr.server());
        use_all(&server, &mgr);
        drop(mgr);
        eventually("the last values have been passed on", TEST_TIMEOUT, || {
            let is_lost = |series: &String| series.contains("outcome=lost");
            let reachable = recorder.gauges.lock().get(&last).copied();
            reachable == Some(0.0) && recorder.series().iter().any(is_lost)
        });
        // Without the labels of every metric, and of every lock.
        let mut labels: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        let mut values: BTreeMap<(String, String), BTreeSet<String>> = BTreeMap::new();
        let mut by_lock = BTreeSet::new();
        for series in recorder.series() {
            let mut parts = series.split(' ').map(str::to_owned);
            let name = parts.next().unwrap();
            for part in parts {
                match part.split_once('=').unwrap() {
                    ("server_address", _) => {}
                    ("lock_name", _) => drop(by_lock.insert(name.clone())),
                    (key, value) => {
                        labels.entry(name.clone()).or_default().insert(key.to_owned());
                        let values = values.entry((key.to_owned(), name.clone())).or_default();
                        values.insert(value.to_owned());
                    }
                }
            }
        }
        let described = recorder.described.lock().clone();
        let emitted: BTreeSet<_> = described
            .iter()
            .map(|(name, [kind, unit, about])| {
                let own: Vec<_> = labels.get(name).into_iter().flatten().cloned().collect();
                let own = if own.is_empty() { "–".to_owned() } else { own.join(", ") };
                vec![name.clone(), kind.clone(), unit.clone(), own, about.clone()]
            })
            .collect();
        assert_eq!(table("| name | type").into_iter().collect::<BTreeSet<_>>(), emitted);
        let names = |text: &str| text.split(", ").map(str::to_owned).collect::<BTreeSet<_>>();
        let mut listed = BTreeSet::new();
        for row in table("| label | on") {
            if matches!(&*row[0], "server_address" | "lock_name") {
                continue;
            }
            let emitted = &values[&(row[0].clone(), row[1].clone())];
            assert_eq!(&names(&row[2]), emitted, "{row:?}");
            listed.insert((row[0].clone(), row[1].clone()));
        }
        assert_eq!(listed, values.into_keys().collect());
        for name in by_lock {
            assert!(name.starts_with("distlock_lock_") || name.starts_with("distlock_renewal_"));
        }
        for name in described.keys() {
            let suffix = match &*described[name][0] {
                "counter" => "_total",
                "histogram" => "_seconds",
                _ => "",
            };
            assert!(name.ends_with(suffix), "{name}");
        }
    }
}

mod spans {
    use std::{
        fmt::Debug,
        sync::{
            Arc,
            atomic::{AtomicU64, Ordering},
        },
    };

    use parking_lot::Mutex;
    use tracing::{
        Event, Metadata, Subscriber,
        field::{Field, Visit},
        span::{Attributes, Id, Record},
    };

    use crate::{
        helpers::{UnwrapReleased, in_own_process, manager},
        support::RedisServer,
    };

    /// Records spans: their names, their fields, and when they end.
    #[derive(Clone, Default)]
    struct SpanRecorder {
        lines: Arc<Mutex<Vec<String>>>,
        last: Arc<AtomicU64>,
    }

    struct Fields(String);

    impl Visit for Fields {
        fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
            self.0.push_str(&format!(" {field}={value:?}"));
        }
    }

    impl Subscriber for SpanRecorder {
        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            metadata.is_span()
        }

        fn new_span(&self, span: &Attributes<'_>) -> Id {
            let id = self.last.fetch_add(1, Ordering::Relaxed) + 1;
            let mut fields = Fields(String::new());
            span.record(&mut fields);
            self.lines.lock().push(format!("{id} begins {}{}", span.metadata().name(), fields.0));
            Id::from_u64(id)
        }

        fn record(&self, span: &Id, values: &Record<'_>) {
            let mut fields = Fields(String::new());
            values.record(&mut fields);
            self.lines.lock().push(format!("{}{}", span.into_u64(), fields.0));
        }

        fn record_follows_from(&self, _: &Id, _: &Id) {}
        fn event(&self, _: &Event<'_>) {}
        fn enter(&self, _: &Id) {}
        fn exit(&self, _: &Id) {}

        fn try_close(&self, id: Id) -> bool {
            self.lines.lock().push(format!("{} ends", id.into_u64()));
            true
        }
    }

    #[test]
    fn wait_and_hold_are_one_span_each() {
        // `tracing` caches whether a span is enabled. If a thread without a subscriber reached the
        // span first, it could be disabled for all threads.
        if !in_own_process("observe::exporters::spans::wait_and_hold_are_one_span_each", &[]) {
            return;
        }
        let server = RedisServer::start();
        let recorder = SpanRecorder::default();
        let (id, token) = tracing::subscriber::with_default(recorder.clone(), || {
            let mgr = manager(&server);
            let guard = mgr.try_lock("x").unwrap();
            let (id, token) = (guard.id().to_string(), guard.fencing_token());
            guard.release().unwrap().unwrap_released();
            (id, token)
        });
        let fields = format!("distlock.lock.name=\"x\" distlock.lock.id=\"{id}\"");
        let expected = [
            format!("1 begins distlock.wait {fields}"),
            "1 distlock.outcome=\"acquired\"".into(),
            "1 ends".into(),
            format!("2 begins distlock.hold {fields} distlock.fencing_token={token}"),
            "2 distlock.outcome=\"released\"".into(),
            "2 ends".into(),
        ];
        assert_eq!(*recorder.lines.lock(), expected);
        // The page lists the same spans and fields.
        let page = include_str!("../../../docs/metrics.md");
        for row in [
            "| `distlock.wait` | `distlock.lock.name`, `distlock.lock.id`, `distlock.outcome` |",
            "| `distlock.hold` | `distlock.lock.name`, `distlock.lock.id`, \
             `distlock.fencing_token`, `distlock.outcome` |",
        ] {
            assert!(page.contains(row), "{row}");
        }
    }
}
