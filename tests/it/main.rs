//! The library on real servers, told as the life of a lock.

#[path = "../history/mod.rs"]
mod history;
mod kit;
mod support;
mod worker;

mod contract;

mod acquire;
mod audit;
mod bounds;
#[cfg(feature = "cli")]
mod cli;
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
