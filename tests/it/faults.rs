//! The catalogue of faults in docs/faults.md: those that no other test injects on its way.

mod network;
mod process;
mod server;

use distlock::LockGuard;

use crate::support::{CEILING, Monitor, RedisServer, eventually};

pub(crate) const LOCK: &str = "lock:x";

/// How often the server has renewed a lock while it was recorded.
pub(crate) fn renewals(commands: &Monitor, key: &str) -> usize {
    let renewed = format!("lua] \"PEXPIRE\" \"{key}\"");
    commands.lines().iter().filter(|line| line.contains(&renewed)).count()
}

/// Waits for renewals that the server carries out from now on; the lock is held all the while.
#[track_caller]
pub(crate) fn is_renewed(server: &RedisServer, guard: &LockGuard, times: usize) {
    let commands = server.monitor();
    let key = format!("lock:{}", guard.name());
    eventually("it is renewed", CEILING, || {
        assert!(guard.is_held(), "{:?}", guard.lost().try_recv());
        renewals(&commands, &key) >= times
    });
}
