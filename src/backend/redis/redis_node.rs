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
    NodeError, NodeErrorKind,
    connection::{Connection, Handshake},
    health::ConnectGate,
    membership::{Eligibility, Membership},
    script::{Request, ScriptRef, name_missing_permission},
    url::Endpoint,
};
use crate::{
    core::clock_sample::ClockSample,
    observe::Observer,
    sys::{
        clock::{self, Moment},
        display::HumanDuration,
    },
};

/// Minimum back-off after a failure: the node is not asked while the others form a quorum. Doubles
/// with each further failure, up to [`BACKOFF_MAX`].
const BACKOFF_MIN: Duration = Duration::from_millis(20);
const BACKOFF_MAX: Duration = Duration::from_secs(1);
/// Number of consecutive failures after which a node is failing, and waiters move to another queue
/// node.
const FAILING_FAILURES_MIN: u32 = 3;

/// A reply, and a time just before its request was sent, from which leases are counted.
#[derive(Debug)]
pub(crate) struct Exchange<T> {
    pub(crate) sent: Moment,
    pub(crate) reply: T,
}

#[derive(Debug)]
pub(crate) struct RedisNode {
    endpoint: Arc<Endpoint>,
    operation_timeout: Duration,
    spin_max: Duration,
    observer: Arc<Observer>,
    outage: Mutex<OutageTracker>,
    /// Latest sample of the server's clock, from any connection.
    clock_sample: Mutex<Option<ClockSample>>,
    /// Membership among several nodes; `None` for a single server, which is not checked.
    member: Option<Member>,
    /// End of the back-off after a failure, in nanoseconds.
    backoff_until: AtomicU64,
    consecutive_failures: AtomicU32,
    /// Connection that was established after its caller had stopped waiting; for the next caller.
    spare: Mutex<Option<Connection>>,
    connect_gate: ConnectGate,
}

/// Tracks outages, so that each one is reported once, however many connections it breaks.
#[derive(Debug)]
struct OutageTracker {
    /// Time at which the current outage was noticed.
    down_since: Option<Moment>,
    /// End of the last outage.
    recovered_at: Moment,
}

#[derive(Debug)]
struct Member {
    index: usize,
    membership: Arc<Mutex<Membership>>,
    /// Number of times that the node's server was replaced by another one.
    server_epoch: AtomicU64,
}

impl RedisNode {
    pub(crate) fn new(
        endpoint: Arc<Endpoint>,
        operation_timeout: Duration,
        spin_max: Duration,
        observer: Arc<Observer>,
    ) -> RedisNode {
        RedisNode {
            endpoint,
            operation_timeout,
            spin_max,
            observer,
            outage: Mutex::new(OutageTracker {
                down_since: None,
                recovered_at: Moment::from_nanos(0),
            }),
            clock_sample: Mutex::new(None),
            member: None,
            backoff_until: AtomicU64::new(0),
            consecutive_failures: AtomicU32::new(0),
            spare: Mutex::new(None),
            connect_gate: ConnectGate::default(),
        }
    }

