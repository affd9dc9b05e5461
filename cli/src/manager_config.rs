//! `ManagerConfig`: where the locks are kept. The one place that knows which kinds of servers there
//! are.

use std::{sync::Arc, time::Duration};

use distlock::{
    Config, HandleEvent, LockError, LockManager, MySqlConfig, MySqlMgr, RedisMgr,
    ServerCertificates,
};

use crate::exit::Failure;

/// Maximum number of connections of a manager. A command sends one request at a time, so it needs
/// few: `doctor` holds a lock and waits for it. Locks of several names in MySQL need more: see
/// [`ManagerConfig::for_names`].
pub(crate) const CONNECTIONS_MAX: u32 = 2;

/// The configuration of a manager, for the servers that the URLs name.
#[derive(Clone, Debug)]
pub(crate) enum ManagerConfig {
    /// Redis or Valkey.
    Redis(Config),
    /// MySQL or MariaDB.
    MySql(MySqlConfig),
}

impl ManagerConfig {
    /// Creates a manager. Does not connect to a single Redis server.
    pub(crate) fn manager(self) -> Result<Box<dyn LockManager>, LockError> {
        Ok(match self {
            ManagerConfig::Redis(config) => Box::new(RedisMgr::new(config)?),
            ManagerConfig::MySql(config) => Box::new(MySqlMgr::new(config)?),
        })
    }

    /// The configuration for a command that works with Redis and Valkey only. `why_not` ends the
    /// message for MySQL.
    pub(crate) fn redis_only(self, command: &str, why_not: &str) -> Result<Config, Failure> {
        match self {
            ManagerConfig::Redis(config) => Ok(config),
            ManagerConfig::MySql(_) => Err(Failure::usage(format!(
                "distlock {command} works with Redis and Valkey only; {why_not}"
            ))),
        }
    }

    /// The same for a command that works with MySQL and MariaDB only.
    pub(crate) fn mysql_only(self, command: &str, why_not: &str) -> Result<MySqlConfig, Failure> {
        match self {
            ManagerConfig::MySql(config) => Ok(config),
            ManagerConfig::Redis(_) => Err(Failure::usage(format!(
                "distlock {command} works with mysql:// URLs only; {why_not}"
            ))),
        }
    }

    /// The configuration of each server alone.
    pub(crate) fn each_node(&self) -> Vec<ManagerConfig> {
        match self {
            ManagerConfig::Redis(config) => {
                config.each_node().into_iter().map(ManagerConfig::Redis).collect()
            }
            ManagerConfig::MySql(_) => vec![self.clone()],
        }
    }

    /// Whether the locks are in Redis or Valkey, on one server or in a cluster.
    pub(crate) fn is_one_redis(&self) -> bool {
        matches!(self, ManagerConfig::Redis(config) if config.each_node().len() <= 1)
    }

    /// The certificates that the servers show; none without TLS.
    pub(crate) fn server_certificates(&self) -> Result<Vec<ServerCertificates>, LockError> {
        match self {
            ManagerConfig::Redis(config) => config.server_certificates(),
            ManagerConfig::MySql(config) => config.server_certificates(),
        }
    }

    pub(crate) fn password(self, password: &str) -> ManagerConfig {
        self.map(|config| config.password(password), |config| config.password(password))
    }

    pub(crate) fn prefix(self, prefix: &str) -> ManagerConfig {
        self.map(|config| config.prefix(prefix), |config| config.prefix(prefix))
    }

    /// Lets the manager hold the locks of this many names together. Each lock in MySQL has a
    /// connection.
    pub(crate) fn for_names(self, names: usize) -> ManagerConfig {
        let locks = u32::try_from(names).unwrap_or(u32::MAX).max(CONNECTIONS_MAX);
        self.map(|config| config, |config| config.max_connections(locks))
    }

    pub(crate) fn ttl(self, ttl: Duration) -> ManagerConfig {
        self.map(|config| config.ttl(ttl), |config| config.ttl(ttl))
    }

    pub(crate) fn event_handler(self, handler: Arc<dyn HandleEvent>) -> ManagerConfig {
        let same = handler.clone();
        self.map(|config| config.event_handler(handler), |config| config.event_handler(same))
    }

    fn map(
        self,
        redis: impl FnOnce(Config) -> Config,
        mysql: impl FnOnce(MySqlConfig) -> MySqlConfig,
    ) -> ManagerConfig {
        match self {
            ManagerConfig::Redis(config) => ManagerConfig::Redis(redis(config)),
            ManagerConfig::MySql(config) => ManagerConfig::MySql(mysql(config)),
        }
    }
}
