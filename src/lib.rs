//! Distributed locks for blocking, thread-based Rust programs, kept in Redis or Valkey.
//!
//! A lock has a name, and each name has at most one holder across threads, processes and machines.
//! Other callers wait in a queue, first in, first out, and are woken when it is their turn. If a
//! holder dies, its lock expires. A holder that is cut off knows when it must stop relying on the
//! lock; one that was paused finds out at its next look at the guard. Clients in other languages
//! can safely compete for the same locks if they acquire with `SET key id NX PX ttl`, and release
//! with compare-and-delete; but they get no turn while clients of this library queue.
//!
//! # Guide
//!
//! Acquire a lock, work, and drop the guard:
//!
//! ```no_run
//! use distlock::RedisMgr;
//!
//! fn main() -> distlock::Result<()> {
//!     let mgr = RedisMgr::instance()?; // DISTLOCK_URL, REDIS_URL or redis://127.0.0.1:6379
//!     let guard = mgr.lock("orders:42")?; // waits for its turn
//!     println!("working on order 42 as {}", guard.id());
//!     Ok(()) // dropping the guard releases the lock
//! }
//! ```
//!
//! Limit the wait; the error names the holder:
//!
//! ```no_run
//! # use distlock::RedisMgr;
//! # use std::time::Duration;
//! # fn main() -> distlock::Result<()> {
//! # let mgr = RedisMgr::instance()?;
//! match mgr.try_lock_for("orders:42", Duration::from_secs(5)) {
//!     Ok(guard) => println!("acquired: {guard:?}"),
//!     Err(error) if error.is_contended() => println!("not now: {error}"),
//!     Err(error) => return Err(error),
//! }
//! # Ok(())
//! # }
//! ```
//!
//! A background thread renews the lock while its guard is alive. The ttl therefore only decides how
//! long a lock outlives a holder that died. But renewals can fail, and processes can be paused. So
//! check the guard before each step that must not happen twice:
//!
//! ```no_run
//! # use distlock::RedisMgr;
//! # fn step() {}
//! # fn main() -> distlock::Result<()> {
//! # let mgr = RedisMgr::instance()?;
//! let guard = mgr.lock("report")?;
//! for _ in 0..1000 {
//!     guard.ensure_held()?; // compares a local deadline with the clock; no round trip
//!     step();
//! }
//! let outcome = guard.release()?; // reports whether the lock was still ours
//! # let _ = outcome;
//! # Ok(())
//! # }
//! ```
//!
//! There is always a gap between a check and the action after it. If a late write would do harm,
//! send the [fencing token](LockGuard::fencing_token) with each write, and let the resource reject
//! any token smaller than the largest it has seen:
//!
//! ```sql
//! UPDATE orders SET state = 'paid', fence = :token WHERE id = 42 AND fence <= :token
//! ```
//!
//! Tokens are numbers of about 16 digits: the column must be a 64-bit integer (`BIGINT`), not
//! `NULL`, and start at 0. Each lock name has its own sequence of tokens.
//!
//! A process that ends leaves the locks that it still holds to expire after their ttl, also at
//! SIGTERM or Ctrl-C. Let a thread wait for these signals and call [`RedisMgr::shutdown`]: it
//! releases all locks and ends all waits.
//!
//! # Observing locks
//!
//! List locks with their holders and waiters, and print what this process has measured:
//!
//! ```no_run
//! # use distlock::RedisMgr;
//! # fn main() -> distlock::Result<()> {
//! # let mgr = RedisMgr::instance()?;
//! for lock in mgr.locks("orders:*")? {
//!     println!("{lock}"); // the holder, the age of the lock, and the number of waiters
//! }
//! println!("{}", mgr.metrics()); // counters and timings of this manager, as a table
//! # Ok(())
//! # }
//! ```
//!
//! A [`HandleEvent`] set by [`Config::event_handler`] is called for each event of a lock:
//! attempted, contended, acquired, renewed, renewal overdue, lost, released. The feature `metrics`
//! exports counters and timings through the [`metrics`](https://docs.rs/metrics) facade. The
//! feature `tracing` emits a span for each wait and each hold. The `distlock` command (package
//! `distlock-cli`) lists locks, shows them live, releases them, and runs commands under a lock.
//!
//! # How it works
//!
//! A lock is a string key with an expiry. Its value is the holder's [`LockId`]. Every step that
//! must be atomic is a short script on the server. A client that finds the lock taken appends an
//! entry to the lock's queue, which is a list. A release pops entries until it finds a waiter whose
//! process is still subscribed, publishes a grant message on that manager's pub/sub channel, and
//! sets the key to that waiter's id. So a release wakes exactly one thread (that of a writer, up to
//! 100 readers), a waiter sends few requests and uses no pooled connection, and a dead waiter
//! delays nobody.
//!
//! A manager runs four threads: one renews all its locks in batches over its own connection, one
//! ends leases that could not be renewed, one belongs to the connection pool, and one calls loggers
//! and event handlers for the others. Short-lived threads clean up after failed requests. Others
//! open connections: for renewals, for clean-up, and to each of several nodes. Grant messages need
//! no thread: one of the waiting threads reads the subscription for all of them.
//!
//! A guard considers its lease valid until a local deadline: the moment *before* the last confirmed
//! request was sent, plus the ttl, minus a margin for clock drift (1 % of the ttl, plus 2 ms). The
//! clock keeps running while the machine is suspended (`CLOCK_BOOTTIME`; for systems other than
//! Linux and Android see [Limits](#limits)). A lost lock stays lost.
//!
//! # Read-write locks and semaphores
//!
//! [`RedisMgr::rw_lock`] and [`RedisMgr::semaphore`] return handles of locks that several clients
//! can hold together: many readers or one writer, or a limited number of permits. Their guards
//! dereference to [`LockGuard`]: they are renewed, have a deadline and a token, and report a loss.
//! Each member has its own lease. If it dies, the others keep the lock. All kinds of locks of one
//! name exclude each other and share the queue and the sequence of tokens. Over several nodes,
//! semaphores with more than one permit are refused.
//!
//! # Several nodes
//!
//! With [`Config::nodes`], each lock is kept on several independent servers (Redlock). It is held
//! while more than half of the nodes keep it, so a minority of them may be unreachable, stopped or
//! restarted. All nodes are asked at the same time. Waiters queue on one node. If that node fails,
//! they queue on the next. A token is returned only once a quorum has stored it.
//! [`LockError::NoQuorum`] and [`Holder::nodes`] report what each node replied.
//!
//! # Limits
//!
//! * *Exclusion over one server* holds while that server keeps its data and its clock runs evenly.
//!   A server can grant a held lock again if it restarts without its data, is flushed, evicts keys
//!   (use `maxmemory-policy noeviction`), or fails over to a replica that had not received the
//!   lock. A jump of its clock has the same effect. The first holder finds out at its next renewal,
//!   within a third of the ttl. If the server does not reply, the lease ends at its local deadline.
//!   Fencing tokens keep rising in all these cases.
//! * *Pauses*: code can check the guard, be paused, and then act too late. Only a resource that
//!   checks fencing tokens can stop it.
//! * *Write access*: any client that can write the keys can take or break any lock. Let only
//!   clients you trust write keys with these prefixes.
//! * *Several nodes* ([`Config::nodes`]): a node that restarts must still have its data, or must
//!   not vote until the longest lease has passed; see [`Config::quarantine`]. While locks are held,
//!   add or remove one node at a time.
//! * *Failovers* of Redis Sentinel or Redis Cluster may lose locks, because replication is
//!   asynchronous; see [`Config::replicas`].
//! * *Platforms*: Linux and Android are tested. On other Unix systems the clock may stop during
//!   suspend, and thread numbers in identifiers are those of Rust's standard library. Windows is
//!   not supported.
//! * Redis 6.2 or newer, or any Valkey.
//!
//! # Features
//!
//! No feature is enabled by default.
//!
//! | feature | what it adds |
//! |---|---|
//! | `metrics` | Exports the counters and timings of all managers through the `metrics` facade. |
//! | `tracing` | Emits a `tracing` span for each wait and each hold. |
//! | `tls` | TLS to Redis (`rediss://`) and to MySQL. |
//! | `mysql` | Locks in MySQL and MariaDB: `MySqlMgr`. |
//! | `testing` | For your tests: `testing::MemoryServer`, and constructors of errors and events. |
//!
//! How to test a loss, a timeout and an unreachable server with `testing` is described in
//! [docs/testing.md](https://docs.rs/crate/distlock/latest/source/docs/testing.md).
//!
//! # Log levels
//!
//! Messages go to the `log` facade. *Error*: a bug in this library. *Warn*: a lock was lost, a
//! renewal or a release failed, or grant messages cannot be received. *Info*: the end of such a
//! problem, a lock that a shutdown has ended, and a call that goes on trying. *Debug*: new
//! connections, grants that arrived too late, background clean-up. Passwords and the contents of
//! requests are never logged.
//!
//! # Related crates
//!
//! * [`fd-lock`](https://docs.rs/fd-lock), if all processes are on one machine.
//! * An advisory lock of your database, if the data to protect is in that database.
//! * [`etcd-client`](https://docs.rs/etcd-client), if the lock service must survive the loss of any
//!   one machine, and you can operate a consensus system.
//! * [`rslock`](https://docs.rs/rslock), if your program is asynchronous.

