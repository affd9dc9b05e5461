//! The child processes of tests. Each role is a function that reads commands from its parent and
//! writes results, one a line.

mod exiting;
mod keeper;
mod rounds;

use std::{collections::HashMap, sync::Arc, thread, time::Duration};

use distlock::{
    Config, LockError, LockGuard, LockManager, MySqlConfig, MySqlMgr, RedisMgr, Released,
    generate_lock_id,
};
use parking_lot::Mutex;

use crate::{
    contention::history::boottime,
    support::{TEST_TIMEOUT, WorkerSide},
};

#[test]
fn entry() {
    let Some(side) = WorkerSide::from_env().map(Arc::new) else { return };
    match side.role() {
        "locker" => locker(&side),
        "counter" => rounds::counter(&side),
        "foreign" => rounds::foreign(&side),
        "sharer" => rounds::sharer(&side),
        "keeper" => keeper::keeper(&side),
        "forker" => forker(&side),
        "forker_during_init" => forker_during_init(&side),
        "early_forker" => early_forker(&side),
        "exiting" => exiting::exiting(&side),
        role => panic!("there is no role {role}"),
    }
}

/// Stands for the work of a holder, which takes this long.
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

/// A manager for the servers of this URL, of whatever kind they are.
fn manager_by_url(side: &WorkerSide) -> Arc<dyn LockManager> {
    if side.arg("url").starts_with("mysql:") {
        let mut config = MySqlConfig::new(side.arg("url")).operation_timeout(TEST_TIMEOUT);
        if let Some(ttl) = milliseconds(side, "ttl_ms") {
            config = config.ttl(ttl);
        }
        return Arc::new(MySqlMgr::new(config).expect("no manager"));
    }
    Arc::new(manager(side))
}

fn milliseconds(side: &WorkerSide, key: &str) -> Option<Duration> {
    side.try_arg(key)
        .map(|number| Duration::from_millis(number.parse().expect("a number of milliseconds")))
}

fn number(side: &WorkerSide, key: &str) -> u64 {
    side.arg(key).parse().unwrap_or_else(|_| panic!("{key} is not a number"))
}

