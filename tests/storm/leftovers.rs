//! Checks what is left on the servers after all workers have ended. Allowed are tokens, which
//! expire after a day, and queue entries of killed workers, which expire after a minute. In a
//! database, nothing but the rows of locks without a holder.

use std::{
    collections::{HashMap, HashSet},
    io,
    path::Path,
    time::Duration,
};

use crate::{
    Outcome,
    cluster::{Cluster, FENCE, Servers, pid_of},
    history::{Event, Reader, now},
    nanos, pause,
    support::{Cluster as RedisCluster, RedisServer},
};

/// Time for unreleased locks to expire, and for servers to notice closed connections.
const CLEAN_TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) fn check(
    cluster: &Cluster,
    record: &Path,
    record_event: &impl Fn(Event) -> io::Result<()>,
) -> Outcome {
    let killed: HashSet<u32> = Reader::open(record)?
        .read_on()?
        .into_iter()
        .filter(|record| record.event == Event::Killed)
        .map(|record| record.pid)
        .collect();
    let limit = now() + nanos(CLEAN_TIMEOUT);
    for node in 0..cluster.len() {
        let left = loop {
            let left = match &cluster.servers {
                Servers::Redis(nodes) => left_on(nodes.server(node), &killed),
                Servers::Database(database) => database.leftovers(),
            };
            if left.is_empty() || now() > limit {
                break left;
            }
            pause(Duration::from_millis(20));
        };
        for what in left {
            record_event(Event::Leak { what: format!("{what} on node {}", node + 1) })?;
        }
    }
    Ok(())
}

/// The same for a cluster, whose workers are not killed.
pub(crate) fn check_cluster(
    cluster: &RedisCluster,
    record_event: impl Fn(Event) -> io::Result<()>,
) -> Outcome {
    let masters = || cluster.nodes.iter().filter(|node| node.role() == "master");
    let limit = now() + nanos(CLEAN_TIMEOUT);
    let left = || masters().flat_map(|node| left_on(node, &HashSet::new())).collect::<Vec<_>>();
    while !left().is_empty() && now() < limit {
        pause(Duration::from_millis(20));
    }
    left().into_iter().try_for_each(|what| Ok(record_event(Event::Leak { what })?))
}

fn left_on(server: &RedisServer, killed: &HashSet<u32>) -> Vec<String> {
    let mut left = Vec::new();
    for key in server.keys() {
        let expires: i64 = server.query(&["PTTL", &key]);
        let is_fence = key.starts_with(FENCE);
        if expires == -1 && !is_fence {
            left.push(format!("{key}, which never expires,"));
        }
        if key.starts_with("distlock:queue:") {
            let entries: Vec<String> = server.query(&["LRANGE", &key, "0", "-1"]);
            let unexplained = entries
                .into_iter()
                .filter(|entry| !pid_of(entry).is_some_and(|pid| killed.contains(&pid)));
            left.extend(unexplained.map(|entry| format!("{entry:?} in {key}")));
        } else if !key.starts_with("distlock:token:") && !is_fence && expires != -2 {
            left.push(key);
        }
    }
    // Replicas are connected too, and nodes that have moved slots here.
    let is_node = |client: &HashMap<String, String>| {
        client["flags"].contains('S') || client["cmd"].starts_with("restore")
    };
    let clients = server.clients().iter().filter(|client| !is_node(client)).count();
    left.extend((clients > 0).then(|| format!("{clients} connections")));
    left
}
