//! What the tests and benchmarks need around the library: real servers, a proxy that breaks
//! connections on purpose, child processes, and a fuzz loop. Nothing in this crate knows the library
//! itself.

#![allow(missing_debug_implementations, missing_docs, reason = "only the tests of this workspace use this crate")]
#![allow(clippy::len_without_is_empty, reason = "a set of servers is never empty")]
#![allow(clippy::disallowed_methods, reason = "tests do not run across a suspension of the machine")]

pub mod fuzz;

mod canned_server;
mod elsewhere;
mod fault_proxy;
mod faults;
mod freezer;
mod monitor;
mod nodes;
mod ports;
mod processes;
mod proxied;
mod redis_server;
mod resp;
mod watchdog;

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

pub use canned_server::{CannedServer, DeafServer, endless_server, garbage_server, silent_server};
pub use elsewhere::{can_be_had, run_elsewhere};
pub use fault_proxy::FaultProxy;
pub use faults::{Armed, Fault, any_request, command, contains, instead, off_by, rewrite};
pub use freezer::Freezer;
pub use monitor::Monitor;
pub use nodes::Nodes;
pub use processes::{Worker, WorkerSide};
pub use redis_server::{RedisServer, RedisServerBuilder};
pub use resp::{Frames, request};
pub use watchdog::Watchdog;

/// How long anything that must happen may take, generous enough for a loaded machine.
pub const CEILING: Duration = Duration::from_secs(60);

const POLL: Duration = Duration::from_millis(3);

/// Returns once `check` holds, and panics with `what` when it does not within `ceiling`.
#[track_caller]
pub fn eventually(what: &str, ceiling: Duration, mut check: impl FnMut() -> bool) {
    eventually_some(what, ceiling, || check().then_some(()));
}

/// Returns the first `Some` of `probe`, and panics with `what` when none comes within `ceiling`.
#[track_caller]
pub fn eventually_some<T>(what: &str, ceiling: Duration, mut probe: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + ceiling;
    loop {
        if let Some(found) = probe() {
            return found;
        }
        assert!(Instant::now() < deadline, "not within {ceiling:?}: {what}");
        thread::sleep(POLL);
    }
}

/// The state letter of a process (`R`, `S`, `T`, `Z`, ...), or `None` when there is none.
pub fn process_state(pid: u32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the program stands in parentheses and may itself contain some.
    stat[stat.rfind(')')? + 1..].trim_start().chars().next()
}
