//! One lock over five independent servers: two of them are killed and come back empty while processes contend for the
//! lock, and it is given all the time, to one at a time.
//!
//! Run it with `make demo-redlock`. A lock is held while three of the five keep it. A server that comes back has forgotten whom it
//! gave the lock to, so its vote does not count before the longest lease has passed (quarantine).

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
One lock over five private servers. Two of them are killed on the way and come back empty, and processes contend for
the lock all the time: what they did with it, and whether two of them ever held it at once.

    make demo-redlock                 five processes, ten rounds each
    make demo-redlock ARGS=--chaos    the same, and some processes are killed or stopped too
    make demo-redlock ARGS='--children 9 --rounds 20 --work 50ms --ttl 3s'
",
    nodes: 5,
    rounds: 10,
    work: Duration::from_millis(160),
    ttl: Duration::from_secs(2),
};

fn main() -> ExitCode {
    demo::play(&STAGE)
}
