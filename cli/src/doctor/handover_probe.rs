//! Hands a temporary lock from one thread to another, to see whether scripts, queue and grant
//! messages work.

use std::{thread, time::Duration};

use distlock::{LockError, LockManager, Released};

use super::facts::Handover;
use crate::clock;

/// Maximum time for each step.
pub(super) const STEP_TIMEOUT: Duration = Duration::from_secs(5);
/// Time between two looks at whether the waiter is queued.
const QUEUE_POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Number of hand-overs, of which the fastest counts, because other load on the machines can only
/// slow one down.
const ROUNDS: usize = 3;

/// Waits for the lock for at most `wait` at first, if other runs of the doctor use the same one.
pub(super) fn probe_handover(
    mgr: &dyn LockManager,
    name: &str,
    wait: Duration,
) -> Result<Handover, String> {
    let mut best = probe_once(mgr, name, wait)?;
    for _ in 1..ROUNDS {
        let next = probe_once(mgr, name, wait)?;
        best = Handover {
            acquire: best.acquire.min(next.acquire),
            handover: best.handover.min(next.handover),
        };
    }
    Ok(best)
}

fn probe_once(mgr: &dyn LockManager, name: &str, wait: Duration) -> Result<Handover, String> {
    let describe = |what: &str, error: &LockError| format!("{what}: {error}");
    let started = clock::now();
    let guard = mgr
        .try_lock_for(name, wait)
        .map_err(|error| describe("it could not be acquired", &error))?;
    let acquire = clock::now() - started;
    thread::scope(|threads| {
        let waiter = threads
            .spawn(|| mgr.try_lock_for(name, STEP_TIMEOUT).map(|guard| (clock::now(), guard)));
        let queued = wait_until_queued(mgr, name, || waiter.is_finished());
        let released_at = clock::now();
        let released = guard.release();
        let waited = waiter.join().map_err(|_| "the waiting thread panicked".to_owned())?;
        queued?;
        if released.map_err(|error| describe("it could not be released", &error))?
            != Released::Released
        {
            return Err("it was gone before its release".into());
        }
        let (acquired_at, next) =
            waited.map_err(|error| describe("the waiter did not acquire it", &error))?;
        // The probe has what it needs; dropping the guard releases the lock.
        drop(next);
        Ok(Handover { acquire, handover: acquired_at.saturating_duration_since(released_at) })
    })
}

/// Returns once the waiter is queued, or has failed and can report why.
fn wait_until_queued(
    mgr: &dyn LockManager,
    name: &str,
    has_failed: impl Fn() -> bool,
) -> Result<(), String> {
    let started = clock::now();
    while clock::now().duration_since(started) < STEP_TIMEOUT && !has_failed() {
        match mgr.holder(name) {
            Ok(Some(holder)) if holder.waiters().is_some_and(|waiters| waiters > 0) => {
                return Ok(());
            }
            Ok(_) => clock::sleep(QUEUE_POLL_INTERVAL),
            Err(error) => return Err(format!("it could not be inspected: {error}")),
        }
    }
    if has_failed() { Ok(()) } else { Err("the waiter was not queued in time".into()) }
}
