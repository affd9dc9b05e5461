//! `QuorumRenewals`: renews leases on all nodes, and repairs them where a node does not keep the
//! lock.
//!
//! Renewals do not wait for a node that replies long after the others, unless a lock depends on its
//! reply: a distant node may still keep a lock that a nearby one has lost.

mod reacquire;
mod tally;

use std::{collections::VecDeque, mem, sync::Arc, time::Duration};

use self::tally::{Tally, awaited_nodes};
use super::{BroadcastOptions, NodeConnections, Redlock, Response, Responses};
use crate::{
    backend::{
        LeaseRenewals, LeaseResidue, Renewal, RenewalLimits, RenewalReport,
        error::BackendError,
        redis::{
            NodeError, NodeErrorKind, Request,
            renewals::{connect_by, refusal_of_one_lock, renewal_request, renewal_timeout},
            requests_and_replies::{Renew, RenewReply, Renewal as RenewalRequest},
        },
    },
    core::{
        lease::Lease,
        node_answer::Vote,
        quorum::{NodeSet, Verdict},
        validity::deadline_from_sent,
    },
    sys::clock::{self, Moment},
};

/// Maximum wait for the remaining nodes once a quorum has replied to a renewal.
const STRAGGLER_GRACE_MAX: Duration = Duration::from_millis(50);
/// Maximum wait for slow nodes; enough for a slow connection. Renewals that fall due meanwhile wait
/// too, unless their leases have less time to spare.
const LISTEN_MAX: Duration = Duration::from_millis(250);
/// At most one part in this many of the renewer's time is spent on slow nodes, however many locks
/// there are.
const LISTEN_SHARE: u32 = 10;
/// Maximum number of leases about which slow nodes are asked at once.
const LISTEN_BATCH_MAX: usize = 100;

pub(super) struct QuorumRenewals {
    redlock: Arc<Redlock>,
    /// Open when they are first used.
    connections: NodeConnections,
    pass: Pass,
    /// Earliest time of the next exchange with nodes that reply long after the others.
    listens_at: Moment,
}

/// What the renewals up to the next repair have found.
#[derive(Default)]
struct Pass {
    /// A repair has begun, so the next renewal begins a new pass.
    has_ended: bool,
    leases: Vec<Arc<Lease>>,
    /// Leases, and the nodes on which their locks must be re-acquired.
    missing: VecDeque<(Arc<Lease>, NodeSet)>,
    /// Nodes that had not replied when the quorum had, and were not awaited.
    stragglers: NodeSet,
    /// Nodes that were awaited and did not reply. Later renewals do not wait for them.
    unresponsive: NodeSet,
}

type RenewResponses = Responses<(u64, Vec<RenewReply>)>;

impl LeaseRenewals for QuorumRenewals {
    fn renew(&mut self, leases: &[&Arc<Lease>], mut limits: RenewalLimits<'_>) -> RenewalReport {
        if self.pass.has_ended {
            self.pass = Pass::default();
        }
        let now = clock::now();
        let timeout = renewal_timeout(&limits, self.redlock.operation_timeout());
        let requests: Vec<_> = leases.iter().map(|lease| renewal_request(lease, now)).collect();
        let round = BroadcastOptions {
            // Stragglers must not delay a renewal that a quorum has confirmed.
            straggler_grace: STRAGGLER_GRACE_MAX.min(limits.least_left / 4),
            ..BroadcastOptions::new(self.redlock.all_nodes(), now.saturating_add(timeout))
        };
        let mut responses = self.ask(round, &mut limits, |_| Renew(&requests));
        self.hear_the_rest(leases, &requests, &mut limits, &mut responses);
        let quorum = responses.verdict() == Verdict::Granted;
        if quorum {
            let silent = responses.unanswered().difference(self.pass.unresponsive);
            self.pass.stragglers = self.pass.stragglers.union(silent);
            self.pass.leases.extend(leases.iter().copied().cloned());
        }
        let renewals = leases.iter().enumerate().map(|(index, lease)| {
            let (renewal, missing) = self.conclude(lease, &responses, index);
            if !missing.is_empty() {
                self.pass.missing.push_back(((*lease).clone(), missing));
            }
            renewal
        });
        let renewals = renewals.collect();
        if quorum {
            return RenewalReport { renewals, failure: None, refusal: None };
        }
        let refusal = responses.by_node.iter().find_map(|response| match response {
            Response::Failed(failure) => refusal_of_one_lock(failure),
            _ => None,
        });
        let failure = BackendError::from_responses(&self.redlock, responses, |_| "renewed".into());
        RenewalReport { renewals, failure: Some(failure), refusal }
    }

