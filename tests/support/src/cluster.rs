//! A Redis Cluster: masters that share the slots, and replicas of them.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::redis_server::RedisServer;
use super::{TEST_TIMEOUT, eventually, eventually_some};

/// Number of slots of every cluster.
const SLOTS: u32 = 16_384;
/// Time without a reply after which the nodes consider another one down.
const NODE_TIMEOUT_MS: &str = "1000";
/// Time after which the nodes give up a manual failover.
const FAILOVER_LIMIT: Duration = Duration::from_secs(6);
/// Maximum number of keys that one `MIGRATE` moves.
const KEYS_MAX: usize = 1_000;

/// The nodes of a cluster. They end when this is dropped.
pub struct Cluster {
    /// The masters first, each with an equal share of the slots; then a replica of each, if there
    /// are replicas.
    pub nodes: Vec<RedisServer>,
    masters: usize,
}

impl Cluster {
    /// Starts masters without replicas.
    pub fn start(masters: usize) -> Cluster {
        Cluster::start_with(masters, false, &|server| server)
    }

    /// Starts masters with a replica each.
    pub fn with_replicas(masters: usize) -> Cluster {
        Cluster::start_with(masters, true, &|server| server)
    }

    pub fn start_with(
        masters: usize,
        has_replicas: bool,
        settings: &dyn Fn(super::RedisServerBuilder) -> super::RedisServerBuilder,
    ) -> Cluster {
        let count = if has_replicas { 2 * masters } else { masters };
        let start = |_| settings(RedisServer::builder().cluster(NODE_TIMEOUT_MS)).start();
        let cluster = Cluster { nodes: (0..count).map(start).collect(), masters };
        for (index, master) in cluster.nodes[..masters].iter().enumerate() {
            // Each has an epoch of its own from the start on. Otherwise they would have to agree
            // on them first.
            master.cli(&["CLUSTER", "SET-CONFIG-EPOCH", &(index + 1).to_string()]);
            let first = SLOTS * index as u32 / masters as u32;
            let end = SLOTS * (index as u32 + 1) / masters as u32;
            let slots: Vec<_> = (first..end).map(|slot| slot.to_string()).collect();
            let mut words = vec!["CLUSTER", "ADDSLOTS"];
            words.extend(slots.iter().map(String::as_str));
            master.cli(&words);
        }
        for node in &cluster.nodes[1..] {
            let words = node.meet();
            cluster.nodes[0].cli(&words.iter().map(String::as_str).collect::<Vec<_>>());
        }
        cluster.await_all("they know each other", |info| {
            info["cluster_known_nodes"] == count.to_string()
        });
        for (master, replica) in cluster.nodes.iter().zip(cluster.nodes.iter().skip(masters)) {
            if !has_replicas {
                break;
            }
            let id = master.node_id();
            eventually("the replica knows its master", TEST_TIMEOUT, || {
                replica.try_query::<()>(&["CLUSTER", "REPLICATE", &id]).is_ok()
            });
            cluster.await_in_sync(replica);
        }
        cluster.await_ok();
        for slot in (0..SLOTS).step_by(SLOTS as usize / masters / 2) {
            for node in &cluster.nodes {
                eventually("all know who serves the slot", TEST_TIMEOUT, || {
                    cluster.owner_according_to(node, slot as u16).is_some()
                });
            }
        }
        cluster
    }

    pub fn url(&self) -> String {
        let hosts: Vec<_> = self.nodes.iter().map(|node| node.addr().to_string()).collect();
        format!("redis+cluster://{}", hosts.join(","))
    }

    pub fn slot(&self, key: &str) -> u16 {
        self.nodes[0].query(&["CLUSTER", "KEYSLOT", key])
    }

    /// Waits until all running nodes see a working cluster.
    pub fn await_ok(&self) {
        self.await_all("the cluster works", |info| info["cluster_state"] == "ok");
    }

    fn await_all(&self, what: &str, check: impl Fn(&HashMap<String, String>) -> bool) {
        for node in self.nodes.iter().filter(|node| node.is_running()) {
            eventually(what, TEST_TIMEOUT, || node.cluster_info().is_some_and(|info| check(&info)));
        }
    }

