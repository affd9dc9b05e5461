//! `RedisNode`: one server. Requests go over connections that the caller supplies.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use redis::Value;

use super::{
    connection::{Connection, Handshake},
    heard_subscription::HeardSubscription,
    quarantine::{Eligibility, Voters},
    server_info::ServerInfo,
    url::Endpoint,
};
use crate::{
    backend::{
        discovery::Discovery,
        error::{NodeError, NodeErrorKind},
        health::{ConnectOutcome, HealthChange, NodeHealth},
        redis::script::{Request, ScriptRef, name_missing_permission},
    },
    core::clock_sample::ClockSample,
    observe::Observer,
    sys::{
        clock::{self, Moment},
        display::HumanDuration,
    },
};

/// A reply, and a time just before its request was sent, from which leases are counted.
#[derive(Debug)]
pub(crate) struct Exchange<T> {
    pub(crate) sent: Moment,
    /// Time on the server's clock, if the reply contains it.
    pub(crate) server_us: Option<u64>,
    pub(crate) reply: T,
}

/// A connection to each of the nodes, in their order. Each opens when it is first used.
#[derive(Debug)]
pub(crate) struct NodeConnections(pub(crate) Box<[Connection]>);

impl NodeConnections {
    /// Connections outside the pool, for a thread that must never wait for users of the pool.
    pub(crate) fn reserved(nodes: &[Arc<RedisNode>]) -> NodeConnections {
        NodeConnections(nodes.iter().map(|node| node.reserved_connection()).collect())
    }

    /// The connection to the only server.
    pub(crate) fn only(&mut self) -> &mut Connection {
        &mut self.0[0]
    }
}

#[derive(Debug)]
pub(crate) struct RedisNode {
    endpoint: Arc<Endpoint>,
    operation_timeout: Duration,
    spin_max: Duration,
    observer: Arc<Observer>,
    pub(crate) health: NodeHealth,
    /// Latest sample of the server's clock, from any connection.
    clock_sample: Mutex<Option<ClockSample>>,
    /// Which servers the nodes lead to; of several nodes, or of this one, which decides alone.
    voters: Arc<Mutex<Voters>>,
    index: usize,
    decides_alone: bool,
    /// Whether the metrics count it as a server.
    is_counted: bool,
    /// After a restart or a failover, a server that decides alone grants nothing for a while.
    pub(crate) has_quarantine: bool,
    /// Of the waiters of this server.
    pub(crate) heard_subscription: HeardSubscription,
    /// Number of times that the node's server was replaced by another one.
    server_epoch: AtomicU64,
    /// Scripts that the server has run, as a bit mask. New connections need not send their text,
    /// which may not get through.
    known_scripts: AtomicU32,
    /// Connection that was established after its caller had stopped waiting; for the next caller.
    spare: Mutex<Option<Connection>>,
}

impl RedisNode {
    /// A server that decides alone. After a restart or a failover it grants nothing for the time
    /// of the quarantine.
    pub(crate) fn new(
        endpoint: Arc<Endpoint>,
        operation_timeout: Duration,
        spin_max: Duration,
        quarantine: Duration,
        observer: Arc<Observer>,
    ) -> RedisNode {
        let voters = Voters::new([endpoint.label.clone()].into_iter(), quarantine);
        RedisNode {
            endpoint,
            operation_timeout,
            spin_max,
            observer,
            health: NodeHealth::default(),
            clock_sample: Mutex::new(None),
            voters: Arc::new(Mutex::new(voters)),
            index: 0,
            decides_alone: true,
            is_counted: true,
            has_quarantine: !quarantine.is_zero(),
            heard_subscription: HeardSubscription::default(),
            server_epoch: AtomicU64::new(0),
            known_scripts: AtomicU32::new(0),
            spare: Mutex::new(None),
        }
    }

    /// Makes this node one of several nodes.
    pub(crate) fn with_voters(self, index: usize, voters: Arc<Mutex<Voters>>) -> RedisNode {
        RedisNode { voters, index, decides_alone: false, ..self }
    }

    /// Makes this node one of a cluster, which the metrics count as one server.
    pub(crate) fn in_cluster(self) -> RedisNode {
        RedisNode { is_counted: false, ..self }
    }

    pub(crate) fn label(&self) -> &Arc<str> {
        &self.endpoint.label
    }

    /// Creates an unconnected connection for the pool, which the users' threads share.
    pub(crate) fn pooled_connection(&self) -> Connection {
        self.unconnected(self.spin_max)
    }

    /// Creates an unconnected connection for a thread that must never wait for users of the pool.
    pub(crate) fn reserved_connection(&self) -> Connection {
        self.unconnected(Duration::ZERO)
    }

    fn unconnected(&self, spin_max: Duration) -> Connection {
        Connection::unconnected(
            self.endpoint.clone(),
            self.operation_timeout,
            spin_max,
            !self.decides_alone || self.has_quarantine,
        )
    }

