//! `Discovery`: where a server is now. It is asked before each connection.

mod dns;

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use self::dns::HostName;
use super::{address::Address, error::NodeError};
use crate::sys::clock::Moment;

/// Finds the addresses of a server.
pub(crate) trait Discovery: fmt::Debug + Send + Sync {
    /// Returns the addresses to try, in this order. Ends by `deadline`.
    fn resolve(&self, deadline: Moment) -> Result<Vec<Address>, NodeError>;

    /// Returns the host that the last [`resolve`](Self::resolve) found, if the URL does not name
    /// it. With TLS, it is expected in the certificate.
    fn host(&self) -> Option<String> {
        None
    }

    /// How messages name the server that the last [`resolve`](Self::resolve) found, and who has
    /// named it, if the URL does not name it.
    fn found(&self) -> Option<String> {
        None
    }

    /// How many times another server is known to have taken over. A connection that was opened at a
    /// lower count may lead to a former server, which may still reply.
    fn takeovers(&self) -> u64 {
        0
    }

    /// How often to call [`refresh`](Self::refresh), if there is something to ask for the server.
    fn refresh_interval(&self) -> Option<Duration> {
        None
    }

    /// Finds out in the background whether another server has taken over.
    fn refresh(&self) {}
}

/// A server that is always at the same address.
impl Discovery for Address {
    fn resolve(&self, _: Moment) -> Result<Vec<Address>, NodeError> {
        Ok(vec![self.clone()])
    }
}

/// Host and port of a server.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ServerName {
    pub(crate) host: String,
    pub(crate) port: u16,
}

/// How messages name a server. An IPv6 address needs brackets.
pub(super) fn host_label(host: &str, port: impl fmt::Display) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// The discovery of a host that is given by its address or its name.
pub(super) fn of_host(host: &str, port: u16) -> Box<dyn Discovery> {
    match host.parse::<IpAddr>() {
        Ok(ip) => Box::new(Address::Tcp(SocketAddr::new(ip, port))),
        Err(_) => Box::new(HostName::new(host, port)),
    }
}
