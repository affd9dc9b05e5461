//! `QuorumCleaner`: cleans up residues on several nodes, in pipelined batches.

use std::{sync::Arc, time::Duration};

use super::{BroadcastOptions, NodeConnections, Redlock, Response, Responses};
use crate::{
    backend::{
        CleanupLimits, ResidueCleaner,
        error::BackendError,
        redis::{
            CHECK_INTERVAL, Exchange, NodeError, NodeErrorKind, PIPELINE_MAX, Request,
            requests::{Ping, Release, ReleaseReply},
        },
    },
    core::{
        claim::{Claim, Residue},
        node_reply::Vote,
        quorum::NodeSet,
    },
    sys::clock::{self, Moment},
};

/// Maximum wait for the replies of several nodes, of which some may not reply at all; enough for a
/// slow connection. A later reply counts at the next try.
const REPLY_WAIT_MAX: Duration = Duration::from_millis(250);

pub(super) struct QuorumCleaner {
    redlock: Arc<Redlock>,
    /// Open when they are first used.
    connections: NodeConnections,
}

impl ResidueCleaner for QuorumCleaner {
    /// Skips a node for the remaining residues once it does not reply or cannot be reached.
    fn clean_up(
        &mut self,
        residues: &mut [(&Claim, &mut Residue)],
        limits: CleanupLimits<'_>,
    ) -> Option<BackendError> {
        let now = clock::now();
        // Skip nodes in back-off; otherwise, many residues for them could delay the clean-up of
        // others. At a shutdown there is no later try.
        let is_skipped = |node: &usize| {
            matches!(limits, CleanupLimits::Unless(_))
                && self.redlock.node(*node).health.is_backing_off(now)
        };
        let skipped: NodeSet = self.redlock.all_nodes().iter().filter(is_skipped).collect();
        let (mut unreachable, mut error) = (skipped, None);
        for batch in residues.chunks_mut(PIPELINE_MAX) {
            error = self.release_batch(batch, &mut unreachable, limits).or(error);
        }
        let is_left =
            |(_, residue): &(&Claim, &mut Residue)| !residue.nodes.intersection(skipped).is_empty();
        error.or_else(|| {
            let kind = NodeErrorKind::BackingOff;
            let failure = NodeError::not_applied(kind);
            residues.iter().any(is_left).then_some(BackendError::Node(failure))
        })
    }

    fn close(&mut self) {
        self.connections = self.redlock.reserved_connections();
    }
}

impl QuorumCleaner {
    pub(super) fn new(redlock: Arc<Redlock>) -> QuorumCleaner {
        QuorumCleaner { connections: redlock.reserved_connections(), redlock }
    }

    /// Tries each residue of a batch once, and removes from it the nodes that confirm. Skips the
    /// nodes in `unreachable`, and adds those that do not reply or cannot be reached.
    fn release_batch(
        &mut self,
        batch: &mut [(&Claim, &mut Residue)],
        unreachable: &mut NodeSet,
        limits: CleanupLimits<'_>,
    ) -> Option<BackendError> {
        let (count, mut error) = (batch.len(), None);
        for (claim, residue) in batch.iter_mut() {
            let targets = residue.nodes.difference(*unreachable);
            let Some(round) = self.round(targets, limits) else { continue };
            let waits = count == 1 || !self.can_pipeline(targets);
            let wait_until = if waits { round.wait_until } else { clock::now() };
            let round = BroadcastOptions { wait_until, ..round };
            let responses = self.release_one(claim, residue, round, limits);
            if waits {
                *unreachable =
                    unreachable.union(responses.timed_out()).union(self.not_connected(&responses));
                if !residue.is_empty() {
                    error = Some(BackendError::from_responses(&self.redlock, responses, |_| {
                        "cleaned up".into()
                    }));
                }
            }
        }
        error = self.await_acks(batch, unreachable, limits).or(error);
        batch.iter_mut().for_each(|(_, residue)| residue.drop_acknowledged());
        error
    }

