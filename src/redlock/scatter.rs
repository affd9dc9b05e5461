//! Asking several nodes at once, from the calling thread: write to every node, then collect, until it is decided or the
//! time is over. With one node this is a request and its answer.

use std::{mem, sync::Arc, time::Duration};

use smallvec::SmallVec;

use super::{
    ballot::{Ballot, Slip, Unheard},
    greeter::{Arrival, Greeter},
    quorum::{NodeSet, Verdict, Vote, quorum},
};
use crate::{
    clock::{self, Moment},
    node::{Answer, By, Call, Connection, Failure, Pending, Reason, RedisNode, Socket},
};

/// A node that has owed an answer for this long, or has kept those who connect to it waiting, is not asked for more where the
/// others suffice.
const STALL: Duration = Duration::from_millis(100);

/// How much longer than the others a node may take whose word is wanted.
const EAR_GRACE: Duration = Duration::from_millis(20);

/// What bounds one asking of the nodes.
pub(crate) struct Round<'a> {
    pub(crate) to: NodeSet,
    /// When what was asked becomes void, and a connection that has not answered is closed.
    pub(crate) deadline: Moment,
    pub(crate) wait_until: Moment,
    /// A connection that is made has to be there by then; one that comes after the deadline is for whoever asks next.
    pub(crate) connect_by: Moment,
    /// How long to wait for the rest once it is decided.
    pub(crate) grace: Duration,
    /// Everybody's answer is wanted, whatever the verdict.
    pub(crate) all: bool,
    /// Who fails is asked again: that too many have is no verdict.
    pub(crate) retried: bool,
    /// How those voted before who are not asked again, if there was a round before this one.
    pub(crate) before: SmallVec<[Option<Vote>; 8]>,
    /// These nodes' answers are wanted, if they come soon.
    pub(crate) ears: NodeSet,
    /// The last node first.
    pub(crate) backwards: bool,
    /// Called while answers are out; says when it wants to be called again, or that nobody waits any more.
    pub(crate) meanwhile: Option<&'a mut dyn FnMut(Moment) -> Option<Moment>>,
}

impl Round<'_> {
    pub(crate) fn new(to: NodeSet, deadline: Moment) -> Round<'static> {
        Round {
            to,
            deadline,
            wait_until: deadline,
            connect_by: deadline,
            grace: Duration::ZERO,
            all: false,
            retried: false,
            before: SmallVec::new(),
            ears: NodeSet::NONE,
            backwards: false,
            meanwhile: None,
        }
    }

    pub(crate) fn all(to: NodeSet, deadline: Moment) -> Round<'static> {
        Round { all: true, ..Round::new(to, deadline) }
    }
}

/// Asks `round.to` what `call` makes for each node, and counts what `vote` makes of each answer. Ends when the verdict is
/// certain, all have answered, or the time is over. Nodes that failed a short time ago are left out as long as the others
/// suffice.
pub(crate) fn scatter<C: Call>(
    nodes: &[Arc<RedisNode>],
    links: &mut [Connection],
    round: Round<'_>,
    call: impl Fn(usize) -> C,
    vote: impl Fn(usize, &Answer<C::Reply>) -> Vote,
) -> Ballot<C::Reply> {
    let unasked = |node: usize| round.before.get(node).copied().flatten().filter(|_| !round.to.has(node));
    let votes = (0..nodes.len()).map(|node| Some(unasked(node).unwrap_or(Vote::Unknown))).collect();
    let mut asking = Asking {
        nodes,
        links,
        round,
        states: nodes.iter().map(|_| State::Idle).collect(),
        ballot: Ballot { slips: nodes.iter().map(|_| Slip::NotAsked).collect(), votes, receipts: Unheard::new() },
        call,
        vote,
        greeter: None,
    };
    asking.begin();
    asking.collect();
    asking.end()
}

/// Where the asking of one node stands.
enum State<C> {
    Idle,
    /// A thread connects to it.
    Connecting,
    Sent(C, By, Pending),
}

