//! `MySqlConfig`: how a manager reaches a MySQL or MariaDB server, and the defaults of its locks.

use std::{fmt, sync::Arc, time::Duration};

#[cfg(feature = "tls")]
use super::Tls;
use super::{Config, ValidatedConfig};
#[cfg(feature = "tls")]
use crate::backend::transport::ServerCertificates;
use crate::{
    backend::{
        error::BackendError,
        mysql::{self, MySqlEndpoint, MySqlServerInfo, SessionSettings, Table},
    },
    error::{Action, LockError, Result},
    observe::event::HandleEvent,
};

/// Each lock that is held or waited for has a connection.
const DEFAULT_MAX_CONNECTIONS: u32 = 20;
/// Default time of an exchange. In the longest one, two statements wait for a locked table until
/// the server refuses them, each for a second. A shorter time would end before that.
const DEFAULT_OPERATION_TIMEOUT: Duration = Duration::from_secs(3);

/// How a [`MySqlMgr`](crate::MySqlMgr) reaches its server, and the defaults of its locks.
///
/// ```
/// use std::time::Duration;
///
/// use distlock::MySqlConfig;
///
/// let config = MySqlConfig::new("mysql://app:secret@10.0.0.7/shop")
///     .ttl(Duration::from_secs(30))
///     .max_connections(50);
/// assert!(!format!("{config:?}").contains("secret"));
/// ```
#[derive(Clone)]
#[must_use]
pub struct MySqlConfig {
    url: String,
    table: String,
    allow_cluster: bool,
    common: Config,
    #[cfg(feature = "tls")]
    tls: Option<Tls>,
}

impl MySqlConfig {
    /// A configuration for the server and database of this URL:
    /// `mysql://[user[:password]@]host[:port]/database`, also with `mariadb://`. In a user name and
    /// a password, special characters are written as `%XX`. For a Unix socket, add
    /// `?socket=/path`; for TLS, `?ssl-mode=REQUIRED` (see [`tls`](Self::tls)).
    pub fn new(url: impl Into<String>) -> MySqlConfig {
        let common = Config::nodes([""; 0]).prefix("").pool_size(DEFAULT_MAX_CONNECTIONS);
        // The server decides who is next.
        let common = common.local_handover(Duration::ZERO);
        let common = common.operation_timeout(DEFAULT_OPERATION_TIMEOUT);
        MySqlConfig {
            url: url.into(),
            table: "distlock".into(),
            allow_cluster: false,
            common,
            #[cfg(feature = "tls")]
            tls: None,
        }
    }

    /// Secures the connections with TLS, with these certificates. Without this, a URL with
    /// `?ssl-mode=REQUIRED` uses TLS and trusts the authorities of the system. The server's
    /// certificate and name are always checked, and a server without TLS is an error. With the
    /// feature `tls`.
    #[cfg(feature = "tls")]
    pub fn tls(mut self, tls: Tls) -> MySqlConfig {
        self.tls = Some(tls);
        self
    }

    /// Sets the password, unless the URL contains one.
    pub fn password(mut self, password: impl Into<String>) -> MySqlConfig {
        self.common = self.common.password(password);
        self
    }

    /// Sets the table of the locks: `table` or `database.table`. Defaults to `distlock`. All
    /// programs that share locks must use the same one.
    /// [`MySqlMgr::create_table`](crate::MySqlMgr::create_table) creates it.
    pub fn table(mut self, name: impl Into<String>) -> MySqlConfig {
        self.table = name.into();
        self
    }

    /// Sets a text that is put before each lock name. Defaults to nothing. All programs that share
    /// locks must use the same one.
    pub fn prefix(mut self, prefix: impl Into<String>) -> MySqlConfig {
        self.common = self.common.prefix(prefix);
        self
    }

