//! Roles that acquire locks repeatedly, and record when they held them.

use std::{fs, path::Path, time::Duration};

use distlock::LockGuard;

use super::{manager, number, work};
use crate::{
    contention::history::{Hold, Recorder, boottime},
    support::WorkerSide,
};

/// One hold as it is recorded: from the first check to the latest that returned "held".
pub(super) struct Witness<'a> {
    recorder: &'a Recorder,
    hold: Hold,
}

impl<'a> Witness<'a> {
    /// `None` if the lock is lost before the first check.
    pub(super) fn enter(recorder: &'a Recorder, guard: &LockGuard) -> Option<Witness<'a>> {
        guard.is_held().then_some(())?;
        let now = boottime();
        let (lock, id) = (guard.name().to_owned(), guard.id().to_string());
        let hold =
            Hold { lock, id, token: Some(guard.fencing_token().as_u64()), from: now, until: now };
        // Recorded at once, because the process may be killed any time.
        recorder.record(&hold);
        Some(Witness { recorder, hold })
    }

    /// Checks again, and records the hold up to here only if it still lasts.
    pub(super) fn check(&mut self, held: impl FnOnce() -> bool) -> bool {
        let now = boottime();
        let held = held();
        if held {
            self.hold.until = now;
            self.recorder.record(&self.hold);
        }
        held
    }
}

/// A read-modify-write that loses an update if two processes do it at a time.
fn increment(path: &Path) -> u64 {
    let text = fs::read_to_string(path).unwrap_or_default();
    let next = text.trim().parse::<u64>().unwrap_or(0) + 1;
    fs::write(path, next.to_string()).expect("cannot write the counter");
    next
}

/// Acquires a lock `rounds` times, and increments a counter in a file while it holds the lock.
pub(super) fn counter(side: &WorkerSide) {
    let (mgr, recorder) = (manager(side), Recorder::open(side.arg("history")));
    let (name, file) = (side.arg("lock"), side.arg("file"));
    side.say("ready");
    side.hear();
    for _ in 0..number(side, "rounds") {
        let guard = mgr.lock(&name).expect("no lock");
        let mut witness = Witness::enter(&recorder, &guard).expect("lost at once");
        increment(file.as_ref());
        assert!(witness.check(|| guard.is_held()), "lost meanwhile");
    }
    side.say("done");
}

/// Does the same as `counter` with the common recipe only: `SET NX`, then compare and delete.
pub(super) fn foreign(side: &WorkerSide) {
    let client = redis::Client::open(side.arg("url")).expect("no client");
    let mut connection = client.get_connection().expect("no connection");
    let recorder = Recorder::open(side.arg("history"));
    let (name, file) = (side.arg("lock"), side.arg("file"));
    let ttl_ms = number(side, "ttl_ms");
    let release = redis::Script::new(
        "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) \
         else return 0 end",
    );
    side.say("ready");
    side.hear();
    let mut rounds_left = number(side, "rounds");
    while rounds_left > 0 {
        let (key, id) = (format!("lock:{name}"), format!("foreign-{}", uuid::Uuid::new_v4()));
        let sent = boottime();
        let mut take = redis::cmd("SET");
        take.arg(&key).arg(&id).arg("NX").arg("PX").arg(ttl_ms);
        if take.query::<Option<String>>(&mut connection).expect("no reply").is_none() {
            work(Duration::from_millis(2));
            continue;
        }
        let now = boottime();
        let is_held = || boottime() < sent + ttl_ms * 990_000;
        assert!(is_held(), "the lease ended at once");
        let hold = Hold { lock: name.clone(), id: id.clone(), token: None, from: now, until: now };
        let mut witness = Witness { recorder: &recorder, hold };
        increment(file.as_ref());
        work(Duration::from_millis(1));
        assert!(witness.check(is_held), "lost meanwhile");
        release.key(&key).arg(&id).invoke::<i64>(&mut connection).expect("no reply");
        rounds_left -= 1;
    }
    side.say("done");
}

/// Acquires a lock until all processes together have done so `rounds` times. The holder waits until
/// all others are queued again, so that a slow machine does not distort the shares.
pub(super) fn sharer(side: &WorkerSide) {
    let (mgr, recorder) = (manager(side), Recorder::open(side.arg("history")));
    let (name, file) = (side.arg("lock"), side.arg("file"));
    let (rounds, others) = (number(side, "rounds"), number(side, "others"));
    side.say("ready");
    side.hear();
    let mut own = 0;
    loop {
        let guard = mgr.lock(&name).expect("no lock");
        let mut witness = Witness::enter(&recorder, &guard).expect("lost at once");
        if increment(file.as_ref()) > rounds {
            break;
        }
        own += 1;
        while mgr.holder(&name).expect("no reply").and_then(|holder| holder.waiters())
            != Some(others)
        {
            work(Duration::from_millis(1));
        }
        assert!(witness.check(|| guard.is_held()), "lost meanwhile");
    }
    side.say(format!("had {own}"));
}
