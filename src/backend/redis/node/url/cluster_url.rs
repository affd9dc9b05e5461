//! URLs of a Redis Cluster: `redis+cluster://[user[:password]@]host[:port],host,…`. The hosts are
//! some of its nodes; user and password are those of all nodes.

use redis::ConnectionAddr;

use super::{Endpoint, parse_plain};
use crate::{
    backend::{
        discovery::{ServerName, host_label, of_host},
        transport::Security,
    },
    error::{LockError, Result},
};

pub(super) fn parse(
    url: &str,
    scheme: &str,
    is_secure: bool,
    security: &dyn Fn(Option<&str>) -> Result<Option<Security>>,
) -> Result<Endpoint> {
    let invalid = |reason: &str| {
        let reason = format!(
            "the {scheme}:// URL is invalid: {reason}; write \
             {scheme}://[user[:password]@]host[:6379],host"
        );
        LockError::InvalidConfig { reason }
    };
    let rest = url.split_once("://").map_or("", |(_, rest)| rest);
    let rest = rest.split_once('?').map_or(rest, |(rest, _)| rest);
    let (login, rest) = rest.rsplit_once('@').map_or(("", rest), |(login, rest)| (login, rest));
    let (hosts, db) = rest.split_once('/').unwrap_or((rest, ""));
    if !matches!(db, "" | "0") {
        return Err(invalid("a cluster has only database 0; leave out the database"));
    }
    let (mut nodes, mut labels) = (Vec::new(), Vec::new());
    for host in hosts.split(',') {
        if host.trim().is_empty() {
            return Err(invalid("a node has no host"));
        }
        let info = parse_plain(&format!("redis://{}", host.trim()), scheme)?;
        let ConnectionAddr::Tcp(host, port) = info.addr() else {
            return Err(invalid("a node has no host"));
        };
        labels.push(host_label(host, *port));
        nodes.push(ServerName { host: host.clone(), port: *port });
    }
    let at = if login.is_empty() { "" } else { "@" };
    // The host means nothing here.
    let info = parse_plain(&format!("redis://{login}{at}cluster"), scheme)?;
    let label = format!("cluster {}", labels.join(", "));
    let first = &nodes[0];
    let discovery = of_host(&first.host, first.port);
    let endpoint = Endpoint::new(discovery, &label, &info, is_secure, security(None)?);
    Ok(Endpoint { cluster: nodes, ..endpoint })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn url_of_a_cluster_is_parsed() {
        let endpoint = Endpoint::parse("redis+cluster://app:p%40ss@h1,h2:7,[::1]/0").unwrap();
        assert_eq!(
            (endpoint.user.as_deref(), endpoint.password.as_deref(), endpoint.db),
            (Some("app"), Some("p@ss"), 0)
        );
        assert_eq!(&*endpoint.label, "cluster h1:6379, h2:7, [::1]:6379");
        assert!(!format!("{endpoint:?}").contains("ss"));
        let node = endpoint.of_node(&endpoint.cluster[1]);
        assert_eq!((&*node.label, node.password.as_deref()), ("h2:7", Some("p@ss")));
        assert!(node.cluster.is_empty());
    }

    /// Fault: N176
    #[test]
    fn unusable_url_says_what_to_write() {
        for (url, says) in [
            ("redis+cluster://h/1", "only database 0; leave out the database"),
            ("redis+cluster://h1,,h2", "a node has no host"),
            ("redis+cluster://", "a node has no host"),
            ("redis+cluster://h:port", "invalid"),
            ("redis+cluster://h?db=1", "write the"),
            ("redis+cluster://h?sentinel_user=a", "an unsupported part"),
            ("unix+cluster:///path", "unknown scheme"),
        ] {
            let text = Endpoint::parse(url).unwrap_err().to_string();
            assert!(text.contains(says), "{url}: {text}");
        }
    }
}