    /// The node that serves the slot, as most masters say.
    pub fn owner(&self, slot: u16) -> &RedisServer {
        let owner = eventually_some("a node serves the slot", TEST_TIMEOUT, || {
            let mut votes: HashMap<u16, usize> = HashMap::new();
            for node in self.nodes.iter().filter(|node| node.is_running()) {
                if let Some(port) = self.owner_according_to(node, slot) {
                    *votes.entry(port).or_default() += 1;
                }
            }
            votes.into_iter().max_by_key(|(_, votes)| *votes).map(|(port, _)| port)
        });
        self.nodes.iter().find(|node| node.port() == owner).expect("it is one of the nodes")
    }

    /// Another master than the owner of the slot.
    pub fn other_master(&self, slot: u16) -> &RedisServer {
        let owner = self.owner(slot).port();
        let is_master = |node: &&RedisServer| {
            node.is_running() && node.port() != owner && node.role() == "master"
        };
        self.nodes[..].iter().find(is_master).expect("there are several masters")
    }

    fn owner_according_to(&self, node: &RedisServer, slot: u16) -> Option<u16> {
        let ranges = Self::owners_according_to(node)?;
        let served = |(first, last, _): &(u16, u16, u16)| (*first..=*last).contains(&slot);
        ranges.into_iter().find(served).map(|(_, _, port)| port)
    }

    /// First and last slot, and port of the master, of each range, as a node says.
    fn owners_according_to(node: &RedisServer) -> Option<Vec<(u16, u16, u16)>> {
        type Node = (String, u16, String);
        let ranges: Vec<redis::Value> = node.try_query(&["CLUSTER", "SLOTS"]).ok()?;
        let read = |range| {
            let redis::Value::Array(parts) = range else { return None };
            let number = |at: usize| redis::from_redis_value::<u16>(parts[at].clone()).ok();
            let redis::Value::Array(master) = parts[2].clone() else { return None };
            let master = redis::Value::Array(master[..3].to_vec());
            let (_, port, _) = redis::from_redis_value::<Node>(master).ok()?;
            Some((number(0)?, number(1)?, port))
        };
        let mut ranges = ranges.into_iter().map(read).collect::<Option<Vec<_>>>()?;
        ranges.sort_unstable();
        Some(ranges)
    }

    /// Begins to move a slot to another master. Keys are moved by [`Cluster::move_keys`].
    pub fn begin_move(&self, slot: u16) -> (&RedisServer, &RedisServer) {
        let (from, to) = (self.owner(slot), self.other_master(slot));
        self.begin_move_between(slot, from, to);
        (from, to)
    }