struct Asking<'a, 'r, C: Call, F, V> {
    nodes: &'a [Arc<RedisNode>],
    links: &'a mut [Connection],
    round: Round<'r>,
    states: SmallVec<[State<C>; 1]>,
    ballot: Ballot<C::Reply>,
    call: F,
    vote: V,
    greeter: Option<Greeter>,
}

impl<C: Call, F: Fn(usize) -> C, V: Fn(usize, &Answer<C::Reply>) -> Vote> Asking<'_, '_, C, F, V> {
    fn begin(&mut self) {
        if self.nodes.len() == 1 {
            return self.ask(0);
        }
        let now = clock::now();
        let awake: NodeSet = self.round.to.iter().filter(|node| self.is_awake(*node, now)).collect();
        let enough = quorum(self.nodes.len()).min(self.round.to.len());
        let asked = if awake.len() >= enough && !self.round.all { awake } else { self.round.to };
        for node in self.round.to.without(asked).iter() {
            self.failed(node, Failure { sent: false, reason: Reason::Resting });
        }
        if self.round.backwards {
            asked.iter().rev().for_each(|node| self.ask(node));
        } else {
            asked.iter().for_each(|node| self.ask(node));
        }
    }

    /// Whether a node is likely to answer soon.
    fn is_awake(&mut self, node: usize, now: Moment) -> bool {
        let (owes_since, heard) = self.links[node].owes_since(now);
        if heard {
            self.nodes[node].answered();
        }
        match owes_since {
            // It has not answered what it was asked before.
            Some(since) if now.after(since) > STALL => {
                if !self.nodes[node].rests(now) {
                    self.nodes[node].failed(now);
                }
                false
            }
            // Whoever waits there already says how that goes, and not everybody has to spend a thread on it.
            _ if !self.links[node].is_connected() && self.nodes[node].keeps_outside(now, STALL) => false,
            _ => !self.nodes[node].rests(now),
        }
    }

    fn ask(&mut self, node: usize) {
        if self.is_ready(node) {
            return self.send(node);
        }
        if self.nodes.len() == 1 && self.round.meanwhile.is_none() {
            return self.connect_here(node);
        }
        if let Some(spare) = self.nodes[node].take_spare() {
            self.links[node] = spare;
        }
        if self.is_ready(node) { self.send(node) } else { self.connect(node) }
    }

    fn is_ready(&mut self, node: usize) -> bool {
        self.nodes[node].leave_former(&mut self.links[node]);
        self.links[node].is_ready()
    }

    fn connect_here(&mut self, node: usize) {
        match self.nodes[node].connect(&mut self.links[node], self.round.deadline) {
            Ok(()) => self.send(node),
            Err(failure) => self.failed(node, failure),
        }
    }

    /// Connects on a thread of its own, for it may take long, and others are waited for or watched meanwhile.
    fn connect(&mut self, node: usize) {
        let greeter = match &self.greeter {
            Some(greeter) => greeter,
            None => match Greeter::new() {
                Ok(greeter) => self.greeter.insert(greeter),
                Err(error) => return self.failed(node, Failure::not_sent(error)),
            },
        };
        let place = self.links[node].unconnected_twin();
        let link = mem::replace(&mut self.links[node], place);
        match greeter.greet(node, self.nodes[node].clone(), link, self.round.connect_by) {
            Ok(()) => {
                self.states[node] = State::Connecting;
                self.ballot.votes[node] = None;
            }
            // No thread is to be had. One node alone holds up nobody else.
            Err(_) if self.nodes.len() == 1 => self.connect_here(node),
            Err(error) => self.failed(node, Failure::not_sent(error)),
        }
    }

    fn send(&mut self, node: usize) {
        let call = (self.call)(node);
        let link = &mut self.links[node];
        // An answer that nobody waits for must not be that the script is not known; so where answers may be left behind,
        // each connection brings the text first.
        let alone = self.nodes.len() == 1;
        let taught = call.script().is_none_or(|script| link.teach(script.bit));
        let by = if alone || taught { By::Hash } else { By::Text };
        match self.nodes[node].send(link, &call, by, self.round.deadline) {
            Ok(pending) => {
                self.states[node] = State::Sent(call, by, pending);
                self.ballot.slips[node] = Slip::Open;
                self.ballot.votes[node] = None;
            }
            Err(failure) => self.failed(node, failure),
        }
    }

