//! Several servers for one test: the nodes of one lock service.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use super::fault_proxy::FaultProxy;
use super::faults::{command, rewrite};
use super::redis_server::{RedisServer, RedisServerBuilder};

/// Independent servers in a fixed order. Dropping this ends them.
pub struct Nodes {
    members: Vec<Member>,
}

struct Member {
    server: RedisServer,
    proxy: Option<FaultProxy>,
    /// False while the node is stopped or killed, when a query would block or fail.
    runs: AtomicBool,
}

impl Nodes {
    /// Starts `count` nodes. They are in the order in which clients prefer them, until one is
    /// restarted.
    pub fn start(count: usize) -> Self {
        let mut nodes = Self::built(count, |_, builder| builder);
        nodes.members.sort_by_key(|member| member.server.run_id());
        nodes
    }

    /// Makes these nodes report run ids that keep them in their order, even if they are restarted.
    /// Puts a proxy in front of each.
    pub fn in_fixed_order(self) -> Self {
        let nodes: Vec<usize> = (0..self.len()).collect();
        let fixed = self.behind_proxies(&nodes);
        for node in nodes {
            let add_number =
                move |info: &str| info.replace("run_id:", &format!("run_id:{node:02}"));
            fixed.proxy(node).on_request(command("INFO"), rewrite(add_number)).forever();
        }
        fixed
    }

    /// Starts `count` nodes. `build` gets the number of each node and sets up its server.
    pub fn built(
        count: usize,
        build: impl Fn(usize, RedisServerBuilder) -> RedisServerBuilder + Sync,
    ) -> Self {
        let build = &build;
        let members = thread::scope(|threads| {
            let start = |node| threads.spawn(move || build(node, RedisServer::builder()).start());
            let starting: Vec<_> = (0..count).map(start).collect();
            let started =
                starting.into_iter().map(|thread| thread.join().expect("a server did not start"));
            started
                .map(|server| Member { server, proxy: None, runs: AtomicBool::new(true) })
                .collect()
        });
        Self { members }
    }

    /// Makes these nodes report that they have been up for days, until they are restarted. Puts a
    /// proxy in front of each.
    pub fn long_running(self) -> Self {
        let nodes: Vec<usize> = (0..self.len()).collect();
        let long_running = self.behind_proxies(&nodes);
        for node in nodes {
            let first_run = long_running.server(node).run_id();
            let add_days = move |info: &str| match info.contains(&first_run) {
                true => info.replace("uptime_in_seconds:", "uptime_in_seconds:86400"),
                false => info.to_owned(),
            };
            long_running.proxy(node).on_request(command("INFO"), rewrite(add_days)).forever();
        }
        long_running
    }

    /// Puts a proxy in front of each of these nodes that has none. Their URLs then name the proxy
    /// and contain no password.
    pub fn behind_proxies(mut self, nodes: &[usize]) -> Self {
        for node in nodes {
            let member = &mut self.members[*node];
            member.proxy.get_or_insert_with(|| FaultProxy::in_front_of(member.server.addr()));
        }
        self
    }

    pub fn len(&self) -> usize {
        self.members.len()
    }

    pub fn server(&self, node: usize) -> &RedisServer {
        &self.members[node].server
    }

    pub fn proxy(&self, node: usize) -> &FaultProxy {
        self.members[node].proxy.as_ref().expect("this node has no proxy")
    }

    pub fn url(&self, node: usize) -> String {
        let member = &self.members[node];
        member.proxy.as_ref().map_or_else(|| member.server.url(), FaultProxy::url)
    }

    /// All URLs, separated by commas.
    pub fn urls(&self) -> String {
        (0..self.len()).map(|node| self.url(node)).collect::<Vec<_>>().join(",")
    }

    /// Freezes a node: its connections stay open, and it answers nothing.
    pub fn stop(&self, node: usize) {
        self.runs(node, false);
        self.server(node).stop();
    }

    pub fn cont(&self, node: usize) {
        self.server(node).cont();
        self.runs(node, true);
    }

    pub fn kill(&self, node: usize) {
        self.runs(node, false);
        self.server(node).kill();
    }

    /// Kills a node and starts it again with the data that it had on disk.
    pub fn restart(&self, node: usize) {
        self.server(node).restart();
        self.runs(node, true);
    }

    /// Kills a node and starts it again without any data.
    pub fn restart_empty(&self, node: usize) {
        self.server(node).restart_empty();
        self.runs(node, true);
    }

    pub fn config_set(&self, node: usize, name: &str, value: &str) {
        self.server(node).config_set(name, value);
    }

    /// The nodes that are neither stopped nor killed.
    pub fn running(&self) -> Vec<usize> {
        (0..self.len()).filter(|node| self.members[*node].runs.load(Ordering::SeqCst)).collect()
    }

    /// The value of `key` on each node; `None` for nodes that are not running.
    pub fn values(&self, key: &str) -> Vec<Option<String>> {
        let running = self.running();
        let value =
            |node| running.contains(&node).then(|| self.server(node).query(&["GET", key]))?;
        (0..self.len()).map(value).collect()
    }

    /// The running nodes on which `key` has the value `value`.
    pub fn keeping(&self, key: &str, value: &str) -> Vec<usize> {
        let values = self.values(key);
        (0..self.len()).filter(|node| values[*node].as_deref() == Some(value)).collect()
    }

    fn runs(&self, node: usize, runs: bool) {
        self.members[node].runs.store(runs, Ordering::SeqCst);
    }
}
