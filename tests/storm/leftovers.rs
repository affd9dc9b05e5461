//! Checks what is left on the servers after all workers have ended. Allowed are tokens, which
//! expire after a day, and queue entries of killed workers, which expire after a minute. In a
//! database, nothing but the rows of locks without a holder.

use std::{collections::HashSet, io, path::Path, time::Duration};

use crate::{
    Outcome,
    cluster::{Cluster, FENCE, Servers, pid_of},
    history::{Event, Reader, now},
    nanos, pause,
    support::RedisServer,
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

fn left_on(server: &RedisServer, killed: &HashSet<u32>) -> Vec<String> {
    let mut left = Vec::new();
    for key in server.keys() {
        let expires: i64 = server.query(&["PTTL", &key]);
        if expires == -1 && key != FENCE {
            left.push(format!("{key}, which never expires,"));
        }
        if key.starts_with("distlock:queue:") {
            let entries: Vec<String> = server.query(&["LRANGE", &key, "0", "-1"]);
            let unexplained = entries
                .into_iter()
                .filter(|entry| !pid_of(entry).is_some_and(|pid| killed.contains(&pid)));
            left.extend(unexplained.map(|entry| format!("{entry:?} in {key}")));
        } else if !key.starts_with("distlock:token:") && key != FENCE && expires != -2 {
            left.push(key);
        }
    }
    let clients = server.clients();
    left.extend((!clients.is_empty()).then(|| format!("{} connections", clients.len())));
    left
}
