//! What is left on the servers when all workers have gone: tokens, which expire after a day, the places of those who were
//! killed in line, which expire after a minute, and what a server knows of its memory. Nothing else.

use std::{collections::HashSet, io, path::Path, time::Duration};

use crate::{
    Outcome,
    history::{Event, Reader, now},
    nanos, pause,
    stage::{Stage, pid_of},
};

/// Locks that were not released last for their lease, and closed connections until the server has seen it.
const PATIENCE: Duration = Duration::from_secs(10);

pub(crate) fn look(stage: &Stage, record: &Path, tell: &impl Fn(Event) -> io::Result<()>) -> Outcome {
    let killed: HashSet<u32> = Reader::open(record)?
        .read_on()?
        .into_iter()
        .filter(|record| record.event == Event::Killed)
        .map(|record| record.pid)
        .collect();
    let limit = now() + nanos(PATIENCE);
    for node in 0..stage.len() {
        let left = loop {
            let left = left_on(stage, node, &killed);
            if left.is_empty() || now() > limit {
                break left;
            }
            pause(Duration::from_millis(20));
        };
        for what in left {
            tell(Event::Leak { what: format!("{what} on node {}", node + 1) })?;
        }
    }
    Ok(())
}

fn left_on(stage: &Stage, node: usize, killed: &HashSet<u32>) -> Vec<String> {
    let server = stage.nodes.server(node);
    let mut left = Vec::new();
    for key in server.keys() {
        let expires: i64 = server.query(&["PTTL", &key]);
        if expires == -1 {
            left.push(format!("{key}, which never expires,"));
        }
        if key.starts_with("distlock:queue:") {
            let places: Vec<String> = server.query(&["LRANGE", &key, "0", "-1"]);
            let living = places.into_iter().filter(|place| !pid_of(place).is_some_and(|pid| killed.contains(&pid)));
            left.extend(living.map(|place| format!("{place:?} in {key}")));
        } else if !key.starts_with("distlock:fence:") && key != "distlock:memory" && expires != -2 {
            left.push(key);
        }
    }
    let clients = server.clients();
    left.extend((!clients.is_empty()).then(|| format!("{} connections", clients.len())));
    left
}
