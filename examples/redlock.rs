//! One lock over five independent servers. Two of them are killed and come back without their data
//! while processes compete for the lock. The lock stays available, and has at most one holder at a
//! time.
//!
//! Run it with `make demo-redlock`. A holder has the lock while three of the five servers keep it.
//! A server that comes back has forgotten who has the lock. Its vote does not count until the
//! longest ttl has passed (the quarantine).

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
One lock over five private servers, two of which are killed and come back without their data.
Processes compete for the lock meanwhile. Shows what each of them did, and whether two of them
ever held the lock at once.

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
    demo::run(&DEFAULTS)
}
