//! The nemesis: chooses the next fault at random, records it, injects it, and later ends it. The
//! random choices come from the seed.

mod database;

use std::{sync::Arc, time::Duration};

use fastrand::Rng;

use crate::{
    Outcome,
    cluster::{Cluster, FENCE, ROUTES, Servers, lock_key, pid_of, queue_key, token_key},
    history::{Event, Fault, Journal, Kind, Record, now},
    nanos,
    network::{ROUTE_FAULTS, apply_route_fault, arm_exchange_fault, exchange_faults},
    support::{ArmedFault, Nodes, RedisServer},
    workers::Workers,
};

pub(crate) struct Nemesis<'a> {
    cluster: &'a Cluster,
    journal: Arc<Journal>,
    rng: Rng,
    ttl: Duration,
    locks: u32,
    number: u32,
    active: Vec<ActiveFault>,
    /// Time at which the last fault of each node ended.
    last_fault: Vec<u64>,
}

struct ActiveFault {
    number: u32,
    /// None for a fault that affects all nodes.
    node: Option<usize>,
    /// Set if the fault affects only one route to the node.
    route: Option<usize>,
    until: u64,
    undo: Undo,
}

enum Undo {
    Resume(usize),
    Start { node: usize, with_data: bool },
    FreeMemory(usize),
    Heal(Vec<(usize, usize)>),
    Disarm(ArmedFault),
}

