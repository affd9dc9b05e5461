//! The library on real servers, told as the life of a lock.

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
mod errors;
mod events;
mod exporters;
mod hold;
mod inspect;
mod lost;
mod metrics;
mod processes;
mod redlock;
mod reentrant;
mod release;
mod rights;
mod tidy;
mod wait;
