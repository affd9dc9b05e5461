//! Releasing a lock on all nodes, with a second request where the first reply is lost.

use super::{BroadcastOptions, NodeConnections, Redlock, Response, responses::Responses};
use crate::{
    backend::{
        ReleaseReport, Releases,
        error::BackendError,
        redis::{
            Exchange, NodeError, NodeErrorKind, Urgency, release_any_kind,
            requests::{Release, ReleaseReply},
        },
    },
    core::{
        ack::PendingAcks,
        claim::{Claim, Residue},
        holder::Holder,
        key::LockKey,
        kind::{LockKind, is_group},
        lease::Lease,
        node_reply::{NodeReply, Vote},
        quorum::{NodeSet, quorum},
    },
    lock_info::Released,
    sys::clock::{self, Moment},
};

/// What to release.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReleaseRequest<'a> {
    /// The request to each node.
    release: Release<'a>,
    /// The lease was valid until this release.
    was_held: bool,
    /// Nodes that have not replied yet to the request for the lock.
    unanswered: NodeSet,
    /// Wait for all nodes, because nobody repeats this release on nodes that miss it.
    wait_for_all: bool,
}

impl<'a> ReleaseRequest<'a> {
    pub(crate) fn new(release: Release<'a>, was_held: bool) -> ReleaseRequest<'a> {
        let unanswered = NodeSet::EMPTY;
        ReleaseRequest { release, was_held, unanswered, wait_for_all: false }
    }

    pub(crate) fn vote(_: usize, exchange: &Exchange<ReleaseReply>) -> Vote {
        match exchange.reply {
            ReleaseReply::Released { .. } | ReleaseReply::Gone { .. } => Vote::Yes,
            ReleaseReply::HeldByOther(_) | ReleaseReply::WrongType => Vote::No,
            ReleaseReply::Late => Vote::Unknown,
        }
    }

    /// Asks the nodes in reverse order, because waiters usually queue on the first node. When that
    /// node hands the lock over, the releases on the other nodes are then already in flight.
    fn broadcast_options(&self, targets: NodeSet, deadline: Moment) -> BroadcastOptions<'static> {
        BroadcastOptions {
            reverse_order: true,
            wait_for_all: !self.was_held || self.wait_for_all,
            preferred: self.unanswered,
            ..BroadcastOptions::new(targets, deadline)
        }
    }
}

/// Result of a release, and the nodes on which its outcome is not known.
#[derive(Debug)]
pub(crate) struct ReleaseOutcome {
    pub(crate) result: Result<Released, BackendError>,
    /// Nodes on which the request failed.
    pub(crate) unconfirmed: NodeSet,
    /// Nodes whose replies were not awaited.
    pub(crate) unacknowledged: PendingAcks,
    /// Nodes that reported that they have released the lock.
    pub(crate) released_on: NodeSet,
}

impl Releases for Redlock {
    /// Releases the lock of a lease that has ended, over reserved connections if the pool is
    /// exhausted.
    fn release_lease(&self, lease: &Lease, was_held: bool, deadline: Moment) -> ReleaseReport {
        let release = Release::of_claim(&lease.claim, &lease.queue_entry);
        let unanswered = lease.in_flight.unanswered_at(clock::now());
        let request = ReleaseRequest { unanswered, ..ReleaseRequest::new(release, was_held) };
        let release = |connections: &mut _| self.release(connections, request, deadline);
        let outcome = self.pool().with_connections(deadline, release);
        let outcome = outcome.unwrap_or_else(|| self.no_turn());
        let residues = self.release_residues(lease, &outcome);
        ReleaseReport { result: outcome.result, residues }
    }