    /// Takes answers until it is decided.
    fn collect(&mut self) {
        let (mut deadline, mut decided) = (self.round.wait_until.min(self.round.deadline), false);
        loop {
            deadline = self.ask_who_rests(deadline);
            let open = self.open();
            if open.is_empty() {
                return;
            }
            if self.nodes.len() == 1 && self.round.meanwhile.is_none() {
                // Nobody else is waited for, so its answer decides.
                self.take(0, deadline);
                if self.open().is_empty() || clock::now() >= deadline {
                    return;
                }
                continue;
            }
            let now = clock::now();
            if !decided && !self.round.all && self.is_decided() {
                decided = true;
                let grace = if self.waits_for_ears() { self.round.grace.max(EAR_GRACE) } else { self.round.grace };
                deadline = deadline.min(now.saturating_add(grace));
            }
            if decided && self.round.grace.is_zero() && !self.waits_for_ears() {
                return;
            }
            let until = match &mut self.round.meanwhile {
                None => deadline,
                Some(meanwhile) => match meanwhile(now) {
                    Some(next) => next.min(deadline),
                    None => return,
                },
            };
            let heard = self.hear(open, until);
            if !heard && clock::now() >= deadline {
                return;
            }
        }
    }

    /// Those that were left out are asked after all, once the others do not suffice: they may be well again. Not where a
    /// connection broke that was there, which whoever asks makes anew at once. Says until when to wait: they may be silent,
    /// and to ask everybody again must be possible afterwards.
    fn ask_who_rests(&mut self, until: Moment) -> Moment {
        let now = clock::now();
        if self.round.retried || self.ballot.verdict() != Verdict::Unreachable || now >= until {
            return until;
        }
        let rests = |slip: &Slip<_>| matches!(slip, Slip::Failed(Failure { reason: Reason::Resting, .. }));
        let broke = |slip: &Slip<_>| matches!(slip, Slip::Failed(Failure { sent: true, .. }));
        let resting = self.ballot.nodes_where(rests).without(self.open());
        if resting.is_empty() || !self.ballot.nodes_where(broke).is_empty() {
            return until;
        }
        resting.iter().for_each(|node| self.ask(node));
        now.saturating_add(until.after(now) / 2)
    }

    fn is_decided(&self) -> bool {
        match self.ballot.verdict() {
            Verdict::Won | Verdict::Lost => true,
            Verdict::Unreachable => !self.round.retried,
            Verdict::Open => false,
        }
    }

    fn waits_for_ears(&self) -> bool {
        // Nodes that are being connected to are worth a moment: otherwise the first locks would be on few nodes.
        self.greeter.is_some() && self.states.iter().any(|state| matches!(state, State::Connecting))
            || self.round.ears.iter().any(|node| self.ballot.votes.get(node) == Some(&None))
    }

    /// The nodes whose answers are out.
    fn open(&self) -> NodeSet {
        let open = |state: &State<C>| !matches!(state, State::Idle);
        self.states.iter().enumerate().filter(|(_, state)| open(state)).map(|(node, _)| node).collect()
    }

    /// Waits for answers of these nodes, and takes them; false if there were none.
    fn hear(&mut self, open: NodeSet, until: Moment) -> bool {
        let mut nodes = open.iter();
        if let (Some(node), None) = (nodes.next(), nodes.next())
            && self.greeter.is_none()
        {
            return self.take(node, until);
        }
        // Whoever has just connected, or failed to, may have decided it.
        if self.take_connected() {
            return true;
        }
        let mut heard = false;
        for node in self.readable(open, until).iter() {
            heard |= self.take(node, clock::now());
        }
        heard
    }

