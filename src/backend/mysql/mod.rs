//! A MySQL or MariaDB server, where a lock is a row that a transaction keeps.
//!
//! The holder's transaction has the row locked for update, on a connection of its own. The server
//! ends it when that connection is closed, or when no request has come for the ttl of the lease
//! (`wait_timeout`). Waiters queue at the server, first in, first out.

mod acquisition;
mod backend;
mod cleanup;
mod connection;
mod database;
mod endpoint;
mod examine;
mod held;
mod inspect;
mod loss_watch;
mod outcome;
mod packet;
mod pool;
mod renewals;
mod session;
mod sign_in;
mod sql;
mod token;

#[cfg(feature = "tls")]
pub(crate) use self::examine::certificates;
pub use self::examine::{MySqlServerInfo, MySqlTableState};
pub(crate) use self::{
    backend::MySqlBackend, endpoint::MySqlEndpoint, examine::examine, session::SessionSettings,
    sql::Table,
};