    /// Releases the lock if its holder, or one of its holders, has this id. Asks all nodes, even
    /// those in back-off, and once more if one does not reply. Otherwise such a node, if it is the
    /// queue node, could keep the lock from others for the rest of the ttl.
    fn release_id(
        &self,
        key: &LockKey,
        id: &[u8],
        was_held: bool,
        deadline: Moment,
    ) -> Result<Released, BackendError> {
        let mut connections = self.pool().get(Urgency::Release, deadline)?;
        release_any_kind(id, |kind| {
            let request = ReleaseRequest::new(Release::new(kind, key, id), was_held);
            let request = ReleaseRequest { wait_for_all: true, ..request };
            // A silent node must leave time for a second request: the lock may be held by a group,
            // or by an id whose text this is.
            let is_last = kind != LockKind::Mutex;
            let until = if is_last { deadline } else { deadline.halfway() };
            self.release(&mut connections, request, until).result
        })
    }

    fn lease_residue(&self, lease: &Lease) -> Residue {
        let may_be_in_flight = clock::now() < lease.in_flight.broken_until;
        let nodes = if may_be_in_flight { self.all_nodes() } else { lease.may_hold() };
        lease.residue(nodes)
    }

    fn clean_up_once(
        &self,
        claim: &Claim,
        residue: &Residue,
        deadline: Moment,
    ) -> Result<(), BackendError> {
        let request = ReleaseRequest::new(Release::of_claim(claim, &residue.queue_entry), false);
        let release = |connections: &mut _| self.release(connections, request, deadline);
        let outcome = self.pool().with_reserved(deadline, release);
        outcome.unwrap_or_else(|| self.no_turn()).result.map(drop)
    }

    /// Waits for a quorum only, because the clean-up queue reaches the other nodes.
    fn complete_release(&self, lease: &Lease, deadline: Moment) -> Result<(), BackendError> {
        self.release_lease(lease, true, deadline).result.map(drop)
    }
}

impl Redlock {
    /// What a release may have left.
    fn release_residues(&self, lease: &Lease, outcome: &ReleaseOutcome) -> Vec<Residue> {
        let (now, in_flight, may_hold) = (clock::now(), lease.in_flight, lease.may_hold());
        let residue = |nodes: NodeSet, in_flight_until, pending_acks| Residue {
            pending_acks,
            ..Residue::new(nodes, &lease.queue_entry, in_flight_until)
        };
        let failed_on = may_hold.intersection(outcome.unconfirmed);
        let mut residues = vec![residue(failed_on, now, PendingAcks::new())];
        // Most of these acks arrive when their connections are used next.
        let mut acks = outcome.unacknowledged.clone();
        acks.retain(|(node, _)| may_hold.contains(*node));
        let follow_up_at = now.saturating_add(self.operation_timeout());
        residues.push(residue(acks.iter().map(|(node, _)| *node).collect(), follow_up_at, acks));
        // A request that is still in flight would find the lock free and acquire it again, although
        // it has no holder any more.
        let (nodes, until) =
            in_flight.left_after_release(now, self.all_nodes(), outcome.released_on);
        residues.push(residue(nodes, until, PendingAcks::new()));
        residues.retain(|residue| !residue.nodes.is_empty());
        residues
    }

    /// There was no time to send the release.
    fn no_turn(&self) -> ReleaseOutcome {
        let not_sent = NodeError::not_applied(NodeErrorKind::TimedOut);
        ReleaseOutcome {
            result: Err(BackendError::Node(not_sent)),
            unconfirmed: self.all_nodes(),
            unacknowledged: PendingAcks::new(),
            released_on: NodeSet::EMPTY,
        }
    }

