//! Metrics and spans that are passed on to the `metrics` and `tracing` facades.

#[cfg(feature = "metrics")]
mod facade {
    use std::{collections::BTreeMap, sync::Arc};

    use metrics::{
        Counter, CounterFn, Gauge, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder,
        SharedString, Unit,
    };
    use parking_lot::Mutex;

    use crate::{
        helpers::{UnwrapReleased, manager},
        support::RedisServer,
    };

    /// Records all values by name and labels.
    #[derive(Clone, Default)]
    struct MemoryRecorder {
        counts: Arc<Mutex<BTreeMap<String, u64>>>,
        times: Arc<Mutex<BTreeMap<String, Vec<f64>>>>,
        described: Arc<Mutex<Vec<String>>>,
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

        fn describe(&self, name: &KeyName) {
            self.described.lock().push(name.as_str().to_owned());
        }
    }

    impl Recorder for MemoryRecorder {
        fn describe_counter(&self, key: KeyName, _: Option<Unit>, _: SharedString) {
            self.describe(&key);
        }

        fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

        fn describe_histogram(&self, key: KeyName, _: Option<Unit>, _: SharedString) {
            self.describe(&key);
        }

        fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
            Counter::from_arc(self.metric(key))
        }

        fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
            Gauge::noop()
        }

        fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
            Histogram::from_arc(self.metric(key))
        }
    }

    #[test]
    fn metrics_are_passed_on_with_server_and_outcome() {
        let server = RedisServer::start();
        let recorder = MemoryRecorder::default();
        let mgr = metrics::with_local_recorder(&recorder, || {
            let mgr = manager(&server);
            let guard = mgr.try_lock("orders:42").unwrap();
            mgr.try_lock("orders:42").unwrap_err();
            guard.release().unwrap().unwrap_released();
            server.cli(&["RPUSH", "lock:list", "x"]);
            mgr.try_lock("list").unwrap_err();
            mgr
        });
        let at = format!("server.address={}", mgr.server());
        let counts = recorder.counts.lock().clone();
        let of = |name: &str| counts.get(&format!("distlock.lock.{name} {at}")).copied();
        assert_eq!(
            [of("attempted"), of("acquired"), of("contended")],
            [Some(3), Some(1), Some(1)],
            "{counts:?}"
        );
        assert_eq!(
            [of("timed_out"), of("released"), of("lost")],
            [Some(1), Some(1), None],
            "{counts:?}"
        );
        assert_eq!(
            counts.get(&format!("distlock.lock.failed {at} error.type=wrong_type")),
            Some(&1),
            "{counts:?}"
        );
        let times = recorder.times.lock().clone();
        let waits = |outcome: &str| {
            times.get(&format!("distlock.lock.wait.duration {at} distlock.outcome={outcome}"))
        };
        assert_eq!(
            (waits("acquired").unwrap().len(), waits("timed_out").unwrap().len()),
            (1, 1),
            "{times:?}"
        );
        let held = &times[&format!("distlock.lock.hold.duration {at} distlock.outcome=released")];
        assert!(held.len() == 1 && held[0] > 0.0 && held[0] < 60.0, "not in seconds: {times:?}");
        let described = recorder.described.lock().clone();
        for name in counts.keys().chain(times.keys()).map(|key| key.split(' ').next().unwrap()) {
            assert!(described.iter().any(|known| known == name), "{name} is not described");
            assert!(!name.contains("42"), "lock names must not be labels");
        }
    }
}

#[cfg(feature = "tracing")]
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
    }
}
