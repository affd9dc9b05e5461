//! Asking several nodes at once, from the calling thread: write to every node, then read replies
//! until the outcome is decided or time runs out.

mod skipped;

use std::{mem, sync::Arc, time::Duration};

use smallvec::SmallVec;

use super::{
    broadcast_options::{BroadcastOptions, PREFERRED_WAIT_MIN},
    responses::{Response, Responses},
};
use crate::{
    backend::redis::{
        BackgroundConnects, Connected, Connection, Exchange, InFlightRequest, NodeError,
        NodeErrorKind, RedisNode, Request, ScriptRef, Transport, poll_readable,
    },
    core::{
        ack::PendingAcks,
        node_reply::Vote,
        quorum::{NodeSet, Verdict, quorum},
    },
    sys::clock::{self, Moment},
};

/// Time after which a node with an outstanding reply or connection attempt counts as slow. Slow
/// nodes are skipped if the other nodes suffice.
const SLOW_NODE_TIMEOUT: Duration = Duration::from_millis(100);
/// Minimum time for a reply after which a missing one counts as a failure of the node; otherwise a
/// request whose caller is nearly out of time would make healthy nodes look unresponsive.
const REPLY_TIME_MIN: Duration = Duration::from_millis(25);

/// Sends a request to each node of `options.targets`, in this order, and counts one vote for each
/// reply. `request` returns the request for a node, and `vote` the vote for a reply. Ends when the
/// verdict is certain, when all nodes have replied, or when time runs out. Skips nodes in back-off
/// if the other nodes suffice.
pub(crate) fn broadcast<C: Request>(
    nodes: &[Arc<RedisNode>],
    order: &[usize],
    connections: &mut [Connection],
    options: BroadcastOptions<'_>,
    request: impl Fn(usize) -> C,
    vote: impl Fn(usize, &Exchange<C::Reply>) -> Vote,
) -> Responses<C::Reply> {
    let prior_vote = |node: usize| {
        options.prior_votes.get(node).copied().flatten().filter(|_| !options.targets.contains(node))
    };
    let votes =
        (0..nodes.len()).map(|node| Some(prior_vote(node).unwrap_or(Vote::Unknown))).collect();
    let mut broadcast = Broadcast {
        nodes,
        connections,
        options,
        states: nodes.iter().map(|_| NodeState::Idle).collect(),
        responses: Responses {
            by_node: nodes.iter().map(|_| Response::NotAsked).collect(),
            votes,
            pending_acks: PendingAcks::new(),
        },
        request,
        vote,
        connects: None,
        needed_until: None,
        began: clock::now(),
    };
    broadcast.start(order);
    broadcast.collect_replies();
    broadcast.finish()
}

/// Progress of the request to one node.
enum NodeState<C> {
    Idle,
    /// A thread is connecting to it.
    Connecting,
    Sent(C, ScriptRef, InFlightRequest),
}

struct Broadcast<'a, 'r, C: Request, F, V> {
    nodes: &'a [Arc<RedisNode>],
    connections: &'a mut [Connection],
    options: BroadcastOptions<'r>,
    states: Vec<NodeState<C>>,
    responses: Responses<C::Reply>,
    request: F,
    vote: V,
    connects: Option<BackgroundConnects>,
    /// End of the wait for needed nodes; `None` until a quorum has replied.
    needed_until: Option<Moment>,
    began: Moment,
}

