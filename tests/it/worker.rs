//! What the child processes do. Each role is one function; the parent leads it by lines and hears
//! of it in lines.

mod leaver;
mod rounds;

use std::{collections::HashMap, sync::Arc, thread, time::Duration};

use distlock::{Config, LockError, LockGuard, RedisMgr, Released, generate_lock_id};
use parking_lot::Mutex;

use crate::{
    contention::history::boottime,
    support::{CEILING, WorkerSide},
};

#[test]
fn entry() {
    let Some(side) = WorkerSide::from_env().map(Arc::new) else { return };
    match side.role() {
        "hand" => hand(&side),
        "counter" => rounds::counter(&side),
        "foreign" => rounds::foreign(&side),
        "sharer" => rounds::sharer(&side),
        "crowd" => rounds::crowd(&side),
        "forker" => forker(&side),
        "making_forker" => making_forker(&side),
        "early_forker" => early_forker(&side),
        "leaver" => leaver::leaver(&side),
        role => panic!("there is no role {role}"),
    }
}

/// Time in which a holder works.
pub(crate) fn work(span: Duration) {
    let _ = crossbeam_channel::never::<()>().recv_timeout(span);
}

fn manager(side: &WorkerSide) -> RedisMgr {
    let mut config = Config::new(side.arg("url"));
    if let Some(ttl) = milliseconds(side, "ttl_ms") {
        config = config.ttl(ttl);
    }
    if let Some(window) = milliseconds(side, "window_ms") {
        config = config.claim_window(window);
    }
    if let Some(timeout) = milliseconds(side, "timeout_ms") {
        config = config.operation_timeout(timeout);
    }
    if let Some(quarantine) = milliseconds(side, "quarantine_ms") {
        config = config.quarantine(quarantine);
    }
    RedisMgr::new(config).expect("no manager")
}

fn milliseconds(side: &WorkerSide, key: &str) -> Option<Duration> {
    side.try_arg(key)
        .map(|number| Duration::from_millis(number.parse().expect("a number of milliseconds")))
}

fn number(side: &WorkerSide, key: &str) -> u64 {
    side.arg(key).parse().unwrap_or_else(|_| panic!("{key} is not a number"))
}

/// Does one thing with one lock for each line that it hears, and keeps its guards until it is told
/// otherwise.
fn hand(side: &Arc<WorkerSide>) {
    let hand = Arc::new(Hand { side: side.clone(), mgr: manager(side), guards: Mutex::default() });
    hand.side.say("ready");
    while let Some(line) = side.hear() {
        let (verb, name) = line.split_once(' ').expect("a verb and a name");
        match verb {
            // Waiting must not keep it from hearing.
            "lock" => {
                let (hand, name) = (hand.clone(), name.to_owned());
                drop(thread::spawn(move || hand.lock(&name)));
            }
            "held" => {
                // The very first thing that a process does which was stopped while it listened.
                let held = hand.guards.lock()[name].is_held();
                side.say(format!("held {name} {held}"));
            }
            "until" => {
                let now = boottime();
                let left = hand.guards.lock()[name].remaining();
                side.say(format!("until {name} {}", u128::from(now) + left.as_nanos()));
            }
            "lost" => {
                let why = hand.guards.lock()[name].lost().recv_timeout(CEILING);
                side.say(format!("lost {name} {why:?}"));
            }
            "quiet" => {
                let quiet = hand.guards.lock()[name].lost().is_empty();
                side.say(format!("quiet {name} {quiet}"));
            }
            "write" => {
                let accepted =
                    fenced_write(side, name, hand.guards.lock()[name].fencing_token().as_u64());
                side.say(format!("write {name} {accepted}"));
            }
            "release" => {
                let outcome = match hand.take(name).release() {
                    Ok(Released::OwnedByOther(_)) => "OwnedByOther".to_owned(),
                    outcome => format!("{outcome:?}"),
                };
                side.say(format!("released {name} {outcome}"));
            }
            "drop" => {
                drop(hand.take(name));
                side.say(format!("dropped {name}"));
            }
            "panic" => {
                let guard = hand.take(name);
                let thread = thread::spawn(move || {
                    let _guard = guard;
                    panic!("on purpose");
                });
                assert!(thread.join().is_err());
                side.say(format!("panicked {name}"));
            }
            "exit" => std::process::exit(0),
            verb => panic!("cannot {verb}"),
        }
    }
    hand.guards.lock().clear();
    hand.mgr.shutdown();
}

struct Hand {
    side: Arc<WorkerSide>,
    mgr: RedisMgr,
    guards: Mutex<HashMap<String, LockGuard>>,
}

impl Hand {
    fn lock(&self, name: &str) {
        match self.mgr.lock(name) {
            Ok(guard) => {
                let line = format!(
                    "locked {name} {} {} {}",
                    guard.fencing_token(),
                    boottime(),
                    guard.id()
                );
                self.guards.lock().insert(name.to_owned(), guard);
                self.side.say(line);
            }
            Err(error) => self.side.say(format!("failed {name} {error}")),
        }
    }

