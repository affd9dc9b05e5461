//! The guardian's own side: listens to its wrapper, and steps in when that is dead or frozen.

use std::{thread, time::Duration};

use crossbeam_channel::never;
use distlock::{Config, RedisMgr, Released};
use nix::sys::signal::SigSet;
use rustix::process::{Pid, Signal};

use super::{
    ear::{Ear, Heard},
    process::Group,
    vigil::{Sentence, Vigil},
    word::{Lock, Word},
};
use crate::{
    args::Servers,
    clock, connect,
    exit::{Exit, Failure, Outcome},
};

/// Between two looks at a group that is ending. Nobody tells a process about those that are not its children.
const LOOK: Duration = Duration::from_millis(10);

/// Before each time that the lock is given up, until there is something to give up: what the wrapper has asked for may come
/// after that, even if a packet of it was lost.
const PAUSES_MS: [u64; 7] = [0, 10, 20, 40, 80, 160, 320];

pub(super) fn step() -> Outcome {
    // Before any thread is started, so that none of them can be ended by a signal that is meant for the wrapper.
    SigSet::all().thread_block().map_err(|error| Failure::new(Exit::CannotRun, error.to_string()))?;
    #[cfg(target_os = "linux")]
    let _ = rustix::thread::set_name(c"distlock-guard");
    let mut ear = Ear::new(std::io::stdin());
    // A wrapper that ends before it asks for its lock leaves nothing behind.
    let Heard::Word(Word::Asking(lock)) = ear.next(None) else { return Ok(Exit::Fine) };
    let mut vigil = Vigil::begin(lock.ttl, lock.grace, clock::since_boot());
    loop {
        let heard = ear.next(vigil.alarm());
        let now = clock::since_boot();
        match heard {
            Heard::Word(word) => vigil.hear(&word, now),
            Heard::Nothing => carry_out(vigil.frozen(now), vigil.end(now)),
            Heard::End => break,
        }
    }
    let now = clock::since_boot();
    carry_out(vigil.orphaned(now), vigil.end(now));
    give_up(&lock)
}

/// Ends a group, and returns when nothing of it is left, or at `limit`, when it makes no difference any more.
fn carry_out(sentence: Option<Sentence>, limit: Duration) {
    let Some(Sentence { group, kill_at }) = sentence else { return };
    let Some(group) = Pid::from_raw(group).map(Group) else { return };
    let mut kill_at = Some(kill_at);
    group.send(&[Signal::TERM, Signal::CONT]);
    loop {
        let now = clock::since_boot();
        if kill_at.is_some_and(|at| now >= at) {
            kill_at = None;
            group.send(&[Signal::KILL]);
        }
        if !group.is_alive() || now >= limit {
            return;
        }
        let next = kill_at.map_or(LOOK, |at| at.saturating_sub(now).min(LOOK));
        let _ = never::<()>().recv_timeout(next);
    }
}

fn give_up(lock: &Lock) -> Outcome {
    let Lock { urls, password, prefix, timeout, quarantine, .. } = lock.clone();
    let servers = Servers { url: urls, password_file: None, prefix, timeout, quarantine };
    let config = connect::config(&servers)?.password(password.unwrap_or_default()).ttl(lock.ttl);
    let nodes = config.each_node();
    match RedisMgr::new(config) {
        Ok(mgr) => give_up_by(&mgr, lock),
        // One of several that cannot be a node any more, as one that has become a replica, is no reason to keep it on the others.
        Err(_) => give_up_apart(nodes, lock),
    }
}

/// On each node alone. None of them is waited for by another.
fn give_up_apart(nodes: Vec<Config>, lock: &Lock) -> Outcome {
    thread::scope(|scope| {
        let give_up = |node| move || give_up_by(&RedisMgr::new(node)?, lock);
        let start = |node| thread::Builder::new().name("node".into()).spawn_scoped(scope, give_up(node)).ok();
        let threads: Vec<_> = nodes.into_iter().filter_map(start).collect();
        threads.into_iter().filter_map(|thread| thread.join().ok()).fold(Ok(Exit::Fine), Outcome::and)
    })
}

fn give_up_by(mgr: &RedisMgr, lock: &Lock) -> Outcome {
    let mut outcome = Ok(Exit::Fine);
    for pause in PAUSES_MS.map(Duration::from_millis) {
        let _ = never::<()>().recv_timeout(pause);
        outcome = match mgr.force_release_if(&lock.name, &lock.id) {
            Ok(Released::Released) => return Ok(Exit::Fine),
            Ok(_) => Ok(Exit::Fine),
            Err(error) => Err(error.into()),
        };
    }
    outcome
}