impl<C: Request, F: Fn(usize) -> C, V: Fn(usize, &Exchange<C::Reply>) -> Vote>
    Broadcast<'_, '_, C, F, V>
{
    fn start(&mut self, order: &[usize]) {
        let now = self.began;
        let responsive: NodeSet =
            self.options.targets.iter().filter(|node| self.is_responsive(*node, now)).collect();
        let enough = quorum(self.nodes.len()).min(self.options.targets.len());
        let asked = if responsive.len() >= enough && !self.options.wait_for_all {
            responsive
        } else {
            self.options.targets
        };
        for node in self.options.targets.difference(asked).iter() {
            let kind = NodeErrorKind::BackingOff;
            self.record_failure(node, NodeError::not_applied(kind));
        }
        let asked = order.iter().copied().filter(|node| asked.contains(*node));
        if self.options.reverse_order {
            asked.rev().for_each(|node| self.ask(node));
        } else {
            asked.for_each(|node| self.ask(node));
        }
    }

    /// Whether a node is likely to reply soon.
    fn is_responsive(&mut self, node: usize, now: Moment) -> bool {
        let (unread_since, replied) = self.connections[node].read_unread(now);
        if replied {
            self.nodes[node].health.record_success();
        }
        match unread_since {
            // It has not replied to an earlier request.
            Some(since) if now.duration_since(since) > SLOW_NODE_TIMEOUT => {
                if !self.nodes[node].health.is_backing_off(now) {
                    self.nodes[node].health.record_failure(now);
                }
                false
            }
            // Another caller's attempt to connect is still in progress. Further attempts would only
            // cost threads.
            _ if !self.connections[node].is_connected()
                && self.nodes[node].health.is_connect_stalled(now, SLOW_NODE_TIMEOUT) =>
            {
                false
            }
            _ => !self.nodes[node].health.is_backing_off(now),
        }
    }

    fn ask(&mut self, node: usize) {
        if self.is_ready(node) {
            return self.send(node);
        }
        if let Some(spare) = self.nodes[node].take_spare() {
            self.connections[node] = spare;
        }
        if self.is_ready(node) { self.send(node) } else { self.connect_in_background(node) }
    }

    fn is_ready(&mut self, node: usize) -> bool {
        self.nodes[node].drop_if_replaced(&mut self.connections[node]);
        self.connections[node].is_ready()
    }

    /// Connects on another thread, because connecting can take long, and this thread must read the
    /// replies of other nodes meanwhile.
    fn connect_in_background(&mut self, node: usize) {
        let connects = match &self.connects {
            Some(connects) => connects,
            None => match BackgroundConnects::new() {
                Ok(connects) => self.connects.insert(connects),
                Err(error) => return self.record_failure(node, NodeError::not_applied(error)),
            },
        };
        let unconnected = self.connections[node].clone_unconnected();
        let connection = mem::replace(&mut self.connections[node], unconnected);
        match connects.connect(node, self.nodes[node].clone(), connection, self.options.connect_by)
        {
            Ok(()) => {
                self.states[node] = NodeState::Connecting;
                self.responses.votes[node] = None;
            }
            Err(error) => self.record_failure(node, NodeError::not_applied(error)),
        }
    }

    fn send(&mut self, node: usize) {
        let request = (self.request)(node);
        let connection = &mut self.connections[node];
        // Replies may be left unread, and then no caller would react to a NOSCRIPT error. So the
        // first request for a script contains its source, unless the node has run it before.
        let is_loaded =
            request.script().is_none_or(|script| connection.mark_script_loaded(script.mask));
        let script_ref = if is_loaded { ScriptRef::HASH } else { ScriptRef::SOURCE };
        match self.nodes[node].send(connection, &request, script_ref, self.options.deadline) {
            Ok(in_flight) => {
                self.states[node] = NodeState::Sent(request, script_ref, in_flight);
                self.responses.by_node[node] = Response::Pending;
                self.responses.votes[node] = None;
            }
            Err(failure) => self.record_failure(node, failure),
        }
    }

    /// Reads replies until the outcome is decided.
    fn collect_replies(&mut self) {
        let mut deadline = self.options.wait_until.min(self.options.deadline);
        let mut decided_at = None;
        loop {
            deadline = self.ask_backed_off(deadline);
            let awaits_needed = self.awaits_needed();
            let unanswered = self.unanswered();
            if unanswered.is_empty() {
                return;
            }
            let now = clock::now();
            if awaits_needed {
                deadline = deadline.min(self.needed_until.unwrap_or(deadline));
            } else if decided_at.is_none() && !self.options.wait_for_all && self.is_decided() {
                decided_at = Some(now);
            }
            if let Some(decided_at) = decided_at {
                let grace = self.grace();
                if grace.is_zero() {
                    return;
                }
                deadline = deadline.min(decided_at.saturating_add(grace));
            }
            let until = match &mut self.options.on_idle {
                None => deadline,
                Some(on_idle) => match on_idle(now) {
                    Some(next) => next.min(deadline),
                    None => return,
                },
            };
            let any = self.poll_replies(unanswered, until);
            if !any && clock::now() >= deadline {
                return;
            }
        }
    }

    fn is_decided(&self) -> bool {
        match self.responses.verdict() {
            Verdict::Granted | Verdict::Rejected => true,
            Verdict::NoQuorum => !self.options.will_retry,
            Verdict::Pending => false,
        }
    }

    /// Maximum wait for the remaining nodes since the outcome was decided.
    fn grace(&self) -> Duration {
        let is_open = |node| self.responses.votes.get(node) == Some(&None);
        let minimum = if self.options.preferred.iter().any(is_open) {
            self.options.preferred_wait
        } else if self.states.iter().any(|state| matches!(state, NodeState::Connecting)) {
            // Otherwise the first locks would be on few nodes.
            PREFERRED_WAIT_MIN
        } else {
            Duration::ZERO
        };
        self.options.straggler_grace.max(minimum)
    }

    /// Nodes with an outstanding reply or connection attempt.
    fn unanswered(&self) -> NodeSet {
        let states = self.states.iter().enumerate();
        let open = states.filter(|(_, state)| !matches!(state, NodeState::Idle));
        open.map(|(node, _)| node).collect()
    }

    /// Waits for replies of these nodes, and reads them. Returns false if there were none.
    fn poll_replies(&mut self, unanswered: NodeSet, until: Moment) -> bool {
        let mut nodes = unanswered.iter();
        if let (Some(node), None) = (nodes.next(), nodes.next())
            && self.connects.is_none()
        {
            return self.read_reply(node, until);
        }
        // A node that has just connected, or has failed to, may have decided the outcome.
        if self.ask_connected() {
            return true;
        }
        let mut any = false;
        for node in self.wait_readable(unanswered, until).iter() {
            any |= self.read_reply(node, clock::now());
        }
        any
    }

    /// Reads the reply of a node if it arrives by `until`. Returns false if it does not.
    fn read_reply(&mut self, node: usize, until: Moment) -> bool {
        let value = match self.connections[node].receive_until(until) {
            Ok(None) => return false,
            Ok(Some(value)) => value,
            Err(failure) => {
                self.states[node] = NodeState::Idle;
                self.record_failure(node, failure);
                return true;
            }
        };
        let NodeState::Sent(request, script_ref, in_flight) =
            mem::replace(&mut self.states[node], NodeState::Idle)
        else {
            return true;
        };
        match self.nodes[node].decode(&mut self.connections[node], &request, in_flight, value) {
            Ok(exchange) => {
                self.nodes[node].health.record_success();
                self.responses.votes[node] = Some((self.vote)(node, &exchange));
                self.responses.by_node[node] = Response::Replied(exchange);
            }
            Err(failure) if script_ref == ScriptRef::HASH && failure.is_unknown_script() => {
                match self.nodes[node].send(
                    &mut self.connections[node],
                    &request,
                    ScriptRef::SOURCE,
                    self.options.deadline,
                ) {
                    Ok(in_flight) => {
                        self.states[node] = NodeState::Sent(request, ScriptRef::SOURCE, in_flight)
                    }
                    Err(failure) => self.record_failure(node, failure),
                }
            }
            Err(failure) if failure.is_unknown_script() => {
                self.connections[node].poison();
                self.record_failure(
                    node,
                    NodeError::protocol("it does not know a script that it was just sent"),
                );
            }
            Err(failure) => self.record_failure(node, failure),
        }
        true
    }

    /// Asks the nodes that have connected since the last call.
    fn ask_connected(&mut self) -> bool {
        let connected =
            self.connects.as_mut().map(BackgroundConnects::take_connected).unwrap_or_default();
        let any = !connected.is_empty();
        for Connected { node, connection, outcome } in connected {
            self.connections[node] = connection;
            self.states[node] = NodeState::Idle;
            match outcome {
                Ok(()) => self.send(node),
                Err(failure) => self.record_failure(node, failure),
            }
        }
        any
    }

    /// Waits until one of these nodes has sent something, or until a connection attempt has ended.
    fn wait_readable(&mut self, unanswered: NodeSet, until: Moment) -> NodeSet {
        let sent =
            unanswered.iter().filter(|node| matches!(self.states[*node], NodeState::Sent(..)));
        let mut transports: SmallVec<[&dyn Transport; 8]> = SmallVec::new();
        let mut listed: SmallVec<[usize; 8]> = SmallVec::new();
        let mut spin = Duration::MAX;
        for node in sent {
            if let Some(transport) = self.connections[node].transport() {
                transports.push(transport);
                listed.push(node);
                spin = spin.min(self.connections[node].spin_time());
            }
        }
        if let Some(connects) = &self.connects {
            transports.push(&*connects.wakeups);
            spin = Duration::ZERO;
        }
        // A closed or broken transport counts as readable. Reading from it returns the error.
        let ready = poll_readable(&transports, until, spin);
        listed.into_iter().zip(ready).filter(|(_, ready)| *ready).map(|(node, _)| node).collect()
    }

    fn record_failure(&mut self, node: usize, failure: NodeError) {
        if failure.is_wrong_type() {
            self.nodes[node].health.record_success();
        } else if !matches!(failure.kind, NodeErrorKind::BackingOff) {
            self.nodes[node].health.record_failure(clock::now());
        }
        self.set_failed(node, failure);
    }

    fn set_failed(&mut self, node: usize, failure: NodeError) {
        self.responses.by_node[node] = Response::Failed(failure);
        self.responses.votes[node] = Some(Vote::Unknown);
    }

    /// Decides what happens to the connections of nodes that have not replied. Before the deadline
    /// they stay open: the next reply on such a connection comes after the outstanding one. After
    /// the deadline they are closed, because their state is in doubt.
    fn finish(mut self) -> Responses<C::Reply> {
        let unanswered = self.unanswered();
        let deadline_passed = !unanswered.is_empty() && clock::now() >= self.options.deadline;
        let had_time = self.options.deadline.duration_since(self.began) >= REPLY_TIME_MIN;
        for node in unanswered.iter() {
            match &self.states[node] {
                NodeState::Sent(..) if deadline_passed => {
                    self.connections[node].poison();
                    let failure = NodeError::outcome_unknown(NodeErrorKind::TimedOut);
                    if had_time {
                        self.record_failure(node, failure);
                    } else {
                        self.set_failed(node, failure);
                    }
                }
                NodeState::Sent(_, _, in_flight) => {
                    let reader = self.options.late_reader.map(|reader| reader(node, *in_flight));
                    let ack = self.connections[node].abandon_reply(reader);
                    self.responses.pending_acks.extend(ack.map(|ack| (node, ack)));
                }
                // The thread keeps the connection for the next caller, or records the failure
                // itself.
                NodeState::Connecting => {
                    let kind = NodeErrorKind::TimedOut;
                    self.set_failed(node, NodeError::not_applied(kind));
                }
                NodeState::Idle => {}
            }
        }
        self.responses
    }
}
