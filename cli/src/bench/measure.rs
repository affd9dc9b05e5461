//! What is measured: each for a part of the time, with the scratch names gone afterwards.

use std::{
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

use distlock::{LockError, LockOptions, RedisMgr};
use hdrhistogram::Histogram;

use crate::clock;

/// Times of one kind.
#[derive(Debug)]
pub(super) struct Times(Histogram<u64>);

impl Times {
    fn new() -> Result<Times, String> {
        // From a microsecond to ten minutes, to three digits.
        Histogram::new_with_bounds(1, 600_000_000, 3).map(Times).map_err(|error| error.to_string())
    }

    fn add(&mut self, span: Duration) {
        self.0.saturating_record(u64::try_from(span.as_micros()).unwrap_or(u64::MAX));
    }

    pub(super) fn count(&self) -> u64 {
        self.0.len()
    }

    /// How often that is in a second, one after another.
    pub(super) fn per_second(&self) -> f64 {
        1e6 / self.0.mean()
    }

    pub(super) fn quantile(&self, part: f64) -> Duration {
        Duration::from_micros(self.0.value_at_quantile(part))
    }
}

/// Why there are no figures.
#[derive(Debug)]
pub(super) enum Trouble {
    Lock(LockError),
    Other(String),
}

impl From<LockError> for Trouble {
    fn from(error: LockError) -> Trouble {
        Trouble::Lock(error)
    }
}

impl From<String> for Trouble {
    fn from(error: String) -> Trouble {
        Trouble::Other(error)
    }
}

/// Round trips that do nothing. To several nodes: until more than half of them have answered.
pub(super) fn round_trips(mgr: &RedisMgr, time: Duration) -> Result<Times, Trouble> {
    let mut times = Times::new()?;
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

/// Taking a lock and giving it up, with nobody else about.
pub(super) fn alone(mgr: &RedisMgr, name: &str, time: Duration) -> Result<Times, Trouble> {
    let mut times = Times::new()?;
    // The first one teaches the server its scripts.
    pair(mgr, name)?;
    let started = clock::now();
    loop {
        times.add(pair(mgr, name)?);
        if clock::now().duration_since(started) >= time {
            return Ok(times);
        }
    }
}

fn pair(mgr: &RedisMgr, name: &str) -> Result<Duration, Trouble> {
    let asked = clock::now();
    let guard = mgr.try_lock(name)?;
    // Whether it was ours until then shows in the next one.
    let _ = guard.release()?;
    Ok(clock::now().duration_since(asked))
}

/// From the moment before a release until the thread that waits in line has the lock. Two threads take turns.
pub(super) fn handovers(mgr: &RedisMgr, name: &str, time: Duration) -> Result<Times, Trouble> {
    let turns = Turns { times: Mutex::new((Times::new()?, None)), until: clock::now() + time, wait: time * 2 };
    thread::scope(|threads| {
        let other = threads.spawn(|| turns.take(mgr, name));
        let ours = turns.take(mgr, name);
        let theirs = other.join().map_err(|_| Trouble::Other("a thread that measures failed".into()))?;
        ours.and(theirs)
    })?;
    let (times, _) = turns.times.into_inner().map_err(|_| Trouble::Other("a thread that measures failed".into()))?;
    Ok(times)
}

struct Turns {
    /// The times so far, and when the lock was let go for somebody who waited.
    times: Mutex<(Times, Option<Instant>)>,
    until: Instant,
    wait: Duration,
}

impl Turns {
    fn take(&self, mgr: &RedisMgr, name: &str) -> Result<(), Trouble> {
        while clock::now() < self.until {
            let guard = mgr.try_lock_for(name, self.wait)?;
            let got = clock::now();
            if let Ok(mut times) = self.times.lock()
                && let Some(let_go) = times.1.take()
            {
                times.0.add(got - let_go);
            }
            let joined = self.await_other(mgr, name)?;
            if joined && let Ok(mut times) = self.times.lock() {
                times.1 = Some(clock::now());
            }
            let _ = guard.release()?;
        }
        Ok(())
    }

    /// True once the other stands in line; false when the time is over.
    fn await_other(&self, mgr: &RedisMgr, name: &str) -> Result<bool, Trouble> {
        while clock::now() < self.until {
            let holder = mgr.holder(name)?;
            if holder.is_some_and(|holder| holder.waiters().is_some_and(|waiters| waiters > 0)) {
                return Ok(true);
            }
            clock::pause(Duration::from_micros(200));
        }
        Ok(false)
    }
}

/// From sending a renewal to its confirmation, of one lock with a lease so short that there are many. A lease that turns
/// out to be too short for the way there is doubled.
pub(super) fn renewals(mgr: &RedisMgr, name: &str, time: Duration, round_trip: Duration) -> Result<Renewals, Trouble> {
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
    Ok(Renewals { count: renewal.count(), p50: renewal.quantile(0.5), p99: renewal.quantile(0.99) })
}

/// As the library has counted them.
#[derive(Debug)]
pub(super) struct Renewals {
    pub(super) count: u64,
    pub(super) p50: Duration,
    pub(super) p99: Duration,
}
