//! Asking several nodes at once, from the calling thread: write to every node, then collect, until
//! it is decided or the time is over. With one node this is a request and its answer.

use std::{mem, sync::Arc, time::Duration};

use smallvec::SmallVec;

use super::{
    connector::{Connected, Connector},
    quorum::{NodeSet, Verdict, Vote, quorum},
    responses::{PendingAcks, Response, Responses},
};
use crate::{
    clock::{self, Moment},
    node::{
        Connection, Exchange, InFlightRequest, NodeError, NodeErrorKind, RedisNode, Request,
        ScriptRef, Socket,
    },
};

/// A node that has owed an answer for this long, or has kept those who connect to it waiting, is
/// not asked for more where the others suffice.
const SLOW_NODE_TIMEOUT: Duration = Duration::from_millis(100);

/// How much longer than the others a node may take whose word is wanted.
const PREFERRED_GRACE: Duration = Duration::from_millis(20);

/// What bounds one asking of the nodes.
pub(crate) struct BroadcastOptions<'a> {
    pub(crate) targets: NodeSet,
    /// When what was asked becomes void, and a connection that has not answered is closed.
    pub(crate) deadline: Moment,
    pub(crate) wait_until: Moment,
    /// A connection that is made has to be there by then; one that comes after the deadline is for
    /// whoever asks next.
    pub(crate) connect_by: Moment,
    /// How long to wait for the rest once it is decided.
    pub(crate) straggler_grace: Duration,
    /// Everybody's answer is wanted, whatever the verdict.
    pub(crate) wait_for_all: bool,
    /// Who fails is asked again: that too many have is no verdict.
    pub(crate) will_retry: bool,
    /// How those voted before who are not asked again, if there was a round before this one.
    pub(crate) prior_votes: SmallVec<[Option<Vote>; 8]>,
    /// These nodes' answers are wanted, if they come soon.
    pub(crate) preferred: NodeSet,
    /// The last node first.
    pub(crate) reverse_order: bool,
    /// Called while answers are out; says when it wants to be called again, or that nobody waits
    /// any more.
    pub(crate) on_idle: Option<&'a mut dyn FnMut(Moment) -> Option<Moment>>,
}

impl BroadcastOptions<'_> {
    pub(crate) fn new(to: NodeSet, deadline: Moment) -> BroadcastOptions<'static> {
        BroadcastOptions {
            targets: to,
            deadline,
            wait_until: deadline,
            connect_by: deadline,
            straggler_grace: Duration::ZERO,
            wait_for_all: false,
            will_retry: false,
            prior_votes: SmallVec::new(),
            preferred: NodeSet::EMPTY,
            reverse_order: false,
            on_idle: None,
        }
    }

    pub(crate) fn awaiting_all(to: NodeSet, deadline: Moment) -> BroadcastOptions<'static> {
        BroadcastOptions { wait_for_all: true, ..BroadcastOptions::new(to, deadline) }
    }
}

/// Asks `round.to` what `call` makes for each node, and counts what `vote` makes of each answer.
/// Ends when the verdict is certain, all have answered, or the time is over. Nodes that failed a
/// short time ago are left out as long as the others suffice.
pub(crate) fn broadcast<C: Request>(
    nodes: &[Arc<RedisNode>],
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
        connector: None,
    };
    broadcast.start();
    broadcast.collect_replies();
    broadcast.finish()
}

/// Where the asking of one node stands.
enum NodeState<C> {
    Idle,
    /// A thread connects to it.
    Connecting,
    Sent(C, ScriptRef, InFlightRequest),
}

struct Broadcast<'a, 'r, C: Request, F, V> {
    nodes: &'a [Arc<RedisNode>],
    connections: &'a mut [Connection],
    options: BroadcastOptions<'r>,
    states: SmallVec<[NodeState<C>; 1]>,
    responses: Responses<C::Reply>,
    request: F,
    vote: V,
    connector: Option<Connector>,
}

