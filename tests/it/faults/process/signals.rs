//! Programs that block signals and wait for them: none may be delivered to a thread of the
//! library's, which would end them.

use std::{collections::BTreeMap, fs, sync::Arc};

use distlock::{Config, HandleEvent, RedisMgr};

use crate::{
    helpers::{SECOND, in_own_process},
    support::{CEILING, RedisServer, eventually, silent_server},
};

#[derive(Debug)]
struct Deaf;

impl HandleEvent for Deaf {}

/// The threads of the library's, and the signals that each blocks: the n-th bit stands for the
/// signal n + 1.
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

fn own() -> u64 {
    mask(&fs::read_to_string("/proc/thread-self/status").unwrap())
}

#[test]
fn the_librarys_threads_take_no_signals() {
    if !in_own_process("faults::signals::the_librarys_threads_take_no_signals", &[]) {
        return;
    }
    let before = own();
    let (one, two, silent) = (RedisServer::start(), RedisServer::start(), silent_server());
    // For as long as that one does not answer, there are threads that connect to it.
    let config = Config::nodes([one.url(), two.url(), silent.url()])
        .operation_timeout(SECOND)
        .event_handler(Arc::new(Deaf));
    let mgr = RedisMgr::new(config).unwrap();
    let mut seen = BTreeMap::new();
    eventually("all kinds of threads were there", CEILING, || {
        drop(mgr.try_lock("x"));
        seen.append(&mut blocked());
        // The kernel keeps fifteen letters of a name.
        ["events", "renewe", "pool", "connec"]
            .iter()
            .all(|kind| seen.contains_key(&format!("distlock-{kind}")))
    });
    for (thread, blocked) in seen {
        let blocks = |signal: u32| blocked >> (signal - 1) & 1 == 1;
        // Those for which programs wait: to end, to read their settings anew, for children and for
        // time.
        for signal in [1, 2, 3, 10, 12, 13, 14, 15, 17, 20, 28, 34] {
            assert!(blocks(signal), "{thread} may get signal {signal}");
        }
        // What a thread has done itself ends the process as ever, or has a handler.
        for signal in [4, 5, 7, 8, 11, 31] {
            assert!(!blocks(signal), "{thread} blocks signal {signal}");
        }
    }
    assert_eq!(own(), before, "the caller's signals are its own");
}
