//! Tools for the tests and benchmarks: real servers, a proxy that breaks connections on purpose,
//! child processes, and a fuzz loop. This crate does not depend on the library that they test.

#![allow(
    missing_debug_implementations,
    missing_docs,
    reason = "only the tests and benchmarks of this workspace use this crate"
)]
#![allow(clippy::len_without_is_empty, reason = "a set of servers is never empty")]
#![allow(clippy::disallowed_methods, reason = "the machine is not suspended during tests")]

pub mod fuzz;

mod certificates;
mod cluster;
mod fault_proxy;
mod faults;
mod freezer;
mod monitor;
mod mysql_server;
mod namespaces;
mod nodes;
mod ports;
mod processes;
mod protocol;
mod proxied;
mod redis_server;
mod resp;
mod scripted_server;
mod sentinels;
mod server_process;
mod slow_link;
mod watchdog;

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

pub use certificates::Certificates;
pub use cluster::Cluster;
pub use fault_proxy::FaultProxy;
pub use faults::{
    ArmedFault, Fault, any_request, change, command, contains, instead, larger_than, off_by,
    rewrite,
};
pub use freezer::CgroupFreezer;
pub use monitor::Monitor;
pub use mysql;
pub use mysql_server::{MySqlKind, MySqlServer, MySqlServerBuilder, mysql_servers};
pub use namespaces::{run_elsewhere, trial_succeeded};
pub use nodes::Nodes;
pub use processes::{Worker, WorkerSide};
pub use rcgen;
pub use redis_server::{RedisServer, RedisServerBuilder};
pub use resp::{Frames, request};
pub use scripted_server::{
    CannedServer, DeafServer, endless_server, garbage_server, silent_server,
};
pub use sentinels::SentinelGroup;
pub use slow_link::SlowLink;
pub use watchdog::Watchdog;

/// The time limit for anything that must happen in a test, generous enough for a busy machine.
pub const TEST_TIMEOUT: Duration = Duration::from_secs(60);

const POLL: Duration = Duration::from_millis(3);

/// Waits until `check` returns true. Panics with `what` if that takes longer than `ceiling`.
#[track_caller]
pub fn eventually(what: &str, ceiling: Duration, mut check: impl FnMut() -> bool) {
    eventually_some(what, ceiling, || check().then_some(()));
}

/// Waits until `probe` returns `Some`. Panics with `what` if that takes longer than `ceiling`.
#[track_caller]
pub fn eventually_some<T>(
    what: &str,
    ceiling: Duration,
    mut probe: impl FnMut() -> Option<T>,
) -> T {
    let deadline = Instant::now() + ceiling;
    loop {
        if let Some(found) = probe() {
            return found;
        }
        assert!(Instant::now() < deadline, "not within {ceiling:?}: {what}");
        thread::sleep(POLL);
    }
}

/// The state letter of a process (`R`, `S`, `T`, `Z`, ...), or `None` if there is no such process.
pub fn process_state(pid: u32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The program's name is in parentheses, and may itself contain parentheses.
    stat[stat.rfind(')')? + 1..].trim_start().chars().next()
}
