//! Tests of the command as a process, against real servers.

#[path = "../../../tests/helpers/mod.rs"]
mod helpers;
#[path = "../../src/doctor/permissions.rs"]
mod permissions;
mod pty;

use distlock_test_support as support;

mod bench;
mod cluster;
mod command;
mod connection;
mod doctor;
mod help;
mod init;
mod json;
mod kinds;
mod list;
mod mysql;
mod release;
mod run;
mod screenshot;
mod show;
mod top;