    fn take(&self, name: &str) -> LockGuard {
        self.guards.lock().remove(name).expect("not locked here")
    }
}

/// A write to a resource that knows the highest token it has seen.
fn fenced_write(side: &WorkerSide, name: &str, token: u64) -> bool {
    let client = redis::Client::open(side.arg("url")).expect("no client");
    let mut connection = client.get_connection().expect("no connection");
    let write = redis::Script::new(
        "local highest = tonumber(redis.call('GET', KEYS[1]) or 0)
         if tonumber(ARGV[1]) < highest then return 0 end
         redis.call('SET', KEYS[1], ARGV[1], 'EX', 3600)
         return 1",
    );
    write
        .key(format!("resource:{name}"))
        .arg(token)
        .invoke::<i64>(&mut connection)
        .expect("no answer")
        == 1
}

/// A process with a manager, a guard and all their threads, that forks.
fn forker(side: &WorkerSide) {
    let mgr = manager(side);
    let guard = mgr.lock("forked").expect("no lock");
    assert!(guard.is_held());
    // SAFETY: the child uses nothing that another thread may have locked, and that is what is
    // tested.
    match rustix::process::Pid::from_raw(unsafe { fork() }) {
        None => {
            // Only this thread exists here. What it says is read by the parent's parent.
            side.say(format!("child held {}", guard.is_held()));
            side.say(format!(
                "child ensure {}",
                matches!(guard.ensure_held(), Err(LockError::Forked))
            ));
            let told = guard.lost().try_recv();
            side.say(format!(
                "child lost {}",
                told == Err(crossbeam_channel::TryRecvError::Disconnected)
            ));
            side.say(format!(
                "child lock {}",
                matches!(mgr.try_lock("other"), Err(LockError::Forked))
            ));
            side.say(format!("child ping {}", matches!(mgr.ping(), Err(LockError::Forked))));
            drop(guard);
            mgr.shutdown();
            drop(mgr);
            side.say("child dropped all");
            // SAFETY: it only ends the process, without running what the parent has left to run at
            // its own end.
            unsafe { _exit(0) }
        }
        Some(child) => {
            say_how_it_ended(side, child);
            side.say(format!("parent held {}", guard.is_held()));
            side.hear();
            side.say(format!("parent released {:?}", guard.release()));
        }
    }
}

/// Waits for a child that was forked.
fn say_how_it_ended(side: &WorkerSide, child: rustix::process::Pid) {
    let (_, status) = rustix::process::waitpid(Some(child), rustix::process::WaitOptions::empty())
        .expect("cannot wait")
        .expect("it was waited for");
    side.say(format!("child ended {:?}", status.exit_status()));
}

/// A process with a lock, that forks while one of its threads makes the process-wide manager of
/// nodes that do not answer.
fn making_forker(side: &WorkerSide) {
    let mgr = manager(side);
    let guard = mgr.lock("parent").expect("no lock");
    let silent =
        Config::nodes([side.arg("silent"), side.arg("silent_too")]).operation_timeout(CEILING);
    drop(thread::spawn(move || RedisMgr::init(silent).map(drop)));
    assert_eq!(side.hear().as_deref(), Some("fork"));
    // SAFETY: the child uses nothing that another thread may have locked, and that is what is
    // tested.
    match rustix::process::Pid::from_raw(unsafe { fork() }) {
        None => {
            // Should it hang, it ends with its parent.
            rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
                .expect("a signal");
            let config = || Config::new(side.arg("url"));
            side.say(format!(
                "child init {}",
                matches!(RedisMgr::init(config()), Err(LockError::Forked))
            ));
            side.say(format!(
                "child instance {}",
                matches!(RedisMgr::instance(), Err(LockError::Forked))
            ));
            side.say(format!(
                "child new {}",
                matches!(RedisMgr::new(config()), Err(LockError::Forked))
            ));
            side.say(format!("child id {}", generate_lock_id().pid() == std::process::id()));
            // SAFETY: it only ends the process, without running what the parent has left to run at
            // its own end.
            unsafe { _exit(0) }
        }
        Some(child) => {
            say_how_it_ended(side, child);
            side.say(format!("parent released {:?}", guard.release()));
        }
    }
}

/// A process that forks before it has a manager; then both have one.
fn early_forker(side: &WorkerSide) {
    // SAFETY: there is no other thread that could have locked anything but the test harness's,
    // which waits.
    let child = rustix::process::Pid::from_raw(unsafe { fork() });
    if child.is_none() {
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
            .expect("a signal");
    }
    let who = if child.is_some() { "parent" } else { "child" };
    let mgr = RedisMgr::init(Config::new(side.arg("url"))).expect("no manager");
    let guard = mgr.lock("each").expect("no lock");
    let held = guard.is_held() && guard.id().pid() == std::process::id();
    side.say(format!("{who} held {held}, {:?}", guard.release()));
    match child {
        // SAFETY: it only ends the process, without running what the parent has left to run at its
        // own end.
        None => unsafe { _exit(0) },
        Some(child) => say_how_it_ended(side, child),
    }
}

unsafe extern "C" {
    fn fork() -> i32;
    fn _exit(status: i32) -> !;
}