    /// Makes this node a member of a group of several nodes.
    pub(crate) fn with_membership(
        self,
        index: usize,
        membership: Arc<Mutex<Membership>>,
    ) -> RedisNode {
        RedisNode {
            member: Some(Member { index, membership, server_epoch: AtomicU64::new(0) }),
            ..self
        }
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
            self.member.is_some(),
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

    /// Connects if necessary, and checks whether the server may be a node.
    pub(crate) fn connect(
        &self,
        connection: &mut Connection,
        deadline: Moment,
    ) -> Result<(), NodeError> {
        let begun = clock::now();
        let connecting = self.connect_gate.begin(begun);
        let connected = connection.connect(deadline);
        if connected.is_ok() {
            self.connect_gate.record_success(clock::now());
        }
        drop(connecting);
        let mut broken = connection.take_broken_opened_at();
        let hurried = deadline.duration_since(begun) < self.operation_timeout / 2;
        let out_of_time =
            matches!(&connected, Err(NodeError { kind: NodeErrorKind::TimedOut, .. }));
        let failed = connected.is_err() && !(hurried && out_of_time);
        if !failed {
            // The attempt succeeded, or had too little time to tell whether the server is down.
            // Count only a socket that broke before it.
            broken = broken.filter(|opened_at| *opened_at < begun);
        }
        self.track_outage(broken, failed, matches!(connected, Ok(Some(_))));
        let Some(handshake) = connected? else { return Ok(()) };
        let Handshake { clock_sample, server_info } = handshake;
        // The connection may lead to another server, with another clock.
        *self.clock_sample.lock() = Some(clock_sample);
        if let (Some(member), Some(info)) = (&self.member, server_info) {
            let (replaced, eligibility) = {
                let mut membership = member.membership.lock();
                let replaced = membership.is_replacement(member.index, &info);
                let eligibility = membership.observe(member.index, &info);
                // A new epoch closes the connections to the former server. The former server may
                // now be reachable as another node, and would vote twice.
                if replaced && eligibility != Eligibility::Replica {
                    member.server_epoch.fetch_add(1, Ordering::AcqRel);
                }
                connection.set_server_epoch(member.server_epoch.load(Ordering::Acquire));
                (replaced, eligibility)
            };
            let quarantine =
                if let Eligibility::Quarantined(left) = eligibility { Some(left) } else { None };
            if replaced || quarantine.is_some() {
                self.observer.server_changed(self.label(), replaced, quarantine);
            }
            let reason = match eligibility {
                Eligibility::Eligible => return Ok(()),
                Eligibility::Quarantined(left) => {
                    let label = self.label();
                    log_safely!(
                        warn,
                        "{label} may have lost its data in a restart; it votes again in {}",
                        HumanDuration(left)
                    );
                    return Ok(());
                }
                Eligibility::Replica => {
                    "it is a replica; nodes must be independent masters".to_owned()
                }
                Eligibility::Duplicate(other) => {
                    format!("it is the same server as {other}, and would vote twice")
                }
            };
            connection.poison();
            return Err(NodeError {
                outcome_unknown: false,
                kind: NodeErrorKind::Ineligible(reason),
            });
        }
        Ok(())
    }

    /// Records the start of an outage, and reports its end. A broken socket that was opened before
    /// the last outage ended belongs to that outage, and does not start another one.
    fn track_outage(&self, broken: Option<Moment>, failed: bool, connected: bool) {
        let now = clock::now();
        let mut outage = self.outage.lock();
        if failed || broken.is_some_and(|opened_at| opened_at >= outage.recovered_at) {
            outage.down_since.get_or_insert(now);
        }
        if !connected {
            return;
        }
        if let Some(since) = outage.down_since.take() {
            outage.recovered_at = now;
            drop(outage);
            self.observer.reconnected(self.label(), now.duration_since(since));
        }
    }

    /// Closes a connection that leads to an earlier server of this node.
    pub(crate) fn drop_if_replaced(&self, connection: &mut Connection) {
        if let Some(member) = &self.member {
            connection.close_if_replaced(member.server_epoch.load(Ordering::Acquire));
        }
    }

    /// Returns the time until the node's votes count; `None` if they count at `now`.
    pub(crate) fn quarantine_left(&self, now: Moment) -> Option<Duration> {
        let member = self.member.as_ref()?;
        let left = member.membership.lock().votes_from(member.index).duration_since(now);
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
        connection
            .check_error_reply(&reply)
            .map_err(|error| name_missing_permission(error, request.script()))?;
        match request.decode(in_flight.nonce, reply) {
            Some(reply) => {
                if let Some(server_us) = C::server_us(&reply) {
                    self.record_clock(ClockSample::new(in_flight.sent, clock::now(), server_us));
                }
                Ok(Exchange { sent: in_flight.sent, reply })
            }
            None => {
                connection.poison();
                Err(NodeError::outcome_unknown(NodeErrorKind::Protocol(
                    "its reply has an unexpected form".into(),
                )))
            }
        }
    }

    /// Whether the node failed recently, so that it is not asked while the others form a quorum.
    pub(crate) fn is_backing_off(&self, now: Moment) -> bool {
        now.as_nanos() < self.backoff_until.load(Ordering::Acquire)
    }

    /// Whether attempts to connect have been in progress for `patience` without success. Returns
    /// false from time to time, so that another caller tries too.
    pub(crate) fn is_connect_stalled(&self, now: Moment, patience: Duration) -> bool {
        self.connect_gate.is_stalled(now, patience, BACKOFF_MAX)
    }

    /// Whether the node has not failed since its last reply.
    pub(crate) fn is_healthy(&self) -> bool {
        self.consecutive_failures.load(Ordering::Acquire) == 0
    }

    /// Whether the node has failed repeatedly since its last reply.
    pub(crate) fn is_failing(&self) -> bool {
        self.consecutive_failures.load(Ordering::Acquire) >= FAILING_FAILURES_MIN
    }

    /// Records that the node replied.
    pub(crate) fn record_success(&self) {
        if self.consecutive_failures.load(Ordering::Acquire) != 0 {
            self.consecutive_failures.store(0, Ordering::Release);
            self.backoff_until.store(0, Ordering::Release);
        }
    }

    /// Records that the node did not reply or could not be reached.
    pub(crate) fn record_failure(&self, now: Moment) {
        let failures = self.consecutive_failures.fetch_add(1, Ordering::AcqRel).min(10);
        let backoff = BACKOFF_MIN.saturating_mul(1 << failures).min(BACKOFF_MAX);
        self.backoff_until.store(now.saturating_add(backoff).as_nanos(), Ordering::Release);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failing_node_backoff_doubles_up_to_one_second() {
        let endpoint = Arc::new(Endpoint::parse("redis://h").unwrap());
        let observer = Observer::start(Vec::new(), endpoint.label.clone()).unwrap();
        let node = RedisNode::new(endpoint, Duration::from_secs(1), Duration::ZERO, observer);
        let now = Moment::from_nanos(1_000_000_000);
        let backs_off_after =
            |ms| node.is_backing_off(now.saturating_add(Duration::from_millis(ms)));
        for backoff in [20, 40, 80, 160, 320, 640] {
            node.record_failure(now);
            assert!(backs_off_after(backoff - 1) && !backs_off_after(backoff), "{backoff}");
        }
        for _ in 0..100 {
            node.record_failure(now);
            assert!(backs_off_after(999) && !backs_off_after(1000));
        }
        node.record_success();
        assert!(node.is_healthy() && !backs_off_after(0));
        node.record_failure(now);
        assert!(backs_off_after(19) && !backs_off_after(20));
    }
}
