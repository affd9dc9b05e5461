//! Programs that block signals and wait for them: no signal may be delivered to a thread of the
//! library instead, because it could end the process.

use std::{collections::BTreeMap, fs, sync::Arc};

use distlock::{Config, HandleEvent, RedisMgr};

use crate::{
    helpers::{SECOND, in_own_process},
    support::{RedisServer, TEST_TIMEOUT, eventually, silent_server},
};

#[derive(Debug)]
struct IgnoresEvents;

impl HandleEvent for IgnoresEvents {}

/// The library's threads with the mask of signals that each blocks; bit n stands for signal n + 1.
fn blocked() -> BTreeMap<String, u64> {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let status = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("status")).ok());
    let named = status.map(|status| (field(&status, "Name"), mask(&status)));
    named.filter(|(name, _)| name.starts_with("distlock-")).collect()
}

fn field(status: &str, name: &str) -> String {
    let value = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(":\t"));
    value.expect("a field of a thread's status").to_owned()
}

fn mask(status: &str) -> u64 {
    u64::from_str_radix(&field(status, "SigBlk"), 16).unwrap()
}

fn own_mask() -> u64 {
    mask(&fs::read_to_string("/proc/thread-self/status").unwrap())
}

/// Fault: N78
#[test]
fn threads_of_the_library_block_signals() {
    if !in_own_process("faults::process::signals::threads_of_the_library_block_signals", &[]) {
        return;
    }
    let before = own_mask();
    let (one, two, silent) = (RedisServer::start(), RedisServer::start(), silent_server());
    // The manager keeps threads that connect to the silent server, because it never replies.
    let config = Config::nodes([one.url(), two.url(), silent.url()])
        .operation_timeout(SECOND)
        .event_handler(Arc::new(IgnoresEvents));
    let mgr = RedisMgr::new(config).unwrap();
    let mut seen = BTreeMap::new();
    eventually("every kind of thread has been seen", TEST_TIMEOUT, || {
        drop(mgr.try_lock("x"));
        seen.append(&mut blocked());
        // The kernel keeps 15 characters of a name.
        ["outbox", "renewe", "pool", "connec"]
            .iter()
            .all(|kind| seen.contains_key(&format!("distlock-{kind}")))
    });
    for (thread, blocked) in seen {
        let blocks = |signal: u32| blocked >> (signal - 1) & 1 == 1;
        // Signals that programs wait for: to exit, to reload their configuration, for children and
        // timers.
        for signal in [1, 2, 3, 10, 12, 13, 14, 15, 17, 20, 28, 34] {
            assert!(blocks(signal), "{thread} does not block signal {signal}");
        }
        // Signals caused by the thread itself must still end the process, or run its handler.
        for signal in [4, 5, 7, 8, 11, 31] {
            assert!(!blocks(signal), "{thread} blocks signal {signal}");
        }
    }
    assert_eq!(own_mask(), before, "the caller's mask has changed");
}