    fn repair(&mut self, mut limits: RenewalLimits<'_>) -> Option<Vec<LeaseResidue>> {
        self.pass.has_ended = true;
        if let Some((lease, nodes)) = self.pass.missing.pop_front() {
            return Some(self.reacquire(&lease, nodes, &mut limits));
        }
        let slow = mem::take(&mut self.pass.stragglers);
        self.listen_to(slow, &mut limits).then(Vec::new)
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
            pass: Pass::default(),
            listens_at: Moment::from_nanos(0),
        }
    }

    /// Sends a request over these connections and collects the replies.
    fn ask<C: Request>(
        &mut self,
        round: BroadcastOptions<'_>,
        limits: &mut RenewalLimits<'_>,
        request: impl Fn(usize) -> C,
    ) -> Responses<C::Reply> {
        let QuorumRenewals { redlock, connections, .. } = self;
        let (since, deadline) = (clock::now(), round.deadline.min(limits.stop_by));
        let connect_by = connect_by(since, deadline, limits, redlock.operation_timeout());
        let mut stopped = false;
        let mut check = |now| {
            let next = (limits.check)(now);
            stopped = next.is_none();
            next
        };
        let wait_until = round.wait_until.min(deadline);
        let on_idle = Some(&mut check as &mut dyn FnMut(Moment) -> Option<Moment>);
        let round = BroadcastOptions { deadline, wait_until, connect_by, on_idle, ..round };
        let mut responses = redlock.ask(connections, round, request, |_, _| Vote::Yes);
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

    /// What the nodes replied about the lock at `index` of a request.
    fn tally(&self, lease: &Lease, responses: &RenewResponses, index: usize) -> Tally {
        let mut tally = Tally::new(lease.node_deadlines.lock().excluded());
        for (node, response) in responses.by_node.iter().enumerate() {
            if let Response::Replied(exchange) = response
                && let Some(reply) = exchange.reply.1.get(index)
            {
                tally.add(node, exchange.sent, reply, self.votes_at(node, exchange.sent));
            }
        }
        tally
    }

    /// A node in quarantine renews too, but its confirmation does not count.
    fn votes_at(&self, node: usize, sent: Moment) -> bool {
        self.redlock.node(node).quarantine_left(sent).is_none()
    }

    /// Records what the nodes replied about one lock. Also returns the nodes on which it is
    /// missing.
    fn conclude(
        &self,
        lease: &Lease,
        responses: &RenewResponses,
        index: usize,
    ) -> (Renewal, NodeSet) {
        let tally = self.tally(lease, responses, index);
        let valid_until = {
            let mut deadlines = lease.node_deadlines.lock();
            for (node, sent) in &tally.confirmed {
                deadlines.confirm(*node, deadline_from_sent(*sent, lease.claim.ttl));
            }
            tally.lost.iter().for_each(|node| deadlines.revoke(node));
            deadlines.valid_until()
        };
        match valid_until {
            // A minority of nodes may still keep the lock.
            None => (Renewal::Lost { why: tally.loss, leaves_residue: true }, NodeSet::EMPTY),
            Some(until) if tally.confirmed.len() >= self.redlock.quorum_size() => {
                (Renewal::Confirmed { until, sent: tally.first_sent() }, tally.missing)
            }
            Some(until) => (Renewal::Unconfirmed { until }, tally.missing),
        }
    }

    /// Asks silent or skipped nodes again if a lock depends on their reply.
    fn hear_the_rest(
        &mut self,
        leases: &[&Arc<Lease>],
        requests: &[RenewalRequest<'_>],
        limits: &mut RenewalLimits<'_>,
        responses: &mut RenewResponses,
    ) {
        // Skipped because of back-off, or still connecting when the others had replied.
        let passed_over = |failure: &NodeError| {
            !failure.outcome_unknown
                && matches!(failure.kind, NodeErrorKind::BackingOff | NodeErrorKind::TimedOut)
        };
        let passed_over = responses.nodes_where(
            |response| matches!(response, Response::Failed(failure) if passed_over(failure)),
        );
        let silent = responses.unanswered().union(passed_over).difference(self.pass.unresponsive);
        if responses.verdict() != Verdict::Granted || silent.is_empty() {
            return;
        }
        // A lock that was released meanwhile needs no confirmation.
        let alive = leases.iter().enumerate().filter(|(_, lease)| lease.ended().is_none());
        let tallies = alive.map(|(index, lease)| self.tally(lease, responses, index));
        let to = awaited_nodes(self.redlock.len(), silent, tallies);
        if to.is_empty() {
            return;
        }
        let wait_max = (limits.least_left / 4).min(self.redlock.operation_timeout() / 2);
        let now = clock::now();
        let deadline = now.saturating_add(self.redlock.operation_timeout());
        let round = BroadcastOptions {
            wait_until: now.saturating_add(wait_max),
            ..BroadcastOptions::awaiting_all(to, deadline)
        };
        let mut heard = self.ask(round, limits, |_| Renew(requests));
        for node in to.iter() {
            mem::swap(&mut responses.by_node[node], &mut heard.by_node[node]);
            responses.votes[node] = heard.votes[node];
        }
        let replied = responses.nodes_where(|response| matches!(response, Response::Replied(_)));
        self.pass.unresponsive = self.pass.unresponsive.union(to.difference(replied));
    }

    /// Asks nodes that reply long after the others about locks for which they have not replied
    /// during a whole lease. Renewals do not wait for these nodes, but a lock that one of them has
    /// lost must be re-acquired there: otherwise the lock is lost as soon as the next node loses it
    /// too. Returns whether there is something to re-acquire now.
    ///
    /// A node that stays silent changes nothing, because the confirmations of the quorum have been
    /// applied before.
    fn listen_to(&mut self, slow: NodeSet, limits: &mut RenewalLimits<'_>) -> bool {
        let began = clock::now();
        // A node that does not vote yet is asked once it does.
        let slow: NodeSet = slow.iter().filter(|node| self.votes_at(*node, began)).collect();
        if slow.is_empty() || began < self.listens_at {
            return false;
        }
        let is_silent = |lease: &Arc<Lease>| {
            let deadlines = lease.node_deadlines.lock();
            slow.iter().any(|node| deadlines.has_lapsed(node, began))
        };
        let mut unheard = mem::take(&mut self.pass.leases);
        unheard.retain(is_silent);
        unheard.truncate(LISTEN_BATCH_MAX);
        if unheard.is_empty() {
            return false;
        }
        let requests: Vec<_> = unheard.iter().map(|lease| renewal_request(lease, began)).collect();
        // A reply between `wait_until` and the deadline does not cost the connection.
        let wait_until = began.saturating_add(LISTEN_MAX);
        let deadline = began.saturating_add(self.redlock.operation_timeout());
        let round =
            BroadcastOptions { wait_until, ..BroadcastOptions::awaiting_all(slow, deadline) };
        let responses = self.ask(round, limits, |_| Renew(&requests));
        let now = clock::now();
        self.listens_at = now.saturating_add(now.duration_since(began) * (LISTEN_SHARE - 1));
        for (index, lease) in unheard.iter().enumerate() {
            // The next renewal moves the deadline, and ends the lease if no quorum is left.
            let (_, missing) = self.conclude(lease, &responses, index);
            if !missing.is_empty() {
                self.pass.missing.push_back((lease.clone(), missing));
            }
        }
        !self.pass.missing.is_empty()
    }
}