impl<'a> Nemesis<'a> {
    pub(crate) fn new(
        cluster: &'a Cluster,
        journal: Arc<Journal>,
        rng: Rng,
        ttl: Duration,
        locks: u32,
    ) -> Nemesis<'a> {
        let last_fault = vec![0; cluster.len()];
        Nemesis { cluster, journal, rng, ttl, locks, number: 0, active: Vec::new(), last_fault }
    }

    /// Injects one random fault.
    pub(crate) fn inject(&mut self, workers: &mut Workers) -> Outcome {
        let victim = self.rng.usize(..workers.len());
        match self.rng.u32(..100) {
            0..12 => workers.kill(victim),
            12..22 => {
                let length = self.random_length(10, self.ttl.as_millis() as u64 / 2);
                workers.pause(victim, length).map(drop)
            }
            22..34 => {
                let length = self.ttl + self.random_length(50, 2500);
                workers.pause(victim, length).map(drop)
            }
            34..54 => self.inject_exchange_fault(),
            54..68 => self.inject_route_fault(),
            68..71 => self.blackout(),
            71..74 => self.inject_instant_fault(Kind::Reset),
            74..77 => self.inject_instant_fault(Kind::CutClients),
            77..80 if !self.has_database() => self.inject_instant_fault(Kind::FlushScripts),
            80..84 if self.has_several_nodes() => self.forget_one_by_one(workers),
            _ => match &self.cluster.servers {
                Servers::Redis(nodes) => self.inject_server_fault(nodes),
                Servers::Database(database) => self.inject_database_fault(database),
            },
        }
    }

    /// Finds a lock that was just renewed and has been held for at least two fifths of the ttl, and
    /// deletes its key on a random node. Returns false if there is no such lock.
    pub(crate) fn delete_held_key(&mut self) -> Outcome<bool> {
        let nodes = match &self.cluster.servers {
            Servers::Redis(nodes) => nodes,
            Servers::Database(database) => return self.kill_settled_holder(database),
        };
        let node = self.rng.usize(..self.cluster.len());
        for lock in 1..=self.locks {
            let keys = [lock_key(lock), token_key(lock)];
            let (ttl_left, age_us): (i64, i64) =
                nodes.server(node).query(&["EVAL", TTL_AND_AGE, "2", &keys[0], &keys[1]]);
            let ttl = self.ttl.as_millis() as i64;
            if ttl_left > ttl * 9 / 10 && age_us > ttl * 400 {
                self.delete_or_shorten(nodes, node, lock, None)?;
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The worker that holds a random lock, according to the first node.
    pub(crate) fn some_holder(&mut self, workers: &Workers) -> Option<usize> {
        let lock = self.rng.u32(1..=self.locks);
        workers.index_of(pid_of(&self.cluster.holder(lock)?)?)
    }

    fn random_length(&mut self, min_ms: u64, max_ms: u64) -> Duration {
        Duration::from_millis(self.rng.u64(min_ms..max_ms.max(min_ms + 1)))
    }

    fn has_database(&self) -> bool {
        matches!(self.cluster.servers, Servers::Database(_))
    }

    fn has_several_nodes(&self) -> bool {
        self.cluster.len() > 1
    }

    /// Whether a node may get a fault now. Of several nodes, at most a minority may have faults at
    /// once, and each only one. A single node may have route faults beside one fault of its server.
    fn may_inject(&self, node: usize) -> bool {
        let is_faulty = |node: &usize| self.active.iter().any(|fault| fault.node == Some(*node));
        if !self.has_several_nodes() {
            return !self
                .active
                .iter()
                .any(|fault| fault.node == Some(node) && fault.route.is_none());
        }
        let others =
            (0..self.cluster.len()).filter(|other| *other != node).filter(is_faulty).count();
        others < (self.cluster.len() - 1) / 2
            && !is_faulty(&node)
            && !self.active.iter().any(|fault| fault.node.is_none())
    }

    fn inject_server_fault(&mut self, nodes: &Nodes) -> Outcome {
        let node = self.rng.usize(..self.cluster.len());
        let kinds: &[Kind] = &[
            Kind::Freeze,
            Kind::Restart,
            Kind::Forget,
            Kind::Full,
            Kind::Evict,
            Kind::Delete,
            Kind::Delete,
            Kind::DeleteQueue,
            Kind::DeleteFence,
            Kind::Step,
            Kind::Step,
        ];
        let kind = kinds[self.rng.usize(..kinds.len())];
        if !self.may_inject(node) {
            return Ok(());
        }
        match kind {
            Kind::Freeze => {
                let length = self.random_length(20, 2500);
                let number = self.record_start(node, 0, kind, length.as_millis() as u64)?;
                self.cluster.pause(node);
                self.keep_until(number, Some(node), None, length, Undo::Resume(node));
            }
            Kind::Restart | Kind::Forget => {
                // With several nodes, one that is not durable loses its data at every restart. Any
                // other keeps its data unless `Forget` was chosen, as if its disk were lost.
                let forgets = self.has_several_nodes() && !self.cluster.is_durable(node);
                let kind = if forgets { Kind::Forget } else { kind };
                let length = self.random_length(0, 1500);
                let number = self.record_start(node, 0, kind, length.as_millis() as u64)?;
                self.cluster.kill(node);
                let with_data = kind == Kind::Restart;
                self.keep_until(number, Some(node), None, length, Undo::Start { node, with_data });
            }
            Kind::Full => {
                let length = self.random_length(100, 2000);
                let number = self.record_start(node, 0, kind, 0)?;
                nodes.config_set(node, "maxmemory", "1");
                self.keep_until(number, Some(node), None, length, Undo::FreeMemory(node));
            }
            // With several nodes the library does not protect a lock against an eviction.
            Kind::Evict if !self.has_several_nodes() => {
                let policies = ["allkeys-random", "volatile-ttl", "allkeys-lru"];
                let policy = policies[self.rng.usize(..policies.len())];
                let length = self.random_length(5, 100);
                let number = self.record_start(node, 0, kind, 0)?;
                nodes.config_set(node, "maxmemory-policy", policy);
                nodes.config_set(node, "maxmemory", "1");
                self.keep_until(number, Some(node), None, length, Undo::FreeMemory(node));
            }
            Kind::Delete => {
                let lock = self.rng.u32(1..=self.locks);
                self.delete_or_shorten(nodes, node, lock, None)?;
            }
            Kind::Step => {
                let (lock, by) = (self.rng.u32(1..=self.locks), self.rng.u64(50..3000));
                self.delete_or_shorten(nodes, node, lock, Some(by))?;
            }
            Kind::DeleteQueue | Kind::DeleteFence => {
                let lock = self.rng.u32(1..=self.locks);
                let keys = match kind {
                    Kind::DeleteQueue => vec![queue_key(lock)],
                    _ => vec![token_key(lock), FENCE.to_owned()],
                };
                let number = self.record_start(node, lock, kind, 0)?;
                keys.iter().for_each(|key| drop(nodes.server(node).cli(&["DEL", key])));
                self.record_end(number)?;
            }
            _ => {}
        }
        Ok(())
    }

    /// Makes all nodes lose their data, including durable ones, at most a minority at a time. First
    /// pauses a holder, which then cannot react while its lease is still valid. Only the quarantine
    /// of the nodes protects its lock.
    pub(crate) fn forget_one_by_one(&mut self, workers: &mut Workers) -> Outcome {
        if !self.has_several_nodes() || !self.active.is_empty() {
            return Ok(());
        }
        if let Some(holder) = self.some_holder(workers) {
            workers.pause(holder, self.ttl)?;
        }
        let mut nodes: Vec<usize> = (0..self.cluster.len()).collect();
        self.rng.shuffle(&mut nodes);
        for some in nodes.chunks((self.cluster.len() - 1) / 2) {
            let mut numbers = Vec::new();
            for node in some {
                numbers.push(self.record_start(*node, 0, Kind::Forget, 0)?);
                self.cluster.kill(*node);
            }
            for (node, number) in some.iter().zip(numbers) {
                self.cluster.start(*node, false);
                self.last_fault[*node] = now();
                self.record_end(number)?;
            }
        }
        Ok(())
    }

    /// Deletes the key of a lock, or shortens its lifetime by `step` milliseconds. With several
    /// nodes, does nothing unless a quorum of the others keeps the lock for the same holder and
    /// practically as long. It also does nothing during a fault and shortly after one, because a
    /// renewal must have reached all nodes.
    fn delete_or_shorten(
        &mut self,
        nodes: &Nodes,
        node: usize,
        lock: u32,
        step: Option<u64>,
    ) -> Outcome {
        let key = lock_key(lock);
        let kind = if step.is_some() { Kind::Step } else { Kind::Delete };
        let server = nodes.server(node);
        if !self.has_several_nodes() {
            // A jump of the clock affects all keys, so it is recorded without a lock.
            let (lock, amount) = (if step.is_some() { 0 } else { lock }, step.unwrap_or(0));
            let number = self.record_start(node, lock, kind, amount)?;
            match step {
                Some(by) => drop(server.cli(&["EVAL", SHORTEN_ALL, "0", &by.to_string()])),
                None => drop(server.cli(&["DEL", &key])),
            }
            return self.record_end(number);
        }
        let since = now().saturating_sub(nanos(self.ttl) + 1_500_000_000);
        if !self.active.is_empty() || self.last_fault.iter().any(|at| *at > since) {
            return Ok(());
        }
        let mut holders = Vec::new();
        for node in 0..self.cluster.len() {
            let server = nodes.server(node);
            let (id, left): (Option<String>, i64) =
                server.query(&["EVAL", HOLDER_AND_TTL, "1", &key]);
            holders.push((id, now() + u64::try_from(left).unwrap_or(0) * 1_000_000));
        }
        let Some(id) = holders[node].0.clone() else { return Ok(()) };
        let quorum = self.cluster.len() / 2 + 1;
        let expiries = |without: Option<usize>| {
            let same = holders
                .iter()
                .enumerate()
                .filter(|(at, (holder, _))| holder.as_ref() == Some(&id) && Some(*at) != without);
            let mut expiries: Vec<u64> = same.map(|(_, (_, expiry))| *expiry).collect();
            expiries.sort_unstable_by(|one, other| other.cmp(one));
            expiries.get(quorum - 1).copied()
        };
        let (Some(before), Some(after)) = (expiries(None), expiries(Some(node))) else {
            return Ok(());
        };
        if before > after + 5_000_000 {
            return Ok(());
        }
        let amount = step.unwrap_or(0);
        let number = self.record_start(node, lock, kind, amount)?;
        server.cli(&[
            "EVAL",
            SHORTEN_ONE,
            "1",
            &key,
            &id,
            &step.map_or_else(|| "all".into(), |by| by.to_string()),
        ]);
        self.last_fault[node] = now();
        self.record_end(number)
    }

    /// Arms a fault for one exchange or a few.
    fn inject_exchange_fault(&mut self) -> Outcome {
        let (node, route) = (self.rng.usize(..self.cluster.len()), self.rng.usize(..ROUTES));
        let kinds = exchange_faults(self.has_database());
        let kind = kinds[self.rng.usize(..kinds.len())];
        let length = self.random_length(50, 900);
        if !self.is_route_free(node, route) || (self.has_several_nodes() && !self.may_inject(node))
        {
            return Ok(());
        }
        let number = self.record_start(node, 0, kind, 0)?;
        let armed = arm_exchange_fault(self.cluster.proxy(node, route), kind, &mut self.rng);
        self.keep_until(number, Some(node), Some(route), length, Undo::Disarm(armed));
        Ok(())
    }

    /// Makes a route to a node fail for a while.
    fn inject_route_fault(&mut self) -> Outcome {
        let (node, route) = (self.rng.usize(..self.cluster.len()), self.rng.usize(..ROUTES));
        let kind = ROUTE_FAULTS[self.rng.usize(..ROUTE_FAULTS.len())];
        let length = self.random_length(50, 2500);
        if !self.is_route_free(node, route) || (self.has_several_nodes() && !self.may_inject(node))
        {
            return Ok(());
        }
        let number = self.record_start(node, 0, kind, length.as_millis() as u64)?;
        apply_route_fault(self.cluster.proxy(node, route), kind, &mut self.rng);
        self.keep_until(number, Some(node), Some(route), length, Undo::Heal(vec![(node, route)]));
        Ok(())
    }

    fn is_route_free(&self, node: usize, route: usize) -> bool {
        !self.active.iter().any(|fault| {
            fault.node.is_none() || (fault.node == Some(node) && fault.route == Some(route))
        })
    }

    /// Makes one route to every node fail, which affects half of the workers. More than a minority
    /// of the nodes may have such a fault, because it makes no node forget a lock.
    fn blackout(&mut self) -> Outcome {
        if self.active.iter().any(|fault| fault.node.is_none() || fault.route.is_some()) {
            return Ok(());
        }
        let (route, kind) =
            (self.rng.usize(..ROUTES), ROUTE_FAULTS[self.rng.usize(..ROUTE_FAULTS.len())]);
        let length = self.random_length(50, 3000);
        let number = self.record_fault(0, 0, kind, length.as_millis() as u64)?;
        let routes: Vec<_> = (0..self.cluster.len()).map(|node| (node, route)).collect();
        for (node, route) in &routes {
            apply_route_fault(self.cluster.proxy(*node, *route), kind, &mut self.rng);
        }
        self.keep_until(number, None, Some(route), length, Undo::Heal(routes));
        Ok(())
    }

    /// Injects a fault that ends at once and has no lasting effect.
    fn inject_instant_fault(&mut self, kind: Kind) -> Outcome {
        let node = self.rng.usize(..self.cluster.len());
        if self.cluster.is_down(node) {
            return Ok(());
        }
        let number = self.record_start(node, 0, kind, 0)?;
        match (kind, &self.cluster.servers) {
            (Kind::CutClients, Servers::Redis(nodes)) => self.cut_clients(nodes.server(node)),
            (Kind::CutClients, Servers::Database(database)) => database.kill_connections()?,
            (Kind::FlushScripts, Servers::Redis(nodes)) => {
                nodes.server(node).cli(&["SCRIPT", "FLUSH"]);
            }
            _ => self.cluster.proxy(node, self.rng.usize(..ROUTES)).reset_all(),
        }
        self.record_end(number)
    }

    fn cut_clients(&mut self, server: &RedisServer) {
        let types: [&[&str]; 3] = [&["TYPE", "normal"], &["TYPE", "pubsub"], &[]];
        let which = types[self.rng.usize(..types.len())];
        // The filter must not be empty; this one matches all clients.
        let which = if which.is_empty() { &["LADDR", &server.addr().to_string()] } else { which };
        server.kill_clients(which);
    }

    /// Ends the faults that have lasted long enough, or all of them.
    pub(crate) fn end_faults(&mut self, all: bool) -> Outcome {
        let mut index = 0;
        while index < self.active.len() {
            if !all && self.active[index].until > now() {
                index += 1;
                continue;
            }
            let fault = self.active.swap_remove(index);
            match fault.undo {
                Undo::Resume(node) => self.cluster.resume(node),
                Undo::Start { node, with_data } => self.cluster.start(node, with_data),
                Undo::FreeMemory(node) => self.cluster.free_memory(node),
                Undo::Heal(routes) => {
                    routes
                        .iter()
                        .for_each(|(node, route)| self.cluster.proxy(*node, *route).heal());
                }
                Undo::Disarm(armed) => {
                    armed.disarm();
                    armed.release();
                }
            }
            match fault.node {
                Some(node) => self.last_fault[node] = now(),
                None => self.last_fault.fill(now()),
            }
            self.record_end(fault.number)?;
        }
        Ok(())
    }

    /// Records a fault that is about to be injected.
    fn record_start(&mut self, node: usize, lock: u32, kind: Kind, amount: u64) -> Outcome<u32> {
        self.record_fault(node + 1, lock, kind, amount)
    }

    fn record_fault(&mut self, node: usize, lock: u32, kind: Kind, amount: u64) -> Outcome<u32> {
        self.number += 1;
        let fault = Fault { number: self.number, node, kind, amount };
        self.record(lock, Event::Fault(fault))?;
        Ok(self.number)
    }

    fn keep_until(
        &mut self,
        number: u32,
        node: Option<usize>,
        route: Option<usize>,
        length: Duration,
        undo: Undo,
    ) {
        self.active.push(ActiveFault { number, node, route, until: now() + nanos(length), undo });
    }

    fn record_end(&self, number: u32) -> Outcome {
        self.record(0, Event::Over { number })
    }

    fn record(&self, lock: u32, event: Event) -> Outcome {
        Ok(self.journal.write(&Record {
            at: now(),
            seat: 0,
            lock,
            pid: std::process::id(),
            event,
        })?)
    }
}

/// Returns the holder of a lock and its remaining lifetime.
const HOLDER_AND_TTL: &str = "return {redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1])}";

/// Returns the remaining lifetime of a lock in milliseconds, and its age in microseconds. A token
/// is the time of the grant.
const TTL_AND_AGE: &str = "
local now = redis.call('TIME')
local token = tonumber(redis.call('GET', KEYS[2]) or 0)
return {redis.call('PTTL', KEYS[1]), now[1] * 1000000 + now[2] - token}";

/// Makes all keys expire earlier, as a clock that jumps forward does.
const SHORTEN_ALL: &str = "
for _, key in ipairs(redis.call('KEYS', '*')) do
  local left = redis.call('PTTL', key)
  if left > 0 then redis.call('PEXPIRE', key, left - ARGV[1]) end
end";

/// Makes the key of one lock expire earlier if its holder still has this id; `all` deletes the key.
const SHORTEN_ONE: &str = "
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return end
if ARGV[2] == 'all' then return redis.call('DEL', KEYS[1]) end
redis.call('PEXPIRE', KEYS[1], redis.call('PTTL', KEYS[1]) - ARGV[2])";
