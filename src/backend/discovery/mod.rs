//! `Discovery`: where a server is now. It is asked before each connection.

mod dns;

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
};

use self::dns::HostName;
use super::error::NodeError;
use crate::sys::clock::Moment;

/// Finds the addresses of a server.
pub(crate) trait Discovery: fmt::Debug + Send + Sync {
    /// Returns the addresses to try, in this order. Ends by `deadline`.
    fn resolve(&self, deadline: Moment) -> Result<Vec<Address>, NodeError>;
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Address {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

/// A server that is always at the same address.
impl Discovery for Address {
    fn resolve(&self, _: Moment) -> Result<Vec<Address>, NodeError> {
        Ok(vec![self.clone()])
    }
}

/// The discovery of a host that is given by its address or its name.
pub(super) fn of_host(host: &str, port: u16) -> Box<dyn Discovery> {
    match host.parse::<IpAddr>() {
        Ok(ip) => Box::new(Address::Tcp(SocketAddr::new(ip, port))),
        Err(_) => Box::new(HostName::new(host, port)),
    }
}
