//! The servers of a storm, and two ways to each: half of the workers take one, half the other.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use crate::{
    support::{FaultProxy, Nodes},
    worker::name_of,
};

pub(crate) const SIDES: usize = 2;

pub(crate) struct Stage {
    pub(crate) nodes: Nodes,
    /// By node and side.
    proxies: Vec<Vec<FaultProxy>>,
    /// Whether asking the node would block, or say nothing.
    away: Vec<Arc<AtomicBool>>,
}

impl Stage {
    pub(crate) fn build(count: usize) -> Stage {
        let nodes = Nodes::built(count, |node, server| if is_durable(node, count) { server.durable() } else { server });
        let sides = |node| (0..SIDES).map(|_| FaultProxy::in_front_of(nodes.server(node).addr())).collect();
        let proxies = (0..count).map(sides).collect();
        Stage { nodes, proxies, away: (0..count).map(|_| Arc::default()).collect() }
    }

    pub(crate) fn is_durable(&self, node: usize) -> bool {
        is_durable(node, self.len())
    }

    pub(crate) fn len(&self) -> usize {
        self.proxies.len()
    }

    pub(crate) fn proxy(&self, node: usize, side: usize) -> &FaultProxy {
        &self.proxies[node][side]
    }

    pub(crate) fn urls(&self, side: usize) -> String {
        self.proxies.iter().map(|sides| sides[side].url()).collect::<Vec<_>>().join(",")
    }

    pub(crate) fn away(&self, node: usize) -> Arc<AtomicBool> {
        self.away[node].clone()
    }

    pub(crate) fn is_away(&self, node: usize) -> bool {
        self.away[node].load(Ordering::SeqCst)
    }

    pub(crate) fn stop(&self, node: usize) {
        self.away[node].store(true, Ordering::SeqCst);
        self.nodes.stop(node);
    }

    pub(crate) fn cont(&self, node: usize) {
        self.nodes.cont(node);
        self.away[node].store(false, Ordering::SeqCst);
    }

    pub(crate) fn kill(&self, node: usize) {
        self.away[node].store(true, Ordering::SeqCst);
        self.nodes.kill(node);
    }

    pub(crate) fn start(&self, node: usize, with_data: bool) {
        if with_data {
            self.nodes.restart(node)
        } else {
            self.nodes.restart_empty(node)
        }
        self.away[node].store(false, Ordering::SeqCst);
    }
}

/// Whether a node writes everything to disk before it answers. One alone does. Of several a quorum does not, the one with the
/// line among them, so that nothing but their quarantine keeps a lock that they all forget.
fn is_durable(node: usize, of: usize) -> bool {
    of == 1 || node > of / 2
}

/// The keys of a lock: itself, its line, and its last token.
pub(crate) fn key_of(lock: u32) -> String {
    format!("lock:{}", name_of(lock))
}

pub(crate) fn line_of(lock: u32) -> String {
    format!("distlock:queue:{{lock:{}}}", name_of(lock))
}

pub(crate) fn fence_of(lock: u32) -> String {
    format!("distlock:fence:{{lock:{}}}", name_of(lock))
}

/// The process in an identifier, or in a place in line, which has it as `|pid77|`.
pub(crate) fn pid_of(id: &str) -> Option<u32> {
    id.split('|').find_map(|part| part.strip_prefix("pid")?.parse().ok())
}
