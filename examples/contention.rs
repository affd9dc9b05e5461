//! Several processes want one lock, and at no instant do two of them believe that they hold it: not even when some
//! are killed, or stopped for longer than the lock lasts, while they hold it or wait for it.
//!
//! Run it with `make demo`, or `make demo ARGS=--chaos`.

#[path = "common/mod.rs"]
mod common;
#[path = "demo/mod.rs"]
mod demo;
#[path = "../tests/history/mod.rs"]
mod history;

use std::{process::ExitCode, time::Duration};

use demo::Stage;

const STAGE: Stage = Stage {
    help: "\
Processes that all want one lock, what they did with it, and whether two of them ever held it at once.

    make demo                     five processes, eight rounds each
    make demo ARGS=--chaos        the same, and some are killed or stopped on the way
    make demo ARGS='--children 9 --rounds 20 --work 50ms'

The server is the one of DISTLOCK_URL or REDIS_URL, or several with commas in between, else a private one.
",
    nodes: 0,
    rounds: 8,
    work: Duration::from_millis(180),
    ttl: Duration::from_secs(1),
};

fn main() -> ExitCode {
    demo::play(&STAGE)
}
