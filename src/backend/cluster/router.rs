//! `Router`: the nodes of a cluster, and which of them to ask about a slot.

use std::{
    cmp::Reverse,
    fmt, io, mem,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use super::{
    cluster_node::Part,
    map::{NODES_MAX, SlotMap},
    map_request::ask_for_map,
    redirect_reply::{Redirect, SEE_DOCTOR, passing},
    refresh::Refresh,
    subscriptions::Subscriptions,
};
use crate::{
    backend::{
        discovery::ServerName,
        error::NodeError,
        redis::{
            Connection, ConnectionPool, Endpoint, Exchange, RedisNode, RedisSettings, Replicas,
            Request, exchange, requests::InCluster,
        },
    },
    observe::Observer,
    sys::{
        clock::{self, Moment},
        sync::Mutex,
        threads,
    },
};

/// Redirects of one request that are followed at once. Further ones come after a pause, because
/// nodes that disagree would send the request back and forth.
const REDIRECTS_MAX: u32 = 4;
/// Pause while keys of a request are being moved, and the longest one. A slot with many keys takes
/// seconds.
const MOVE_PAUSE_MIN: Duration = Duration::from_millis(5);
const MOVE_PAUSE_MAX: Duration = Duration::from_millis(20);
/// The same while a node is unreachable.
const UNAVAILABLE_PAUSE_MIN: Duration = Duration::from_millis(20);
const UNAVAILABLE_PAUSE_MAX: Duration = Duration::from_millis(200);

pub(super) struct Router {
    endpoint: Arc<Endpoint>,
    settings: RedisSettings,
    pub(super) operation_timeout: Duration,
    observer: Arc<Observer>,
    /// The nodes of the URL. Kept, so that each outage of one is reported once.
    seeds: Vec<(ServerName, Arc<RedisNode>)>,
    state: Mutex<State>,
    refresh: Arc<Refresh>,
    /// Whether the nodes have sharded channels.
    is_sharded: AtomicBool,
    /// Planned again whenever the map changes.
    pub(super) subscriptions: Subscriptions,
}

#[derive(Debug)]
struct State {
    map: SlotMap,
    parts: Vec<Arc<Part>>,
    last_number: u64,
    /// A node that should serve a slot did not.
    is_stale: bool,
    is_known: bool,
    /// When a node reported it last.
    read_at: Moment,
    is_closed: bool,
}

/// How to go on if a node does not serve a request.
#[derive(Clone, Copy)]
pub(super) struct Patience {
    pub(super) deadline: Moment,
    /// Whether to ask again until the deadline if the node is unreachable. The caller does
    /// otherwise.
    pub(super) waits_for_nodes: bool,
}

impl Router {
    pub(super) fn new(
        endpoint: Arc<Endpoint>,
        settings: RedisSettings,
        observer: Arc<Observer>,
    ) -> Router {
        let state = State {
            map: SlotMap::unserved(),
            parts: Vec::new(),
            last_number: 0,
            is_stale: true,
            is_known: false,
            read_at: Moment::from_nanos(0),
            is_closed: false,
        };
        let mut router = Router {
            endpoint: endpoint.clone(),
            settings,
            operation_timeout: settings.operation_timeout,
            observer,
            seeds: Vec::new(),
            state: Mutex::new(state),
            refresh: Refresh::new(),
            is_sharded: AtomicBool::new(false),
            subscriptions: Subscriptions::default(),
        };
        let seeds = endpoint.cluster.iter();
        router.seeds = seeds.map(|name| (name.clone(), router.node(name))).collect();
        router
    }

    pub(super) fn label(&self) -> &Arc<str> {
        &self.endpoint.label
    }

    pub(super) fn replicas(&self) -> Replicas {
        self.settings.replicas
    }

    pub(super) fn is_sharded(&self) -> bool {
        self.is_sharded.load(Ordering::Acquire)
    }

    /// Asks the node of a slot, and follows redirects. An unknown outcome is returned at once,
    /// because only the caller knows whether it may ask again.
    pub(super) fn follow<T>(
        &self,
        slot: u16,
        patience: Patience,
        mut ask: impl FnMut(&Arc<Part>, bool) -> Result<T, NodeError>,
    ) -> Result<(Arc<Part>, T), NodeError> {
        let Patience { deadline, waits_for_nodes } = patience;
        let mut redirects = 0;
        let (mut move_pause, mut away_pause) = (MOVE_PAUSE_MIN, UNAVAILABLE_PAUSE_MIN);
        let mut asking_at = None;
        let mut away: Option<(u64, NodeError)> = None;
        loop {
            // Only for the request that was sent there.
            let is_asking = asking_at.is_some();
            let part = match asking_at.take() {
                Some(name) => self.part(&name)?,
                None => self.owner(slot, deadline)?,
            };
            if let Some((number, failure)) = away.take()
                && number == part.number
                && !waits_for_nodes
            {
                return Err(passing(failure));
            }
            let failure = match ask(&part, is_asking) {
                Ok(reply) => {
                    self.on_reply();
                    return Ok((part, reply));
                }
                Err(failure) => failure,
            };
            let redirect = self.note(&failure, &part);
            if failure.outcome_unknown {
                return Err(failure);
            }
            let pause = match redirect {
                Redirect::None => return Err(failure),
                Redirect::Moved { .. } | Redirect::Ask(_) if redirects < REDIRECTS_MAX => {
                    redirects += 1;
                    Duration::ZERO
                }
                Redirect::Moved { .. } | Redirect::Ask(_) | Redirect::Wait => {
                    // The nodes that were asked may all be wrong.
                    self.state.lock().is_stale |= redirect != Redirect::Wait;
                    let longer = (move_pause * 2).min(MOVE_PAUSE_MAX);
                    mem::replace(&mut move_pause, longer)
                }
                Redirect::Unavailable if !waits_for_nodes => Duration::ZERO,
                Redirect::Unavailable => {
                    let longer = (away_pause * 2).min(UNAVAILABLE_PAUSE_MAX);
                    mem::replace(&mut away_pause, longer)
                }
            };
            match redirect {
                Redirect::Ask(name) => asking_at = Some(name),
                Redirect::Unavailable => away = Some((part.number, failure.clone())),
                _ => {}
            }
            let next = clock::now().saturating_add(pause);
            if next >= deadline {
                return Err(passing(failure));
            }
            if !pause.is_zero() {
                clock::sleep_until(next);
            }
        }
    }

    /// Asks over a pooled connection, and follows redirects.
    pub(super) fn ask<C: Request>(
        &self,
        slot: u16,
        request: &C,
        patience: Patience,
    ) -> Result<(Arc<Part>, Exchange<C::Reply>), NodeError> {
        self.follow(slot, patience, |part, is_asking| {
            let mut connections = part.pool.get_to_ask(patience.deadline)?;
            self.ask_over(part, connections.only(), request, is_asking, patience.deadline)
        })
    }

    /// Asks one node once.
    pub(super) fn ask_over<C: Request>(
        &self,
        part: &Part,
        connection: &mut Connection,
        request: &C,
        is_asking: bool,
        deadline: Moment,
    ) -> Result<Exchange<C::Reply>, NodeError> {
        let request = InCluster { request, is_sharded: self.is_sharded(), is_asking };
        exchange(&part.node, connection, &request, deadline)
    }

    /// Records what a failure says about the cluster, and returns it.
    pub(super) fn note(&self, failure: &NodeError, part: &Part) -> Redirect {
        let redirect = Redirect::of(failure, &part.name);
        match &redirect {
            Redirect::Moved { slot, to } => {
                let is_new = self.state.lock().map.set_owner(*slot, to.clone());
                if is_new {
                    self.subscriptions.on_new_map();
                }
            }
            Redirect::Unavailable => {
                part.note_failure();
            }
            Redirect::Ask(_) | Redirect::Wait | Redirect::None => {}
        }
        redirect
    }

    /// Records that a node has replied.
    pub(super) fn on_reply(&self) {
        self.observer.cluster_down(false);
    }

    /// Lets the next request ask for the map first.
    pub(super) fn on_stale_map(&self) {
        self.state.lock().is_stale = true;
    }

    /// Returns the node of a slot. Asks for the map if it is not known, or may have changed.
    pub(super) fn owner(&self, slot: u16, deadline: Moment) -> Result<Arc<Part>, NodeError> {
        self.refresh_if_stale(slot, deadline)?;
        self.known_owner(slot)
    }

    /// Returns the node of a slot, as far as it is known.
    pub(super) fn known_owner(&self, slot: u16) -> Result<Arc<Part>, NodeError> {
        let owner = self.state.lock().map.owner(slot).cloned();
        match owner {
            Some(name) => self.part(&name),
            None => {
                self.state.lock().is_stale = true;
                let text = format!("no node serves slot {slot}{SEE_DOCTOR}");
                Err(NodeError::not_applied(io::Error::other(text)))
            }
        }
    }

    /// Whether a node still serves slots, as far as it is known.
    pub(super) fn has_part(&self, number: u64) -> bool {
        self.state.lock().parts.iter().any(|part| part.number == number)
    }

    /// Returns all nodes that serve slots, according to a new map.
    pub(super) fn masters(&self, deadline: Moment) -> Result<Vec<Arc<Part>>, NodeError> {
        self.refresh(deadline)?;
        let masters: Vec<_> = self.state.lock().map.masters().into_iter().cloned().collect();
        masters.iter().map(|name| self.part(name)).collect()
    }

    pub(super) fn part(&self, name: &ServerName) -> Result<Arc<Part>, NodeError> {
        let find = |state: &State| state.parts.iter().find(|part| part.name == *name).cloned();
        if let Some(part) = find(&self.state.lock()) {
            return Ok(part);
        }
        if self.state.lock().parts.len() >= NODES_MAX {
            // The next map removes those that serve no slots.
            self.state.lock().is_stale = true;
            return Err(NodeError::protocol("it names too many nodes"));
        }
        let node = self.node(name);
        let pool = ConnectionPool::new([node.clone()].into(), self.settings.pool_size)
            .ok_or_else(|| NodeError::not_applied(io::ErrorKind::WouldBlock))?;
        let mut state = self.state.lock();
        if let Some(part) = find(&state) {
            return Ok(part);
        }
        state.last_number += 1;
        let part = Arc::new(Part::new(name.clone(), state.last_number, node, pool));
        if state.is_closed {
            part.pool.close();
        }
        state.parts.push(part.clone());
        Ok(part)
    }

    fn node(&self, name: &ServerName) -> Arc<RedisNode> {
        if let Some((_, node)) = self.seeds.iter().find(|(seed, _)| seed == name) {
            return node.clone();
        }
        let endpoint = Arc::new(self.endpoint.of_node(name));
        let observer = self.observer.clone();
        let node = RedisNode::new(
            endpoint,
            self.operation_timeout,
            self.settings.spin_max,
            self.settings.quarantine,
            observer,
        );
        Arc::new(node.in_cluster())
    }

    /// Closes the connections that are not in use.
    pub(super) fn close(&self) {
        let parts = {
            let mut state = self.state.lock();
            state.is_closed = true;
            state.parts.clone()
        };
        parts.iter().for_each(|part| part.pool.close());
    }

    /// Fails only if no map is known at all.
    fn refresh_if_stale(&self, slot: u16, deadline: Moment) -> Result<(), NodeError> {
        let now = clock::now();
        {
            let state = self.state.lock();
            let owner = state.map.owner(slot);
            let is_stale = state.is_stale_for(|part| Some(&part.name) == owner);
            if !is_stale || (state.is_known && self.refresh.is_early()) {
                return Ok(());
            }
        }
        // The other half is left for the request itself.
        let refreshed = self.refresh(now.saturating_add(deadline.duration_since(now) / 2));
        if self.state.lock().is_known { Ok(()) } else { refreshed }
    }

    /// Asks for the map on another thread, if it is not known, or may have changed.
    pub(super) fn begin_refresh(self: &Arc<Router>) {
        if !self.state.lock().is_stale_for(|_| true) || self.refresh.is_early() {
            return;
        }
        let Some(asking) = self.refresh.begin() else { return };
        let (router, deadline) =
            (self.clone(), clock::now().saturating_add(self.operation_timeout));
        // If there is no thread for it, this drops the duty.
        let _ = threads::spawn("distlock-cluster", move || {
            drop(asking.run(|| router.ask_for_map(deadline)));
        });
    }

    /// Asks the nodes for the map. If another thread is asking already, waits for its result.
    fn refresh(&self, deadline: Moment) -> Result<(), NodeError> {
        match self.refresh.begin() {
            Some(asking) => asking.run(|| self.ask_for_map(deadline)),
            None => self.refresh.wait(deadline),
        }
    }

    /// Asks the nodes for the map, one after the other, until one knows it.
    /// Returns whether it has changed.
    fn ask_for_map(&self, deadline: Moment) -> Result<bool, NodeError> {
        let mut parts = self.state.lock().parts.clone();
        // The node that failed last comes last.
        parts.sort_by_key(|part| Reverse(part.failed_at()));
        let is_other = |(name, _): &&(ServerName, _)| parts.iter().all(|part| part.name != *name);
        let mut nodes: Vec<_> = self.seeds.iter().filter(is_other).cloned().collect();
        nodes.reverse();
        nodes.extend(parts.iter().map(|part| (part.name.clone(), part.node.clone())));
        // Otherwise the nodes had too little time to reply.
        let has_time = deadline.duration_since(clock::now()) > self.operation_timeout / 4;
        let on_failure = |name: &ServerName| {
            parts.iter().filter(|part| part.name == *name).for_each(|part| part.note_failure());
        };
        let found = ask_for_map(nodes, deadline, on_failure);
        if found.is_ok() || has_time {
            self.observer.cluster_down(found.is_err());
        }
        let (map, is_sharded) = found?;
        let is_new = {
            let mut state = self.state.lock();
            let masters = map.masters();
            state.parts.retain(|part| masters.contains(&&part.name));
            let is_new = !state.is_known || state.map != map || self.is_sharded() != is_sharded;
            state.map = map;
            (state.is_known, state.is_stale, state.read_at) = (true, false, clock::now());
            self.is_sharded.store(is_sharded, Ordering::Release);
            is_new
        };
        if is_new {
            self.subscriptions.on_new_map();
        }
        Ok(is_new)
    }
}

impl State {
    /// Whether the map may have changed for such nodes: one has failed since it was read.
    fn is_stale_for(&self, which: impl Fn(&Part) -> bool) -> bool {
        let has_failed = |part: &Arc<Part>| which(part) && part.failed_at() > self.read_at;
        self.is_stale || self.parts.iter().any(has_failed)
    }
}

impl fmt::Debug for Router {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Router").field("cluster", self.label()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
