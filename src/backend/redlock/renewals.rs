//! `QuorumRenewals`: renews leases on all nodes, and repairs them where a node does not keep the
//! lock.
//!
//! A renewal does not wait for a node that replies long after the others, unless a lock depends on
//! its reply: a distant node may still keep a lock that a nearby one has lost.

mod credit_replies;
mod reacquire;
mod tally;

use std::{cell::RefCell, sync::Arc, time::Duration};

use crossbeam_channel::{Receiver, Sender, unbounded};

use self::{
    credit_replies::{credit, late_reader, unless_own},
    tally::{Tally, needed_nodes},
};
use super::{BroadcastOptions, NodeConnections, Redlock, Response, Responses};
use crate::{
    backend::{
        LeaseRenewals, LeaseResidue, Renewal, RenewalLimits, RenewalReport,
        error::BackendError,
        redis::{
            Exchange, InFlightRequest, Info, LateReader, NodeError, NodeErrorKind, Request,
            renewals::{connect_by, refusal_of_one_lock, renewal_request, renewal_timeout},
            requests::{Renew, RenewReply},
        },
    },
    core::{
        lease::Lease,
        node_reply::Vote,
        quorum::{NodeSet, Verdict},
    },
    sys::clock::{self, Moment},
};

/// Maximum wait for the remaining nodes once a quorum has replied to a renewal.
const STRAGGLER_GRACE_MAX: Duration = Duration::from_millis(50);

pub(super) struct QuorumRenewals {
    redlock: Arc<Redlock>,
    /// Open when they are first used.
    connections: NodeConnections,
    /// Locks to re-acquire. Late replies add to it when they are read.
    missing: (Sender<MissingOn>, Receiver<MissingOn>),
    /// A repair has begun since the last renewal.
    has_repaired: bool,
    /// Nodes that were needed and did not reply, since the last repair. Later renewals do not wait
    /// for them.
    unresponsive: NodeSet,
}

/// A lease, and nodes on which nobody holds its lock.
type MissingOn = (Arc<Lease>, NodeSet);

impl LeaseRenewals for QuorumRenewals {
    fn renew(&mut self, leases: &[&Arc<Lease>], mut limits: RenewalLimits<'_>) -> RenewalReport {
        let timeout = renewal_timeout(&limits, self.redlock.operation_timeout());
        let deadline = clock::now().saturating_add(timeout);
        if std::mem::take(&mut self.has_repaired) {
            self.forget_missing();
            self.unresponsive = NodeSet::EMPTY;
        }
        let (now, least_left) = (clock::now(), limits.least_left);
        let (redlock, missing) = (self.redlock.clone(), self.missing.0.clone());
        let excluded = leases.iter().map(|lease| lease.node_deadlines.lock().excluded());
        let tallies: RefCell<Vec<_>> = RefCell::new(excluded.map(Tally::new).collect());
        let on_reply = |node: usize, exchange: &Exchange<Vec<RenewReply>>| {
            let votes = redlock.votes_at(node, exchange.sent);
            let mut tallies = tallies.borrow_mut();
            let replies = leases.iter().zip(tallies.iter_mut()).zip(&exchange.reply);
            for ((lease, tally), reply) in replies {
                let reply = unless_own(lease, reply);
                tally.add(node, exchange.sent, reply, votes);
                credit(lease, node, exchange.sent, reply, votes);
            }
            Vote::Yes
        };
        let late_reader = |node: usize, in_flight: InFlightRequest| -> LateReader {
            let leases = leases.iter().copied().cloned().collect();
            late_reader(redlock.clone(), leases, missing.clone(), now, node, in_flight)
        };
        let unresponsive = self.unresponsive;
        let needed = |silent: NodeSet| {
            // A lock that was released meanwhile needs no confirmation.
            let tallies = tallies.borrow();
            let held =
                leases.iter().zip(tallies.iter()).filter(|(lease, _)| lease.deadline() > now);
            let held = held.map(|(_, tally)| tally);
            needed_nodes(redlock.len(), silent.difference(unresponsive), held)
        };
        let round = BroadcastOptions {
            // Stragglers must not delay a renewal that a quorum has confirmed.
            straggler_grace: STRAGGLER_GRACE_MAX.min(least_left / 4),
            needed: Some(&needed),
            needed_wait: (least_left / 4).min(redlock.operation_timeout() / 2),
            late_reader: Some(&late_reader),
            ..BroadcastOptions::new(redlock.all_nodes(), deadline)
        };
        let renewals: Vec<_> = leases.iter().map(|lease| renewal_request(lease, now)).collect();
        let responses = self.ask(round, &mut limits, |_| Renew(&renewals), on_reply);
        let quorum = responses.verdict() == Verdict::Granted;
        if quorum {
            let replied = responses.nodes_voting(Vote::Yes);
            let silent = redlock.all_nodes().difference(replied);
            self.unresponsive = unresponsive.union(needed(silent));
        }
        let results = leases.iter().zip(tallies.into_inner());
        let renewals = results.map(|(lease, tally)| {
            if !tally.missing.is_empty() {
                let _ = missing.send(((*lease).clone(), tally.missing));
            }
            self.conclude(lease, tally)
        });
        let renewals: Vec<_> = renewals.collect();
        if quorum {
            let is_unconfirmed = |renewal: &Renewal| matches!(renewal, Renewal::Unconfirmed { .. });
            let too_few = renewals.iter().position(is_unconfirmed);
            let too_few = too_few.map(|at| self.too_few(at, responses));
            let (failure, refusal, timed_out) = (None, None, false);
            return RenewalReport { renewals, failure, too_few, refusal, timed_out };
        }
        let refusal = responses.by_node.iter().find_map(|response| match response {
            Response::Failed(failure) => refusal_of_one_lock(failure),
            _ => None,
        });
        let timed_out = !responses.timed_out().intersection(responses.outcome_unknown()).is_empty();
        let failure = BackendError::from_responses(&redlock, responses, |_| "renewed".into());
        RenewalReport { renewals, failure: Some(failure), too_few: None, refusal, timed_out }
    }