    /// Returns the latest sample of the server's clock.
    pub(crate) fn clock_sample(&self) -> Option<ClockSample> {
        *self.clock_sample.lock()
    }

    pub(crate) fn record_clock(&self, sample: ClockSample) {
        let mut last = self.clock_sample.lock();
        if last.is_none_or(|last| sample.is_newer_than(&last)) {
            *last = Some(sample);
        }
    }

    /// Sends a request over an established connection: the first half of an exchange.
    pub(crate) fn send<C: Request>(
        &self,
        connection: &mut Connection,
        request: &C,
        by: ScriptRef,
        deadline: Moment,
    ) -> Result<InFlightRequest, NodeError> {
        let not_after_us = self.clock_sample().map_or(0, |sample| sample.server_us_at(deadline));
        let nonce = connection.next_nonce();
        let sent = connection.send(deadline, |out| request.encode(by, nonce, not_after_us, out))?;
        Ok(InFlightRequest { nonce, sent })
    }

    /// Sends several requests over an established connection, in one write.
    pub(crate) fn send_all<C: Request>(
        &self,
        connection: &mut Connection,
        requests: &[&C],
        deadline: Moment,
    ) -> Result<Vec<InFlightRequest>, NodeError> {
        let not_after_us = self.clock_sample().map_or(0, |sample| sample.server_us_at(deadline));
        let nonces: Vec<u64> = requests.iter().map(|_| connection.next_nonce()).collect();
        let sent = connection.send(deadline, |out| {
            for (request, nonce) in requests.iter().zip(&nonces) {
                request.encode(ScriptRef::HASH, *nonce, not_after_us, out);
            }
        })?;
        Ok(nonces.into_iter().map(|nonce| InFlightRequest { nonce, sent }).collect())
    }

    /// Whether the server has run the script of the request.
    pub(crate) fn knows_script<C: Request>(&self, request: &C) -> bool {
        let mask = request.script().map_or(0, |script| script.mask);
        mask != 0 && self.known_scripts.load(Ordering::Acquire) & mask == mask
    }

    /// Connects if necessary, and checks whether the server may be a node.
    pub(crate) fn connect(
        &self,
        connection: &mut Connection,
        deadline: Moment,
    ) -> Result<(), NodeError> {
        // Until the end, the node counts as being connected to.
        self.observer.shield(|| self.connect_shielded(connection, deadline))
    }

    fn connect_shielded(
        &self,
        connection: &mut Connection,
        deadline: Moment,
    ) -> Result<(), NodeError> {
        let begun = clock::now();
        let connecting = self.health.begin_connect(begun);
        let connected = connection.connect(deadline);
        let hurried = deadline.duration_since(begun) < self.operation_timeout / 2;
        let outcome = match &connected {
            Ok(None) => ConnectOutcome::WasConnected,
            _ => ConnectOutcome::of(&connected, hurried),
        };
        let broken = connection.take_broken_opened_at();
        let change = connecting.end(clock::now(), outcome, broken);
        self.report(change, connected.as_ref().err());
        let Some(handshake) = connected? else { return Ok(()) };
        let Handshake { clock_sample, server_info } = handshake;
        self.heard_subscription.on_connection_opened();
        // The connection may lead to another server, with another clock.
        *self.clock_sample.lock() = Some(clock_sample);
        // Without INFO, it counts as the current server.
        connection.set_server_epoch(self.server_epoch.load(Ordering::Acquire));
        server_info.map_or(Ok(()), |info| self.check_server(connection, &info))
    }

    fn report(&self, change: Option<HealthChange>, failure: Option<&NodeError>) {
        if let Some(change) = change {
            change.report(&self.observer, self.label(), self.is_counted, failure);
        }
    }

