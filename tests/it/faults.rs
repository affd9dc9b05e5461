//! Faults of the catalogue in docs/faults.md that no other test injects.

pub(crate) mod network;
mod process;
pub(crate) mod server;

use distlock::LockGuard;

use crate::support::{Monitor, RedisServer, TEST_TIMEOUT, eventually};

pub(crate) const LOCK: &str = "lock:x";

/// Number of renewals of a lock among the recorded commands.
pub(crate) fn renewals(commands: &Monitor, key: &str) -> usize {
    let renewed = format!("lua] \"PEXPIRE\" \"{key}\"");
    commands.lines().iter().filter(|line| line.contains(&renewed)).count()
}

/// Waits for this number of renewals from now on; the lock must be held all the time.
#[track_caller]
pub(crate) fn expect_renewals(server: &RedisServer, guard: &LockGuard, times: usize) {
    let commands = server.monitor();
    let key = format!("lock:{}", guard.name());
    eventually("it is renewed", TEST_TIMEOUT, || {
        assert!(guard.is_held(), "{:?}", guard.lost().try_recv());
        renewals(&commands, &key) >= times
    });
}
