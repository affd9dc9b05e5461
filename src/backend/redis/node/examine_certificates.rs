//! The certificates of a server and of its sentinels, or of the nodes of a cluster, for diagnosis.

use std::time::Duration;

use super::{sentinel::Sentinels, url::Endpoint};
use crate::{backend::transport::ServerCertificates, sys::clock};

/// Connects to each in turn, which takes at most `timeout`. Empty without TLS.
pub(crate) fn certificates(endpoint: &Endpoint, timeout: Duration) -> Vec<ServerCertificates> {
    let of_server = |endpoint: &Endpoint| {
        let security = endpoint.security.as_ref()?;
        let deadline = clock::now().saturating_add(timeout);
        Some(security.certificates_of(&endpoint.label, &*endpoint.discovery, deadline))
    };
    if !endpoint.cluster.is_empty() {
        let nodes = endpoint.cluster.iter();
        return nodes.filter_map(|node| of_server(&endpoint.of_node(node))).collect();
    }
    let sentinels = endpoint.sentinels.iter().flat_map(Sentinels::each).filter_map(|sentinel| {
        let deadline = clock::now().saturating_add(timeout);
        let security = sentinel.security.as_ref()?;
        Some(security.certificates_of(&sentinel.label, &*sentinel.discovery, deadline))
    });
    of_server(endpoint).into_iter().chain(sentinels).collect()
}