    fn repair(&mut self, mut limits: RenewalLimits<'_>) -> Option<Vec<LeaseResidue>> {
        self.has_repaired = true;
        let (lease, nodes) = self.missing.1.try_recv().ok()?;
        Some(self.reacquire(&lease, nodes, &mut limits))
    }

    /// A node that cannot be reached is reported when connecting to it fails.
    fn probe(&mut self, mut limits: RenewalLimits<'_>) {
        let deadline = clock::now().saturating_add(self.redlock.operation_timeout());
        let round = BroadcastOptions::awaiting_all(self.redlock.all_nodes(), deadline);
        let responses = self.ask(round, &mut limits, |_| Info, |_, _| Vote::Yes);
        for (node, response) in responses.by_node.into_iter().enumerate() {
            if let Response::Replied(Exchange { sent, reply, .. }) = response
                && let Some(info) = reply.server_info(sent)
            {
                // The node reports why its server must not vote when it is asked next.
                let connection = &mut self.connections.0[node];
                let _ = self.redlock.node(node).check_server(connection, &info);
            }
        }
    }

    fn reset(&mut self) {
        self.connections = self.redlock.reserved_connections();
    }
}

impl QuorumRenewals {
    pub(super) fn new(redlock: Arc<Redlock>) -> QuorumRenewals {
        QuorumRenewals {
            connections: redlock.reserved_connections(),
            redlock,
            missing: unbounded(),
            has_repaired: false,
            unresponsive: NodeSet::EMPTY,
        }
    }

    fn votes_at(&self, node: usize, sent: Moment) -> bool {
        self.redlock.votes_at(node, sent)
    }

    /// Forgets which nodes lack a lock. The next renewal finds them.
    fn forget_missing(&mut self) {
        self.missing.1.try_iter().for_each(drop);
    }

    /// Sends a request over these connections and collects the replies.
    fn ask<C: Request>(
        &mut self,
        round: BroadcastOptions<'_>,
        limits: &mut RenewalLimits<'_>,
        request: impl Fn(usize) -> C,
        vote: impl Fn(usize, &Exchange<C::Reply>) -> Vote,
    ) -> Responses<C::Reply> {
        let QuorumRenewals { redlock, connections, .. } = self;
        let deadline = round.deadline.min(limits.stop_by);
        let connect_by = connect_by(clock::now(), deadline, limits, redlock.operation_timeout());
        let mut stopped = false;
        let mut check = |now| {
            let next = (limits.check)(now);
            stopped = next.is_none();
            next
        };
        let on_idle = Some(&mut check as &mut dyn FnMut(Moment) -> Option<Moment>);
        let round = BroadcastOptions { deadline, connect_by, on_idle, ..round };
        let mut responses = redlock.ask(connections, round, request, vote);
        if stopped {
            // Close these connections: the next exchange must not wait for the same nodes.
            for node in responses.unanswered().iter() {
                connections.0[node].poison();
                responses.by_node[node] =
                    Response::Failed(NodeError::outcome_unknown(NodeErrorKind::TimedOut));
            }
        }
        responses
    }

    /// Why too few nodes confirmed the lease at this place of the request.
    fn too_few(&self, at: usize, mut responses: Responses<Vec<RenewReply>>) -> BackendError {
        for (node, response) in responses.by_node.iter().enumerate() {
            if let Response::Replied(exchange) = response
                && !self.votes_at(node, exchange.sent)
            {
                responses.votes[node] = Some(Vote::Unknown);
            }
        }
        BackendError::from_responses(&self.redlock, responses, |replies| match replies.get(at) {
            Some(RenewReply::Renewed) => "renewed".into(),
            _ => "does not keep the lock".into(),
        })
    }

    /// What the replies amount to for one lease.
    fn conclude(&self, lease: &Lease, tally: Tally) -> Renewal {
        let valid_until = lease.node_deadlines.lock().valid_until();
        match valid_until {
            // A minority of nodes may still keep the lock.
            None => Renewal::Lost { why: tally.loss, leaves_residue: true },
            // Lost on a node that the quorum could not do without, because others never confirmed.
            Some(until) if tally.reports_loss() && is_ended_by(until, lease) => {
                Renewal::Lost { why: tally.loss, leaves_residue: true }
            }
            Some(until) if tally.confirmed.len() >= self.redlock.quorum_size() => {
                Renewal::Confirmed { until, sent: tally.first_sent }
            }
            Some(until) => Renewal::Unconfirmed { until },
        }
    }
}

/// Whether a lease that was valid until now ends because it is valid until `until` only.
fn is_ended_by(until: Moment, lease: &Lease) -> bool {
    let now = clock::now();
    until <= now && now < lease.deadline()
}

impl Redlock {
    /// A node in quarantine renews too, but its confirmation does not count.
    pub(super) fn votes_at(&self, node: usize, sent: Moment) -> bool {
        self.node(node).quarantine_left(sent).is_none()
    }
}