#![forbid(unsafe_code)]
#![warn(
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::panic,
    clippy::unwrap_used,
    clippy::expect_used
)]
#![cfg_attr(test, allow(clippy::panic, clippy::unwrap_used))]

#[macro_use]
mod sys;

mod acquire;
mod backend;
mod cleanup;
mod config;
mod core;
mod error;
mod fallible_once;
mod guard;

mod local;
mod lock_info;
mod lock_manager;
mod manager;
mod multi_guard;
#[cfg(feature = "mysql")]
mod mysql_manager;
mod observe;
mod redis_manager;
mod reentrant;
mod renew;
mod rw_lock;
mod semaphore;
#[cfg(feature = "testing")]
pub mod testing;
mod user_connection;
#[cfg(test)]
mod verify;
mod wait;
mod with_lock;

#[doc(hidden)]
pub use crate::sys::display::HumanDuration;
#[cfg(feature = "testing")]
#[doc(hidden)]
pub use crate::sys::sim;
pub use crate::{
    backend::redis::node::sentinel::{SentinelInfo, SentinelReplica, SentinelView},
    config::{Config, LockOptions},
    core::{
        cancel::CancelToken,
        detached::{Detached, ParseDetachedError},
        holder::Holder,
        id::{LockId, ParseLockIdError, generate_lock_id},
        kind::{HeldBy, LockKind},
        lock_lost::LockLost,
        node_reply::{NodeReply, Vote},
        token::FencingToken,
    },
    error::{Action, LockError, Result},
    guard::LockGuard,
    lock_info::{LockInfo, QueuedWaiter, Released},
    lock_manager::LockManager,
    multi_guard::MultiGuard,
    observe::{
        event::{
            AcquiredEvent, AttemptedEvent, ContendedEvent, DetachedEvent, FailedEvent, HandleEvent,
            LostEvent, ReconnectedEvent, ReleasedEvent, RenewalFailedEvent, RenewalOverdueEvent,
            RenewedEvent, RetryingEvent, ServerChangedEvent, TimedOutEvent, UnreachableEvent,
        },
        metrics::{LockMetrics, Metrics, Timing},
    },
    redis_manager::RedisMgr,
    reentrant::ReentrantGuard,
    rw_lock::{ReadGuard, RwLock, WriteGuard},
    semaphore::{Permit, Semaphore},
    user_connection::PooledConnection,
};

#[cfg(feature = "mysql")]
pub use crate::{
    backend::mysql::{MySqlServerInfo, MySqlTableState},
    config::MySqlConfig,
    mysql_manager::MySqlMgr,
};
#[cfg(feature = "tls")]
pub use crate::{backend::transport::ServerCertificates, config::Tls};

pub use crossbeam_channel;
pub use redis;
pub use uuid;

/// Compiles the examples in the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// Runs the tests in docs/testing.md.
#[cfg(all(doctest, feature = "testing"))]
#[doc = include_str!("../docs/testing.md")]
struct Testing;
