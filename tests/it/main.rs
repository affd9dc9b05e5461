//! The library on real servers, told as the life of a lock.

#[path = "../history/mod.rs"]
mod history;
mod kit;
mod worker;

use distlock_test_support as support;

mod contract;

mod acquire;
mod audit;
mod bounds;
mod config;
mod corpus;
mod errors;
mod events;
mod exporters;
mod faults;
mod hearing;
mod hold;
mod inspect;
mod limits;
mod lost;
mod metrics;
mod processes;
mod promises;
mod proxy;
mod redlock;
mod reentrant;
mod release;
mod rights;
mod shutdown;
mod tidy;
mod wait;
