//! The servers of a storm, and two proxies in front of each. Half of the workers connect through
//! the first proxies, half through the second.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use crate::{
    support::{FaultProxy, Nodes},
    worker::name_of,
};

pub(crate) const ROUTES: usize = 2;

pub(crate) struct Cluster {
    pub(crate) nodes: Nodes,
    /// By node, then by route.
    proxies: Vec<Vec<FaultProxy>>,
    /// By node: whether it is stopped or down, so that a query would block or fail.
    down: Vec<Arc<AtomicBool>>,
}

impl Cluster {
    pub(crate) fn build(count: usize) -> Cluster {
        let nodes =
            Nodes::built(
                count,
                |node, server| if is_durable(node, count) { server.durable() } else { server },
            );
        let routes = |node| {
            (0..ROUTES).map(|_| FaultProxy::in_front_of(nodes.server(node).addr())).collect()
        };
        let proxies = (0..count).map(routes).collect();
        Cluster { nodes, proxies, down: (0..count).map(|_| Arc::default()).collect() }
    }

    pub(crate) fn is_durable(&self, node: usize) -> bool {
        is_durable(node, self.len())
    }

    pub(crate) fn len(&self) -> usize {
        self.proxies.len()
    }

    pub(crate) fn proxy(&self, node: usize, route: usize) -> &FaultProxy {
        &self.proxies[node][route]
    }

    pub(crate) fn urls(&self, route: usize) -> String {
        self.proxies.iter().map(|routes| routes[route].url()).collect::<Vec<_>>().join(",")
    }

    pub(crate) fn down(&self, node: usize) -> Arc<AtomicBool> {
        self.down[node].clone()
    }

    pub(crate) fn is_down(&self, node: usize) -> bool {
        self.down[node].load(Ordering::SeqCst)
    }

    pub(crate) fn pause(&self, node: usize) {
        self.down[node].store(true, Ordering::SeqCst);
        self.nodes.stop(node);
    }

    pub(crate) fn resume(&self, node: usize) {
        self.nodes.cont(node);
        self.down[node].store(false, Ordering::SeqCst);
    }

    pub(crate) fn kill(&self, node: usize) {
        self.down[node].store(true, Ordering::SeqCst);
        self.nodes.kill(node);
    }

    pub(crate) fn start(&self, node: usize, with_data: bool) {
        if with_data {
            self.nodes.restart(node)
        } else {
            self.nodes.restart_empty(node)
        }
        self.down[node].store(false, Ordering::SeqCst);
    }
}

/// Whether a node writes everything to disk before it replies. A single node does. Of several, a
/// quorum does not, and the queue node is one of them. So if all of them lose their data, only
/// their quarantine protects a lock that is held.
fn is_durable(node: usize, of: usize) -> bool {
    of == 1 || node > of / 2
}

/// Key that contains at least the largest token of all locks that were released.
pub(crate) const FENCE: &str = "distlock:fence";

/// The keys of a lock: the lock itself, its queue and its token.
pub(crate) fn lock_key(lock: u32) -> String {
    format!("lock:{}", name_of(lock))
}

pub(crate) fn queue_key(lock: u32) -> String {
    format!("distlock:queue:{{lock:{}}}", name_of(lock))
}

pub(crate) fn token_key(lock: u32) -> String {
    format!("distlock:token:{{lock:{}}}", name_of(lock))
}

/// The process in a lock identifier or in a queue entry, which contain it as `|pid77|`.
pub(crate) fn pid_of(id: &str) -> Option<u32> {
    id.split('|').find_map(|part| part.strip_prefix("pid")?.parse().ok())
}
