//! Roles that take locks over and over, and write down when they believed in them.

use std::{
    fs,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use distlock::{LockGuard, LockOptions};

use super::{manager, milliseconds, number, work};
use crate::{
    contention::history::{Hold, Recorder, boottime},
    support::WorkerSide,
};

/// One hold as it is written down: from the first look to the latest that said "held".
struct Witness<'a> {
    recorder: &'a Recorder,
    hold: Hold,
}

impl<'a> Witness<'a> {
    /// `None` if the lock is lost before anybody could look.
    fn enter(recorder: &'a Recorder, guard: &LockGuard) -> Option<Witness<'a>> {
        guard.is_held().then_some(())?;
        let now = boottime();
        let (lock, id) = (guard.name().to_owned(), guard.id().to_string());
        let hold =
            Hold { lock, id, token: Some(guard.fencing_token().as_u64()), from: now, until: now };
        // Written at once, for it may be the last that is heard of this process.
        recorder.note(&hold);
        Some(Witness { recorder, hold })
    }

    /// Looks again; only what is still held afterwards is written down.
    fn look(&mut self, held: impl FnOnce() -> bool) -> bool {
        let now = boottime();
        let held = held();
        if held {
            self.hold.until = now;
            self.recorder.note(&self.hold);
        }
        held
    }
}

/// A read-modify-write that loses an update when two do it at a time.
fn increment(path: &Path) -> u64 {
    let text = fs::read_to_string(path).unwrap_or_default();
    let next = text.trim().parse::<u64>().unwrap_or(0) + 1;
    fs::write(path, next.to_string()).expect("cannot write the counter");
    next
}

/// Takes a lock `rounds` times and counts in a file under it.
pub(super) fn counter(side: &WorkerSide) {
    let (mgr, recorder) = (manager(side), Recorder::open(side.arg("history")));
    let (name, file) = (side.arg("lock"), side.arg("file"));
    side.say("ready");
    side.hear();
    for _ in 0..number(side, "rounds") {
        let guard = mgr.lock(&name).expect("no lock");
        let mut witness = Witness::enter(&recorder, &guard).expect("lost at once");
        increment(file.as_ref());
        assert!(witness.look(|| guard.is_held()), "lost meanwhile");
    }
    side.say("done");
}

/// Does the same as `counter` with nothing but the two commands of the common recipe.
pub(super) fn foreign(side: &Arc<WorkerSide>) {
    let client = redis::Client::open(side.arg("url")).expect("no client");
    let recorder = Recorder::open(side.arg("history"));
    let locks: Vec<_> = side.arg("lock").split(',').map(str::to_owned).collect();
    let ttl_ms = number(side, "ttl_ms");
    let (rounds, file) = (side.try_arg("rounds"), side.try_arg("file"));
    let rest = milliseconds(side, "rest_ms").unwrap_or_default();
    let ended = rounds.is_none().then(|| watch_for_the_end(side));
    let release = redis::Script::new(
        "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) else return 0 end",
    );
    if rounds.is_some() {
        side.say("ready");
        side.hear();
    }
    let mut connection = None;
    let mut round = 0;
    while rounds
        .as_ref()
        .map_or_else(|| !ended.as_ref().is_some_and(is_set), |rounds| round.to_string() != *rounds)
    {
        let Some(open) = connection.as_mut() else {
            connection = client.get_connection().ok();
            work(Duration::from_millis(5));
            continue;
        };
        let name = &locks[round % locks.len()];
        let (key, id) = (format!("lock:{name}"), format!("foreign-{}", uuid::Uuid::new_v4()));
        let sent = boottime();
        let mut take = redis::cmd("SET");
        take.arg(&key).arg(&id).arg("NX").arg("PX").arg(ttl_ms);
        match take.query::<Option<String>>(open) {
            Ok(Some(_)) => {}
            Ok(None) => {
                work(Duration::from_millis(2));
                continue;
            }
            // Whether it took the lock is not known; if so, that expires.
            Err(_) => {
                connection = None;
                continue;
            }
        }
        let now = boottime();
        let believed = || boottime() < sent + ttl_ms * 990_000;
        if believed() {
            let hold =
                Hold { lock: name.clone(), id: id.clone(), token: None, from: now, until: now };
            let mut witness = Witness { recorder: &recorder, hold };
            if let Some(file) = &file {
                increment(file.as_ref());
            }
            work(Duration::from_millis(1));
            witness.look(believed);
        }
        if release.key(&key).arg(&id).invoke::<i64>(open).is_err() {
            connection = None;
        }
        round += 1;
        work(rest);
    }
    side.say("done");
}

/// Takes a lock until `rounds` have been taken in all. Whoever is inside stays until all the others
/// are back in line, so that no share is lost to a slow machine.
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
        while mgr.holder(&name).expect("no answer").and_then(|holder| holder.waiters())
            != Some(others)
        {
            work(Duration::from_millis(1));
        }
        assert!(witness.look(|| guard.is_held()), "lost meanwhile");
    }
    side.say(format!("had {own}"));
}

/// Threads that take turns at several locks until the parent has had enough.
pub(super) fn crowd(side: &Arc<WorkerSide>) {
    let (mgr, recorder) = (manager(side), Recorder::open(side.arg("history")));
    let locks: Vec<_> = side.arg("lock").split(',').map(str::to_owned).collect();
    let seed = number(side, "seed");
    let ended = watch_for_the_end(side);
    let one = |thread: u64| {
        let mut dice = fastrand::Rng::with_seed(seed.wrapping_add(thread));
        while !is_set(&ended) {
            let ttl = Duration::from_millis(dice.u64(500..1000));
            let options =
                LockOptions::new().ttl(ttl).wait(Duration::from_millis(dice.u64(0..3000)));
            let guard = match mgr.lock_with(&locks[dice.usize(..locks.len())], &options) {
                Ok(guard) => guard,
                // Connections are being killed, and processes stopped for longer than any patience.
                Err(error) if error.is_contended() || error.is_unavailable() => continue,
                Err(error) => panic!("{error}"),
            };
            let Some(mut witness) = Witness::enter(&recorder, &guard) else { continue };
            for _ in 0..dice.u32(0..4) {
                work(Duration::from_millis(dice.u64(0..6)));
                if !witness.look(|| guard.is_held()) {
                    break;
                }
            }
            witness.look(|| guard.is_held());
            if dice.bool() {
                // How it went is the business of other tests.
                let _ = guard.release();
            }
        }
    };
    thread::scope(|scope| (0..3).for_each(|thread| drop(scope.spawn(move || one(thread)))));
    mgr.shutdown();
    side.say("done");
}

fn is_set(flag: &Arc<AtomicBool>) -> bool {
    flag.load(Ordering::Acquire)
}

/// A flag that is set once the parent has ended the input.
fn watch_for_the_end(side: &Arc<WorkerSide>) -> Arc<AtomicBool> {
    let flag = Arc::new(AtomicBool::new(false));
    let (ended, side) = (flag.clone(), side.clone());
    thread::spawn(move || {
        while side.hear().is_some() {}
        ended.store(true, Ordering::Release);
    });
    flag
}
