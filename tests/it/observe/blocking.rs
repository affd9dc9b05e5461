//! Loggers and metrics recorders that block. No lock may depend on them.

use distlock::{LockGuard, LockLost, RedisMgr};
use parking_lot::{Condvar, Mutex};

use crate::{
    helpers::{
        CALL_LIMIT, SECOND, completes_within, config_medium_timeout, expect_loss, in_own_process,
        with_ttl,
    },
    support::{RedisServer, TEST_TIMEOUT, eventually},
};

/// Blocks each thread that enters until it is opened.
#[derive(Debug, Default)]
struct Gate {
    /// How many have entered, and whether it is open.
    state: Mutex<(usize, bool)>,
    opened: Condvar,
}

impl Gate {
    const fn new() -> Gate {
        Gate { state: Mutex::new((0, false)), opened: Condvar::new() }
    }

    fn enter(&self) {
        let mut state = self.state.lock();
        state.0 += 1;
        self.opened.wait_while(&mut state, |(_, open)| !*open);
    }

    fn await_entry(&self) {
        eventually("somebody is at the gate", TEST_TIMEOUT, || self.state.lock().0 > 0);
    }

    fn open(&self) {
        self.state.lock().1 = true;
        self.opened.notify_all();
    }
}

static GATE: Gate = Gate::new();

struct BlockingLogger;

impl log::Log for BlockingLogger {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        if record.args().to_string().contains("is lost") {
            GATE.enter();
        }
    }

    fn flush(&self) {}
}

fn lock_many(mgr: &RedisMgr) -> Vec<LockGuard> {
    (0..10).map(|n| mgr.lock_with(&format!("n{n}"), &with_ttl(3 * SECOND)).unwrap()).collect()
}

/// Fault: N17, N130
#[test]
fn blocking_logger_delays_no_loss_no_renewal_and_no_shutdown() {
    let name = "observe::blocking::blocking_logger_delays_no_loss_no_renewal_and_no_shutdown";
    if !in_own_process(name, &[]) {
        return;
    }
    log::set_logger(&BlockingLogger).unwrap();
    log::set_max_level(log::LevelFilter::Warn);
    let server = RedisServer::start();
    let mgr = RedisMgr::new(config_medium_timeout(server.url())).unwrap();
    let (guards, kept) = (lock_many(&mgr), mgr.lock_with("kept", &with_ttl(3 * SECOND)).unwrap());
    for guard in &guards {
        server.cli(&["DEL", &format!("lock:{}", guard.name())]);
    }
    GATE.await_entry();
    for guard in &guards {
        assert_eq!(expect_loss(guard), LockLost::Gone);
    }
    let renewals = mgr.metrics().renewals();
    eventually("the other lock is renewed", TEST_TIMEOUT, || {
        mgr.metrics().renewals() > renewals + 2
    });
    assert!(kept.is_held());
    completes_within(CALL_LIMIT, "shutdown", || mgr.shutdown());
    GATE.open();
}

mod recorder {
    use std::sync::Arc;

    use metrics::{
        Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Metadata,
        Recorder, SharedString, Unit,
    };

    use super::*;

    /// Blocks in each value that it is given.
    #[derive(Debug)]
    struct BlockingRecorder;

    impl CounterFn for BlockingRecorder {
        fn increment(&self, _: u64) {
            GATE.enter();
        }

        fn absolute(&self, _: u64) {}
    }

    impl GaugeFn for BlockingRecorder {
        fn increment(&self, _: f64) {
            GATE.enter();
        }

        fn decrement(&self, _: f64) {}

        fn set(&self, _: f64) {
            GATE.enter();
        }
    }

    impl HistogramFn for BlockingRecorder {
        fn record(&self, _: f64) {
            GATE.enter();
        }
    }

    impl Recorder for BlockingRecorder {
        fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

        fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

        fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

        fn register_counter(&self, _: &Key, _: &Metadata<'_>) -> Counter {
            Counter::from_arc(Arc::new(BlockingRecorder))
        }

        fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
            Gauge::from_arc(Arc::new(BlockingRecorder))
        }

        fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
            Histogram::from_arc(Arc::new(BlockingRecorder))
        }
    }

    /// Fault: N130
    #[test]
    fn blocking_recorder_costs_no_lock() {
        if !in_own_process("observe::blocking::recorder::blocking_recorder_costs_no_lock", &[]) {
            return;
        }
        let server = RedisServer::start();
        let mgr = RedisMgr::new(config_medium_timeout(server.url())).unwrap();
        let guards = lock_many(&mgr);
        metrics::set_global_recorder(BlockingRecorder).unwrap();
        GATE.await_entry();
        let renewals = mgr.metrics().renewals();
        let twice = renewals + 2 * guards.len() as u64;
        eventually("all are renewed", TEST_TIMEOUT, || mgr.metrics().renewals() > twice);
        assert!(guards.iter().all(LockGuard::is_held));
        completes_within(CALL_LIMIT, "release", || drop(guards));
        completes_within(CALL_LIMIT, "shutdown", || mgr.shutdown());
        GATE.open();
    }
}