impl<C: Request, F: Fn(usize) -> C, V: Fn(usize, &Exchange<C::Reply>) -> Vote>
    Broadcast<'_, '_, C, F, V>
{
    fn start(&mut self) {
        if self.nodes.len() == 1 {
            return self.ask(0);
        }
        let now = clock::now();
        let responsive: NodeSet =
            self.options.targets.iter().filter(|node| self.is_responsive(*node, now)).collect();
        let enough = quorum(self.nodes.len()).min(self.options.targets.len());
        let asked = if responsive.len() >= enough && !self.options.wait_for_all {
            responsive
        } else {
            self.options.targets
        };
        for node in self.options.targets.difference(asked).iter() {
            self.record_failure(
                node,
                NodeError { outcome_unknown: false, kind: NodeErrorKind::BackingOff },
            );
        }
        if self.options.reverse_order {
            asked.iter().rev().for_each(|node| self.ask(node));
        } else {
            asked.iter().for_each(|node| self.ask(node));
        }
    }

    /// Whether a node is likely to answer soon.
    fn is_responsive(&mut self, node: usize, now: Moment) -> bool {
        let (unread_since, replied) = self.connections[node].unread_since(now);
        if replied {
            self.nodes[node].record_success();
        }
        match unread_since {
            // It has not answered what it was asked before.
            Some(since) if now.duration_since(since) > SLOW_NODE_TIMEOUT => {
                if !self.nodes[node].is_backing_off(now) {
                    self.nodes[node].record_failure(now);
                }
                false
            }
            // Whoever waits there already says how that goes, and not everybody has to spend a
            // thread on it.
            _ if !self.connections[node].is_connected()
                && self.nodes[node].is_connect_stalled(now, SLOW_NODE_TIMEOUT) =>
            {
                false
            }
            _ => !self.nodes[node].is_backing_off(now),
        }
    }

    fn ask(&mut self, node: usize) {
        if self.is_ready(node) {
            return self.send(node);
        }
        if self.nodes.len() == 1 && self.options.on_idle.is_none() {
            return self.connect_inline(node);
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

    fn connect_inline(&mut self, node: usize) {
        match self.nodes[node].connect(&mut self.connections[node], self.options.deadline) {
            Ok(()) => self.send(node),
            Err(failure) => self.record_failure(node, failure),
        }
    }

    /// Connects on a thread of its own, for it may take long, and others are waited for or watched
    /// meanwhile.
    fn connect_in_background(&mut self, node: usize) {
        let connector = match &self.connector {
            Some(connector) => connector,
            None => match Connector::new() {
                Ok(connector) => self.connector.insert(connector),
                Err(error) => return self.record_failure(node, NodeError::not_sent(error)),
            },
        };
        let place = self.connections[node].clone_unconnected();
        let link = mem::replace(&mut self.connections[node], place);
        match connector.connect(node, self.nodes[node].clone(), link, self.options.connect_by) {
            Ok(()) => {
                self.states[node] = NodeState::Connecting;
                self.responses.votes[node] = None;
            }
            // No thread is to be had. One node alone holds up nobody else.
            Err(_) if self.nodes.len() == 1 => self.connect_inline(node),
            Err(error) => self.record_failure(node, NodeError::not_sent(error)),
        }
    }

    fn send(&mut self, node: usize) {
        let request = (self.request)(node);
        let link = &mut self.connections[node];
        // An answer that nobody waits for must not be that the script is not known; so where
        // answers may be left behind, each connection brings the text first.
        let alone = self.nodes.len() == 1;
        let taught = request.script().is_none_or(|script| link.mark_script_loaded(script.mask));
        let by = if alone || taught { ScriptRef::Hash } else { ScriptRef::Source };
        match self.nodes[node].send(link, &request, by, self.options.deadline) {
            Ok(pending) => {
                self.states[node] = NodeState::Sent(request, by, pending);
                self.responses.by_node[node] = Response::Pending;
                self.responses.votes[node] = None;
            }
            Err(failure) => self.record_failure(node, failure),
        }
    }

    /// Takes answers until it is decided.
    fn collect_replies(&mut self) {
        let (mut deadline, mut decided) =
            (self.options.wait_until.min(self.options.deadline), false);
        loop {
            deadline = self.ask_backed_off(deadline);
            let unanswered = self.unanswered();
            if unanswered.is_empty() {
                return;
            }
            if self.nodes.len() == 1 && self.options.on_idle.is_none() {
                // Nobody else is waited for, so its answer decides.
                self.read_reply(0, deadline);
                if self.unanswered().is_empty() || clock::now() >= deadline {
                    return;
                }
                continue;
            }
            let now = clock::now();
            if !decided && !self.options.wait_for_all && self.is_decided() {
                decided = true;
                let grace = if self.awaits_preferred() {
                    self.options.straggler_grace.max(PREFERRED_GRACE)
                } else {
                    self.options.straggler_grace
                };
                deadline = deadline.min(now.saturating_add(grace));
            }
            if decided && self.options.straggler_grace.is_zero() && !self.awaits_preferred() {
                return;
            }
            let until = match &mut self.options.on_idle {
                None => deadline,
                Some(meanwhile) => match meanwhile(now) {
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

    /// Those that were left out are asked after all, once the others do not suffice: they may be
    /// well again. Not where a connection broke that was there, which whoever asks makes anew
    /// at once. Says until when to wait: they may be silent, and to ask everybody again must be
    /// possible afterwards.
    fn ask_backed_off(&mut self, until: Moment) -> Moment {
        let now = clock::now();
        if self.options.will_retry || self.responses.verdict() != Verdict::NoQuorum || now >= until
        {
            return until;
        }
        let is_backing_off = |slip: &Response<_>| {
            matches!(slip, Response::Failed(NodeError { kind: NodeErrorKind::BackingOff, .. }))
        };
        let is_broken = |slip: &Response<_>| {
            matches!(slip, Response::Failed(NodeError { outcome_unknown: true, .. }))
        };
        let backed_off = self.responses.nodes_where(is_backing_off).difference(self.unanswered());
        if backed_off.is_empty() || !self.responses.nodes_where(is_broken).is_empty() {
            return until;
        }
        backed_off.iter().for_each(|node| self.ask(node));
        now.saturating_add(until.duration_since(now) / 2)
    }

    fn is_decided(&self) -> bool {
        match self.responses.verdict() {
            Verdict::Granted | Verdict::Rejected => true,
            Verdict::NoQuorum => !self.options.will_retry,
            Verdict::Pending => false,
        }
    }

    fn awaits_preferred(&self) -> bool {
        // Nodes that are being connected to are worth a moment: otherwise the first locks would be
        // on few nodes.
        self.connector.is_some()
            && self.states.iter().any(|state| matches!(state, NodeState::Connecting))
            || self
                .options
                .preferred
                .iter()
                .any(|node| self.responses.votes.get(node) == Some(&None))
    }

    /// The nodes whose answers are out.
    fn unanswered(&self) -> NodeSet {
        let is_unanswered = |state: &NodeState<C>| !matches!(state, NodeState::Idle);
        self.states
            .iter()
            .enumerate()
            .filter(|(_, state)| is_unanswered(state))
            .map(|(node, _)| node)
            .collect()
    }

    /// Waits for answers of these nodes, and takes them; false if there were none.
    fn poll_replies(&mut self, unanswered: NodeSet, until: Moment) -> bool {
        let mut nodes = unanswered.iter();
        if let (Some(node), None) = (nodes.next(), nodes.next())
            && self.connector.is_none()
        {
            return self.read_reply(node, until);
        }
        // Whoever has just connected, or failed to, may have decided it.
        if self.ask_connected() {
            return true;
        }
        let mut any = false;
        for node in self.wait_readable(unanswered, until).iter() {
            any |= self.read_reply(node, clock::now());
        }
        any
    }

    /// Takes the answer of a node if it comes in time.
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
        let NodeState::Sent(request, by, pending) =
            mem::replace(&mut self.states[node], NodeState::Idle)
        else {
            return true;
        };
        match self.nodes[node].decode(&mut self.connections[node], &request, pending, value) {
            Ok(answer) => {
                self.nodes[node].record_success();
                self.responses.votes[node] = Some((self.vote)(node, &answer));
                self.responses.by_node[node] = Response::Replied(answer);
            }
            Err(failure) if by == ScriptRef::Hash && failure.is_unknown_script() => {
                match self.nodes[node].send(
                    &mut self.connections[node],
                    &request,
                    ScriptRef::Source,
                    self.options.deadline,
                ) {
                    Ok(pending) => {
                        self.states[node] = NodeState::Sent(request, ScriptRef::Source, pending)
                    }
                    Err(failure) => self.record_failure(node, failure),
                }
            }
            Err(failure) if failure.is_unknown_script() => {
                self.connections[node].poison();
                self.record_failure(
                    node,
                    NodeError::outcome_unknown(NodeErrorKind::Protocol(
                        "it forgot a script that it was given".into(),
                    )),
                );
            }
            Err(failure) => self.record_failure(node, failure),
        }
        true
    }

    /// Asks those that are connected by now.
    fn ask_connected(&mut self) -> bool {
        let connected = self.connector.as_mut().map(Connector::take_connected).unwrap_or_default();
        let any = !connected.is_empty();
        for Connected { node, connection: link, outcome } in connected {
            self.connections[node] = link;
            self.states[node] = NodeState::Idle;
            match outcome {
                Ok(()) => self.send(node),
                Err(failure) => self.record_failure(node, failure),
            }
        }
        any
    }

    /// Waits until one of these has something to read, or somebody has connected.
    fn wait_readable(&mut self, unanswered: NodeSet, until: Moment) -> NodeSet {
        let sent =
            unanswered.iter().filter(|node| matches!(self.states[*node], NodeState::Sent(..)));
        let mut sockets: SmallVec<[&Socket; 8]> = SmallVec::new();
        let mut listed: SmallVec<[usize; 8]> = SmallVec::new();
        let mut spin = Duration::MAX;
        for node in sent {
            if let Some(socket) = self.connections[node].socket() {
                sockets.push(socket);
                listed.push(node);
                spin = spin.min(self.connections[node].spin_time());
            }
        }
        if let Some(connector) = &self.connector {
            sockets.push(&connector.wakeup_rx);
            spin = Duration::ZERO;
        }
        // An error or an end shows when it is read.
        let ready = Socket::poll_readable(&sockets, until, spin);
        listed.into_iter().zip(ready).filter(|(_, ready)| *ready).map(|(node, _)| node).collect()
    }

    fn record_failure(&mut self, node: usize, failure: NodeError) {
        if failure.is_wrong_type() {
            self.nodes[node].record_success();
        } else if self.nodes.len() > 1 && !matches!(failure.kind, NodeErrorKind::BackingOff) {
            self.nodes[node].record_failure(clock::now());
        }
        self.set_failed(node, failure);
    }

    fn set_failed(&mut self, node: usize, failure: NodeError) {
        self.responses.by_node[node] = Response::Failed(failure);
        self.responses.votes[node] = Some(Vote::Unknown);
    }

    /// What has not answered keeps its connection if the time was not over: the next request over
    /// it is carried out in its turn. Else there is doubt, and the connection is closed.
    fn finish(mut self) -> Responses<C::Reply> {
        let unanswered = self.unanswered();
        let deadline_passed = !unanswered.is_empty() && clock::now() >= self.options.deadline;
        for node in unanswered.iter() {
            match &self.states[node] {
                NodeState::Sent(..) if deadline_passed => {
                    self.connections[node].poison();
                    self.record_failure(node, NodeError::outcome_unknown(NodeErrorKind::TimedOut));
                }
                NodeState::Sent(..) => {
                    let receipt = self.connections[node].abandon_reply();
                    self.responses.pending_acks.extend(receipt.map(|receipt| (node, receipt)));
                }
                // The thread keeps the connection for the next one, or says itself that it has
                // failed.
                NodeState::Connecting => self.set_failed(
                    node,
                    NodeError { outcome_unknown: false, kind: NodeErrorKind::TimedOut },
                ),
                NodeState::Idle => {}
            }
        }
        self.responses
    }
}
