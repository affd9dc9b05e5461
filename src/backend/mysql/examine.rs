//! What a server is and how it is set up, even if it is unfit for locks.

use std::time::{Duration, UNIX_EPOCH};

use super::{
    connection::Connection,
    endpoint::MySqlEndpoint,
    outcome::{NO_TABLE, Rows, cluster_in, misfit, number, rows, text},
    session::too_old,
    sql::{
        COUNT_CONNECTIONS, LIST_CLUSTER_VARIABLES, NEED_PROCESS, READ_TIME, ReadOnlyOff, Table,
        read_state,
    },
};
#[cfg(feature = "tls")]
use crate::backend::transport::ServerCertificates;
use crate::{
    backend::error::{NodeError, NodeErrorKind},
    sys::clock,
};

/// Exchanges by which the round trip and the clock are measured.
const ROUND_TRIP_SAMPLES: usize = 20;
/// An idle timeout that no server has by default.
const UNUSUAL_LEASE_S: u64 = 3_217;

/// What a MySQL or MariaDB server is, and how it is set up.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct MySqlServerInfo {
    /// Server as named in messages.
    pub server: String,
    /// Product and version, such as `MariaDB 10.11.6`.
    pub version: String,
    /// Why locks do not work with this version.
    pub too_old: Option<String>,
    /// Kind of cluster, if each of its members keeps row locks of its own.
    pub cluster: Option<String>,
    /// Whether the server refuses changes, for example because it is a replica.
    pub read_only: bool,
    /// Whether a proxy shares the connections to the server among clients.
    pub shares_connections: bool,
    /// Whether the idle timeout of a connection, which is the lease of a lock, can be set.
    pub keeps_wait_timeout: bool,
    /// State of the table of the locks.
    pub table: MySqlTableState,
    /// Number of connections in use, of all clients.
    pub connections: u64,
    /// Maximum number of connections.
    pub max_connections: u64,
    /// `innodb_flush_log_at_trx_commit`: 1 if each release waits for the disk.
    pub flush_log_at_commit: u64,
    /// Whether the user may list the waiters of other users (`PROCESS`).
    pub lists_all_waiters: bool,
    /// Times of simple requests, in ascending order.
    pub round_trips: Vec<Duration>,
    /// How far the server's clock is ahead of this machine's, in microseconds.
    pub clock_ahead_us: i64,
    /// Error of that measurement.
    pub clock_error: Duration,
}

/// Whether a table can keep locks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum MySqlTableState {
    /// It can.
    Usable,
    /// There is no such table.
    #[default]
    Missing,
    /// The table is not the one that [`MySqlMgr::create_table`](crate::MySqlMgr::create_table)
    /// creates, for this reason.
    Unfit(String),
    /// The server does not show the table to this user, for this reason.
    Hidden(String),
}

/// Connects to see the server's certificates, which takes at most `timeout`. `None` without TLS.
#[cfg(feature = "tls")]
pub(crate) fn certificates(
    mut endpoint: MySqlEndpoint,
    timeout: Duration,
) -> Option<ServerCertificates> {
    let (client, shown) = endpoint.security.as_ref()?.recording();
    endpoint.security = Some(client);
    let connected = Connection::open(&endpoint, clock::now().saturating_add(timeout));
    let failure = connected.err().map(|error| error.kind.to_string());
    Some(shown.of(&endpoint.label, failure))
}

/// Asks a server. Each exchange takes at most one operation timeout.
pub(crate) fn examine(
    endpoint: &MySqlEndpoint,
    table: &Table,
    timeout: Duration,
) -> Result<MySqlServerInfo, NodeError> {
    let deadline = || clock::now().saturating_add(timeout);
    let mut connection = Connection::open(endpoint, deadline())?;
    let mut query = |statement: &str| rows(connection.query(statement, deadline())?);
    let state = query(&read_state(UNUSUAL_LEASE_S))?;
    let cluster = cluster_in(&query(LIST_CLUSTER_VARIABLES)?).map(str::to_owned);
    let connections = number(&query(COUNT_CONNECTIONS)?, 0, 1).unwrap_or_default();
    let table = table_state(table, &mut query)?;
    let lists_all_waiters = unless_refused(query(NEED_PROCESS))?.is_ok();
    let mut samples = Vec::with_capacity(ROUND_TRIP_SAMPLES);
    for _ in 0..ROUND_TRIP_SAMPLES {
        let (wall, sent) = (clock::wall_clock(), clock::now());
        let reply = query(READ_TIME)?;
        let took = clock::now().duration_since(sent);
        let ours = wall.duration_since(UNIX_EPOCH).unwrap_or_default() + took / 2;
        let theirs = Duration::from_micros(number(&reply, 0, 0).unwrap_or_default());
        samples.push((took, difference_us(theirs, ours)));
    }
    // The fastest reply has the smallest error.
    samples.sort_unstable();
    let (fastest, clock_ahead_us) = samples.first().copied().unwrap_or_default();
    let product = if connection.is_mariadb() { "MariaDB" } else { "MySQL" };
    let version = connection.version().replace("-MariaDB", "");
    Ok(MySqlServerInfo {
        server: endpoint.label.to_string(),
        version: format!("{product} {version}"),
        too_old: too_old(&version, connection.is_mariadb()),
        cluster,
        read_only: ReadOnlyOff::of(text(&state, 0, 2)).is_none(),
        shares_connections: number(&state, 0, 0) != Some(connection.id()),
        keeps_wait_timeout: number(&state, 0, 1) == Some(UNUSUAL_LEASE_S),
        table,
        connections,
        max_connections: number(&state, 0, 3).unwrap_or_default(),
        flush_log_at_commit: number(&state, 0, 4).unwrap_or_default(),
        lists_all_waiters,
        round_trips: samples.into_iter().map(|(took, _)| took).collect(),
        clock_ahead_us,
        clock_error: fastest / 2,
    })
}

fn table_state(
    table: &Table,
    query: &mut impl FnMut(&str) -> Result<Rows, NodeError>,
) -> Result<MySqlTableState, NodeError> {
    let columns = match unless_refused(query(&table.list_columns()))? {
        Ok(columns) => columns,
        Err((code, _)) if code == NO_TABLE => return Ok(MySqlTableState::Missing),
        Err((_, message)) => return Ok(MySqlTableState::Hidden(message)),
    };
    let engine = query(&table.engine())?;
    let engine = text(&engine, 0, 0).unwrap_or_default();
    Ok(misfit(&columns, engine).map_or(MySqlTableState::Usable, MySqlTableState::Unfit))
}

/// Separates a refusal of the server from a connection that failed.
fn unless_refused<T>(
    result: Result<T, NodeError>,
) -> Result<Result<T, (String, String)>, NodeError> {
    match result {
        Ok(value) => Ok(Ok(value)),
        Err(NodeError { kind: NodeErrorKind::Refused { code, message }, .. }) => {
            Ok(Err((code, message)))
        }
        Err(error) => Err(error),
    }
}

fn difference_us(one: Duration, other: Duration) -> i64 {
    let us = |span: Duration| i64::try_from(span.as_micros()).unwrap_or(i64::MAX);
    us(one).saturating_sub(us(other))
}
