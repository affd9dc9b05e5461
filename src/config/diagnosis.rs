//! What tools need that check servers one by one.

use super::{Config, urls};
#[cfg(feature = "tls")]
use crate::backend::{redis::certificates, transport::ServerCertificates};
use crate::{
    backend::redis::node::sentinel::{self, SentinelInfo},
    error::Result,
};

impl Config {
    /// Returns whether the locks are in a Redis Cluster.
    ///
    /// ```
    /// assert!(distlock::Config::new("redis+cluster://10.0.0.1,10.0.0.2").is_cluster());
    /// ```
    #[must_use]
    pub fn is_cluster(&self) -> bool {
        let scheme =
            |url: &String| url.split_once("://").is_some_and(|(s, _)| s.ends_with("+cluster"));
        self.urls.iter().any(scheme)
    }

    /// Returns one configuration for each node, in order. For tools that check the nodes one by
    /// one.
    ///
    /// ```
    /// let nodes = distlock::Config::new("redis://10.0.0.1,redis://10.0.0.2").each_node();
    /// assert_eq!(nodes.len(), 2);
    /// ```
    #[must_use]
    pub fn each_node(&self) -> Vec<Config> {
        self.urls.iter().map(|url| Config { urls: vec![url.clone()], ..self.clone() }).collect()
    }

    /// Asks the sentinels in the URL, and those that they name, what they know about the master,
    /// for diagnosis. Changes nothing. Takes up to a second for each sentinel that does not reply.
    /// Returns nothing if the URL names no sentinels.
    ///
    /// # Errors
    ///
    /// [`LockError::InvalidConfig`](crate::LockError::InvalidConfig) if a setting is invalid.
    pub fn examine_sentinels(&self) -> Result<Vec<SentinelInfo>> {
        let config = self.validate()?;
        let behind = config.endpoints.iter().filter_map(|endpoint| {
            let sentinels = endpoint.sentinels.as_ref()?;
            Some(sentinel::examine(sentinels, endpoint.security.as_ref()))
        });
        Ok(behind.flatten().collect())
    }

    /// Returns the configuration for a single server that the sentinels in the URL name, such as a
    /// replica, or for a single node of the cluster. For tools that check it. `server` is
    /// `host:port`.
    ///
    /// ```
    /// let config = distlock::Config::new("redis+sentinel://app@s1,s2,s3/main");
    /// let replica = config.at_server("10.0.0.7:6379");
    /// assert!(format!("{replica:?}").contains("\"10.0.0.7:6379\""));
    /// ```
    pub fn at_server(&self, server: &str) -> Config {
        let urls = self.urls.iter().map(|url| urls::at_server(url, server));
        Config { urls: urls.collect(), ..self.clone() }
    }

    /// Connects to each server in the URLs, and to each sentinel, to see its certificates, for
    /// diagnosis: including those that are not accepted, for example because they have expired.
    /// Sends no password. Each takes at most the operation timeout. Returns nothing for servers
    /// without TLS. With the feature `tls`.
    ///
    /// # Errors
    ///
    /// [`LockError::InvalidConfig`](crate::LockError::InvalidConfig) if a setting is invalid.
    #[cfg(feature = "tls")]
    pub fn server_certificates(&self) -> Result<Vec<ServerCertificates>> {
        let config = self.validate()?;
        let of_endpoint = |endpoint| certificates(endpoint, config.settings.operation_timeout);
        Ok(config.endpoints.iter().flat_map(|endpoint| of_endpoint(endpoint)).collect())
    }
}