    /// Takes the answer of a node if it comes in time.
    fn take(&mut self, node: usize, until: Moment) -> bool {
        let value = match self.links[node].receive_until(until) {
            Ok(None) => return false,
            Ok(Some(value)) => value,
            Err(failure) => {
                self.states[node] = State::Idle;
                self.failed(node, failure);
                return true;
            }
        };
        let State::Sent(call, by, pending) = mem::replace(&mut self.states[node], State::Idle) else { return true };
        match self.nodes[node].settle(&mut self.links[node], &call, pending, value) {
            Ok(answer) => {
                self.nodes[node].answered();
                self.ballot.votes[node] = Some((self.vote)(node, &answer));
                self.ballot.slips[node] = Slip::Said(answer);
            }
            Err(failure) if by == By::Hash && failure.is_unknown_script() => {
                match self.nodes[node].send(&mut self.links[node], &call, By::Text, self.round.deadline) {
                    Ok(pending) => self.states[node] = State::Sent(call, By::Text, pending),
                    Err(failure) => self.failed(node, failure),
                }
            }
            Err(failure) if failure.is_unknown_script() => {
                self.links[node].poison();
                self.failed(node, Failure::unclear(Reason::Garbled("it forgot a script that it was given".into())));
            }
            Err(failure) => self.failed(node, failure),
        }
        true
    }

    /// Asks those that are connected by now.
    fn take_connected(&mut self) -> bool {
        let arrived = self.greeter.as_mut().map(Greeter::arrived).unwrap_or_default();
        let some = !arrived.is_empty();
        for Arrival { node, link, outcome } in arrived {
            self.links[node] = link;
            self.states[node] = State::Idle;
            match outcome {
                Ok(()) => self.send(node),
                Err(failure) => self.failed(node, failure),
            }
        }
        some
    }

    /// Waits until one of these has something to read, or somebody has connected.
    fn readable(&mut self, open: NodeSet, until: Moment) -> NodeSet {
        let sent = open.iter().filter(|node| matches!(self.states[*node], State::Sent(..)));
        let mut sockets: SmallVec<[&Socket; 8]> = SmallVec::new();
        let mut listed: SmallVec<[usize; 8]> = SmallVec::new();
        let mut spin = Duration::MAX;
        for node in sent {
            if let Some(socket) = self.links[node].socket() {
                sockets.push(socket);
                listed.push(node);
                spin = spin.min(self.links[node].spin());
            }
        }
        if let Some(greeter) = &self.greeter {
            sockets.push(&greeter.bell);
            spin = Duration::ZERO;
        }
        // An error or an end shows when it is read.
        let ready = Socket::await_any(&sockets, until, spin);
        listed.into_iter().zip(ready).filter(|(_, ready)| *ready).map(|(node, _)| node).collect()
    }

    fn failed(&mut self, node: usize, failure: Failure) {
        if failure.is_about_a_key() {
            self.nodes[node].answered();
        } else if self.nodes.len() > 1 && !matches!(failure.reason, Reason::Resting) {
            self.nodes[node].failed(clock::now());
        }
        self.fails(node, failure);
    }

    fn fails(&mut self, node: usize, failure: Failure) {
        self.ballot.slips[node] = Slip::Failed(failure);
        self.ballot.votes[node] = Some(Vote::Unknown);
    }

    /// What has not answered keeps its connection if the time was not over: the next request over it is carried out in
    /// its turn. Else there is doubt, and the connection is closed.
    fn end(mut self) -> Ballot<C::Reply> {
        let open = self.open();
        let over = !open.is_empty() && clock::now() >= self.round.deadline;
        for node in open.iter() {
            match &self.states[node] {
                State::Sent(..) if over => {
                    self.links[node].poison();
                    self.failed(node, Failure::unclear(Reason::TimedOut));
                }
                State::Sent(..) => {
                    let receipt = self.links[node].leave_unanswered();
                    self.ballot.receipts.extend(receipt.map(|receipt| (node, receipt)));
                }
                // The thread keeps the connection for the next one, or says itself that it has failed.
                State::Connecting => self.fails(node, Failure { sent: false, reason: Reason::TimedOut }),
                State::Idle => {}
            }
        }
        self.ballot
    }
}
