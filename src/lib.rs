//! Locks that hold across processes and machines, kept in Redis, for programs that block.
//!
//! A lock here has a name. Whoever holds it, in whatever thread, process or machine, is alone with that name until the
//! guard is dropped; everybody else waits in line, first come first served. If a holder dies, its lock expires.
//! If a holder loses its lock, because it was paused or cut off, it can tell. Locks of clients in other languages that
//! follow the rule `SET key id NX PX ttl`, and compare before deleting, are respected and respect these.
//!
//! # Guide
//!
//! Take a lock, work, let go:
//!
//! ```no_run
//! use distlock::RedisMgr;
//!
//! fn main() -> distlock::Result<()> {
//!     let mgr = RedisMgr::instance()?; // of DISTLOCK_URL, REDIS_URL or redis://127.0.0.1:6379
//!     let guard = mgr.lock("orders:42")?; // waits for its turn
//!     println!("order 42 is ours, under {}", guard.id());
//!     Ok(()) // dropping the guard releases the lock
//! }
//! ```
//!
//! Waiting can have a limit, and the error says who is in the way:
//!
//! ```no_run
//! # use distlock::RedisMgr;
//! # use std::time::Duration;
//! # fn main() -> distlock::Result<()> {
//! # let mgr = RedisMgr::instance()?;
//! match mgr.try_lock_for("orders:42", Duration::from_secs(5)) {
//!     Ok(guard) => println!("got it: {guard:?}"),
//!     Err(error) if error.is_contended() => println!("not now: {error}"),
//!     Err(error) => return Err(error),
//! }
//! # Ok(())
//! # }
//! ```
//!
//! A lock is renewed in the background for as long as its guard lives, so its time to live only says how long it
//! outlives a holder that died. But renewals can fail, and processes can be paused. Look before each step that must
//! not be done twice, or stop when you are told:
//!
//! ```no_run
//! # use distlock::RedisMgr;
//! # fn step() {}
//! # fn main() -> distlock::Result<()> {
//! # let mgr = RedisMgr::instance()?;
//! let guard = mgr.lock("report")?;
//! for _ in 0..1000 {
//!     guard.ensure_held()?; // arithmetic on the local clock, no round trip
//!     step();
//! }
//! let why = guard.release()?; // says how it went
//! # let _ = why;
//! # Ok(())
//! # }
//! ```
//!
//! Between looking and acting there is always a gap. Where a write through that gap would do harm, send the
//! [fencing token](LockGuard::fencing_token) along, and let the resource refuse a smaller one than it has seen:
//!
//! ```sql
//! UPDATE orders SET state = 'paid', fence = :token WHERE id = 42 AND fence <= :token
//! ```
//!
//! # Watching
//!
//! Who holds what, who waits, and how close it gets:
//!
//! ```no_run
//! # use distlock::RedisMgr;
//! # fn main() -> distlock::Result<()> {
//! # let mgr = RedisMgr::instance()?;
//! for lock in mgr.locks("orders:*")? {
//!     println!("{lock}"); // its holder, since when, and how many wait
//! }
//! println!("{}", mgr.metrics()); // counts and times of this process, as a table
//! # Ok(())
//! # }
//! ```
//!
//! [`Config::events`] has a [`HandleEvent`] told of everything that happens to a lock: attempted, contended, acquired,
//! renewed, in danger, lost, released. The feature `metrics` feeds the counters and times to the
//! [`metrics`](https://docs.rs/metrics) facade, and `tracing` makes a span of each wait and each hold. The command
//! `distlock` (`cargo install distlock --features cli`) lists locks, shows them live, takes them away, and runs commands
//! under them.
//!
//! # How it works
//!
//! A lock is a string key with an expiry, its value the holder's [`LockId`]. All that must be atomic happens in short
//! scripts on the server. Whoever finds the lock taken is appended to a list; releasing pops the list, gives the key
//! to the first waiter whose process still listens, and tells it over one pub/sub channel per manager. So a release
//! wakes exactly one thread, waiting costs no polling and no pooled connection, and a dead waiter costs nobody
//! anything.
//!
//! A manager runs two threads besides the callers': the lock renewer, which renews all locks of the manager in batches
//! over a connection of its own, and a worker of the connection pool. Where there are handlers of events there is a third
//! for them, and short ones connect to several nodes, and for renewals. Grants are heard by the threads that wait: one of
//! them reads the channel for all.
//!
//! A holder believes in its lock until a local deadline: the moment *before* its last confirmed request was sent, plus
//! the time to live, minus a margin of a hundredth and 2 ms for the drift of clocks. The clock goes on while the
//! machine sleeps (`CLOCK_BOOTTIME`; on systems other than Linux and Android see below). Lost is final.
//!
//! # Several nodes
//!
//! [`Config::nodes`] makes the same of several independent servers (Redlock): a lock is held when more than half of them
//! keep it, and a minority may be away, stopped or restarted. They are asked at once, and validity is what the last
//! needed node gives. Waiters line up on one of the nodes, and on the next if it dies. A token is handed out only when
//! a quorum has stored it. [`LockError::NoQuorum`] and [`Holder::nodes`] tell what each node said.
//!
//! # Limits
//!
//! * *Exclusion* holds as long as the server keeps its data and its clock runs evenly. A server that restarts empty, is
//!   flushed, evicts keys (use `maxmemory-policy noeviction`), fails over to a replica that has not heard of the lock,
//!   or whose clock jumps, can give a lock away while its holder believes in it, until the next renewal finds out:
//!   within a third of the time to live if the server answers, at the local deadline if it does not. Fencing tokens
//!   rise through all of these.
//! * *Pauses*: code that looked, was paused, and then acts, acts late. Only a resource that checks tokens stops it.
//! * *Anybody with write access* to the keys can take or break any lock. Keep the prefixes to those you trust.
//! * *Several nodes* ([`Config::nodes`]) have to keep their data for as long as the longest lease, or stay out of the vote for
//!   that long, which [`Config::quarantine`] sees to. While locks are held, add or take away one node at a time.
//! * Redis Cluster, Sentinel and TLS are not built in yet.
//! * *Other systems*: Linux and Android are tested. On other Unix systems the clock may stand still while the machine
//!   sleeps, and thread numbers in identifiers are Rust's own. Windows is not supported.
//! * Redis 6.2 or newer, or any Valkey.
//!
//! # Log levels
//!
//! Through the `log` facade. *Error*: a defect of this library. *Warn*: a lock was lost, a renewal or a release failed,
//! grants cannot be heard. *Info*: such trouble is over. *Debug*: connections made, grants that came too late, things
//! taken back in the background. Never logged: passwords, and the contents of requests.
//!
//! # Related crates
//!
//! * [`fd-lock`](https://docs.rs/fd-lock), when all processes are on one machine.
//! * An advisory lock of your database, when what you protect is in that database.
//! * [`etcd-client`](https://docs.rs/etcd-client), when you need a lock service that survives any one machine, and can
//!   run a consensus system for it.
//! * [`rslock`](https://docs.rs/rslock), when your program is asynchronous.