    pub fn begin_move_between(&self, slot: u16, from: &RedisServer, to: &RedisServer) {
        let slot = slot.to_string();
        to.cli(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &from.node_id()]);
        from.cli(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to.node_id()]);
    }

    /// Moves these keys, or all of the slot.
    pub fn move_keys(&self, slot: u16, from: &RedisServer, to: &RedisServer, keys: &[&str]) {
        let port = to.port().to_string();
        loop {
            let found: Vec<String> = match keys {
                [] => from.query(&[
                    "CLUSTER",
                    "GETKEYSINSLOT",
                    &slot.to_string(),
                    &KEYS_MAX.to_string(),
                ]),
                keys => keys.iter().map(|key| (*key).to_owned()).collect(),
            };
            if found.is_empty() {
                return;
            }
            // A node that took over from one that was killed may still have keys of a slot that had
            // been moved away. Those of the slot's owner count.
            let mut words =
                vec!["MIGRATE", "127.0.0.1", &port, "", "0", "20000", "REPLACE", "KEYS"];
            words.extend(found.iter().map(String::as_str));
            // On a busy machine, a node may not hear from the others in time, and then refuses it.
            let is_down = |error: &redis::RedisError| {
                error.code() == Some("CLUSTERDOWN") || error.to_string().contains("CLUSTERDOWN")
            };
            eventually_some("the nodes accept the keys", TEST_TIMEOUT, || {
                match from.try_query::<redis::Value>(&words) {
                    Err(error) if is_down(&error) => None,
                    reply => Some(reply.unwrap_or_else(|error| panic!("{words:?}: {error}"))),
                }
            });
            if !keys.is_empty() {
                return;
            }
        }
    }

    /// Ends the move: the new node serves the slot.
    pub fn end_move(&self, slot: u16, from: &RedisServer, to: &RedisServer) {
        let (slot, id) = (slot.to_string(), to.node_id());
        // The new owner must know it first, and the others before it could forget it.
        to.cli(&["CLUSTER", "SETSLOT", &slot, "NODE", &id]);
        from.cli(&["CLUSTER", "SETSLOT", &slot, "NODE", &id]);
        for node in self.nodes.iter().filter(|node| node.is_running() && node.role() == "master") {
            let _ = node.try_query::<()>(&["CLUSTER", "SETSLOT", &slot, "NODE", &id]);
        }
        self.await_agreement();
    }

    /// Waits until all running nodes name the same owners of all slots, replicas included: one
    /// that has missed a move would take over too few slots, and nobody would serve the others.
    fn await_agreement(&self) {
        let views = || -> Vec<_> {
            let running = self.nodes.iter().filter(|node| node.is_running());
            running.map(Self::owners_according_to).collect()
        };
        let agree = || {
            let views = views();
            let covered = |view: &[(u16, u16, u16)]| {
                let slots = view.iter().map(|(first, last, _)| u32::from(last - first) + 1);
                slots.sum::<u32>() == SLOTS
            };
            let first = views[0].as_deref().filter(|first| covered(first));
            first.is_some() && views.iter().all(|view| view.as_deref() == first)
        };
        let deadline = Instant::now() + TEST_TIMEOUT;
        while !agree() {
            assert!(Instant::now() < deadline, "the nodes disagree: {:?}", views());
            std::thread::sleep(super::POLL);
        }
    }

    /// Moves a slot with its keys to another master.
    pub fn move_slot(&self, slot: u16) {
        let (from, to) = self.begin_move(slot);
        self.move_keys(slot, from, to, &[]);
        self.end_move(slot, from, to);
    }

    /// The replica of a master.
    pub fn replica_of(&self, master: &RedisServer) -> &RedisServer {
        let id = master.node_id();
        let follows = |node: &&RedisServer| {
            let nodes: String = node.query(&["CLUSTER", "NODES"]);
            nodes.lines().any(|line| line.contains("myself,slave") && line.contains(&id))
        };
        let running = || self.nodes.iter().filter(|node| node.is_running());
        eventually_some("it has a replica", TEST_TIMEOUT, || running().find(follows))
    }

    /// Waits until a master has a replica that is in sync, and returns that.
    pub fn await_replica(&self, master: &RedisServer) -> &RedisServer {
        let replica = self.replica_of(master);
        self.await_in_sync(replica);
        replica
    }

    /// Waits until a node is a replica in sync with its master.
    pub fn await_in_sync(&self, replica: &RedisServer) {
        eventually("the replica is in sync", TEST_TIMEOUT, || {
            let info = replica.try_query::<String>(&["INFO", "replication"]);
            info.is_ok_and(|info| info.contains("master_link_status:up"))
        });
    }

    /// Makes the replica of a master take over its slots, and the master its replica.
    pub fn fail_over(&self, master: &RedisServer) {
        let replica = self.await_replica(master);
        let mut requested: Option<Instant> = None;
        eventually("the replica takes over", TEST_TIMEOUT, || {
            // On a busy machine, the nodes may give up.
            if requested.is_none_or(|at| at.elapsed() > FAILOVER_LIMIT) {
                let _ = replica.try_query::<()>(&["CLUSTER", "FAILOVER"]);
                requested = Some(Instant::now());
            }
            replica.role() == "master"
        });
        self.await_agreement();
        self.await_ok();
    }

    /// Waits until another node than this one serves the slot.
    pub fn await_other_owner(&self, slot: u16, former: &RedisServer) -> &RedisServer {
        let other = || {
            let running = self.nodes.iter();
            let mut running =
                running.filter(|node| node.is_running() && node.port() != former.port());
            running.all(|node| {
                self.owner_according_to(node, slot).is_some_and(|port| port != former.port())
            })
        };
        eventually("another node serves the slot", TEST_TIMEOUT, other);
        self.nodes
            .iter()
            .filter(|node| node.is_running() && node.port() != former.port())
            .find(|node| self.owner_according_to(node, slot) == Some(node.port()))
            .expect("a running node serves it")
    }

    /// Number of masters at the start.
    pub fn masters(&self) -> usize {
        self.masters
    }
}

impl RedisServer {
    pub fn node_id(&self) -> String {
        self.query(&["CLUSTER", "MYID"])
    }

    /// `master` or `slave`.
    pub fn role(&self) -> String {
        let role: Vec<redis::Value> = self.query(&["ROLE"]);
        redis::from_redis_value(role[0].clone()).expect("a name")
    }

    fn cluster_info(&self) -> Option<HashMap<String, String>> {
        let info: String = self.try_query(&["CLUSTER", "INFO"]).ok()?;
        let pairs = info.lines().filter_map(|line| line.split_once(':'));
        Some(pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect())
    }
}
