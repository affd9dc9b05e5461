//! What goes on to the `metrics` and `tracing` facades.

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

    /// Writes down what it is told, by name and labels.
    #[derive(Clone, Default)]
    struct Notes {
        counts: Arc<Mutex<BTreeMap<String, u64>>>,
        times: Arc<Mutex<BTreeMap<String, Vec<f64>>>>,
        described: Arc<Mutex<Vec<String>>>,
    }

    struct Note(String, Notes);

    impl CounterFn for Note {
        fn increment(&self, by: u64) {
            *self.1.counts.lock().entry(self.0.clone()).or_default() += by;
        }

        fn absolute(&self, _: u64) {}
    }

    impl HistogramFn for Note {
        fn record(&self, value: f64) {
            self.1.times.lock().entry(self.0.clone()).or_default().push(value);
        }
    }

    impl Notes {
        fn note(&self, key: &Key) -> Arc<Note> {
            let labels: Vec<_> =
                key.labels().map(|label| format!(" {}={}", label.key(), label.value())).collect();
            Arc::new(Note(format!("{}{}", key.name(), labels.concat()), self.clone()))
        }

        fn describe(&self, name: &KeyName) {
            self.described.lock().push(name.as_str().to_owned());
        }
    }

    impl Recorder for Notes {
        fn describe_counter(&self, key: KeyName, _: Option<Unit>, _: SharedString) {
            self.describe(&key);
        }

        fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

        fn describe_histogram(&self, key: KeyName, _: Option<Unit>, _: SharedString) {
            self.describe(&key);
        }

        fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
            Counter::from_arc(self.note(key))
        }

        fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
            Gauge::noop()
        }

        fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
            Histogram::from_arc(self.note(key))
        }
    }

    #[test]
    fn what_is_counted_goes_on_with_the_server_and_the_outcome() {
        let server = RedisServer::start();
        let notes = Notes::default();
        let mgr = metrics::with_local_recorder(&notes, || {
            let mgr = manager(&server);
            let guard = mgr.try_lock("orders:42").unwrap();
            mgr.try_lock("orders:42").unwrap_err();
            guard.release().unwrap().unwrap_released();
            server.cli(&["RPUSH", "lock:list", "x"]);
            mgr.try_lock("list").unwrap_err();
            mgr
        });
        let at = format!("server.address={}", mgr.server());
        let counts = notes.counts.lock().clone();
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
        let times = notes.times.lock().clone();
        let waits = |outcome: &str| {
            times.get(&format!("distlock.lock.wait.duration {at} distlock.outcome={outcome}"))
        };
        assert_eq!(
            (waits("acquired").unwrap().len(), waits("timed_out").unwrap().len()),
            (1, 1),
            "{times:?}"
        );
        let held = &times[&format!("distlock.lock.hold.duration {at} distlock.outcome=released")];
        assert!(held.len() == 1 && held[0] > 0.0 && held[0] < 60.0, "in seconds: {times:?}");
        let described = notes.described.lock().clone();
        for name in counts.keys().chain(times.keys()).map(|key| key.split(' ').next().unwrap()) {
            assert!(described.iter().any(|known| known == name), "{name} is not described");
            assert!(!name.contains("42"), "names of locks are no labels");
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

    /// Writes down spans: their names, their fields, and when they end.
    #[derive(Clone, Default)]
    struct Notes {
        lines: Arc<Mutex<Vec<String>>>,
        last: Arc<AtomicU64>,
    }

    struct Fields(String);

    impl Visit for Fields {
        fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
            self.0.push_str(&format!(" {field}={value:?}"));
        }
    }

    impl Subscriber for Notes {
        fn enabled(&self, about: &Metadata<'_>) -> bool {
            about.is_span()
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
    fn a_wait_and_a_hold_are_a_span_each() {
        // A span that another thread, without a subscriber, comes by first at this moment, is
        // switched off for all.
        if !in_own_process("exporters::spans::a_wait_and_a_hold_are_a_span_each", &[]) {
            return;
        }
        let server = RedisServer::start();
        let notes = Notes::default();
        let (id, token) = tracing::subscriber::with_default(notes.clone(), || {
            let mgr = manager(&server);
            let guard = mgr.try_lock("x").unwrap();
            let told = (guard.id().to_string(), guard.fencing_token());
            guard.release().unwrap().unwrap_released();
            told
        });
        let who = format!("distlock.lock.name=\"x\" distlock.lock.id=\"{id}\"");
        let expected = [
            format!("1 begins distlock.wait {who}"),
            "1 distlock.outcome=\"acquired\"".into(),
            "1 ends".into(),
            format!("2 begins distlock.hold {who} distlock.fencing_token={token}"),
            "2 distlock.outcome=\"released\"".into(),
            "2 ends".into(),
        ];
        assert_eq!(*notes.lines.lock(), expected);
    }
}
