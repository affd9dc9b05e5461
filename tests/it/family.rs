//! Locks that several clients hold together: read-write locks and semaphores.

mod contention;
mod members;
mod permissions;
mod queue;
mod rw_lock;
mod semaphore;

use std::{
    thread::{self, JoinHandle},
    time::Duration,
};

use distlock::{Config, RedisMgr, testing::MemoryServer};

use crate::{
    helpers::{SECOND, config_long_timeouts},
    support::{Nodes, RedisServer, TEST_TIMEOUT, eventually},
};

/// Where locks are kept.
pub(crate) enum Subject {
    Redis(Box<RedisServer>),
    /// Several servers that decide together.
    Nodes(Nodes),
    Memory(MemoryServer),
}

impl Subject {
    pub(crate) fn all() -> Vec<Subject> {
        vec![
            Subject::Redis(Box::new(RedisServer::start())),
            Subject::Memory(MemoryServer::with_real_time()),
        ]
    }

    /// The same, and three nodes, also with the first one dead, where waiters would queue.
    pub(crate) fn with_nodes() -> Vec<Subject> {
        let with_dead_node = Nodes::start(3);
        with_dead_node.kill(0);
        let nodes = [Nodes::start(3), with_dead_node].map(Subject::Nodes);
        Subject::all().into_iter().chain(nodes).collect()
    }

    /// A manager with connections and threads of its own, as another process would have it.
    pub(crate) fn manager(&self) -> RedisMgr {
        self.manager_with(|config| config)
    }

    pub(crate) fn manager_with(&self, configure: impl FnOnce(Config) -> Config) -> RedisMgr {
        match self {
            Subject::Redis(server) => {
                RedisMgr::new(configure(config_long_timeouts(server.url()))).unwrap()
            }
            Subject::Nodes(nodes) => {
                let config = config_long_timeouts(nodes.urls()).quarantine(Duration::ZERO);
                RedisMgr::new(configure(config)).unwrap()
            }
            Subject::Memory(server) => server.manager_with(|config| {
                configure(config.ttl(30 * SECOND).claim_window(20 * SECOND))
            }),
        }
    }
}

/// Runs `call` on another thread, and returns once `waiters` threads are in the queue.
#[track_caller]
pub(crate) fn spawn_waiter<T: Send + 'static>(
    mgr: &RedisMgr,
    name: &str,
    waiters: u64,
    call: impl FnOnce() -> T + Send + 'static,
) -> JoinHandle<T> {
    let thread = thread::spawn(call);
    await_waiters(mgr, name, waiters);
    thread
}

#[track_caller]
pub(crate) fn await_waiters(mgr: &RedisMgr, name: &str, waiters: u64) {
    eventually("the waiters are queued", TEST_TIMEOUT, || {
        mgr.lock_info(name).unwrap().map_or(0, |lock| lock.waiting()) == waiters
    });
}

/// A time limit that only a defect exceeds.
pub(crate) const LONG: Duration = TEST_TIMEOUT;

fn members_key(name: &str) -> String {
    format!("distlock:members:{{lock:{name}}}")
}
