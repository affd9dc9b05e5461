//! The measurements. Each takes its share of the time.

use std::{
    thread,
    time::{Duration, Instant},
};

use distlock::{LockOptions, RedisMgr};
use hdrhistogram::Histogram;
use parking_lot::Mutex;

use crate::{
    clock,
    exit::{Exit, Failure},
};

/// A histogram of one kind of operation.
#[derive(Debug)]
pub(super) struct Samples(Histogram<u64>);

impl Samples {
    fn new() -> Result<Samples, Failure> {
        // From one microsecond to ten minutes, with three digits of precision.
        Histogram::new_with_bounds(1, 600_000_000, 3)
            .map(Samples)
            .map_err(|error| Failure::new(Exit::Unavailable, error.to_string()))
    }

    fn add(&mut self, span: Duration) {
        self.0.saturating_record(u64::try_from(span.as_micros()).unwrap_or(u64::MAX));
    }

    pub(super) fn count(&self) -> u64 {
        self.0.len()
    }

    /// How many can be done in a second, one after another.
    pub(super) fn per_second(&self) -> f64 {
        1e6 / self.0.mean()
    }

    pub(super) fn quantile(&self, part: f64) -> Duration {
        Duration::from_micros(self.0.value_at_quantile(part))
    }
}

/// Measures bare round trips. Over several nodes, each takes until a majority has replied.
pub(super) fn round_trips(mgr: &RedisMgr, time: Duration) -> Result<Samples, Failure> {
    let mut times = Samples::new()?;
    // The first one connects.
    mgr.ping()?;
    let started = clock::now();
    loop {
        times.add(mgr.ping()?);
        if clock::now().duration_since(started) >= time {
            return Ok(times);
        }
    }
}

/// Measures locking and releasing a lock that no other client wants.
pub(super) fn lock_and_release(
    mgr: &RedisMgr,
    name: &str,
    time: Duration,
) -> Result<Samples, Failure> {
    let mut times = Samples::new()?;
    // The first one loads the scripts into the server.
    lock_and_release_once(mgr, name)?;
    let started = clock::now();
    loop {
        times.add(lock_and_release_once(mgr, name)?);
        if clock::now().duration_since(started) >= time {
            return Ok(times);
        }
    }
}

fn lock_and_release_once(mgr: &RedisMgr, name: &str) -> Result<Duration, Failure> {
    let started = clock::now();
    let guard = mgr.try_lock(name)?;
    // Its result does not matter: if another client has the lock by now, the next round fails.
    let _ = guard.release()?;
    Ok(clock::now().duration_since(started))
}

/// Measures from just before a release until the queued thread has the lock. Two threads take
/// turns.
pub(super) fn handovers(mgr: &RedisMgr, name: &str, time: Duration) -> Result<Samples, Failure> {
    let turns = HandoverTurns {
        times: Mutex::new((Samples::new()?, None)),
        until: clock::now() + time,
        wait: time * 2,
    };
    thread::scope(|threads| {
        let other = threads.spawn(|| turns.run(mgr, name));
        let ours = turns.run(mgr, name);
        let panicked = |_| Failure::new(Exit::Unavailable, "a measuring thread panicked");
        ours.and(other.join().map_err(panicked)?)
    })?;
    Ok(turns.times.into_inner().0)
}

struct HandoverTurns {
    /// The samples so far, and the time of the last release for a queued waiter.
    times: Mutex<(Samples, Option<Instant>)>,
    until: Instant,
    wait: Duration,
}

impl HandoverTurns {
    fn run(&self, mgr: &RedisMgr, name: &str) -> Result<(), Failure> {
        while clock::now() < self.until {
            let guard = mgr.try_lock_for(name, self.wait)?;
            let acquired = clock::now();
            let mut times = self.times.lock();
            if let Some(released) = times.1.take() {
                times.0.add(acquired - released);
            }
            drop(times);
            if self.wait_for_waiter(mgr, name)? {
                self.times.lock().1 = Some(clock::now());
            }
            let _ = guard.release()?;
        }
        Ok(())
    }

    /// Returns true once the other thread is queued, or false when the measuring time has passed.
    fn wait_for_waiter(&self, mgr: &RedisMgr, name: &str) -> Result<bool, Failure> {
        while clock::now() < self.until {
            let holder = mgr.holder(name)?;
            if holder.is_some_and(|holder| holder.waiters().is_some_and(|waiters| waiters > 0)) {
                return Ok(true);
            }
            clock::sleep(Duration::from_micros(200));
        }
        Ok(false)
    }
}

/// Measures renewals of one lock, from sending one to its confirmation. Its lease is short, so that
/// there are many. If the lease proves too short for this network, it is doubled.
pub(super) fn renewals(
    mgr: &RedisMgr,
    name: &str,
    time: Duration,
    round_trip: Duration,
) -> Result<RenewalTimes, Failure> {
    let until = clock::now() + time;
    let mut ttl = (round_trip * 30).clamp(Duration::from_millis(100), Duration::from_secs(10));
    while clock::now() < until {
        let guard = mgr.lock_with(name, &LockOptions::new().ttl(ttl).wait(Duration::ZERO))?;
        let left = until.saturating_duration_since(clock::now());
        if guard.lost().recv_timeout(left).is_ok() {
            ttl = (ttl * 2).min(Duration::from_secs(10));
        }
        let _ = guard.release()?;
    }
    let metrics = mgr.metrics();
    let renewal = metrics.renewal();
    Ok(RenewalTimes {
        count: renewal.count(),
        p50: renewal.quantile(0.5),
        p99: renewal.quantile(0.99),
    })
}

/// The renewal times, from the library's own metrics.
#[derive(Debug)]
pub(super) struct RenewalTimes {
    pub(super) count: u64,
    pub(super) p50: Duration,
    pub(super) p99: Duration,
}