    /// Sets the default time after which the lock of a holder that has died, or is cut off, is
    /// free. Defaults to 10 s. The server counts in whole seconds, so others may wait for up to one
    /// second longer.
    ///
    /// If only the holder's process dies, its lock is free at once, because the connection is
    /// closed.
    pub fn ttl(mut self, ttl: Duration) -> MySqlConfig {
        self.common = self.common.ttl(ttl);
        self
    }

    /// Sets the default time after which a lock is released although its guard is alive. See
    /// [`LockOptions::max_hold`](crate::LockOptions::max_hold).
    pub fn max_hold(mut self, limit: Duration) -> MySqlConfig {
        self.common = self.common.max_hold(limit);
        self
    }

    /// Sets the maximum number of connections that hold locks or wait for them. Defaults to 20.
    /// Further callers wait for a connection, up to their wait. Two more connections serve for
    /// everything else.
    ///
    /// The server must allow as many connections (`max_connections`) for all processes together.
    pub fn max_connections(mut self, connections: u32) -> MySqlConfig {
        self.common = self.common.pool_size(connections);
        self
    }

    /// Sets the maximum time for connecting to the server and for each exchange with it, beyond the
    /// wait for a lock. Defaults to 3 s. For a lock with a ttl below three times this timeout, a
    /// third of the ttl is the limit.
    ///
    /// The server refuses a statement that waits for a locked table, for example during `ALTER
    /// TABLE`, after a second. With a limit below 3 s, calls may end before that, and then return
    /// [`Unavailable`](LockError::Unavailable) instead of a timeout.
    pub fn operation_timeout(mut self, timeout: Duration) -> MySqlConfig {
        self.common = self.common.operation_timeout(timeout);
        self
    }

    /// Makes calls fail fast while the server is unavailable. See [`Config::fail_fast`].
    pub fn fail_fast(mut self, on: bool) -> MySqlConfig {
        self.common = self.common.fail_fast(on);
        self
    }

    /// Adds a handler that is called for each event of a lock. See [`Config::event_handler`].
    pub fn event_handler(mut self, handler: Arc<dyn HandleEvent>) -> MySqlConfig {
        self.common = self.common.event_handler(handler);
        self
    }

    /// Adds the names of locks to the exported metrics. See [`Config::metrics_by_lock`].
    pub fn metrics_by_lock(mut self, on: bool) -> MySqlConfig {
        self.common = self.common.metrics_by_lock(on);
        self
    }

    /// Accepts a member of a Galera cluster, or of group replication with several primaries, which
    /// is refused otherwise: each member keeps row locks of its own, so two clients that use
    /// different members can hold the same lock. Only if all programs use the same member.
    pub fn allow_cluster(mut self, on: bool) -> MySqlConfig {
        self.allow_cluster = on;
        self
    }

    /// Returns the statement that creates the table of the locks, for those who create tables
    /// themselves. Does not connect.
    ///
    /// ```
    /// let statement = distlock::MySqlConfig::new("").table("locks").table_statement()?;
    /// assert!(statement.starts_with("CREATE TABLE IF NOT EXISTS `locks` ("));
    /// # Ok::<_, distlock::LockError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`InvalidConfig`](LockError::InvalidConfig) if the name of the table is not usable.
    pub fn table_statement(&self) -> Result<String> {
        Ok(self.parsed_table()?.create())
    }

    /// Asks the server what it is and how it is set up, for diagnosis. Also works for a server that
    /// [`MySqlMgr::new`](crate::MySqlMgr::new) refuses. Changes nothing. Uses one connection for
    /// about 30 exchanges, each of which takes at most the operation timeout.
    ///
    /// # Errors
    ///
    /// As [`MySqlMgr::new`](crate::MySqlMgr::new), and [`Unavailable`](LockError::Unavailable) if
    /// the server cannot be reached.
    pub fn examine_server(&self) -> Result<MySqlServerInfo> {
        let (config, endpoint, table) = self.validated_parts()?;
        mysql::examine(&endpoint, &table, config.settings.operation_timeout).map_err(|error| {
            BackendError::Node(error).into_lock_error(endpoint.label, Action::Connect, None)
        })
    }

