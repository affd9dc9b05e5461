//! A process that holds and awaits many locks, and records for how long it considers each held.

use std::{collections::HashMap, sync::Arc, thread, time::Duration};

use crossbeam_channel::{Receiver, Sender, bounded, select};
use distlock::{LockGuard, LockOptions, RedisMgr};

use super::{manager, rounds::Witness};
use crate::{
    contention::history::{Recorder, boottime},
    support::{TEST_TIMEOUT, WorkerSide},
};

/// Interval of the checks that are recorded.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// Executes `lock NAME TTL_MS` and `release NAME`, each on the thread of that lock.
pub(super) fn keeper(side: &Arc<WorkerSide>) {
    let mgr = manager(side);
    let mut releases: HashMap<String, Sender<()>> = HashMap::new();
    side.say("ready");
    while let Some(line) = side.hear() {
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["lock", name, ttl] => {
                let ttl = Duration::from_millis(ttl.parse().expect("a number of milliseconds"));
                let (release, released) = bounded(1);
                releases.insert(name.to_owned(), release);
                let (side, mgr, name) = (side.clone(), mgr.clone(), name.to_owned());
                drop(thread::spawn(move || keep(&side, &mgr, &name, ttl, &released)));
            }
            // The lock may be lost already.
            ["release", name] => drop(releases[name].send(())),
            _ => panic!("cannot {line}"),
        }
    }
    mgr.shutdown();
}

fn keep(side: &WorkerSide, mgr: &RedisMgr, name: &str, ttl: Duration, release: &Receiver<()>) {
    let recorder = Recorder::open(side.arg("history"));
    // Without a limit, a wait fails once the servers have been away for a whole ttl.
    let options = LockOptions::new().ttl(ttl).wait(TEST_TIMEOUT);
    let guard: LockGuard = match mgr.lock_with(name, &options) {
        Ok(guard) => guard,
        Err(error) => return side.say(format!("failed {name} {error}")),
    };
    let at = boottime();
    let mut witness = Witness::enter(&recorder, &guard);
    side.say(format!("locked {name} {} {at} {}", guard.fencing_token(), guard.id()));
    loop {
        select! {
            recv(release) -> _ => break,
            recv(guard.lost()) -> why => {
                assert!(!guard.is_held(), "lost, but held");
                return side.say(format!("ended {name} lost {why:?}"));
            }
            default(CHECK_INTERVAL) => {}
        }
        if let Some(witness) = &mut witness {
            witness.check(|| guard.is_held());
        }
    }
    if let Some(witness) = &mut witness {
        witness.check(|| guard.is_held());
    }
    side.say(format!("ended {name} released {:?}", guard.release()));
}
