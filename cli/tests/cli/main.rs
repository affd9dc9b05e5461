//! The command, as a process against real servers.

mod kit;
mod pty;
#[path = "../../src/doctor/rights.rs"]
mod rights;

use distlock_test_support as support;

mod bench;
mod command;
mod connection;
mod doctor;
mod list;
mod paper;
mod release;
mod run;
mod screenshot;
mod show;
mod top;