    /// Connects to see the certificates of the server, as
    /// [`Config::server_certificates`](crate::Config::server_certificates) does. Signs in if the
    /// certificate is accepted.
    ///
    /// # Errors
    ///
    /// [`InvalidConfig`](LockError::InvalidConfig) if a setting is invalid.
    #[cfg(feature = "tls")]
    pub fn server_certificates(&self) -> Result<Vec<ServerCertificates>> {
        let (config, endpoint, _) = self.validated_parts()?;
        Ok(mysql::certificates(endpoint, config.settings.operation_timeout).into_iter().collect())
    }

    pub(crate) fn validate(&self) -> Result<(ValidatedConfig, SessionSettings)> {
        let (config, endpoint, table) = self.validated_parts()?;
        let (default_ttl, allow_cluster) = (config.settings.ttl, self.allow_cluster);
        Ok((config, SessionSettings { endpoint, default_ttl, table, allow_cluster }))
    }

    #[cfg(feature = "tls")]
    fn secure(&self, endpoint: &mut MySqlEndpoint) -> Result<()> {
        let invalid = |reason| LockError::InvalidConfig { reason };
        if self.tls.is_some() && (endpoint.wants_tls == Some(false) || endpoint.is_unix) {
            return Err(invalid(format!(
                "there are settings for TLS, but the URL of {} excludes it; remove \
                 ssl-mode=DISABLED or the socket",
                endpoint.label
            )));
        }
        if self.tls.is_some() || endpoint.wants_tls == Some(true) {
            let tls = self.tls.clone().unwrap_or_default();
            endpoint.security = Some(tls.client(Some(&endpoint.host)).map_err(invalid)?);
        }
        Ok(())
    }

    #[cfg(not(feature = "tls"))]
    fn secure(&self, endpoint: &mut MySqlEndpoint) -> Result<()> {
        if endpoint.wants_tls == Some(true) {
            let reason = "the URL of the database asks for TLS, which this program was built \
                          without; enable the feature `tls`";
            return Err(LockError::InvalidConfig { reason: reason.into() });
        }
        Ok(())
    }

    fn validated_parts(&self) -> Result<(ValidatedConfig, MySqlEndpoint, Table)> {
        let config = self.common.validate_settings(Vec::new(), "max_connections")?;
        let mut endpoint = MySqlEndpoint::parse(&self.url)?;
        if endpoint.password.is_none() {
            endpoint.password = self.common.password.as_deref().map(Arc::from);
        }
        self.secure(&mut endpoint)?;
        Ok((config, endpoint, self.parsed_table()?))
    }

    fn parsed_table(&self) -> Result<Table> {
        Table::parse(&self.table).ok_or_else(|| LockError::InvalidConfig {
            reason: "the table must be `table` or `database.table`, each of 1 to 64 letters, \
                     digits, _, $ or -"
                .into(),
        })
    }
}

impl fmt::Debug for MySqlConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let server = MySqlEndpoint::parse(&self.url);
        let server = server.as_ref().map_or("<not usable>", |endpoint| &endpoint.label);
        f.debug_struct("MySqlConfig")
            .field("server", &server)
            .field("table", &self.table)
            .field("prefix", &self.common.prefix)
            .field("ttl", &self.common.ttl)
            .field("max_hold", &self.common.max_hold)
            .field("max_connections", &self.common.pool_size)
            .field("operation_timeout", &self.common.operation_timeout)
            .field("allow_cluster", &self.allow_cluster)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_of_connections_is_called_as_its_setting() {
        let config = MySqlConfig::new("mysql://localhost/db").max_connections(0);
        let error = config.validate().unwrap_err().to_string();
        assert!(error.contains("max_connections is 0, but must be 1 to"), "{error}");
    }
}