    /// Releases residue on the nodes of `round`, and removes the nodes that confirm from the entry.
    fn release_one(
        &mut self,
        claim: &Claim,
        residue: &mut Residue,
        round: BroadcastOptions<'_>,
        limits: CleanupLimits<'_>,
    ) -> Responses<ReleaseReply> {
        let release = Release::of_claim(claim, &residue.queue_entry);
        let mut responses = self.ask(round, limits, |_| release, |_, _| Vote::Yes);
        let replied = responses.nodes_where(|response| matches!(response, Response::Replied(_)));
        residue.nodes = residue.nodes.difference(replied);
        residue.pending_acks.append(&mut responses.pending_acks);
        responses
    }

    /// Pings the nodes with unread replies. The reply to the ping comes after those replies.
    fn await_acks(
        &mut self,
        batch: &[(&Claim, &mut Residue)],
        unreachable: &mut NodeSet,
        limits: CleanupLimits<'_>,
    ) -> Option<BackendError> {
        let targets = batch
            .iter()
            .fold(NodeSet::EMPTY, |targets, (_, residue)| targets.union(residue.awaiting_ack()));
        let targets = targets.difference(*unreachable);
        let round = self.round(targets, limits)?;
        let responses = self.ask(round, limits, |_| Ping, |_, _| Vote::Yes);
        *unreachable = unreachable.union(responses.timed_out());
        let answered = responses.nodes_voting(Vote::Yes);
        (!targets.difference(answered).is_empty())
            .then(|| BackendError::from_responses(&self.redlock, responses, |()| "replied".into()))
    }

    /// A broadcast to these nodes; `None` if there are none, or no time for a reply. Each has a new
    /// deadline: an expired one would close connections to healthy nodes.
    fn round(
        &self,
        targets: NodeSet,
        limits: CleanupLimits<'_>,
    ) -> Option<BroadcastOptions<'static>> {
        let now = clock::now();
        let round = |deadline| BroadcastOptions::awaiting_all(targets, deadline);
        match limits {
            _ if targets.is_empty() => None,
            CleanupLimits::Unless(_) => {
                let round = round(now.saturating_add(self.redlock.operation_timeout()));
                let wait_until = round.deadline.min(now.saturating_add(REPLY_WAIT_MAX));
                Some(BroadcastOptions { wait_until, ..round })
            }
            CleanupLimits::HalfUntil(end) if now < end => {
                Some(round(now.saturating_add(end.duration_since(now) / 2)))
            }
            CleanupLimits::HalfUntil(_) => None,
        }
    }

    /// Sends a request and collects the replies.
    fn ask<C: Request>(
        &mut self,
        round: BroadcastOptions<'_>,
        limits: CleanupLimits<'_>,
        call: impl Fn(usize) -> C,
        vote: impl Fn(usize, &Exchange<C::Reply>) -> Vote,
    ) -> Responses<C::Reply> {
        let mut check = |now: Moment| match limits {
            CleanupLimits::Unless(must_end) if must_end() => None,
            _ => Some(now.saturating_add(CHECK_INTERVAL)),
        };
        let on_idle: Option<&mut dyn FnMut(Moment) -> Option<Moment>> = match limits {
            CleanupLimits::Unless(_) => Some(&mut check),
            CleanupLimits::HalfUntil(_) => None,
        };
        let round = BroadcastOptions { on_idle, ..round };
        self.redlock.ask(&mut self.connections, round, call, vote)
    }

    /// Whether requests to these nodes can be sent now, and their replies read later.
    fn can_pipeline(&self, nodes: NodeSet) -> bool {
        nodes.iter().all(|node| {
            self.connections.0[node].is_connected()
                && self.connections.0[node].unread_count() < PIPELINE_MAX
        })
    }

    /// Nodes to which nothing was sent because there is no connection.
    fn not_connected<T>(&self, responses: &Responses<T>) -> NodeSet {
        let unsent = responses.nodes_where(
            |response| matches!(response, Response::Failed(failure) if !failure.outcome_unknown),
        );
        unsent.iter().filter(|node| !self.connections.0[*node].is_connected()).collect()
    }
}
