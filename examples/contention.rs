//! Several processes compete for one lock, and no two of them ever hold it at once. This is true
//! even if some are killed, or stopped for longer than the ttl, while they hold the lock or wait
//! for it.
//!
//! Run it with `make demo`, or `make demo ARGS=--chaos`. `make demo-mysql` keeps the lock in a
//! MariaDB instead of Redis.

#[path = "common/mod.rs"]
mod common;
#[path = "demo/mod.rs"]
mod demo;
#[path = "../tests/history/mod.rs"]
mod history;

use std::{process::ExitCode, time::Duration};

use demo::Defaults;

const DEFAULTS: Defaults = Defaults {
    help: "\
Processes compete for one lock. Shows what each of them did, and whether two of them ever held
the lock at once.

    make demo                     five processes, eight rounds each
    make demo ARGS=--chaos        the same, and some of them are killed or stopped
    make demo ARGS='--children 9 --rounds 20 --work 50ms'
    make demo-mysql               the same with the lock in a private MariaDB

The server is the one of --url, or in DISTLOCK_URL or REDIS_URL (or several, separated by commas),
else a private one.
",
    nodes: 0,
    rounds: 8,
    work: Duration::from_millis(180),
    ttl: Duration::from_secs(1),
};

fn main() -> ExitCode {
    demo::run(&DEFAULTS)
}
