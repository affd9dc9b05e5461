//! A lock on a scratch name is handed from one thread to another: scripts, queue and channel work, or say why not.

use std::{thread, time::Duration};

use distlock::{LockError, RedisMgr, Released};

use super::facts::Handover;
use crate::clock;

/// How long to wait for each step before it counts as failed.
const PATIENCE: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// Times, of which the best tells what the way is like, and not what else the machines have to do.
const TRIES: usize = 3;

pub(super) fn hand_over(mgr: &RedisMgr, name: &str) -> Result<Handover, String> {
    let mut best = once(mgr, name)?;
    for _ in 1..TRIES {
        let next = once(mgr, name)?;
        best = Handover { acquire: best.acquire.min(next.acquire), handover: best.handover.min(next.handover) };
    }
    Ok(best)
}

fn once(mgr: &RedisMgr, name: &str) -> Result<Handover, String> {
    let told = |what: &str, error: &LockError| format!("{what}: {error}");
    let asked = clock::now();
    let guard = mgr.try_lock(name).map_err(|error| told("a free lock cannot be taken", &error))?;
    let acquire = clock::now() - asked;
    thread::scope(|threads| {
        let waiter = threads.spawn(|| mgr.try_lock_for(name, PATIENCE).map(|guard| (clock::now(), guard)));
        let joined = in_line(mgr, name, || waiter.is_finished());
        let let_go = clock::now();
        let released = guard.release();
        let waited = waiter.join().map_err(|_| "the thread that waits failed".to_owned())?;
        joined?;
        if released.map_err(|error| told("it cannot be released", &error))? != Released::Released {
            return Err("it was gone before it was released".into());
        }
        let (got, next) = waited.map_err(|error| told("the next in line did not get it", &error))?;
        // What matters has been seen; dropping it releases it.
        drop(next);
        Ok(Handover { acquire, handover: got.saturating_duration_since(let_go) })
    })
}

/// Until somebody waits, or has given up and can say why.
fn in_line(mgr: &RedisMgr, name: &str, gave_up: impl Fn() -> bool) -> Result<(), String> {
    let started = clock::now();
    while clock::now().duration_since(started) < PATIENCE && !gave_up() {
        match mgr.holder(name) {
            Ok(Some(holder)) if holder.waiters().is_some_and(|waiters| waiters > 0) => return Ok(()),
            Ok(_) => clock::pause(LOOK_EVERY),
            Err(error) => return Err(format!("it cannot be looked at: {error}")),
        }
    }
    if gave_up() { Ok(()) } else { Err("who waits for it does not get into the line".into()) }
}
