//! The servers of a storm, and two proxies in front of each. Half of the workers connect through
//! the first proxies, half through the second.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use crate::{
    Outcome,
    args::Target,
    database::Database,
    support::{FaultProxy, Nodes},
    worker::name_of,
};

pub(crate) const ROUTES: usize = 2;

pub(crate) struct Cluster {
    pub(crate) servers: Servers,
    /// By node, then by route.
    proxies: Vec<Vec<FaultProxy>>,
    /// By node: whether it is stopped or down, so that a query would block or fail.
    down: Vec<Arc<AtomicBool>>,
}

pub(crate) enum Servers {
    Redis(Nodes),
    Database(Database),
}

impl Cluster {
    pub(crate) fn build(target: Target) -> Outcome<Cluster> {
        let count = target.nodes();
        let servers = match target {
            Target::Nodes(_) | Target::Kinds(_) => {
                Servers::Redis(Nodes::built(count, |node, server| {
                    if is_durable(node, count) { server.durable() } else { server }
                }))
            }
            Target::Database => Servers::Database(Database::start()?),
            Target::Cluster => return Err("a cluster has a storm of its own".into()),
        };
        let routes = |node| {
            let proxy = || match &servers {
                Servers::Redis(nodes) => FaultProxy::in_front_of(nodes.server(node).addr()),
                Servers::Database(database) => FaultProxy::in_front_of_mysql(database.addr()),
            };
            (0..ROUTES).map(|_| proxy()).collect()
        };
        let proxies = (0..count).map(routes).collect();
        Ok(Cluster { servers, proxies, down: (0..count).map(|_| Arc::default()).collect() })
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

    /// The id of a lock's holder, according to the first node.
    pub(crate) fn holder(&self, lock: u32) -> Option<String> {
        match &self.servers {
            Servers::Redis(nodes) => nodes.server(0).query(&["GET", &lock_key(lock)]),
            Servers::Database(database) => database.holder(lock),
        }
    }

    pub(crate) fn down(&self, node: usize) -> Arc<AtomicBool> {
        self.down[node].clone()
    }

    pub(crate) fn is_down(&self, node: usize) -> bool {
        self.down[node].load(Ordering::SeqCst)
    }

    pub(crate) fn pause(&self, node: usize) {
        self.down[node].store(true, Ordering::SeqCst);
        match &self.servers {
            Servers::Redis(nodes) => nodes.stop(node),
            Servers::Database(database) => database.server.stop(),
        }
    }

    pub(crate) fn resume(&self, node: usize) {
        match &self.servers {
            Servers::Redis(nodes) => nodes.cont(node),
            Servers::Database(database) => database.server.cont(),
        }
        self.down[node].store(false, Ordering::SeqCst);
    }

    pub(crate) fn kill(&self, node: usize) {
        self.down[node].store(true, Ordering::SeqCst);
        match &self.servers {
            Servers::Redis(nodes) => nodes.kill(node),
            Servers::Database(database) => database.server.kill(),
        }
    }

    /// Undoes a limit of the memory.
    pub(crate) fn free_memory(&self, node: usize) {
        if let Servers::Redis(nodes) = &self.servers {
            nodes.config_set(node, "maxmemory", "0");
            nodes.config_set(node, "maxmemory-policy", "noeviction");
        }
    }

    pub(crate) fn start(&self, node: usize, with_data: bool) {
        match &self.servers {
            Servers::Redis(nodes) if with_data => nodes.restart(node),
            Servers::Redis(nodes) => nodes.restart_empty(node),
            Servers::Database(database) => database.server.restart(),
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