#![forbid(unsafe_code)]
#![warn(clippy::print_stdout, clippy::print_stderr, clippy::panic, clippy::unwrap_used, clippy::expect_used)]
#![cfg_attr(test, allow(clippy::panic, clippy::unwrap_used))]

#[macro_use]
mod say;

mod acquire;
mod answer;
mod clock;
mod config;
mod error;
mod event;
mod fork;
#[cfg(test)]
mod fuzz;
mod grant;
mod guard;
mod holder;
mod id;
mod key;
mod lease;
mod lock_info;
mod manager;
mod metrics;
mod node;
mod observer;
mod pooled;
mod process_wide;
mod redlock;
mod reentrant;
mod released;
mod renewer;
mod service;
mod sync;
#[cfg(feature = "testing")]
pub mod testing;
mod text;
mod threads;
mod token;

pub use crate::{
    answer::{NodeAnswer, Vote},
    config::{Config, LockOptions},
    error::{Action, LockError, LockLost, Result},
    event::{
        AcquiredEvent, AttemptedEvent, ContendedEvent, DangerEvent, FailedEvent, HandleEvent, LostEvent,
        ReconnectedEvent, ReleasedEvent, RenewalFailedEvent, RenewedEvent, ServerChangedEvent, TimedOutEvent,
    },
    guard::LockGuard,
    holder::Holder,
    id::{LockId, ParseLockIdError, generate_lock_id},
    lock_info::{LockInfo, Waiter},
    manager::RedisMgr,
    metrics::{LockMetrics, Metrics, Timing},
    pooled::PooledConnection,
    reentrant::ReentrantGuard,
    released::Released,
    token::FencingToken,
};

/// Compiles the program in the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