/// Executes one command about one lock for each line, and keeps its guards until a command ends
/// them.
fn locker(side: &Arc<WorkerSide>) {
    let locker = Arc::new(Locker {
        side: side.clone(),
        mgr: manager_by_url(side),
        guards: Mutex::default(),
    });
    locker.side.say("ready");
    while let Some(line) = side.hear() {
        let (verb, name) = line.split_once(' ').expect("a verb and a name");
        match verb {
            // Waits in a thread, so that the process can read further commands.
            "lock" => {
                let (locker, name) = (locker.clone(), name.to_owned());
                drop(thread::spawn(move || locker.lock(&name)));
            }
            "held" => {
                // For a process that was stopped while it waited for a line, this check is the very
                // first thing it does.
                let held = locker.guards.lock()[name].is_held();
                side.say(format!("held {name} {held}"));
            }
            "until" => {
                let now = boottime();
                let left = locker.guards.lock()[name].remaining();
                side.say(format!("until {name} {}", u128::from(now) + left.as_nanos()));
            }
            "lost" => {
                let why = locker.guards.lock()[name].lost().recv_timeout(TEST_TIMEOUT);
                side.say(format!("lost {name} {why:?}"));
            }
            "quiet" => {
                let quiet = locker.guards.lock()[name].lost().is_empty();
                side.say(format!("quiet {name} {quiet}"));
            }
            "write" => {
                let accepted =
                    fenced_write(side, name, locker.guards.lock()[name].fencing_token().as_u64());
                side.say(format!("write {name} {accepted}"));
            }
            "release" => {
                let outcome = match locker.take(name).release() {
                    Ok(Released::OwnedByOther(_)) => "OwnedByOther".to_owned(),
                    outcome => format!("{outcome:?}"),
                };
                side.say(format!("released {name} {outcome}"));
            }
            "drop" => {
                drop(locker.take(name));
                side.say(format!("dropped {name}"));
            }
            "panic" => {
                let guard = locker.take(name);
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
    locker.guards.lock().clear();
    locker.mgr.shutdown();
}

struct Locker {
    side: Arc<WorkerSide>,
    mgr: Arc<dyn LockManager>,
    guards: Mutex<HashMap<String, LockGuard>>,
}

impl Locker {
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

/// Writes to a resource that refuses tokens lower than the highest it has seen.
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

/// Forks while the process has a manager, a guard, and their threads.
fn forker(side: &WorkerSide) {
    let mgr = manager_by_url(side);
    let guard = mgr.lock("forked").expect("no lock");
    let several = mgr.lock_all(&["forked too"]).expect("no locks");
    assert!(guard.is_held());
    // SAFETY: the child uses nothing that another thread may have locked, which is what the test
    // checks.
    match rustix::process::Pid::from_raw(unsafe { fork() }) {
        None => {
            // Only this thread exists in the child. Its output is read by the parent's parent.
            side.say(format!("child held {}", guard.is_held()));
            side.say(format!(
                "child ensure {}",
                matches!(guard.ensure_held(), Err(LockError::Forked))
            ));
            let closed = Err(crossbeam_channel::TryRecvError::Disconnected);
            let are_closed =
                [guard.lost(), several.lost()].iter().all(|lost| lost.try_recv() == closed);
            side.say(format!("child lost {are_closed}"));
            side.say(format!(
                "child lock {}",
                matches!(mgr.try_lock("other"), Err(LockError::Forked))
            ));
            side.say(format!("child ping {}", matches!(mgr.ping(), Err(LockError::Forked))));
            drop((guard, several));
            mgr.shutdown();
            drop(mgr);
            side.say("child dropped all");
            // SAFETY: _exit ends the process at once, without the exit handlers of the parent.
            unsafe { _exit(0) }
        }
        Some(child) => {
            report_child_exit(side, child);
            side.say(format!("parent held {}", guard.is_held()));
            side.hear();
            side.say(format!("parent released {:?}", guard.release()));
        }
    }
}

/// Waits for a forked child and reports its exit status.
fn report_child_exit(side: &WorkerSide, child: rustix::process::Pid) {
    let (_, status) = rustix::process::waitpid(Some(child), rustix::process::WaitOptions::empty())
        .expect("cannot wait")
        .expect("an exit status");
    side.say(format!("child ended {:?}", status.exit_status()));
}

/// Holds a lock, and forks while another thread creates the process-wide manager for nodes that do
/// not answer.
fn forker_during_init(side: &WorkerSide) {
    let mgr = manager(side);
    let guard = mgr.lock("parent").expect("no lock");
    let silent =
        Config::nodes([side.arg("silent"), side.arg("silent_too")]).operation_timeout(TEST_TIMEOUT);
    drop(thread::spawn(move || RedisMgr::init(silent).map(drop)));
    assert_eq!(side.hear().as_deref(), Some("fork"));
    // SAFETY: the child uses nothing that another thread may have locked, which is what the test
    // checks.
    match rustix::process::Pid::from_raw(unsafe { fork() }) {
        None => {
            // If the child hangs, it ends with its parent.
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
            // SAFETY: _exit ends the process at once, without the exit handlers of the parent.
            unsafe { _exit(0) }
        }
        Some(child) => {
            report_child_exit(side, child);
            side.say(format!("parent released {:?}", guard.release()));
        }
    }
}

/// Forks before the first manager; then parent and child create one each.
fn early_forker(side: &WorkerSide) {
    // SAFETY: the only other thread is that of the test harness, which waits.
    let child = rustix::process::Pid::from_raw(unsafe { fork() });
    if child.is_none() {
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
            .expect("a signal");
    }
    let side_name = if child.is_some() { "parent" } else { "child" };
    let mgr = RedisMgr::init(Config::new(side.arg("url"))).expect("no manager");
    let guard = mgr.lock("each").expect("no lock");
    let held = guard.is_held() && guard.id().pid() == std::process::id();
    side.say(format!("{side_name} held {held}, {:?}", guard.release()));
    match child {
        // SAFETY: _exit ends the process at once, without the exit handlers of the parent.
        None => unsafe { _exit(0) },
        Some(child) => report_child_exit(side, child),
    }
}

unsafe extern "C" {
    fn fork() -> i32;
    fn _exit(status: i32) -> !;
}