    /// Sends the release to all nodes, and once more to the nodes whose reply was lost. If it has
    /// granted the lock to the first waiters only, their next requests grant it to the others.
    ///
    /// If a node replies to the second request that the lock is free, it has applied the first one.
    /// If we held the lock until this release, the reply that another client holds the lock means
    /// the same, because a release hands the lock over.
    pub(super) fn release(
        &self,
        connections: &mut NodeConnections,
        request: ReleaseRequest<'_>,
        deadline: Moment,
    ) -> ReleaseOutcome {
        let mut ask = |options: BroadcastOptions<'_>| {
            self.ask(connections, options, |_| request.release, ReleaseRequest::vote)
        };
        // The first request gets half of the time, so that the second has the other half.
        let first = request.broadcast_options(self.all_nodes(), deadline.halfway());
        let mut responses = ask(BroadcastOptions { will_retry: true, ..first });
        let maybe_applied = responses.outcome_unknown();
        let mut repeat = nodes_to_retry(&responses);
        if is_group(request.release.id) {
            // It would release the members that the first request has let in.
            repeat = repeat.difference(maybe_applied);
        }
        let is_certain = !request.wait_for_all && is_certain(&responses, request.was_held);
        if !repeat.is_empty() && !is_certain {
            let second = request.broadcast_options(repeat, deadline);
            let second = ask(BroadcastOptions { prior_votes: responses.votes.clone(), ..second });
            responses.replace(repeat, second);
        }
        self.evaluate_release(responses, request.was_held, maybe_applied)
    }

    fn evaluate_release(
        &self,
        mut responses: Responses<ReleaseReply>,
        was_held: bool,
        maybe_applied: NodeSet,
    ) -> ReleaseOutcome {
        let needed = quorum(self.len());
        let (mut released, mut gone, mut known) = (0, 0, 0);
        let (mut unconfirmed, mut released_on) = (NodeSet::EMPTY, NodeSet::EMPTY);
        let mut other: Option<Holder> = None;
        let mut replies = Vec::new();
        let mut unacknowledged = std::mem::take(&mut responses.pending_acks);
        unacknowledged.retain(|(node, _)| matches!(responses.by_node[*node], Response::Pending));
        for (node, response) in responses.by_node.iter().enumerate() {
            let maybe_before = maybe_applied.contains(node);
            match response {
                Response::Replied(exchange) => match &exchange.reply {
                    ReleaseReply::Released { .. } => {
                        released += 1;
                        released_on = released_on.union(NodeSet::single(node));
                    }
                    ReleaseReply::Gone { .. } if maybe_before => released += 1,
                    ReleaseReply::HeldByOther(_) if maybe_before && was_held => released += 1,
                    ReleaseReply::Gone { .. } | ReleaseReply::WrongType | ReleaseReply::Late => {
                        gone += 1
                    }
                    ReleaseReply::HeldByOther(holder) => {
                        known += 1;
                        replies.push(NodeReply::new(
                            self.node(node).label(),
                            Vote::No,
                            format!("held by {holder}"),
                        ));
                        other.get_or_insert_with(|| holder.clone());
                    }
                },
                Response::Failed(_) => unconfirmed = unconfirmed.union(NodeSet::single(node)),
                Response::Pending | Response::NotAsked => {}
            }
        }
        known += released + gone;
        let result =
            if released >= needed || (was_held && released > 0 && released + gone >= needed) {
                Ok(Released::Released)
            } else if known < needed || (was_held && known - released <= self.len() - needed) {
                // Do not report a lock that we held until this release as lost: the nodes that have
                // not replied may have kept it.
                Err(BackendError::from_responses(self, responses, describe))
            } else if let Some(holder) = other {
                Ok(Released::OwnedByOther(holder.with_nodes(replies)))
            } else {
                Ok(Released::Gone)
            };
        ReleaseOutcome { result, unconfirmed, unacknowledged, released_on }
    }
}

fn is_certain(responses: &Responses<ReleaseReply>, was_held: bool) -> bool {
    was_held && responses.nodes_voting(Vote::Yes).len() >= quorum(responses.votes.len())
}

/// Nodes on which another attempt may succeed. A node whose server is no longer a master is one of
/// them, because a new connection may lead to the new master.
fn nodes_to_retry(responses: &Responses<ReleaseReply>) -> NodeSet {
    responses.nodes_where(|response| {
        matches!(
            response, Response::Failed(failure) if failure.is_transient() || failure.is_not_master()
        )
    })
}

fn describe(reply: &ReleaseReply) -> String {
    match reply {
        ReleaseReply::Released { .. } => "released".into(),
        ReleaseReply::Gone { .. } => "not held".into(),
        ReleaseReply::HeldByOther(holder) => format!("held by {holder}"),
        ReleaseReply::WrongType => "its key holds something that is not a lock".into(),
        ReleaseReply::Late => "the request came too late".into(),
    }
}
