//! The library on real servers, told as the life of a lock.

mod helpers;
#[path = "../history/mod.rs"]
mod history;
#[path = "../helpers/mod.rs"]
mod shared_helpers;
mod worker;

use distlock_test_support as support;

mod contract;

mod acquire;
mod cluster;
mod contention;
mod family;
mod hold;
mod lose;
mod quorum;
mod release;
mod replicas;
mod shutdown;
mod wait;

mod config;
mod faults;
mod fencing_recipes;
mod harness;
mod interop;
mod memory;
mod mysql;
mod observe;
mod security;
mod sentinel;
mod tidy;
mod tls;
mod user_connection;