    /// Records what the server of a connection reports about itself. Closes the connection if the
    /// server must not vote.
    pub(crate) fn check_server(
        &self,
        connection: &mut Connection,
        info: &ServerInfo,
    ) -> Result<(), NodeError> {
        let (replaced, eligibility) = {
            let mut voters = self.voters.lock();
            let replaced = info.is_master && voters.is_replacement(self.index, info);
            let eligibility = voters.observe(self.index, info);
            let is_writable_replica = !self.decides_alone && eligibility == Eligibility::Replica;
            // A new epoch closes the other connections. They may lead to the former server, which
            // may now be reachable as another node and would vote twice, or was frozen and goes on;
            // or to a server that has become a replica, which votes too if it is writable.
            if replaced || is_writable_replica {
                self.server_epoch.fetch_add(1, Ordering::AcqRel);
            }
            connection.set_server_epoch(self.server_epoch.load(Ordering::Acquire));
            if replaced {
                self.known_scripts.store(0, Ordering::Release);
            }
            connection.set_loaded_scripts(self.known_scripts.load(Ordering::Acquire));
            (replaced, eligibility)
        };
        let quarantine =
            if let Eligibility::Quarantined(left) = eligibility { Some(left) } else { None };
        if (replaced && !self.decides_alone) || quarantine.is_some() {
            self.observer.server_changed(self.label(), replaced, quarantine);
        }
        let reason = match eligibility {
            Eligibility::Eligible => return Ok(()),
            Eligibility::Quarantined(left) => {
                let (label, left) = (self.label(), HumanDuration(left));
                if self.decides_alone {
                    log_safely!(
                        warn,
                        "{label} may have lost locks in a restart or a failover; nothing is \
                         granted for {left}"
                    );
                } else {
                    log_safely!(
                        warn,
                        "{label} may have lost its data in a restart; it votes again in {left}"
                    );
                }
                return Ok(());
            }
            // The requests that change something are refused, until the name leads to the master.
            Eligibility::Replica if self.decides_alone => return Ok(()),
            Eligibility::Replica => "it is a replica; nodes must be independent masters".to_owned(),
            Eligibility::Duplicate(other) => {
                format!("it is the same server as {other}, and would vote twice")
            }
        };
        connection.close();
        Err(NodeError::not_applied(NodeErrorKind::Ineligible(reason)))
    }

    /// Whether a connection leads to an earlier server of this node.
    pub(crate) fn is_replaced(&self, connection: &Connection) -> bool {
        connection.is_replaced(self.server_epoch.load(Ordering::Acquire))
    }

    /// Closes a connection that leads to an earlier server of this node.
    pub(crate) fn drop_if_replaced(&self, connection: &mut Connection) {
        if self.is_replaced(connection) {
            connection.close();
        }
    }

    /// Where the server is, if that may change while a former server goes on replying.
    pub(crate) fn discovery(&self) -> &dyn Discovery {
        &*self.endpoint.discovery
    }

    /// Returns the time until the node may vote, or grant alone; `None` if it may at `now`.
    pub(crate) fn quarantine_left(&self, now: Moment) -> Option<Duration> {
        let left = self.voters.lock().votes_from(self.index).duration_since(now);
        (!left.is_zero()).then_some(left)
    }

    /// Decodes the reply: the second half of an exchange.
    pub(crate) fn decode<C: Request>(
        &self,
        connection: &mut Connection,
        request: &C,
        in_flight: InFlightRequest,
        reply: Value,
    ) -> Result<Exchange<C::Reply>, NodeError> {
        self.report(self.health.record_reply(in_flight.sent, clock::now()), None);
        connection.check_error_reply(&reply).map_err(|error| {
            if error.is_unknown_script() {
                self.known_scripts.store(0, Ordering::Release);
            }
            name_missing_permission(error, request.script())
        })?;
        match in_flight.decode(request, reply) {
            Some(exchange) => {
                let mask = request.script().map_or(0, |script| script.mask);
                self.known_scripts.fetch_or(mask, Ordering::AcqRel);
                if let Some(server_us) = exchange.server_us {
                    self.record_clock(ClockSample::new(in_flight.sent, clock::now(), server_us));
                }
                Ok(exchange)
            }
            None => {
                connection.poison();
                Err(NodeError::protocol("its reply has an unexpected form"))
            }
        }
    }

    /// Keeps a connection that was ready too late for its caller, for the next caller.
    pub(crate) fn put_spare(&self, connection: Connection) {
        let former = self.spare.lock().replace(connection);
        drop(former);
    }

    pub(crate) fn take_spare(&self) -> Option<Connection> {
        self.spare.lock().take()
    }
}

/// A request in flight.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InFlightRequest {
    nonce: u64,
    pub(crate) sent: Moment,
}

impl InFlightRequest {
    /// Decodes its reply, which is not an error.
    pub(crate) fn decode<C: Request>(
        self,
        request: &C,
        reply: Value,
    ) -> Option<Exchange<C::Reply>> {
        let (reply, server_us) = request.decode(self.nonce, reply)?;
        Some(Exchange { sent: self.sent, server_us, reply })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::redis::node::connection::tests::server_without_info;

    /// A server that has been replaced permitted `INFO`, and its successor does not.
    ///
    /// Fault: N275
    #[test]
    fn connection_without_info_counts_as_one_to_the_current_server() {
        let (url, server) = server_without_info(b"+OK\r\n");
        let endpoint = Arc::new(Endpoint::parse(&url).unwrap());
        let observer = Observer::start(Vec::new(), endpoint.label.clone(), 1, false).unwrap();
        let minute = Duration::from_secs(60);
        let node = RedisNode::new(endpoint, minute, Duration::ZERO, Duration::ZERO, observer);
        node.server_epoch.store(1, Ordering::Release);
        let mut connection = node.reserved_connection();
        node.connect(&mut connection, clock::now().saturating_add(minute)).unwrap();
        assert!(!node.is_replaced(&connection));
        drop(connection);
        server.join().unwrap();
    }
}
